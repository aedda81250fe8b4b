"""Attention cores behind the `attend` seam against the plain twin, at the widths of DeepSeek-V3: QK 192, V 128."""

import pytest
import torch
import torch.nn.functional as F

from composer2.kernels.backend import BackendUnavailable
from composer2.model.attend_flex import flex_attend
from composer2.model.attention import LatentAttention, document_mask, reference_attend, sdpa_attend
from composer2.model.config import ModelConfig
from composer2.model.layers import rope_tables

QK, V, HEADS, SCALE = 192, 128, 2, 192**-0.5
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def operands(dtype, length=33, seed=0):
    """Query, key and value [B, H, T, QK]; the value is V wide and padded, as `LatentAttention` hands it over."""
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, 2, HEADS, length, QK, generator=generator, dtype=torch.float64).to(dtype)
    value = torch.randn(2, HEADS, length, V, generator=generator, dtype=torch.float64).to(dtype)
    return query, key, value


def documents(length=33):
    """Two documents and padding in row 0, one document in row 1."""
    ids = torch.zeros(2, length, dtype=torch.long)
    ids[0, 13:] = 1
    ids[0, 29:] = -1
    return document_mask(ids)


def by_loops(query, key, value, mask):
    """Softmax over the visible keys of each query, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    out = torch.zeros(*query.shape[:3], value.shape[-1], dtype=torch.float64)
    for b in range(len(query)):
        for t in range(query.shape[2]):
            seen = mask[b, 0, t].nonzero().flatten() if mask is not None else torch.arange(t + 1)
            scores = torch.einsum("hd,hsd->hs", query[b, :, t], key[b][:, seen]) * SCALE
            out[b, :, t] = torch.einsum("hs,hsd->hd", scores.softmax(-1), value[b][:, seen])
    return out


def outputs(attend, query, key, value, mask, *, backward=True):
    query, key, value = (t.clone().requires_grad_(backward) for t in (query, key, value))
    out = attend(query, key, F.pad(value, (0, QK - V)), mask, SCALE)[..., :V]
    if not backward:
        return [out]
    generator = torch.Generator().manual_seed(9)
    out.backward(torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype))
    return [out.detach(), query.grad, key.grad, value.grad]


@pytest.mark.parametrize("masked", [False, True])
def test_the_plain_twin_equals_loops_over_queries(masked):
    query, key, value = operands(torch.float64)
    mask = documents() if masked else None
    torch.testing.assert_close(outputs(reference_attend, query, key, value, mask, backward=False)[0],
                               by_loops(query, key, value, mask), rtol=1e-10, atol=1e-10)  # fmt: skip


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_sdpa_equals_the_plain_twin_forward_and_backward(dtype, masked):
    query, key, value = operands(dtype)
    mask = documents() if masked else None
    expected = outputs(reference_attend, *(t.double() for t in (query, key, value)), mask)
    for got, exact in zip(outputs(sdpa_attend, query, key, value, mask), expected, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("masked", [False, True])
def test_flex_forward_equals_the_plain_twin_on_cpu(masked):
    query, key, value = operands(torch.float32)
    mask = documents() if masked else None
    got = outputs(flex_attend, query, key, value, mask, backward=False)[0]
    expected = outputs(reference_attend, *(t.double() for t in (query, key, value)), mask, backward=False)[0]
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_flex_with_gradients_on_cpu_is_refused_with_the_reason():
    query, key, value = operands(torch.float32)
    with pytest.raises(BackendUnavailable, match="backward"):
        outputs(flex_attend, query, key, value, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_and_sdpa_on_a_gpu_equal_the_plain_twin(dtype, masked):
    query, key, value = operands(dtype)
    mask = documents() if masked else None
    expected = outputs(reference_attend, *(t.double() for t in (query, key, value)), mask)
    for attend in (sdpa_attend, flex_attend):
        moved = (t.cuda() for t in (query, key, value))
        found = outputs(attend, *moved, None if mask is None else mask.cuda())
        for got, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(got.double().cpu(), exact, rtol=5e-2, atol=3e-2)


def test_latent_attention_at_the_deepseek_widths():
    """The layer with SDPA equals the layer with the plain twin: output, input gradient, every weight's gradient."""
    config = ModelConfig(
        hidden_size=64, num_attention_heads=HEADS, kv_lora_rank=48, q_lora_rank=32, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=V,
    )  # fmt: skip
    found = []
    for attend in (reference_attend, sdpa_attend):
        generator = torch.Generator().manual_seed(2)
        layer = LatentAttention(config, attend).double()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
        x = torch.randn(2, 33, 64, generator=generator, dtype=torch.float64, requires_grad=True)
        positions = torch.arange(33).expand(2, -1)
        out = layer(x, rope_tables(positions, config, torch.float64), documents())
        (out * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum().backward()
        found.append([out, x.grad, *(p.grad for p in layer.parameters())])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
