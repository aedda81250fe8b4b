"""Grouped GEMM against one matrix product per row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.kernels.backend import BackendUnavailable, refusal
from composer2.kernels.formats import MXFP8, NVFP4
from composer2.kernels.grouped import grouped_mm, grouped_mm_mxfp8, grouped_mm_nvfp4, grouped_wgrad_mxfp8
from composer2.kernels.mxfp8 import quantize_mxfp8
from composer2.kernels.nvfp4 import quantize_nvfp4


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


def test_an_expanded_gradient_is_accepted():
    x, weight, offsets, _ = operands([2, 1], 8, 8, torch.float32)
    x.requires_grad_()
    grouped_mm(x, weight, offsets).sum().backward()
    torch.testing.assert_close(x.grad[0], weight[0].sum(0))


# ---------------------------------------------------------------------------------------------------------------------
# Offsets and the tail behind the last one


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_poisoned_tail_gives_zeros_and_gets_zero_gradients(backend, dtype):
    """pytorch#193633: 64 rows of which 32 count; what lies behind them, in rows and in gradients, is NaN."""
    x, weight, offsets, _ = operands([20, 0, 12], 16, 24, dtype)
    buffer = torch.full((64, 16), float("nan"), dtype=dtype)
    buffer[:32] = x
    buffer.requires_grad_()
    weight.requires_grad_()
    out = grouped_mm(buffer, weight, offsets, backend=backend)
    assert torch.equal(out[32:], torch.zeros(32, 24, dtype=dtype))
    grad = torch.full(out.shape, float("nan"), dtype=dtype)
    grad[:32] = 1.0
    out.backward(grad)
    assert torch.equal(buffer.grad[32:], torch.zeros(32, 16, dtype=dtype))
    assert buffer.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    assert torch.equal(weight.grad[1], torch.zeros_like(weight.grad[1]))
    expected = torch.ones(24, 20).double() @ x[:20].double()
    torch.testing.assert_close(weight.grad[0].double(), expected, rtol=2e-2, atol=0.1)


def test_one_expert_and_a_padded_buffer():
    """TransformerEngine#3484: 64 of 96 rows count; a tail of sevens must not be summed into the gradient."""
    generator = torch.Generator().manual_seed(3)
    x = torch.full((96, 32), 7.0)
    x[:64] = torch.randn(64, 32, generator=generator)
    weight = torch.randn(1, 32, 32, generator=generator, requires_grad=True)
    grouped_mm(x, weight, torch.tensor([64], dtype=torch.int32)).sum().backward()
    expected = torch.ones(32, 64).double() @ x[:64].double()
    torch.testing.assert_close(weight.grad[0].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ends", [[3, 2, 5], [-1, 2, 5], [2, 4, 6]])
@pytest.mark.parametrize("product", ["plain", "nvfp4", "mxfp8", "wgrad"])
def test_offsets_that_decrease_or_run_past_the_end_are_refused(ends, product):
    x, weight, _, _ = operands([2, 2, 1], 32, 32, torch.bfloat16)
    offsets = torch.tensor(ends, dtype=torch.int32)
    if product == "wgrad":
        good = quantize_mxfp8(x, axis=0, offsets=torch.tensor([2, 4, 5], dtype=torch.int32))
        offsets[-1] += 91 * (ends[-1] == 6)  # the buffer has 96 rows, padding included

    def call():
        if product == "plain":
            return grouped_mm(x, weight, offsets)
        if product == "nvfp4":
            return grouped_mm_nvfp4(quantize_nvfp4(x), quantize_nvfp4(weight, outer="matrix"), offsets)
        if product == "mxfp8":
            return grouped_mm_mxfp8(quantize_mxfp8(x), quantize_mxfp8(weight), offsets)
        return grouped_wgrad_mxfp8(good, good, offsets)

    with pytest.raises(ValueError, match="offsets"):
        call()


# ---------------------------------------------------------------------------------------------------------------------
# Quantised operands against float64 products of values decoded by hand

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def values_of_nvfp4(t):
    """float64 values, by table; the even position is the low nibble."""
    nibbles = torch.stack((t.codes & 15, t.codes >> 4), dim=-1).flatten(-2).long()
    scales = t.scales.float().double().repeat_interleave(16, dim=-1)
    return E2M1[nibbles] * scales * t.outer.double()


def values_of_mxfp8(t, axis=-1):
    """float64 values: code * 2^(byte - 127)."""
    return t.codes.float().double() * torch.exp2(t.scales.double() - 127).repeat_interleave(32, dim=axis)


def experts_of(counts):
    return [expert for expert, count in enumerate(counts) for _ in range(count)]


ragged = st.lists(st.integers(0, 40), min_size=1, max_size=4)
widths = st.integers(1, 3).map(lambda n: 32 * n)


@settings(max_examples=20, deadline=None)
@given(
    counts=ragged,
    width_in=widths,
    width_out=widths,
    tail=st.integers(0, 3),
    outer=st.sampled_from(["token", "tensor"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_nvfp4_equals_a_float64_product_of_decoded_values(counts, width_in, width_out, tail, outer, dtype):
    x, weight, offsets, expert_of_row = operands([*counts, tail], width_in, width_out, torch.bfloat16)
    weight, offsets, expert_of_row = weight[:-1], offsets[:-1], expert_of_row[: len(x) - tail]
    weight = weight * torch.logspace(-3, 3, len(weight), base=2)[:, None, None].bfloat16()
    if not len(x):
        return
    a, b = quantize_nvfp4(x, outer=outer), quantize_nvfp4(weight, outer="matrix")
    assert b.outer.shape == (len(counts), 1, 1)
    out = grouped_mm_nvfp4(a, b, offsets, dtype)
    assert out.dtype == dtype
    rows, matrices = values_of_nvfp4(a), values_of_nvfp4(b)
    expected = torch.zeros(len(x), width_out, dtype=torch.float64)
    size = torch.zeros_like(expected)
    for row, expert in enumerate(expert_of_row):
        expected[row] = matrices[expert] @ rows[row]
        size[row] = matrices[expert].abs() @ rows[row].abs()
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8
    assert ((out.double() - expected).abs() <= tolerance * size + 1e-30).all()


@settings(max_examples=20, deadline=None)
@given(counts=ragged, width_in=widths, width_out=widths, tail=st.integers(0, 3),
       dtype=st.sampled_from([torch.float32, torch.bfloat16]))  # fmt: skip
def test_mxfp8_products_equal_float64_products_of_decoded_values(counts, width_in, width_out, tail, dtype):
    x, weight, offsets, expert_of_row = operands([*counts, tail], width_in, width_out, torch.bfloat16)
    weight, offsets, expert_of_row = weight[:-1], offsets[:-1], expert_of_row[: len(x) - tail]
    a, b = quantize_mxfp8(x), quantize_mxfp8(weight)
    out = grouped_mm_mxfp8(a, b, offsets, dtype)
    rows, matrices = values_of_mxfp8(a), values_of_mxfp8(b)
    expected, size = torch.zeros(2, len(x), width_out, dtype=torch.float64)
    for row, expert in enumerate(expert_of_row):
        expected[row], size[row] = matrices[expert] @ rows[row], matrices[expert].abs() @ rows[row].abs()
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8
    assert out.dtype == dtype
    assert ((out.double() - expected).abs() <= tolerance * size + 1e-30).all()


@settings(max_examples=20, deadline=None)
@given(counts=ragged, width_in=widths, width_out=widths, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_wgrad_equals_each_experts_own_product(counts, width_in, width_out, dtype):
    check_wgrad(counts, width_in, width_out, dtype)


@pytest.mark.parametrize("counts", [[44, 84], [5, 9, 2], [33, 7, 0, 88], [30, 67, 0, 159, 34]])
def test_wgrad_of_the_reported_token_counts(counts):
    """torchtitan#2262 and ao#4062 (44, 84), marin#8793 (5, 9, 2), TransformerEngine#2966 (33, 7, 0, 88; fault 63)."""
    check_wgrad(counts, 64, 32, torch.float32)


def check_wgrad(counts, width_in, width_out, dtype):
    """Each expert's rows are quantised alone here, as a buffer of one expert: sharing a block would change codes."""
    x, _, offsets, _ = operands(counts, width_in, width_out, torch.bfloat16)
    grad, _, _, _ = operands(counts, width_out, width_in, torch.bfloat16, seed=1)
    scale = torch.repeat_interleave(torch.logspace(-6, 6, len(counts), base=2), torch.tensor(counts))[
        :, None
    ].bfloat16()
    x, grad = x * scale, grad / scale
    got = grouped_wgrad_mxfp8(
        quantize_mxfp8(grad, axis=0, offsets=offsets), quantize_mxfp8(x, axis=0, offsets=offsets), offsets, dtype
    )
    assert got.shape == (len(counts), width_out, width_in)
    assert got.dtype == dtype
    end = 0
    for expert, count in enumerate(counts):
        start, end = end, end + count
        if count == 0:
            assert torch.equal(got[expert], torch.zeros_like(got[expert]))
            continue
        left, right = (blocks_of_columns(part[start:end]) for part in (grad, x))
        expected, size = left.T @ right, left.T.abs() @ right.abs()
        tolerance = 2e-6 if dtype == torch.float32 else 2**-8
        assert ((got[expert].double() - expected).abs() <= tolerance * size + 1e-30).all()
        exact = grad[start:end].double().T @ x[start:end].double()
        assert (got[expert].double() - exact).norm() <= 0.06 * exact.norm() + 1e-12


def blocks_of_columns(x):
    """Values of one expert's rows once 32 of them at a time share a scale: 2^ceil(log2(amax / 448)), RNE to E4M3."""
    padded = torch.nn.functional.pad(x.float(), (0, 0, 0, -len(x) % 32)).view(-1, 32, x.shape[1]).double()
    amax = padded.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    return ((padded / scale).float().to(torch.float8_e4m3fn).float().double() * scale).flatten(0, 1)


def test_only_the_rows_own_block_scales_and_outer_scale_reach_a_row():
    """A token alone equals the token in a batch, per token; with one scale a tensor a louder token changes it."""
    x, weight, _, _ = operands([24], 64, 32, torch.bfloat16)
    b = quantize_nvfp4(weight, outer="matrix")
    everything = torch.tensor([24], dtype=torch.int32)
    louder = x.clone()
    louder[1] *= 1.37 * 3
    outs = {
        outer: [
            grouped_mm_nvfp4(quantize_nvfp4(rows, outer=outer), b, everything, torch.float32) for rows in (x, louder)
        ]
        for outer in ("token", "tensor")
    }
    others = [0, *range(2, 24)]
    assert torch.equal(outs["token"][0][others], outs["token"][1][others])
    assert not torch.equal(outs["tensor"][0][others], outs["tensor"][1][others])


def test_a_poisoned_tail_of_quantised_rows_stays_out():
    x, weight, _, _ = operands([20, 12, 8], 32, 32, torch.bfloat16)
    offsets = torch.tensor([20, 32], dtype=torch.int32)
    a, m = quantize_nvfp4(x), quantize_mxfp8(x)
    bad = NVFP4(a.codes.clone(), a.scales.clone(), a.outer.clone())
    bad.outer[32:] = float("nan")
    bad.scales.view(torch.uint8)[32:] = 0x7F  # NaN of E4M3
    worse = MXFP8(m.codes.clone(), m.scales.clone())
    worse.codes.view(torch.uint8)[32:] = 0x7F
    worse.scales[32:] = 255
    b, n = quantize_nvfp4(weight[:2], outer="matrix"), quantize_mxfp8(weight[:2])
    for clean, dirty in (
        (grouped_mm_nvfp4(a, b, offsets), grouped_mm_nvfp4(bad, b, offsets)),
        (grouped_mm_mxfp8(m, n, offsets), grouped_mm_mxfp8(worse, n, offsets)),
    ):
        assert torch.equal(clean, dirty)
        assert torch.equal(dirty[32:], torch.zeros_like(dirty[32:]))


def test_operands_that_do_not_fit_are_refused():
    x, weight, offsets, _ = operands([3, 2], 64, 32, torch.bfloat16)
    a, b = quantize_nvfp4(x), quantize_nvfp4(weight, outer="matrix")
    with pytest.raises(ValueError, match="codes are"):
        grouped_mm_nvfp4(a, quantize_nvfp4(weight[..., :32].contiguous(), outer="matrix"), offsets)
    with pytest.raises(ValueError, match="outer scales are"):
        grouped_mm_nvfp4(a._replace(outer=a.outer[:2]), b, offsets)
    with pytest.raises(ValueError, match="offsets are"):
        grouped_mm_mxfp8(quantize_mxfp8(x), quantize_mxfp8(weight), offsets.long())
    with pytest.raises(ValueError, match="backend is 'fast'"):
        grouped_mm_nvfp4(a, b, offsets, backend="fast")
    if refusal("triton", "cpu"):  # unless this process runs the interpreter
        with pytest.raises(BackendUnavailable, match="triton"):
            grouped_mm_nvfp4(a, b, offsets, backend="triton")
