"""The one training loop of pretraining: a model, an optimizer, batches by step, a loss; metrics come out step by step.

In: `batches(step) -> PretrainBatch` and `loss_fn(model, TensorBatch) -> LossOutput`. Out: trained weights in place.

Source: rows P2 (clipping, accumulation, bf16 with fp32 master) and M5 (correction bias moved by the load of each step).
Equation: one step minimises  sum_t w_t nll_t / sum_t w_t , both sums over every token of the step, whatever number of
micro-batches it is cut into. The denominator is known from the data before the first backward pass, so a loss function
returns sums and never means: accumulation cannot change the gradient.
Choice: extra loss terms (MTP) are divided by the same denominator.
Choice: a loss or gradient that is not finite ends the run with FloatingPointError before it reaches the weights.

Shape letters: B rows, T tokens, V vocab, L MoE layers, E experts.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from composer2.model.moe import MoE
from composer2.model.pretrain.data import PretrainBatch
from composer2.model.pretrain.optim import clip_gradients
from composer2.model.transformer import Transformer

AutocastMode = Literal["off", "bf16"]
StepMetrics = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class TensorBatch:
    """A micro-batch on the model's device."""

    token_ids_BT: torch.Tensor
    """int64."""
    position_ids_BT: torch.Tensor
    """int64."""
    document_ids_BT: torch.Tensor
    """int64, -1 for padding."""
    weights_BT: torch.Tensor
    """float32, weight of predicting token t."""
    step: int = 0
    """Steps taken before this one, for losses that are not the same at every step."""


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """Sums over the tokens of one micro-batch."""

    loss_sum: torch.Tensor
    """Scalar to differentiate: weighted sum, not yet divided by the weight of the step."""
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Detached scalars reported under their names, divided by the weight of the step."""
    tokens_per_expert_LE: torch.Tensor | None = None
    """Load of every expert of the trunk, for the correction bias."""
    mtp_tokens_per_expert_NE: torch.Tensor | None = None
    """The same of the MTP modules."""


LossFn = Callable[[Transformer, TensorBatch], LossOutput]


def train(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    schedule: Callable[[int], float],
    batches: Callable[[int], PretrainBatch],
    loss_fn: LossFn,
    *,
    num_steps: int,
    start_step: int = 0,
    accumulation: int = 1,
    autocast: AutocastMode = "off",
    clip: float = 1.0,
    router_bias_rate: float = 0.0,
    on_step: Callable[[StepMetrics], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> int:
    """Take steps `start_step` .. `num_steps` - 1 and return the next step; `should_stop` is asked after every one.

    `on_step` gets: step (number of steps taken so far), loss (nats a weighted token), lr, grad_norm (before clipping),
    tokens, seconds, router_max_violation (max load / mean load - 1, the worst layer) and whatever the loss reports.
    """
    step = start_step
    while step < num_steps:
        started = time.perf_counter()
        lr = schedule(step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        batch = batches(step)
        metrics, load_LE, mtp_load_NE = _accumulate(model, batch, step, loss_fn, accumulation, autocast)
        grad_norm = clip_gradients(optimizer, clip)
        if not np.isfinite(metrics["loss"]) or not np.isfinite(grad_norm):
            raise FloatingPointError(
                f"step {step}: loss {metrics['loss']}, gradient norm {grad_norm}; the weights are still those before it"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if load_LE is not None and len(load_LE):
            mean_L1 = load_LE.float().mean(dim=-1, keepdim=True).clamp(min=1.0)
            metrics["router_max_violation"] = float((load_LE / mean_L1).max() - 1)
            if router_bias_rate > 0:
                model.update_router_bias(load_LE, router_bias_rate)
        if mtp_load_NE is not None and router_bias_rate > 0:
            for module, load_E in zip(model.mtp, mtp_load_NE, strict=True):
                assert isinstance(module.block.mlp, MoE)
                module.block.mlp.gate.update_bias(load_E, router_bias_rate)
        step += 1
        metrics |= {"step": step, "lr": lr, "grad_norm": grad_norm, "tokens": batch.num_tokens}
        metrics["seconds"] = time.perf_counter() - started
        if on_step is not None:
            on_step(metrics)
        if should_stop is not None and should_stop():
            break
    return step


def _accumulate(
    model: Transformer, batch: PretrainBatch, step: int, loss_fn: LossFn, accumulation: int, autocast: AutocastMode
) -> tuple[StepMetrics, torch.Tensor | None, torch.Tensor | None]:
    """Forward and backward over all micro-batches; means over the step, and the expert loads of trunk and MTP."""
    weight = float(batch.weights.sum(dtype=np.float64))
    if weight <= 0:
        raise ValueError(f"the weights of a batch sum to {weight}, accepted is at least one token with weight above 0")
    device = device_of(model)
    totals: dict[str, torch.Tensor] = {}
    load_LE: torch.Tensor | None = None
    mtp_load_NE: torch.Tensor | None = None
    for micro in micro_batches(batch, accumulation):
        with autocast_context(device, autocast):
            output = loss_fn(model, to_tensors(micro, device, step))
        (output.loss_sum / weight).backward()
        for name, value in {"loss": output.loss_sum.detach(), **output.sums}.items():
            totals[name] = totals[name] + value if name in totals else value
        load_LE = _add(load_LE, output.tokens_per_expert_LE)
        mtp_load_NE = _add(mtp_load_NE, output.mtp_tokens_per_expert_NE)
    return {name: float(value) / weight for name, value in totals.items()}, load_LE, mtp_load_NE


def _add(total: torch.Tensor | None, part: torch.Tensor | None) -> torch.Tensor | None:
    return part if total is None else total if part is None else total + part


def micro_batches(batch: PretrainBatch, count: int) -> Iterator[PretrainBatch]:
    """Cut the rows into `count` parts as equal as possible; parts that would be empty are left out."""
    if count < 1:
        raise ValueError(f"accumulation is {count}, accepted is 1 or more")
    edges = [round(index * batch.num_rows / count) for index in range(count + 1)]
    for start, stop in itertools.pairwise(edges):
        if stop > start:
            yield batch.rows(start, stop)


def to_tensors(batch: PretrainBatch, device: torch.device, step: int = 0) -> TensorBatch:
    """Copy a batch to the device."""
    return TensorBatch(
        token_ids_BT=torch.from_numpy(batch.token_ids).to(device, torch.int64),
        position_ids_BT=torch.from_numpy(batch.position_ids).to(device, torch.int64),
        document_ids_BT=torch.from_numpy(batch.document_ids).to(device, torch.int64),
        weights_BT=torch.from_numpy(batch.weights).to(device),
        step=step,
    )


def device_of(model: nn.Module) -> torch.device:
    """Device of the first parameter."""
    return next(model.parameters()).device


def autocast_context(device: torch.device, mode: AutocastMode) -> contextlib.AbstractContextManager[Any]:
    """bf16 matrix products over fp32 weights, or nothing."""
    if mode == "off":
        return contextlib.nullcontext()
    if mode == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    raise ValueError(f"autocast is {mode!r}, accepted is 'off' or 'bf16'")


# ---------------------------------------------------------------------------------------------------------------------
# The plain loss


def next_token_nll_sum(logits_BTV: torch.Tensor, batch: TensorBatch) -> torch.Tensor:
    """sum_t w_t (-log p(token t | logits t - 1)), float32."""
    nll_BT = F.cross_entropy(
        logits_BTV[:, :-1].float().flatten(0, 1), batch.token_ids_BT[:, 1:].flatten(), reduction="none"
    )
    return (nll_BT * batch.weights_BT[:, 1:].flatten()).sum()


def next_token_loss(model: Transformer, batch: TensorBatch) -> LossOutput:
    """The loss of continued pretraining and of supervised fine-tuning without MTP."""
    output = model(batch.token_ids_BT, position_ids_BT=batch.position_ids_BT, document_ids_BT=batch.document_ids_BT)
    loss_sum = next_token_nll_sum(output.logits_BTV, batch)
    return LossOutput(
        loss_sum=loss_sum,
        sums={"next_token_loss": loss_sum.detach()},
        tokens_per_expert_LE=output.routing.tokens_per_expert_LE,
    )


@torch.no_grad()
def evaluate_loss(
    model: Transformer, rows: PretrainBatch, *, rows_per_batch: int = 16, autocast: AutocastMode = "off"
) -> float:
    """Weighted mean nll in nats a token over all rows."""
    device = device_of(model)
    total = 0.0
    for start in range(0, rows.num_rows, rows_per_batch):
        with autocast_context(device, autocast):
            output = next_token_loss(model, to_tensors(rows.rows(start, start + rows_per_batch), device))
        total += float(output.loss_sum)
    return total / float(rows.weights.sum(dtype=np.float64))
