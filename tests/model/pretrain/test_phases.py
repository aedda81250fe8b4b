"""Phases: resume, context extension, fine-tuning, MTP from scratch and jointly."""

import numpy as np
import pytest
import torch

from composer2.model.config import ModelConfig
from composer2.model.pretrain.config import CptConfig, MtpConfig, SftConfig
from composer2.model.pretrain.data import pack_examples
from composer2.model.pretrain.loop import evaluate_loss, to_tensors
from composer2.model.pretrain.mtp import joint_loss, measure_mtp_acceptance, mid_run_copy, move_mtp, mtp_only_loss
from composer2.model.pretrain.phases import (
    RunControl,
    extend_context,
    long_context_config,
    run_cpt,
    run_long_context,
    run_sft,
    train_mtp_from_scratch,
)
from composer2.model.pretrain.state import CheckpointError, list_states

CPT = CptConfig(
    phase1_steps=6,
    phase1_seq_len=24,
    phase1_rows=4,
    phase2_steps=4,
    phase2_seq_len=48,
    phase2_rows=2,
    warmup_steps=2,
    num_eval_points=2,
    eval_rows=4,
    autocast="off",
)
CPU = torch.device("cpu")


def same_bits(left, right) -> bool:
    mine, theirs = left.state_dict(), right.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def examples_at(step: int):
    """Prompts without weight, then counting tokens with weight."""
    rng = np.random.default_rng([5, step])
    found = []
    for _ in range(4):
        length = int(rng.integers(8, 20))
        start = int(rng.integers(48))
        weights = np.where(np.arange(length) < 4, 0.0, 1.0)
        found.append(((start + np.arange(length)) % 48, weights))
    return found


class StopAfter:
    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left == 0


def phase_runner(name, corpus):
    """Each phase as one function of (model, control)."""
    mtp = MtpConfig(num_steps=6, seq_len=24, rows=4, autocast="off", joint_weight=0.3, sft_every=2)
    sft = SftConfig(num_steps=6, schedule_steps=10, row_len=24, warmup_steps=2, accumulation=2, autocast="bf16")
    return {
        "cpt": lambda model, control: run_cpt(model, corpus, CPT, seed=1, control=control),
        "mtp": lambda model, control: train_mtp_from_scratch(model, corpus, mtp, seed=1, control=control),
        "long": lambda model, control: run_long_context(model, corpus, CPT, mtp=mtp, seed=1, control=control),
        "sft": lambda model, control: run_sft(model, examples_at, sft, pad_id=0, mtp=mtp, control=control),
    }[name]


@pytest.mark.parametrize("name", ["cpt", "mtp", "long", "sft"])
def test_resume_equals_an_uninterrupted_run_bit_for_bit(name, corpus, make_model, tmp_path):
    run = phase_runner(name, corpus)

    def control(rows, **more):
        def on_step(metrics):
            rows.append({key: value for key, value in metrics.items() if key != "seconds"})

        return RunControl(on_step=on_step, save_every=100, **more)

    whole, rows = make_model(), []
    expected = run(whole, control(rows))
    assert expected.finished
    first, resumed_rows = make_model(), []
    stopped = run(first, control(resumed_rows, folder=tmp_path, should_stop=StopAfter(3)))
    assert (stopped.step, stopped.finished) == (3, False)
    second = make_model(seed=7)  # its own weights must not matter
    result = run(second, control(resumed_rows, folder=tmp_path))
    assert result == expected
    assert resumed_rows == rows
    assert same_bits(whole, second)
    again = make_model(seed=8)
    assert run(again, control(resumed_rows, folder=tmp_path)) == expected  # finished: loads and returns
    assert len(resumed_rows) == len(rows)
    assert same_bits(whole, again)


def test_a_kill_between_checkpoints_repeats_only_what_was_lost(corpus, make_model, tmp_path):
    seen = []

    def kill(metrics):
        seen.append(metrics["step"])
        if seen == [1, 2, 3, 4, 5]:
            raise RuntimeError("killed")

    control = RunControl(folder=tmp_path, save_every=2, on_step=kill)
    with pytest.raises(RuntimeError, match="killed"):
        run_cpt(make_model(), corpus, CPT, seed=1, control=control)
    model, whole = make_model(), make_model()
    result = run_cpt(model, corpus, CPT, seed=1, control=control)
    assert seen == [1, 2, 3, 4, 5, 5, 6]
    assert result == run_cpt(whole, corpus, CPT, seed=1, control=RunControl())
    assert same_bits(model, whole)


def test_cpt_evaluates_at_its_steps_and_leaves_the_middle(corpus, make_model, tmp_path):
    points = []
    model = make_model()
    config = CptConfig(
        phase1_steps=24, phase1_seq_len=24, phase1_rows=8, warmup_steps=2, num_eval_points=4, lr=1e-2, autocast="bf16"
    )
    result = run_cpt(
        model, corpus, config, seed=0, control=RunControl(on_eval=points.append), mid_folder=tmp_path / "mid"
    )
    assert tuple(points) == result.evals
    assert [point.step for point in points] == list(config.eval_steps) == [0, 3, 6, 12, 24]
    assert points[-1].tokens == result.tokens
    assert points[-1].loss < points[0].loss - 1.0
    rows = corpus.heldout_rows(24, config.eval_rows)
    assert points[-1].loss == evaluate_loss(model, rows)
    assert [path.name for path in list_states(tmp_path / "mid")] == ["step-00000012-00"]
    middle = mid_run_copy(model, tmp_path / "mid")
    assert points[-1].loss < evaluate_loss(middle, rows) < points[0].loss
    with pytest.raises(CheckpointError, match="no checkpoint to train MTP"):
        mid_run_copy(model, tmp_path / "none")


def test_phase_1_leaves_the_mtp_layers_alone(corpus, make_model):
    model, fresh = make_model(), make_model()
    run_cpt(model, corpus, CPT, seed=0, control=RunControl())
    assert same_bits(model.mtp, fresh.mtp)
    assert not torch.equal(model.lm_head.weight, fresh.lm_head.weight)


def test_mtp_from_scratch_moves_nothing_else_and_acceptance_rises(corpus, make_model):
    model = make_model()
    run_cpt(
        model,
        corpus,
        CptConfig(phase1_steps=60, phase1_seq_len=24, phase1_rows=8, lr=1e-2, num_eval_points=0, autocast="off"),
        seed=0,
        control=RunControl(),
    )
    trunk = {name: p.detach().clone() for name, p in model.state_dict().items() if not name.startswith("mtp")}
    rows = corpus.heldout_rows(24, 8)
    before = measure_mtp_acceptance(model, rows)
    config = MtpConfig(num_steps=60, seq_len=24, rows=8, lr=1e-2)
    train_mtp_from_scratch(model, corpus, config, seed=0, control=RunControl())
    after = measure_mtp_acceptance(model, rows)
    assert len(after) == 1
    assert before[0] < 0.2
    assert after[0] > before[0] + 0.4
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in trunk.items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    other = make_model()
    move_mtp(model, other)
    assert same_bits(other.mtp, model.mtp)
    assert torch.equal(other.lm_head.weight, make_model().lm_head.weight)


def test_trunk_gradients_are_exactly_zero_when_detached(make_model):
    model = make_model()
    batch = to_tensors(pack_examples(examples_at(0), row_len=24, pad_id=0), CPU)
    mtp_only_loss(model, batch).loss_sum.backward()
    for name, parameter in model.named_parameters():
        if name.startswith("mtp."):
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0 or "experts" in name, name
        else:
            assert parameter.grad is None, name


def test_joint_training_reaches_the_trunk_through_the_drafts(make_model):
    batch = to_tensors(pack_examples(examples_at(0), row_len=24, pad_id=0), CPU)
    gradients = []
    for weight in (0.0, 1.0):
        model = make_model()
        output = joint_loss(weight)(model, batch)
        output.loss_sum.backward()
        gradients.append(model.layers[0].input_layernorm.weight.grad.clone())
        parts = float(output.sums["next_token_loss"] + weight * output.sums["mtp_loss"])
        assert float(output.loss_sum.detach()) == pytest.approx(parts, rel=1e-6)
    assert not torch.allclose(gradients[0], gradients[1])


def test_context_extension_keeps_weights_and_changes_positions(corpus, make_model, tiny_config):
    model = make_model()
    run_cpt(model, corpus, CPT, seed=0, control=RunControl())
    config = long_context_config(tiny_config, trained_len=24, new_len=96)
    assert (config.rope_scaling.factor, config.max_position_embeddings) == (4.0, 96)
    extended = extend_context(model, config)
    assert same_bits(model, extended)
    assert extended.lm_head.weight.data_ptr() != model.lm_head.weight.data_ptr()
    ids = torch.arange(20)[None]
    assert not torch.allclose(model(ids).logits_BTV, extended(ids).logits_BTV)
    result = run_long_context(extended, corpus, CPT, mtp=MtpConfig(), seed=0, control=RunControl())
    assert [point.step for point in result.evals] == [0, 4]
    assert result.evals[1].loss < result.evals[0].loss
    wider = make_model().config.__class__(**{**vars(tiny_config), "hidden_size": 64})
    with pytest.raises(ValueError, match=r"accepted is .* as before"):
        extend_context(model, wider)
    with pytest.raises(ValueError, match="more than trained_len"):
        long_context_config(tiny_config, trained_len=24, new_len=24)


def test_context_extension_of_grouped_attention_scales_queries_and_keys_alone():
    grouped = ModelConfig(attention="grouped", qk_norm="head", max_position_embeddings=24)
    yarn = long_context_config(grouped, trained_len=24, new_len=96).rope_scaling
    assert (yarn.factor, yarn.softmax_scale) == (4.0, 1.0)
    assert yarn.cos_sin_scale == pytest.approx(0.1 * np.log(4.0) + 1.0)
    latent = long_context_config(ModelConfig(), trained_len=24, new_len=96).rope_scaling
    assert latent.cos_sin_scale == 1.0
    assert latent.softmax_scale == pytest.approx((0.1 * np.log(4.0) + 1.0) ** 2)


def test_sft_learns_weighted_tokens_only(make_model):
    model = make_model()
    config = SftConfig(num_steps=40, schedule_steps=40, row_len=24, lr=1e-2, warmup_steps=5)
    losses = []
    result = run_sft(
        model,
        examples_at,
        config,
        pad_id=0,
        mtp=MtpConfig(),
        control=RunControl(on_step=lambda metrics: losses.append(metrics)),
    )
    assert result.finished
    assert [row["step"] for row in losses if "mtp_loss" in row] == list(range(1, 41, 4))
    assert losses[36]["next_token_loss"] < losses[0]["next_token_loss"] - 2.0
    assert losses[36]["loss"] == pytest.approx(losses[36]["next_token_loss"] + 0.1 * losses[36]["mtp_loss"])


def test_a_token_without_weight_gives_no_gradient(make_model):
    tokens, weights = np.arange(10), np.array([0, 0, 0, 1, 1, 0, 0, 0, 0, 0.0])
    gradients = []
    for last in (7, 30):  # the unweighted tokens behind the weighted ones differ
        model = make_model().double()
        changed = np.concatenate([tokens[:6], np.full(4, last)])
        batch = to_tensors(pack_examples([(changed, weights)], row_len=10, pad_id=0), CPU)
        joint_loss(0.5)(model, batch).loss_sum.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (CptConfig, "phase1_steps", 0),
        (CptConfig, "phase1_seq_len", 1),
        (CptConfig, "num_eval_points", 1),
        (CptConfig, "mid_frac", 0.0),
        (CptConfig, "autocast", "fp8"),
        (MtpConfig, "rows", 0),
        (MtpConfig, "joint_weight", -0.1),
        (SftConfig, "row_len", 0),
        (SftConfig, "lr", 0.0),
        (RunControl, "save_every", 0),
    ],
)
def test_configs_refuse(make, field, value):
    with pytest.raises(ValueError, match=f"{make.__name__}.{field}"):
        make(**{field: value})
