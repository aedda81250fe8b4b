"""Speculative decoding: a guess of the next token is checked while that token is computed; a step may yield two.

    d ~ q (MTP module, from what it knows before the step)        p, p' = trunk after the last token, and after d
    u q(d) < p(d):  take d, then draw one more token from p'
    otherwise:      draw from max(p - q, 0) / sum, the part of p that q lacks

A token then has the distribution p whatever q is: P(x) = min(p, q)(x) + (1 - sum min(p, q)) * residual(x) = p(x). The
guess is taken with probability sum_v min(p, q).
In: trunk outputs, drafts, logits. Out: tokens and their log-probs under p, as without drafts.

Source: row I5; report §3 (MTP layers speed up serving); the rejection rule is that of speculative sampling.
p and q are both cut by the request's temperature, top-k and top-p, so p is exactly what plain sampling draws from.
Choice: one draft a step, by the first MTP module. It has its own layer in the cache, whose entry at position t needs
token t + 1; it is written in prefill too, so a context of two tokens or more is never without a draft, and the draft
depends on the context alone: same seed, same tokens, whatever else is in the batch or was preempted.
Choice: draft, check and draw take their uniform numbers from three streams of the request's seed.

Shape letters: B sequences, S positions of a step, D model, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from composer2.model.engine.sampler import Distribution, invert

DRAW, DRAFT, CHECK = 0, 1, 2
"""Streams of uniform numbers."""


def probabilities(target: Distribution) -> Tensor:
    """float64 [B, V] of sum 1: what a plain draw has as its distribution."""
    kept_BV = target.kept_BV.double()
    return kept_BV / kept_BV.sum(-1, keepdim=True)


def verify(
    p_BV: Tensor, q_BV: Tensor, drafts_B: Tensor, check_uniform_B: Tensor, draw_uniform_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B] distributed as `p_BV`, and bool [B]: it is the draft.

    A row of zeros in `q_BV` has no draft and is drawn from p. Everything but `drafts_B` (int64) is float64.
    """
    p_B = p_BV.gather(1, drafts_B[:, None])[:, 0]
    q_B = q_BV.gather(1, drafts_B[:, None])[:, 0]
    is_taken_B = (check_uniform_B * q_B < p_B) & (q_B > 0)
    residual_BV = (p_BV - q_BV).clamp_min(0)
    # All zeros only where p = q to the last bit; the draft is taken there, and p stands in for the unused row.
    residual_BV = torch.where(residual_BV.sum(-1, keepdim=True) > 0, residual_BV, p_BV)
    return torch.where(is_taken_B, drafts_B, invert(residual_BV, draw_uniform_B)), is_taken_B
