"""Drafts change how fast tokens come, never their distribution (row I5)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.model.config import ModelConfig
from composer2.model.engine.engine import Engine
from composer2.model.engine.sampler import distribution, uniforms
from composer2.model.engine.sequence import Request
from composer2.model.engine.speculative import CHECK, DRAFT, DRAW, probabilities, verify
from composer2.model.transformer import Transformer, init_weights
from composer2.types import Generation, SamplingParams

CONFIG = ModelConfig(
    vocab_size=5,
    hidden_size=16,
    num_hidden_layers=2,
    intermediate_size=16,
    moe_intermediate_size=8,
    n_routed_experts=4,
    num_attention_heads=2,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=4,
    max_position_embeddings=64,
    initializer_range=0.4,
)
MODEL = Transformer(CONFIG)
init_weights(MODEL, 0)
PROMPT = (1, 4, 2, 0, 3, 3)


def make_engine(**kwargs) -> Engine:
    return Engine(MODEL, **({"num_slots": 8, "max_len": 64, "dtype": torch.float64} | kwargs))


def request(session: str, seed: int, token_ids=PROMPT, **params) -> Request:
    return Request(token_ids=tuple(token_ids), session=session, group="g", seed=seed, params=SamplingParams(**params))


def run(engine: Engine, *requests: Request) -> dict[str, Generation]:
    for one in requests:
        engine.submit(one)
    done = {}
    while engine.has_work:
        done |= {finished.session: finished.generation for finished in engine.step()}
    return done


def next_probs(token_ids, **params) -> np.ndarray:
    """What plain sampling draws the next token from, by the training forward."""
    copy = Transformer(CONFIG).double()
    copy.load_state_dict(MODEL.state_dict())
    sampling = SamplingParams(**params)
    with torch.no_grad():
        logits_V = copy(torch.tensor([list(token_ids)])).logits_BTV[0, -1]
    limits = (torch.tensor([x]) for x in (sampling.temperature, sampling.top_p, sampling.top_k))
    temperature_B, top_p_B, top_k_B = limits
    target = distribution(
        logits_V[None], temperature_B=temperature_B.double(), top_p_B=top_p_B.double(), top_k_B=top_k_B
    )
    return probabilities(target)[0].numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "critical"),
    # p = 0.001: 24 degrees of freedom; with top-k 3 and top-p 0.9 at most 8.
    [({"temperature": 1.0}, 51.2), ({"temperature": 0.7, "top_k": 3, "top_p": 0.9}, 26.1)],
)
def test_pairs_of_tokens_have_the_plain_distribution(params: dict[str, float], critical: float) -> None:
    num_samples, wave = 20_000, 1000
    engine = make_engine(num_slots=wave + 1, max_len=12, dtype=torch.float32, speculative=True)
    run(engine, request("keeper", 0, max_tokens=1))  # lends its prompt to all others
    counts = np.zeros((5, 5))
    for start in range(0, num_samples, wave):
        seeds = range(start, start + wave)
        results = run(engine, *(request(f"{s}", s, max_tokens=2, **params) for s in seeds))
        for generation in results.values():
            counts[tuple(generation.token_ids.tolist())] += 1
        for s in seeds:
            engine.release(f"{s}")
    assert counts.sum() == num_samples
    first = next_probs(PROMPT, **params)
    expected = np.stack([first[a] * next_probs([*PROMPT, a], **params) for a in range(5)]) * num_samples
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    assert (((counts - expected) ** 2)[possible] / expected[possible]).sum() < critical


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.3, 1.0, 3.0]), zeros=st.booleans())
def test_the_rule_gives_p_whatever_q_is(seed: int, scale: float, zeros: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.softmax(torch.randn(6, generator=generator, dtype=torch.float64) * scale, -1) for _ in range(2))
    if zeros:
        p[:2], q[1:3] = 0, 0
        p, q = p / p.sum(), q / q.sum()
    num_samples = 20_000
    streams = {s: torch.from_numpy(uniforms(list(range(num_samples)), [seed] * num_samples, s)) for s in (0, 1, 2)}
    drafts = torch.searchsorted(q.cumsum(-1), streams[DRAFT], right=True).clamp_max(5)
    p_BV, q_BV = p.expand(num_samples, -1), q.expand(num_samples, -1)
    tokens, is_taken = verify(p_BV, q_BV, drafts, streams[CHECK], streams[DRAW])
    counts, expected = np.bincount(tokens.numpy(), minlength=6), p.numpy() * num_samples
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    # 25 examples and 5 degrees of freedom: p = 1e-5 each. Rare tokens are left out of the statistic.
    kept &= expected > 5
    assert (((counts - expected) ** 2)[kept] / expected[kept]).sum() < 30.9
    overlap = torch.minimum(p, q).sum().item()
    assert abs(is_taken.double().mean().item() - overlap) < 5 * (0.25 / num_samples) ** 0.5
    assert (tokens[is_taken] == drafts[is_taken]).all()


def test_a_row_without_a_draft_is_a_plain_draw() -> None:
    p = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)
    for u, token in ((0.1, 0), (0.4, 1), (0.9, 2)):
        uniform = torch.tensor([u], dtype=torch.float64)
        tokens, is_taken = verify(p, torch.zeros_like(p), torch.tensor([2]), torch.zeros_like(uniform), uniform)
        assert (tokens.item(), is_taken.item()) == (token, False)


@pytest.mark.parametrize("max_prefill_tokens", [2048, 2])
def test_drafts_come_from_the_mtp_module_over_the_whole_context(max_prefill_tokens: int) -> None:
    """After every step, whether the last draft was taken or not: a wrong cache would only cost acceptance."""
    engine = make_engine(speculative=True, max_prefill_tokens=max_prefill_tokens)
    copy = Transformer(CONFIG).double()
    copy.load_state_dict(MODEL.state_dict())
    for seed in range(3):
        engine.submit(request(f"s{seed}", seed, PROMPT[: 3 + seed], max_tokens=12))
    while engine.has_work:
        engine.step()
        for sequence in engine.scheduler.running:
            tokens_1T = torch.tensor([sequence.token_ids])
            with torch.no_grad():
                logits_1TV = copy.mtp_logits(copy(tokens_1T).hidden_BTD, tokens_1T)[0]
            assert sequence.draft is not None
            torch.testing.assert_close(sequence.draft.probs_V, logits_1TV[0, -2].softmax(-1), rtol=1e-9, atol=1e-9)
    assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens


def test_greedy_tokens_are_those_of_plain_decoding() -> None:
    requests = [request(f"s{i}", i, [*PROMPT[: 1 + i], i % 5], temperature=0.0, max_tokens=30) for i in range(5)]
    drafting = make_engine(speculative=True)
    fast, plain = run(drafting, *requests), run(make_engine(), *requests)
    for name, generation in plain.items():
        assert fast[name].token_ids.tolist() == generation.token_ids.tolist()
        assert np.allclose(fast[name].logprobs, generation.logprobs, atol=1e-6)
        assert np.array_equal(fast[name].routes, generation.routes)
    assert 0 < drafting.stats.accepted_tokens < drafting.stats.drafted_tokens


@pytest.mark.parametrize("page_size", [None, 4])
def test_same_seed_same_tokens_whatever_the_neighbours_and_turns(page_size: int | None) -> None:
    wanted = request("me", 7, max_tokens=20)
    alone = run(make_engine(speculative=True), wanted)["me"]
    crowd = [request(f"s{i}", i, [*PROMPT[:3], *[i % 5] * i], max_tokens=9 + i) for i in range(6)]
    engine = make_engine(speculative=True, page_size=page_size)
    together = run(engine, *crowd, wanted)["me"]
    assert together.token_ids.tolist() == alone.token_ids.tolist()
    assert np.array_equal(together.routes, alone.routes)
    turn = request("me", 7, [*PROMPT, *alone.token_ids.tolist(), 1, 2], max_tokens=12)
    assert (
        run(engine, turn)["me"].token_ids.tolist() == run(make_engine(speculative=True), turn)["me"].token_ids.tolist()
    )


def test_log_probs_are_those_of_the_trunk_and_limits_hold() -> None:
    stop = request("a", 3, max_tokens=40, stop_ids=(2,))
    generation = run(make_engine(speculative=True), stop)["a"]
    assert generation.finish_reason == "stop"
    assert generation.token_ids.tolist().index(2) == len(generation.token_ids) - 1
    for seed in range(6):
        long = run(make_engine(speculative=True, max_len=15 + seed), request("a", seed, max_tokens=7))["a"]
        assert long.token_ids.size == 7
        full = run(make_engine(speculative=True, max_len=15), request("a", seed, max_tokens=40))["a"]
        assert (full.token_ids.size, full.finish_reason) == (9, "length")
        whole = [*PROMPT, *full.token_ids.tolist()]
        expected = [np.log(next_probs(whole[:place])[whole[place]]) for place in range(6, 15)]
        assert np.allclose(full.logprobs, expected, atol=1e-6)
        assert (full.routes[:-1] >= 0).all()
