"""Does a token's NVFP4 value depend on the other tokens of its batch?

    python scripts/nvfp4_batch_dependence.py --out DIR [--quick]

In: nothing. Out: `DIR/nvfp4_batch_dependence.json`, flat figures, and `DIR/nvfp4_batch_dependence.png`; exit code 0
only if every figure is there and per-token scales changed nothing.

Token 0 of a bfloat16 batch [64, 1024] stays as it is while token 1 is multiplied by 1.37, 2, 100, 30000, or while all
other tokens are taken away. `per_tensor_changed` and `per_token_changed` count what changed in token 0, codes, scales
and decoded values together, over all five cases; `per_<outer>_<codes|scales|values>_changed_<case>` one by one. In a
causal model a token behind token 0 would thus reach it: that is the first of the two faults the report names.
`snr_db_<format>_<data>`: signal over quantisation error, of each format on seven kinds of data [1024, 2048]
(`--quick` [128, 512]). `mxfp8_then_nvfp4` is what expert dispatch in MXFP8 in front of an NVFP4 product does.

Source: report §6.1; rows K1 K5 K8.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from composer2.kernels.formats import NVFP4, unpack_nibbles
from composer2.kernels.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from composer2.kernels.nvfp4 import dequantize_nvfp4, quantize_nvfp4

FACTORS = (1.37, 2.0, 100.0, 30000.0)
OUTERS = ("token", "tensor")
FORMATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nvfp4_token": lambda x: dequantize_nvfp4(quantize_nvfp4(x)),
    "nvfp4_tensor": lambda x: dequantize_nvfp4(quantize_nvfp4(x, outer="tensor")),
    "mxfp8_then_nvfp4": lambda x: dequantize_nvfp4(quantize_nvfp4(dequantize_mxfp8(quantize_mxfp8(x)).bfloat16())),
    "mxfp8_rceil": lambda x: dequantize_mxfp8(quantize_mxfp8(x)),
    "mxfp8_floor": lambda x: dequantize_mxfp8(quantize_mxfp8(x, scale="floor")),
}


def inputs(rows: int, width: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """bfloat16 [rows, width] by name."""
    z, w = (torch.randn(rows, width, generator=generator) for _ in range(2))
    size = torch.exp(1.5 * torch.randn(rows, 1, generator=generator))
    channels = torch.ones(width)
    channels[torch.randperm(width, generator=generator)[: max(1, width // 256)]] = 40.0
    chi = torch.randn(3, rows, width, generator=generator).square().mean(0)
    outlier = torch.ones(rows, 1)
    outlier[rows // 2] = 100.0
    data = {
        "gaussian": z,
        "student_t3": z / chi.sqrt(),
        "outlier_channels": z * channels,
        "token_norms": z * size,
        "outlier_token": z * channels * size * outlier,
        "swiglu": F.silu(2 * z) * w,
        "log_normal": z.sign() * torch.exp(2 * w),
    }
    return {name: x.bfloat16() for name, x in data.items()}


def snr_db(x: torch.Tensor, value: torch.Tensor) -> float:
    """10 log10 of signal power over error power, over the whole tensor."""
    wide = x.double()
    return float(10 * torch.log10(wide.square().sum() / (wide - value.double()).square().sum()))


def first_token(t: NVFP4) -> dict[str, torch.Tensor]:
    """Codes, scale bytes and decoded values of token 0."""
    return {
        "codes": unpack_nibbles(t.codes)[0],
        "scales": t.scales.view(torch.uint8)[0],
        "values": dequantize_nvfp4(t)[0],
    }


def batch_dependence(x_TK: torch.Tensor) -> dict[str, float]:
    """Counts of what changed in token 0, and its SNR, in every case."""
    cases = {"alone": x_TK[:1]}
    for factor in FACTORS:
        other = x_TK.clone()
        other[1] = (other[1].float() * factor).bfloat16()
        cases[f"x{factor:g}"] = other
    flat: dict[str, float] = {}
    for outer in OUTERS:
        before = first_token(quantize_nvfp4(x_TK, outer=outer))
        flat[f"per_{outer}_changed"] = 0
        flat[f"per_{outer}_snr_db_before"] = snr_db(x_TK[0], before["values"])
        for case, batch in cases.items():
            after = first_token(quantize_nvfp4(batch, outer=outer))
            for name, values in after.items():
                count = int((values != before[name]).sum())
                flat[f"per_{outer}_{name}_changed_{case}"] = count
                flat[f"per_{outer}_changed"] += count
            flat[f"per_{outer}_snr_db_{case}"] = snr_db(x_TK[0], after["values"])
    return flat


def draw(flat: dict[str, float], data: list[str], path: Path) -> None:
    """Left: values of token 0 that change; right: SNR by format."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.6))
    cases = ["alone", *(f"x{factor:g}" for factor in FACTORS)]
    for place, outer in enumerate(OUTERS):
        counts = [flat[f"per_{outer}_values_changed_{case}"] for case in cases]
        places = [i + 0.4 * (place - 0.5) for i in range(len(cases))]
        left.bar(places, counts, width=0.38, label=f"scale per {outer}")
        for at, count in zip(places, counts, strict=True):
            left.text(at, count + 10, f"{count:.0f}", ha="center", fontsize=8)
    left.set_xticks(range(len(cases)), ["taken\naway" if case == "alone" else case for case in cases])
    left.set_xlabel("what happens to another token")
    left.set_ylabel("values of token 0 that change, of 1024")
    left.legend(frameon=False, loc="upper left")
    left.set_ylim(0, 1350)
    for place, name in enumerate(FORMATS):
        values = [flat[f"snr_db_{name}_{kind}"] for kind in data]
        right.bar([i + 0.16 * (place - 2) for i in range(len(data))], values, width=0.15, label=name)
    right.set_xticks(range(len(data)), [kind.replace("_", "\n") for kind in data])
    right.set_ylabel("signal to error (dB)")
    right.set_ylim(0, 44)
    right.legend(frameon=False, ncols=3, fontsize=8, loc="upper left")
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    flat = batch_dependence(torch.randn(64, 1024, generator=generator).bfloat16())
    data = inputs(*((128, 512) if options.quick else (1024, 2048)), generator)
    for kind, x in data.items():
        for name, roundtrip in FORMATS.items():
            flat[f"snr_db_{name}_{kind}"] = snr_db(x, roundtrip(x))
    draw(flat, list(data), options.out / "nvfp4_batch_dependence.png")
    (options.out / "nvfp4_batch_dependence.json").write_text(json.dumps(flat, indent=2) + "\n")
    print(f"changed in token 0: per token {flat['per_token_changed']:.0f}, per tensor {flat['per_tensor_changed']:.0f}")
    return 0 if flat["per_token_changed"] == 0 < flat["per_tensor_changed"] else 1


if __name__ == "__main__":
    sys.exit(main())
