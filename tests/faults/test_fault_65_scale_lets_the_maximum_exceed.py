"""Fault 65: the power-of-two scale of a block lets its largest value exceed what the element format holds."""

import pytest
import torch

from composer2.kernels.formats import E4M3_MAX, encode_e8m0
from composer2.kernels.mxfp8 import dequantize_mxfp8, quantize_mxfp8


@pytest.mark.parametrize("mantissa", [1.0, 1.75, 1.7500001, 1.99, 1.9999999])
def test_no_block_maximum_is_above_the_largest_element(mantissa):
    amax = mantissa * torch.exp2(torch.arange(-110.0, 120.0))
    scale = torch.exp2(encode_e8m0(amax, "rceil").double() - 127)
    assert (amax.double() / scale <= E4M3_MAX).all()
    x = amax[:, None] * torch.linspace(-1, 1, 32)
    x = x[:-1]  # the very largest may decode to 2^128
    error = (dequantize_mxfp8(quantize_mxfp8(x)).double() - x.double()).abs()
    assert (error <= x.double().abs() / 16 + scale[:-1, None] * 2.0**-10).all()


def test_the_floor_rule_does_saturate_which_is_why_it_is_not_the_default():
    x = torch.full((1, 32), 1.99)
    assert dequantize_mxfp8(quantize_mxfp8(x, scale="floor"))[0, 0] == 1.75
    assert dequantize_mxfp8(quantize_mxfp8(x))[0, 0] == 2.0
