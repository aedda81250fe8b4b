"""Triton kernels against the reference, on a CPU: they run in Triton's interpreter, in a process of its own.

The interpreter must be chosen before Triton is imported, which PyTorch does early, so the kernels run in a worker with
TRITON_INTERPRET=1 and everything is judged here. What the interpreter cannot show (the division that is compiled, the
tensor-core instruction) is in test_aot.py.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.kernels import grouped, mxfp8, nvfp4, triton_gemm
from composer2.kernels.backend import BackendUnavailable
from composer2.kernels.formats import MXFP8, NVFP4, decode_e2m1, decode_e8m0

Interpret = Callable[..., Any]


@pytest.fixture(scope="module")
def interpret() -> Iterator[Interpret]:
    """Calls a function with backend="triton" (or as it is) in the process of the interpreter."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(os.getpid).result()  # the worker has its environment now
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before

        def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            return pool.submit(function, *args, **options).result()

        yield call


def assert_same_bytes(ours: NamedTuple, reference: NamedTuple) -> None:
    for name, mine, theirs in zip(ours._fields, ours, reference, strict=True):
        assert mine.dtype == theirs.dtype, name
        assert mine.shape == theirs.shape, name
        differ = (mine.contiguous().view(torch.uint8) != theirs.contiguous().view(torch.uint8)).sum()
        assert differ == 0, f"{differ} bytes of {name} differ"


# ---------------------------------------------------------------------------------------------------------------------
# Inputs


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def finite_bfloat16(seed: int) -> torch.Tensor:
    """[64, 1008]: finite bfloat16 patterns, in order (seed 0, neighbouring magnitudes share blocks) or shuffled."""
    patterns = torch.arange(65536).to(torch.int32).short().view(torch.bfloat16)
    patterns = patterns[patterns.isfinite()]
    if seed:
        patterns = patterns[torch.randperm(len(patterns), generator=torch.Generator().manual_seed(seed))]
    return patterns[: 64 * 1008].view(64, 1008)


def nvfp4_ties() -> torch.Tensor:
    """[48, 256] float32: E2M1's ties under 16 block scales, then the neighbours of the ties; rows scaled three ways."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    exact = torch.cat([torch.tensor([6.0]), ties, -ties, torch.tensor([0.25])])  # amax 6: the block's scale is exact
    scales = torch.tensor([1.0, 1.125, 1.875, 448.0, 2.0**-6, 2.0**-9, 3 * 2.0**-9, 240.0]).repeat(2)[:, None]
    peak = torch.full((16, 16), 2688.0)
    rows = [
        torch.cat([peak, block * scales], dim=1) for block in (exact, exact * (1 - 2.0**-23), exact * (1 + 2.0**-23))
    ]
    return torch.cat(rows).repeat(1, 8) * torch.tensor([1.0, 2.0**-20, 2.0**100]).repeat(16)[:, None]


def special_rows() -> torch.Tensor:
    """[16, 64] bfloat16: zero rows and blocks, signed zeros, largest, smallest and lone values."""
    x = random(16, 64).bfloat16()
    x[0] = 0.0
    x[1] = -0.0
    x[2, 16:48] = torch.tensor([0.0, -0.0]).repeat(16).bfloat16()
    x[3] = torch.finfo(torch.bfloat16).max
    x[4] = -torch.finfo(torch.bfloat16).max * x[4].sign()
    x[5] = torch.tensor(2.0**-133)
    x[6] = x[6] * 2.0**-126
    x[7] = 0.0
    x[7, 40] = -(2.0**-133)
    x[8] = x[8] * 2.0**-120
    x[9, 0], x[9, 1:] = 3e38, 1e-38
    x[10, 0], x[10, 1:] = 1.0, x[10, 1:] * 2.0**-20
    x[11] = torch.tensor(448.0)
    x[12] = torch.exp2(torch.arange(-32.0, 32.0))
    x[13, ::7] = 0.0
    return x


def mxfp8_rounded(seed: int) -> torch.Tensor:
    """[64, 256] tokens as they come from dispatch: four significant bits, so full of ties."""
    tokens = random(64, 256, seed=seed).bfloat16()
    return mxfp8.dequantize_mxfp8(mxfp8.quantize_mxfp8(tokens, backend="reference"), torch.bfloat16)


def around_scale_steps() -> torch.Tensor:
    """[64, 32] float32: block amax 448 * 2^k and one unit in the last place to either side."""
    amax = 448.0 * torch.exp2(torch.linspace(-130, 118, 21).round())
    amax = torch.cat([amax, torch.nextafter(amax, amax * 2), torch.nextafter(amax, amax * 0), torch.tensor([1e-38])])
    return amax[:, None] * torch.linspace(-1, 1, 32)


INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "gaussian": lambda: random(64, 256).bfloat16(),
    "heavy-tailed": lambda: (random(64, 256) * (4 * random(64, 256, seed=1)).exp()).bfloat16(),
    "bfloat16 patterns in order": lambda: finite_bfloat16(0),
    "bfloat16 patterns shuffled": lambda: finite_bfloat16(1),
    "ties": nvfp4_ties,
    "ties in bfloat16": lambda: nvfp4_ties().bfloat16(),
    "special": special_rows,
    "special in float32": lambda: special_rows().float(),
    "mxfp8-rounded": lambda: mxfp8_rounded(2),
    "quarters": lambda: ((random(64, 96) * 8).round() / 4).bfloat16(),
    "float32": lambda: random(64, 128),
    "float32 subnormals": lambda: random(16, 64) * 1e-40,
    "float32 scale steps": around_scale_steps,
    "wider than a block": lambda: random(2, 4096 + 48).bfloat16(),
    "one block": lambda: random(1, 16).bfloat16(),
    "no rows": lambda: random(0, 64).bfloat16(),
    "three axes": lambda: random(3, 5, 48).bfloat16(),
}


@pytest.mark.parametrize("name", INPUTS)
def test_nvfp4_bytes_equal_the_reference(interpret: Interpret, name: str) -> None:
    x = INPUTS[name]()
    for outer in ("token", "matrix", "tensor") if x.numel() < 2000 else ("token",):
        ours = interpret(nvfp4.quantize_nvfp4, x, outer=outer, backend="triton")
        assert_same_bytes(ours, nvfp4.quantize_nvfp4(x, outer=outer, backend="reference"))


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("scale", ["rceil", "floor"])
def test_mxfp8_bytes_equal_the_reference(interpret: Interpret, name: str, scale: str) -> None:
    x = INPUTS[name]()
    if width := x.shape[-1] // 32 * 32:
        ours = interpret(mxfp8.quantize_mxfp8, x[..., :width], scale=scale, backend="triton")
        assert_same_bytes(ours, mxfp8.quantize_mxfp8(x[..., :width], scale=scale, backend="reference"))
    tokens = x.flatten(0, -2)
    offsets = (torch.tensor([0.1, 0.1, 0.7, 0.9]) * len(tokens)).int()
    ours = interpret(mxfp8.quantize_mxfp8, tokens, scale=scale, axis=0, offsets=offsets, backend="triton")
    assert_same_bytes(ours, mxfp8.quantize_mxfp8(tokens, scale=scale, axis=0, offsets=offsets, backend="reference"))


def test_blocks_along_tokens_stop_at_the_expert_and_ignore_the_tail(interpret: Interpret) -> None:
    x = random(64, 48).bfloat16()
    offsets = torch.tensor([3, 3, 40, 50], dtype=torch.int32)
    x[50:] = torch.nan
    whole = interpret(mxfp8.quantize_mxfp8, x, axis=0, offsets=offsets, backend="triton")
    assert whole.codes.shape == (32 + 64 + 32, 48)
    for start, end, first in ((0, 3, 0), (3, 40, 32), (40, 50, 96)):
        alone = torch.zeros(-(-(end - start) // 32) * 32, 48)
        alone[: end - start] = x[start:end]
        expected = mxfp8.quantize_mxfp8(alone.T.contiguous(), backend="reference")
        last = first + len(alone)
        assert torch.equal(whole.codes[first:last].float(), expected.codes.float().T)
        assert torch.equal(whole.scales[first // 32 : last // 32], expected.scales.T)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_input_is_marked_where_it_is(interpret: Interpret, bad: float) -> None:
    clean = random(4, 64).bfloat16()
    x = clean.clone()
    x[2, 37] = bad
    rows = torch.tensor([0, 1, 3])
    fp4 = nvfp4.dequantize_nvfp4(interpret(nvfp4.quantize_nvfp4, x, backend="triton"))
    assert fp4[2].isnan().all()
    assert torch.equal(fp4[rows], nvfp4.dequantize_nvfp4(nvfp4.quantize_nvfp4(clean[rows], backend="reference")))
    assert nvfp4.dequantize_nvfp4(interpret(nvfp4.quantize_nvfp4, x, outer="tensor", backend="triton")).isnan().all()
    fp8 = interpret(mxfp8.quantize_mxfp8, x, backend="triton")
    assert fp8.scales[2].tolist()[1] == 255
    decoded = mxfp8.dequantize_mxfp8(fp8)
    assert decoded[2, 32:].isnan().all()
    assert decoded.isnan().sum() == 32
    ends = torch.tensor([4], dtype=torch.int32)
    along = interpret(mxfp8.quantize_mxfp8, x, axis=0, offsets=ends, backend="triton")
    assert (along.scales == 255).nonzero().tolist() == [[0, 37]]


# ---------------------------------------------------------------------------------------------------------------------
# Grouped GEMM

CASES = {  # rows, width out, width in, ends
    "ragged, an empty expert, a tail": (70, 48, 160, [5, 5, 40, 60]),
    "one expert": (33, 16, 32, [33]),
    "nobody": (4, 16, 64, [0, 0, 0]),
    "all in the last": (40, 96, 96, [0, 0, 40]),
    "no rows": (0, 16, 32, [0, 0]),
}


def operands(case: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, width_out, width_in, ends = CASES[case]
    rows, matrices = random(num_rows, width_in).bfloat16(), random(len(ends), width_out, width_in, seed=1).bfloat16()
    return rows, matrices, random(num_rows, width_out, seed=2).bfloat16(), torch.tensor(ends, dtype=torch.int32)


def float64_product(rows: torch.Tensor, matrices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The oracle: each row times its expert's matrix, the tail zero."""
    out = torch.zeros(len(rows), matrices.shape[1], dtype=torch.float64)
    for expert, end in enumerate(offsets.tolist()):
        start = int(offsets[expert - 1]) if expert else 0
        out[start:end] = rows[start:end].double() @ matrices[expert].double().T
    return out


def assert_close(out: torch.Tensor, oracle: torch.Tensor, terms: int) -> None:
    """Within the rounding of an FP32 sum of `terms` products of unit size."""
    assert out.shape == oracle.shape
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.double(), oracle, rtol=1e-6, atol=terms * 2.0**-22)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("outer", ["token", "tensor"])
def test_nvfp4_grouped_mm(interpret: Interpret, case: str, outer: str) -> None:
    rows, matrices, _, offsets = operands(case)
    a = nvfp4.quantize_nvfp4(rows, outer=outer, backend="reference")
    b = nvfp4.quantize_nvfp4(matrices, outer="matrix", backend="reference")
    oracle = float64_product(nvfp4.dequantize_nvfp4(a), nvfp4.dequantize_nvfp4(b), offsets)
    out = interpret(grouped.grouped_mm_nvfp4, a, b, offsets, torch.float32, backend="triton")
    assert_close(out, oracle, rows.shape[1])
    rounded = interpret(grouped.grouped_mm_nvfp4, a, b, offsets, backend="triton")
    assert torch.equal(rounded, out.bfloat16())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("decode", [False, True])
def test_mxfp8_grouped_mm_and_wgrad(interpret: Interpret, case: str, decode: bool) -> None:
    rows, matrices, grad, offsets = operands(case)
    a, b = (mxfp8.quantize_mxfp8(t, backend="reference") for t in (rows, matrices))
    oracle = float64_product(mxfp8.dequantize_mxfp8(a), mxfp8.dequantize_mxfp8(b), offsets)
    out = interpret(triton_gemm.grouped_mm_mxfp8, a, b, offsets, torch.float32, decode=decode)
    assert_close(out, oracle, rows.shape[1])
    rounded = interpret(triton_gemm.grouped_mm_mxfp8, a, b, offsets, decode=decode)
    assert torch.equal(rounded, out.bfloat16())

    g, x = (mxfp8.quantize_mxfp8(t, axis=0, offsets=offsets, backend="reference") for t in (grad, rows))
    grads, tokens = (mxfp8.dequantize_mxfp8(t, offsets=offsets).double() for t in (g, x))
    starts = [0, *offsets.tolist()[:-1]]
    pairs = zip(starts, offsets.tolist(), strict=True)
    oracle = torch.stack([grads[start:end].T @ tokens[start:end] for start, end in pairs])
    out = interpret(triton_gemm.grouped_wgrad_mxfp8, g, x, offsets, torch.float32, decode=decode)
    assert_close(out, oracle, len(rows))
    rounded = interpret(triton_gemm.grouped_wgrad_mxfp8, g, x, offsets, decode=decode)
    assert torch.equal(rounded, out.bfloat16())


def test_the_public_functions_reach_the_kernels(interpret: Interpret) -> None:
    rows, matrices, grad, offsets = operands("ragged, an empty expert, a tail")
    a, b = (mxfp8.quantize_mxfp8(t, backend="reference") for t in (rows, matrices))
    ours = interpret(grouped.grouped_mm_mxfp8, a, b, offsets, torch.float32, backend="triton")
    theirs = grouped.grouped_mm_mxfp8(a, b, offsets, torch.float32, backend="reference")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    g, x = (mxfp8.quantize_mxfp8(t, axis=0, offsets=offsets, backend="reference") for t in (grad, rows))
    ours = interpret(grouped.grouped_wgrad_mxfp8, g, x, offsets, torch.float32, backend="triton")
    theirs = grouped.grouped_wgrad_mxfp8(g, x, offsets, torch.float32, backend="reference")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_a_poisoned_tail_comes_out_zero(interpret: Interpret) -> None:
    rows, matrices, _, offsets = operands("ragged, an empty expert, a tail")
    a = nvfp4.quantize_nvfp4(rows, backend="reference")
    b = nvfp4.quantize_nvfp4(matrices, outer="matrix", backend="reference")
    clean = interpret(grouped.grouped_mm_nvfp4, a, b, offsets, backend="triton")
    a.outer[60:] = torch.nan
    a.scales.view(torch.uint8)[60:] = 0x7F
    out = interpret(grouped.grouped_mm_nvfp4, a, b, offsets, backend="triton")
    assert torch.equal(out, clean)
    assert not out[60:].any()
    c, d = (mxfp8.quantize_mxfp8(t, backend="reference") for t in (rows, matrices))
    c.scales[60:] = 255
    c.codes.view(torch.uint8)[60:] = 0x7F
    out = interpret(grouped.grouped_mm_mxfp8, c, d, offsets, backend="triton")
    assert torch.isfinite(out).all()
    assert not out[60:].any()


PATCH = """
import numpy, torch
from triton.runtime import interpreter
interpreter._as_e8m0 = interpreter._e8m0_to_f32
interpreter._e8m0_to_f32 = lambda s: torch.from_numpy(s.view(numpy.uint8)).view(torch.float8_e4m3fn).float().numpy()
"""
UNPATCH = "from triton.runtime import interpreter; interpreter._e8m0_to_f32 = interpreter._as_e8m0"


def test_block_scaled_nvfp4_operands_in_an_interpreter_that_reads_e4m3_scales(interpret: Interpret) -> None:
    """The branch for GPUs, `tl.dot_scaled`: the interpreter takes every scale for E8M0, so its decoder is replaced."""
    rows, matrices, _, offsets = operands("ragged, an empty expert, a tail")
    a = nvfp4.quantize_nvfp4(rows, backend="reference")
    b = nvfp4.quantize_nvfp4(matrices, outer="matrix", backend="reference")
    oracle = float64_product(nvfp4.dequantize_nvfp4(a), nvfp4.dequantize_nvfp4(b), offsets)
    interpret(exec, PATCH, {})
    try:
        out = interpret(triton_gemm.grouped_mm_nvfp4, a, b, offsets, torch.float32, decode=False)
    finally:
        interpret(exec, UNPATCH)
    assert_close(out, oracle, rows.shape[1])


def test_every_nvfp4_code_and_scale_is_decoded(interpret: Interpret) -> None:
    """Rows of all 16 codes, one row for every scale byte, times the identity."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | (codes[1::2] << 4)).expand(127, 8).contiguous()
    scales = torch.arange(127, dtype=torch.uint8).view(127, 1).view(torch.float8_e4m3fn)
    a = NVFP4(packed, scales, torch.ones(127, 1))
    identity = nvfp4.quantize_nvfp4(torch.eye(16)[None], outer="matrix", backend="reference")
    identity = identity._replace(outer=torch.full((1, 1, 1), 1 / 2688))  # code 6 * scale 448 * this
    ends = torch.tensor([127], dtype=torch.int32)
    out = interpret(grouped.grouped_mm_nvfp4, a, identity, ends, torch.float32, backend="triton")
    torch.testing.assert_close(out, scales.float() * decode_e2m1(codes), rtol=2.0**-22, atol=0.0)


def test_every_mxfp8_code_and_extreme_scales_are_decoded(interpret: Interpret) -> None:
    """Rows of all E4M3 numbers times the identity, and the value 1 under scale bytes 0, 1, 127, 254, 255."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.where((codes & 0x7F) == 0x7F, 0, codes).view(8, 32).view(torch.float8_e4m3fn)
    a = MXFP8(codes, torch.full((8, 1), 130, dtype=torch.uint8))
    identity = mxfp8.quantize_mxfp8(torch.eye(32)[None], backend="reference")
    for decode in (False, True):
        ends = torch.tensor([8], dtype=torch.int32)
        out = interpret(triton_gemm.grouped_mm_mxfp8, a, identity, ends, torch.float32, decode=decode)
        assert torch.equal(out, codes.float() * 8)
    scales = torch.tensor([[0], [1], [127], [254], [255]], dtype=torch.uint8)
    one = MXFP8(torch.eye(32)[:1].expand(5, 32).to(torch.float8_e4m3fn), scales)
    ends = torch.tensor([5], dtype=torch.int32)
    out = interpret(triton_gemm.grouped_mm_mxfp8, one, identity, ends, torch.float32, decode=True)
    torch.testing.assert_close(out[:, :1], decode_e8m0(scales), rtol=0.0, atol=0.0, equal_nan=True)


@settings(deadline=None)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=6), st.integers(0, 50), st.sampled_from([16, 32, 128]))
def test_row_tiles_cover_every_row_once(counts: list[int], tail: int, block: int) -> None:
    offsets = torch.tensor(counts, dtype=torch.int32).cumsum(0).int()
    num_rows = sum(counts) + tail
    owner = [expert for expert, count in enumerate([*counts, tail]) for _ in range(count)]
    covered = []
    for group, first, end in triton_gemm.row_tiles(offsets, num_rows, block).tolist():
        covered += [(row, group) for row in range(first, min(first + block, end))]
    assert covered == list(enumerate(owner))


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", INPUTS)
def test_bytes_of_a_gpu_equal_the_reference(name: str) -> None:
    x = INPUTS[name]()
    ours = nvfp4.quantize_nvfp4(x.cuda(), backend="triton")
    assert_same_bytes(NVFP4(*(t.cpu() for t in ours)), nvfp4.quantize_nvfp4(x, backend="reference"))
    tokens = x.flatten(0, -2)
    ends = (torch.tensor([0.1, 0.1, 0.7, 0.9]) * len(tokens)).int()
    along = mxfp8.quantize_mxfp8(tokens.cuda(), axis=0, offsets=ends.cuda(), backend="triton")
    expected = mxfp8.quantize_mxfp8(tokens, axis=0, offsets=ends, backend="reference")
    assert_same_bytes(MXFP8(*(t.cpu() for t in along)), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES)
def test_products_of_a_gpu(case: str) -> None:
    rows, matrices, _, offsets = operands(case)
    a = nvfp4.quantize_nvfp4(rows.cuda(), backend="triton")
    b = nvfp4.quantize_nvfp4(matrices.cuda(), outer="matrix", backend="triton")
    oracle = float64_product(nvfp4.dequantize_nvfp4(a).cpu(), nvfp4.dequantize_nvfp4(b).cpu(), offsets)
    out = grouped.grouped_mm_nvfp4(a, b, offsets.cuda(), torch.float32, backend="triton")
    assert_close(out.cpu(), oracle, rows.shape[1])


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


def test_a_cpu_without_the_interpreter_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="interpreter is off"):
        nvfp4.quantize_nvfp4(random(2, 32), backend="triton")


def test_what_the_kernels_do_not_have_is_refused(interpret: Interpret) -> None:
    with pytest.raises(ValueError, match="'te', accepted with backend 'triton' is 'exact'"):
        interpret(nvfp4.quantize_nvfp4, random(2, 32), order="te", backend="triton")
    rows, matrices, _, offsets = operands("one expert")
    a, b = (mxfp8.quantize_mxfp8(t, backend="reference") for t in (rows, matrices))
    with pytest.raises(ValueError, match=r"out_dtype is torch\.float16"):
        interpret(grouped.grouped_mm_mxfp8, a, b, offsets, torch.float16, backend="triton")
    with pytest.raises(ValueError, match="offsets end at 34"):
        interpret(mxfp8.quantize_mxfp8, rows, axis=0, offsets=torch.tensor([34], dtype=torch.int32), backend="triton")


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from composer2.kernels import aot, grouped, linear, mxfp8, nvfp4, triton_gemm, triton_quant
from composer2.kernels.backend import BackendUnavailable
for call in (
    lambda: nvfp4.quantize_nvfp4(torch.ones(2, 32), backend="triton"),
    lambda: triton_quant.quantize_mxfp8(torch.ones(2, 32)),
    lambda: aot.report(aot.all_kernels(), ["90a"]),
):
    try:
        call()
    except BackendUnavailable as error:
        assert "triton is not installed" in str(error), error
    else:
        raise AssertionError("not refused")
assert nvfp4.quantize_nvfp4(torch.ones(2, 32)).outer.shape == (2, 1)
"""


def test_everything_imports_without_triton() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
