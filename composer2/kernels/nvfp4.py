"""NVFP4: a float tensor goes in; E2M1 codes, an E4M3 scale per 16 and a float32 outer scale come out, and back.

    exact (default)   scale = E4M3(448 * block_amax / amax)            code = E2M1(2688 * x / (scale * amax))
    divide_outer      scale = E4M3(block_amax / (6 * g))               code = E2M1(x / (scale * g))          ModelOpt
    reciprocal        scale = E4M3((block_amax / 6) / g), >= 2^-6      code = E2M1(x * ((1 / g) / scale))    torchao
    te                scale = E4M3(block_amax * (e * (1 / 6)))         code = E2M1(x * (1 / (scale / e)))    see below
    value = code * scale * g        g = amax / 2688, e = 2688 / amax; amax of the token, the tensor or the matrix

Source: report §6.1 (per-token outer scale, correctly rounded division); rows K1 K7.
All four are the same formula on paper; in floating point only the first is. Why one division is exact there for
bfloat16 x: 2688 = 21 * 2^7 has 5 significant bits, x and amax have 8 and scale has 4, so 2688 x (13 bits) and
scale * amax (12 bits) hold no rounding error, and a tie t of E2M1 has at most 3 bits, so a quotient that is no tie is
off by a factor of at least 1 + 1 / (7 * 15 * 255) > 1 + 2^-15: the division's rounding (2^-24) and the sum in
`formats.e2m1_index` (2^-22) cannot carry it onto the tie. The same holds for the scale (448 = 7 * 2^6).
For float32 x the bounds are 2^-29 and 2^-31, so everything is done in float64: exact for every finite input as well.

Choice: exact, with correct division, by default; the report says that the division matters, not its order.
Choice: the other orders round as the engine does that they are named after, for a trainer that must match its engine
bit for bit; x is widened to float32 and every operation is one IEEE float32 operation. divide_outer keeps ModelOpt's
lower limit of 2^-9 for scales of blocks that are not zero; te, TransformerEngine's, multiplies by
1 / (scale * (1 / e)).
Choice: in every order a zero block has scale 0 and codes +-0 (ModelOpt writes scale 1, torchao 2^-6: equal in value).

Edges, in the exact order. Zero row or tensor: outer 0, scales 0, codes +-0. A block whose scale rounds to 0 (its amax
below 2^-19 of the row's, about): codes +-0. The sign of x is kept in the code even where the value is zero. Largest and
smallest magnitudes: rows are first multiplied by a power of two that brings amax near 1, exactly, so 2688 * x does not
overflow and scale * amax is no subnormal; codes and scales are exact for every finite x. The outer scale alone is a
rounded float32: below amax = 2688 * 2^-126 it is subnormal and loses bits, below 2688 * 2^-150 it is 0.
NaN or infinity anywhere: ValueError.

Shape letters: T tokens, K width, N rows of a matrix, E experts.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch

from composer2.kernels.backend import choose
from composer2.kernels.formats import (
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    NVFP4,
    NVFP4_BLOCK,
    NVFP4_OUTER,
    by_parts,
    e2m1_index,
    encode_e4m3,
    finite_amax,
    pack_nibbles,
)

BACKENDS = ("auto", "reference", "triton", "torchao", "transformer_engine")
OUTERS = ("token", "tensor", "matrix")
ORDERS = ("exact", "divide_outer", "reciprocal", "te")


@torch.no_grad()
def quantize_nvfp4(
    x: torch.Tensor,
    *,
    outer: Literal["token", "tensor", "matrix"] = "token",
    order: Literal["exact", "divide_outer", "reciprocal", "te"] = "exact",
    backend: str = "auto",
) -> NVFP4:
    """bfloat16 or float32 [..., K], K a multiple of 16 -> codes [..., K // 2], scales [..., K // 16], outer;
    dtypes and bit order stand at `formats.NVFP4`.

    outer "token": one float32 per row, [..., 1]; "matrix": one per matrix of the last two axes, [..., 1, 1] (expert
    weights [E, N, K]); "tensor": one, [1] * ndim. Raises ValueError for a width, dtype, name or non-finite value that
    does not fit (the Triton kernel does not look for non-finite values, see `triton_quant.py`), BackendUnavailable
    where the backend cannot run. Backend "torchao" has order "reciprocal" only, "transformer_engine" "te" only.
    """
    check_arguments(x, outer, order)
    chosen = choose("quantize_nvfp4", backend, x.device, BACKENDS)
    if chosen == "triton":
        from composer2.kernels import triton_quant

        return triton_quant.quantize_nvfp4(x, outer=outer, order=order)
    if chosen in ("torchao", "transformer_engine"):
        from composer2.kernels import te, torchao

        native, adapter = ("reciprocal", torchao) if chosen == "torchao" else ("te", te)
        if order != native:
            raise ValueError(f"order is {order!r}, accepted with backend {chosen!r} is {native!r}")
        return adapter.quantize_nvfp4(x, outer=outer)
    return quantize_nvfp4_reference(x, outer, order)


def quantize_nvfp4_reference(x: torch.Tensor, outer: str, order: str) -> NVFP4:
    """The definition, in plain PyTorch on any device."""
    lead, width = x.shape[:-1], x.shape[-1]
    num_blocks = width // NVFP4_BLOCK
    rows = x.reshape(-1, width)
    (block_amax,) = by_parts(lambda part: (finite_amax(part.unflatten(-1, (-1, NVFP4_BLOCK)), -1),), width, rows)
    amax = outer_amax(block_amax.view(*lead, num_blocks), outer)
    amax_per_row = amax.expand(*lead, 1).reshape(-1, 1)
    codes, scales = by_parts(functools.partial(quantize_rows, order), width, rows, block_amax, amax_per_row)
    return NVFP4(codes.view(*lead, width // 2), scales.view(*lead, num_blocks), quotient(amax, NVFP4_OUTER))


def quantize_rows(
    order: str, x_TK: torch.Tensor, block_amax: torch.Tensor, amax: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [T, K // 2] and scales [T, K // 16] of rows, given the largest magnitudes [T, K // 16] and [T, 1]."""
    blocks = x_TK.unflatten(-1, (-1, NVFP4_BLOCK))
    if order == "exact":
        scales, index = exact_order(blocks, block_amax, amax)
    else:
        scales, scaled = ENGINE_ORDERS[order](blocks.abs().float(), block_amax.unsqueeze(-1), amax.unsqueeze(-1))
        scales = scales.squeeze(-1).masked_fill(block_amax == 0, 0.0)
        # float64: `e2m1_index` must see every float32 as it is. NaN is 0 / 0 or 0 * inf, in a zero row or block.
        index = e2m1_index(scaled.double().nan_to_num_(nan=0.0))
    return pack_codes(index.flatten(-2), x_TK), encode_e4m3(scales)


def exact_order(
    blocks: torch.Tensor, block_amax: torch.Tensor, amax: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [..., K // 16], not yet in E4M3's bytes but on its grid, and code magnitudes 0..7 [..., K // 16, 16]."""
    wide = torch.float32 if blocks.dtype == torch.bfloat16 else torch.float64
    # 2^-(exponent of amax), within 2^+-100, from the exponent field: amax times it lies near 1, or at least far from
    # overflow and underflow.
    shift = ((254 - (amax.view(torch.int32) >> 23)).clamp_(27, 227) << 23).view(torch.float32).to(wide)
    peak = amax * shift
    ratio = (block_amax * shift * E4M3_MAX) / peak.masked_fill(peak == 0, 1.0)
    scales = encode_e4m3(ratio).to(wide)
    divisor = scales * peak
    divisor.masked_fill_(divisor == 0, torch.inf)  # a zero block, or one too small for a scale: codes 0
    magnitude = blocks.abs().to(wide).mul_((shift * NVFP4_OUTER).unsqueeze(-1))
    return scales, e2m1_index(magnitude.div_(divisor.unsqueeze(-1)))


def divide_outer_order(
    magnitude: torch.Tensor, block_amax: torch.Tensor, amax: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """ModelOpt's: the outer scale first, then true divisions. All float32 [..., K // 16, 16 | 1], [..., 1, 1]."""
    outer = quotient(amax, NVFP4_OUTER)
    scales = on_e4m3_grid((block_amax / (E2M1_MAX * outer)).clamp_(min=2.0**-9))
    return scales, magnitude / (scales * outer)


def reciprocal_order(
    magnitude: torch.Tensor, block_amax: torch.Tensor, amax: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """torchao's: elements are multiplied by a reciprocal; no scale below E4M3's smallest normal number."""
    outer = quotient(amax, NVFP4_OUTER)
    scales = on_e4m3_grid((quotient(block_amax, E2M1_MAX) / outer).clamp_(min=2.0**-6))
    return scales, magnitude * (outer.reciprocal() / scales)


def te_order(
    magnitude: torch.Tensor, block_amax: torch.Tensor, amax: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """TransformerEngine's: reciprocals throughout; where a scale rounds to 0 the codes saturate (their value is 0)."""
    largest = torch.finfo(torch.float32).max
    encode = (torch.full_like(amax, NVFP4_OUTER) / amax).clamp_(max=largest)
    sixth = torch.full_like(amax, E2M1_MAX).reciprocal_()
    scales = on_e4m3_grid(block_amax * (encode * sixth))
    return scales, magnitude * (scales * encode.reciprocal()).reciprocal_().clamp_(max=largest)


ENGINE_ORDERS = {"divide_outer": divide_outer_order, "reciprocal": reciprocal_order, "te": te_order}


def on_e4m3_grid(x: torch.Tensor) -> torch.Tensor:
    """float32 rounded to E4M3 and back."""
    return encode_e4m3(x).float()


def quotient(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """x / divisor, correctly rounded. A CUDA tensor over a Python number is multiplied by the number's reciprocal."""
    return x / torch.full_like(x, divisor)


def outer_amax(block_amax: torch.Tensor, outer: str) -> torch.Tensor:
    """Largest magnitude of the token, matrix or tensor from that of its blocks [..., K // 16], reduced axes kept."""
    num_axes = {"token": 1, "matrix": 2, "tensor": block_amax.ndim}[outer]
    axes = tuple(range(-num_axes, 0))
    if block_amax.numel() == 0:
        return block_amax.new_zeros(*block_amax.shape[: block_amax.ndim - num_axes], *[1] * num_axes)
    return block_amax.amax(axes, keepdim=True)


def pack_codes(index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K // 2]: magnitudes 0..7 (floats) with the sign bits of x, -0.0 included."""
    kind, bits = (torch.int16, 12) if x.dtype == torch.bfloat16 else (torch.int32, 28)
    signs = (x.contiguous().view(kind) >> bits).bitwise_and_(8).to(torch.int16)
    return pack_nibbles(signs.bitwise_or_(index.to(torch.int16)))


def dequantize_blocks(t: NVFP4, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """code * scale [..., K], the outer scale left out: exact in bfloat16 (6 significant bits), for a GEMM's operand."""
    check_shapes(t)
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], device=t.codes.device)
    of_byte = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1)  # low nibble first
    blocks = of_byte[t.codes.int()].view(*t.scales.shape, NVFP4_BLOCK)
    return blocks.mul_(t.scales.float().unsqueeze(-1)).flatten(-2).to(dtype)


def dequantize_nvfp4(t: NVFP4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(code * scale) * outer, one float32 rounding, then `dtype`: [..., K]. ValueError for shapes that do not fit."""
    return dequantize_blocks(t, torch.float32).mul_(t.outer).to(dtype)


def check_shapes(t: NVFP4) -> None:
    """ValueError unless codes, scales and outer are of one tensor."""
    codes, scales, outer = tuple(t.codes.shape), tuple(t.scales.shape), tuple(t.outer.shape)
    fits = scales[:-1] == codes[:-1] and scales[-1] * NVFP4_BLOCK == codes[-1] * 2
    if not fits or len(outer) != len(codes) or outer[-1] != 1:
        raise ValueError(
            f"NVFP4 codes are {codes}, scales {scales}, outer {outer}; accepted are [..., K // 2], [..., K // 16], "
            "[..., 1] (or 1 on further axes)"
        )


def check_arguments(x: torch.Tensor, outer: str, order: str) -> None:
    """ValueError for what `quantize_nvfp4` does not accept, values apart."""
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"x is {x.dtype}, accepted is torch.bfloat16 or torch.float32")
    if x.ndim < 1 or x.shape[-1] == 0 or x.shape[-1] % NVFP4_BLOCK:
        raise ValueError(f"x is {tuple(x.shape)}, accepted is a last dimension that is a multiple of {NVFP4_BLOCK}")
    if outer not in OUTERS:
        raise ValueError(f"outer is {outer!r}, accepted is one of {OUTERS}")
    if outer == "matrix" and x.ndim < 2:
        raise ValueError(f"x is {tuple(x.shape)}, accepted with outer 'matrix' is [..., N, K]")
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}, accepted is one of {ORDERS}")
