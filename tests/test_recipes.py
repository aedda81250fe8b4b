"""Presets: they construct, survive JSON, and `small` trains two steps of every stage at reduced width."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from composer2 import own_tries, pipeline
from composer2.config import from_json, load_config, to_json
from composer2.env.tasks.expert import OwnTriesConfig, sft_example
from composer2.env.tasks.procedural import generate_task
from composer2.log import Console, read_metrics
from composer2.model.checkpoint.native import load_model
from composer2.model.pretrain.corpus import SourceConfig
from composer2.model.pretrain.loss_fit import fit_loss
from composer2.pipeline import run_stages
from composer2.recipes import NEEDS_START, PRESETS, EvalConfig, RunConfig, small, tiny
from composer2.rl.advantage import AdvantageConfig
from composer2.rl.curriculum import CurriculumConfig
from composer2.rl.evaluate import EvalSpec
from composer2.rl.forge.stages import DomainShare, Stage
from composer2.rl.kl import KLConfig
from composer2.rl.reward import RewardConfig
from composer2.rl.system import loop
from composer2.run import Run
from composer2.runner import PodsConfig


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_constructs_and_survives_json(name):
    config = PRESETS[name]()
    assert config.preset == name
    assert from_json(RunConfig, to_json(config)) == config


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_consistent(name):
    config = PRESETS[name]()
    limits = config.episode
    assert limits.context_budget <= config.engine.max_len
    longest = max(config.model.max_position_embeddings, config.cpt.phase2_seq_len)
    assert config.engine.max_len <= longest or name in NEEDS_START
    assert config.cpt.phase1_seq_len <= config.model.max_position_embeddings
    assert config.engine.num_slots >= config.rl.group_size
    assert {spec.name for spec in config.eval.sets} >= {"test", "ood"}


def with_kl(config):
    return replace(config, advantage=AdvantageConfig(kl=KLConfig(weight=0.1)))


def stage(domain, num_prompts, max_context):
    share = DomainShare(domain=domain, ratio=1.0, max_context=max_context)
    return Stage(name="one", num_prompts=num_prompts, domains=(share,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: replace(c, device="tpu"), r"RunConfig.device is 'tpu', accepted is 'cpu' or 'cuda'"),
        (lambda c: replace(c, seed=-1), r"RunConfig.seed is -1, accepted is 0 to"),
        (lambda c: replace(c, eval=replace(c.eval, mismatch_tasks=-1)), r"EvalConfig.mismatch_tasks is -1, accepted"),
        (lambda c: replace(c, eval=replace(c.eval, sets=c.eval.sets[:1] * 2)), r"EvalConfig.sets names test, test,"),
        (
            lambda c: replace(c, eval=replace(c.eval, during=EvalSpec(name="tset", num_tasks=1))),
            r"EvalSpec.name is 'tset', accepted is one of test, .*nearest accepted: test",
        ),
        (lambda c: replace(c, engine=replace(c.engine, max_len=100)), r"RunConfig.engine.max_len is 100, accepted"),
        (lambda c: replace(c, engine=replace(c.engine, num_slots=4)), r"RunConfig.engine.num_slots is 4, accepted"),
        (lambda c: replace(c, credit="turns"), r"RunConfig.credit is 'turns', accepted is one of"),
        (
            lambda c: replace(c, credit="steps", rl=with_kl(c.rl)),
            r"rl.advantage.kl.weight is 0.1, accepted with credit steps is 0",
        ),
        (
            lambda c: replace(c, credit="steps", rl=replace(c.rl, advantage=AdvantageConfig(baseline="grpo"))),
            r"rl.advantage.baseline is 'grpo', accepted with credit steps is 'dr_grpo'",
        ),
        (lambda c: replace(c, stages=(stage("plan", 10, 300),)), r"domain 'plan' of 'one', .*nearest accepted: plain"),
        (
            lambda c: replace(c, stages=(stage("plain", 10, 50),)),
            r"max_context 50 of .plain. in .one., accepted",
        ),
        (lambda c: replace(c, stages=(stage("plain", 10, 300),)), r"stages plan 10 prompts, accepted is .*: 3520"),
        (
            lambda c: replace(c, stages=(stage("plain", 3520, 300),), curriculum=CurriculumConfig(strength=1.0)),
            r"RunConfig.curriculum.strength is 1.0, accepted with stages is 0",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        change(tiny())


def reduced_small(folder) -> RunConfig:
    """`small` with two optimizer steps a stage, narrow, on the CPU; depth, experts and lengths of the stages differ."""
    base = small()
    model = replace(
        base.model,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_attention_heads=2,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )
    one = EvalSpec(name="test", num_tasks=2, num_samples=2)
    return replace(
        base,
        device="cpu",
        vocab_size=400,
        corpus=replace(base.corpus, sources=(SourceConfig(path=str(folder)),), heldout_frac=0.3),
        model=model,
        cpt=replace(
            base.cpt,
            phase1_steps=2,
            phase1_rows=2,
            phase1_seq_len=64,
            phase2_steps=2,
            phase2_rows=2,
            phase2_seq_len=512,
            warmup_steps=0,
            num_eval_points=2,
            eval_rows=2,
        ),
        mtp=replace(base.mtp, num_steps=2, seq_len=64, rows=2),
        sft=replace(base.sft, num_steps=2, schedule_steps=2, batch_size=2),
        episode=replace(base.episode, max_turns=1, max_tokens_per_turn=8),
        pods=PodsConfig(backend="process", allow_unsafe=True),
        rl=replace(base.rl, num_steps=2, prompts_per_step=2, group_size=2, checkpoint_every=1),
        eval=EvalConfig(sets=(one,), during=one, mismatch_tasks=1),
    )


def rewards_by_hand(groups, config, step, seed):
    """An untrained policy earns nothing, and equal rewards train nothing."""
    return [
        replace(group, rollouts=tuple(replace(r, reward=float(r.sample_index)) for r in group.rollouts))
        for group in groups
    ]


@pytest.mark.slow
def test_small_takes_two_steps_of_every_stage_at_reduced_width(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "fit_loss", partial(fit_loss, min_points=2))  # two steps give two points
    monkeypatch.setattr(loop, "score_groups", rewards_by_hand)
    package = Path(__file__).parents[1] / "composer2"
    config = reduced_small(package / "rl")
    with Console("quiet") as console:
        run = Run(tmp_path / "run", config, console)
        assert run_stages(run, last="rl")
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    last = {record["stage"]: record["step"] for record in records}
    assert {name: last[name] for name in ("cpt", "mtp", "cpt-long", "sft", "rl")} == dict.fromkeys(
        ("cpt", "mtp", "cpt-long", "sft", "rl"), 2
    )
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 10
    assert np.isfinite(losses).all()
    for name in ("cpt", "mtp", "cpt-long", "sft", "rl"):
        assert (tmp_path / "run" / "models" / name / "config.json").is_file()
    assert all(record["num_tokens"] > 0 for record in records if record["stage"] == "rl")
    after, before = (load_model(tmp_path / "run" / "models" / name).state_dict() for name in ("rl", "sft"))
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    trained = load_model(tmp_path / "run" / "models" / "rl")
    assert trained.config.num_hidden_layers == small().model.num_hidden_layers
    assert trained.config.n_routed_experts == small().model.n_routed_experts


@pytest.mark.slow
@pytest.mark.parametrize("draws", ["curriculum", "stages"])
def test_draws_and_credit_of_the_config_reach_the_trainer(tmp_path, monkeypatch, draws):
    """Two steps with credit for turns, the tasks drawn by a curriculum after probes, or by stages."""
    monkeypatch.setattr(pipeline, "fit_loss", partial(fit_loss, min_points=2))
    config = replace(reduced_small(Path(__file__).parents[1] / "composer2" / "rl"), credit="steps")
    if draws == "curriculum":
        config = replace(config, curriculum=CurriculumConfig(strength=1.0, probes_per_family=1))
    else:
        config = replace(config, stages=(stage("search", 4, 300),))
    groups_seen = []

    def keep(groups, *arguments):
        groups_seen.extend(groups)
        return groups

    monkeypatch.setattr(loop, "score_groups", keep)
    with Console("quiet") as console:
        run = Run(tmp_path / "run", config, console)
        assert run_stages(run, last="rl")
    assert len(groups_seen) == 4
    if draws == "curriculum":
        assert set(run.result("probes")) == {"plain", "long", "unopened", "search"}
    else:
        assert {group.task.meta["variant"] for group in groups_seen} == {"search"}
        assert all(len(s.token_ids) <= 300 for group in groups_seen for r in group.rollouts for s in r.segments)
    # Rewards are all 0 here, but times differ: credit for turns sees them.
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(record["num_tokens"] > 0 for record in records if record["stage"] == "rl")


@pytest.mark.slow
def test_rounds_on_own_wrong_tries(tmp_path, monkeypatch):
    """Two rounds of two steps, interrupted after the first round's episodes and resumed on the same windows."""
    monkeypatch.setattr(pipeline, "fit_loss", partial(fit_loss, min_points=2))
    base = reduced_small(Path(__file__).parents[1] / "composer2" / "rl")
    episode = replace(base.episode, max_turns=2, locate_failures=True)
    config = replace(base, episode=episode, own_tries=OwnTriesConfig(num_rounds=2, num_tasks=2, num_steps=2))

    def failed_try(task, template, rollout, expert, max_tries):
        """An untrained policy never runs the tests; one window a rollout stands in for what it would have done."""
        return sft_example(task, template, random.Random(rollout.sample_index), expert)[:1]

    monkeypatch.setattr(own_tries, "after_own_tries", failed_try)
    with Console("quiet") as console:
        run = Run(tmp_path / "run", config, console)
        assert run_stages(run, last="cpt-long")
        run = Run(tmp_path / "run", config, console)
        pipeline.imitate_expert(run)
        before = load_model(run.model_dir("sft")).state_dict()
        stored = own_tries.collect(run, 0)
        assert len(stored) == 4
        run.close()
        run = Run(tmp_path / "run", config, console)
        monkeypatch.setattr(own_tries, "generate_task", None)  # nothing is drawn again for round 0
        with pytest.raises(TypeError):
            pipeline.stage_sft(run)  # round 0 ends on the stored windows, round 1 needs tasks
        run.close()
        monkeypatch.setattr(own_tries, "generate_task", generate_task)
        run = Run(tmp_path / "run", config, console)
        assert run_stages(run, last="sft")
    assert run.result("sft")["own_tries"] == 8
    assert run.result("sft")["sft_train_tokens"] > run.result("sft-expert")["sft_train_tokens"]
    for (ids, weights), (again, weights_again) in zip(stored, own_tries.collect(run, 0), strict=True):
        np.testing.assert_array_equal(ids, again)
        np.testing.assert_array_equal(weights, weights_again)
    after = load_model(run.model_dir("sft")).state_dict()
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])


def test_a_run_directory_belongs_to_one_process_at_a_time(tmp_path):
    config = reduced_small(Path(__file__).parents[1] / "composer2" / "rl")
    with Console("quiet") as console:
        run = Run(tmp_path / "run", config, console)
        with pytest.raises(ValueError, match=r"run is in use by another process, accepted is one at a time"):
            Run(tmp_path / "run", config, console)
        run.close()
        (tmp_path / "run" / "stages" / "data.json").write_text("{}")
        with pytest.raises(ValueError, match="another configuration"):
            Run(tmp_path / "run", replace(config, seed=1), console)
        Run(tmp_path / "run", config, console).close()


def test_a_run_is_resumed_with_another_reward_until_rl_has_ended(tmp_path):
    """Row R4: behaviours are weighed as they emerge, in the middle of a run."""
    config = reduced_small(Path(__file__).parents[1] / "composer2" / "rl")
    changed = replace(config, rl=replace(config.rl, reward=RewardConfig()))
    assert changed != config
    folder = tmp_path / "run"
    with Console("quiet") as console:
        Run(folder, config, console).close()
        (folder / "stages" / "sft.json").write_text("{}")
        Run(folder, changed, console).close()
        assert load_config(folder / "config.json", RunConfig) == changed
        assert load_config(folder / "config.until-1.json", RunConfig) == config
        (folder / "stages" / "rl.json").write_text("{}")
        with pytest.raises(ValueError, match=r"rl.reward differs from that of .*config.json, accepted after RL is"):
            Run(folder, config, console)
        Run(folder, changed, console).close()
