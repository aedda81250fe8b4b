"""Other people's libraries. Bit-exact where an order of ours is theirs; elsewhere each difference must sit on a tie."""

import pytest
import torch

from composer2.kernels import te, torchao
from composer2.kernels.formats import NVFP4, encode_e8m0, unpack_nibbles
from composer2.kernels.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from composer2.kernels.nvfp4 import dequantize_nvfp4, quantize_nvfp4

DATA = ("gauss", "heavy", "swiglu", "rounded", "quarters", "powers")


def nonzero(x: torch.Tensor) -> torch.Tensor:
    """Zeros replaced: the libraries differ in the sign of zero codes and in the scale of zero blocks."""
    return torch.where(x == 0, torch.tensor(0.25, dtype=x.dtype), x)


def magnitude_codes(t: NVFP4) -> torch.Tensor:
    return unpack_nibbles(t.codes)


@pytest.mark.parametrize("outer", ["token", "tensor"])
@pytest.mark.parametrize("name", DATA)
def test_reciprocal_order_is_torchao_bit_for_bit(exact, name, outer):
    exact.library("torchao")
    for x in (nonzero(exact.inputs(name, 128, 512)), nonzero(exact.inputs(name, 128, 512)).float() * 1.0001):
        ours = quantize_nvfp4(x, outer=outer, order="reciprocal")
        theirs = quantize_nvfp4(x, outer=outer, order="reciprocal", backend="torchao")
        assert torch.equal(ours.codes, theirs.codes)
        assert torch.equal(ours.scales.view(torch.uint8), theirs.scales.view(torch.uint8))
        assert torch.equal(ours.outer, theirs.outer)


@pytest.mark.parametrize("outer", ["token", "tensor"])
@pytest.mark.parametrize("name", DATA)
def test_te_order_is_transformer_engine_bit_for_bit(exact, name, outer):
    exact.transformer_engine()
    for x in (nonzero(exact.inputs(name, 128, 512)), nonzero(exact.inputs(name, 128, 512)).float() * 1.0001):
        ours = quantize_nvfp4(x, outer=outer, order="te")
        theirs = quantize_nvfp4(x, outer=outer, order="te", backend="transformer_engine")
        assert torch.equal(ours.codes, theirs.codes)
        assert torch.equal(ours.scales.view(torch.uint8), theirs.scales.view(torch.uint8))
        assert torch.equal(ours.outer, theirs.outer)


@pytest.mark.parametrize("name", DATA)
def test_divide_outer_order_is_modelopt_bit_for_bit(exact, name):
    quantizer = exact.library("modelopt.torch.quantization.qtensor").NVFP4QTensor
    x = nonzero(exact.inputs(name, 128, 512, seed=4))  # (block_amax / 6) / outer would show here, not with every seed
    for rows, outer in ((x, "tensor"), (x[:1], "token"), (x[7:8], "token"), (x.float() * 1.0001, "tensor")):
        packed, scales, scale_2 = quantizer.quantize(rows, 16)
        ours = quantize_nvfp4(rows, outer=outer, order="divide_outer")
        assert torch.equal(ours.codes, packed._quantized_data)
        assert torch.equal(ours.scales.view(torch.uint8), scales.view(torch.uint8))
        assert torch.equal(ours.outer.flatten(), scale_2.float().flatten())


@pytest.mark.parametrize("library", ["torchao", "transformer_engine"])
@pytest.mark.parametrize("name", DATA)
def test_where_a_library_differs_from_exact_the_quotient_is_beside_a_tie(exact, name, library):
    order = "reciprocal" if library == "torchao" else "te"
    exact.library("torchao") if library == "torchao" else exact.transformer_engine()
    x = nonzero(exact.inputs(name, 128, 512))
    ours, theirs = quantize_nvfp4(x), quantize_nvfp4(x, order=order, backend=library)
    blocks = x.double().unflatten(-1, (-1, 16))
    amax = x.double().abs().amax(-1, keepdim=True)

    ideal = 448 * blocks.abs().amax(-1) / amax
    grid = torch.tensor([float(v) for v in exact.E4M3], dtype=torch.float64)
    differs = ours.scales.view(torch.uint8) != theirs.scales.view(torch.uint8)
    if library == "torchao":
        differs &= ideal > 2.0**-6  # below, torchao keeps the smallest normal scale
    steps = theirs.scales.view(torch.uint8)[differs].int() - ours.scales.view(torch.uint8)[differs].int()
    assert (steps.abs() <= 1).all()
    lower = torch.minimum(ours.scales.view(torch.uint8), theirs.scales.view(torch.uint8))[differs].long()
    tie = (grid[lower] + grid[lower + 1]) / 2
    torch.testing.assert_close(ideal[differs], tie, rtol=1e-6, atol=0)

    same_scale = (ours.scales.view(torch.uint8) == theirs.scales.view(torch.uint8)).repeat_interleave(16, dim=1)
    differs = (magnitude_codes(ours) != magnitude_codes(theirs)) & same_scale
    quotient = 2688 * x.double().abs() / (ours.scales.double().repeat_interleave(16, dim=1) * amax)
    mine, other = (magnitude_codes(t)[differs].long() for t in (ours, theirs))
    assert ((mine - other).abs() <= 1).all()
    ties = torch.tensor([float(v) for v in exact.E2M1_TIES], dtype=torch.float64)
    torch.testing.assert_close(quotient[differs], ties[torch.minimum(mine & 7, other & 7)], rtol=1e-6, atol=0)


@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize("name", DATA)
def test_mxfp8_is_torchao_bit_for_bit(exact, name, rule):
    exact.library("torchao")
    x = exact.inputs(name, 64, 512)
    ours, theirs = quantize_mxfp8(x, scale=rule), quantize_mxfp8(x, scale=rule, backend="torchao")
    assert torch.equal(ours.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
    assert torch.equal(ours.scales, theirs.scales)


def test_mxfp8_rceil_of_every_bf16_amax_is_torchao_where_torchao_is_right(exact):
    exact.library("torchao")
    patterns = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = patterns[:, None] * torch.linspace(-1, 1, 32).bfloat16()
    ours, theirs = quantize_mxfp8(x), torchao.quantize_mxfp8(x)
    assert torch.equal(ours.scales, theirs.scales)
    right = ours.scales.flatten() > 0  # at byte 0, amax <= 2.63e-36, torchao multiplies by 1 instead of 2^127
    assert (~right).sum() == 1120
    assert torch.equal(ours.codes[right].view(torch.uint8), theirs.codes[right].view(torch.uint8))
    above = torch.nextafter(448 * torch.exp2(torch.arange(-50.0, 50)), torch.tensor(torch.inf))
    theirs = torchao.quantize_mxfp8(above[:, None].expand(-1, 32)).scales.flatten()
    assert (encode_e8m0(above, "rceil") >= theirs).all()


def test_mxfp8_is_modelopt_bit_for_bit(exact):
    quantizer = exact.library("modelopt.torch.quantization.qtensor").MXFP8QTensor
    for name in DATA:
        x = exact.inputs(name, 32, 512)
        theirs, scales = quantizer.quantize(x)
        ours = quantize_mxfp8(x)
        assert torch.equal(ours.codes.float(), theirs._quantized_data.float())
        assert torch.equal(ours.scales, scales.view(torch.uint8).view(ours.scales.shape))


def test_torchaos_expert_gemm_multiplies_our_decoded_operands(exact):
    exact.library("torchao.prototype.moe_training.mxfp8_grouped_mm")
    x = exact.inputs("gauss", 96, 64)
    weight = exact.inputs("gauss", 3 * 32, 64, seed=1).view(3, 32, 64)
    offsets = torch.tensor([30, 30, 96], dtype=torch.int32)
    out = torchao.expert_linear_mxfp8(x, weight, offsets)
    wide_x, wide_weight = dequantize_mxfp8(quantize_mxfp8(x)), dequantize_mxfp8(quantize_mxfp8(weight))
    expected = torch.cat([wide_x[:30] @ wide_weight[0].T, wide_x[30:] @ wide_weight[2].T])
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())


def test_transformer_engines_product_of_row_scaled_operands(exact):
    library = exact.transformer_engine()
    x, weight = exact.inputs("gauss", 32, 64), exact.inputs("heavy", 16, 64)
    make = lambda per_token: library.NVFP4QuantizerRef(  # noqa: E731
        library.reference_utils.Fp4Formats.E2M1, rowwise=True, columnwise=False, row_scaled_nvfp4=per_token
    )
    left, right = make(True).quantize(x), make(False).quantize(weight)
    right.global_amax_col = right.global_amax_row
    product = make(False).qgemm(
        left.data,
        right.data,
        library.gemm.MMParams(),
        torch.float32,
        left.scale,
        right.scale,
        qresult_x=left,
        qresult_w=right,
    )
    ours = [
        dequantize_nvfp4(quantize_nvfp4(rows, outer=outer, order="te")).double()
        for rows, outer in ((x, "token"), (weight, "tensor"))
    ]
    torch.testing.assert_close(product.double(), ours[0] @ ours[1].T, rtol=1e-5, atol=1e-5)


def test_loading_the_reference_leaves_no_stand_in_behind(exact):
    import sys

    exact.transformer_engine()
    assert not any(te.is_of_library(name) for name in sys.modules)
