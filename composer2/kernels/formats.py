"""The number formats: what a code means, how a float becomes one, how codes and scales lie in memory.

In: float tensors, or bytes. Out: bytes, or float tensors. Pure PyTorch on any device; nothing here chooses a scale
(`nvfp4.py` and `mxfp8.py` do).

    E2M1   1 sign, 2 exponent, 1 mantissa bit: 0 .5 1 1.5 2 3 4 6, two codes a byte, even index in the low nibble
    E4M3   torch.float8_e4m3fn: |v| <= 448, steps of 2^-9 near zero, no infinity
    E8M0   a byte b means 2^(b - 127); 0 is 2^-127 (not zero), 254 is 2^127, 255 is NaN
    NVFP4  value = E2M1 code * E4M3 scale of its 16 * float32 outer scale (a multiplier: amax / 2688, 2688 = 6 * 448)
    MXFP8  value = E4M3 code * E8M0 scale of its 32

All casts round to nearest even and saturate. E2M1 codes 0..7 grow with the value, so rounding is one `round` on

    f(|v|) = min(|v|, 6) / 2 + min(|v|, 4) / 2 + min(|v|, 2)      the piecewise-linear map of 0 .5 1 1.5 2 3 4 6 to 0..7

whose half-integers are exactly the ties and whose even integers are the even codes.
Source: report §6.1; rows K1 K2 K3. OCP Microscaling Formats 1.0 §5 for E2M1, E4M3, E8M0.
Choice: scales are kept plain, [rows, blocks]; `swizzle_scales` gives the 128x4 order that Blackwell's block-scaled MMA
reads and `unswizzle_scales` undoes it.

Shape letters: R rows, C scale columns, T tokens, K the quantised width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
NVFP4_BLOCK = 16
NVFP4_OUTER = E2M1_MAX * E4M3_MAX
"""2688: a block of the largest magnitude has scale 448 and code 6."""
MXFP8_BLOCK = 32
PART = 1 << 18
"""Elements handled at a time on a CPU, see `by_parts`."""


class NVFP4(NamedTuple):
    """A tensor [..., K] in NVFP4."""

    codes: torch.Tensor
    """uint8 [..., K // 2]: two E2M1 codes a byte, even k in the low nibble, bit 3 of a code is the sign."""
    scales: torch.Tensor
    """float8_e4m3fn [..., K // 16], never negative, 0 where the block is zero or too small for a scale."""
    outer: torch.Tensor
    """float32, a multiplier, amax / 2688: [..., 1] per token, [1] * ndim per tensor, [..., 1, 1] per matrix."""


class MXFP8(NamedTuple):
    """A tensor [..., K] with blocks along K, or [T, K] with blocks along T, each expert padded to 32 (axis 0)."""

    codes: torch.Tensor
    """float8_e4m3fn [..., K]; axis 0: [T_padded, K]."""
    scales: torch.Tensor
    """uint8 E8M0 [..., K // 32]; axis 0: [T_padded // 32, K]."""


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15, one per element, of a float tensor: nearest, ties to the even code, above 6 saturated.

    The sign of zero is kept, inf saturates, NaN raises ValueError (the format has none).
    """
    if x.isnan().any():
        raise ValueError("E2M1: a value is NaN, accepted is a number; the format has no NaN")
    # float64: in float32 the sum in f would round a neighbour of a tie onto the tie.
    return e2m1_index(x.double().abs_()).to(torch.uint8) | (x.signbit().to(torch.uint8) << 3)


def e2m1_index(magnitude: torch.Tensor) -> torch.Tensor:
    """0..7, as floats, of magnitudes >= 0 (overwritten): f above, rounded half to even.

    Right if no magnitude is nearer to a tie than the dtype's rounding of f: any float32 value held in float64, or a
    quotient known to keep its distance (`nvfp4.py`).
    """
    low, middle = magnitude.clamp(max=2.0), magnitude.clamp(max=4.0)
    return low.add_(middle, alpha=0.5).add_(magnitude.clamp_(max=6.0), alpha=0.5).round_()


def decode_e2m1(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of uint8 codes 0..15, exactly, -0.0 for code 8."""
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=dtype, device=codes.device)
    return values[codes.int()]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 or int16 [..., K], all below 16 -> uint8 [..., K // 2], even index in the low nibble.

    Two neighbours are read as one wider integer (CPUs and GPUs that run torch are little-endian). ValueError for an
    odd K or another dtype.
    """
    if codes.dtype not in (torch.uint8, torch.int16) or codes.shape[-1] % 2:
        raise ValueError(f"codes are {codes.dtype} {tuple(codes.shape)}, accepted is uint8 or int16 [..., even]")
    pair, shift = (torch.int16, 4) if codes.dtype == torch.uint8 else (torch.int32, 12)
    pairs = codes.contiguous().view(pair)
    return (pairs | (pairs >> shift)).to(torch.uint8)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K // 2] -> uint8 [..., K], the low nibble first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn of a float tensor: nearest even, saturated at 448 (inf too); NaN stays NaN. float64 rounds once."""
    x = x.clamp(-E4M3_MAX, E4M3_MAX)
    if x.dtype == torch.float64:  # the library's cast goes through float32 and would round twice
        exponent = torch.frexp(x).exponent.clamp_(min=-5)
        step = torch.ldexp(torch.ones_like(x), exponent - 4)
        x = x.div_(step).round_().mul_(step)
    return x.to(torch.float8_e4m3fn)


def decode_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """float32 2^(b - 127) of uint8 b; 0 -> 2^-127, 254 -> 2^127, 255 -> NaN. By bits: no exp2, no flushed subnormal."""
    wide = scales.int()
    bits = torch.where(wide == 0, 1 << 22, wide << 23)
    return torch.where(wide == 255, 0x7FC00000, bits).view(torch.float32)


def finite_amax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """float32 largest magnitude of a bfloat16 or float32 tensor along `dim`, which is dropped.

    Magnitudes order like their bits, which integer lanes compare faster. Raises ValueError if a value is NaN or inf.
    """
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"x is {x.dtype}, accepted is torch.bfloat16 or torch.float32")
    kind, mask, infinity = {2: (torch.int16, 0x7FFF, 0x7F80), 4: (torch.int32, 0x7FFFFFFF, 0x7F800000)}[
        x.element_size()
    ]
    bits = (x.view(kind) & mask).amax(dim)
    if (bits >= infinity).any():
        raise ValueError("x holds NaN or infinity, accepted are finite values; these formats cannot carry them")
    return bits.view(x.dtype).float()


def by_parts(
    function: Callable[..., tuple[torch.Tensor, ...]], width: int, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """`function` over a few rows at a time, results concatenated: on a CPU temporaries then stay in its cache.

    All tensors share their first dimension, `width` is the number of elements a row; elsewhere than on a CPU, and for a
    small tensor, it is one call.
    """
    rows = max(1, PART // width) if tensors[0].device.type == "cpu" else len(tensors[0])
    if rows >= len(tensors[0]):
        return function(*tensors)
    parts = [function(*part) for part in zip(*(tensor.split(rows) for tensor in tensors), strict=True)]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def encode_e8m0(amax: torch.Tensor, rule: str) -> torch.Tensor:
    """uint8 scale bytes of blocks with this largest magnitude (float32, finite, >= 0), for E4M3 elements.

    rule "rceil": the smallest power of two with amax / 2^(b - 127) <= 448, so that nothing saturates. "floor": the OCP
    rule, 2^(floor(log2 amax) - 8), whose quotient can reach 511 and saturate. Both end at byte 0. ValueError otherwise.
    """
    bits = amax.float().view(torch.int32)
    if rule == "rceil":
        bits = bits + 0x1FFFFF  # 448 = 1.75 * 2^8: a mantissa above .75 carries into the exponent
    elif rule != "floor":
        raise ValueError(f"scale is {rule!r}, accepted is 'rceil' or 'floor'")
    return ((bits >> 23) - 8).clamp_(min=0).to(torch.uint8)


def swizzle_scales(scales_RC: torch.Tensor) -> torch.Tensor:
    """One-byte scales [R, C] -> flat [ceil128(R) * ceil4(C)] in the order of Blackwell's block-scaled MMA, zero-padded.

    off(r, c) = (r // 128) * ceil(C / 4) * 512 + (c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
    """
    if scales_RC.ndim != 2 or scales_RC.element_size() != 1:
        raise ValueError(f"scales are {scales_RC.dtype} {tuple(scales_RC.shape)}, accepted is a one-byte dtype [R, C]")
    rows, columns = scales_RC.shape
    padded = F.pad(scales_RC.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = padded.view(-(-rows // 128), 4, 32, -(-columns // 4), 4)  # row tile, r32, r, column tile, c
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales_RC.dtype)


def unswizzle_scales(flat: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The inverse of `swizzle_scales`: the plain [rows, columns]. ValueError if the length does not fit."""
    row_tiles, column_tiles = -(-rows // 128), -(-columns // 4)
    if flat.shape != (row_tiles * column_tiles * 512,) or flat.element_size() != 1:
        raise ValueError(
            f"flat scales are {flat.dtype} {tuple(flat.shape)}, accepted for {rows} x {columns} is a one-byte dtype "
            f"[{row_tiles * column_tiles * 512}]"
        )
    tiles = flat.view(torch.uint8).view(row_tiles, column_tiles, 32, 4, 4).permute(0, 3, 2, 1, 4)
    padded = tiles.reshape(row_tiles * 128, column_tiles * 4)
    return padded[:rows, :columns].contiguous().view(flat.dtype)


def check_offsets(offsets_E: torch.Tensor, num_rows: int) -> list[int]:
    """The running ends of the experts' rows as a list; copies them to the host.

    Raises ValueError unless int32 [E], non-decreasing, from >= 0 to <= num_rows; naming what was given.
    """
    if offsets_E.ndim != 1 or offsets_E.dtype != torch.int32 or not len(offsets_E):
        raise ValueError(f"offsets are {offsets_E.dtype} {tuple(offsets_E.shape)}, accepted is int32 [E] with E >= 1")
    ends: list[int] = offsets_E.tolist()
    if any(start > end for start, end in zip([0, *ends], ends, strict=False)):
        raise ValueError(f"offsets are {ends}, accepted is a non-decreasing list from 0 on")
    if ends[-1] > num_rows:
        raise ValueError(f"offsets end at {ends[-1]}, accepted is at most the number of rows {num_rows}")
    return ends


def padded_offsets(offsets_E: torch.Tensor, block: int = MXFP8_BLOCK) -> torch.Tensor:
    """int32 [E]: the running ends when every expert's rows are padded to a multiple of `block`. No host copy."""
    counts_E = torch.diff(offsets_E, prepend=offsets_E.new_zeros(1))
    return ((counts_E + block - 1) // block * block).cumsum(0).to(torch.int32)


def pad_rows(x_TK: torch.Tensor, offsets_E: torch.Tensor, block: int = MXFP8_BLOCK) -> torch.Tensor:
    """[T, K] -> [T_padded, K]: every expert's rows followed by zeros up to a multiple of `block`; the tail is dropped.

    Raises ValueError for offsets that do not fit.
    """
    ends = check_offsets(offsets_E, len(x_TK))
    out = x_TK.new_zeros(int(padded_offsets(offsets_E, block)[-1]), *x_TK.shape[1:])
    out[padded_positions(offsets_E, block)] = x_TK[: ends[-1]]
    return out


def unpad_rows(x_PK: torch.Tensor, offsets_E: torch.Tensor, block: int = MXFP8_BLOCK) -> torch.Tensor:
    """The inverse of `pad_rows`: [T_padded, K] -> [offsets[-1], K]."""
    return x_PK[padded_positions(offsets_E, block)]


def padded_positions(offsets_E: torch.Tensor, block: int = MXFP8_BLOCK) -> torch.Tensor:
    """int64 [offsets[-1]]: where each row lies after padding."""
    counts_E = torch.diff(offsets_E, prepend=offsets_E.new_zeros(1))
    shift_E = padded_offsets(offsets_E, block) - (counts_E + block - 1) // block * block - (offsets_E - counts_E)
    num_rows = int(offsets_E[-1])
    shifts = torch.repeat_interleave(shift_E.long(), counts_E.long(), output_size=num_rows)
    return torch.arange(num_rows, device=offsets_E.device) + shifts
