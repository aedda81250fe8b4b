"""DeepEP behind the `exchange` seam: a token travels once to each rank that holds an expert of it, over NVLink or RDMA.

    dispatch   token, its expert ids and gate weights -> the ranks concerned      (backward: combine)
    there      sum over the token's experts on that rank, weighed, as BF16
    combine    the ranks' sums are added on the token's own rank, in BF16         (backward: dispatch)

Unlike with `expert_parallel.ExpertExchange`, a token with two experts on one rank is sent once, and weighed there.
Source: report §6.1 (DeepEP; MXFP8 before dispatch, BF16 combine); rows D3 K5; the documented interface of
`deep_ep.Buffer` for training.
Choice: DeepEP carries FP8 rows with one four-byte word per 128 elements; four E8M0 scales of 32 elements are exactly
such a word, and it is copied, not computed with. Choice: the `native` wire is refused, DeepEP sends BF16 or FP8.
Not run on a GPU; the tests run it over a stand-in that moves the same data through gloo.

Shape letters: T tokens here, A tokens that arrive, P (token, expert) pairs of them, D model, K experts a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from composer2.kernels.backend import BackendUnavailable
from composer2.kernels.dispatch import take_rows
from composer2.kernels.formats import MXFP8
from composer2.kernels.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from composer2.model.moe import FeedForward

WIRES = ("bf16", "mxfp8")
WORD_ELEMENTS = 128


def make_buffer(group: dist.ProcessGroup, hidden_size: int) -> Any:
    """DeepEP's communication buffer for BF16 tokens of this width. BackendUnavailable where DeepEP is not installed."""
    try:
        from deep_ep import Buffer  # type: ignore[import-not-found]
    except ImportError as error:
        raise BackendUnavailable(
            f"deep_ep cannot be imported: {error}; install DeepEP or use ExpertExchange"
        ) from error
    size, hidden_bytes = dist.get_world_size(group), 2 * hidden_size
    configs = (Buffer.get_dispatch_config(size), Buffer.get_combine_config(size))
    nvlink = max(config.get_nvl_buffer_size_hint(hidden_bytes, size) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, size) for config in configs)
    return Buffer(group, nvlink, rdma)


class DeepEPExchange:
    """Tokens to their experts and back by DeepEP."""

    def __init__(self, buffer: Any, num_experts: int, wire: str = "bf16") -> None:
        """`buffer` as `make_buffer` gives it; `wire` is bf16 or mxfp8."""
        if wire not in WIRES:
            raise ValueError(f"wire is {wire!r}, accepted with DeepEP is one of {WIRES}")
        if num_experts % buffer.group_size:
            raise ValueError(f"num_experts is {num_experts}, accepted is a multiple of the ranks {buffer.group_size}")
        self.buffer, self.num_experts, self.wire = buffer, num_experts, wire

    def __call__(
        self, x_TD: torch.Tensor, expert_ids_TK: torch.Tensor, weights_TK: torch.Tensor, experts: FeedForward
    ) -> torch.Tensor:
        """BF16 sums [T, D]. Under the mxfp8 wire D is a multiple of 128."""
        if self.wire == "mxfp8" and x_TD.shape[1] % WORD_ELEMENTS:
            raise ValueError(f"tokens are {tuple(x_TD.shape)}, accepted with wire 'mxfp8' is D a multiple of 128")
        visit = _Visit(self.buffer, self.num_experts, self.wire)
        rows_AD, weights_AK = _Dispatch.apply(x_TD, weights_TK.float(), expert_ids_TK, visit)
        token_P, slot_P = (visit.ids_AK >= 0).nonzero(as_tuple=True)
        expert_P = visit.ids_AK[token_P, slot_P]
        order_P = expert_P.argsort(stable=True)
        token_P, slot_P = token_P[order_P], slot_P[order_P]
        counts_L = torch.bincount(expert_P, minlength=self.num_experts // self.buffer.group_size)
        codes = None
        if visit.codes is not None:
            codes = MXFP8(take_rows(visit.codes.codes, token_P), take_rows(visit.codes.scales, token_P))
        rows_PD = experts(rows_AD.index_select(0, token_P), counts_L.cumsum(0).to(torch.int32), codes)
        weighed_PD = rows_PD.to(torch.bfloat16) * weights_AK[token_P, slot_P][:, None]
        sums_AD = weighed_PD.new_zeros(len(rows_AD), weighed_PD.shape[1]).index_add(0, token_P, weighed_PD)
        combined: torch.Tensor = _Combine.apply(sums_AD.to(torch.bfloat16), visit)
        return combined


class _Visit:
    """What one exchange has to remember between its way there, its way back, and their gradients."""

    def __init__(self, buffer: Any, num_experts: int, wire: str) -> None:
        self.buffer, self.num_experts, self.wire = buffer, num_experts, wire
        self.handle: Any = None
        self.ids_AK = torch.empty(0, 0, dtype=torch.int64)
        self.codes: MXFP8 | None = None

    def send(self, x_TD: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Tokens [A, D] in BF16 and gate weights [A, K] that arrive; ids are then those of the experts here, or -1."""
        per_rank, per_node, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(ids_TK, self.num_experts)
        payload: Any = x_TD.to(torch.bfloat16).contiguous()
        if self.wire == "mxfp8":
            tokens = quantize_mxfp8(payload)
            payload = (tokens.codes, tokens.scales.view(torch.float32))
        arrived, self.ids_AK, weights_AK, _, self.handle, _ = self.buffer.dispatch(
            payload,
            topk_idx=ids_TK,
            topk_weights=weights_TK,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        if self.wire == "mxfp8":
            self.codes = MXFP8(arrived[0], arrived[1].contiguous().view(torch.uint8))
            arrived = dequantize_mxfp8(self.codes, torch.bfloat16)
        return arrived, weights_AK


class _Dispatch(torch.autograd.Function):
    """The way there; gradients pass the quantiser unchanged and are added up by the way back."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor, visit: _Visit
    ) -> tuple[torch.Tensor, ...]:
        ctx.visit, ctx.dtype = visit, x_TD.dtype
        return visit.send(x_TD, weights_TK, ids_TK)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weights = grads[0].to(torch.bfloat16).contiguous(), grads[1].contiguous()
        grad_x, grad_weights, _ = ctx.visit.buffer.combine(rows, ctx.visit.handle, topk_weights=weights)
        return grad_x.to(ctx.dtype), grad_weights, None, None


class _Combine(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, sums_AD: torch.Tensor, visit: _Visit) -> torch.Tensor:
        ctx.visit = visit
        combined: torch.Tensor = visit.buffer.combine(sums_AD, visit.handle)[0]
        return combined

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        arrived = ctx.visit.buffer.dispatch(grads[0].to(torch.bfloat16).contiguous(), handle=ctx.visit.handle)[0]
        return arrived, None
