"""What it is worth to train summaries: `python scripts/self_summary_study.py --out DIR [--quick]`.

    arm          when the context is full           what reinforcement trains
    trained      the policy writes a summary        every sampled token, summaries included (row R3)
    untrained    the policy writes a summary        every sampled token but those of summaries
    truncation   the oldest turns are dropped       every sampled token

The tasks (`env/tasks/recall.py`) show several facts in their first file and ask for one of them windows later; the
turns do not suffice for a second look. All arms start from one policy, fine-tuned on drills of looking facts up and on
scripted episodes of both harnesses, in which summaries note any of the facts; they take the same number of steps on the
same tasks and are evaluated on the same held-out tasks.

In: nothing. Out: `DIR/self_summary_study.json` (flat figures), `curves.jsonl` (one line a step) and a `.png`; exit code
0 when every arm was run to its end. An interrupted study goes on with the first arm that is not finished.

    success_ARM, start_success[_truncation]     share of episodes that wrote the asked word, mean of tasks and seeds
    trained_minus_{truncation,untrained}[_ci_*] paired over tasks, 95 % bootstrap
    summary_right_{start,trained,untrained}     share of first summaries that hold the asked word
    fact_visible_truncation                     share of episodes whose last window still shows the fact; should be 0
    notes_truncation                            sampled tokens outside of calls an episode: notes of another kind

Source: report §4.1 (self-summarisation: the final reward goes to every token of the chain); row R3.
Choice: intervals are over tasks, not over seeds of training; the full run has three seeds, `--quick` one.
Choice: no pretraining; the policy learns this family from scratch, its head being its embedding matrix. A third of
the usual learning rate, and normed queries and keys: without either it had not learned to look words up in these steps.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

from composer2.config import load_config, save_config
from composer2.env.harness import EpisodeLimits
from composer2.env.tasks.recall import WORDS, RecallConfig, drill, recall_task, scripted_examples, scripted_rollout
from composer2.env.template import TinyTemplate
from composer2.env.tools.lines import number_lines
from composer2.log import Console, Stage
from composer2.model.checkpoint.native import load_model, save_model
from composer2.model.config import ModelConfig
from composer2.model.pretrain.config import SftConfig
from composer2.model.pretrain.data import Example
from composer2.model.pretrain.phases import RunControl, run_sft
from composer2.model.tokenizer import Tokenizer
from composer2.model.transformer import Transformer, init_weights
from composer2.recipes import tiny
from composer2.rl.evaluate import passed_table, run_tasks
from composer2.rl.metrics import bootstrap_mean, paired_difference, pass_at_1
from composer2.rl.reward import RewardComponent, RewardConfig
from composer2.rl.system.loop import LoopHooks, RLLoop
from composer2.rl.system.weight_sync import FolderSink
from composer2.rl.system.worker import RolloutPool
from composer2.rl.train import RLConfig, make_optimizer
from composer2.run import write_json
from composer2.runner import EngineConfig, RunnerSpec, make_runner, stable_seed
from composer2.types import Group, RolloutStatus, SpanKind, Task

ARMS: Mapping[str, Mapping[str, Any]] = {
    "trained": {"on_full": "summarize", "train_summaries": True},
    "untrained": {"on_full": "summarize", "train_summaries": False},
    "truncation": {"on_full": "truncate", "train_summaries": True},
}
CURVES = ("pass_rate", "entropy", "grad_norm", "summaries", "mismatch_p99")
TOKENIZER_TASKS, VOCAB_SIZE = 400, 512


def episode_limits(recall: RecallConfig) -> EpisodeLimits:
    """Room for one or two files beside the prompt."""
    return EpisodeLimits(
        max_turns=recall.num_turns, max_tokens_per_turn=12, max_calls_per_turn=1, max_result_tokens=52,
        context_budget=132, max_summaries=4, max_summary_tokens=8, run_timeout=0.05,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides a study."""

    recall: RecallConfig = field(default_factory=RecallConfig)
    model: ModelConfig = field(
        default_factory=lambda: replace(
            tiny().model, hidden_size=64, num_hidden_layers=3, intermediate_size=160, moe_intermediate_size=48,
            n_routed_experts=4, attention="grouped", num_key_value_heads=2, qk_norm="head", tie_word_embeddings=True,
        )
    )  # fmt: skip
    drill: SftConfig = field(
        default_factory=lambda: SftConfig(
            num_steps=1000, schedule="constant", lr=1e-3, batch_size=24, row_len=128, autocast="off"
        )
    )
    sft: SftConfig = field(
        default_factory=lambda: SftConfig(
            num_steps=1200, schedule_steps=1800, lr=1e-3, batch_size=24, row_len=128, autocast="off"
        )
    )
    rl: RLConfig = field(
        default_factory=lambda: RLConfig(
            num_steps=60, prompts_per_step=8, lr=3e-4, row_length=256, max_staleness=0, reference_every=1000,
            reward=RewardConfig(components=(RewardComponent(name="correctness", weight=1.0),)),
        )
    )  # fmt: skip
    num_tasks: int = 240
    """Held-out tasks."""
    num_samples: int = 4
    """Episodes of each."""
    seeds: tuple[int, ...] = (0,)


def settings(quick: bool) -> Settings:
    """The study of `--quick`, or three seeds of twice the steps."""
    base = Settings()
    return base if quick else replace(base, rl=replace(base.rl, num_steps=120), seeds=(0, 1, 2))


def held_out_tasks(config: Settings) -> list[Task]:
    """The same tasks for every policy."""
    return [recall_task(random.Random(stable_seed("held-out", n)), config.recall) for n in range(config.num_tasks)]


def make_start(folder: Path, config: Settings, console: Console) -> None:
    """Tokenizer and fine-tuned policy in `folder`, made unless they are there; resumes where it was interrupted."""
    if (folder / "sft.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(config.recall)
    tokenizer.save(folder / "tokenizer.json")
    template = TinyTemplate(tokenizer)
    check_sizes(config, template)
    model = Transformer(replace(config.model, vocab_size=tokenizer.vocab_size))
    init_weights(model, 0)
    tokens = 0
    for name, phase, examples in (("drill", config.drill, drills_at), ("sft", config.sft, examples_at)):
        with console.stage(name, total=phase.num_steps) as stage:
            result = run_sft(
                model,
                partial(examples, config=config, template=template),
                phase,
                pad_id=tokenizer.special_id("pad"),
                mtp=None,
                control=RunControl(folder=folder / "checkpoints" / name, on_step=partial(show, stage)),
            )
        tokens += result.tokens
    save_model(folder / "models" / "sft", model)
    write_json(folder / "sft.json", {"sft_tokens": tokens})


def show(stage: Stage, metrics: Mapping[str, Any]) -> None:
    """A step of fine-tuning on the console."""
    stage.update(int(metrics["step"]), loss=float(metrics["loss"]))


def make_tokenizer(recall: RecallConfig) -> Tokenizer:
    """One in which names are single tokens."""
    rng = random.Random(0)
    tasks = [recall_task(rng, recall) for _ in range(TOKENIZER_TASKS)]
    texts = [
        "\n".join([t.instruction, *map(number_lines, t.files.values()), *t.files, *map(repr, t.meta["facts"].values())])
        for t in tasks
    ]
    return Tokenizer.train(texts, VOCAB_SIZE)


def check_sizes(config: Settings, template: TinyTemplate) -> None:
    """ValueError when the tokenizer makes so many tokens of texts that a turn, a summary or an answer does not fit."""
    limits = episode_limits(config.recall)
    room = {SpanKind.ACTION: limits.max_tokens_per_turn, SpanKind.SUMMARY: limits.max_summary_tokens}
    for index, task in enumerate(held_out_tasks(config)):
        rollout = scripted_rollout(task, template, limits, random.Random(index), config.recall)
        spans = [span for segment in rollout.segments for span in segment.spans if span.kind in room]
        long = sum(span.stop - span.start > room[span.kind] for span in spans)
        if rollout.events or long:
            problem = dict(rollout.events) or f"{long} turns that the policy could not write"
            raise ValueError(f"the tokenizer leads to {problem}, accepted is one with shorter texts")


def examples_at(step: int, config: Settings, template: TinyTemplate) -> list[Example]:
    """The fine-tuning examples of one step: windows of scripted episodes."""
    rng = random.Random(stable_seed("sft", step))
    limits = episode_limits(config.recall)
    found: list[Example] = []
    while len(found) < config.sft.batch_size:
        windows = scripted_examples(rng, template, limits, config.recall)
        found += [(window.token_ids, window.weights) for window in windows]
    return found


def drills_at(step: int, config: Settings, template: TinyTemplate) -> list[Example]:
    """The drills of one step."""
    rng = random.Random(stable_seed("drill", step))
    found = (drill(rng, template, config.recall) for _ in range(config.drill.batch_size))
    return [(window.token_ids, window.weights) for window in found]


def run_arm(out: Path, config: Settings, arm: str, seed: int, console: Console) -> dict[str, Any]:
    """Evaluation at the start, RL, evaluation at the end: figures, tables [N, K] and curves."""
    started = time.perf_counter()
    fields = ARMS[arm]
    rl = replace(config.rl, advantage=replace(config.rl.advantage, train_summaries=fields["train_summaries"]))
    spec = RunnerSpec(
        model_dir=out / "start" / "models" / "sft",
        tokenizer_path=out / "start" / "tokenizer.json",
        episode=replace(episode_limits(config.recall), on_full=fields["on_full"]),
        engine=EngineConfig(max_len=episode_limits(config.recall).context_budget),
        lockstep=rl.max_staleness == 0,
    )
    model, tokenizer = load_model(spec.model_dir), Tokenizer.load(spec.tokenizer_path)
    tasks = held_out_tasks(config)
    held_out = {task.task_id for task in tasks}
    steps: list[dict[str, float]] = []

    def on_step(done: int, metrics: dict[str, Any], groups: Sequence[Group]) -> None:
        assert held_out.isdisjoint(group.task.task_id for group in groups)
        steps.append({name: float(metrics.get(name, 0.0)) for name in CURVES})
        stage.update(done, passed=steps[-1]["pass_rate"], entropy=steps[-1]["entropy"])

    with (
        RolloutPool(make_runner, spec, lockstep=spec.lockstep) as pool,
        console.stage(f"rl {arm}", total=rl.num_steps, detail=f"seed {seed}") as stage,
    ):
        before = evaluate(pool, tasks, tokenizer, config.num_samples)
        loop = RLLoop(
            model, make_optimizer(model, rl), rl, pool=pool, sink=FolderSink(out / "weights" / f"{arm}-{seed}"),
            task_at=lambda index: recall_task(random.Random(stable_seed("rl", seed, index)), config.recall), seed=seed,
        )  # fmt: skip
        # Nothing is kept of an arm that was interrupted.
        hooks = LoopHooks(
            on_step=on_step, checkpoint=lambda *_: None, evaluate=lambda *_: None, should_stop=lambda: False
        )
        loop.run(hooks)
        after = evaluate(pool, tasks, tokenizer, config.num_samples)
    return {"start": before, "end": after, "steps": steps, "seconds": time.perf_counter() - started}


def evaluate(pool: RolloutPool, tasks: Sequence[Task], tokenizer: Tokenizer, num_samples: int) -> dict[str, Any]:
    """The held-out tasks on the weights the pool has: who passed, and what the chains were like."""
    groups = run_tasks(pool, tasks, num_samples=num_samples, seed=1)
    return {"passed": passed_table(groups).tolist(), "chains": chain_figures(groups, tokenizer)}


def chain_figures(groups: Sequence[Group], tokenizer: Tokenizer) -> dict[str, float]:
    """What happened at full windows: means over episodes, or over those episodes that a figure speaks of."""
    seen: dict[str, list[float]] = {}
    for group in groups:
        fact = f" {group.task.meta['asked']} {group.task.meta['value']}"
        for rollout in group.rollouts:
            summaries = [
                tokenizer.decode(segment.token_ids[span.start : span.stop].tolist())
                for segment in rollout.segments
                for span in segment.spans
                if span.kind is SpanKind.SUMMARY
            ]
            last = tokenizer.decode(rollout.segments[-1].token_ids.tolist()) if rollout.segments else ""
            values = {
                "summaries_per_episode": float(len(summaries)),
                "several_summaries_frac": float(len(summaries) > 1),
                "fact_visible": float(f"#{fact}\n" in last),
                "notes": float(rollout.stats.thinking_tokens),
                "infra_failures": float(rollout.status is RolloutStatus.INFRASTRUCTURE),
            }
            if summaries:
                values["summary_right"] = float(f"{fact}<" in summaries[0])
            if len(summaries) == 1:
                values["success_one_summary"] = float(rollout.passed)
            elif summaries:
                values["success_several_summaries"] = float(rollout.passed)
            for name, value in values.items():
                seen.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in seen.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def success(found: Sequence[Mapping[str, Any]], when: str) -> np.ndarray:
    """float64 [N]: success of every task, mean over its episodes and over seeds."""
    return np.mean([pass_at_1(np.array(one[when]["passed"])) for one in found], axis=0)


def summarise(found: Mapping[str, Sequence[Mapping[str, Any]]], config: Settings) -> dict[str, float]:
    """Flat figures of all arms; `found[arm]` has one result for each seed."""
    rng = np.random.default_rng(0)
    figures: dict[str, float] = {
        "num_tasks": config.num_tasks,
        "num_samples": config.num_samples,
        "num_seeds": len(config.seeds),
        "rl_steps": config.rl.num_steps,
        "chance": 1.0 / len(WORDS),
        "start_success": float(success(found["trained"], "start").mean()),
        "start_success_truncation": float(success(found["truncation"], "start").mean()),
    }
    ends = {arm: success(found[arm], "end") for arm in ARMS}
    for arm, end_N in ends.items():
        interval = bootstrap_mean(end_N, rng)
        figures[f"success_{arm}"] = interval.mean
        figures[f"success_{arm}_ci_low"], figures[f"success_{arm}_ci_high"] = interval.low, interval.high
        figures[f"seconds_{arm}"] = sum(one["seconds"] for one in found[arm])
    for better, worse in (("trained", "truncation"), ("trained", "untrained"), ("untrained", "truncation")):
        gain = paired_difference(ends[worse], ends[better], rng)
        name = f"{better}_minus_{worse}"
        figures |= {name: gain.mean, f"{name}_ci_low": gain.low, f"{name}_ci_high": gain.high}

    def chains(arm: str, when: str) -> dict[str, float]:
        tables = [one[when]["chains"] for one in found[arm]]
        return {name: float(np.mean([t[name] for t in tables if name in t])) for name in set().union(*tables)}

    start, trained, untrained = chains("trained", "start"), chains("trained", "end"), chains("untrained", "end")
    cut = chains("truncation", "end")
    for name in ("summaries_per_episode", "several_summaries_frac", "success_one_summary", "success_several_summaries"):
        figures[name] = trained.get(name, 0.0)
    for when, table in (("start", start), ("trained", trained), ("untrained", untrained)):
        figures[f"summary_right_{when}"] = table.get("summary_right", 0.0)
    figures |= {"fact_visible_truncation": cut["fact_visible"], "notes_truncation": cut["notes"]}
    figures["infra_failures"] = max(table["infra_failures"] for table in (start, trained, untrained, cut))
    return figures


def draw(found: Mapping[str, Sequence[Mapping[str, Any]]], figures: Mapping[str, float], path: Path) -> None:
    """Success over RL steps by arm, and at the end on held-out tasks."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for arm, results in found.items():
        curve = np.mean([[step["pass_rate"] for step in one["steps"]] for one in results], axis=0)
        width = min(5, len(curve))
        left.plot(np.arange(width, len(curve) + 1), np.convolve(curve, np.ones(width) / width, "valid"), label=arm)
    left.axhline(figures["chance"], color="grey", linestyle=":", label="a guess")
    left.set(title="success on training tasks (mean of 5 steps)", xlabel="RL step", ylim=(0, 1))
    left.legend()
    bars = {
        "start": figures["start_success"],
        "start,\ntruncation": figures["start_success_truncation"],
        **{arm: figures[f"success_{arm}"] for arm in ARMS},
    }
    right.bar(list(bars), list(bars.values()), color=["lightgrey", "lightgrey", "C0", "C1", "C2"])
    for x, arm in enumerate(ARMS, start=2):
        low, high = figures[f"success_{arm}_ci_low"], figures[f"success_{arm}_ci_high"]
        right.plot([x, x], [low, high], color="black")
    right.axhline(figures["chance"], color="grey", linestyle=":")
    right.set(title=f"success on {figures['num_tasks']:.0f} held-out tasks, 95 % intervals", ylim=(0, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def study(out: Path, config: Settings, console: Console) -> dict[str, float]:
    """Start, arms, figures; what is finished already is read from `out`."""
    torch.set_num_threads(1)
    (out / "arms").mkdir(parents=True, exist_ok=True)
    if (out / "config.json").exists() and load_config(out / "config.json", Settings) != config:
        raise ValueError(f"{out} holds a study of other settings, accepted is the same one, or another --out")
    save_config(out / "config.json", config)
    started = time.perf_counter()
    make_start(out / "start", config, console)
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for seed in config.seeds:
        for arm in ARMS:
            path = out / "arms" / f"{arm}-{seed}.json"
            if not path.exists():
                write_json(path, run_arm(out, config, arm, seed, console))
            found[arm].append(json.loads(path.read_text(encoding="utf-8")))
            console.note(
                f"{arm}, seed {seed}: {success(found[arm][-1:], 'end').mean():.3f} of held-out episodes solved"
            )
    figures = summarise(found, config) | {"seconds": time.perf_counter() - started}
    with (out / "curves.jsonl").open("w", encoding="utf-8") as file:
        for arm, results in found.items():
            for seed, one in zip(config.seeds, results, strict=True):
                for step, values in enumerate(one["steps"], start=1):
                    file.write(json.dumps({"arm": arm, "seed": seed, "step": step, **values}) + "\n")
    write_json(out / "self_summary_study.json", figures)
    draw(found, figures, out / "self_summary_study.png")
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with Console("rich") as console:
        figures = study(options.out, settings(options.quick), console)
    print(json.dumps({name: value for name, value in figures.items() if "success" in name or "minus" in name}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
