"""Packing: many short samples into few rows, rows into micro-batches.

In: `Sample`s of any lengths. Out: `Batch`es whose rows hold several documents each, ready for one forward pass.

Source: report §6.1 (global sequence packing); row R12.
Choice: samples are placed by best-fit decreasing: longest first, each
into the fullest row that still takes it. Rows are then ordered by width, equal ones by cost a*s + b*s^2 summed over
their documents (the quadratic part is attention), and cut into micro-batches, so that like rows share one; a
micro-batch is trimmed to its longest row. Everything is deterministic: ties go to the lower index.

Choice: a sample longer than `row_length` gets a row, and a micro-batch, of its own, as wide as itself; it is neither
cut nor refused, because every sampled token has to be trained.
Choice: padding is id 0, whatever token that is: nothing sees it and nothing is trained on it, so no tokenizer needs a
token of that name.
Documents never see each other: `document_ids` differ, and `position_ids` restart at 0. Padding has document -1.

Shape letters: B rows, T tokens of a row, L MoE layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from composer2.rl.routes import NO_ROUTE, common_shape
from composer2.types import Batch, Sample

Plan = list[list[list[int]]]
"""For each micro-batch, for each row, the indices of the samples in it, left to right."""


@dataclass(frozen=True, kw_only=True)
class PackCost:
    """Cost of a document of s tokens: linear * s + quadratic * s^2. Only the order and balance of rows read it."""

    linear: float = 1.0
    """Per token: the matrices of the model."""
    quadratic: float = 1e-3
    """Per pair of tokens: attention."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"PackCost.{name} is {value}, accepted is a finite number >= 0")
        if self.linear == self.quadratic == 0:
            raise ValueError("PackCost.linear and .quadratic are 0, accepted is one of them above 0")

    def of(self, length: int) -> float:
        """Cost of one document."""
        return self.linear * length + self.quadratic * length * length


@dataclass(frozen=True, kw_only=True)
class BatchTensors:
    """A `Batch` as tensors on one device; field by field the same meaning."""

    token_ids: torch.Tensor
    """int64 [B, T]."""
    position_ids: torch.Tensor
    """int64 [B, T]."""
    document_ids: torch.Tensor
    """int64 [B, T], -1 at padding."""
    loss_mask: torch.Tensor
    """bool [B, T]."""
    advantages: torch.Tensor
    """float32 [B, T]."""
    behaviour_logprobs: torch.Tensor
    """float32 [B, T]."""
    policy_versions: torch.Tensor
    """int64 [B, T]."""
    routes: torch.Tensor
    """int64 [B, T, L, K], -1 where none."""
    temperature: float = 1.0


def plan_rows(lengths: Sequence[int], *, row_length: int, rows_per_batch: int, cost: PackCost | None = None) -> Plan:
    """Which sample goes where, from lengths in tokens alone. Every index appears exactly once.

    ValueError for a length, `row_length` (tokens) or `rows_per_batch` below 1."""
    if row_length < 1:
        raise ValueError(f"row_length is {row_length}, accepted is >= 1")
    if rows_per_batch < 1:
        raise ValueError(f"rows_per_batch is {rows_per_batch}, accepted is >= 1")
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sample {index} has {length} tokens, accepted is >= 1")
    cost = cost or PackCost()
    wide: list[list[int]] = []
    rows: list[list[int]] = []
    used: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > row_length:
            wide.append([index])
            continue
        fitting = [row for row in range(len(rows)) if used[row] + length <= row_length]
        if fitting:
            row = max(fitting, key=lambda r: (used[r], -r))
            rows[row].append(index)
            used[row] += length
        else:
            rows.append([index])
            used.append(length)
    order = sorted(range(len(rows)), key=lambda r: (-used[r], -sum(cost.of(lengths[i]) for i in rows[r]), r))
    ordered = [rows[r] for r in order]
    return [[row] for row in wide] + [
        ordered[start : start + rows_per_batch] for start in range(0, len(ordered), rows_per_batch)
    ]


PER_TOKEN = {
    "token_ids": np.integer,
    "loss_mask": np.bool_,
    "advantages": np.number,
    "behaviour_logprobs": np.number,
    "policy_versions": np.integer,
}
"""Fields of a `Sample` with one value a token, and the kind of each."""


def check_samples(samples: Sequence[Sample]) -> None:
    """Raise ValueError unless every field has one value a token, of its kind: copies would broadcast, round or cast."""
    common_shape(samples)
    for index, sample in enumerate(samples):
        for name, kind in PER_TOKEN.items():
            values = np.asarray(getattr(sample, name))
            if values.shape != (len(sample.token_ids),):
                raise ValueError(
                    f"sample {index}: {name} has shape {values.shape}, accepted is one a token: "
                    f"({len(sample.token_ids)},)"
                )
            if not np.issubdtype(values.dtype, kind):
                raise ValueError(f"sample {index}: {name} has dtype {values.dtype}, accepted is {kind.__name__}")
        if not 0 <= sample.temperature < np.inf:
            raise ValueError(f"sample {index}: temperature is {sample.temperature}, accepted is a finite number >= 0")


def pack(samples: Sequence[Sample], *, row_length: int, rows_per_batch: int, pad_id: int = 0) -> list[Batch]:
    """Micro-batches holding every sample once. Samples of different temperature never share a micro-batch.

    ValueError for a sample without tokens, with a trained first token, or that `check_samples` refuses."""
    check_samples(samples)
    for index, sample in enumerate(samples):
        if len(sample.loss_mask) and sample.loss_mask[0]:
            raise ValueError(
                f"sample {index}: loss_mask[0] is True, accepted is False: the first token of a document has no context"
            )
    batches = []
    for temperature in sorted({sample.temperature for sample in samples}):
        chosen = [sample for sample in samples if sample.temperature == temperature]
        plan = plan_rows([len(s.token_ids) for s in chosen], row_length=row_length, rows_per_batch=rows_per_batch)
        batches += [fill([[chosen[i] for i in row] for row in rows], pad_id=pad_id) for rows in plan]
    return batches


def fill(rows: Sequence[Sequence[Sample]], *, pad_id: int = 0) -> Batch:
    """One micro-batch from the samples of each row, left to right, as wide as the longest row.

    ValueError for samples of more than one temperature, and for those that `check_samples` refuses."""
    samples = [sample for row in rows for sample in row]
    check_samples(samples)
    shape_LK = common_shape(samples)
    temperatures = {sample.temperature for sample in samples}
    if len(temperatures) != 1:
        raise ValueError(f"Sample.temperature takes the values {sorted(temperatures)}, accepted is one per micro-batch")
    shape = (len(rows), max(sum(len(sample.token_ids) for sample in row) for row in rows))
    fields = {
        "token_ids": np.full(shape, pad_id, dtype=np.int32),
        "position_ids": np.zeros(shape, dtype=np.int32),
        "document_ids": np.full(shape, -1, dtype=np.int32),
        "loss_mask": np.zeros(shape, dtype=bool),
        "advantages": np.zeros(shape, dtype=np.float32),
        "behaviour_logprobs": np.zeros(shape, dtype=np.float32),
        "policy_versions": np.full(shape, -1, dtype=np.int32),
        "routes": np.full((*shape, *shape_LK), NO_ROUTE, dtype=np.int16),
    }
    copied = ("token_ids", "loss_mask", "advantages", "behaviour_logprobs", "policy_versions", "routes")
    for b, row in enumerate(rows):
        start = 0
        for document, sample in enumerate(row):
            stop = start + len(sample.token_ids)
            for name in copied:
                fields[name][b, start:stop] = getattr(sample, name)
            fields["position_ids"][b, start:stop] = np.arange(stop - start)
            fields["document_ids"][b, start:stop] = document
            start = stop
    return Batch(**fields, temperature=temperatures.pop())


def unpack(values_BT: Sequence[np.ndarray], plan: Plan, lengths: Sequence[int]) -> list[np.ndarray]:
    """Undo a plan: per-token values of each micro-batch ([B, T, ...]) back to one array [length, ...] per sample.

    `plan` is that of `plan_rows` for the same `lengths`; `pack` follows it where all samples have one temperature."""
    found: dict[int, np.ndarray] = {}
    for values, rows in zip(values_BT, plan, strict=True):
        for b, row in enumerate(rows):
            start = 0
            for index in row:
                found[index] = values[b, start : start + lengths[index]]
                start += lengths[index]
    return [found[index] for index in range(len(lengths))]


def to_tensors(batch: Batch, device: torch.device | str = "cpu") -> BatchTensors:
    """Copy a batch to a device, integers widened to int64."""

    def integers(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device)

    return BatchTensors(
        token_ids=integers(batch.token_ids),
        position_ids=integers(batch.position_ids),
        document_ids=integers(batch.document_ids),
        loss_mask=torch.from_numpy(batch.loss_mask.copy()).to(device),
        advantages=torch.from_numpy(batch.advantages.astype(np.float32)).to(device),
        behaviour_logprobs=torch.from_numpy(batch.behaviour_logprobs.astype(np.float32)).to(device),
        policy_versions=integers(batch.policy_versions),
        routes=integers(batch.routes),
        temperature=batch.temperature,
    )


def packing_report(documents: Sequence[np.ndarray], cost: PackCost | None = None) -> dict[str, float]:
    """num_batches, num_rows, pack_efficiency (real tokens / slots), pack_imbalance (costliest micro-batch / mean).

    `documents`: for each micro-batch its `Batch.document_ids`, int [B, T], -1 where padded."""
    cost = cost or PackCost()
    if not documents:
        return {"num_batches": 0.0, "num_rows": 0.0, "pack_efficiency": 1.0, "pack_imbalance": 1.0}
    costs = [
        sum(cost.of(int(n)) for row_T in ids_BT for n in np.unique(row_T[row_T >= 0], return_counts=True)[1])
        for ids_BT in documents
    ]
    return {
        "num_batches": float(len(documents)),
        "num_rows": float(sum(len(ids_BT) for ids_BT in documents)),
        "pack_efficiency": sum(int((ids_BT >= 0).sum()) for ids_BT in documents) / sum(i.size for i in documents),
        "pack_imbalance": max(costs) / (sum(costs) / len(costs)),
    }
