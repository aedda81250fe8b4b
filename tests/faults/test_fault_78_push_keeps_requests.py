"""Fault 78: a new weight version aborted every request in flight, and their groups were dropped."""

import pytest

from composer2.model.config import ModelConfig
from composer2.model.engine.engine import Engine
from composer2.model.engine.sequence import Request
from composer2.model.transformer import Transformer, init_weights
from composer2.types import SamplingParams

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, intermediate_size=32, moe_intermediate_size=16,
    max_position_embeddings=64,
)  # fmt: skip


def make_model(seed: int) -> Transformer:
    model = Transformer(CONFIG)
    init_weights(model, seed)
    return model


@pytest.mark.parametrize("cache", ["keep", "recompute"])
def test_requests_in_flight_finish_with_both_versions(cache: str) -> None:
    engine = Engine(make_model(0), num_slots=4, max_len=64)
    for i in range(4):
        params = SamplingParams(max_tokens=10)
        engine.submit(Request(token_ids=(1, 2, 3 + i), params=params, session=str(i), group="g", seed=i))
    done = []
    for _ in range(4):
        done += engine.step()
    assert not done
    assert engine.num_running == 4
    engine.load_weights(make_model(1).state_dict(), 1, cache)
    while engine.has_work:
        done += engine.step()
    assert sorted(finished.session for finished in done) == ["0", "1", "2", "3"]
    for finished in done:
        assert finished.generation.finish_reason == "length"
        assert finished.generation.policy_versions.tolist() == [0] * 4 + [1] * 6
