"""Grouped-query attention: queries have H heads, keys and values fewer (G); each of those serves H / G query heads.

    q = rope(norm(W_q x))   k = rope(norm(W_k x))   v = W_v x      out = W_o softmax(q k / sqrt(d)) v
    cache of a token: [k ; v], 2 G d values

The norm is none, one RMSNorm shared by all heads (Qwen3), or one over the whole projection before it is cut into heads
(MiniMax-M2). Rotary positions turn the first `rotary_dim` numbers of a head, pairs half-split.
A windowed layer (row M10) sees the `sliding_window` latest tokens of a document and its first `num_sink_tokens`.
Source: MiniMax-M2 report (full attention; the hybrid sliding-window experiments, sink tokens); published configs and
code of Qwen3 and MiniMax-M2 (partial rotary, QK-norm); rows M3 M4 M10.
Choice: keys and values are repeated before the attention core, because a core takes equal numbers of heads.
Choice: a sink is a real first token of the document, not a learned one, so that any layer may be windowed afterwards.

Shape letters: B batch, T tokens, S new tokens, M cache positions, N cache rows, H query heads, G key heads, D model,
d head width, C cache width, b sequences that look at the cache together.
"""

from __future__ import annotations

import torch
from torch import nn

from composer2.model.attention import Attend, CacheView, sdpa_attend
from composer2.model.config import ModelConfig
from composer2.model.layers import RMSNorm, apply_rope_half


def window_mask(mask: torch.Tensor | None, position_ids_BT: torch.Tensor, config: ModelConfig) -> torch.Tensor | None:
    """bool [B, 1, T, T]: `mask` (None: causal) without what a windowed layer cannot see; None without windows."""
    if config.sliding_window is None:
        return None
    if mask is None:
        length = position_ids_BT.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=position_ids_BT.device).tril()[None, None]
    query, key = position_ids_BT[:, None, :, None], position_ids_BT[:, None, None, :]
    return mask & ((query - key < config.sliding_window) | (key < config.num_sink_tokens))


class GroupedQueryAttention(nn.Module):
    """The layer; tensor names follow the published checkpoints of the families."""

    def __init__(self, config: ModelConfig, attend: Attend = sdpa_attend, *, is_windowed: bool = False) -> None:
        super().__init__()
        self.num_heads, self.kv_heads = config.num_attention_heads, config.grouped_kv_heads
        self.head_dim, self.attend = config.grouped_head_dim, attend
        self.scale = self.head_dim**-0.5
        self.window = config.sliding_window if is_windowed else None
        self.num_sinks = config.num_sink_tokens
        hidden, width, shared = config.hidden_size, self.num_heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, width, bias=False)
        self.k_proj = nn.Linear(hidden, shared, bias=False)
        self.v_proj = nn.Linear(hidden, shared, bias=False)
        self.o_proj = nn.Linear(width, hidden, bias=False)
        self.qk_norm = config.qk_norm
        if config.qk_norm != "none":
            widths = (width, shared) if config.qk_norm == "flat" else (self.head_dim, self.head_dim)
            self.q_norm = RMSNorm(widths[0], config.rms_norm_eps)
            self.k_norm = RMSNorm(widths[1], config.rms_norm_eps)

    def forward(
        self, x_BTD: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Whole rows. `mask` is bool [B, 1, T, T] (of a windowed layer: `window_mask`), or None for one causal
        document a row."""
        query_BTHd, key_BTGd, value_BTGd = self._project(x_BTD, rope)
        repeats = self.num_heads // self.kv_heads
        key, value = (part.transpose(1, 2).repeat_interleave(repeats, dim=1) for part in (key_BTGd, value_BTGd))
        out = self.attend(query_BTHd.transpose(1, 2), key, value, mask, self.scale)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def forward_cached(
        self,
        x_BSD: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        cache_NMC: torch.Tensor,
        view: CacheView,
    ) -> torch.Tensor:
        """New tokens: their keys and values go into the cache, then each looks at the cache of its slot."""
        B, S, _ = x_BSD.shape
        query_BSHd, key_BSGd, value_BSGd = self._project(x_BSD, rope)
        entry_BSC = torch.cat((key_BSGd.flatten(2), value_BSGd.flatten(2)), dim=-1)
        view.write(cache_NMC, entry_BSC)
        query = query_BSHd.unflatten(2, (self.kv_heads, -1)).permute(0, 2, 1, 3, 4) * self.scale  # [B, G, S, H / G, d]
        mixed = view.look(cache_NMC, query, self._look).permute(0, 2, 1, 3, 4)
        return self.o_proj(mixed.reshape(B, S, self.num_heads * self.head_dim))

    def _look(self, query: torch.Tensor, cached_bMC: torch.Tensor, bias_bSM: torch.Tensor) -> torch.Tensor:
        """[b, G, S, H / G, d]: values weighed by the softmax over the cache, for queries of the same shape."""
        key, value = (
            part.unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2) for part in cached_bMC.chunk(2, dim=-1)
        )  # [b, G, M, d]
        scores = torch.matmul(query.flatten(2, 3), key.transpose(-1, -2)).unflatten(2, query.shape[2:4])
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) + self._bias(bias_bSM)[:, None, :, None]
        weights = torch.softmax(scores, dim=-1).to(value.dtype).flatten(2, 3)
        return torch.matmul(weights, value).unflatten(2, query.shape[2:4])

    def _bias(self, bias_bSM: torch.Tensor) -> torch.Tensor:
        """The bias, and -inf outside the window of a windowed layer.

        A token may see the positions up to its own, so their number tells its position."""
        if self.window is None:
            return bias_bSM
        key = torch.arange(bias_bSM.shape[-1], device=bias_bSM.device)
        query = (bias_bSM == 0).sum(dim=-1, keepdim=True) - 1
        return bias_bSM.masked_fill((query - key >= self.window) & (key >= self.num_sinks), float("-inf"))

    def _project(
        self, x_BTD: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [B, T, H, d] and keys [B, T, G, d], normed and rotated, and values [B, T, G, d], all of one dtype."""
        query, key, value = self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)
        if self.qk_norm == "flat":
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in (query, key, value))
        if self.qk_norm == "head":
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = (table[:, :, None] for table in rope)
        query, key = (apply_rope_half(part, cos, sin).to(value.dtype) for part in (query, key))
        return query, key, value
