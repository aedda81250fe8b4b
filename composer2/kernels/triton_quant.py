"""Quantise kernels in Triton: a bfloat16 or float32 tensor goes in, the bytes of the reference quantisers come out.

    NVFP4  scale = E4M3(448 * block_amax / row_amax)      code = E2M1(2688 * x / (scale * row_amax))
    MXFP8  scale = 2^(byte - 127)                         code = E4M3(x / scale)

Source: report §6.1; rows K1 K2 K6 (IEEE division for NVFP4; one source for interpreter, ahead-of-time compiler, GPU).
`nvfp4.py` and `mxfp8.py` are the definitions; rows, order "exact", and what is accepted are theirs.
Choice: every rounding is written out on the bits of the value; nothing is cast to a narrow float. A cast would be one
instruction, but the interpreter's casts round otherwise than the hardware's, and then the bytes tested on a CPU were
not those of the GPU. For the same reason magnitudes are compared as integers: they order like floats, NaN on top.
Choice: a row is first multiplied by the power of two that brings its amax to [1, 4): exact, cancels in both quotients,
and keeps extreme rows from overflow and subnormals. (An amax below 2^-126 comes to [2^-22, 2), which does as well.)
Choice: float32 input is divided in float64, as in the definition, since 2688 * x no longer fits a float32.
Choice: non-finite input does not raise, which would wait for the GPU at every call; it is marked. An NVFP4 row (or
matrix, or tensor) gets outer scale NaN and codes 0, an MXFP8 block scale byte 255 and NaN codes: all decode to NaN.

Shape letters: R rows, K quantised width, T tokens, P padded tokens, B blocks, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from composer2.kernels import mxfp8, nvfp4
from composer2.kernels.backend import BackendUnavailable, refusal
from composer2.kernels.formats import MXFP8, MXFP8_BLOCK, NVFP4, NVFP4_BLOCK, check_offsets, padded_offsets

jit: Callable[..., Any]
try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # this file stays importable; `require` says what is missing

    def jit(kernel: Callable[..., Any]) -> Any:
        """In place of triton.jit: the kernels of this file then only are names."""
        return kernel


LAUNCH = {"num_warps": 8, "enable_fp_fusion": False}
"""No fused multiply-add: it would skip the rounding of the product."""
MAX_BLOCK_K = 4096
MXFP8_BLOCKS = 64
TOKEN_COLUMNS = 128


@jit
def widen(x):
    """float32 of bfloat16 or float32 x, by bits: the interpreter's cast is wrong for bfloat16 subnormals."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x


@jit
def magnitude_bits(x):
    """float32 -> int32 with the sign bit cleared: orders like |x|, inf is 0x7F800000, NaN above it."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def encode_minifloat(v, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, MAX_CODE: tl.constexpr, WIDE: tl.constexpr):
    """int32 code, without sign, of v >= 0, float32 or (WIDE) float64: nearest, ties to even, saturated at MAX_CODE.

    Above 2^MIN_EXPONENT the top bits of v are the code, but for the exponent's bias. Below, the format is a grid of
    step 2^(MIN_EXPONENT - MANTISSA): adding 2^23 (2^52) steps leaves the rounded number of steps in the low bits.
    """
    width: tl.constexpr = 52 if WIDE else 23
    bias: tl.constexpr = 1023 if WIDE else 127
    int_type: tl.constexpr = tl.int64 if WIDE else tl.int32
    float_type: tl.constexpr = tl.float64 if WIDE else tl.float32
    drop: tl.constexpr = width - MANTISSA
    many_steps: tl.constexpr = (bias + MIN_EXPONENT - MANTISSA + width) << width
    smallest_normal: tl.constexpr = (bias + MIN_EXPONENT) << width
    bits = v.to(int_type, bitcast=True)
    half_up = ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)
    normal = ((bits + half_up) >> drop) - ((bias + MIN_EXPONENT - 1) << MANTISSA)
    magic = tl.full(v.shape, many_steps, int_type).to(float_type, bitcast=True)
    small = (v + magic).to(int_type, bitcast=True) - many_steps
    return tl.minimum(tl.where(bits < smallest_normal, small, normal), MAX_CODE).to(tl.int32)


@jit
def divide(numerator, denominator, WIDE: tl.constexpr):
    """The correctly rounded quotient. In float64 there is no other division; in float32 `/` would be approximate."""
    if WIDE:
        return numerator / denominator
    else:
        return tl.div_rn(numerator, denominator)


@jit
def decode_e4m3(code):
    """float32 of int32 codes 0..255 by bits; 0x7F is NaN."""
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)  # 2^-9
    bits = tl.where(magnitude == 0x7F, 0x7FC00000, value.to(tl.int32, bitcast=True))
    return (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@jit
def power_of_two(field):
    """float32 2^(field - 127) of an exponent field 1..254."""
    return (field << 23).to(tl.float32, bitcast=True)


@jit
def nvfp4_rows_kernel(
    x_ptr, amax_ptr, codes_ptr, scales_ptr, outer_ptr, K, rows_per_outer,
    PER_ROW: tl.constexpr, WIDE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program quantises one row of x [R, K]: amax over the row, then blocks of 16, in float32 or (WIDE) float64.

    PER_ROW takes the amax of the row itself; otherwise amax_ptr holds one float32 for every `rows_per_outer` rows.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * K
    if PER_ROW:
        largest = tl.zeros((BLOCK_K,), tl.int32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            largest = tl.maximum(largest, magnitude_bits(widen(tl.load(x_ptr + k, mask=k < K, other=0.0))))
        row_bits = tl.max(largest, axis=0)
    else:
        row_bits = magnitude_bits(tl.load(amax_ptr + row // rows_per_outer))
    finite = row_bits < 0x7F800000
    outer = tl.where(finite, tl.div_rn(row_bits.to(tl.float32, bitcast=True), 2688.0), float("nan"))
    tl.store(outer_ptr + row // rows_per_outer, outer, mask=row % rows_per_outer == 0)

    float_type: tl.constexpr = tl.float64 if WIDE else tl.float32
    live = finite & (row_bits > 0)
    rescale = power_of_two(tl.minimum(tl.maximum(254 - (row_bits >> 23), 1), 254))
    row_amax = tl.where(live, row_bits.to(tl.float32, bitcast=True) * rescale, 1.0).to(float_type)
    codes_ptr += row * (K // 2)
    scales_ptr += row * (K // 16)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = widen(tl.load(x_ptr + k, mask=k < K, other=0.0)) * rescale
        x = tl.reshape(x, (BLOCK_K // 16, 16))
        bits = magnitude_bits(x)
        block_amax = tl.max(bits, axis=1).to(tl.float32, bitcast=True).to(float_type)
        scale = encode_minifloat(divide(block_amax * 448.0, row_amax, WIDE), 3, -6, 126, WIDE)
        scale = tl.where(live, scale, 0)
        kb = start // 16 + tl.arange(0, BLOCK_K // 16)
        tl.store(scales_ptr + kb, scale.to(tl.uint8), mask=kb < K // 16)

        step = tl.where(scale > 0, decode_e4m3(scale).to(float_type) * row_amax, 1.0)
        numerator = bits.to(tl.float32, bitcast=True).to(float_type) * 2688.0
        quotient = divide(numerator, tl.broadcast_to(step[:, None], x.shape), WIDE)
        code = tl.where(scale[:, None] > 0, encode_minifloat(quotient, 1, 0, 7, WIDE), 0)
        code |= (x.to(tl.int32, bitcast=True) >> 28) & 8
        low, high = tl.split(tl.reshape(code, (BLOCK_K // 2, 2)))
        kp = start // 2 + tl.arange(0, BLOCK_K // 2)
        tl.store(codes_ptr + kp, (low | (high << 4)).to(tl.uint8), mask=kp < K // 2)


@jit
def mxfp8_scale(block_bits, RCEIL: tl.constexpr):
    """int32 E8M0 byte of a block's amax bits: the power of two with amax / scale <= 448 (RCEIL), or OCP's floor."""
    byte = (block_bits >> 23) - 8
    if RCEIL:
        byte += tl.where((block_bits & 0x7FFFFF) > 0x600000, 1, 0)  # 448 = 1.75 * 2^8
    return tl.where(block_bits < 0x7F800000, tl.maximum(byte, 0), 255)


@jit
def mxfp8_codes(x, byte):
    """int32 E4M3 codes of x / 2^(byte - 127), the sign of zero kept; NaN for byte 255."""
    scaled = x * power_of_two(tl.maximum(254 - byte, 1))
    code = encode_minifloat(magnitude_bits(scaled).to(tl.float32, bitcast=True), 3, -6, 126, False)
    return tl.where(byte == 255, 0x7F, code) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@jit
def mxfp8_rows_kernel(x_ptr, codes_ptr, scales_ptr, num_blocks, RCEIL: tl.constexpr, BLOCKS: tl.constexpr):
    """One program quantises BLOCKS consecutive blocks of 32; rows are whole blocks, so x is one flat list of them."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < num_blocks
    at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = widen(tl.load(x_ptr + at, mask=inside[:, None], other=0.0))
    byte = mxfp8_scale(tl.max(magnitude_bits(x), axis=1), RCEIL)
    tl.store(scales_ptr + block, byte.to(tl.uint8), mask=inside)
    tl.store(codes_ptr + at, mxfp8_codes(x, byte[:, None]).to(tl.uint8), mask=inside[:, None])


@jit
def mxfp8_tokens_kernel(
    x_ptr, codes_ptr, scales_ptr, start_ptr, end_ptr, K, RCEIL: tl.constexpr, BLOCK_K: tl.constexpr
):
    """One program quantises BLOCK_K columns of one block of 32 tokens: rows start..end of x [T, K], zeros behind.

    start_ptr and end_ptr hold one int32 for every block of the output; `end` is where the block's expert ends.
    """
    block = tl.program_id(0)
    t = tl.load(start_ptr + block) + tl.arange(0, 32)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    rows = (t < tl.load(end_ptr + block))[:, None]
    columns = (k < K)[None, :]
    x = widen(tl.load(x_ptr + t.to(tl.int64)[:, None] * K + k[None, :], mask=rows & columns, other=0.0))
    byte = mxfp8_scale(tl.max(magnitude_bits(x), axis=0), RCEIL)
    tl.store(scales_ptr + block.to(tl.int64) * K + k, byte.to(tl.uint8), mask=k < K)
    p = block.to(tl.int64) * 32 + tl.arange(0, 32)
    tl.store(codes_ptr + p[:, None] * K + k[None, :], mxfp8_codes(x, byte[None, :]).to(tl.uint8), mask=columns)


def quantize_nvfp4(x: torch.Tensor, *, outer: str = "token", order: str = "exact") -> NVFP4:
    """NVFP4 of x, bfloat16 or float32 [..., K]: the bytes of the reference for the same arguments.

    Raises ValueError for a shape, dtype or name that is not accepted and for an order other than "exact",
    BackendUnavailable where Triton cannot run.
    """
    nvfp4.check_arguments(x, outer, order)
    require(x)
    if order != "exact":
        raise ValueError(f"order is {order!r}, accepted with backend 'triton' is 'exact'")
    num_axes = {"token": 1, "matrix": 2, "tensor": x.ndim}[outer]
    width, axes = x.shape[-1], tuple(range(-num_axes, 0))
    x = x.contiguous()
    codes = torch.empty(*x.shape[:-1], width // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*x.shape[:-1], width // NVFP4_BLOCK, dtype=torch.uint8, device=x.device)
    outer_shape = (*x.shape[: x.ndim - num_axes], *[1] * num_axes)
    outers = torch.zeros(outer_shape, dtype=torch.float32, device=x.device)
    if num_rows := x.numel() // width:
        amax = outers if outer == "token" else x.abs().amax(axes).float().contiguous()
        nvfp4_rows_kernel[(num_rows,)](
            x, amax, codes, scales, outers, width, num_rows // outers.numel(),
            PER_ROW=outer == "token", WIDE=x.dtype == torch.float32,
            BLOCK_K=min(triton.next_power_of_2(width), MAX_BLOCK_K), **LAUNCH,
        )  # fmt: skip
    return NVFP4(codes, scales.view(torch.float8_e4m3fn), outers)


def quantize_mxfp8(
    x: torch.Tensor, *, scale: str = "rceil", axis: int = -1, offsets: torch.Tensor | None = None
) -> MXFP8:
    """MXFP8 of x, bfloat16 or float32: the bytes of the reference for the same arguments.

    Along tokens (axis 0) the offsets are copied to the host, because they decide the shape of the result. Raises
    ValueError for what is not accepted, BackendUnavailable where Triton cannot run.
    """
    mxfp8.check_arguments(x, scale, axis, offsets)
    require(x)
    x = x.contiguous()
    if offsets is not None:
        return quantize_mxfp8_tokens(x, offsets, scale)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*x.shape[:-1], x.shape[-1] // MXFP8_BLOCK, dtype=torch.uint8, device=x.device)
    if scales.numel():
        mxfp8_rows_kernel[(triton.cdiv(scales.numel(), MXFP8_BLOCKS),)](
            x, codes, scales, scales.numel(), RCEIL=scale == "rceil", BLOCKS=MXFP8_BLOCKS, **LAUNCH
        )
    return MXFP8(codes.view(torch.float8_e4m3fn), scales)


def quantize_mxfp8_tokens(x_TK: torch.Tensor, offsets_E: torch.Tensor, scale: str) -> MXFP8:
    """The kernel along tokens: each expert's rows in blocks of their own, the last of them padded with zeros."""
    check_offsets(offsets_E, len(x_TK))
    start_B, end_B = token_blocks(offsets_E)
    num_blocks, width = len(start_B), x_TK.shape[1]
    codes_PK = torch.empty(num_blocks * MXFP8_BLOCK, width, dtype=torch.uint8, device=x_TK.device)
    scales_BK = torch.empty(num_blocks, width, dtype=torch.uint8, device=x_TK.device)
    if scales_BK.numel():
        mxfp8_tokens_kernel[(num_blocks, triton.cdiv(width, TOKEN_COLUMNS))](
            x_TK, codes_PK, scales_BK, start_B, end_B, width, RCEIL=scale == "rceil", BLOCK_K=TOKEN_COLUMNS, **LAUNCH
        )
    return MXFP8(codes_PK.view(torch.float8_e4m3fn), scales_BK)


def token_blocks(offsets_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [B], [B]: the first row of every padded block of 32 tokens, and the end of the rows of its expert."""
    block_ends_E = padded_offsets(offsets_E, MXFP8_BLOCK).long() // MXFP8_BLOCK
    num_blocks_E = torch.diff(block_ends_E, prepend=block_ends_E.new_zeros(1))
    starts_E = torch.cat([offsets_E.new_zeros(1), offsets_E[:-1]])
    expert_B = torch.arange(len(offsets_E), device=offsets_E.device).repeat_interleave(num_blocks_E)
    place_B = torch.arange(len(expert_B), device=offsets_E.device) - (block_ends_E - num_blocks_E)[expert_B]
    return (starts_E[expert_B] + place_B * MXFP8_BLOCK).int(), offsets_E[expert_B]


def is_interpreted() -> bool:
    """Were the kernels of this file made for Triton's interpreter? Fixed when it is imported."""
    return type(nvfp4_rows_kernel).__name__ == "InterpretedFunction"


def require(x: torch.Tensor) -> None:
    """Raises BackendUnavailable, with the reason, where the kernels cannot run on the device of x."""
    if reason := refusal("triton", x.device):
        raise BackendUnavailable(f"backend 'triton' cannot run: {reason}")
