"""How fast the kernels are, each against an alternative in the same run: `python scripts/bench_kernels.py --out DIR`.

    nvfp4_quantize_vs_torchao    time of torchao / time of ours, NVFP4 with a scale per token
    mxfp8_quantize_vs_torchao    the same, MXFP8 along the last axis, round-up scales
    expert_gemm_fwd_bwd_vs_loop  time of a loop over experts / time of `expert_linear`, BF16, forward and backward

In: nothing. Out: `DIR/bench_kernels.json`, flat figures, and `DIR/bench_kernels.png`; exit code 0 when all of them were
measured. A ratio above 1 means that ours is faster. On a CUDA device there are further figures: GB/s of quantisers and
of a copy, TFLOP/s of every recipe and of BF16; without one these keys are absent.

Source: rows K2 K4 K6. Both sides run on one thread, interleaved pair by pair, and are timed in process CPU time, so
that other load on the machine meets both; a figure is the ratio of medians. Both quantisers run eagerly. A quantiser's
ratio is the worse one of the two sizes. `--quick` takes fewer pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F

from composer2.kernels.linear import RECIPES, Recipe, expert_linear
from composer2.kernels.mxfp8 import quantize_mxfp8
from composer2.kernels.nvfp4 import quantize_nvfp4

SIZES = ((4096, 256), (4096, 2048))
EXPERTS, WIDTH, TOKENS = 16, 256, 4096


def paired(ours: Callable[[], Any], theirs: Callable[[], Any], pairs: int) -> tuple[float, float]:
    """Median process seconds of each, after one unmeasured pair; the order within a pair alternates."""
    found: dict[Callable[[], Any], list[float]] = {ours: [], theirs: []}
    for index in range(pairs + 1):
        for call in (ours, theirs) if index % 2 else (theirs, ours):
            started = time.process_time()
            call()
            if index:
                found[call].append(time.process_time() - started)
    return statistics.median(found[ours]), statistics.median(found[theirs])


def skewed_offsets(device: str = "cpu") -> torch.Tensor:
    """int32 [E]: counts that fall geometrically, the largest about ten times the smallest, together TOKENS."""
    weights = torch.logspace(1, 0, EXPERTS, base=10, dtype=torch.float64)
    ends = (weights / weights.sum()).cumsum(0) * TOKENS
    return ends.round().to(torch.int32).to(device)


def compare(name: str, ours: Callable[[], Any], theirs: Callable[[], Any], pairs: int) -> dict[str, float]:
    """Milliseconds of both and their ratio."""
    mine, other = paired(ours, theirs, pairs)
    print(f"{name}: ours {1e3 * mine:.2f} ms, theirs {1e3 * other:.2f} ms, ratio {other / mine:.2f}", flush=True)
    return {f"{name}_ours_ms": 1e3 * mine, f"{name}_theirs_ms": 1e3 * other, f"{name}_ratio": other / mine}


def bench_quantisers(pairs: int) -> dict[str, float]:
    """Against torchao at both sizes; the unsuffixed figures are the worse ratios."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    figures: dict[str, float] = {}
    for rows, width in SIZES:
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).bfloat16()

        def torchao_nvfp4(x: torch.Tensor = x) -> Any:
            return nvfp4_quantize(x, 16, x.abs().amax(-1, keepdim=True).float() / 2688)

        def torchao_mxfp8(x: torch.Tensor = x) -> Any:
            return to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)

        size = f"{rows}x{width}"
        figures |= compare(f"nvfp4_quantize_{size}", lambda x=x: quantize_nvfp4(x), torchao_nvfp4, pairs)
        figures |= compare(f"mxfp8_quantize_{size}", lambda x=x: quantize_mxfp8(x), torchao_mxfp8, pairs)
    for kind in ("nvfp4", "mxfp8"):
        ratios = [figures[f"{kind}_quantize_{rows}x{width}_ratio"] for rows, width in SIZES]
        figures[f"{kind}_quantize_vs_torchao"] = min(ratios)
    return figures


def operands(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [T, D], matrices [E, D, D], an output gradient and offsets, in BF16."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, WIDTH, generator=generator).bfloat16().to(device).requires_grad_()
    w = (torch.randn(EXPERTS, WIDTH, WIDTH, generator=generator) / 16).bfloat16().to(device).requires_grad_()
    grad = torch.randn(TOKENS, WIDTH, generator=generator).bfloat16().to(device)
    return x, w, grad, skewed_offsets(device)


def bench_experts(pairs: int) -> dict[str, float]:
    """Forward and backward of one grouped product against a loop, and what the quantised recipes cost."""
    x, w, grad, offsets = operands()
    ends = offsets.tolist()

    def grouped(recipe: Recipe) -> None:
        x.grad = w.grad = None
        expert_linear(x, w, offsets, recipe=recipe).backward(grad)

    def loop() -> None:
        x.grad = w.grad = None
        starts = [0, *ends[:-1]]
        torch.cat([F.linear(x[s:e], w_OI) for s, e, w_OI in zip(starts, ends, w.unbind(), strict=True)]).backward(grad)

    figures = compare("expert_gemm_fwd_bwd_bf16", lambda: grouped(Recipe()), loop, pairs)
    figures["expert_gemm_fwd_bwd_vs_loop"] = figures["expert_gemm_fwd_bwd_bf16_ratio"]
    for name in RECIPES[1:]:
        mine, _ = paired(lambda name=name: grouped(Recipe(name=name)), lambda: None, max(3, pairs // 5))
        figures[f"expert_gemm_fwd_bwd_{name.replace('-', '_')}_ours_ms"] = 1e3 * mine
    return figures


def bench_gpu() -> dict[str, float]:
    """GB/s (bytes read and written) of the quantisers and a copy; TFLOP/s forward of every recipe, operands quantised
    inside the call."""
    figures: dict[str, float] = {}
    x = torch.randn(16384, 4096, device="cuda").bfloat16()
    target = torch.empty_like(x)
    moved = {
        "copy": (lambda: target.copy_(x), 4.0),
        "nvfp4_quantize": (lambda: quantize_nvfp4(x), 2.0 + 0.5 + 1 / 16),
        "mxfp8_quantize": (lambda: quantize_mxfp8(x), 2.0 + 1.0 + 1 / 32),
    }
    for name, (call, bytes_each) in moved.items():
        figures[f"gpu_{name}_gb_s"] = bytes_each * x.numel() / gpu_seconds(call) / 1e9
    rows, width = 16384, 2048
    tokens = torch.randn(rows, width, device="cuda").bfloat16()
    matrices = torch.randn(EXPERTS, width, width, device="cuda").bfloat16()
    offsets = (skewed_offsets("cuda").double() * rows / TOKENS).round().to(torch.int32)
    with torch.no_grad():
        for recipe in RECIPES:
            seconds = gpu_seconds(
                lambda name=recipe: expert_linear(tokens, matrices, offsets, recipe=Recipe(name=name))
            )
            figures[f"gpu_expert_gemm_{recipe.replace('-', '_')}_tflop_s"] = 2 * rows * width * width / seconds / 1e12
    return figures


def gpu_seconds(call: Callable[[], Any], repeats: int = 20) -> float:
    """Median seconds by events, after three unmeasured calls."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def draw(figures: dict[str, float], path: Path) -> None:
    """The ratios as bars, with the line of equality."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ratios = {name.removesuffix("_ratio"): value for name, value in figures.items() if name.endswith("_ratio")}
    figure, axes = plt.subplots(figsize=(8, 0.5 * len(ratios) + 1.5), layout="constrained")
    axes.barh(list(ratios), list(ratios.values()))
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel("time of the alternative / our time")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    pairs = 11 if options.quick else 31
    figures = bench_quantisers(pairs) | bench_experts(pairs)
    if torch.cuda.is_available():
        figures |= bench_gpu()
    (options.out / "bench_kernels.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    draw(figures, options.out / "bench_kernels.png")
    print(json.dumps({name: value for name, value in figures.items() if "_vs_" in name}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
