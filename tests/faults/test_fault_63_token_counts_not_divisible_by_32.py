"""Fault 63: token counts of experts that are no multiple of 32 crash the MXFP8 product, or share blocks."""

import torch

from composer2.kernels.grouped import grouped_wgrad_mxfp8
from composer2.kernels.linear import Recipe, expert_linear
from composer2.kernels.mxfp8 import dequantize_mxfp8, quantize_mxfp8

COUNTS = [33, 7, 0, 88]


def test_each_expert_has_the_blocks_and_the_gradient_it_has_alone():
    generator = torch.Generator().manual_seed(0)
    size = torch.exp(3 * torch.randn(sum(COUNTS), 1, generator=generator))
    x = torch.randn(sum(COUNTS), 64, generator=generator) * size
    grad = torch.randn(sum(COUNTS), 32, generator=generator)
    offsets = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
    along_x, along_grad = (quantize_mxfp8(rows, axis=0, offsets=offsets) for rows in (x, grad))
    wgrad = grouped_wgrad_mxfp8(along_grad, along_x, offsets, torch.float32)
    for expert, (end, count) in enumerate(zip(offsets.tolist(), COUNTS, strict=True)):
        alone = torch.tensor([count], dtype=torch.int32)
        rows = slice(end - count, end)
        values = [
            dequantize_mxfp8(quantize_mxfp8(side[rows], axis=0, offsets=alone), offsets=alone) for side in (grad, x)
        ]
        assert torch.equal(dequantize_mxfp8(along_x, offsets=offsets)[rows], values[1])
        torch.testing.assert_close(wgrad[expert], values[0].T @ values[1], rtol=1e-5, atol=1e-4 * float(size.max()))


def test_forward_and_backward_run():
    x = torch.randn(sum(COUNTS), 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    offsets = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
    out = expert_linear(x, weight, offsets, recipe=Recipe(name="mxfp8"))
    out.sum().backward()
    parts = [rows @ matrix.T for rows, matrix in zip(x.detach().split(COUNTS), weight.detach(), strict=True)]
    assert (out.detach() - torch.cat(parts)).norm() < 0.06 * torch.cat(parts).norm()
    assert not weight.grad[2].any()
    assert weight.grad[[0, 1, 3]].abs().sum(dim=(1, 2)).min() > 0
