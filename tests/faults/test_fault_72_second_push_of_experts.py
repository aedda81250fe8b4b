"""Fault 72: a second push of a mixture-of-experts model wrote into a layout that the first one had changed."""

import pytest
import torch

from composer2.model.checkpoint.huggingface import load_huggingface, save_huggingface
from composer2.model.config import ModelConfig
from composer2.model.engine.engine import Engine
from composer2.model.transformer import Transformer, init_weights
from composer2.rl.system.weight_sync import FolderSink, read_weights

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


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_push_gives_the_engine_of_its_weights(recipe: str) -> None:
    """A, B, A again: each as an engine made from it, so nothing of an earlier push, or of its scales, is left."""
    models = [make_model(0, recipe), make_model(1, recipe), make_model(0, recipe)]
    engine = Engine(models[1], num_slots=2, max_len=64)
    for version, model in enumerate(models, start=1):
        engine.load_weights(model.state_dict(), version)
        assert torch.equal(logits(engine), logits(Engine(model, num_slots=2, max_len=64)))
    assert not torch.equal(logits(Engine(models[0], num_slots=2, max_len=64)), logits(Engine(models[1], num_slots=2,
        max_len=64)))  # fmt: skip


def test_every_sync_path_ends_in_the_same_experts(tmp_path) -> None:
    """Direct, through the folder that workers read, and through a published checkpoint with its own expert layout."""
    source = make_model(5)
    sink = FolderSink(tmp_path / "weights")
    save_huggingface(tmp_path / "published", source)
    states = (
        lambda: source.state_dict(),
        lambda: read_weights(sink.publish(1, source.state_dict())),
        lambda: load_huggingface(tmp_path / "published").state_dict(),
    )
    expected = logits(Engine(source, num_slots=1, max_len=64))
    for state in states:
        engine = Engine(make_model(6), num_slots=1, max_len=64)
        for version in (1, 2):
            engine.load_weights(state(), version)
            assert torch.equal(logits(engine), expected)
