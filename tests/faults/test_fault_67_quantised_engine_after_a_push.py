"""Fault 67: after the first weight update a quantised engine spoke gibberish."""

import pytest
import torch

from composer2.model.config import ModelConfig
from composer2.model.engine.engine import Engine
from composer2.model.engine.sequence import Request
from composer2.model.transformer import Transformer, init_weights
from composer2.types import SamplingParams

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32, "initializer_range": 0.2}
SIZES |= {"moe_intermediate_size": 32, "max_position_embeddings": 64, "num_nextn_predict_layers": 0}
RECIPES = ("native", "bf16", "mxfp8", "nvfp4", "nvfp4-tensor")
PROMPT = tuple(range(1, 12))


def make_model(seed: int, recipe: str = "native") -> Transformer:
    model = Transformer(ModelConfig(**SIZES, expert_recipe=recipe))
    init_weights(model, seed)
    return model


def logits(engine: Engine) -> torch.Tensor:
    """[11, V] of the engine's own model, through its cache path."""
    cache = engine.model.new_cache(1, 64)
    positions = torch.arange(len(PROMPT))[None]
    with torch.inference_mode():
        out = engine.model.forward_cached(torch.tensor([PROMPT]), positions, cache=cache, slot_ids_B=torch.tensor([0]))
        return engine.model.lm_head(out.hidden_BSD)[0]


def sampled(engine: Engine, session: str) -> list[int]:
    engine.submit(Request(token_ids=PROMPT, params=SamplingParams(max_tokens=8), session=session, group="g", seed=3))
    while True:
        for finished in engine.step():
            return finished.generation.token_ids.tolist()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_weights_pushed_twice_change_no_bit(recipe: str, dtype: torch.dtype) -> None:
    model = make_model(0, recipe)
    engine = Engine(model, num_slots=2, max_len=64, dtype=dtype)
    before, said = logits(engine), sampled(engine, "before")
    for version in (1, 2):
        engine.load_weights(model.state_dict(), version)
        assert torch.equal(logits(engine), before)
        assert sampled(engine, f"after {version}") == said
