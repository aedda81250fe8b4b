"""The product of rows with their expert's matrix in a chosen number format: x and W go in, y comes out, with autograd.

    recipe        forward  y = x W^T              dgrad  dx = dy W          wgrad  dW = dy^T x
    bf16          BF16                            BF16                      BF16
    mxfp8         MXFP8, blocks along K           MXFP8, blocks along N     MXFP8, blocks along an expert's tokens
    nvfp4         NVFP4, a scale a token          as mxfp8                  as mxfp8
    nvfp4-tensor  NVFP4, one scale a tensor       as mxfp8                  as mxfp8       (comparison only)

Source: report §6.1 (NVFP4 forward with per-token scales, MXFP8 backward); row K4.
Choice: operands are rounded to BF16 before they are quantised, so that an FP32 trainer and a BF16 sampler give the same
codes to the same weights. Master weights keep their dtype, and so do the gradients: every product is summed in FP32 and
rounded once. Choice: an expert matrix has one FP32 outer scale, gate and up half together, so that the fused product
needs no second scale (fault 62).
Choice: dgrad and wgrad quantise the BF16 operands anew along their own contraction axis; they never see forward codes.

Shape letters: T rows, K width in, N width out, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from composer2.kernels.formats import MXFP8, MXFP8_BLOCK
from composer2.kernels.grouped import (
    check_offsets,
    grouped_mm,
    grouped_mm_mxfp8,
    grouped_mm_nvfp4,
    grouped_wgrad_mxfp8,
    may_have_tail,
    zero_tail,
)
from composer2.kernels.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from composer2.kernels.nvfp4 import quantize_nvfp4

RECIPES = ("bf16", "mxfp8", "nvfp4", "nvfp4-tensor")
ORDERS = ("exact", "divide_outer", "reciprocal", "te")
SCALES = ("rceil", "floor")
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Number formats of one expert product and its gradients."""

    name: Literal["bf16", "mxfp8", "nvfp4", "nvfp4-tensor"] = "bf16"
    """`bf16`, `mxfp8`, `nvfp4` or `nvfp4-tensor`."""
    order: Literal["exact", "divide_outer", "reciprocal", "te"] = "exact"
    """Order of operations of the NVFP4 quantiser: `exact`, `divide_outer`, `reciprocal` or `te`."""
    mxfp8_scale: Literal["rceil", "floor"] = "rceil"
    """Block scales of MXFP8: `rceil` or `floor`."""

    def __post_init__(self) -> None:
        for field, accepted in (("name", RECIPES), ("order", ORDERS), ("mxfp8_scale", SCALES)):
            if getattr(self, field) not in accepted:
                raise ValueError(f"Recipe.{field} is {getattr(self, field)!r}, accepted is one of {accepted}")

    @property
    def outer(self) -> Literal["token", "tensor"]:
        """How far one outer scale of the activations reaches in the NVFP4 forward."""
        return "tensor" if self.name == "nvfp4-tensor" else "token"


def expert_linear(
    x: torch.Tensor | MXFP8,
    w_ENK: torch.Tensor,
    offsets_E: torch.Tensor,
    *,
    recipe: Recipe,
    wire: MXFP8 | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Rows times the matrix of their expert under `recipe`: [T, N] in the dtype of `x`, differentiable in `x` and `w`.

    `x` is float32 or bfloat16 [T, K], or MXFP8 codes [T, K] that arrived quantised: those carry no gradient and give a
    bfloat16 result. `wire` are the codes that `x` was decoded from, when its gradient is wanted as well: an MXFP8
    forward then uses them as they are. `w_ENK` is float32 or bfloat16 [E, N, K], `offsets_E` int32 [E]; rows behind the
    last offset give zeros and get zero gradients. K is a multiple of 32 under `mxfp8`, of 16 under the NVFP4 recipes; N
    is one of 32 under all three where x has a gradient. Raises ValueError naming what does not fit, BackendUnavailable
    with the reason.
    """
    if isinstance(x, MXFP8):
        wire, x = x, dequantize_mxfp8(x, torch.bfloat16)
    for name, operand in (("x", x), ("w", w_ENK)):
        if operand.dtype not in DTYPES:
            raise ValueError(f"{name} is {operand.dtype}, accepted is float32 or bfloat16")
    if x.ndim != 2 or w_ENK.ndim != 3 or x.shape[1] != w_ENK.shape[2]:
        raise ValueError(f"operands are {tuple(x.shape)}, {tuple(w_ENK.shape)}, accepted is [T, K], [E, N, K]")
    check_offsets(offsets_E, len(w_ENK), len(x))
    if recipe.name == "bf16":
        rows_TN = grouped_mm(x.to(torch.bfloat16), w_ENK.to(torch.bfloat16), offsets_E)
        return rows_TN.to(x.dtype)
    if w_ENK.shape[1] % MXFP8_BLOCK and torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"w is {tuple(w_ENK.shape)}, accepted with a gradient of x is N a multiple of {MXFP8_BLOCK}")
    out_TN: torch.Tensor = _QuantisedProduct.apply(x, w_ENK, offsets_E, wire, recipe, backend)
    return out_TN


class _QuantisedProduct(torch.autograd.Function):
    """Forward as the recipe says, backward in MXFP8."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        w_ENK: torch.Tensor,
        offsets_E: torch.Tensor,
        wire: MXFP8 | None,
        recipe: Recipe,
        backend: str,
    ) -> torch.Tensor:
        rows_TK, matrices_ENK = _operand(x_TK, offsets_E), w_ENK.to(torch.bfloat16)
        if recipe.name == "mxfp8":
            scale = recipe.mxfp8_scale
            left = quantize_mxfp8(rows_TK, scale=scale, backend=backend) if wire is None else wire
            right = quantize_mxfp8(matrices_ENK, scale=scale, backend=backend)
            out_TN = grouped_mm_mxfp8(left, right, offsets_E, x_TK.dtype, backend=backend)
        else:
            rows = quantize_nvfp4(rows_TK, outer=recipe.outer, order=recipe.order, backend=backend)
            matrices = quantize_nvfp4(matrices_ENK, outer="matrix", order=recipe.order, backend=backend)
            out_TN = grouped_mm_nvfp4(rows, matrices, offsets_E, x_TK.dtype, backend=backend)
        ctx.save_for_backward(rows_TK, w_ENK, offsets_E)
        ctx.x_dtype, ctx.scale, ctx.backend = x_TK.dtype, recipe.mxfp8_scale, backend
        return out_TN

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows_TK, w_ENK, offsets_E = ctx.saved_tensors
        grad_TN = _operand(grads[0], offsets_E)
        options: dict[str, Any] = {"scale": ctx.scale, "backend": ctx.backend}
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            along_n = quantize_mxfp8(grad_TN, **options)
            matrices = quantize_mxfp8(w_ENK.to(torch.bfloat16).transpose(1, 2).contiguous(), **options)
            grad_x = grouped_mm_mxfp8(along_n, matrices, offsets_E, ctx.x_dtype, backend=ctx.backend)
        if ctx.needs_input_grad[1]:
            left = quantize_mxfp8(grad_TN, axis=0, offsets=offsets_E, **options)
            right = quantize_mxfp8(rows_TK, axis=0, offsets=offsets_E, **options)
            grad_w = grouped_wgrad_mxfp8(left, right, offsets_E, w_ENK.dtype, backend=ctx.backend)
        return grad_x, grad_w, None, None, None, None


def _operand(x_TK: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """Contiguous BF16 rows with a zero tail."""
    rows_TK = x_TK.to(torch.bfloat16)
    return (zero_tail(rows_TK, offsets_E) if may_have_tail(offsets_E, len(rows_TK)) else rows_TK).contiguous()
