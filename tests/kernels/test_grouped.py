"""Grouped GEMM against one matrix product per row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.kernels.grouped import grouped_mm


def operands(counts, width_in, width_out, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts), width_in, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(len(counts), width_out, width_in, generator=generator, dtype=torch.float64).to(dtype)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    expert_of_row = [expert for expert, count in enumerate(counts) for _ in range(count)]
    return x, weight, offsets, expert_of_row


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    width_in=st.integers(1, 6).map(lambda n: 8 * n),
    width_out=st.integers(1, 6).map(lambda n: 8 * n),
    backend=st.sampled_from(["auto", "torch", "reference"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rows_and_gradients_equal_a_product_per_row(counts, width_in, width_out, backend, dtype):
    x, weight, offsets, expert_of_row = operands(counts, width_in, width_out, dtype)
    x.requires_grad_()
    weight.requires_grad_()
    out = grouped_mm(x, weight, offsets, backend=backend)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    out.backward(grad)

    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    x64, weight64 = x.detach().double(), weight.detach().double()
    assert out.shape == (sum(counts), width_out)
    assert out.dtype == dtype
    expected_weight_grad = torch.zeros_like(weight64)
    for row, expert in enumerate(expert_of_row):
        torch.testing.assert_close(out[row].double(), weight64[expert] @ x64[row], rtol=tolerance, atol=10 * tolerance)
        expected = weight64[expert].T @ grad[row].double()
        torch.testing.assert_close(x.grad[row].double(), expected, rtol=tolerance, atol=10 * tolerance)
        expected_weight_grad[expert] += torch.outer(grad[row].double(), x64[row])
    torch.testing.assert_close(weight.grad.double(), expected_weight_grad, rtol=tolerance, atol=10 * tolerance)


def test_auto_takes_any_width_and_float64():
    for width, dtype in ((5, torch.float32), (8, torch.float64)):
        x, weight, offsets, expert_of_row = operands([2, 0, 1], width, 3, dtype)
        out = grouped_mm(x, weight, offsets)
        expected = torch.stack([weight[e] @ x[row] for row, e in enumerate(expert_of_row)])
        torch.testing.assert_close(out, expected)


def test_explicit_torch_backend_never_falls_back():
    x, weight, offsets, _ = operands([2, 1], 5, 8, torch.float32)
    with pytest.raises(ValueError, match="width 5"):
        grouped_mm(x, weight, offsets, backend="torch")
    x, weight, offsets, _ = operands([2, 1], 8, 8, torch.float64)
    with pytest.raises(ValueError, match="float64"):
        grouped_mm(x, weight, offsets, backend="torch")


def test_misfits_are_refused():
    x, weight, offsets, _ = operands([2, 1], 8, 8, torch.float32)
    with pytest.raises(ValueError, match="operands are"):
        grouped_mm(x[:, :4], weight, offsets)
    with pytest.raises(ValueError, match="offsets are"):
        grouped_mm(x, weight, offsets.long())
    with pytest.raises(ValueError, match="dtypes"):
        grouped_mm(x.double(), weight, offsets)
    with pytest.raises(ValueError, match="backend is 'fast'"):
        grouped_mm(x, weight, offsets, backend="fast")
    with pytest.raises(ValueError, match="offsets end"):
        grouped_mm(x[:2], weight, offsets, backend="reference")
