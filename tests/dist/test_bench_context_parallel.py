"""The script's figures: bytes against arithmetic, and both ways against each other."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_context_parallel.py"


@pytest.mark.dist
def test_bytes_are_those_of_576_against_20480_numbers_a_token(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--quick"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads((tmp_path / "bench_context_parallel.json").read_text())
    assert figures["latent_over_expanded"] == pytest.approx(576 / 20480)
    assert figures["latent_over_expanded"] <= 0.03
    for cp in (2, 4):  # forward: own part to all others; backward: the others' parts to them; 4 bytes a number
        assert figures[f"latent_bytes_cp{cp}"] == 2 * 4 * 576 * 64 // cp * (cp - 1)
        assert figures[f"imbalance_single_cp{cp}"] == 1
        assert figures[f"imbalance_packed_cp{cp}"] > 1
    assert figures["max_rel_error"] < 1e-5
    assert (tmp_path / "bench_context_parallel.png").stat().st_size > 1000


def test_the_documents_of_the_benchmark_are_packed_and_unequal():
    spec = importlib.util.spec_from_file_location("composer2_script_bench_context_parallel", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    counts = torch.bincount(module.documents(64)[0]).tolist()
    assert sum(counts) == 64
    assert len(counts) == len(set(counts)) == 5
