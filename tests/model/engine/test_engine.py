"""The engine against the plain forward of the same model."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.model.config import ModelConfig
from composer2.model.engine.engine import Engine
from composer2.model.engine.sequence import Finished, Request
from composer2.model.transformer import Transformer, init_weights
from composer2.types import Generation, SamplingParams

CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=3,
    intermediate_size=48,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_attention_heads=2,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    max_position_embeddings=96,
    initializer_range=0.3,
)


def make_model(seed: int = 0) -> Transformer:
    model = Transformer(CONFIG)
    init_weights(model, seed)
    return model


MODEL, OTHER = make_model(0), make_model(1)


def make_engine(*, num_slots: int = 8, max_len: int = 96, dtype=torch.float64, model: Transformer = MODEL, **kwargs):
    return Engine(model, num_slots=num_slots, max_len=max_len, dtype=dtype, **kwargs)


def request(token_ids, session: str, *, group: str = "", seed: int = 0, **params) -> Request:
    return Request(
        token_ids=tuple(token_ids), session=session, group=group or session, seed=seed, params=SamplingParams(**params)
    )


def run(engine: Engine, *requests: Request) -> dict[str, Generation]:
    for one in requests:
        engine.submit(one)
    done: list[Finished] = []
    while engine.has_work:
        done += engine.step()
    return {finished.session: finished.generation for finished in done}


def context(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length).tolist()


def full_forward(model: Transformer, token_ids, temperature: float = 1.0):
    """Log-probs of every token given those before it, and routes, by the training forward in float64."""
    token_ids_T = torch.tensor(list(token_ids))
    copy = Transformer(CONFIG).double()
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        out = copy(token_ids_T[None])
    logprobs_TV = torch.log_softmax(out.logits_BTV[0] / temperature, -1)
    taken = logprobs_TV[:-1].gather(1, token_ids_T[1:, None])[:, 0]
    return taken.numpy(), out.routing.expert_ids_BTLK[0].numpy()


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    temperature=st.sampled_from([0.6, 1.0]),
    max_prefill_tokens=st.sampled_from([7, 64, 2048]),
)
def test_log_probs_and_routes_are_those_of_the_full_forward(seed, lengths, temperature, max_prefill_tokens):
    engine = make_engine(max_prefill_tokens=max_prefill_tokens)
    requests = [
        request(context(seed + i, n), f"s{i}", seed=seed, temperature=temperature, max_tokens=5 + i)
        for i, n in enumerate(lengths)
    ]
    results = run(engine, *requests)
    for one in requests:
        generation = results[one.session]
        whole = [*one.token_ids, *generation.token_ids.tolist()]
        logprobs, routes = full_forward(MODEL, whole, temperature)
        assert np.abs(generation.logprobs - logprobs[len(one.token_ids) - 1 :]).max() <= 1e-6
        assert generation.finish_reason == "length"
        assert generation.routes.shape == (len(whole), CONFIG.num_moe_layers, CONFIG.num_experts_per_tok)
        assert (generation.routes[-1] == -1).all()
        assert (np.sort(generation.routes[:-1], -1) == np.sort(routes[:-1], -1)).all()
        assert generation.policy_versions.tolist() == [0] * generation.token_ids.size


@pytest.mark.parametrize("seed", range(3))
def test_float32_at_the_tiny_preset_is_within_1e_5(seed: int) -> None:
    model = Transformer(ModelConfig())
    init_weights(model, seed)
    engine = make_engine(model=model, dtype=torch.float32, max_len=128)
    requests = [
        request(np.random.default_rng(seed + i).integers(0, 1024, 10 + 20 * i), f"s{i}", max_tokens=20)
        for i in range(4)
    ]
    for i, generation in enumerate(sorted(run(engine, *requests).items())):
        prompt, result = requests[i].token_ids, generation[1]
        token_ids = torch.tensor([[*prompt, *result.token_ids.tolist()]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(token_ids).logits_BTV[0, :-1], -1)
        expected = logprobs.gather(1, token_ids[0, 1:, None])[len(prompt) - 1 :, 0].numpy()
        assert np.abs(result.logprobs - expected).max() <= 1e-5


def test_same_seed_gives_the_same_tokens_alone_and_in_a_crowd() -> None:
    wanted = request(context(5, 20), "me", seed=77, max_tokens=30)
    alone = run(make_engine(), wanted)["me"]
    crowd = [request(context(i, 3 + 4 * i), f"s{i}", seed=i, max_tokens=3 + 5 * i) for i in range(7)]
    engine = make_engine()
    for one in crowd[:4]:
        engine.submit(one)
    engine.step()
    engine.step()
    together = run(engine, *crowd[4:], wanted)["me"]
    assert together.token_ids.tolist() == alone.token_ids.tolist()
    assert np.array_equal(together.routes, alone.routes)
    assert np.allclose(together.logprobs, alone.logprobs, atol=1e-6)
    assert run(make_engine(), request(context(5, 20), "me", seed=78, max_tokens=30))["me"].token_ids.tolist() != (
        alone.token_ids.tolist()
    )


def test_identical_prompts_that_arrive_together_are_prefilled_once() -> None:
    prompt = context(1, 33)
    engine = make_engine()
    group = [request(prompt, f"s{i}", group="g", seed=i, max_tokens=6) for i in range(8)]
    results = run(engine, *group)
    assert engine.stats.prefill_tokens == 32
    assert engine.stats.copied_tokens == 7 * 32
    for i in range(8):
        fresh = run(make_engine(), request(prompt, "x", seed=i, max_tokens=6))["x"]
        assert results[f"s{i}"].token_ids.tolist() == fresh.token_ids.tolist()
        assert np.array_equal(results[f"s{i}"].routes, fresh.routes)
        assert np.allclose(results[f"s{i}"].logprobs, fresh.logprobs, atol=1e-7)


def test_a_late_group_mate_copies_the_common_prefix_and_strangers_do_not() -> None:
    prompt = context(2, 30)
    engine = make_engine()
    run(engine, request(prompt, "a", group="g", max_tokens=4))
    assert engine.stats.prefill_tokens == 29
    late = request([*prompt[:20], 1, 2, 3], "b", group="g", seed=3, max_tokens=4)
    result = run(engine, late)["b"]
    assert engine.stats.copied_tokens == 20
    assert engine.stats.prefill_tokens == 29 + 2
    fresh = run(make_engine(), late)["b"]
    assert result.token_ids.tolist() == fresh.token_ids.tolist()
    run(engine, request(prompt, "c", group="other", max_tokens=1))
    assert engine.stats.copied_tokens == 20


def test_a_session_prefills_only_its_new_tail() -> None:
    engine = make_engine()
    first = request(context(3, 20), "a", max_tokens=5)
    one = run(engine, first)["a"]
    whole = [*first.token_ids, *one.token_ids.tolist(), 7, 8, 9]
    two = run(engine, request(whole, "a", max_tokens=5))["a"]
    # Of 28 tokens 24 were cached and the last one is decoded: 3 remain.
    assert engine.stats.prefill_tokens == 19 + 3
    assert engine.stats.reused_tokens == 24
    fresh = run(make_engine(), request(whole, "a", max_tokens=5))["a"]
    assert two.token_ids.tolist() == fresh.token_ids.tolist()
    assert np.array_equal(two.routes, fresh.routes)


def test_a_changed_context_keeps_its_common_prefix() -> None:
    engine = make_engine()
    prompt = context(4, 20)
    run(engine, request(prompt, "a", max_tokens=5))
    changed = request([*prompt[:10], (prompt[10] + 1) % 40, 5, 6], "a", max_tokens=5)
    result = run(engine, changed)["a"]
    assert engine.stats.reused_tokens == 10
    assert result.token_ids.tolist() == run(make_engine(), changed)["a"].token_ids.tolist()
    again = run(engine, request(prompt[:5], "a", max_tokens=5))["a"]
    fresh = run(make_engine(), request(prompt[:5], "a", max_tokens=5))["a"]
    assert again.token_ids.tolist() == fresh.token_ids.tolist()
    assert np.array_equal(again.routes, fresh.routes)


def test_more_sessions_than_slots_evict_the_idle_one_used_longest_ago() -> None:
    engine = make_engine(num_slots=2)
    prompts = {name: context(ord(name), 12) for name in "abcd"}
    results = run(engine, *(request(prompts[name], name, max_tokens=4) for name in "abcd"))
    assert set(results) == set("abcd")
    assert engine.cache.num_evictions == 2
    assert {slot.session for slot in engine.cache.slots} == {"c", "d"}
    whole = [*prompts["a"], *results["a"].token_ids.tolist(), 3]
    again = run(engine, request(whole, "a", max_tokens=4))["a"]  # evicted: prefilled again
    assert again.token_ids.tolist() == run(make_engine(), request(whole, "a", max_tokens=4))["a"].token_ids.tolist()
    assert {slot.session for slot in engine.cache.slots} == {"a", "d"}


def test_stop_ids_end_a_generation_and_are_part_of_it() -> None:
    free = run(make_engine(), request(context(6, 10), "a", max_tokens=20))["a"].token_ids.tolist()
    stop = free[4]
    cut = run(make_engine(), request(context(6, 10), "a", max_tokens=20, stop_ids=(stop,)))["a"]
    assert cut.token_ids.tolist() == free[: free.index(stop) + 1]
    assert cut.finish_reason == "stop"


def test_the_end_of_the_cache_ends_a_generation() -> None:
    engine = make_engine(max_len=24)
    result = run(engine, request(context(7, 20), "a", max_tokens=20))["a"]
    assert (result.finish_reason, result.token_ids.size, len(result.routes)) == ("length", 4, 24)
    full = run(engine, request(context(8, 24), "b", max_tokens=20))["b"]
    assert (full.finish_reason, full.token_ids.size) == ("length", 0)
    assert (full.routes[:-1] >= 0).all()
    with pytest.raises(ValueError, match=r"25 tokens.*24"):
        engine.submit(request(context(8, 25), "c"))


def test_bad_requests_name_the_field() -> None:
    engine = make_engine()
    wrong: list[dict[str, Any]] = [{"temperature": -1.0}, {"temperature": 1e-40}, {"temperature": float("inf")}]
    wrong += [{"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"top_k": 1.5}, {"top_k": 2**63}, {"max_tokens": 0}]
    for params in wrong:
        with pytest.raises(ValueError, match=next(iter(params))):
            request([1], "a", **params)
    with pytest.raises(ValueError, match="token_ids"):
        request([], "a")
    with pytest.raises(ValueError, match=r"token ids span 1 \.\. 40"):
        engine.submit(request([1, 40], "a"))
    engine.submit(request([1], "a"))
    with pytest.raises(ValueError, match="'a' has a request"):
        engine.submit(request([1], "a"))


def test_token_ids_and_dtype_are_what_they_must_be() -> None:
    with pytest.raises(ValueError, match=r"^Request.token_ids holds 2\.5, accepted are integers"):
        Request(token_ids=(1, 2.5), params=SamplingParams(max_tokens=1), session="s")  # type: ignore[arg-type]
    Request(token_ids=tuple(np.arange(1, 3)), params=SamplingParams(max_tokens=1), session="s")
    with pytest.raises(ValueError, match=r"^dtype is torch.int8, accepted is a floating-point one"):
        make_engine(dtype=torch.int8)


def test_cancel_returns_what_was_sampled() -> None:
    engine = make_engine(num_slots=1)
    running = engine.submit(request(context(9, 10), "a", max_tokens=30))
    waiting = engine.submit(request(context(9, 10), "b", max_tokens=30))
    engine.step()
    engine.step()
    engine.cancel(running)
    engine.cancel(waiting)
    engine.cancel(waiting)
    done = {finished.session: finished.generation for finished in engine.step()}
    assert {name: g.finish_reason for name, g in done.items()} == {"a": "cancelled", "b": "cancelled"}
    assert done["a"].token_ids.size == 2
    assert len(done["a"].routes) == 12
    assert (done["b"].routes == -1).all()
    assert not engine.has_work
    expected = run(make_engine(), request(context(9, 10), "a", max_tokens=2))["a"].token_ids.tolist()
    assert done["a"].token_ids.tolist() == expected


def test_release_frees_the_slot_and_cancels() -> None:
    engine = make_engine(num_slots=2)
    engine.submit(request(context(9, 10), "a", max_tokens=30))
    engine.step()
    engine.release("a")
    engine.release("nobody")
    assert engine.cache.num_free == 2
    assert [finished.generation.finish_reason for finished in engine.step()] == ["cancelled"]


def test_greedy_follows_the_argmax_of_the_full_forward() -> None:
    prompt = context(10, 15)
    result = run(make_engine(), request(prompt, "a", temperature=0.0, max_tokens=6))["a"]
    copy = Transformer(CONFIG).double()
    copy.load_state_dict(MODEL.state_dict())
    for token in result.token_ids.tolist():
        with torch.no_grad():
            assert copy(torch.tensor([prompt])).logits_BTV[0, -1].argmax().item() == token
        prompt = [*prompt, token]


@pytest.mark.parametrize("running_after", [0, 3])
def test_recompute_goes_on_as_if_the_new_weights_had_been_there(running_after: int) -> None:
    prompt = context(11, 20)
    engine = make_engine()
    for i in range(3):
        engine.submit(request(prompt, f"s{i}", group="g", seed=i, max_tokens=8))
    for _ in range(running_after):
        engine.step()
    engine.load_weights(OTHER.state_dict(), 1, "recompute")
    results = run(engine)
    for i in range(3):
        result = results[f"s{i}"]
        whole = [*prompt, *result.token_ids.tolist()]
        logprobs, routes = full_forward(OTHER, whole)
        new = len(prompt) + running_after
        assert np.abs(result.logprobs[running_after:] - logprobs[new - 1 :]).max() <= 1e-5
        assert (np.sort(result.routes[:-1], -1) == np.sort(routes[:-1], -1)).all()
        assert result.policy_versions.tolist() == [0] * running_after + [1] * (8 - running_after)
    assert engine.stats.prefill_tokens >= 19


def test_keep_uses_new_weights_on_the_old_cache() -> None:
    prompt = context(12, 20)
    engine = make_engine()
    engine.submit(request(prompt, "a", max_tokens=8))
    engine.step()
    engine.load_weights(OTHER.state_dict(), 1)
    result = run(engine)["a"]
    assert engine.stats.prefill_tokens == 19
    whole = [*prompt, *result.token_ids.tolist()]
    logprobs, _ = full_forward(OTHER, whole)
    assert np.abs(result.logprobs[1:] - logprobs[len(prompt) :]).max() > 1e-3
    assert result.policy_versions.tolist() == [0] + [1] * 7


def test_weights_that_do_not_fit_change_nothing() -> None:
    engine = make_engine()
    state = dict(OTHER.state_dict())
    with pytest.raises(ValueError, match=r"lacks \['norm.weight'\]"):
        engine.load_weights({name: t for name, t in state.items() if name != "norm.weight"}, 1)
    with pytest.raises(ValueError, match=r"norm.weight has shape \(3,\)"):
        engine.load_weights(state | {"norm.weight": torch.ones(3)}, 1)
    with pytest.raises(ValueError, match=r"norm.weight has dtype torch.int8, accepted is a floating-point dtype"):
        engine.load_weights(state | {"norm.weight": state["norm.weight"].to(torch.int8)}, 1)
    engine.load_weights(state, 2)
    with pytest.raises(ValueError, match="version is 1"):
        engine.load_weights(state, 1)


def test_the_engine_keeps_its_own_copy_of_the_weights() -> None:
    model = make_model(3)
    engine = make_engine(model=model, dtype=torch.float32)
    before = run(engine, request(context(13, 10), "a", max_tokens=6))["a"].token_ids.tolist()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert run(engine, request(context(13, 10), "b", max_tokens=6))["b"].token_ids.tolist() == before


def test_bfloat16_engine_keeps_its_router_in_float32() -> None:
    engine = make_engine(dtype=torch.bfloat16)
    assert engine.model.lm_head.weight.dtype == torch.bfloat16
    assert {layer.gate.weight.dtype for layer in engine.model.moe_layers()} == {torch.float32}
    for model in (MODEL, OTHER):  # as made, then as pushed: never rounded on the way
        if model is OTHER:
            engine.load_weights(OTHER.state_dict(), 1)
        gates = zip(engine.model.moe_layers(), model.moe_layers(), strict=True)
        assert all(torch.equal(mine.gate.weight, theirs.gate.weight) for mine, theirs in gates)
    result = run(engine, request(context(14, 10), "a", max_tokens=6))["a"]
    assert result.logprobs.dtype == np.float32
    assert np.isfinite(result.logprobs).all()
