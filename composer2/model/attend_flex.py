"""FlexAttention as an attention core: the same call as `sdpa_attend`, for GPUs.

    out_h = softmax(q_h k_h^T * scale, over the positions the mask allows) v_h

Source: row K9 (a fused core behind the `attend` seam, checked against the plain twin at QK 192, V 128).
Choice: a block mask built from the boolean mask serves documents and causality alike, so that one core covers both.
Choice: on a CPU torch runs it forward only and unfused: good for the check against the twin, refused with gradients.

Shape letters: B batch, T tokens, S keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from composer2.kernels.backend import BackendUnavailable


def flex_attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """An `Attend`: compiled on a GPU; on a CPU plain and without gradients, else BackendUnavailable."""
    blocks = block_mask(mask, query.shape[-2], key.shape[-2], query.device)
    if query.device.type == "cuda":
        out: torch.Tensor = _compiled()(query, key, value, block_mask=blocks, scale=scale)
        return out
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        raise BackendUnavailable("FlexAttention has no backward pass on a CPU; use sdpa_attend, or a CUDA device")
    out = flex_attention(query, key, value, block_mask=blocks, scale=scale)  # type: ignore[assignment]
    return out


def block_mask(mask: torch.Tensor | None, num_queries: int, num_keys: int, device: torch.device) -> BlockMask:
    """The blocks of `mask`, bool [B, 1, T, S], or of the causal triangle when it is None."""

    def causal(b: Any, h: Any, t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return t >= s

    def given(b: Any, h: Any, t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        assert mask is not None
        return mask[b, 0, t, s]

    batch = None if mask is None else len(mask)
    return create_block_mask(causal if mask is None else given, batch, None, num_queries, num_keys, device=str(device))


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)
