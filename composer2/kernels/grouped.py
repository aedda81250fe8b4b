"""Grouped GEMM: rows sorted by expert go in, each expert's rows are multiplied by that expert's matrix, in one call.

    out[t] = x[t] @ weight[e].T         for offsets[e - 1] <= t < offsets[e]       (grouped_mm and the quantised forms)
    out[e] = grad[rows of e].T @ x[rows of e]                                      (grouped_wgrad_mxfp8)
    NVFP4:  out[t] = (sum_k block(a)[t, k] block(b)[e, n, k]) * outer_a[t] * outer_b[e]      block = code * block scale

Rows at or behind the last offset (the tail of a padded buffer) take no part: their outputs are zero, their gradients
are zero, and whatever they hold, NaN included, reaches nothing.

Source: report §6.1; row K4 (one call over ragged token counts, experts without tokens included).
Choice: matrices are stored [E, out, in], the layout of `torch.nn.Linear`, so that a checkpoint's experts stack as they
are. Two implementations: `reference`, a loop over experts a reader can check by eye and any dtype runs, and `torch`,
the library's grouped GEMM. `auto` takes `torch` where its kernel accepts the operands and `reference` elsewhere; an
explicit name never falls back.
Choice: the library's kernel leaves the tail uninitialised, forward and backward; both sides are masked here.
Choice: a code times its block scale is exact in BF16 and FP32, so the quantised products are ordinary ones on block
values with FP32 sums; the outer scales, which are not, multiply the FP32 sum: first the row's, then the matrix's.

Shape letters: T rows, P rows with every expert's padded to blocks, I (K) width in, O (N) width out, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from composer2.kernels import formats
from composer2.kernels.backend import choose
from composer2.kernels.formats import MXFP8, MXFP8_BLOCK, NVFP4, padded_offsets
from composer2.kernels.mxfp8 import dequantize_mxfp8
from composer2.kernels.nvfp4 import dequantize_blocks

BACKENDS = ("auto", "torch", "reference")


def grouped_mm(
    x_TI: torch.Tensor, weight_EOI: torch.Tensor, offsets_E: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """Rows times the matrix of their expert: [T, O] in the dtype of `x_TI`, differentiable in both operands.

    `offsets_E` is int32, the running end of each expert's rows: non-decreasing, the last one at most T. Both operands
    share one floating dtype. Raises ValueError for shapes, dtypes, offsets or a backend that do not fit.
    """
    if x_TI.ndim != 2 or weight_EOI.ndim != 3 or x_TI.shape[1] != weight_EOI.shape[2]:
        raise ValueError(f"operands are {tuple(x_TI.shape)}, {tuple(weight_EOI.shape)}, accepted is [T, I], [E, O, I]")
    if x_TI.dtype != weight_EOI.dtype:
        raise ValueError(f"operand dtypes are {x_TI.dtype}, {weight_EOI.dtype}, accepted is one dtype for both")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, accepted is one of {BACKENDS}")
    reason = torch_refusal(x_TI, weight_EOI)
    if backend == "torch" and reason:
        raise ValueError(f"backend is 'torch', which cannot run these operands: {reason}")
    check_offsets(offsets_E, len(weight_EOI), len(x_TI))
    has_tail = may_have_tail(offsets_E, len(x_TI))
    if has_tail:
        x_TI = zero_tail(x_TI, offsets_E)
    if backend == "reference" or reason:
        out_TO = grouped_mm_reference(x_TI, weight_EOI, offsets_E)
    else:
        out_TO = F.grouped_mm(x_TI, weight_EOI.transpose(-2, -1), offs=offsets_E)
        if out_TO.requires_grad:  # its backward refuses the stride-0 gradient that a sum sends
            out_TO.register_hook(torch.Tensor.contiguous)
    return zero_tail(out_TO, offsets_E) if has_tail else out_TO


def grouped_mm_reference(x_TI: torch.Tensor, weight_EOI: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """The definition: one ordinary product per expert, then zeros for the tail."""
    ends = offsets_E.tolist()
    bounds = zip([0, *ends[:-1]], ends, weight_EOI, strict=True)
    out_TO = torch.cat([F.linear(x_TI[start:end], weight_OI) for start, end, weight_OI in bounds])
    return F.pad(out_TO, (0, 0, 0, len(x_TI) - ends[-1])) if ends[-1] < len(x_TI) else out_TO


def torch_refusal(x_TI: torch.Tensor, weight_EOI: torch.Tensor) -> str:
    """Why the library's kernel cannot take these operands, or an empty string."""
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm"
    if x_TI.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {x_TI.dtype} is none of float32, bfloat16, float16"
    _, width_out, width_in = weight_EOI.shape
    for name, width in (("input", width_in), ("output", width_out)):
        if width * x_TI.element_size() % 16:
            return f"{name} width {width} of {x_TI.dtype} is no multiple of 16 bytes"
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# Offsets and the tail


def check_offsets(offsets_E: torch.Tensor, num_experts: int, num_rows: int) -> None:
    """ValueError unless `offsets_E` is int32 [E], not decreasing, within 0 .. num_rows.

    On a CUDA device the values are checked by an assertion on the device instead: reading them would wait for it.
    """
    if offsets_E.shape != (num_experts,) or offsets_E.dtype != torch.int32 or num_experts == 0:
        given = f"{offsets_E.dtype} {tuple(offsets_E.shape)}"
        raise ValueError(f"offsets are {given}, accepted is int32 [E] with E = {num_experts} (at least 1)")
    if offsets_E.device.type == "cpu":
        formats.check_offsets(offsets_E, num_rows)
    else:
        grows = (offsets_E.diff(prepend=offsets_E.new_zeros(1)) >= 0).all()
        torch._assert_async(grows & (offsets_E[-1] <= num_rows), "offsets decrease or end behind the last row")


def may_have_tail(offsets_E: torch.Tensor, num_rows: int) -> bool:
    """Whether rows may lie behind the last offset; on a CUDA device always, because looking would wait for it."""
    return offsets_E.device.type != "cpu" or int(offsets_E[-1]) < num_rows


def zero_tail(x_TI: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """The rows before the last offset, zeros behind it; the gradient is cut in the same way."""
    inside_T1 = torch.arange(len(x_TI), device=x_TI.device)[:, None] < offsets_E[-1]
    return torch.where(inside_T1, x_TI, torch.zeros((), dtype=x_TI.dtype, device=x_TI.device))


def expert_of_rows(offsets_E: torch.Tensor, num_rows: int) -> torch.Tensor:
    """int64 [T]: the expert of each row; rows of the tail count to the last one."""
    rows_T = torch.arange(num_rows, dtype=torch.int32, device=offsets_E.device)
    return torch.searchsorted(offsets_E, rows_T, right=True).clamp_(max=len(offsets_E) - 1)


# ---------------------------------------------------------------------------------------------------------------------
# Quantised operands


def grouped_mm_nvfp4(
    a: NVFP4, b: NVFP4, offsets_E: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16, *, backend: str = "auto"
) -> torch.Tensor:
    """NVFP4 rows [T, K] times NVFP4 matrices [E, N, K]: [T, N] in `out_dtype`, rounded once from the FP32 result.

    `a.outer` is [T, 1] (per token) or [1, 1] (per tensor), `b.outer` [E, 1, 1] or [1, 1, 1]. Not differentiable.
    Raises ValueError for misfits, BackendUnavailable with the reason.
    """
    _check_operands(a.codes, b.codes, offsets_E)
    num_rows, num_experts = len(a.codes), len(b.codes)
    if tuple(a.outer.shape) not in {(num_rows, 1), (1, 1)} or tuple(b.outer.shape) not in {
        (num_experts, 1, 1),
        (1, 1, 1),
    }:
        given = f"{tuple(a.outer.shape)}, {tuple(b.outer.shape)}"
        raise ValueError(f"outer scales are {given}, accepted is [T, 1] or [1, 1], and [E, 1, 1] or [1, 1, 1]")
    if choose("grouped_mm_nvfp4", backend, a.codes.device) == "triton":
        from composer2.kernels import triton_gemm

        return triton_gemm.grouped_mm_nvfp4(a, b, offsets_E, out_dtype)
    left_TK, right_ENK = dequantize_blocks(a, torch.float32), dequantize_blocks(b, torch.float32)
    sums_TN = grouped_mm(left_TK, right_ENK, offsets_E)
    outer_T1 = b.outer.float().expand(num_experts, 1, 1).flatten()[expert_of_rows(offsets_E, num_rows)][:, None]
    return zero_tail(sums_TN * a.outer.float() * outer_T1, offsets_E).to(out_dtype)


def grouped_mm_mxfp8(
    a: MXFP8, b: MXFP8, offsets_E: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16, *, backend: str = "auto"
) -> torch.Tensor:
    """MXFP8 rows [T, K] times MXFP8 matrices [E, N, K], both blocked along K: [T, N] in `out_dtype`.

    Not differentiable. Raises ValueError for misfits, BackendUnavailable with the reason.
    """
    _check_operands(a.codes, b.codes, offsets_E)
    if choose("grouped_mm_mxfp8", backend, a.codes.device) == "triton":
        from composer2.kernels import triton_gemm

        return triton_gemm.grouped_mm_mxfp8(a, b, offsets_E, out_dtype)
    operand = _operand_dtype(out_dtype)
    return grouped_mm(dequantize_mxfp8(a, operand), dequantize_mxfp8(b, operand), offsets_E).to(out_dtype)


def grouped_wgrad_mxfp8(
    grad: MXFP8, x: MXFP8, offsets_E: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16, *, backend: str = "auto"
) -> torch.Tensor:
    """Gradient [E, N, K] of the matrices from [P, N] and [P, K], both blocked along tokens (axis 0, same offsets).

    `offsets_E` are the offsets before padding. An expert without tokens gets zeros. Raises ValueError for misfits,
    BackendUnavailable with the reason.
    """
    if grad.codes.ndim != 2 or x.codes.ndim != 2 or len(grad.codes) != len(x.codes):
        given = f"{tuple(grad.codes.shape)}, {tuple(x.codes.shape)}"
        raise ValueError(
            f"operands are {given}, accepted is [P, N], [P, K] with tokens padded to {MXFP8_BLOCK} an expert"
        )
    check_offsets(offsets_E, len(offsets_E), len(grad.codes))
    ends_E = padded_offsets(offsets_E)
    check_offsets(ends_E, len(ends_E), len(grad.codes))
    if choose("grouped_wgrad_mxfp8", backend, x.codes.device) == "triton":
        from composer2.kernels import triton_gemm

        return triton_gemm.grouped_wgrad_mxfp8(grad, x, offsets_E, out_dtype)
    operand = _operand_dtype(out_dtype)
    grad_PN = dequantize_mxfp8(grad, operand)
    x_PK = dequantize_mxfp8(x, operand)
    if torch_refusal(grad_PN, grad_PN.new_empty(1, grad_PN.shape[1], x_PK.shape[1])):
        starts = [0, *ends_E.tolist()[:-1]]
        products = [grad_PN[start:end].T @ x_PK[start:end] for start, end in zip(starts, ends_E.tolist(), strict=True)]
        return torch.stack(products).to(out_dtype)
    return F.grouped_mm(grad_PN.transpose(0, 1), x_PK, offs=ends_E).to(out_dtype)


def _operand_dtype(out_dtype: torch.dtype) -> torch.dtype:
    """What MXFP8 values are multiplied in: both hold them exactly and both sum in FP32."""
    return torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32


def _check_operands(a_codes: torch.Tensor, b_codes: torch.Tensor, offsets_E: torch.Tensor) -> None:
    if a_codes.ndim != 2 or b_codes.ndim != 3 or a_codes.shape[1] != b_codes.shape[2]:
        given = f"{tuple(a_codes.shape)}, {tuple(b_codes.shape)}"
        raise ValueError(f"codes are {given}, accepted is [T, K'], [E, N, K'] of one width K'")
    check_offsets(offsets_E, len(b_codes), len(a_codes))
