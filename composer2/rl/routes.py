"""Recorded experts: do they belong to these tokens, and how far do two forward passes part?

In: expert ids the sampler recorded, log-probs of the same tokens from two passes. Out: errors, or numbers for the log.

Source: report §6.2 (router replay); rows M6 R7. The sampler records the experts of every token it fed to the model;
training replays them. A recording of another length than the tokens is a hard error: broadcasting or cutting it would
silently replay the wrong experts. Rows of -1 mean "nothing recorded" (the last token of a segment, padding): there the
trainer routes freely and counts it.

Shape letters: T tokens, B rows, L MoE layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from composer2.types import Batch, Sample

NO_ROUTE = -1


def check_routes(
    routes_TLK: np.ndarray, *, num_tokens: int, shape_LK: tuple[int, int], num_experts: int | None = None
) -> None:
    """Raise ValueError unless `routes_TLK` is one complete or empty [L, K] record for each of `num_tokens` tokens.

    With `num_experts`, ids must be distinct in a layer and below it. `shape_LK`: (MoE layers, experts a token)."""
    expected = (num_tokens, *shape_LK)
    if routes_TLK.shape != expected:
        raise ValueError(f"routes has shape {routes_TLK.shape}, accepted is [tokens, layers, experts] = {expected}")
    if not np.issubdtype(routes_TLK.dtype, np.integer):
        raise ValueError(f"routes has dtype {routes_TLK.dtype}, accepted is an integer type")
    if routes_TLK.size == 0:
        return
    missing = routes_TLK == NO_ROUTE
    partly = missing.any(axis=(1, 2)) & ~missing.all(axis=(1, 2))
    if partly.any():
        raise ValueError(f"routes of token {int(np.argmax(partly))} are partly -1, accepted is all or none")
    if num_experts is None:
        return
    recorded = routes_TLK[~missing.any(axis=(1, 2))]
    if recorded.size and (recorded.min() < 0 or recorded.max() >= num_experts):
        raise ValueError(
            f"routes holds expert {int(recorded.min())}..{int(recorded.max())}, accepted is 0..{num_experts - 1} or -1"
        )
    ordered = np.sort(recorded, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise ValueError("routes names one expert twice in a layer of a token, accepted are distinct experts")


def common_shape(samples: Sequence[Sample]) -> tuple[int, int]:
    """(L, K) shared by all samples; each sample's routes are checked against its tokens."""
    shapes = {sample.routes.shape[1:] for sample in samples}
    if len(shapes) > 1 or any(len(shape) != 2 for shape in shapes):
        raise ValueError(
            f"Sample.routes have trailing shapes {sorted(shapes)}, accepted is one [layers, experts] shape"
        )
    num_layers, num_experts_per_tok = next(iter(shapes), (0, 0))
    for index, sample in enumerate(samples):
        try:
            check_routes(sample.routes, num_tokens=len(sample.token_ids), shape_LK=(num_layers, num_experts_per_tok))
        except ValueError as error:
            raise ValueError(f"sample {index}: {error}") from error
    return num_layers, num_experts_per_tok


def check_batch_routes(batch: Batch, *, shape_LK: tuple[int, int], num_experts: int) -> None:
    """Raise ValueError unless a packed batch can be replayed by a model of these dimensions; padding must hold -1."""
    num_rows, num_columns = batch.token_ids.shape
    if batch.routes.shape[:2] != (num_rows, num_columns):
        raise ValueError(
            f"Batch.routes has shape {batch.routes.shape}, accepted begins with {(num_rows, num_columns)}, as token_ids"
        )
    flat = batch.routes.reshape(num_rows * num_columns, *batch.routes.shape[2:])
    check_routes(flat, num_tokens=num_rows * num_columns, shape_LK=shape_LK, num_experts=num_experts)
    if (batch.routes[batch.document_ids < 0] != NO_ROUTE).any():
        raise ValueError("Batch.routes holds experts at padding, accepted is -1 where document_ids is -1")


def recorded_frac(batch: Batch) -> float:
    """Share of real tokens (padding left out) with recorded experts."""
    real = batch.document_ids >= 0
    if not real.any():
        return 0.0
    return float((batch.routes[real] != NO_ROUTE).all(axis=(1, 2)).mean())


def differing_expert_frac(routes_a: np.ndarray, routes_b: np.ndarray) -> float:
    """Share of tokens whose set of experts differs in any layer; tokens that either side did not record are left out.

    Both int [..., L, K]; the order of the K experts means nothing. NaN when no token was recorded twice."""
    if routes_a.shape != routes_b.shape:
        raise ValueError(f"routes_b has shape {routes_b.shape}, accepted is that of routes_a: {routes_a.shape}")
    recorded = (routes_a != NO_ROUTE).all(axis=(-2, -1)) & (routes_b != NO_ROUTE).all(axis=(-2, -1))
    if not recorded.any():
        return float("nan")
    differs = np.sort(routes_a[recorded], axis=-1) != np.sort(routes_b[recorded], axis=-1)
    return float(differs.any(axis=(-2, -1)).mean())


def logprob_mismatch(sampler: np.ndarray, trainer: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """How far two passes disagree on the same tokens: |difference| at `mask`, plus the k1 of sampler against trainer.

    Keys: num_tokens, mismatch_mean, mismatch_p50, mismatch_p99, mismatch_max, mismatch_k1. NaN without any token."""
    if not sampler.shape == trainer.shape == mask.shape:
        raise ValueError(f"shapes are {sampler.shape}, {trainer.shape}, {mask.shape}, accepted are three equal shapes")
    difference = sampler[mask].astype(np.float64) - trainer[mask].astype(np.float64)
    if difference.size == 0:
        nan = float("nan")
        keys = ("mismatch_mean", "mismatch_p50", "mismatch_p99", "mismatch_max", "mismatch_k1")
        return {"num_tokens": 0.0} | dict.fromkeys(keys, nan)
    absolute = np.abs(difference)
    return {
        "num_tokens": float(difference.size),
        "mismatch_mean": float(absolute.mean()),
        "mismatch_p50": float(np.quantile(absolute, 0.5)),
        "mismatch_p99": float(np.quantile(absolute, 0.99)),
        "mismatch_max": float(absolute.max()),
        "mismatch_k1": float(difference.mean()),
    }
