"""Tokens out to their experts and back: one row for each expert a token chose, sorted by expert, then a weighted sum.

    pack:     row r of the buffer = token order[r] // k, sent as its own dtype, as BF16, or as MXFP8 codes and scales
    combine:  out[t] = sum over the k rows r of t of weight[r] * row[r]

Source: report §6.1 (tokens are quantised to MXFP8 before dispatch, expert outputs are combined in BF16); row K5.
A token is quantised once, before it is copied to its experts. Before an MXFP8 product this changes nothing, forward and
dgrad: the product would round the same blocks to the same codes. Its wgrad blocks run along tokens, so there a value is
rounded twice. Before an NVFP4 product it is a second rounding, too.
Choice: the gradient passes the quantiser unchanged (straight-through), and the gradients of a token's copies are summed
in the token's own dtype. Choice: rows come back as BF16 (what is sent) and are weighed and summed in the dtype of the
gate weights, FP32.

Shape letters: T tokens, k experts a token, R = T k rows, D model, E experts.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from composer2.kernels.formats import MXFP8
from composer2.kernels.mxfp8 import dequantize_mxfp8, quantize_mxfp8

WIRES = ("native", "bf16", "mxfp8")


class Packed(NamedTuple):
    """Tokens sorted by expert."""

    rows_RD: torch.Tensor
    """The rows as experts see them, in the tokens' dtype under `native`, else BF16; gradients flow to the tokens."""
    codes: MXFP8 | None
    """What `rows_RD` was decoded from under the `mxfp8` wire: codes [R, D], scales [R, D // 32]."""
    order_R: torch.Tensor
    """int64: which of the T * k (token, choice) pairs a row is."""
    token_of_row_R: torch.Tensor
    """int64: the token of a row."""
    offsets_E: torch.Tensor
    """int32: running end of each expert's rows; the last one is R."""
    wire: str
    """`native`, `bf16` or `mxfp8`."""


def pack_tokens(
    x_TD: torch.Tensor,
    expert_ids_Tk: torch.Tensor,
    num_experts: int,
    *,
    wire: str = "native",
    scale: Literal["rceil", "floor"] = "rceil",
    backend: str = "auto",
) -> Packed:
    """Sort tokens by expert (stable) and put them on the wire. Differentiable in `x_TD`.

    `expert_ids_Tk` is int64 in [0, num_experts). Under the `mxfp8` wire D is a multiple of 32 and x finite; `scale` is
    the block-scale rule. Raises ValueError naming what does not fit.
    """
    if wire not in WIRES:
        raise ValueError(f"wire is {wire!r}, accepted is one of {WIRES}")
    if x_TD.ndim != 2 or expert_ids_Tk.ndim != 2 or len(x_TD) != len(expert_ids_Tk):
        raise ValueError(
            f"tokens are {tuple(x_TD.shape)}, ids {tuple(expert_ids_Tk.shape)}, accepted is [T, D], [T, k]"
        )
    sorted_ids_R, order_R = expert_ids_Tk.flatten().sort(stable=True)
    token_of_row_R = order_R // expert_ids_Tk.shape[1]
    counts_E = torch.bincount(sorted_ids_R, minlength=num_experts)
    if len(counts_E) != num_experts:
        raise ValueError(f"expert_ids reach {len(counts_E) - 1}, accepted is 0 .. {num_experts - 1}")
    offsets_E = counts_E.cumsum(0).to(torch.int32)
    rows_RD, codes = x_TD.index_select(0, token_of_row_R), None
    if wire == "bf16":
        rows_RD = rows_RD.to(torch.bfloat16)
    elif wire == "mxfp8":
        tokens = quantize_mxfp8(x_TD.detach().to(torch.bfloat16), scale=scale, backend=backend)
        codes = MXFP8(*(take_rows(part, token_of_row_R) for part in (tokens.codes, tokens.scales)))
        rows_RD = _StraightThrough.apply(rows_RD, dequantize_mxfp8(codes, torch.bfloat16))
    return Packed(rows_RD, codes, order_R, token_of_row_R, offsets_E, wire)


def combine_tokens(rows_RD: torch.Tensor, packed: Packed, weights_Tk: torch.Tensor) -> torch.Tensor:
    """Weighted sum [T, D] of the rows of each token, in a fixed order. Differentiable in rows and weights.

    The result has the dtype of rows times weights. Raises ValueError for a number of rows that does not fit.
    """
    if len(rows_RD) != len(packed.order_R) or weights_Tk.numel() != len(packed.order_R):
        given = f"{tuple(rows_RD.shape)}, {tuple(weights_Tk.shape)}"
        raise ValueError(
            f"rows and weights are {given}, accepted is [R, D], [T, k] with R = T k = {len(packed.order_R)}"
        )
    if packed.wire != "native":
        rows_RD = rows_RD.to(torch.bfloat16)
    rows_RD = rows_RD * weights_Tk.flatten().index_select(0, packed.order_R)[:, None]
    return rows_RD.new_zeros(len(weights_Tk), rows_RD.shape[1]).index_add(0, packed.token_of_row_R, rows_RD)


def take_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor of one-byte elements, eight-bit floats included."""
    return x.view(torch.uint8).index_select(0, rows).view(x.dtype)


class _StraightThrough(torch.autograd.Function):
    """`seen` forward; its gradient goes to `x`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        ctx.dtype = x.dtype
        return seen.view_as(seen)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].to(ctx.dtype), None
