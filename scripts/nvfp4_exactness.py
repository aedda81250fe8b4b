"""How often does an order of operations pick another NVFP4 code than exact arithmetic?

    python scripts/nvfp4_exactness.py --out DIR [--quick]

In: nothing. Out: `DIR/nvfp4_exactness.json`, flat figures, and `DIR/nvfp4_exactness.png`; exit code 0 only if the exact
order flipped nothing. Four kinds of bfloat16 rows, 1,048,576 codes each (`--quick` 65,536), per-token outer scale:

    gaussian   heavy_tailed (log-normal magnitudes)   swiglu (silu(2 z) z')   mxfp8_rounded (gaussian, through MXFP8)

The oracle never divides: a code is the number of ties t with 2688 |x| > t * scale * amax (>= where the upper code is
the even one), and a scale the number of midpoints m of E4M3 with 448 * block_amax > m * amax. In float64 both sides are
exact: at most 31 significant bits. So `flipped_codes_exact` and `flipped_scales_exact` are counts against rational
arithmetic. `flipped_codes_ppm_<order>_<data>`: codes per million that differ from the oracle's, whether for the order's
code or its scale; `flipped_scales_ppm_...` the same for scales, `rows_touched_frac_...` rows with any such code.
`..._exact_float32` are for the same data in float32 (not of bfloat16 precision), which the exact order must match too.

Source: report §6.1; rows K1 K7.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from composer2.kernels.formats import E2M1_VALUES, NVFP4, unpack_nibbles
from composer2.kernels.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from composer2.kernels.nvfp4 import ORDERS, quantize_nvfp4

DATA = ("gaussian", "heavy_tailed", "swiglu", "mxfp8_rounded")
WIDTH = 1024
CHUNK = 64
"""Rows compared at a time."""


def inputs(data: str, rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """float32 [rows, width] of this kind; every row has a size of its own, as tokens have."""
    generator = torch.Generator().manual_seed(seed)
    z, w = (torch.randn(rows, width, generator=generator) for _ in range(2))
    size = torch.exp(torch.randn(rows, 1, generator=generator))
    if data == "heavy_tailed":
        z = z * torch.exp(2 * w)
    elif data == "swiglu":
        z = F.silu(2 * z) * w
    x = z * size
    return dequantize_mxfp8(quantize_mxfp8(x.bfloat16())) if data == "mxfp8_rounded" else x


def oracle(x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes 0..15 [T, K] and scale bytes [T, K // 16], both uint8, by comparing products."""
    x = x_TK.double()
    amax = x.abs().amax(-1, keepdim=True)
    blocks = x.abs().unflatten(-1, (-1, 16))
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    bytes_ = count_above(448 * blocks.amax(-1), e4m3, amax)
    divisor = e4m3[bytes_] * amax
    index = count_above(2688 * blocks, torch.tensor(E2M1_VALUES).double(), divisor.unsqueeze(-1))
    index = torch.where(divisor.unsqueeze(-1) == 0, 0, index).flatten(-2)
    return (index + 8 * x.signbit()).to(torch.uint8), torch.where(amax == 0, 0, bytes_).to(torch.uint8)


def count_above(numerator: torch.Tensor, grid: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Index of the grid value nearest to numerator / denominator, ties to the even index, without the division."""
    index = torch.zeros(numerator.shape, dtype=torch.int64)
    for lower, (low, high) in enumerate(itertools.pairwise(grid.tolist())):
        tie = denominator * ((low + high) / 2)
        index += (numerator >= tie) if lower % 2 else (numerator > tie)
    return index


def differences(t: NVFP4, codes: torch.Tensor, scales: torch.Tensor) -> tuple[int, int, int]:
    """Codes, scales and rows (by codes) in which a quantised tensor differs from the oracle."""
    flipped = unpack_nibbles(t.codes) != codes
    return int(flipped.sum()), int((t.scales.view(torch.uint8) != scales).sum()), int(flipped.any(-1).sum())


def measure(data: str, rows: int) -> dict[str, float]:
    """Counts for one kind of data: `codes`, `scales`, and for each order `<order>_codes`, `_scales` and `_rows`."""
    totals: dict[str, float] = {"codes": rows * WIDTH, "scales": rows * WIDTH // 16}
    wide = inputs(data, rows, WIDTH)
    for part in wide.split(CHUNK):
        variants = [(order, part.bfloat16()) for order in ORDERS] + [("exact_float32", part)]
        expected = {dtype: oracle(part.to(dtype)) for dtype in (torch.bfloat16, torch.float32)}
        for order, x in variants:
            t = quantize_nvfp4(x, order="exact" if order == "exact_float32" else order)
            for name, count in zip(("codes", "scales", "rows"), differences(t, *expected[x.dtype]), strict=True):
                totals[f"{order}_{name}"] = totals.get(f"{order}_{name}", 0) + count
    return totals


def figures(results: dict[str, dict[str, float]], rows: int) -> dict[str, float]:
    """The flat figures of the docstring."""
    flat: dict[str, float] = {
        "codes": sum(counts["codes"] for counts in results.values()),
        "scales": sum(counts["scales"] for counts in results.values()),
    }
    for order in ("exact", "exact_float32"):
        for name in ("codes", "scales"):
            flat[f"flipped_{name}_{order}"] = sum(counts[f"{order}_{name}"] for counts in results.values())
    for data, counts in results.items():
        for order in ORDERS[1:]:
            for name in ("codes", "scales"):
                flat[f"flipped_{name}_ppm_{order}_{data}"] = 1e6 * counts[f"{order}_{name}"] / counts[name]
            flat[f"rows_touched_frac_{order}_{data}"] = counts[f"{order}_rows"] / rows
    return flat


def draw(flat: dict[str, float], path: Path) -> None:
    """Flipped codes per million, by order and data, logarithmic."""
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    for place, order in enumerate(ORDERS[1:]):
        values = [flat[f"flipped_codes_ppm_{order}_{data}"] for data in DATA]
        axes.bar([i + 0.27 * (place - 1) for i in range(len(DATA))], values, width=0.25, label=order)
    axes.set_yscale("log")
    axes.set_xticks(range(len(DATA)), [data.replace("_", " ") for data in DATA])
    axes.set_ylabel("codes per million that differ\nfrom exact arithmetic")
    axes.set_title(
        f"The exact order differs in {flat['flipped_codes_exact']:.0f} of {flat['codes']:,.0f} codes", fontsize=10
    )
    axes.legend(title="order", frameon=False)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = 64 if options.quick else 1024
    results = {}
    for data in DATA:
        results[data] = measure(data, rows)
        print(f"{data}: {results[data]['exact_codes']:.0f} codes of the exact order differ", flush=True)
    flat = figures(results, rows)
    draw(flat, options.out / "nvfp4_exactness.png")
    (options.out / "nvfp4_exactness.json").write_text(json.dumps(flat, indent=2) + "\n")
    wrong = [name for name, value in flat.items() if name.startswith("flipped_") and "_ppm_" not in name and value]
    if wrong:
        print(f"not exact: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
