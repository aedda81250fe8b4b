"""Expert parallelism: tokens travel to the ranks that hold their experts, and back.

    dispatch  rows sorted by expert are cut where the ranks' experts begin, and exchanged (all-to-all)
    arrival   from every rank a run of rows per local expert; reordered by expert, ranks in order within an expert
    combine   the way back, then the weighted sum of the sender (kernels/dispatch.py)

In: tokens, their experts and gate weights, and a function that runs the experts which lie here (the `exchange` seam of
model/moe.py). Out: the weighted sums, on the rank of the token.
Source: report §6.1 (MXFP8 before dispatch, BF16 combine; DeepEP); rows D3 K5.
Choice: under the `mxfp8` wire a row is one run of bytes, D codes and D / 32 scales, so that one transfer carries both:
33 bytes for 32 elements, where BF16 has 64. Gradients of the rows travel in the dtype of the rows, BF16 there.
Choice: tokens may go in parts, so that part 2 travels while the experts work on part 1, forward and backward
(transfer.py). Sums of weight gradients then run over parts: exact in exact arithmetic, and MXFP8 blocks of tokens end
with a part.
Choice: the counts are exchanged first, and read by the CPU; experts without tokens, and ranks without rows, are nothing
special.

Shape letters: R rows sent, A rows that arrive, D model, W ranks, E experts, L experts on this rank, B bytes of a row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from composer2.dist.transfer import Transfer
from composer2.kernels.dispatch import Packed, combine_tokens, pack_tokens
from composer2.kernels.formats import MXFP8, MXFP8_BLOCK
from composer2.kernels.mxfp8 import dequantize_mxfp8
from composer2.model.moe import FeedForward
from composer2.model.transformer import RoutingStats


class ExpertExchange:
    """The `exchange` seam: all-to-all over the expert ranks, each of which holds an equal run of the experts."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int, wire: str = "native", num_parts: int = 1) -> None:
        """`wire`: native, bf16 or mxfp8, what rows travel as; all but native come back as BF16. `num_parts`: runs of
        tokens that follow each other, so that one travels while another is computed; the same on every rank."""
        self.group, self.size, self.num_experts, self.wire = group, dist.get_world_size(group), num_experts, wire
        self.num_parts = num_parts
        if num_experts % self.size:
            raise ValueError(f"num_experts is {num_experts}, accepted is a multiple of the expert ranks {self.size}")
        if num_parts < 1:
            raise ValueError(f"num_parts is {num_parts}, accepted is 1 or more")

    def __call__(
        self, x_TD: torch.Tensor, expert_ids_TK: torch.Tensor, weights_TK: torch.Tensor, experts: FeedForward
    ) -> torch.Tensor:
        """[T, D] in the dtype of `x_TD` times the weights. Every rank of the group calls it, with tokens or without."""
        runs = [tensor.tensor_split(self.num_parts) for tensor in (x_TD, expert_ids_TK, weights_TK)]
        parts = [pack_tokens(x, ids, self.num_experts, wire=self.wire) for x, ids in zip(*runs[:2], strict=True)]
        visits = [_Visit(packed, counts, self.group) for packed, counts in zip(parts, self._counts(parts), strict=True)]
        for visit in visits:
            visit.leave()
        for visit in visits:
            visit.work(experts)
        return torch.cat(
            [
                combine_tokens(visit.home(), visit.packed, weights)
                for visit, weights in zip(visits, runs[2], strict=True)
            ]
        )

    def _counts(self, parts: list[Packed]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per part the rows to and from each rank, by expert there: int64 [W, L]; one exchange for all parts."""
        sent = torch.stack([p.offsets_E.diff(prepend=p.offsets_E.new_zeros(1)).long() for p in parts])
        sent_WPL = sent.view(len(parts), self.size, -1).transpose(0, 1).contiguous()
        arriving_WPL = torch.empty_like(sent_WPL)
        dist.all_to_all_single(arriving_WPL, sent_WPL, group=self.group)
        return list(zip(sent_WPL.unbind(1), arriving_WPL.unbind(1), strict=True))


class _Visit:
    """The way of one run of tokens: `leave`, `work` at the experts, back `home`."""

    def __init__(self, packed: Packed, counts: tuple[torch.Tensor, torch.Tensor], group: dist.ProcessGroup) -> None:
        sent_WL, self.arriving_WL = counts
        splits = (sent_WL.sum(1).tolist(), self.arriving_WL.sum(1).tolist())
        self.packed = packed
        self.there, self.back = Transfer(splits, group), Transfer(splits[::-1], group)

    def leave(self) -> None:
        """Send the rows: as they are, or as the bytes of their codes."""
        codes = self.packed.codes
        self.there.begin(self.packed.rows_RD, None if codes is None else join_payload(codes))

    def work(self, experts: FeedForward) -> None:
        """Wait for what arrives, run the experts on it, send the results back."""
        width, codes = self.packed.rows_RD.shape[1], None
        order_A = by_expert(self.arriving_WL)
        if self.packed.codes is None:
            rows_AD = self.there.finish()
        else:
            payloads: list[torch.Tensor] = []

            def decode(payload_AB: torch.Tensor) -> torch.Tensor:
                payloads.append(payload_AB)
                return dequantize_mxfp8(split_payload(payload_AB, width), torch.bfloat16)

            rows_AD = self.there.finish(decode)
            codes = split_payload(payloads[0].index_select(0, order_A), width)
        offsets_L = self.arriving_WL.sum(0).cumsum(0).to(torch.int32)
        out_AD = experts(rows_AD.index_select(0, order_A), offsets_L, codes)
        if self.packed.wire != "native":
            out_AD = out_AD.to(torch.bfloat16)
        self.back.begin(torch.empty_like(out_AD).index_copy(0, order_A, out_AD))

    def home(self) -> torch.Tensor:
        """[R, D]: what the experts made of each row."""
        return self.back.finish()


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
