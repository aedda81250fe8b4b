"""Random arrivals, turns, cancellations, releases, preemption and weight updates: no page is lost, no request
unanswered, and every finished request has the tokens it would have had alone (row I1). With a page a window, with small
pages that run out, and with drafts. Each test also asks that what it is about happened often."""

from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from composer2.model.config import ModelConfig
from composer2.model.engine.engine import Engine
from composer2.model.engine.sequence import Request
from composer2.model.transformer import Transformer, init_weights
from composer2.types import SamplingParams

CONFIG = ModelConfig(
    vocab_size=16,
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
    max_position_embeddings=32,
    initializer_range=0.4,
)
NUM_SLOTS, MAX_LEN = 3, 32


def make_model(seed: int) -> Transformer:
    model = Transformer(CONFIG)
    init_weights(model, seed)
    return model


MODELS = [make_model(seed) for seed in range(2)]


arrivals = st.lists(
    st.tuples(st.integers(0, 6), st.lists(st.integers(0, 15), min_size=1, max_size=4), st.integers(0, 99)),
    min_size=1,
    max_size=4,
)


class EngineMachine(RuleBasedStateMachine):
    seen: ClassVar[Counter[str]]
    """What happened in all runs of a machine."""
    page_size: int | None = None
    num_pages: int | None = None
    speculative = False

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(
            MODELS[0],
            num_slots=NUM_SLOTS,
            max_len=MAX_LEN,
            dtype=torch.float64,
            max_prefill_tokens=20,
            page_size=self.page_size,
            num_pages=self.num_pages,
            speculative=self.speculative,
        )
        self.version = 0
        self.open: dict[int, Request] = {}
        self.may_be_mixed: set[str] = set()
        """Sessions whose cache may hold positions of older weights."""
        self.contexts: dict[str, list[int]] = {}
        self.cancelled: set[int] = set()

    def busy(self) -> set[str]:
        return {request.session for request in self.open.values()}

    @rule(arrivals=arrivals)
    def submit(self, arrivals: list[tuple[int, list[int], int]]) -> None:
        for session, tail, seed in arrivals:
            name, group = f"s{session}", f"g{session % 2}"
            if name in self.busy():
                continue
            prompt = np.random.default_rng(session % 2).integers(0, 16, 9).tolist()
            token_ids = self.contexts.get(name, prompt) + tail
            if len(token_ids) > MAX_LEN - 8:
                token_ids = prompt + tail
            params = SamplingParams(max_tokens=1 + seed % 8, stop_ids=(3,))
            request = Request(token_ids=tuple(token_ids), params=params, session=name, group=group, seed=seed)
            self.open[self.engine.submit(request)] = request

    @precondition(lambda self: self.open)
    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        for finished in self.engine.step():
            request = self.open.pop(finished.request_id)
            generation = finished.generation
            self.contexts[request.session] = [*request.token_ids, *generation.token_ids.tolist()]
            assert len(generation.routes) == len(self.contexts[request.session])
            assert len(generation.logprobs) == len(generation.policy_versions) == len(generation.token_ids)
            assert (np.diff(generation.policy_versions) >= 0).all()
            if finished.request_id in self.cancelled:
                assert generation.finish_reason == "cancelled"
                continue
            assert generation.finish_reason in ("stop", "length")
            assert (generation.routes[:-1] >= 0).all()
            if request.session not in self.may_be_mixed:
                self.seen["compared"] += 1
                self.check_alone(request, generation)

    def check_alone(self, request: Request, generation) -> None:
        alone = Engine(
            MODELS[self.version % 2],
            num_slots=1,
            max_len=MAX_LEN,
            dtype=torch.float64,
            speculative=self.speculative,
        )
        alone.submit(request)
        while True:
            if done := alone.step():
                break
        expected = done[0].generation
        assert generation.token_ids.tolist() == expected.token_ids.tolist()
        assert np.allclose(generation.logprobs, expected.logprobs, atol=1e-6)
        assert np.array_equal(generation.routes, expected.routes)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        self.engine.cancel(request_id)
        self.cancelled.add(request_id)

    @rule(session=st.integers(0, 20))
    def release(self, session: int) -> None:
        name = f"s{session}"
        self.cancelled |= {request_id for request_id, request in self.open.items() if request.session == name}
        self.engine.release(name)
        if name not in self.busy():
            self.may_be_mixed.discard(name)
        self.contexts.pop(name, None)

    @rule(recompute=st.booleans(), chance=st.integers(0, 4))
    def load_weights(self, recompute: bool, chance: int) -> None:
        if chance:  # rare: what lived through one has no twin to be compared with
            return
        self.version += 1
        self.engine.load_weights(
            MODELS[self.version % 2].state_dict(), self.version, "recompute" if recompute else "keep"
        )
        # Anything sampled partly before the push, or on a kept cache, has no single-version twin.
        self.may_be_mixed |= self.busy() | (set() if recompute else {slot.session for slot in self.engine.cache.slots})

    @invariant()
    def pages_are_conserved(self) -> None:
        cache = self.engine.cache
        held = Counter(page for slot in cache.slots for page in slot.pages)
        assert all(cache.num_holders(page) == held[page] for page in range(cache.num_pages))
        assert len(held) + cache.num_free == cache.num_pages
        running = [sequence.slot for sequence in self.engine.scheduler.running]
        assert {id(slot) for slot in running} == {id(slot) for slot in cache.slots if slot.is_busy}
        for slot in cache.slots:
            assert slot.num_cached < len(slot.token_ids) <= MAX_LEN
            assert slot.num_cached <= len(slot.pages) * cache.page_size
            # Nobody else reads what this slot may still write.
            assert all(held[page] == 1 for page in slot.pages[slot.num_cached // cache.page_size :])

    def teardown(self) -> None:
        for _ in range(200):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.open
        assert self.engine.num_running == self.engine.num_waiting == 0
        stats = self.engine.stats
        self.seen["preemptions"] += stats.preemptions
        self.seen["evictions"] += self.engine.cache.num_evictions
        self.seen["lent"] += stats.copied_tokens > 0
        self.seen["accepted"] += stats.accepted_tokens
        self.seen["updates"] += stats.weight_updates


class SmallPages(EngineMachine):
    page_size, num_pages = 4, 8


class Drafts(EngineMachine):
    page_size, num_pages, speculative = 4, 8, True


@pytest.mark.parametrize(
    ("machine", "happened"),
    [
        (EngineMachine, {"compared", "evictions", "lent", "updates"}),
        (SmallPages, {"compared", "evictions", "preemptions", "updates"}),
        (Drafts, {"compared", "evictions", "preemptions", "accepted", "updates"}),
    ],
)
def test_engine_laws(machine: type[EngineMachine], happened: set[str]) -> None:
    machine.seen = Counter()
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))
    assert {name: machine.seen[name] for name in happened if machine.seen[name] < 5} == {}
