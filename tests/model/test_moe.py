"""Routing and experts against plain Python loops over tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.model.config import ModelConfig
from composer2.model.moe import MoE, Router


def randomise(module, seed, std=1.0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std)
        for name, buffer in module.named_buffers():
            assert name.endswith("e_score_correction_bias")
            buffer.copy_(torch.randn(buffer.shape, generator=generator, dtype=torch.float64) * 0.3)
    return generator


def choose_by_hand(logits, bias, config):
    """Ids (as a set) and gate weights (as a dict) of one token, with lists and loops only."""
    if config.scoring_func == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    ranked = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // config.n_group
    groups = [range(g * size, (g + 1) * size) for g in range(config.n_group)]
    strength = [sum(sorted((ranked[e] for e in group), reverse=True)[:2]) for group in groups]
    best = sorted(range(config.n_group), key=lambda g: -strength[g])[: config.topk_group]
    allowed = [e for g in best for e in groups[g]]
    chosen = sorted(allowed, key=lambda e: -ranked[e])[: config.num_experts_per_tok]
    norm = sum(scores[e] for e in chosen) if config.norm_topk_prob else 1.0
    return {e: scores[e] / norm * config.routed_scaling_factor for e in chosen}


@settings(max_examples=40, deadline=None)
@given(
    groups=st.sampled_from([(1, 1), (2, 1), (4, 2), (8, 8), (8, 3)]),
    chosen=st.integers(1, 2),
    scoring=st.sampled_from(["sigmoid", "softmax"]),
    norm=st.booleans(),
    seed=st.integers(0, 999),
)
def test_routing_equals_lists_and_loops(groups, chosen, scoring, norm, seed):
    config = ModelConfig(
        hidden_size=6,
        n_routed_experts=8,
        n_group=groups[0],
        topk_group=groups[1],
        num_experts_per_tok=chosen,
        scoring_func=scoring,
        norm_topk_prob=norm,
        routed_scaling_factor=2.5,
    )
    router = Router(config).double()
    generator = randomise(router, seed)
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    selection, weights = router(x)
    for token in range(5):
        logits = (router.weight @ x[token]).tolist()
        expected = choose_by_hand(logits, router.e_score_correction_bias.tolist(), config)
        found = dict(zip(selection.expert_ids_TK[token].tolist(), weights[token].tolist(), strict=True))
        assert found.keys() == expected.keys()
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("shared", [0, 2])
def test_layer_equals_a_loop_over_tokens(backend, shared):
    config = ModelConfig(hidden_size=8, moe_intermediate_size=12, n_shared_experts=shared, routed_scaling_factor=1.7)
    layer = MoE(config, backend)
    generator = randomise(layer, 0, std=0.5)
    x = torch.randn(2, 9, 8, generator=generator)
    out, selection = layer(x)
    _, weights = layer.gate(x.flatten(0, 1))
    for token, vector in enumerate(x.flatten(0, 1)):
        expected = torch.zeros(8)
        for expert, weight in zip(selection.expert_ids_TK[token].tolist(), weights[token], strict=True):
            gate, up = (layer.experts.gate_up_proj[expert] @ vector).split(12)
            expected += weight * (layer.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
        if shared:
            expected += layer.shared_experts(vector)
        torch.testing.assert_close(out.flatten(0, 1)[token], expected, rtol=1e-4, atol=1e-5)


def test_router_stays_in_float32_under_autocast():
    router = Router(ModelConfig(hidden_size=16))
    generator = randomise(router, 0)
    x = torch.randn(40, 16, generator=generator)
    plain = router.scores(x)
    with torch.autocast("cpu", torch.bfloat16):
        scores = router.scores(x)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, plain)


def test_experts_compute_in_the_autocast_dtype():
    layer = MoE(ModelConfig(hidden_size=16, moe_intermediate_size=16))
    generator = randomise(layer, 0, std=0.3)
    x = torch.randn(1, 20, 16, generator=generator)
    plain, _ = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = layer(x)
    assert out.dtype == torch.float32
    assert not torch.equal(out, plain)
    torch.testing.assert_close(out, plain, rtol=0.05, atol=0.05)


def test_bias_moves_against_the_load():
    router = Router(ModelConfig(n_routed_experts=4))
    router.update_bias(torch.tensor([10, 0, 4, 2]), rate=0.1)  # mean 4: signs -1, +1, 0, +1, their mean 1/4
    assert router.e_score_correction_bias.tolist() == pytest.approx([-0.125, 0.075, -0.025, 0.075])


def test_no_token_at_all():
    layer = MoE(ModelConfig(hidden_size=8, moe_intermediate_size=8))
    out, selection = layer(torch.zeros(1, 0, 8))
    assert out.shape == (1, 0, 8)
    assert selection.expert_ids_TK.shape == (0, 2)
