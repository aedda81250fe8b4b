"""What the Triton kernels become on a GPU, seen without one: they are compiled here and their instructions are read.

Without Triton these tests fail; they are never skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import triton

from composer2.kernels import aot, triton_quant

QUANTISERS = [
    f"{kind}_{x}" for kind in ("nvfp4_token", "nvfp4_matrix", "mxfp8_rows", "mxfp8_tokens") for x in ("bf16", "fp32")
]
GEMMS = {
    "nvfp4_grouped_mm": "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16",
    "mxfp8_grouped_mm": "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32",
    "mxfp8_grouped_wgrad": "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32",
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, dict[str, Any]]:
    """The command line's exit status, output and JSON."""
    path = tmp_path_factory.mktemp("aot") / "aot.json"
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = aot.main(["--arch", "90a", "100a", "--json", str(path)])
    return status, output.getvalue(), json.loads(path.read_text())


def test_all_kernels_compile_for_both_architectures_and_keep_the_rules(compiled: tuple[int, str, Any]) -> None:
    status, output, result = compiled
    assert result["broken_rules"] == []
    assert status == 0
    assert result["triton"] == triton.__version__
    assert sorted(result["kernels"]) == sorted([*QUANTISERS, *GEMMS])
    for name, by_arch in result["kernels"].items():
        assert list(by_arch) == ["90a", "100a"]
        for figures in by_arch.values():
            assert {"div_rn", "approx_div", "mma", "spill_bytes", "cubin_bytes"} <= set(figures)
            assert figures["spill_bytes"] <= 256
            assert figures["cubin_bytes"] > 1000
            assert figures["approx_div"] == 0
        assert f"{name} " in output
    assert "all rules hold" in output


def test_nvfp4_divides_by_the_ieee_rule_and_nothing_is_fused(compiled: tuple[int, str, Any]) -> None:
    for name in QUANTISERS:
        for figures in compiled[2]["kernels"][name].values():
            # outer scale, block scale, element
            assert figures["div_rn"] >= 3 if name.startswith("nvfp4") else figures["div_rn"] == 0
            assert figures["fma_or_ftz"] == 0
            assert figures["mma"] == []


def test_gemms_use_block_scaled_instructions_on_blackwell_and_bf16_on_hopper(compiled: tuple[int, str, Any]) -> None:
    for name, instruction in GEMMS.items():
        by_arch = compiled[2]["kernels"][name]
        assert by_arch["100a"]["mma"] == [instruction]
        assert all(found.endswith("f32.bf16.bf16") for found in by_arch["90a"]["mma"])
        assert by_arch["90a"]["mma"]


def changed_module(tmp_path: Path, before: str, after: str) -> ModuleType:
    """`triton_quant` with one expression of its source replaced."""
    source = Path(triton_quant.__file__).read_text()
    assert source.count(before) == 1
    path = tmp_path / "changed_quant.py"
    path.write_text(source.replace(before, after))
    spec = importlib.util.spec_from_file_location("changed_quant", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("arch", aot.ARCHES)
def test_a_plain_division_in_the_source_breaks_the_rule(tmp_path: Path, arch: str) -> None:
    module = changed_module(tmp_path, "tl.div_rn(numerator, denominator)", "numerator / denominator")
    kernel = next(kernel for kernel in aot.all_kernels(quant=module) if kernel.name == "nvfp4_token_bf16")
    result = aot.report([kernel], [arch])
    assert result["kernels"]["nvfp4_token_bf16"][arch]["approx_div"] > 0
    assert len(result["broken_rules"]) == 1
    assert "approximate divisions" in result["broken_rules"][0]


def test_a_fused_multiply_add_breaks_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = changed_module(tmp_path, "small = (v + magic)", "small = (v * 3.0 + magic)")
    kernel = next(kernel for kernel in aot.all_kernels(quant=module) if kernel.name == "mxfp8_rows_bf16")
    assert aot.report([kernel], ["100a"])["broken_rules"] == []
    monkeypatch.setitem(triton_quant.LAUNCH, "enable_fp_fusion", True)
    assert "fused multiply-adds" in aot.report([kernel], ["100a"])["broken_rules"][0]


def test_a_broken_rule_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = next(kernel for kernel in aot.all_kernels() if kernel.name == "mxfp8_rows_bf16")
    monkeypatch.setattr(aot, "all_kernels", lambda: [kernel._replace(divides=True)])
    assert aot.main(["--arch", "90a"]) == 1
    assert "broken: mxfp8_rows_bf16 on sm_90a has no IEEE division" in capsys.readouterr().out


FINE = {"div_rn": 3, "approx_div": 0, "fma_or_ftz": 0, "mma": [], "spill_bytes": 256}
MXFP8_ONLY = {"mma": [GEMMS["mxfp8_grouped_mm"]]}
WGMMA = {"mma": ["wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"]}


@pytest.mark.parametrize(
    ("name", "arch", "figures", "sentence"),
    [
        ("nvfp4_token_bf16", "100a", {}, ""),
        ("nvfp4_token_bf16", "100a", {"div_rn": 0}, "no IEEE division"),
        ("nvfp4_token_bf16", "90a", {"approx_div": 1}, "1 approximate"),
        ("mxfp8_rows_fp32", "90a", {"approx_div": 1}, ""),
        ("mxfp8_rows_fp32", "90a", {"fma_or_ftz": 2}, "2 fused"),
        ("mxfp8_rows_fp32", "90a", {"spill_bytes": 257}, "spills 257 bytes"),
        ("nvfp4_grouped_mm", "100a", MXFP8_ONLY, "no instruction kind::mxf4nvf4"),
        ("nvfp4_grouped_mm", "90a", WGMMA, ""),
        ("mxfp8_grouped_mm", "100a", MXFP8_ONLY, ""),
        ("mxfp8_grouped_wgrad", "100a", WGMMA, "no instruction kind::mxf8f6f4"),
        ("mxfp8_grouped_wgrad", "90a", {}, "no instruction"),
    ],
)
def test_each_rule_alone(name: str, arch: str, figures: dict[str, Any], sentence: str) -> None:
    kernel = next(kernel for kernel in aot.all_kernels() if kernel.name == name)
    broken = aot.broken_rules(kernel, arch, FINE | figures)
    assert len(broken) == bool(sentence)
    assert sentence in "".join(broken)


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("div.rn.f32 %f1, %f2, %f3;", (1, 0, 0)),
        ("div.rn.f64 %d1, %d2, %d3;", (1, 0, 0)),
        ("div.full.f32 %f1, %f2, %f3;", (0, 1, 0)),
        ("div.approx.ftz.f32 %f1, %f2, %f3;", (0, 1, 0)),
        ("div.rn.ftz.f32 %f1, %f2, %f3;", (0, 1, 0)),
        ("rcp.approx.ftz.f32 %f1, %f2;", (0, 1, 0)),
        ("div.s32 %r1, %r2, %r3;", (0, 0, 0)),
        ("fma.rn.f32 %f1, %f2, %f3, %f4;", (0, 0, 1)),
        ("fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;", (0, 0, 1)),
        ("mul.rn.f32 %f1, %f2, %f3;", (0, 0, 0)),
        ("mul.ftz.f32 %f1, %f2, %f3;", (0, 0, 1)),
        ("mad.lo.s32 %r1, %r2, %r3, %r4;", (0, 0, 0)),
    ],
)
def test_instructions_are_counted(line: str, counts: tuple[int, int, int]) -> None:
    assert tuple(len(p.findall(line)) for p in (aot.DIV_RN, aot.APPROX_DIV, aot.FMA_OR_FTZ)) == counts


def test_the_interpreter_cannot_compile() -> None:
    command = [sys.executable, "-m", "composer2.kernels.aot", "--arch", "90a"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "the Triton interpreter is on" in done.stderr


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"arch is '80', accepted is one of \('90a', '100a'\)"):
        aot.compile_kernel(aot.all_kernels()[0], "80")
