"""Expert parallelism: tokens travel to the ranks that hold their experts, and back.

    dispatch  rows sorted by expert are cut where the ranks' experts begin, and exchanged (all-to-all)
    arrival   from every rank a run of rows per local expert; reordered by expert, ranks in order within an expert
    combine   the way back, then the weighted sum of the sender (kernels/dispatch.py)

In: tokens, their experts and gate weights, and a function that runs the experts which lie here (the `exchange` seam of
model/moe.py). Out: the weighted sums, on the rank of the token.
Source: report §6.1 (MXFP8 before dispatch, BF16 combine; DeepEP); rows D3 K5.
Choice: under the `mxfp8` wire a row is one run of bytes, D codes and D / 32 scales, so that one transfer carries both:
33 bytes for 32 elements, where BF16 has 64. Gradients of the rows travel in the dtype of the rows, BF16 there.
Choice: the counts are exchanged first, and read by the CPU; experts without tokens, and ranks without rows, are nothing
special.

Shape letters: R rows sent, A rows that arrive, D model, W ranks, E experts, L experts on this rank, B bytes of a row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from composer2.kernels.dispatch import Packed, combine_tokens, pack_tokens
from composer2.kernels.formats import MXFP8, MXFP8_BLOCK
from composer2.kernels.mxfp8 import dequantize_mxfp8
from composer2.model.moe import FeedForward
from composer2.model.transformer import RoutingStats


class ExpertExchange:
    """The `exchange` seam: all-to-all over the expert ranks, each of which holds an equal run of the experts."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int, wire: str = "native") -> None:
        """`wire`: native, bf16 or mxfp8, what rows travel as; all but native come back as BF16."""
        self.group, self.size, self.num_experts, self.wire = group, dist.get_world_size(group), num_experts, wire
        if num_experts % self.size:
            raise ValueError(f"num_experts is {num_experts}, accepted is a multiple of the expert ranks {self.size}")

    def __call__(
        self, x_TD: torch.Tensor, expert_ids_TK: torch.Tensor, weights_TK: torch.Tensor, experts: FeedForward
    ) -> torch.Tensor:
        """[T, D] in the dtype of `x_TD` times the weights. Every rank of the group calls it, with tokens or without."""
        packed = pack_tokens(x_TD, expert_ids_TK, self.num_experts, wire=self.wire)
        return combine_tokens(self._visit(packed, experts), packed, weights_TK)

    def _visit(self, packed: Packed, experts: FeedForward) -> torch.Tensor:
        """[R, D]: what the experts made of each row."""
        sent_WL = packed.offsets_E.diff(prepend=packed.offsets_E.new_zeros(1)).long().view(self.size, -1)
        arriving_WL = torch.empty_like(sent_WL)
        dist.all_to_all_single(arriving_WL, sent_WL, group=self.group)
        splits = (sent_WL.sum(1).tolist(), arriving_WL.sum(1).tolist())
        rows_AD, payload_AB = self._dispatch(packed, splits)

        order_A = by_expert(arriving_WL)
        offsets_L = arriving_WL.sum(0).cumsum(0).to(torch.int32)
        codes = None
        if payload_AB is not None:
            codes = split_payload(payload_AB.index_select(0, order_A), rows_AD.shape[1])
        out_AD = experts(rows_AD.index_select(0, order_A), offsets_L, codes)
        if packed.wire != "native":
            out_AD = out_AD.to(torch.bfloat16)
        back_AD = torch.empty_like(out_AD).index_copy(0, order_A, out_AD)
        returned: torch.Tensor = _AllToAll.apply(back_AD, splits[::-1], self.group)
        return returned

    def _dispatch(
        self, packed: Packed, splits: tuple[list[int], list[int]]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows [A, D] in order of arrival; under the mxfp8 wire also the bytes [A, B] they were decoded from."""
        if packed.codes is None:
            rows_AD: torch.Tensor = _AllToAll.apply(packed.rows_RD, splits, self.group)
            return rows_AD, None
        payload_AB = exchange_rows(join_payload(packed.codes), splits, self.group)
        decoded = dequantize_mxfp8(split_payload(payload_AB, packed.rows_RD.shape[1]), torch.bfloat16)
        rows_AD = _Arrived.apply(packed.rows_RD, decoded, splits, self.group)
        return rows_AD, payload_AB


def by_expert(arriving_WL: torch.Tensor) -> torch.Tensor:
    """int64 [A]: the order by expert, then by rank, of rows that arrive by rank, then by expert."""
    experts_L = torch.arange(arriving_WL.shape[1], device=arriving_WL.device)
    expert_A = experts_L.repeat(len(arriving_WL)).repeat_interleave(arriving_WL.flatten())
    return expert_A.argsort(stable=True)


def join_payload(codes: MXFP8) -> torch.Tensor:
    """uint8 [R, D + D / 32]: a row's codes, then its scales."""
    return torch.cat((codes.codes.view(torch.uint8), codes.scales), dim=1)


def split_payload(payload_RB: torch.Tensor, width: int) -> MXFP8:
    """The inverse, for rows of `width` elements."""
    codes, scales = payload_RB.split((width, width // MXFP8_BLOCK), dim=1)
    return MXFP8(codes.contiguous().view(torch.float8_e4m3fn), scales.contiguous())


def exchange_rows(rows: torch.Tensor, splits: tuple[list[int], list[int]], group: dist.ProcessGroup) -> torch.Tensor:
    """All-to-all of runs of rows, in rank order: `splits` are the counts sent and the counts received. No gradient."""
    sent, received = splits
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


class _AllToAll(torch.autograd.Function):
    """`exchange_rows`; gradients go back the same way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, splits: tuple[list[int], list[int]], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.splits, ctx.group = splits, group
        return exchange_rows(rows, splits, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return exchange_rows(grads[0], ctx.splits[::-1], ctx.group), None, None


class _Arrived(torch.autograd.Function):
    """`decoded` forward; its gradient goes back to the rows that it was quantised from, as they are."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        decoded: torch.Tensor,
        splits: tuple[list[int], list[int]],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.splits, ctx.group = splits, group
        return decoded.view_as(decoded)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return exchange_rows(grads[0], ctx.splits[::-1], ctx.group), None, None, None


@torch.no_grad()
def reduce_load(load_LE: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Tokens per expert summed over ranks (None: all), int64: what moves the selection bias, equally everywhere."""
    total = load_LE.clone()
    dist.all_reduce(total, group=group)
    return total


@torch.no_grad()
def reduce_routing(stats: RoutingStats, group: dist.ProcessGroup | None = None) -> RoutingStats:
    """Loads and counts summed over ranks (None: all); the experts used stay those of the tokens here."""
    summed = {}
    for name, value in vars(stats).items():
        if name != "expert_ids_BTLK":
            summed[name] = value.clone()
            dist.all_reduce(summed[name], group=group)
    return replace(stats, **summed)
