"""Runs the `small` preset, shortened, on one GPU and writes what it took: `python scripts/small_gpu.py --out DIR`.

Every stage runs; `--quick` takes a few steps of each. Exit code 1 with the reason when there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from composer2.log import Console
from composer2.pipeline import run_stages
from composer2.recipes import small
from composer2.run import Run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: the preset `small` trains on one GPU; see tests/test_recipes.py for the CPU check")
        return 1
    config = small()
    share = 20 if options.quick else 4
    config = replace(
        config,
        cpt=replace(config.cpt, phase1_steps=400 // share, phase2_steps=20 // min(share, 10)),
        sft=replace(config.sft, num_steps=800 // share),
        rl=replace(config.rl, num_steps=130 // (4 * share)),
    )
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with Console("rich") as console:
        completed = run_stages(Run(options.out / "run", config, console))
    figures = {
        "seconds": time.perf_counter() - started,
        "peak_gpu_bytes": torch.cuda.max_memory_allocated(),
        **{k: v for k, v in json.loads((options.out / "run" / "summary.json").read_text()).items() if k != "preset"},
    }
    (options.out / "small_gpu.json").write_text(json.dumps(figures, indent=1))
    return 0 if completed else 1


if __name__ == "__main__":
    sys.exit(main())
