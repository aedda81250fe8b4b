"""MXFP8: scales and codes against rational arithmetic along both axes, and every edge the docstring names."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.kernels import formats
from composer2.kernels.formats import MXFP8
from composer2.kernels.mxfp8 import block_axis, dequantize_mxfp8, quantize_mxfp8

DATA = ("gauss", "heavy", "swiglu", "rounded", "quarters", "powers", "sparse", "spread")


def rational(exact, rows: torch.Tensor, rule: str) -> tuple[list, list]:
    """E4M3 bytes [T][K] and scale bytes [T][K // 32], blocks along the last axis."""
    codes, scales = [], []
    for row in rows.double().tolist():
        row_codes, row_scales = [], []
        for start in range(0, len(row), 32):
            block = row[start : start + 32]
            amax = Fraction(max(abs(v) for v in block))
            byte = 0
            if rule == "rceil":
                while amax / Fraction(2) ** (byte - 127) > 448:
                    byte += 1
            else:
                while amax / Fraction(2) ** (byte - 127) >= 512:
                    byte += 1
            scale = Fraction(2) ** (byte - 127)
            row_scales.append(byte)
            row_codes += [
                exact.nearest(exact.E4M3, abs(Fraction(v)) / scale) + 128 * exact.is_negative(v) for v in block
            ]
        codes.append(row_codes)
        scales.append(row_scales)
    return codes, scales


def as_lists(t: MXFP8) -> tuple[list, list]:
    return t.codes.view(torch.uint8).tolist(), t.scales.tolist()


@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize("name", DATA)
def test_codes_and_scales_are_rational_arithmetic(exact, name, rule):
    x = exact.inputs(name, 5, 96)
    assert as_lists(quantize_mxfp8(x, scale=rule)) == rational(exact, x, rule)
    wide = x.float() * 1.0000119
    assert as_lists(quantize_mxfp8(wide, scale=rule)) == rational(exact, wide, rule)


def edge_blocks() -> torch.Tensor:
    """float32 blocks whose amax is 448 * 2^k or a neighbour, down to subnormals and up to the largest number."""
    powers = torch.exp2(torch.tensor([-149.0, -148, -140, -136, -135, -134, -127, -126, -20, 0, 50, 118]).double())
    peaks = torch.cat([(448 * powers).float(), (256 * powers).float()])
    peaks = torch.cat([peaks, torch.nextafter(peaks, peaks * 2), torch.nextafter(peaks, peaks * 0)])
    peaks = torch.cat([peaks, torch.tensor([2.0**-149, torch.finfo(torch.float32).max])])
    return peaks[:, None] * torch.linspace(-1, 1, 32)


def test_scale_steps_and_extremes_are_exact(exact):
    x = edge_blocks()
    for rule in ("rceil", "floor"):
        assert as_lists(quantize_mxfp8(x, scale=rule)) == rational(exact, x, rule)
    largest = dequantize_mxfp8(quantize_mxfp8(x[-1:]))
    assert largest[0, -1] == torch.inf  # rounds to 2^128
    x = x[:-1]
    value = dequantize_mxfp8(quantize_mxfp8(x))
    step = torch.exp2(quantize_mxfp8(x).scales.double() - 127)
    assert ((value.double() - x.double()).abs() <= torch.maximum(x.double().abs() / 16, step * 2.0**-10)).all()


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    tail=st.integers(0, 4),
    rule=st.sampled_from(["rceil", "floor"]),
    name=st.sampled_from(DATA),
)
def test_blocks_along_tokens_are_those_of_each_expert_alone(exact, counts, tail, rule, name):
    x = exact.inputs(name, max(1, sum(counts) + tail), 8)[: sum(counts) + tail].float()
    x[sum(counts) :] = torch.nan  # the tail is not read
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    t = quantize_mxfp8(x, scale=rule, axis=0, offsets=offsets)
    codes, scales = [], []
    for end, count in zip(offsets.tolist(), counts, strict=True):
        rows = torch.cat([x[end - count : end], torch.zeros(-count % 32, 8)])
        alone = quantize_mxfp8(rows.T, scale=rule) if count else MXFP8(torch.zeros(8, 0), torch.zeros(8, 0))
        codes.append(alone.codes.T.float())
        scales.append(alone.scales.T)
    assert torch.equal(t.codes.float(), torch.cat(codes))
    assert torch.equal(t.scales, torch.cat(scales))
    assert block_axis(t) == 0
    value = dequantize_mxfp8(t, offsets=offsets)
    assert value.shape == (sum(counts), 8)
    assert dequantize_mxfp8(t).shape == t.codes.shape
    if rule == "rceil" and sum(counts):
        assert ((value - x[: sum(counts)]).abs() <= x[: sum(counts)].abs().amax(0, keepdim=True) / 14).all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), exponent=st.integers(-40, 40), name=st.sampled_from(DATA[:-1]))
def test_negation_powers_of_two_and_a_second_rounding(exact, seed, exponent, name):
    x = exact.inputs(name, 3, 64, seed)
    t = quantize_mxfp8(x)
    negated = quantize_mxfp8(-x)
    assert torch.equal(negated.codes.view(torch.uint8), t.codes.view(torch.uint8) ^ 0x80)
    assert torch.equal(negated.scales, t.scales)
    scaled = quantize_mxfp8(x.float() * 2.0**exponent)
    assert torch.equal(scaled.codes.view(torch.uint8), t.codes.view(torch.uint8))
    assert torch.equal(scaled.scales[t.scales > 0].int(), t.scales[t.scales > 0].int() + exponent)
    assert torch.equal(dequantize_mxfp8(quantize_mxfp8(dequantize_mxfp8(t))), dequantize_mxfp8(t))


def test_zero_blocks_and_signs():
    x = torch.zeros(2, 64)
    x[0, 1] = -0.0
    x[1, 33] = -(2.0**-120)
    x[1, 34] = 1.0
    for rule in ("rceil", "floor"):
        t = quantize_mxfp8(x, scale=rule)
        value = dequantize_mxfp8(t)
        assert t.scales[0].tolist() == [0, 0]
        assert (value[0] == 0).all()
        assert value[1, 33] == 0
        assert torch.equal(value.signbit(), x.signbit())


def test_decoding(exact):
    x = exact.inputs("heavy", 4, 64)
    t = quantize_mxfp8(x)
    wide = dequantize_mxfp8(t)
    codes, scales = as_lists(t)
    for row in range(4):
        for k in range(64):
            magnitude = exact.E4M3[codes[row][k] % 128] * Fraction(2) ** (scales[row][k // 32] - 127)
            assert Fraction(float(wide[row, k])) == magnitude * (-1 if codes[row][k] > 127 else 1)
    assert torch.equal(dequantize_mxfp8(t, torch.bfloat16).float(), wide)
    ones = torch.ones(1, 128).to(torch.float8_e4m3fn)
    value = dequantize_mxfp8(MXFP8(ones, torch.tensor([[0, 1, 254, 255]], dtype=torch.uint8)))[0, ::32]
    assert value[:3].tolist() == [2.0**-127, 2.0**-126, 2.0**127]
    assert value[3].isnan()


def test_shapes_and_layout(exact, monkeypatch):
    x = exact.inputs("heavy", 24, 64)
    t = quantize_mxfp8(x)
    shaped = quantize_mxfp8(x.view(2, 3, 4, 64))
    assert shaped.codes.shape == (2, 3, 4, 64)
    assert shaped.scales.shape == (2, 3, 4, 2)
    assert torch.equal(shaped.scales.view(24, 2), t.scales)
    assert torch.equal(quantize_mxfp8(x.T.contiguous().T).codes.float(), t.codes.float())
    assert quantize_mxfp8(x[0]).scales.shape == (2,)
    assert dequantize_mxfp8(quantize_mxfp8(x[:0])).shape == (0, 64)
    offsets = torch.tensor([5, 24], dtype=torch.int32)
    along = quantize_mxfp8(x, axis=0, offsets=offsets)
    monkeypatch.setattr(formats, "PART", 70)
    assert torch.equal(quantize_mxfp8(x).codes.float(), t.codes.float())
    assert torch.equal(quantize_mxfp8(x, axis=0, offsets=offsets).codes.float(), along.codes.float())


def test_quantising_is_no_part_of_a_graph():
    assert not any(part.requires_grad for part in quantize_mxfp8(torch.ones(2, 32, requires_grad=True)))


def test_what_does_not_fit_is_named():
    x = torch.ones(4, 64)
    offsets = torch.tensor([1, 4], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        for bad in (torch.nan, torch.inf, -torch.inf):
            broken = x.clone().to(dtype)
            broken[3, 63] = bad
            with pytest.raises(ValueError, match="NaN or infinity"):
                quantize_mxfp8(broken)
            with pytest.raises(ValueError, match="NaN or infinity"):
                quantize_mxfp8(broken, axis=0, offsets=offsets)
    for arguments, message in (
        ({"x": x[:, :48]}, r"\(4, 48\).*multiple of 32"),
        ({"x": x.half()}, "float16"),
        ({"x": x, "scale": "even"}, "scale is 'even'.*'rceil'"),
        ({"x": x, "axis": 1}, "axis is 1, accepted is -1 or 0"),
        ({"x": x, "axis": 0}, "offsets are None"),
        ({"x": x, "offsets": offsets}, "offsets are given"),
        ({"x": x[0], "axis": 0, "offsets": offsets}, r"\[T, K\]"),
        ({"x": x, "axis": 0, "offsets": offsets.flip(0)}, r"\[4, 1\]"),
        ({"x": x[:3], "axis": 0, "offsets": offsets}, "end at 4.*rows 3"),
        ({"x": x, "backend": "cuda"}, "backend is 'cuda'"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize_mxfp8(arguments.pop("x"), **arguments)
    t = quantize_mxfp8(x)
    with pytest.raises(ValueError, match="MXFP8 codes are"):
        dequantize_mxfp8(t._replace(scales=t.scales[:, :1]))
    with pytest.raises(ValueError, match="nothing is padded"):
        dequantize_mxfp8(t, offsets=offsets)
