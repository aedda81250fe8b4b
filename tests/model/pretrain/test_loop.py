"""The training loop on a small real model."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from composer2.model.pretrain.data import PretrainBatch, pack_examples
from composer2.model.pretrain.loop import (
    LossOutput,
    TensorBatch,
    evaluate_loss,
    micro_batches,
    next_token_loss,
    next_token_nll_sum,
    to_tensors,
    train,
)
from composer2.model.pretrain.optim import OptimConfig, make_optimizer


def batch_at(step: int, rows: int = 4) -> PretrainBatch:
    """Rows that count upwards from a random start: easy to learn."""
    rng = np.random.default_rng(step)
    examples = []
    for _ in range(rows):
        length = int(rng.integers(6, 15))
        examples.append(((np.arange(length) + rng.integers(48)) % 48, np.ones(length)))
    return pack_examples(examples, row_len=16, pad_id=0)


def test_loss_by_hand():
    # p(next) is 1/2, 1/4 and 1/8; weights 1, 2 and 0.5 -> ln 2 (1 + 2 * 2 + 0.5 * 3)
    logits = torch.zeros(1, 4, 3)
    for t, p in enumerate((0.5, 0.25, 0.125)):
        logits[0, t] = torch.tensor([math.log(p), math.log(1 - p), -math.inf])
    batch = TensorBatch(
        token_ids_BT=torch.tensor([[1, 0, 0, 0]]),
        position_ids_BT=torch.arange(4)[None],
        document_ids_BT=torch.zeros(1, 4, dtype=torch.int64),
        weights_BT=torch.tensor([[0.0, 1.0, 2.0, 0.5]]),
    )
    assert float(next_token_nll_sum(logits, batch)) == pytest.approx(6.5 * math.log(2), rel=1e-6)


def test_loss_falls_and_every_metric_is_there(make_model):
    model = make_model()
    config = OptimConfig(lr=1e-2, warmup_steps=5, schedule_steps=40)
    rows: list[dict[str, float]] = []
    before = evaluate_loss(model, batch_at(999, rows=8))
    last = train(
        model,
        make_optimizer(model.named_parameters(), config),
        config.lr_at,
        batch_at,
        next_token_loss,
        num_steps=40,
        router_bias_rate=1e-3,
        on_step=rows.append,
    )
    assert last == 40
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert rows[0]["lr"] == pytest.approx(2e-3)
    assert rows[3]["tokens"] == batch_at(3).num_tokens
    assert set(rows[0]) == {
        "loss",
        "next_token_loss",
        "step",
        "lr",
        "grad_norm",
        "tokens",
        "seconds",
        "router_max_violation",
    }
    assert before == pytest.approx(math.log(48), abs=0.15)
    assert evaluate_loss(model, batch_at(999, rows=8)) < 1.0


def test_a_model_without_experts_trains(make_model, tiny_config):
    model, rows = make_model(0, replace(tiny_config, first_k_dense_replace=2)), []
    config = OptimConfig(lr=1e-2, warmup_steps=1, schedule_steps=8)
    train(
        model, make_optimizer(model.named_parameters(), config), config.lr_at, batch_at, next_token_loss,
        num_steps=8, router_bias_rate=1e-3, on_step=rows.append,
    )  # fmt: skip
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    assert "router_max_violation" not in rows[0]


def test_evaluation_does_not_depend_on_its_batches(make_model):
    model = make_model()
    rows = batch_at(1, rows=9)
    assert evaluate_loss(model, rows, rows_per_batch=2) == pytest.approx(evaluate_loss(model, rows), rel=1e-5)


def test_bf16_is_close_to_fp32(make_model):
    model = make_model()
    rows = batch_at(1, rows=9)
    assert evaluate_loss(model, rows, autocast="bf16") == pytest.approx(evaluate_loss(model, rows), abs=0.02)
    with pytest.raises(ValueError, match="accepted is 'off' or 'bf16'"):
        evaluate_loss(model, rows, autocast="fp8")  # type: ignore[arg-type]


def test_a_stop_comes_after_a_finished_step(make_model):
    model, config, taken = make_model(), OptimConfig(), []
    optimizer = make_optimizer(model.named_parameters(), config)
    step = train(
        model,
        optimizer,
        config.lr_at,
        batch_at,
        next_token_loss,
        num_steps=9,
        start_step=2,
        on_step=lambda metrics: taken.append(metrics["step"]),
        should_stop=lambda: len(taken) == 3,
    )
    assert (step, taken) == (5, [3, 4, 5])


def test_a_loss_that_is_not_finite_never_reaches_the_weights(make_model):
    model, config = make_model(), OptimConfig()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def broken(model, batch):
        return LossOutput(loss_sum=next_token_loss(model, batch).loss_sum * math.nan)

    with pytest.raises(FloatingPointError, match="step 0"):
        train(
            model,
            make_optimizer(model.named_parameters(), config),
            config.lr_at,
            batch_at,
            broken,
            num_steps=1,
        )
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_correction_bias_moves_against_the_load(make_model):
    model, config = make_model(), OptimConfig()
    output = next_token_loss(model, to_tensors(batch_at(0), torch.device("cpu")))
    assert output.tokens_per_expert_LE is not None
    load = output.tokens_per_expert_LE[0].float()
    optimizer = make_optimizer(model.named_parameters(), config)
    train(model, optimizer, config.lr_at, batch_at, next_token_loss, num_steps=1, router_bias_rate=0.5, accumulation=2)
    (bias,) = [buffer for name, buffer in model.named_buffers() if "e_score" in name and not name.startswith("mtp")]
    signs = torch.sign(load.mean() - load)
    torch.testing.assert_close(bias, 0.5 * (signs - signs.mean()))


def test_micro_batches_cover_the_rows():
    batch = batch_at(0, rows=11)
    for count in (1, 2, 3, 50):
        parts = list(micro_batches(batch, count))
        assert len(parts) == min(count, batch.num_rows)
        assert np.array_equal(np.concatenate([part.token_ids for part in parts]), batch.token_ids)
    with pytest.raises(ValueError, match="accumulation is 0"):
        list(micro_batches(batch, 0))


def test_a_batch_without_weight_is_refused(make_model):
    model, config = make_model(), OptimConfig()
    empty = pack_examples([([1, 2, 3], [0, 0, 0])], row_len=4, pad_id=0)
    with pytest.raises(ValueError, match="sum to 0"):
        train(
            model,
            make_optimizer(model.named_parameters(), config),
            config.lr_at,
            lambda _: empty,
            next_token_loss,
            num_steps=1,
        )
