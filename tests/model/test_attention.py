"""Latent attention: the absorbed form equals the expanded one, masks by hand, the core against its plain twin."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.model.attention import LatentAttention, cache_view, document_mask, reference_attend, sdpa_attend
from composer2.model.config import ModelConfig, YarnConfig
from composer2.model.layers import rope_tables


def build(config, dtype, seed):
    layer = LatentAttention(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.1 * draw if parameter.ndim == 1 else draw * parameter.shape[-1] ** -0.5)
    return layer, generator


shapes = st.fixed_dictionaries(
    {
        "num_attention_heads": st.integers(1, 5),
        "q_lora_rank": st.none() | st.integers(1, 9),
        "kv_lora_rank": st.integers(1, 20),
        "qk_nope_head_dim": st.integers(1, 12),
        "qk_rope_head_dim": st.integers(1, 5).map(lambda n: 2 * n),
        "v_head_dim": st.integers(1, 24),
        "hidden_size": st.integers(1, 16),
        "rope_scaling": st.none()
        | st.just(YarnConfig(factor=4, original_max_position_embeddings=8, mscale=0.7, mscale_all_dim=1.0)),
    }
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(max_examples=30, deadline=None)
@given(
    sizes=shapes, batch=st.integers(1, 10), length=st.integers(1, 12), cut=st.integers(0, 12), seed=st.integers(0, 99)
)
def test_absorbed_equals_expanded(dtype, sizes, batch, length, cut, seed):
    config = ModelConfig(**sizes)
    layer, generator = build(config, dtype, seed)
    x = torch.randn(batch, length, config.hidden_size, generator=generator, dtype=torch.float64).to(dtype)
    positions = torch.arange(length)[None].expand(batch, -1)
    cos, sin = rope_tables(positions, config, dtype)
    with torch.no_grad():
        expanded = layer(x, (cos, sin), None)
        cache = torch.zeros(batch, length, config.cache_dim, dtype=dtype)
        parts = []
        for start, end in ((0, min(cut, length)), (min(cut, length), length)):
            if start == end:
                continue
            view = cache_view(positions[:, start:end], cache, torch.arange(batch), dtype)
            rope = cos[:, start:end], sin[:, start:end]
            parts.append(layer.forward_cached(x[:, start:end], rope, cache, view))
    absorbed = torch.cat(parts, dim=1)
    bound = (1e-10 if dtype is torch.float64 else 1e-5) * float(expanded.abs().max())
    assert float((absorbed - expanded).abs().max()) <= bound


def test_document_mask_by_hand():
    mask = document_mask(torch.tensor([[-1, 4, 4, 7, -1]]))[0, 0]
    expected = [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]
    assert mask.int().tolist() == expected


@pytest.mark.parametrize("masked", [False, True])
def test_core_equals_its_plain_twin(masked):
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 3, 7, 10, generator=generator)
    mask = document_mask(torch.tensor([[0, 0, 0, 1, 1, 2, -1], [5] * 7])) if masked else None
    torch.testing.assert_close(
        sdpa_attend(query, key, value, mask, 0.3), reference_attend(query, key, value, mask, 0.3), rtol=1e-5, atol=1e-6
    )
