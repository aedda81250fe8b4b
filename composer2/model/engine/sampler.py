"""Drawing tokens: logits of a batch come in, token ids and their log-probs come out.

p = softmax(logits / temperature); a token is the first one whose cumulative probability exceeds u, a uniform number
that depends on the request's seed and the token's position alone (a counter-based hash, no generator state). Neighbours
in the batch, other requests and restarts therefore change nothing.

Source: rows I1 (seeded sampling; temperature, top-p, top-k) and R3 (behaviour log-probs).
Two log-probs are returned. One is always that of the full softmax at the sampling temperature: the trainer computes the
same quantity, and their ratio must be 1 for equal weights. The other is that of the distribution the token was drawn
from, renormalised over what top-k and top-p kept; at temperature 0 that is a point, log-prob 0.
Choice: top-k cuts first, top-p then counts within what is left, as vLLM does.

Shape letters: B requests, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

HEAD = 64
"""Tokens looked at first when top-k or top-p limits a row."""

_MASK = (1 << 64) - 1


class Distribution(NamedTuple):
    """What tokens of a batch are drawn from."""

    logprobs_BV: Tensor
    """Full softmax at the temperature (1 for greedy rows), float32 or float64."""
    kept_BV: Tensor
    """Its probabilities where top-k and top-p keep a token, 0 elsewhere; not renormalised. Greedy: 1 at the argmax."""
    total_B: Tensor
    """float64: sum of `kept_BV`."""


class Drawn(NamedTuple):
    """Tokens of a batch."""

    tokens_B: Tensor
    """int64."""
    logprobs_B: Tensor
    """float32, under the full softmax."""
    truncated_logprobs_B: Tensor
    """float32, under what was kept of it."""


def uniforms(seeds_B: list[int], positions_B: list[int], stream: int = 0) -> np.ndarray:
    """float64 [B] in [0, 1): splitmix64 of seed, then of position. Numbers of different streams are independent."""
    seeds = np.array([seed & _MASK for seed in seeds_B], dtype=np.uint64)
    counters = np.array(positions_B, dtype=np.uint64)
    if stream:
        seeds = _splitmix64(seeds ^ np.uint64(stream * 0x8CB92BA72F3D8DD7 & _MASK))
    bits = _splitmix64(_splitmix64(seeds) ^ (counters * np.uint64(0xD1342543DE82EF95)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits_BV: Tensor,
    *,
    temperature_B: Tensor,
    top_p_B: Tensor,
    top_k_B: Tensor,
    uniform_B: Tensor,
) -> Drawn:
    """Draw one token a row. Temperature 0 takes the argmax, log-prob then at temperature 1.

    `temperature_B`, `top_p_B` and `uniform_B` are float64; `top_k_B` is int64, 0 for off. Logits that are NaN or
    +inf raise FloatingPointError.
    """
    if not temperature_B.any():
        return greedy(logits_BV)
    target = distribution(logits_BV, temperature_B=temperature_B, top_p_B=top_p_B, top_k_B=top_k_B)
    return measure(target, invert(target.kept_BV, uniform_B))


def greedy(logits_BV: Tensor) -> Drawn:
    """What `sample` gives at temperature 0, without the distribution."""
    logits_BV = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
    tokens_B = logits_BV.argmax(-1)
    logprobs_B = torch.log_softmax(logits_BV, dim=-1).gather(1, tokens_B[:, None])[:, 0].float()
    _require_finite(logprobs_B)
    return Drawn(tokens_B=tokens_B, logprobs_B=logprobs_B, truncated_logprobs_B=torch.zeros_like(logprobs_B))


def distribution(logits_BV: Tensor, *, temperature_B: Tensor, top_p_B: Tensor, top_k_B: Tensor) -> Distribution:
    """What `sample` draws from, with the same arguments and errors."""
    logits_BV = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
    is_greedy_B = temperature_B == 0
    divisor_B = torch.where(is_greedy_B, 1.0, temperature_B).to(logits_BV.dtype)
    logprobs_BV = torch.log_softmax(logits_BV / divisor_B[:, None], dim=-1)
    kept_BV = logprobs_BV.exp()
    total_B = kept_BV.sum(-1, dtype=torch.float64)
    _require_finite(total_B)
    limited_B = ((top_k_B > 0) | (top_p_B < 1)) & ~is_greedy_B
    total_B = torch.ones_like(total_B)
    if limited_B.any():
        kept_BV[limited_B] = _limit(kept_BV[limited_B], top_p_B[limited_B], top_k_B[limited_B])
        total_B[limited_B] = kept_BV[limited_B].sum(-1, dtype=torch.float64)
    if is_greedy_B.any():
        best_B1 = logits_BV.argmax(-1, keepdim=True)
        kept_BV[is_greedy_B] = torch.zeros_like(kept_BV).scatter_(1, best_B1, 1.0)[is_greedy_B]
    return Distribution(logprobs_BV=logprobs_BV, kept_BV=kept_BV, total_B=total_B)


def invert(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """int64 [B]: the first token whose cumulative weight exceeds that share of the row's whole weight."""
    cumulative_BV = weights_BV.cumsum(-1, dtype=torch.float64)
    total_B = cumulative_BV[:, -1]
    # Strictly below the total, so that rounding never lands behind the last token of positive probability.
    target_B = torch.minimum(uniform_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    return torch.searchsorted(cumulative_BV, target_B[:, None], right=True)[:, 0]


def measure(target: Distribution, tokens_B: Tensor) -> Drawn:
    """The tokens with their log-probs."""
    logprobs_B = target.logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
    kept_B = target.kept_BV.gather(1, tokens_B[:, None])[:, 0]
    # Where nothing was cut the two are equal to the last bit; a greedy point has the log-prob 0.
    truncated_B = torch.where(kept_B == 1, 0.0, logprobs_B.double() - target.total_B.log())
    return Drawn(tokens_B=tokens_B, logprobs_B=logprobs_B.float(), truncated_logprobs_B=truncated_B.float())


def _require_finite(per_row_B: Tensor) -> None:
    """A NaN or +inf among the logits of a row, or nothing but -inf, makes NaN of whatever a softmax gives."""
    if not torch.isfinite(per_row_B).all():
        raise FloatingPointError("logits are not finite, nothing can be sampled from them")


def _limit(probs_BV: Tensor, top_p_B: Tensor, top_k_B: Tensor) -> Tensor:
    """Zero what top-k and top-p exclude; at least the most probable token stays.

    Most rows are decided by their head, the `HEAD` most probable tokens, and need no sort of the whole vocabulary.
    """
    head_BK, order_BK = probs_BV.topk(min(HEAD, probs_BV.shape[-1]), dim=-1)
    by_top_p_B = (top_k_B == 0) & (head_BK.sum(-1, dtype=torch.float64) > top_p_B + 1e-6)
    by_head_B = by_top_p_B | ((top_k_B > 0) & (top_k_B <= head_BK.shape[-1]))
    limited_BV = torch.zeros_like(probs_BV).scatter(1, order_BK, _cut(head_BK, top_p_B, top_k_B))
    if not by_head_B.all():
        rest_B = ~by_head_B
        sorted_BV, order_BV = torch.sort(probs_BV[rest_B], dim=-1, descending=True, stable=True)
        cut_BV = _cut(sorted_BV, top_p_B[rest_B], top_k_B[rest_B])
        limited_BV[rest_B] = torch.zeros_like(sorted_BV).scatter(1, order_BV, cut_BV)
    return limited_BV


def _cut(sorted_BV: Tensor, top_p_B: Tensor, top_k_B: Tensor) -> Tensor:
    """Descending probabilities with the excluded ones set to 0. Without top-k, they are of a whole of 1."""
    ranks_V = torch.arange(sorted_BV.shape[-1], device=sorted_BV.device)
    off_B1 = (top_k_B == 0)[:, None]
    exact_BV = sorted_BV.double().masked_fill(~off_B1 & (ranks_V >= top_k_B[:, None]), 0.0)
    whole_B1 = torch.where(off_B1, 1.0, exact_BV.sum(-1, keepdim=True))
    is_kept_BV = (exact_BV.cumsum(-1) - exact_BV < top_p_B[:, None] * whole_B1) | (top_p_B[:, None] == 1)
    return torch.where(is_kept_BV, exact_BV, 0.0).to(sorted_BV.dtype)


def _splitmix64(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
