"""Pack and combine against loops over tokens; what quantising the wire changes, and what it does not."""

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.kernels.dispatch import combine_tokens, pack_tokens
from composer2.kernels.linear import Recipe, expert_linear

E, D, N = 4, 64, 96


def tokens(num_tokens=70, chosen=2, *, seed=0, dtype=torch.bfloat16, width=D):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, width, generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(E, generator=generator)[:chosen] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, chosen, generator=generator)
    w = (torch.randn(E, N, width, generator=generator) / 8).to(dtype)
    return x, ids, weights, w


def to_mxfp8_and_back(x, rule="rceil"):
    """Blocks of 32 along the last axis and a power of two a block, saturating nearest-even E4M3: in float64."""
    blocks = x.double().unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.log2(amax.clamp(min=1e-30))
    exponent = torch.ceil(exponent - math.log2(448)) if rule == "rceil" else torch.floor(exponent) - 8
    scale = torch.where(amax > 0, torch.exp2(exponent), 1.0)
    return ((blocks / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).float().double() * scale).flatten(-2)


@settings(max_examples=25, deadline=None)
@given(num_tokens=st.integers(1, 20), chosen=st.integers(1, 3), wire=st.sampled_from(["native", "bf16", "mxfp8"]),
       dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 99))  # fmt: skip
def test_pack_and_combine_equal_loops(num_tokens, chosen, wire, dtype, seed):
    x, ids, weights, _ = tokens(num_tokens, chosen, seed=seed, dtype=dtype, width=32)
    packed = pack_tokens(x, ids, E, wire=wire)
    pairs = [(t, k) for e in range(E) for t in range(num_tokens) for k in range(chosen) if int(ids[t, k]) == e]
    counts = [sum(int(ids[t, k]) == e for t, k in pairs) for e in range(E)]
    assert packed.token_of_row_R.tolist() == [t for t, _ in pairs]
    assert packed.offsets_E.tolist() == torch.tensor(counts).cumsum(0).tolist()
    assert packed.offsets_E.dtype == torch.int32
    sent = {"native": x, "bf16": x.bfloat16(), "mxfp8": to_mxfp8_and_back(x.bfloat16()).bfloat16()}[wire]
    assert torch.equal(packed.rows_RD, sent[packed.token_of_row_R])
    assert (packed.codes is not None) == (wire == "mxfp8")
    if packed.codes is not None:
        scale = torch.exp2(packed.codes.scales.double() - 127).repeat_interleave(32, dim=-1)
        assert torch.equal(packed.codes.codes.float().double() * scale, packed.rows_RD.double())

    rows = packed.rows_RD.float() * 1.0037  # not on the BF16 grid: what comes back is rounded to it, `native` apart
    out = combine_tokens(rows, packed, weights)
    expected = torch.zeros(num_tokens, 32)
    for (t, k), row in zip(pairs, rows, strict=True):
        expected[t] += weights[t, k] * (row if wire == "native" else row.bfloat16().float())
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def through_experts(x, ids, weights, w, *, wire, recipe):
    """Output, dgrad, wgrad and the gradient of the gate weights of pack -> product -> combine."""
    x, w, weights = (t.clone().requires_grad_() for t in (x, w, weights))
    packed = pack_tokens(x, ids, E, wire=wire, scale=recipe.mxfp8_scale)
    rows = expert_linear(packed.rows_RD, w, packed.offsets_E, wire=packed.codes, recipe=recipe)
    out = combine_tokens(rows, packed, weights)
    generator = torch.Generator().manual_seed(5)
    out.backward(torch.randn(out.shape, generator=generator))
    return out.detach(), x.grad, w.grad, weights.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", ["rceil", "floor"])
@pytest.mark.parametrize("spread", [0.0, 4.0])
def test_quantised_dispatch_changes_only_the_wgrad_of_mxfp8_experts(dtype, scale, spread, capsys):
    """Forward, dgrad and gate gradients are bit-equal. The wgrad equals that of tokens rounded along D, then along
    tokens: computed here in float64, expert by expert.

    E4M3 is a floating format and scales are powers of two, so a second rounding finds nothing to do where no value is
    subnormal or saturated in its first block: with Gaussian tokens and rceil the gap is zero."""
    recipe = Recipe(name="mxfp8", mxfp8_scale=scale)
    x, ids, weights, w = tokens(150)
    x = (x.float() * (spread * torch.randn(x.shape, generator=torch.Generator().manual_seed(8))).exp()).bfloat16()
    x, w = x.to(dtype), w.to(dtype)
    plain = through_experts(x, ids, weights, w, wire="bf16", recipe=recipe)
    wired = through_experts(x, ids, weights, w, wire="mxfp8", recipe=recipe)
    for name, before, after in zip(("out", "dgrad", "wgrad", "gate"), plain, wired, strict=True):
        assert torch.equal(before, after) or name == "wgrad", name
    expected = double_rounding_wgrad(x, ids, weights, scale)
    close = {"rtol": 2**-8 if dtype == torch.bfloat16 else 1e-5, "atol": 2e-6 * float(expected.abs().max())}
    torch.testing.assert_close(wired[2].double(), expected, **close)
    exact = exact_wgrad(x, ids, weights)
    errors = [float((grad.double() - exact).norm() / exact.norm()) for grad in (plain[2], wired[2])]
    gap = float((wired[2].double() - plain[2].double()).norm() / plain[2].double().norm())
    with capsys.disabled():
        line = f"wgrad {dtype} {scale} spread {spread}: apart {gap:.2e}, error {errors[0]:.4f} -> {errors[1]:.4f}"
        sys.stdout.write("\n" + line)
    assert (gap == 0) == (spread == 0 and scale == "rceil")
    assert gap < 0.05
    assert errors[1] < errors[0] + 0.03


def row_gradients(ids, weights, token_of_row, order):
    """What arrives at the rows: the gradient of the token, weighed, as BF16."""
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn(len(ids), N, generator=generator)
    return (grad[token_of_row] * weights.flatten()[order][:, None]).bfloat16()


def sorted_pairs(ids):
    pairs = [(int(ids[t, k]), t, k) for t in range(len(ids)) for k in range(ids.shape[1])]
    pairs.sort(key=lambda pair: pair[0])
    return pairs


def double_rounding_wgrad(x, ids, weights, rule):
    """Tokens rounded along D, then gradients and tokens rounded along the expert's tokens, then float64 products."""
    seen = to_mxfp8_and_back(x.bfloat16(), rule)
    return wgrad_by_expert(seen, ids, weights, lambda t: to_mxfp8_and_back(padded(t).T, rule).T)


def exact_wgrad(x, ids, weights):
    return wgrad_by_expert(x.double(), ids, weights, lambda t: t)


def padded(t):
    return torch.nn.functional.pad(t, (0, 0, 0, -len(t) % 32))


def wgrad_by_expert(seen, ids, weights, rounding):
    pairs = sorted_pairs(ids)
    token_of_row = torch.tensor([t for _, t, _ in pairs])
    order = torch.tensor([t * ids.shape[1] + k for _, t, k in pairs])
    grads = row_gradients(ids, weights, token_of_row, order).double()
    expert = torch.tensor([e for e, _, _ in pairs])
    return torch.stack([rounding(grads[expert == e]).T @ rounding(seen[token_of_row][expert == e]) for e in range(E)])


def test_before_an_nvfp4_forward_the_wire_costs_accuracy(capsys):
    """A value is rounded twice, to E4M3 and to E2M1: measured, and bounded on both sides."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 256, generator=generator).bfloat16()
    ids = torch.randint(0, E, (512, 1), generator=generator)
    w = (torch.randn(E, 128, 256, generator=generator) / 16).bfloat16()
    exact = torch.stack([w[int(e)].double() @ row.double() for e, row in zip(ids, x, strict=True)])
    errors = {}
    for wire in ("bf16", "mxfp8"):
        packed = pack_tokens(x, ids, E, wire=wire)
        rows = expert_linear(packed.rows_RD, w, packed.offsets_E, wire=packed.codes, recipe=Recipe(name="nvfp4"))
        out = combine_tokens(rows, packed, torch.ones(512, 1)).double()
        errors[wire] = float((out - exact).norm() / exact.norm())
    with capsys.disabled():
        sys.stdout.write(f"\nNVFP4 forward error {errors['bf16']:.4f} from BF16, {errors['mxfp8']:.4f} from MXFP8")
    assert errors["bf16"] < errors["mxfp8"] < 1.1 * errors["bf16"]


def test_default_wire_is_the_plain_permutation():
    x, ids, weights, _ = tokens(dtype=torch.float32)
    x.requires_grad_()
    packed = pack_tokens(x, ids, E)
    assert packed.rows_RD.dtype == torch.float32
    combine_tokens(packed.rows_RD, packed, weights).sum().backward()
    torch.testing.assert_close(x.grad, weights.sum(1, keepdim=True).expand(-1, D))


def test_misfits_are_refused():
    x, ids, weights, _ = tokens()
    with pytest.raises(ValueError, match="wire is 'fp8'"):
        pack_tokens(x, ids, E, wire="fp8")
    with pytest.raises(ValueError, match="expert_ids reach 3"):
        pack_tokens(x, ids, 2)
    with pytest.raises(ValueError, match="tokens are"):
        pack_tokens(x[:5], ids, E)
    with pytest.raises(ValueError, match="48"):
        pack_tokens(x[:, :48], ids, E, wire="mxfp8")
    packed = pack_tokens(x, ids, E)
    with pytest.raises(ValueError, match="rows and weights"):
        combine_tokens(packed.rows_RD[:-1], packed, weights)
