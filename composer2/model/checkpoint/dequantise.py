"""Weights of quantised checkpoints back to plain numbers: codes and scales go in, a matrix comes out.

    FP8 block (DeepSeek-V3, MiniMax-M2):   w[i, j] = float(code[i, j]) * scale_inv[i // 128, j // 128]
    INT4 group (Kimi K2.5, compressed-tensors `pack-quantized`, symmetric):
        code[i, j] = (packed[i, j // 8] >> 4 * (j % 8)) & 15        w[i, j] = (code[i, j] - 8) * scale[i, j // group]

Source: DeepSeek-V3 paper (128 x 128 blocks, E4M3) and the layout published with compressed-tensors; row M9.
`weight_scale_inv` multiplies: the name says that it is the inverse of the factor the weights were scaled by.
Choice: products are rounded once, from float32 to the target's dtype, and computed a stripe of rows at a time, so that
the memory needed beside the target is small.

Shape letters: O rows (outputs), I columns (inputs).
"""

from __future__ import annotations

import torch

STRIPE = 1024
"""Rows dequantised at a time; a multiple of every block height in use."""


def dequantise_fp8_block(
    codes_OI: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int], out_OI: torch.Tensor
) -> None:
    """Write float8 codes times their blocks' scales into `out_OI`.

    `scale_inv` is [ceil(O / block[0]), ceil(I / block[1])]; ValueError when it is not."""
    rows, columns = codes_OI.shape
    expected = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scale_inv.shape) != expected:
        raise ValueError(f"scales have shape {tuple(scale_inv.shape)}, accepted is {expected} for blocks of {block}")
    stripe = max(STRIPE // block[0], 1) * block[0]
    for first in range(0, rows, stripe):
        last = min(first + stripe, rows)
        scales = scale_inv[first // block[0] : -(-last // block[0])].float()
        by_row = scales.repeat_interleave(block[0], dim=0)[: last - first]
        by_entry = by_row.repeat_interleave(block[1], dim=1)[:, :columns]
        out_OI[first:last].copy_(codes_OI[first:last].float() * by_entry)


def dequantise_int4_group(packed: torch.Tensor, scale: torch.Tensor, group_size: int, out_OI: torch.Tensor) -> None:
    """Write int4 codes (eight in an int32, lowest bits first) times their groups' scales into `out_OI`.

    `packed` is int32 [O, ceil(I / 8)], `scale` [O, ceil(I / group_size)]; ValueError when a shape differs."""
    rows, columns = out_OI.shape
    for name, tensor, width in (("packed weights", packed, 8), ("scales", scale, group_size)):
        expected = (rows, -(-columns // width))
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{name} have shape {tuple(tensor.shape)}, accepted is {expected}")
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    for first in range(0, rows, STRIPE):
        last = min(first + STRIPE, rows)
        codes = (packed[first:last, :, None] >> shifts) & 15
        values = (codes.flatten(1)[:, :columns] - 8).float()
        by_entry = scale[first:last].float().repeat_interleave(group_size, dim=1)[:, :columns]
        out_OI[first:last].copy_(values * by_entry)
