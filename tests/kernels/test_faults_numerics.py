"""Faults that users of other stacks reported about number formats, one test each, with the small input that shows it.

Those about grouped products (pytorch#193633, TransformerEngine#3484, marin#8793) are in test_grouped.py, about recipes
(NeMo RL#3566) in test_linear.py, about the Triton interpreter (triton#8322, #11584) in test_triton.py.
"""

import pytest
import torch

from composer2.kernels.formats import NVFP4, decode_e8m0, encode_e8m0, unpack_nibbles
from composer2.kernels.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from composer2.kernels.nvfp4 import dequantize_nvfp4, quantize_nvfp4


def bytes_of(t: NVFP4) -> tuple[torch.Tensor, torch.Tensor]:
    return t.codes, t.scales.view(torch.uint8)


def cross_multiplied(x: torch.Tensor, exact) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes 0..15 and scale bytes per token by comparing products in float64, where they are exact: no division."""
    amax = x.double().abs().amax(-1, keepdim=True)
    blocks = x.double().abs().unflatten(-1, (-1, 16))
    e4m3 = torch.tensor([float(v) for v in exact.E4M3], dtype=torch.float64)
    scales = sum(
        (448 * blocks.amax(-1) >= tie * amax if low % 2 else 448 * blocks.amax(-1) > tie * amax).int()
        for low, tie in enumerate(((e4m3[1:] + e4m3[:-1]) / 2).tolist())
    )
    divisor = (e4m3[scales] * amax).unsqueeze(-1)
    index = sum(
        (2688 * blocks >= float(tie) * divisor if low % 2 else 2688 * blocks > float(tie) * divisor).int()
        for low, tie in enumerate(exact.E2M1_TIES)
    )
    return (index.flatten(-2) + 8 * x.signbit()).to(torch.uint8), scales.to(torch.uint8)


def test_te_2639_a_reciprocal_no_longer_matches_the_reference(exact):
    x = exact.inputs("gauss", 512, 1024)
    codes, scales = cross_multiplied(x, exact)
    t = quantize_nvfp4(x)
    assert torch.equal(unpack_nibbles(t.codes), codes)
    assert torch.equal(t.scales.view(torch.uint8), scales)
    assert (unpack_nibbles(quantize_nvfp4(x, order="reciprocal").codes) != codes).any()


def test_archcom_905_boundary_values_show_what_random_ones_hide(exact):
    """x = tie * scale and its neighbours, for all 126 scales that are not zero."""
    rows = []
    for scale in [float(v) for v in exact.E4M3[1:]]:
        ties = torch.tensor([float(t) for t in exact.E2M1_TIES[:5]]) * scale
        near = [ties, torch.nextafter(ties, ties * 0), torch.nextafter(ties, ties * 2), torch.tensor([6 * scale])]
        rows.append(torch.cat([torch.tensor([2688.0]), torch.zeros(15), *near]))
    x = torch.stack(rows) * 1.1  # 2688 * 1.1 is not representable: the outer scale rounds
    codes, scales = cross_multiplied(x, exact)
    t = quantize_nvfp4(x)
    assert torch.equal(unpack_nibbles(t.codes), codes)
    assert torch.equal(t.scales.view(torch.uint8), scales)
    assert (unpack_nibbles(quantize_nvfp4(x, order="reciprocal").codes) != codes).float().mean() > 0.01


def test_miles_1261_trainer_and_sampler_pick_other_codes_on_rounded_tokens(exact):
    """Equal formulas differ on tokens that have been through MXFP8; naming the engine's order makes them equal."""
    exact.library("torchao")
    tokens = dequantize_mxfp8(quantize_mxfp8(exact.inputs("gauss", 128, 1024))).bfloat16()
    tokens = torch.where(tokens == 0, 0.25, tokens)
    engine = quantize_nvfp4(tokens, order="reciprocal", backend="torchao")
    assert (quantize_nvfp4(tokens).codes != engine.codes).float().mean() > 1e-3
    for ours, theirs in zip(bytes_of(quantize_nvfp4(tokens, order="reciprocal")), bytes_of(engine), strict=True):
        assert torch.equal(ours, theirs)


def test_te_3262_and_2408_extreme_scale_bytes():
    values = decode_e8m0(torch.tensor([0, 1, 254, 255], dtype=torch.uint8))
    assert values[:3].tolist() == [2.0**-127, 2.0**-126, 2.0**127]
    assert values[3].isnan()
    assert decode_e8m0(torch.tensor([254 - 254], dtype=torch.uint8)).item() == 2.0**-127  # 254's reciprocal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ao_1104_smallest_blocks_come_back_at_their_size(dtype):
    x = (torch.linspace(-1, 1, 32) * 1e-38).to(dtype)[None]
    for rule in ("rceil", "floor"):
        error = (dequantize_mxfp8(quantize_mxfp8(x, scale=rule)).double() - x.double()).abs()
        assert (error <= x.double().abs() / 16 + 2.0**-137).all()


def test_modelopt_1397_zero_blocks_and_rows_beside_normal_ones():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[1] = 0
    x[2, 16:32] = 0
    for value in (
        dequantize_nvfp4(quantize_nvfp4(x)),
        dequantize_nvfp4(quantize_nvfp4(x, outer="tensor")),
        dequantize_nvfp4(quantize_nvfp4(torch.zeros_like(x), outer="tensor")),
        dequantize_mxfp8(quantize_mxfp8(x)),
    ):
        assert value.isfinite().all()
        assert not value[1].any()
        assert not value[2, 16:32].any()


def test_mlx_4353_no_group_is_clipped(exact):
    x = exact.inputs("gauss", 512, 1024)
    t = quantize_mxfp8(x)
    amax = x.double().unflatten(-1, (-1, 32)).abs().amax(-1)
    ratio = amax / torch.exp2(t.scales.double() - 127)
    assert ((ratio <= 448) & (ratio > 224)).all()


def test_ao_4725_amax_beside_a_power_of_two():
    edges = 448 * torch.exp2(torch.arange(-20.0, 20.0))
    for amax, shift in (
        (edges, 0),
        (torch.nextafter(edges, edges * 0), 0),
        (torch.nextafter(edges, edges * 2), 1),
    ):
        assert encode_e8m0(amax, "rceil").tolist() == [127 + k + shift for k in range(-20, 20)]


def test_modular_6600_the_outer_scale_multiplies(exact):
    t = quantize_nvfp4(exact.inputs("gauss", 4, 32))
    assert torch.equal(dequantize_nvfp4(t._replace(outer=torch.full_like(t.outer, 2.0))), 2 * dequantize_nvfp4(
        t._replace(outer=torch.ones_like(t.outer))
    ))  # fmt: skip
    assert torch.equal(t.outer, (exact.inputs("gauss", 4, 32).double().abs().amax(-1, keepdim=True) / 2688).float())


def test_torchtitan_2262_blocks_along_tokens_stop_at_the_expert():
    x = torch.ones(128, 8)
    x[44:] = 1000.0
    offsets = torch.tensor([44, 128], dtype=torch.int32)
    t = quantize_mxfp8(x, axis=0, offsets=offsets)
    assert t.codes.shape == (64 + 96, 8)
    small, large = (int(encode_e8m0(torch.tensor([v]), "rceil")) for v in (1.0, 1000.0))
    assert t.scales[:, 0].tolist() == [small] * 2 + [large] * 3
    assert torch.equal(dequantize_mxfp8(t, offsets=offsets)[:44], x[:44])


def test_nemo_3566_per_token_is_never_silently_per_tensor(exact):
    x = exact.inputs("spread", 8, 32)
    assert quantize_nvfp4(x).outer.shape == (8, 1)
    with pytest.raises(ValueError, match="outer is 'row_scaled'"):
        quantize_nvfp4(x, outer="row_scaled")
    exact.transformer_engine()
    with pytest.raises(ValueError, match="accepted with backend 'transformer_engine'"):
        quantize_nvfp4(x, outer="matrix", order="te", backend="transformer_engine")
