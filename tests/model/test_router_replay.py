"""Replaying recorded experts and the plausibility filter, against plain Python."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.model.config import ModelConfig
from composer2.model.router_replay import ReplayConfig, check_routes, replay_selection
from composer2.model.transformer import Transformer, init_weights

CONFIG = ModelConfig(vocab_size=40, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, kv_lora_rank=8)


def build(seed=0):
    model = Transformer(CONFIG)
    init_weights(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10)
    return model


def filter_by_hand(scores, ranking, recorded, tau):
    """Set of experts after the filter, and how many were dropped."""
    chosen = len(recorded)
    order = sorted(range(len(scores)), key=lambda e: -ranking[e])
    own = order[:chosen]
    if recorded[0] < 0:
        return set(own), 0
    floor = tau * min(scores[e] for e in own)
    kept = [e for e in recorded if scores[e] >= floor]
    refill = [e for e in order if e not in kept]
    return set(kept + refill[: chosen - len(kept)]), chosen - len(kept)


@settings(max_examples=80, deadline=None)
@given(
    experts=st.integers(4, 9),
    chosen=st.integers(1, 4),
    tau=st.floats(0, 0.999),
    limited=st.booleans(),
    seed=st.integers(0, 9999),
)
def test_filter_equals_plain_python(experts, chosen, tau, limited, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(6, experts, generator=generator, dtype=torch.float64)
    ranking = scores + 0.5 * torch.randn(experts, generator=generator, dtype=torch.float64)
    if limited and experts - chosen >= 1:
        ranking[:, 0] = float("-inf")
    own = ranking.topk(chosen, dim=1).indices
    routes = torch.stack([torch.randperm(experts, generator=generator)[:chosen] for _ in range(6)])
    routes[2] = -1
    selection = replay_selection(scores, ranking, own, routes, tau)
    for token in range(6):
        recorded = routes[token].tolist()
        expected, dropped = filter_by_hand(scores[token].tolist(), ranking[token].tolist(), recorded, tau)
        assert set(selection.expert_ids_TK[token].tolist()) == expected
        assert int(selection.replaced_T[token]) == dropped
        differs = recorded[0] >= 0 and set(recorded) != set(own[token].tolist())
        assert bool(selection.differs_T[token]) == differs


def test_replaying_the_own_choice_changes_nothing():
    model = build()
    tokens = torch.arange(14).view(2, 7)
    free = model(tokens)
    replayed = model(tokens, routes_BTLK=free.routing.expert_ids_BTLK, replay=ReplayConfig(tau=0.5))
    assert torch.equal(replayed.logits_BTV, free.logits_BTV)
    routing = replayed.routing
    assert (int(routing.num_replayed), int(routing.num_free), int(routing.num_replaced)) == (2 * 7 * 3, 0, 0)
    assert (int(routing.num_tokens), int(routing.num_tokens_differing)) == (14, 0)


def test_rows_of_minus_one_route_freely_and_are_counted_without_padding():
    model = build()
    tokens = torch.arange(7)[None]
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, -1]])
    free = model(tokens, document_ids_BT=documents)
    routes = (free.routing.expert_ids_BTLK + 1) % 8
    routes[:, 2:] = -1
    out = model(tokens, document_ids_BT=documents, routes_BTLK=routes)
    assert torch.equal(out.routing.expert_ids_BTLK[:, :2], routes[:, :2])
    torch.testing.assert_close(out.logits_BTV[:, 3:], free.logits_BTV[:, 3:], rtol=1e-5, atol=1e-5)
    assert (out.logits_BTV - free.logits_BTV)[:, 0].abs().max().item() > 1e-2
    routing = out.routing
    assert (int(routing.num_replayed), int(routing.num_free)) == (2 * 3, 4 * 3)
    assert (int(routing.num_tokens), int(routing.num_tokens_differing)) == (6, 2)
    assert routing.tokens_per_expert_LE.sum(1).tolist() == [12, 12, 12]


def test_filter_in_the_model_refills_from_the_own_choice():
    """With K = 2 and tau near 1, an implausible recorded expert gives way to the router's own."""
    model = build()
    tokens = torch.arange(9)[None]
    own = model(tokens).routing.expert_ids_BTLK[0, :, 0].long()
    layer = model.moe_layers()[0]
    seen = []
    original_scores = layer.gate.scores
    layer.gate.scores = lambda x: seen.append(original_scores(x)) or seen[-1]
    model(tokens)
    scores = seen[0]
    worst = scores.argmin(dim=1)
    routes = torch.full((1, 9, 3, 2), -1)
    routes[0, :, 0] = torch.stack((own[:, 0], worst), dim=1)
    out = model(tokens, routes_BTLK=routes, replay=ReplayConfig(tau=0.999))
    assert int(out.routing.num_replaced) == 9
    assert out.routing.expert_ids_BTLK[0, :, 0].sort().values.tolist() == own.sort().values.tolist()
    out = model(tokens, routes_BTLK=routes)
    assert int(out.routing.num_replaced) == 0


def test_replay_leaves_a_dense_model_alone():
    """Its routes have no layer, as the sampler records them."""
    model = Transformer(replace(CONFIG, first_k_dense_replace=CONFIG.num_hidden_layers))
    init_weights(model, 0)
    tokens = torch.arange(12).reshape(2, 6)
    routes = torch.zeros(2, 6, 0, CONFIG.num_experts_per_tok, dtype=torch.int64)
    out = model(tokens, routes_BTLK=routes, replay=ReplayConfig(tau=0.5))
    assert torch.equal(out.logits_BTV, model(tokens).logits_BTV)
    assert int(out.routing.num_replayed) == int(out.routing.num_free) == 0


def test_tau_is_checked():
    with pytest.raises(ValueError, match="tau is 1, accepted"):
        ReplayConfig(tau=1)


def test_routes_that_do_not_fit_are_refused():
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    good = torch.tensor([0, 1]).expand(1, 4, 3, 2).to(torch.int16)
    assert check_routes(good, tokens, CONFIG).dtype == torch.int64
    for routes, message in (
        (good[:, :3], "shape"),
        (good[:, :, :2], "shape"),
        (good[..., :1], "shape"),
        (good[0], "shape"),
        (good.float(), "dtype"),
        (torch.tensor([0, 8]).expand(1, 4, 3, 2), "ids 0 .. 8"),
        (torch.tensor([0, -2]).expand(1, 4, 3, 2), "ids -2 .. 0"),
        (torch.tensor([0, -1]).expand(1, 4, 3, 2), "-1 in part"),
        (torch.tensor([5, 5]).expand(1, 4, 3, 2), "twice"),
    ):
        with pytest.raises(ValueError, match=message):
            check_routes(routes, tokens, CONFIG)
