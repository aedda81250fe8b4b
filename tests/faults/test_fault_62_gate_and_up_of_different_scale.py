"""Fault 62: gate and up halves have outer scales of their own; fused, the gate's is applied to both."""

import torch

from composer2.kernels.formats import NVFP4
from composer2.kernels.grouped import grouped_mm_nvfp4
from composer2.kernels.nvfp4 import quantize_nvfp4


def test_both_halves_of_a_fused_product_are_those_of_the_unfused_ones():
    generator = torch.Generator().manual_seed(0)
    gate, up = torch.randn(3, 32, 64, generator=generator), 8 * torch.randn(3, 32, 64, generator=generator)
    x = torch.randn(20, 64, generator=generator)
    offsets = torch.tensor([7, 7, 20], dtype=torch.int32)
    left, fused = quantize_nvfp4(x), quantize_nvfp4(torch.cat([gate, up], dim=1), outer="matrix")
    together = grouped_mm_nvfp4(left, fused, offsets, torch.float32)
    for half, weight in ((slice(0, 32), gate), (slice(32, 64), up)):
        apart = NVFP4(fused.codes[:, half], fused.scales[:, half], fused.outer)
        assert torch.equal(together[:, half], grouped_mm_nvfp4(left, apart, offsets, torch.float32))
        own = quantize_nvfp4(weight, outer="matrix")
        exact = torch.cat([x[:7] @ weight[0].T, x[7:] @ weight[2].T])
        for product in (together[:, half], grouped_mm_nvfp4(left, own, offsets, torch.float32)):
            assert (product - exact).norm() < 0.2 * exact.norm()
