"""Pages, sharing and preemption against an engine that has room for everything."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch

from composer2.model.config import ModelConfig
from composer2.model.engine.cache import PagedCache
from composer2.model.engine.engine import Engine
from composer2.model.engine.sampler import uniforms
from composer2.model.engine.sequence import Request
from composer2.model.transformer import Transformer, init_weights
from composer2.types import Generation, SamplingParams

CONFIG = ModelConfig(
    vocab_size=24,
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


def make_model(seed: int, config: ModelConfig = CONFIG) -> Transformer:
    model = Transformer(config)
    init_weights(model, seed)
    return model


MODEL, OTHER = make_model(0), make_model(1)
GROUPED = dataclasses.replace(CONFIG, attention="grouped", num_key_value_heads=1, head_dim=8, qk_norm="head")


def make_engine(model: Transformer = MODEL, *, dtype=torch.float64, **kwargs) -> Engine:
    return Engine(model, **({"num_slots": 8, "max_len": 64, "dtype": dtype} | kwargs))


def context(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length).tolist()


def request(token_ids, session: str, *, group: str = "g", seed: int = 0, **params) -> Request:
    return Request(token_ids=tuple(token_ids), session=session, group=group, seed=seed, params=SamplingParams(**params))


def run(engine: Engine, *requests: Request) -> dict[str, Generation]:
    for one in requests:
        engine.submit(one)
    done = {}
    while engine.has_work:
        done |= {finished.session: finished.generation for finished in engine.step()}
        assert_conserved(engine.cache)
    return done


def assert_conserved(cache: PagedCache) -> None:
    held = Counter(page for slot in cache.slots for page in slot.pages)
    assert all(cache.num_holders(page) == held[page] for page in range(cache.num_pages))
    assert len(held) + cache.num_free == cache.num_pages


def same(one: Generation, other: Generation) -> bool:
    return (
        one.token_ids.tolist() == other.token_ids.tolist()
        and np.allclose(one.logprobs, other.logprobs, atol=1e-6)
        and np.allclose(one.truncated_logprobs, other.truncated_logprobs, atol=1e-6)
        and np.array_equal(one.routes, other.routes)
    )


def log_probs(model: Transformer, token_ids: list[int]) -> np.ndarray:
    copy = Transformer(model.config).double()
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        logprobs = torch.log_softmax(copy(torch.tensor([token_ids])).logits_BTV[0, :-1], -1)
    return logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].numpy()


@pytest.mark.parametrize("config", [CONFIG, GROUPED], ids=["latent", "grouped"])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_log_probs_do_not_depend_on_the_page_size(config: ModelConfig, page_size: int) -> None:
    model = make_model(3, config)
    requests = [
        request([*context(1, 13), *context(i, 1 + 3 * i)], f"s{i}", seed=i, max_tokens=9, top_k=6, temperature=0.8)
        for i in range(6)
    ]
    plain, paged = run(make_engine(model), *requests), run(make_engine(model, page_size=page_size), *requests)
    for name, generation in paged.items():
        assert same(plain[name], generation)
        assert (generation.truncated_logprobs >= generation.logprobs).all()
    warm = request(context(9, 20), "warm", max_tokens=12)
    generation = run(make_engine(model, page_size=page_size), warm)["warm"]
    expected = log_probs(model, [*warm.token_ids, *generation.token_ids.tolist()])[19:]
    assert np.abs(generation.logprobs - expected).max() <= 1e-6


@pytest.mark.parametrize("speculative", [False, True])
def test_preemption_changes_no_token(speculative: bool) -> None:
    requests = [request(context(i, 10), f"s{i}", group=f"{i}", seed=i, max_tokens=30) for i in range(6)]
    ample = run(make_engine(speculative=speculative), *requests)
    tight = make_engine(page_size=8, num_pages=12, speculative=speculative)
    results = run(tight, *requests)
    assert tight.stats.preemptions > 0
    assert all(same(results[name], ample[name]) for name in ample)


def test_a_shared_prompt_is_held_once_and_outlives_its_owner() -> None:
    prompt = context(4, 40)
    engine = make_engine(page_size=8)
    run(engine, request(prompt, "a", max_tokens=1))
    assert engine.cache.num_free == 64 - 5
    late = [request(prompt, f"s{i}", seed=i, max_tokens=3) for i in range(4)]
    results = run(engine, *late)
    # 39 positions are lent: 4 full pages shared; each has a page of its own for the tail, and one for what follows.
    assert engine.stats.prefill_tokens == 39
    assert engine.cache.num_free == 64 - 5 - 4 * 2
    engine.release("a")
    assert engine.cache.num_free == 64 - 4 - 4 * 2
    assert_conserved(engine.cache)
    again = run(engine, request(prompt, "b", seed=2, max_tokens=3))["b"]
    assert engine.stats.prefill_tokens == 39
    assert same(again, results["s2"])
    for i in range(4):
        engine.release(f"s{i}")
    engine.release("b")
    assert engine.cache.num_free == 64


def test_a_changed_context_leaves_shared_pages_to_the_others() -> None:
    prompt = context(5, 33)
    engine = make_engine(page_size=8)
    run(engine, request(prompt, "a", max_tokens=2), request(prompt, "b", seed=1, max_tokens=2))
    changed = request([*prompt[:12], *context(6, 30)], "a", max_tokens=4)
    other = request([*prompt, 1, 2, 3], "b", max_tokens=4)
    results = run(engine, changed, other)
    assert same(results["a"], run(make_engine(), changed)["a"])
    assert same(results["b"], run(make_engine(), other)["b"])


@pytest.mark.parametrize("page_size", [8, None])
@pytest.mark.parametrize("cache", ["keep", "recompute"])
def test_new_weights_never_serve_a_prefix_of_old_ones(page_size: int | None, cache: str) -> None:
    prompt = context(7, 30)
    engine = make_engine(page_size=page_size)
    run(engine, *(request(prompt, f"old{i}", seed=i, max_tokens=2) for i in range(3)))
    engine.load_weights(OTHER.state_dict(), 1, cache)
    fresh = request(prompt, "new", seed=3, max_tokens=6)
    result = run(engine, fresh)["new"]
    assert same(result, run(make_engine(OTHER), fresh)["new"])
    assert np.abs(result.logprobs - log_probs(OTHER, [*prompt, *result.token_ids.tolist()])[29:]).max() <= 1e-6


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing_behind() -> None:
    rng = np.random.default_rng(0)
    engine = make_engine(num_slots=48, max_len=32, page_size=4, num_pages=90, dtype=torch.float32)
    submitted, finished, open_ids = 0, 0, []
    while finished < 10_000:
        while submitted < 10_000 and engine.num_waiting + engine.num_running < 60:
            prompt = context(int(rng.integers(5)), 8) + context(submitted, int(rng.integers(1, 12)))
            params = {"max_tokens": int(rng.integers(1, 12)), "stop_ids": (3,)}
            open_ids.append(engine.submit(request(prompt, f"{submitted}", group=f"{submitted % 5}", **params)))
            submitted += 1
        if rng.random() < 0.2:
            engine.cancel(int(rng.choice(open_ids[-60:])))
        if rng.random() < 0.01:
            engine.load_weights(MODEL.state_dict(), engine.policy_version + 1, str(rng.choice(["keep", "recompute"])))
        for done in engine.step():
            finished += 1
            if finished % 500 == 0:
                assert_conserved(engine.cache)
            if rng.random() < 0.5:
                engine.release(done.session)
    assert not engine.has_work
    assert engine.num_running == len(engine._sequences) == len(engine._request_ids) == 0
    assert engine.stats.preemptions > 20
    assert engine.cache.num_evictions > 100
    assert_conserved(engine.cache)
    for slot in engine.cache.slots:
        engine.release(slot.session)
    assert engine.cache.num_free == 90
    assert not engine.cache.slots


def test_in_float32_neighbours_change_only_draws_at_a_boundary() -> None:
    for seed in range(4):
        wanted = request(context(seed, 12), "me", group="me", seed=seed, max_tokens=40)
        crowd = [request(context(50 + i, 5 + i), f"s{i}", seed=i, max_tokens=20 + i) for i in range(7)]
        alone = run(make_engine(dtype=torch.float32), wanted)["me"].token_ids.tolist()
        together = run(make_engine(dtype=torch.float32, page_size=8), *crowd, wanted)["me"].token_ids.tolist()
        for place, (one, other) in enumerate(zip(alone, together, strict=True)):
            if one != other:
                whole = [*wanted.token_ids, *alone[:place]]
                copy = Transformer(CONFIG).double()
                copy.load_state_dict(MODEL.state_dict())
                with torch.no_grad():
                    probs_V = torch.softmax(copy(torch.tensor([whole])).logits_BTV[0, -1], -1)
                assert np.abs(probs_V.cumsum(-1).numpy() - uniforms([seed], [len(whole)])).min() <= 1e-5
                break


def test_stop_sequences_end_a_generation_and_span_sampled_tokens_only() -> None:
    free = run(make_engine(), request(context(8, 10), "a", max_tokens=20))["a"].token_ids.tolist()
    stop = tuple(free[5:7])
    first = next(i for i in range(1, 20) if tuple(free[i - 1 : i + 1]) == stop)
    cut = run(make_engine(), request(context(8, 10), "a", max_tokens=20, stop_sequences=((23, 23, 23, 0), stop)))["a"]
    assert (cut.token_ids.tolist(), cut.finish_reason) == (free[: first + 1], "stop")
    spanning = (context(8, 10)[-1], free[0])
    assert run(make_engine(), request(context(8, 10), "a", max_tokens=1, stop_sequences=(spanning,)))[
        "a"
    ].finish_reason == ("length")
    with pytest.raises(ValueError, match="stop_sequences"):
        request([1], "a", stop_sequences=((),))


def test_sizes_that_do_not_fit_name_the_field() -> None:
    for kwargs in ({"page_size": 0}, {"page_size": 65}, {"num_pages": 0}, {"page_size": 8, "num_pages": 7}):
        with pytest.raises(ValueError, match=list(kwargs)[-1]):
            make_engine(**kwargs)
    with pytest.raises(ValueError, match="speculative"):
        make_engine(make_model(0, dataclasses.replace(CONFIG, num_nextn_predict_layers=0)), speculative=True)
