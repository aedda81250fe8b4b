"""The two scripts about NVFP4, run short: their keys, and the figures that must be zero."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
DATA = ("gaussian", "heavy_tailed", "swiglu", "mxfp8_rounded")


@pytest.fixture
def figures_of(tmp_path, monkeypatch):
    """Runs a script of this name in this process and gives its figures."""

    def run(name: str) -> dict[str, float]:
        monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path), "--quick"])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        assert end.value.code == 0
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        return json.loads((tmp_path / f"{name}.json").read_text())

    return run


def test_nvfp4_exactness(figures_of):
    flat = figures_of("nvfp4_exactness")
    assert flat["codes"] == 4 * 65536
    assert flat["flipped_codes_exact"] == flat["flipped_scales_exact"] == 0
    assert flat["flipped_codes_exact_float32"] == flat["flipped_scales_exact_float32"] == 0
    for order in ("divide_outer", "reciprocal", "te"):
        assert flat[f"flipped_codes_ppm_{order}_mxfp8_rounded"] > 1000
        assert all(f"flipped_codes_ppm_{order}_{data}" in flat for data in DATA)


def test_nvfp4_batch_dependence(figures_of):
    flat = figures_of("nvfp4_batch_dependence")
    assert flat["per_token_changed"] == 0 < flat["per_tensor_changed"]
    assert 20 < flat["snr_db_nvfp4_token_gaussian"] < 21
    assert flat["snr_db_mxfp8_rceil_gaussian"] > flat["snr_db_mxfp8_floor_gaussian"] > 30
