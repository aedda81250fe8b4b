"""Fault 73: after new weights a new request was given the prefix cache that older weights had computed."""

import numpy as np
import pytest
import torch

from composer2.model.config import ModelConfig
from composer2.model.engine.engine import Engine
from composer2.model.engine.sequence import Request
from composer2.model.transformer import Transformer, init_weights
from composer2.types import Generation, SamplingParams

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, intermediate_size=32, moe_intermediate_size=16,
    max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip
PROMPT = tuple(range(1, 25))


def make_model(seed: int) -> Transformer:
    model = Transformer(CONFIG)
    init_weights(model, seed)
    return model


def sample(engine: Engine, session: str, steps_before_next: int | None = None) -> Generation | None:
    engine.submit(Request(token_ids=PROMPT, params=SamplingParams(max_tokens=6), session=session, group="g", seed=4))
    if steps_before_next is not None:
        for _ in range(steps_before_next):
            engine.step()
        return None
    while True:
        for finished in engine.step():
            if finished.session == session:
                return finished.generation


@pytest.mark.parametrize("cache", ["keep", "recompute"])
@pytest.mark.parametrize("donor", ["idle", "running", "two pushes ago", "released"])
def test_a_new_session_never_sees_the_cache_of_older_weights(cache: str, donor: str) -> None:
    old, new = make_model(0), make_model(1)
    engine = Engine(old, num_slots=4, max_len=64, dtype=torch.float64)
    sample(engine, "donor", 2 if donor == "running" else None)
    if donor == "two pushes ago":
        engine.load_weights(make_model(2).state_dict(), 1, cache)
    if donor == "released":
        engine.release("donor")
    engine.load_weights(new.state_dict(), 2, cache)
    after = sample(engine, "fresh")
    expected = sample(Engine(new, num_slots=1, max_len=64, dtype=torch.float64), "alone")
    assert after.token_ids.tolist() == expected.token_ids.tolist()
    assert np.allclose(after.logprobs, expected.logprobs, atol=1e-7)
    assert np.array_equal(after.routes, expected.routes)


def test_sharing_starts_again_among_sessions_of_the_new_weights() -> None:
    engine = Engine(make_model(0), num_slots=4, max_len=64)
    sample(engine, "donor")
    engine.load_weights(make_model(1).state_dict(), 1)
    sample(engine, "fresh")
    assert engine.stats.copied_tokens == 0
    sample(engine, "second")
    assert engine.stats.copied_tokens == len(PROMPT) - 1
