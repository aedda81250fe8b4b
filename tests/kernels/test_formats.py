"""Element casts, scale bytes and memory layouts against rational arithmetic, ml_dtypes and torchao."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.kernels import formats
from composer2.kernels.formats import (
    by_parts,
    check_offsets,
    decode_e2m1,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    finite_amax,
    pack_nibbles,
    pad_rows,
    padded_offsets,
    swizzle_scales,
    unpack_nibbles,
    unpad_rows,
    unswizzle_scales,
)


def every_bf16() -> torch.Tensor:
    """All finite bfloat16 values, both zeros included."""
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return patterns[patterns.isfinite()]


def neighbours(values: list[Fraction]) -> torch.Tensor:
    """float32: each value, the next below, the next above."""
    middle = torch.tensor([float(v) for v in values])
    return torch.cat([middle, torch.nextafter(middle, middle * 0), torch.nextafter(middle, middle * 4)])


def test_e2m1_of_every_bf16_is_that_of_ml_dtypes(exact):
    ml_dtypes = exact.library("ml_dtypes")
    x = every_bf16()
    expected = x.float().numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(encode_e2m1(x).numpy(), expected)


def test_e2m1_at_ties_and_their_neighbours(exact):
    x = neighbours(exact.E2M1_TIES)
    expected = [exact.nearest(exact.E2M1, Fraction(v)) for v in x.double().tolist()]
    assert encode_e2m1(x).tolist() == expected
    assert encode_e2m1(-x).tolist() == [code + 8 for code in expected]
    assert encode_e2m1(torch.tensor([0.0, -0.0, torch.inf, -torch.inf])).tolist() == [0, 8, 7, 15]
    with pytest.raises(ValueError, match="NaN"):
        encode_e2m1(torch.tensor([0.0, torch.nan]))


def test_e2m1_values(exact):
    values = decode_e2m1(torch.arange(16, dtype=torch.uint8))
    assert values[:8].tolist() == [float(v) for v in exact.E2M1]
    assert values[8:].tolist() == [-float(v) for v in exact.E2M1]
    assert values[8].signbit()


def test_e4m3_of_every_bf16_is_that_of_ml_dtypes_below_its_overflow(exact):
    ml_dtypes = exact.library("ml_dtypes")
    x = every_bf16()
    codes = encode_e4m3(x)
    inside = x.abs() <= 464
    expected = x[inside].float().numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(codes[inside].view(torch.uint8).numpy(), expected)
    assert (codes[~inside].float().abs() == 448).all()
    assert encode_e4m3(torch.tensor([torch.inf, -torch.inf])).float().tolist() == [448, -448]
    assert encode_e4m3(torch.tensor([torch.nan])).float().isnan().all()


def test_e4m3_of_float32_and_float64_rounds_once(exact):
    ties = [(a + b) / 2 for a, b in zip(exact.E4M3, exact.E4M3[1:], strict=False)]
    x = neighbours(ties)
    expected = [exact.nearest(exact.E4M3, Fraction(v)) for v in x.double().tolist()]
    assert encode_e4m3(x).view(torch.uint8).tolist() == expected
    close = torch.tensor([float(t) for t in ties], dtype=torch.float64)
    for factor in (1.0, 1 + 2.0**-40, 1 - 2.0**-40):  # float32 would see the tie itself
        expected = [exact.nearest(exact.E4M3, Fraction(v)) for v in (close * factor).tolist()]
        assert encode_e4m3(close * factor).view(torch.uint8).tolist() == expected
        assert (encode_e4m3(-close * factor).view(torch.uint8) - 128).tolist() == expected


def test_e8m0_bytes_decode_to_powers_of_two(exact):
    ml_dtypes = exact.library("ml_dtypes")
    values = decode_e8m0(torch.arange(256, dtype=torch.int32).to(torch.uint8))
    assert [Fraction(v) for v in values[:255].double().tolist()] == [Fraction(2) ** (b - 127) for b in range(255)]
    assert values[255].isnan()
    np.testing.assert_array_equal(
        values.numpy(), np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype("f4")
    )


def amax_values() -> torch.Tensor:
    """Every positive finite bfloat16, and 448 * 2^k with its float32 neighbours, down to subnormals."""
    powers = torch.exp2(torch.arange(-140, 119).double())
    edges = torch.cat([448 * powers, 256 * powers, 511 * powers]).float()
    edges = torch.cat([edges, torch.nextafter(edges, edges * 2), torch.nextafter(edges, edges * 0)])
    x = every_bf16()
    return torch.cat([edges[edges > 0], x[x > 0].float(), torch.tensor([2.0**-149, 3.4028234663852886e38])])


def test_rceil_is_the_smallest_power_that_does_not_saturate():
    amax = amax_values()
    bytes_ = encode_e8m0(amax, "rceil")
    scale = torch.exp2(bytes_.double() - 127)
    assert (amax.double() / scale <= 448).all()
    assert ((amax.double() / (scale / 2) > 448) | (bytes_ == 0)).all()
    assert encode_e8m0(torch.tensor([0.0]), "rceil").item() == 0


def test_floor_is_the_exponent_minus_eight():
    amax = amax_values()
    exponents = torch.frexp(amax.double()).exponent - 1
    assert torch.equal(encode_e8m0(amax, "floor").int(), (exponents - 8 + 127).clamp(min=0))
    with pytest.raises(ValueError, match="scale is 'ceil'"):
        encode_e8m0(amax, "ceil")


@settings(deadline=None)
@given(st.lists(st.integers(0, 15), min_size=1, max_size=40).map(lambda codes: codes + codes))
def test_nibbles_pack_low_first_and_unpack(codes):
    wide = torch.tensor(codes, dtype=torch.uint8)
    packed = pack_nibbles(wide)
    assert packed.tolist() == [low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)]
    assert torch.equal(pack_nibbles(wide.short()), packed)
    assert torch.equal(unpack_nibbles(packed), wide)


def test_pack_refuses_odd_widths_and_other_dtypes():
    with pytest.raises(ValueError, match=r"uint8 \(3,\)"):
        pack_nibbles(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="float32"):
        pack_nibbles(torch.zeros(4))


@settings(deadline=None)
@given(rows=st.integers(1, 300), columns=st.integers(1, 19))
def test_swizzle_places_every_scale_by_the_formula_and_comes_back(rows, columns):
    scales = torch.arange(rows * columns).remainder(251).to(torch.uint8).view(rows, columns)
    flat = swizzle_scales(scales)
    assert flat.shape == (-(-rows // 128) * 128 * (-(-columns // 4) * 4),)
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    offsets = (r // 128) * -(-columns // 4) * 512 + (c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
    assert torch.equal(flat[offsets], scales)
    rest = torch.ones_like(flat, dtype=torch.bool)
    rest[offsets] = False
    assert not flat[rest].any()
    assert torch.equal(unswizzle_scales(flat, rows, columns), scales)


def test_swizzle_is_torchaos_and_keeps_the_dtype(exact):
    to_blocked = exact.library("torchao.prototype.mx_formats.utils").to_blocked
    scales = torch.randint(0, 126, (200, 11), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert torch.equal(swizzle_scales(scales), to_blocked(scales).flatten())
    e4m3 = swizzle_scales(scales.view(torch.float8_e4m3fn))
    assert e4m3.dtype == torch.float8_e4m3fn
    assert unswizzle_scales(e4m3, 200, 11).dtype == torch.float8_e4m3fn
    with pytest.raises(ValueError, match="accepted for 200 x 13"):
        unswizzle_scales(e4m3, 200, 13)
    with pytest.raises(ValueError, match="float32"):
        swizzle_scales(scales.float())


def test_offsets_that_do_not_fit_are_named():
    assert check_offsets(torch.tensor([2, 2, 5], dtype=torch.int32), 6) == [2, 2, 5]
    for values, message in (([2, 1], r"\[2, 1\].*non-decreasing"), ([-1, 3], r"\[-1, 3\]"), ([2, 7], "end at 7")):
        with pytest.raises(ValueError, match=message):
            check_offsets(torch.tensor(values, dtype=torch.int32), 6)
    with pytest.raises(ValueError, match="int64"):
        check_offsets(torch.tensor([2, 6]), 6)


@settings(deadline=None)
@given(counts=st.lists(st.integers(0, 70), min_size=1, max_size=5), tail=st.integers(0, 5))
def test_rows_are_padded_per_expert(counts, tail):
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    x = torch.arange(1.0, sum(counts) + tail + 1)[:, None] * torch.ones(1, 3)
    padded = pad_rows(x, offsets)
    expected = []
    for end, count in zip(offsets.tolist(), counts, strict=True):
        expected += [x[end - count : end], torch.zeros(-count % 32, 3)]
    assert torch.equal(padded, torch.cat(expected))
    assert padded_offsets(offsets).tolist() == np.cumsum([-(-count // 32) * 32 for count in counts]).tolist()
    assert torch.equal(unpad_rows(padded, offsets), x[: sum(counts)])


def test_amax_is_taken_from_bits_and_refuses_what_is_not_finite():
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.tensor([[-3.0, 2.0], [0.0, -0.0]], dtype=dtype)
        assert finite_amax(x, -1).tolist() == [3, 0]
        assert finite_amax(x, 0).dtype == torch.float32
        for bad in (torch.nan, -torch.nan, torch.inf, -torch.inf):
            x[1, 0] = bad
            with pytest.raises(ValueError, match="NaN or infinity"):
                finite_amax(x, -1)
    with pytest.raises(ValueError, match="float16"):
        finite_amax(torch.zeros(2, 2, dtype=torch.float16), -1)


def test_parts_change_nothing(monkeypatch):
    x = torch.arange(70.0).view(10, 7)
    monkeypatch.setattr(formats, "PART", 21)
    sums, doubled = by_parts(lambda part: (part.sum(1), part * 2), 7, x)
    assert torch.equal(sums, x.sum(1))
    assert torch.equal(doubled, x * 2)
