"""Grouped GEMM: rows sorted by expert go in, each expert's rows are multiplied by that expert's matrix, in one call.

    out[t] = x[t] @ weight[e].T      for offsets[e - 1] <= t < offsets[e]

Source: report §6.1; row K4 (one call over ragged token counts, experts without tokens included).
Choice: matrices are stored [E, out, in], the layout of `torch.nn.Linear`, so that a checkpoint's experts stack as they
are. Two implementations: `reference`, a loop over experts a reader can check by eye and any dtype runs, and `torch`,
the library's grouped GEMM. `auto` takes `torch` where its kernel accepts the operands and `reference` elsewhere; an
explicit name never falls back.

Shape letters: T rows, I width in, O width out, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

BACKENDS = ("auto", "torch", "reference")


def grouped_mm(
    x_TI: torch.Tensor, weight_EOI: torch.Tensor, offsets_E: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """Rows times the matrix of their expert: [T, O] in the dtype of `x_TI`, differentiable in both operands.

    `offsets_E` is int32, the running end of each expert's rows: non-decreasing, the last one T. Both operands share one
    floating dtype. Raises ValueError for shapes, dtypes or a backend that do not fit.
    """
    if x_TI.ndim != 2 or weight_EOI.ndim != 3 or x_TI.shape[1] != weight_EOI.shape[2]:
        raise ValueError(f"operands are {tuple(x_TI.shape)}, {tuple(weight_EOI.shape)}, accepted is [T, I], [E, O, I]")
    if offsets_E.shape != weight_EOI.shape[:1] or offsets_E.dtype != torch.int32:
        raise ValueError(f"offsets are {offsets_E.dtype} {tuple(offsets_E.shape)}, accepted is int32 [E]")
    if x_TI.dtype != weight_EOI.dtype:
        raise ValueError(f"operand dtypes are {x_TI.dtype}, {weight_EOI.dtype}, accepted is one dtype for both")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, accepted is one of {BACKENDS}")
    reason = torch_refusal(x_TI, weight_EOI)
    if backend == "torch" and reason:
        raise ValueError(f"backend is 'torch', which cannot run these operands: {reason}")
    if backend == "reference" or reason:
        return grouped_mm_reference(x_TI, weight_EOI, offsets_E)
    return F.grouped_mm(x_TI, weight_EOI.transpose(-2, -1), offs=offsets_E)


def grouped_mm_reference(x_TI: torch.Tensor, weight_EOI: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """The definition: one ordinary product per expert."""
    ends = offsets_E.tolist()
    if not ends or ends[-1] != len(x_TI):
        raise ValueError(f"offsets end at {ends[-1:]}, accepted is the number of rows {len(x_TI)}")
    bounds = zip([0, *ends[:-1]], ends, weight_EOI, strict=True)
    return torch.cat([F.linear(x_TI[start:end], weight_OI) for start, end, weight_OI in bounds])


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
