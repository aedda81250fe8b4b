"""MXFP8: a float tensor goes in, E4M3 elements and one power-of-two scale per 32 of them come out, and back.

    b     = smallest byte with amax / 2^(b - 127) <= 448   ("rceil"),   or floor(log2 amax) - 8 + 127   ("floor")
    code  = E4M3(x * 2^(127 - b))                          one rounding: the product is exact

Source: report §6.1 (backward and expert dispatch in MXFP8); row K2. OCP Microscaling Formats 1.0 §6.3 for "floor".
Choice: "rceil" by default: no element saturates, measured 0.8 to 3.2 dB better than "floor".
Choice: the scale comes from integer operations on the float's bits, so that amax = 448 * 2^k and its two neighbours,
the smallest magnitudes (byte 0 = 2^-127) and subnormals are right; a float log2 or a cast to E8M0 gets them wrong.
Choice: along tokens (`axis=0`, what a weight gradient needs) every expert's rows are padded with zeros to a multiple of
32 and blocked alone, so no block holds tokens of two experts; rows behind the last offset are never read.

Edges, for both rules: a zero block has byte 0 and codes +-0; the sign of zero is kept; magnitudes below 2^-10 of the
scale become +-0; all finite float32 and bfloat16 values are accepted (from 1.9375 * 2^127 on, bfloat16's largest number
included, they round to 2^128, which decodes to infinity in float32); NaN and infinity raise ValueError.

Shape letters: T tokens, K width, E experts, P tokens after padding, N blocks.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch

from composer2.kernels.backend import choose
from composer2.kernels.formats import (
    MXFP8,
    MXFP8_BLOCK,
    by_parts,
    decode_e8m0,
    encode_e4m3,
    encode_e8m0,
    finite_amax,
    pad_rows,
    unpad_rows,
)

BACKENDS = ("auto", "reference", "triton", "torchao")


@torch.no_grad()
def quantize_mxfp8(
    x: torch.Tensor,
    *,
    scale: Literal["rceil", "floor"] = "rceil",
    axis: Literal[-1, 0] = -1,
    offsets: torch.Tensor | None = None,
    backend: str = "auto",
) -> MXFP8:
    """Blocks of 32 along the last axis of bfloat16 or float32 [..., K], or along the tokens of [T, K].

    axis -1: codes [..., K], scales [..., K // 32]; K a multiple of 32; no offsets. axis 0: `offsets` int32 [E], the
    running ends of the experts' rows; codes [P, K], scales [P // 32, K], P the sum of the counts rounded up to 32.
    Raises ValueError for a width, dtype, offsets, name or non-finite value that does not fit (the Triton kernels do not
    look for non-finite values, see `triton_quant.py`), BackendUnavailable where the backend cannot run.
    """
    check_arguments(x, scale, axis, offsets)
    chosen = choose("quantize_mxfp8", backend, x.device, BACKENDS)
    if chosen == "triton":
        from composer2.kernels import triton_quant

        return triton_quant.quantize_mxfp8(x, scale=scale, axis=axis, offsets=offsets)
    if chosen == "torchao":
        from composer2.kernels import torchao

        return torchao.quantize_mxfp8(x, scale=scale, axis=axis, offsets=offsets)
    if axis == -1:
        blocks = x.reshape(-1, x.shape[-1] // MXFP8_BLOCK, MXFP8_BLOCK)
        codes, scales = by_parts(functools.partial(quantize_blocks, 2, scale), x.shape[-1], blocks)
        return MXFP8(codes.view(x.shape), scales.view(*x.shape[:-1], x.shape[-1] // MXFP8_BLOCK))
    assert offsets is not None
    padded_PK = pad_rows(x, offsets)
    blocks = padded_PK.unflatten(0, (-1, MXFP8_BLOCK))
    codes, scales = by_parts(functools.partial(quantize_blocks, 1, scale), MXFP8_BLOCK * x.shape[1], blocks)
    return MXFP8(codes.view(padded_PK.shape), scales)


def quantize_blocks(dim: int, rule: str, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: E4M3 codes in the shape of `blocks`, and one byte per block, whose elements lie along `dim`."""
    scales = encode_e8m0(finite_amax(blocks, dim), rule)
    inverse = decode_e8m0(254 - scales).unsqueeze(dim)  # 2^(127 - b), a float32 for every b below 255
    return encode_e4m3(blocks.float() * inverse), scales


def dequantize_mxfp8(
    t: MXFP8, dtype: torch.dtype = torch.float32, *, offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """code * 2^(b - 127) in `dtype`, exact in float32 and, subnormals apart, in bfloat16; [..., K].

    Blocks along tokens are told from the shapes; with `offsets` the padding is taken out again: [offsets[-1], K].
    A scale byte of 255 decodes to NaN. Raises ValueError for shapes that do not fit.
    """
    axis = block_axis(t)
    scales = decode_e8m0(t.scales)
    if axis == -1:
        wide = t.codes.float().unflatten(-1, (-1, MXFP8_BLOCK)).mul_(scales.unsqueeze(-1)).flatten(-2)
        if offsets is not None:
            raise ValueError("offsets are given with blocks along the last axis, accepted is None: nothing is padded")
        return wide.to(dtype)
    wide = t.codes.float().unflatten(0, (-1, MXFP8_BLOCK)).mul_(scales.unsqueeze(1)).flatten(0, 1)
    return (wide if offsets is None else unpad_rows(wide, offsets)).to(dtype)


def block_axis(t: MXFP8) -> int:
    """Along which axis the blocks lie: -1, or 0 for tokens. ValueError for shapes that are neither."""
    codes, scales = tuple(t.codes.shape), tuple(t.scales.shape)
    if scales[:-1] == codes[:-1] and scales[-1] * MXFP8_BLOCK == codes[-1]:
        return -1
    if len(codes) == 2 and (scales[0] * MXFP8_BLOCK, scales[1]) == codes:
        return 0
    raise ValueError(f"MXFP8 codes are {codes}, scales {scales}, accepted are [..., K // 32] or [P // 32, K]")


def check_arguments(x: torch.Tensor, scale: str, axis: int, offsets: torch.Tensor | None) -> None:
    """ValueError for what `quantize_mxfp8` does not accept, values apart."""
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"x is {x.dtype}, accepted is torch.bfloat16 or torch.float32")
    if scale not in ("rceil", "floor"):
        raise ValueError(f"scale is {scale!r}, accepted is 'rceil' or 'floor'")
    if axis == -1:
        if x.ndim < 1 or x.shape[-1] == 0 or x.shape[-1] % MXFP8_BLOCK:
            raise ValueError(f"x is {tuple(x.shape)}, accepted is a last dimension that is a multiple of {MXFP8_BLOCK}")
        if offsets is not None:
            raise ValueError("offsets are given with axis -1, accepted is None: its blocks never cross rows")
    elif axis == 0:
        if x.ndim != 2 or x.shape[1] == 0:
            raise ValueError(f"x is {tuple(x.shape)}, accepted with axis 0 is [T, K]")
        if offsets is None:
            raise ValueError("offsets are None with axis 0, accepted is int32 [E], the running ends of the experts")
    else:
        raise ValueError(f"axis is {axis}, accepted is -1 or 0")
