"""NVFP4: codes and scales against rational arithmetic, the algebra they obey, and every edge the docstring names."""

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.kernels import formats
from composer2.kernels.formats import NVFP4, unpack_nibbles
from composer2.kernels.nvfp4 import ORDERS, dequantize_blocks, dequantize_nvfp4, quantize_nvfp4

DATA = ("gauss", "heavy", "swiglu", "rounded", "quarters", "powers", "sparse", "spread")


def codes_and_scales(t: NVFP4) -> tuple[list, list]:
    return unpack_nibbles(t.codes).tolist(), t.scales.view(torch.uint8).tolist()


def equal(a: NVFP4, b: NVFP4) -> bool:
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", DATA)
def test_exact_order_is_rational_arithmetic(exact, name):
    x = exact.inputs(name, 6, 64)
    assert codes_and_scales(quantize_nvfp4(x)) == exact.nvfp4(x)
    whole = quantize_nvfp4(x, outer="tensor")
    assert codes_and_scales(whole) == exact.nvfp4(x, amax=float(x.abs().max()))


def test_float32_in_the_exact_order_is_rational_arithmetic_too(exact):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 64, generator=generator)
    assert codes_and_scales(quantize_nvfp4(x)) == exact.nvfp4(x)
    for scale in (5e37, 1e-30, 1e-43):
        assert codes_and_scales(quantize_nvfp4(x * scale)) == exact.nvfp4(x * scale)
    wide = exact.inputs("heavy", 16, 256)
    assert equal(quantize_nvfp4(wide), quantize_nvfp4(wide.float()))


def test_float32_values_beside_every_tie_of_every_scale(exact):
    """A row for every E4M3 scale: its first block sets the row's amax, the second has ties and their neighbours."""
    rows = []
    for scale in [float(v) for v in exact.E4M3[8:]]:  # normal scales
        ties = torch.tensor([float(t) for t in exact.E2M1_TIES[:5]]) * scale
        block = torch.cat(
            [ties, torch.nextafter(ties, ties * 2), torch.nextafter(ties, ties * 0), torch.tensor([6 * scale])]
        )
        rows.append(torch.cat([torch.tensor([2688.0]), torch.zeros(15), block]))
    x = torch.stack(rows)
    assert codes_and_scales(quantize_nvfp4(x)) == exact.nvfp4(x)
    assert codes_and_scales(quantize_nvfp4(x * 1.7)) == exact.nvfp4(x * 1.7)


def bf16_rows(draw_width=(1, 4)):
    """Strategy: bfloat16 [T, K] of values that often lie on ties: k / 4 * 2^e, zeros, whole zero blocks, any bits."""
    value = st.one_of(
        st.just(0.0),
        st.just(-0.0),
        st.integers(-32, 32).map(lambda n: n / 4),
        st.tuples(st.integers(-15, 15), st.integers(-12, 12)).map(lambda p: p[0] * 2.0 ** p[1]),
        st.floats(-1e4, 1e4, width=32),
    )
    block = st.one_of(st.just([0.0] * 16), st.lists(value, min_size=16, max_size=16))
    row = st.integers(*draw_width).flatmap(lambda n: st.lists(block, min_size=n, max_size=n))
    return row.flatmap(
        lambda first: st.lists(
            st.lists(block, min_size=len(first), max_size=len(first)).map(
                lambda blocks: list(itertools.chain(*blocks))
            ),
            min_size=1,
            max_size=4,
        )
    ).map(lambda rows: torch.tensor(rows).bfloat16())


@settings(max_examples=60, deadline=None)
@given(x=bf16_rows())
def test_exactness_on_drawn_rows(exact, x):
    assert codes_and_scales(quantize_nvfp4(x)) == exact.nvfp4(x)


@settings(max_examples=40, deadline=None)
@given(x=bf16_rows(), exponent=st.integers(-60, 60), seed=st.integers(0, 99))
def test_rows_stand_alone_and_scale_by_powers_of_two(x, exponent, seed):
    t = quantize_nvfp4(x)
    others = torch.randn(3, x.shape[1], generator=torch.Generator().manual_seed(seed)).bfloat16() * 1e4
    together = quantize_nvfp4(torch.cat([others, x, -others]))
    assert equal(NVFP4(*(part[3 : 3 + len(x)] for part in together)), t)

    scaled = quantize_nvfp4((x.double() * 2.0**exponent).bfloat16())
    if bool((x == 0).logical_or(x.abs() > 1e-12).all()):  # else the scaled values may be subnormal
        assert torch.equal(scaled.codes, t.codes)
        assert torch.equal(scaled.scales.view(torch.uint8), t.scales.view(torch.uint8))
        assert torch.equal(scaled.outer, t.outer * 2.0**exponent)

    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    assert equal(quantize_nvfp4(x[order]), NVFP4(*(part[order] for part in t)))


@settings(max_examples=40, deadline=None)
@given(x=bf16_rows())
def test_negation_error_and_zeros(x):
    t = quantize_nvfp4(x)
    negated = quantize_nvfp4(-x)
    assert torch.equal(negated.codes, t.codes ^ 0x88)
    assert torch.equal(negated.scales.view(torch.uint8), t.scales.view(torch.uint8))

    value = dequantize_nvfp4(t)
    blocks, decoded = x.float().unflatten(-1, (-1, 16)), value.unflatten(-1, (-1, 16))
    amax = blocks.abs().amax(-1, keepdim=True)
    normal = (t.scales.float() >= 2.0**-6).unsqueeze(-1)
    bound = amax * (1 / 6 + 1 / 16) * 1.0001
    assert ((decoded - blocks).abs() <= torch.where(normal, bound, amax * 1.0001)).all()
    assert torch.equal(value.signbit(), x.signbit())
    again = dequantize_nvfp4(quantize_nvfp4(value.bfloat16()))
    assert torch.equal(again == 0, value == 0)


def test_zero_rows_zero_blocks_and_signed_zeros():
    x = torch.zeros(3, 32, dtype=torch.bfloat16)
    x[0, 3] = -0.0
    x[1, 16:] = 1.0
    x[1, 5] = -0.0
    x[2, 0] = 1.0
    x[2, 16:] = -(2.0**-24)  # too small for a scale
    for order in ORDERS:
        t = quantize_nvfp4(x, order=order)
        value = dequantize_nvfp4(t)
        assert t.outer[0].item() == 0
        assert t.scales.float()[0].tolist() == [0, 0]
        assert t.scales.float()[1].tolist() == [0, 448]
        assert torch.equal(value[:2], x[:2].float())
        assert value.isfinite().all()
        assert torch.equal(value[:2].signbit(), x[:2].signbit())
    t = quantize_nvfp4(x)
    assert t.scales.float()[2].tolist() == [448, 0]
    assert unpack_nibbles(t.codes)[2].tolist() == [7] + [0] * 15 + [8] * 16


def test_extremes_are_exact(exact):
    largest, tiny = torch.finfo(torch.bfloat16).max, 2.0**-133
    x = torch.tensor([[largest, -largest, 1e38, -3e37, largest / 6, 1e36, 1.0, tiny] * 2 for _ in range(2)]).bfloat16()
    x[1, :8] = torch.tensor([tiny, -3 * tiny, 5 * tiny, 0.0, -0.0, 2 * tiny, 7 * tiny, 120 * tiny]).bfloat16()
    x[1, 8:] = 0
    t = quantize_nvfp4(x)
    assert codes_and_scales(t) == exact.nvfp4(x)
    assert dequantize_nvfp4(t).isfinite().all()
    assert dequantize_nvfp4(t)[0, 0].item() == pytest.approx(largest, rel=1e-6)
    assert t.outer[1].item() > 0
    mixed = torch.cat([x[:1], x[1:]], dim=1)
    assert codes_and_scales(quantize_nvfp4(mixed)) == exact.nvfp4(mixed)
    flushed = torch.cat([x[:1], torch.full((1, 16), largest * 2.0**-21).bfloat16()], dim=1)
    assert codes_and_scales(quantize_nvfp4(flushed)) == exact.nvfp4(flushed)
    top = torch.full((1, 16), torch.finfo(torch.float32).max)
    assert codes_and_scales(quantize_nvfp4(top)) == exact.nvfp4(top)


def test_outer_scale_is_a_multiplier_rounded_once(exact):
    x = exact.inputs("gauss", 300, 32)
    outer = quantize_nvfp4(x).outer
    amax = x.double().abs().amax(-1, keepdim=True)
    assert torch.equal(outer, (amax / 2688).float())
    assert outer.shape == (300, 1)
    assert outer.dtype == torch.float32
    doubled = quantize_nvfp4(x)._replace(outer=2 * outer)
    assert torch.equal(dequantize_nvfp4(doubled), 2 * dequantize_nvfp4(quantize_nvfp4(x)))


def test_outer_scopes(exact):
    x = exact.inputs("heavy", 24, 32).view(3, 8, 32)
    matrix = quantize_nvfp4(x, outer="matrix")
    assert matrix.outer.shape == (3, 1, 1)
    for e in range(3):
        alone = quantize_nvfp4(x[e], outer="tensor")
        assert alone.outer.shape == (1, 1)
        assert equal(alone, NVFP4(matrix.codes[e], matrix.scales[e], matrix.outer[e]))
        assert codes_and_scales(alone) == exact.nvfp4(x[e], amax=float(x[e].abs().max()))
    assert quantize_nvfp4(x).outer.shape == (3, 8, 1)
    assert quantize_nvfp4(x, outer="tensor").outer.shape == (1, 1, 1)
    assert dequantize_nvfp4(matrix).shape == x.shape
    assert quantize_nvfp4(x[0, 0]).codes.shape == (16,)
    for outer, shape in (("token", (0, 1)), ("tensor", (1, 1)), ("matrix", (1, 1))):
        empty = quantize_nvfp4(torch.zeros(0, 32), outer=outer)
        assert empty.outer.shape == shape
        assert dequantize_nvfp4(empty).shape == (0, 32)


def test_decoding_is_exact_up_to_the_outer_scale(exact):
    x = exact.inputs("heavy", 20, 64)
    t = quantize_nvfp4(x)
    codes, scales = codes_and_scales(t)
    for row, row_codes in enumerate(codes):
        for k, code in enumerate(row_codes):
            block = exact.E2M1[code % 8] * exact.E4M3[scales[row][k // 16]] * (-1 if code > 7 else 1)
            assert Fraction(float(dequantize_blocks(t)[row, k])) == block or row > 2
            if row <= 2:
                expected = torch.tensor(float(block), dtype=torch.float32) * t.outer[row]
                assert dequantize_nvfp4(t)[row, k] == expected.item()
    assert dequantize_blocks(t).dtype == torch.bfloat16
    assert dequantize_nvfp4(t, torch.bfloat16).dtype == torch.bfloat16


def test_layout_of_memory_changes_nothing(exact, monkeypatch):
    x = exact.inputs("heavy", 64, 48)
    expected = quantize_nvfp4(x)
    assert equal(quantize_nvfp4(x.T.contiguous().T), expected)
    assert equal(quantize_nvfp4(torch.cat([x, x], dim=1)[:, 48:]), expected)
    monkeypatch.setattr(formats, "PART", 100)
    for order in ORDERS:
        in_parts = quantize_nvfp4(x, order=order)
        monkeypatch.setattr(formats, "PART", 1 << 20)
        assert equal(quantize_nvfp4(x, order=order), in_parts)
        monkeypatch.setattr(formats, "PART", 100)


def test_other_orders_differ_from_exact_on_rounded_tokens(exact):
    x = exact.inputs("rounded", 256, 512)
    expected = quantize_nvfp4(x).codes
    for order in ORDERS[1:]:
        assert not torch.equal(quantize_nvfp4(x, order=order).codes, expected)


def test_quantising_is_no_part_of_a_graph():
    x = torch.ones(2, 16, requires_grad=True)
    assert not any(part.requires_grad for part in quantize_nvfp4(x))


def test_what_does_not_fit_is_named():
    x = torch.ones(2, 32)
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = x.clone()
        broken[1, 31] = bad
        for dtype in (torch.float32, torch.bfloat16):
            with pytest.raises(ValueError, match="NaN or infinity"):
                quantize_nvfp4(broken.to(dtype))
    for given_, message in (
        (x[:, :24], r"\(2, 24\).*multiple of 16"),
        (x[:, :0], r"\(2, 0\).*multiple of 16"),
        (x.double(), "float64.*bfloat16 or torch.float32"),
        (x.half(), "float16"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize_nvfp4(given_)
    with pytest.raises(ValueError, match=r"outer is 'row'.*'token'"):
        quantize_nvfp4(x, outer="row")
    with pytest.raises(ValueError, match=r"order is 'fast'.*'exact'"):
        quantize_nvfp4(x, order="fast")
    with pytest.raises(ValueError, match=r"accepted with outer 'matrix'"):
        quantize_nvfp4(x[0], outer="matrix")
    with pytest.raises(ValueError, match=r"backend is 'cuda'"):
        quantize_nvfp4(x, backend="cuda")
    t = quantize_nvfp4(x)
    with pytest.raises(ValueError, match="NVFP4 codes are"):
        dequantize_nvfp4(t._replace(scales=t.scales[:, :1]))
    with pytest.raises(ValueError, match="NVFP4 codes are"):
        dequantize_nvfp4(t._replace(outer=t.outer[:, 0]))


def test_a_library_with_another_order_is_refused_rather_than_used(exact):
    exact.library("torchao")
    with pytest.raises(ValueError, match="accepted with backend 'torchao' is 'reciprocal'"):
        quantize_nvfp4(torch.ones(2, 32), backend="torchao")
    exact.transformer_engine()
    with pytest.raises(ValueError, match="accepted with backend 'transformer_engine' is 'te'"):
        quantize_nvfp4(torch.ones(2, 32), backend="transformer_engine")
