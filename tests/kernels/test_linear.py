"""The expert product of every recipe: torchao's emulated grouped backward bit for bit, float64 products of values
quantised by other libraries, and the stated error against the unquantised product."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.kernels.formats import MXFP8
from composer2.kernels.linear import RECIPES, Recipe, expert_linear
from composer2.kernels.mxfp8 import quantize_mxfp8

COUNTS = [30, 67, 0, 159, 34]

GRADIENT_BOUND = {
    # forward, dgrad, wgrad: relative Frobenius error against float64, Gaussian operands
    "bf16": (0.005, 0.005, 0.005),
    "mxfp8": (0.045, 0.045, 0.045),
    "nvfp4": (0.15, 0.045, 0.045),
    "nvfp4-tensor": (0.15, 0.045, 0.045),
}


def operands(counts, width_in, width_out, *, seed=0, tail=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    rows = sum(counts) + tail
    x = torch.randn(rows, width_in, generator=generator).to(dtype)
    w = (torch.randn(len(counts), width_out, width_in, generator=generator) / width_in**0.5).to(dtype)
    grad = torch.randn(rows, width_out, generator=generator).to(dtype)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    return x, w, grad, offsets


def forward_and_gradients(x, w, grad, offsets, recipe, **options):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    out = expert_linear(x, w, offsets, recipe=recipe, **options)
    out.backward(grad)
    return out.detach(), x.grad, w.grad


def plain(x, w, grad, offsets):
    """The unquantised product and its gradients in float64, one expert at a time."""
    x, w, grad = x.double(), w.double(), grad.double()
    out, dx, dw = x.new_zeros(len(x), w.shape[1]), torch.zeros_like(x), torch.zeros_like(w)
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        rows = slice(start, end)
        out[rows] = x[rows] @ w[expert].T
        dx[rows] = grad[rows] @ w[expert]
        dw[expert] = grad[rows].T @ x[rows]
        start = end
    return out, dx, dw


def relative(got, expected):
    return float((got.double() - expected).norm() / expected.norm())


# ---------------------------------------------------------------------------------------------------------------------
# Oracles


@pytest.mark.parametrize("scale", ["rceil", "floor"])
def test_mxfp8_equals_torchao_emulated_bit_for_bit(scale):
    """Forward, dgrad (blocks along N) and wgrad (blocks along an expert's tokens, padded)."""
    from torchao.prototype.moe_training import mxfp8_grouped_mm as theirs
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common import KernelPreference

    assert theirs
    x, w, grad, offsets = operands(COUNTS, 128, 96)
    out, dx, dw = forward_and_gradients(x, w, grad, offsets, Recipe(name="mxfp8", mxfp8_scale=scale))
    x.requires_grad_()
    w.requires_grad_()
    expected = _to_mxfp8_then_scaled_grouped_mm(
        x,
        w.transpose(-2, -1),
        offsets,
        kernel_preference=KernelPreference.EMULATED,
        scale_calculation_mode=ScaleCalculationMode[scale.upper()],
        pad_token_groups_for_grouped_mm=True,
    )
    expected.backward(grad)
    assert torch.equal(out, expected)
    assert torch.equal(dx, x.grad)
    assert torch.equal(dw, w.grad)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "nvfp4-tensor"])
def test_backward_of_every_recipe_is_the_mxfp8_one(name):
    """The backward of an NVFP4 forward is quantised from the BF16 operands, and so equals that of `mxfp8`."""
    x, w, grad, offsets = operands([33, 7, 0, 88], 64, 96)
    _, dx, dw = forward_and_gradients(x, w, grad, offsets, Recipe(name=name))
    _, expected_dx, expected_dw = forward_and_gradients(x, w, grad, offsets, Recipe(name="mxfp8"))
    assert torch.equal(dx, expected_dx)
    assert torch.equal(dw, expected_dw)


def test_dgrad_equals_a_float64_product_of_values_torchao_quantised():
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    def values(t):
        scales, codes = to_mx(t.contiguous(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
        scale = torch.exp2(scales.view(torch.uint8).double() - 127).repeat_interleave(32, dim=-1)
        return codes.float().double() * scale.view(codes.shape)

    x, w, grad, offsets = operands([20, 0, 50], 64, 96)
    _, dx, _ = forward_and_gradients(x.float(), w.float(), grad.float(), offsets, Recipe(name="nvfp4"))
    rows, matrices = values(grad), values(w.transpose(1, 2))
    experts = [0] * 20 + [2] * 50
    expected = torch.stack([matrices[e] @ rows[i] for i, e in enumerate(experts)])
    torch.testing.assert_close(dx.double(), expected, rtol=1e-5, atol=1e-6)


def test_nvfp4_forward_equals_a_product_of_values_decoded_by_table():
    """Codes, scales and outer scales computed here, in float64, from the definition of the exact order."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)

    def to_e2m1(v):
        low = torch.searchsorted(grid, v.abs().clamp(max=6), right=True) - 1
        high = (low + 1).clamp(max=7)
        middle = (grid[low] + grid[high]) / 2
        up = (v.abs() > middle) | ((v.abs() == middle) & (low % 2 == 1))
        return torch.where(up, grid[high], grid[low]) * v.sign()

    def values(t, outer_amax):
        blocks = t.double().unflatten(-1, (-1, 16))
        amax = blocks.abs().amax(-1, keepdim=True)
        outer = outer_amax.double().unsqueeze(-1)
        scale = (448 * amax / outer).float().to(torch.float8_e4m3fn).float().double()
        return (to_e2m1(2688 * blocks / (scale * outer)) * scale * outer / 2688).flatten(-2)

    x, w, _, offsets = operands([5, 0, 11], 64, 48)
    out = expert_linear(x.float(), w.float(), offsets, recipe=Recipe(name="nvfp4"))
    rows = values(x, x.abs().amax(-1, keepdim=True))
    matrices = values(w, w.abs().amax((-2, -1), keepdim=True))
    expected = torch.stack([matrices[e] @ rows[i] for i, e in enumerate([0] * 5 + [2] * 11)])
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_error_against_the_unquantised_product_is_bounded(name, dtype, capsys):
    x, w, grad, offsets = operands([256, 64, 0, 512, 192], 256, 128, dtype=dtype)
    got = forward_and_gradients(x, w, grad, offsets, Recipe(name=name))
    assert [part.dtype for part in got] == [dtype] * 3
    errors = [relative(ours, exact) for ours, exact in zip(got, plain(x, w, grad, offsets), strict=True)]
    with capsys.disabled():
        sys.stdout.write(f"\n{name} {dtype}: relative error " + ", ".join(f"{e:.4f}" for e in errors))
    assert all(error <= bound for error, bound in zip(errors, GRADIENT_BOUND[name], strict=True))
    if name == "nvfp4":
        assert errors[0] > 0.08  # four-bit values cannot do better: a smaller error means that nothing was quantised


@pytest.mark.parametrize("name", RECIPES)
def test_gradient_is_a_descent_direction_by_finite_differences(name):
    """Along the gradient of a smooth loss of the unquantised product the loss changes as the gradient says, to 5 %."""
    x, w, target, offsets = operands([40, 24], 64, 32, dtype=torch.float32)
    x, w = x.requires_grad_(), w.requires_grad_()
    out = expert_linear(x, w, offsets, recipe=Recipe(name=name))
    ((out - target) ** 2).mean().backward()

    def loss(step):
        moved = plain(x.detach() - step * x.grad, w.detach() - step * w.grad, target, offsets)[0]
        return float(((moved - target.double()) ** 2).mean())

    slope = (loss(1e-3) - loss(-1e-3)) / 2e-3
    size = float((x.grad.double() ** 2).sum() + (w.grad.double() ** 2).sum())
    assert slope == pytest.approx(-size, rel=0.05)


# ---------------------------------------------------------------------------------------------------------------------
# Properties


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(RECIPES), counts=st.lists(st.integers(0, 40), min_size=2, max_size=4), seed=st.integers(0, 99)
)
def test_experts_and_rows_do_not_touch_each_other(name, counts, seed):
    """Rows permuted inside an expert permute outputs and dx. Other experts' rows may be anything."""
    x, w, grad, offsets = operands(counts, 32, 32, seed=seed)
    if name == "nvfp4-tensor" or not len(x):
        return
    recipe = Recipe(name=name)
    out, dx, dw = forward_and_gradients(x, w, grad, offsets, recipe)
    order = torch.arange(len(x))
    generator = torch.Generator().manual_seed(seed)
    start = 0
    for end in offsets.tolist():
        order[start:end] = start + torch.randperm(end - start, generator=generator)
        start = end
    out2, dx2, _ = forward_and_gradients(x[order], w, grad[order], offsets, recipe)
    torch.testing.assert_close(out2, out[order], rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(dx2, dx[order], rtol=2**-7, atol=1e-5)

    first = int(offsets[0])
    other_x, other_grad = x.clone(), grad.clone()
    other_x[first:] *= 1000
    other_grad[first:] *= -77
    out3, dx3, dw3 = forward_and_gradients(other_x, w, other_grad, offsets, recipe)
    torch.testing.assert_close(out3[:first], out[:first], rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(dx3[:first], dx[:first], rtol=2**-7, atol=1e-5)
    assert torch.equal(dw3[0], dw[0])


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_poisoned_tail_and_an_expert_without_tokens(name, dtype):
    x, w, grad, offsets = operands([20, 0, 12], 32, 64, tail=32, dtype=dtype)
    clean = forward_and_gradients(x[:32], w, grad[:32], offsets, Recipe(name=name))
    x[32:] = float("nan")
    grad[32:] = float("nan")
    out, dx, dw = forward_and_gradients(x, w, grad, offsets, Recipe(name=name))
    assert torch.equal(out[:32], clean[0])
    assert torch.equal(dx[:32], clean[1])
    assert torch.equal(dw, clean[2])
    assert torch.equal(out[32:], torch.zeros_like(out[32:]))
    assert torch.equal(dx[32:], torch.zeros_like(dx[32:]))
    assert torch.equal(dw[1], torch.zeros_like(dw[1]))


@pytest.mark.parametrize("name", RECIPES)
def test_no_rows_at_all(name):
    x, w, grad, offsets = operands([0, 0], 32, 32)
    out, dx, dw = forward_and_gradients(x, w, grad, offsets, Recipe(name=name))
    assert out.shape == (0, 32)
    assert dx.shape == (0, 32)
    assert torch.equal(dw, torch.zeros_like(w))


def test_a_trainer_in_fp32_and_a_sampler_in_bf16_multiply_the_same_codes():
    """Master weights in FP32 and their BF16 copy give the same product, rounded once more in BF16."""
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(2, 64, 32, generator=generator)
    x = torch.randn(24, 32, generator=generator).bfloat16()
    offsets = torch.tensor([10, 24], dtype=torch.int32)
    for name in ("nvfp4", "nvfp4-tensor"):
        trainer = expert_linear(x.float(), master, offsets, recipe=Recipe(name=name))
        sampler = expert_linear(x, master.bfloat16(), offsets, recipe=Recipe(name=name))
        assert torch.equal(trainer.bfloat16(), sampler)


def test_gate_and_up_share_one_outer_scale():
    """Fault 62 (vllm#54974): halves of scale 1 and 8, fused and apart, each within its own quantisation error."""
    x, w, _, offsets = operands([24, 16], 64, 64)
    w = torch.cat((w, 8 * w.flip(1)), dim=1)
    fused = expert_linear(x, w, offsets, recipe=Recipe(name="nvfp4")).double()
    exact = plain(x, w, torch.zeros(40, 128), offsets)[0]
    for half in (slice(0, 64), slice(64, 128)):
        apart = expert_linear(x, w[:, half].contiguous(), offsets, recipe=Recipe(name="nvfp4")).double()
        assert relative(fused[:, half], exact[:, half]) < 0.15
        assert relative(apart, exact[:, half]) < 0.15


def test_per_token_is_per_token_and_a_missing_or_unknown_name_raises():
    """NeMo RL#3566: a per-token rollout was accepted while the trainer stayed per-tensor."""
    x, w, _, offsets = operands([24], 64, 32)
    louder = x.clone()
    louder[1] *= 4.1
    out = {}
    for name in ("nvfp4", "nvfp4-tensor"):
        out[name] = [expert_linear(rows, w, offsets, recipe=Recipe(name=name))[2:] for rows in (x, louder)]
    assert torch.equal(*out["nvfp4"])
    assert not torch.equal(*out["nvfp4-tensor"])
    for wrong in ({"name": "nvfp4-token"}, {"order": "fast"}, {"mxfp8_scale": "nearest"}):
        with pytest.raises(ValueError, match=f"Recipe.{next(iter(wrong))}"):
            Recipe(**wrong)
    with pytest.raises(TypeError, match="recipe"):
        expert_linear(x, w, offsets)


def test_bad_operands_are_refused():
    x, w, _, offsets = operands([3, 2], 48, 32)
    with pytest.raises(ValueError, match="48"):
        expert_linear(x, w, offsets, recipe=Recipe(name="mxfp8"))
    x48, w48, _, _ = operands([3, 2], 32, 48)
    expert_linear(x48, w48, offsets, recipe=Recipe(name="nvfp4"))
    with pytest.raises(ValueError, match="N a multiple of 32"):
        expert_linear(x48.requires_grad_(), w48, offsets, recipe=Recipe(name="nvfp4"))
    with pytest.raises(ValueError, match="float64"):
        expert_linear(x.double(), w, offsets, recipe=Recipe())
    with pytest.raises(ValueError, match="operands are"):
        expert_linear(x[:, :32], w, offsets, recipe=Recipe())
    with pytest.raises(ValueError, match="offsets end at 6"):
        expert_linear(x, w, offsets + 1, recipe=Recipe())


def test_codes_that_arrive_quantised_are_used_as_they_are():
    x, w, grad, offsets = operands([20, 12], 64, 32)
    codes = quantize_mxfp8(x)
    w.requires_grad_()
    out = expert_linear(codes, w, offsets, recipe=Recipe(name="mxfp8"))
    assert torch.equal(out, expert_linear(x, w, offsets, recipe=Recipe(name="mxfp8")))
    other = MXFP8(codes.codes, codes.scales + 1)
    assert torch.equal(expert_linear(other, w, offsets, recipe=Recipe(name="mxfp8")), 2 * out)
    out.backward(grad)
    assert w.grad.isfinite().all()
