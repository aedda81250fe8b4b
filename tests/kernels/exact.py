"""What the quantisers should give, in rational numbers; inputs that lie on ties; libraries to compare with, or a skip.

The tables of composer2 are not used but written out again, on purpose.
"""

from __future__ import annotations

import bisect
import importlib
import itertools
from fractions import Fraction

import pytest
import torch

E2M1 = [Fraction(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
E4M3 = [Fraction(m, 512) for m in range(8)] + [
    Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8)
]
E4M3.pop()  # the last pattern is NaN
E2M1_TIES = [(a + b) / 2 for a, b in itertools.pairwise(E2M1)]


def nearest(grid: list[Fraction], value: Fraction) -> int:
    """Index of the nearest grid value, ties to the even index, above the last one saturated; value >= 0."""
    right = bisect.bisect_left(grid, value)
    if right == 0 or right == len(grid):
        return min(right, len(grid) - 1)
    below, above = value - grid[right - 1], grid[right] - value
    if below == above:
        return right - right % 2
    return right if above < below else right - 1


def nvfp4(rows: torch.Tensor, amax: float | None = None) -> tuple[list[list[int]], list[list[int]]]:
    """Codes 0..15 [T][K] and E4M3 scale bytes [T][K // 16] of finite rows, per token, or with one amax for all."""
    codes, scales = [], []
    for row in rows.double().tolist():
        peak = Fraction(max(abs(v) for v in row) if amax is None else amax)
        row_codes: list[int] = []
        row_scales: list[int] = []
        for start in range(0, len(row), 16):
            block = [Fraction(v) for v in row[start : start + 16]]
            byte = nearest(E4M3, 448 * max(abs(v) for v in block) / peak) if peak else 0
            divisor = E4M3[byte] * peak
            for v, original in zip(block, row[start : start + 16], strict=True):
                code = nearest(E2M1, 2688 * abs(v) / divisor) if divisor else 0
                row_codes.append(code + 8 * is_negative(original))
            row_scales.append(byte)
        codes.append(row_codes)
        scales.append(row_scales)
    return codes, scales


def is_negative(value: float) -> bool:
    """The sign bit, of -0.0 too."""
    return str(value).startswith("-")


def inputs(name: str, rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """bfloat16 [rows, width]: "gauss", "heavy", "swiglu", "rounded" (4 significant bits, as after MXFP8), "quarters",
    "powers", "sparse" (zero blocks, zero rows, -0.0) or "spread" (rows from 1e-36 to 1e36)."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, width, generator=generator)
    w = torch.randn(rows, width, generator=generator)
    if name == "heavy":
        z = z * torch.exp(2 * w)
    elif name == "swiglu":
        z = torch.nn.functional.silu(2 * z) * w
    elif name == "rounded":
        mantissa, exponent = torch.frexp(z * torch.exp(w))
        z = torch.ldexp((mantissa * 16).round() / 16, exponent)
    elif name == "quarters":
        z = (4 * z).round() / 4
    elif name == "powers":
        z = torch.sign(z) * torch.exp2((3 * w).round())
    elif name == "sparse":
        z = z * (w > 1.2)
        z[::3] = 0
        z[:, :16] = -0.0
    elif name == "spread":
        z = z * torch.logspace(-36, 36, rows)[:, None]
    elif name != "gauss":
        raise ValueError(f"name is {name!r}")
    return z.bfloat16()


NAMES = ("gauss", "heavy", "swiglu", "rounded", "quarters", "powers", "sparse", "spread")


def library(name: str):
    """A module of an oracle library; the test is skipped with the reason where it does not import."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        return pytest.skip(f"oracle {name} does not import: {error}")


def transformer_engine():
    """TransformerEngine's Python reference, or a skip with the reason."""
    from composer2.kernels.backend import BackendUnavailable
    from composer2.kernels.te import load_reference

    try:
        return load_reference()
    except BackendUnavailable as error:
        return pytest.skip(f"oracle transformer_engine: {error}")
