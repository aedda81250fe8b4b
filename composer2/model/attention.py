"""Multi-head latent attention: keys and values come from one small latent per token; two forms of the same function.

    latent c = norm(W_kva x)[:R]      rope key k_r = rope(W_kva x)[R:]  (one for all heads)
    expanded: k_h = [W_uk,h c ; k_r]   v_h = W_uv,h c      o = softmax(q_h k_h / sqrt(d) * yarn) v_h      (training)
    absorbed: (W_uk,h^T q_nope,h) c + q_rope,h k_r,  then W_uv,h (sum_t p_t c_t)                           (decoding)

The absorbed form never expands a cached token: the cache holds c and k_r only.
Source: report §6.1 (MLA, QK192/V128); DeepSeek-V2/V3 papers; rows M1 M2 M4.
Latent norms use epsilon 1e-6 whatever the config says, as in
the published code. The YaRN constant `mscale_all_dim` multiplies the softmax scale.
Choice: on a CPU a few sequences at a time are gathered from the cache, each few up to the longest of them: their
latents are read from memory once, in whole rows, and both products find them in the processor's cache. The engine hands
in sequences of similar length as neighbours. Elsewhere the whole batch looks at once.
Choice: values are padded to the query width for the attention call, because fused kernels want equal widths.
Choice: a row may be spread over processes (row D2). `LatentAttention.gather` then brings the latents of all of them,
which are far smaller than the keys and values that every process expands for itself; `KeyView` says who sees whom.

Shape letters: B batch, T tokens, S new tokens, M cache positions, N cache rows (slots or pages), X rows of a
table, b sequences of a part, H heads, D model, C cache width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from composer2.model.config import ModelConfig
from composer2.model.layers import RMSNorm, apply_rope

LATENT_NORM_EPS = 1e-6

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float], torch.Tensor]
"""(query_BHTd, key_BHTd, value_BHTd, mask_B1TT or None for causal, scale) -> out_BHTd. All widths equal."""

Look = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(query [b, ...], entries_bMC, bias_bSM) -> what the queries make of the cached entries they may look at."""

PART_ROWS = 8
"""Sequences that look at the cache together on a CPU."""

Gather = Callable[[torch.Tensor], Callable[[], torch.Tensor]]
"""entries_BTC of this process -> a function that waits and returns entries_BMC of all processes. Differentiable."""


@dataclass(frozen=True, kw_only=True)
class KeyView:
    """Which keys of a whole row the tokens that lie here may look at, when a row is spread over processes."""

    query_index_T: torch.Tensor
    """int64: place of each token here in its row."""
    key_index_M: torch.Tensor
    """int64: place of each gathered key in its row."""
    visible_until_BM: torch.Tensor
    """int64: a key is seen from its own place on, by the places before this one."""

    def mask(self) -> torch.Tensor:
        """bool [B, 1, T, M]."""
        query_T1, key_M = self.query_index_T[:, None], self.key_index_M
        return ((key_M <= query_T1) & (query_T1 < self.visible_until_BM[:, None, :]))[:, None]


@dataclass(frozen=True, kw_only=True)
class CachePart:
    """What some neighbouring sequences of a batch look at."""

    rows: slice
    """Their place in the batch."""
    pages_bX: torch.Tensor
    """int64 [b, X]: the cache rows that hold their first `context_len` positions."""
    context_len: int
    """Cache positions looked at: [0, context_len)."""
    bias_bSM: torch.Tensor
    """0 where a token may look, -inf elsewhere."""

    def read(self, cache_NMC: torch.Tensor) -> torch.Tensor:
        """[b, context_len, C]: what each sequence has in the cache."""
        rows, width = self.pages_bX.shape
        if width == 1:
            return cache_NMC[:, : self.context_len].index_select(0, self.pages_bX[:, 0])
        return cache_NMC.index_select(0, self.pages_bX.flatten()).view(rows, -1, cache_NMC.shape[2])[
            :, : self.context_len
        ]


@dataclass(frozen=True, kw_only=True)
class CacheView:
    """Where one cached forward reads and writes, worked out once for all layers."""

    parts: tuple[CachePart, ...]
    """The whole batch, in order."""
    write_index: torch.Tensor
    """int64 [W]: row * M + offset of every token that is written."""
    write_mask_BS: torch.Tensor | None
    """Tokens that are written; None when all are."""

    def write(self, cache_NMC: torch.Tensor, entries_BSC: torch.Tensor) -> None:
        """Put the new tokens' entries into the cache."""
        fresh = entries_BSC.flatten(0, 1) if self.write_mask_BS is None else entries_BSC[self.write_mask_BS]
        cache_NMC.view(-1, cache_NMC.shape[-1]).index_copy_(0, self.write_index, fresh.to(cache_NMC.dtype))

    def look(self, cache_NMC: torch.Tensor, query: torch.Tensor, core: Look) -> torch.Tensor:
        """What `core` makes of the queries [B, ...] and the cache, part by part."""
        found = [core(query[part.rows], part.read(cache_NMC).to(query.dtype), part.bias_bSM) for part in self.parts]
        return found[0] if len(found) == 1 else torch.cat(found)


def cache_view(
    position_ids_BS: torch.Tensor, cache_NMC: torch.Tensor, slot_ids: torch.Tensor, dtype: torch.dtype
) -> CacheView:
    """The view of a batch whose token positions are given (-1: padding), onto caches shaped like `cache_NMC`.

    `slot_ids` has each sequence's cache row, int64 [B], or table of rows, int64 [B, X]; `dtype` is that of the bias.
    ValueError for positions that the cache does not have.
    """
    row_len = cache_NMC.shape[1]
    table_BX = slot_ids.long() if slot_ids.ndim == 2 else slot_ids.long()[:, None]
    max_len = row_len * table_BX.shape[1]
    positions = position_ids_BS.long()
    low, last_B = int(positions.min()), positions.amax(dim=1).tolist()
    if max(last_B) >= max_len or low < -1:
        raise ValueError(f"position_ids are {low} .. {max(last_B)}, accepted is -1 .. {max_len - 1}")
    if len(table_BX) != len(positions):
        raise ValueError(f"slot_ids hold {len(table_BX)} slots, accepted is one per row: {len(positions)}")
    seen_until_BS1 = positions.clamp_min(0)[..., None]
    if table_BX.shape[1] == 1:
        index_BS = table_BX * row_len + positions
    else:
        index_BS = table_BX.gather(1, seen_until_BS1[..., 0] // row_len) * row_len + positions % row_len
    hidden = torch.arange(max(0, *last_B) + 1, device=positions.device) > seen_until_BS1
    bias_BSM = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))
    part_rows = PART_ROWS if positions.device.type == "cpu" else len(positions)
    parts = []
    for first in range(0, len(positions), part_rows):
        rows = slice(first, first + part_rows)
        context_len = max(0, *last_B[rows]) + 1
        pages_bX, bias_bSM = table_BX[rows, : -(-context_len // row_len)], bias_BSM[rows, :, :context_len]
        parts.append(CachePart(rows=rows, pages_bX=pages_bX, context_len=context_len, bias_bSM=bias_bSM))
    write_mask = positions >= 0 if low < 0 else None
    return CacheView(
        parts=tuple(parts),
        write_index=index_BS.flatten() if write_mask is None else index_BS[write_mask],
        write_mask_BS=write_mask,
    )


def document_mask(document_ids_BT: torch.Tensor) -> torch.Tensor:
    """bool [B, 1, T, T]: causal within equal ids; padding (-1) sees itself only, so that no row is empty."""
    length = document_ids_BT.shape[1]
    same = document_ids_BT[:, :, None] == document_ids_BT[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids_BT.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=document_ids_BT.device)
    real = (document_ids_BT >= 0)[:, :, None]
    return ((same & causal & real) | itself)[:, None]


def tree_mask(visible_until_BT: torch.Tensor) -> torch.Tensor:
    """bool [B, 1, T, T] for rows in depth-first order: token i sees j when j <= i < visible_until[j] (row R11)."""
    index_T = torch.arange(visible_until_BT.shape[1], device=visible_until_BT.device)
    return ((index_T[None, :] <= index_T[:, None]) & (index_T[:, None] < visible_until_BT[:, None, :]))[:, None]


def sdpa_attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """The attention core of torch."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)


def reference_attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """The definition of the attention core."""
    if mask is None:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    scores = (query @ key.transpose(-2, -1) * scale).masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1) @ value


class LatentAttention(nn.Module):
    """Multi-head latent attention (row M2)."""

    def __init__(self, config: ModelConfig, attend: Attend = sdpa_attend) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.nope, self.rope, self.value_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.rank, self.attend = config.kv_lora_rank, attend
        self.gather: Gather | None = None
        self.scale = config.qk_head_dim**-0.5
        if config.rope_scaling is not None:
            self.scale *= config.rope_scaling.softmax_scale
        hidden, width = config.hidden_size, self.num_heads * config.qk_head_dim
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, width, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.rank + self.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(self.rank, LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(self.rank, self.num_heads * (self.nope + self.value_dim), bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.value_dim, hidden, bias=False)

    def forward(
        self, x_BTD: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Expanded form over whole rows. `mask` is bool [B, 1, T, T], or None for one causal document a row.

        With `gather`, keys are those of all processes, M of them, and `mask` is [B, 1, T, M]; the gathering starts
        before the queries are computed and is waited for after."""
        B, T, _ = x_BTD.shape
        latent, k_rope = self._latent(x_BTD, rope)
        arrival = None if self.gather is None else self.gather(torch.cat((latent, k_rope), dim=-1))
        q_nope, q_rope = self._query(x_BTD, rope)
        if arrival is not None:
            latent, k_rope = arrival().split((self.rank, self.rope), dim=-1)
            if mask is None or mask.shape[-1] != latent.shape[1]:
                given = None if mask is None else tuple(mask.shape)
                raise ValueError(f"mask is {given}, accepted with gathered keys is [B, 1, T, M = {latent.shape[1]}]")
        expanded = self.kv_b_proj(latent).unflatten(-1, (self.num_heads, self.nope + self.value_dim))
        k_nope, value = expanded.split((self.nope, self.value_dim), dim=-1)
        k_rope = k_rope[:, :, None].expand(-1, -1, self.num_heads, -1)
        query = torch.cat((q_nope, q_rope), dim=-1).transpose(1, 2)
        key = torch.cat((k_nope, k_rope.to(k_nope.dtype)), dim=-1).transpose(1, 2)
        value = value.transpose(1, 2)
        missing = self.nope + self.rope - self.value_dim
        if missing > 0:
            value = F.pad(value, (0, missing))
        elif missing < 0:
            query, key = F.pad(query, (0, -missing)), F.pad(key, (0, -missing))
        out = self.attend(query, key, value, mask, self.scale)[..., : self.value_dim]
        return self.o_proj(out.transpose(1, 2).reshape(B, T, self.num_heads * self.value_dim))

    def forward_cached(
        self,
        x_BSD: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        cache_NMC: torch.Tensor,
        view: CacheView,
    ) -> torch.Tensor:
        """Absorbed form: writes the new tokens' latents into the cache, then looks at the cache of each slot."""
        B, S, _ = x_BSD.shape
        H, R = self.num_heads, self.rank
        latent, k_rope = self._latent(x_BSD, rope)
        view.write(cache_NMC, torch.cat((latent, k_rope), dim=-1))

        q_nope, q_rope = self._query(x_BSD, rope)
        up_key, up_value = self.kv_b_proj.weight.view(H, -1, R).split((self.nope, self.value_dim), dim=1)
        q_latent = torch.bmm(q_nope.flatten(0, 1).transpose(0, 1), up_key).view(H, B, S, R).permute(1, 2, 0, 3)
        query = torch.cat((q_latent, q_rope), dim=-1) * self.scale
        mixed = view.look(cache_NMC, query, self._look).view(B * S, H, R).transpose(0, 1)
        out = torch.bmm(mixed, up_value.transpose(1, 2)).transpose(0, 1).reshape(B, S, H * self.value_dim)
        return self.o_proj(out)

    def _look(self, query_bSHC: torch.Tensor, cached_bMC: torch.Tensor, bias_bSM: torch.Tensor) -> torch.Tensor:
        """Latents [b, S * H, R], weighed by the softmax over the cache."""
        scores = torch.bmm(query_bSHC.flatten(1, 2), cached_bMC.transpose(1, 2)).unflatten(1, query_bSHC.shape[1:3])
        weights = torch.softmax(scores.add_(bias_bSM[:, :, None]), dim=-1).flatten(1, 2)
        return torch.bmm(weights, cached_bMC[..., : self.rank])

    def _query(self, x_BTD: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [B, T, H, nope] and, rotated, [B, T, H, rope]."""
        if hasattr(self, "q_proj"):
            query = self.q_proj(x_BTD)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD)))
        query = query.view(*x_BTD.shape[:2], self.num_heads, self.nope + self.rope)
        q_nope, q_rope = query.split((self.nope, self.rope), dim=-1)
        cos, sin = rope
        return q_nope, apply_rope(q_rope, cos[:, :, None], sin[:, :, None])

    def _latent(
        self, x_BTD: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed latents [B, T, R] and rotated shared keys [B, T, rope]: what a cache holds."""
        latent, k_rope = self.kv_a_proj_with_mqa(x_BTD).split((self.rank, self.rope), dim=-1)
        return self.kv_a_layernorm(latent), apply_rope(k_rope, *rope)
