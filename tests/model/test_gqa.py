"""Grouped-query attention: windows and sinks by hand, the cache against the full forward, partial rotary positions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.model.attention import document_mask, reference_attend, sdpa_attend
from composer2.model.config import ModelConfig, YarnConfig
from composer2.model.gqa import GroupedQueryAttention, window_mask
from composer2.model.layers import apply_rope_half, rope_frequencies, rope_tables
from composer2.model.transformer import Transformer, init_weights

SMALL = {
    "vocab_size": 48,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "attention": "grouped",
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
}


def build(**changes):
    model = Transformer(ModelConfig(**{**SMALL, **changes}))
    init_weights(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model.double()


def test_window_mask_by_hand():
    config = ModelConfig(attention="grouped", sliding_window=2, num_sink_tokens=1)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    mask = window_mask(document_mask(documents), positions, config)
    expected = [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 1],
    ]
    assert mask[0, 0].int().tolist() == expected
    assert torch.equal(window_mask(None, positions[:, :4], config)[0, 0], mask[0, 0, :4, :4])
    assert window_mask(None, positions, ModelConfig()) is None


@pytest.mark.parametrize(("every", "windowed"), [(1, []), (2, [0, 2]), (4, [0, 1, 2]), (0, [0, 1, 2, 3])])
def test_ratio_of_full_layers(every, windowed):
    model = build(sliding_window=3, full_attention_every=every)
    assert [index for index, layer in enumerate(model.layers) if layer.is_windowed] == windowed
    assert not model.mtp[0].block.is_windowed


@settings(max_examples=20, deadline=None)
@given(
    window=st.none() | st.integers(1, 9),
    sinks=st.integers(0, 3),
    every=st.integers(0, 3),
    norm=st.sampled_from(["none", "head", "flat"]),
    rotary=st.sampled_from([None, 2]),
    yarn=st.none() | st.just(YarnConfig(factor=4, original_max_position_embeddings=8)),
    cut=st.integers(1, 18),
)
def test_cached_equals_full(window, sinks, every, norm, rotary, yarn, cut):
    fields = {"sliding_window": window, "num_sink_tokens": sinks, "full_attention_every": every, "qk_norm": norm}
    model = build(**fields, rotary_dim=rotary, rope_scaling=yarn)
    tokens = torch.randint(0, 48, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        full = model(tokens).hidden_BTD
    cache, parts = model.new_cache(4, 24), []
    for start, end in ((0, cut), (cut, cut + 1), (cut + 1, 20)):
        positions = torch.arange(start, end).expand(2, -1)
        slots = torch.tensor([3, 1])
        out = model.forward_cached(tokens[:, start:end], positions, cache=cache, slot_ids_B=slots)
        parts.append(out.hidden_BSD)
    torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [None, 3])
def test_packed_documents_are_separate(window):
    """A document in a packed row gives what it gives alone, MTP included."""
    model = build(sliding_window=window, full_attention_every=2, num_sink_tokens=1, qk_norm="flat")
    tokens = torch.randint(0, 48, (1, 17), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[-1] * 2 + [0] * 7 + [1] * 8])
    with torch.no_grad():
        packed = model(tokens, document_ids_BT=documents)
        mtp = model.mtp_logits(packed.hidden_BTD, tokens, document_ids_BT=documents)[0]
        for first, last in ((2, 9), (9, 17)):
            alone = model(tokens[:, first:last])
            torch.testing.assert_close(packed.hidden_BTD[:, first:last], alone.hidden_BTD)
            theirs = model.mtp_logits(alone.hidden_BTD, tokens[:, first:last])[0]
            torch.testing.assert_close(mtp[:, first : last - 1], theirs[:, :-1])


def test_a_windowed_token_does_not_depend_on_what_it_cannot_see():
    model = build(sliding_window=3, full_attention_every=0, num_sink_tokens=1, num_hidden_layers=1)
    tokens = torch.randint(0, 48, (1, 12), generator=torch.Generator().manual_seed(2))
    reference = model(tokens).hidden_BTD[0, 11]
    for place in range(12):
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 1) % 48
        seen = place == 0 or place > 8
        assert torch.equal(model(changed).hidden_BTD[0, 11], reference) == (not seen)


def test_half_split_rotation_by_hand():
    """Pairs (0, 2) and (1, 3) of a head of five turn; the fifth number stays."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    angles = torch.tensor([0.3, 0.7])
    expected = [
        1 * math.cos(0.3) - 3 * math.sin(0.3),
        2 * math.cos(0.7) - 4 * math.sin(0.7),
        3 * math.cos(0.3) + 1 * math.sin(0.3),
        4 * math.cos(0.7) + 2 * math.sin(0.7),
        5.0,
    ]
    torch.testing.assert_close(apply_rope_half(x, angles.cos(), angles.sin()), torch.tensor(expected))
    config = ModelConfig(attention="grouped", head_dim=8, rotary_dim=4, rope_theta=100.0)
    assert rope_frequencies(config) == pytest.approx([1.0, 0.1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_equals_its_definition(dtype):
    """One head after the other, each query head with the key head it shares."""
    config = ModelConfig(**SMALL, qk_norm="head")
    layer = GroupedQueryAttention(config, sdpa_attend).to(dtype)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 9, 24, generator=generator).to(dtype)
    rope = rope_tables(torch.arange(9)[None], config, dtype)
    with torch.no_grad():
        out = layer(x, rope, None)
        parts = [part.unflatten(-1, (-1, 4)) for part in (layer.q_proj(x), layer.k_proj(x), layer.v_proj(x))]
        heads = []
        for head in range(6):
            query = apply_rope_half(layer.q_norm(parts[0][:, :, head]), *rope).to(dtype)
            key = apply_rope_half(layer.k_norm(parts[1][:, :, head // 3]), *rope).to(dtype)
            value = parts[2][:, :, head // 3]
            heads.append(reference_attend(query[:, None], key[:, None], value[:, None], None, 0.5)[:, 0])
        expected = layer.o_proj(torch.cat(heads, dim=-1))
    bound = (1e-5 if dtype is torch.float32 else 3e-2) * float(expected.abs().max())
    assert float((out - expected).abs().max()) <= bound
