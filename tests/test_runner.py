"""The sampler's configuration reaches the engine that a run's episodes use."""

import numpy as np
import pytest
import torch

from composer2.config import apply_overrides, from_json, to_json
from composer2.env.harness import EpisodeLimits
from composer2.model.checkpoint.native import save_model
from composer2.model.config import ModelConfig
from composer2.model.engine.sequence import Request
from composer2.model.tokenizer import Tokenizer
from composer2.model.transformer import Transformer, init_weights
from composer2.runner import EngineConfig, EpisodeRunner, RunnerSpec
from composer2.types import SamplingParams

CONFIG = ModelConfig(
    vocab_size=400,
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


@pytest.fixture
def spec(tmp_path):
    """A function from `EngineConfig` fields to the specification of a runner."""
    model = Transformer(CONFIG)
    init_weights(model, 0)
    save_model(tmp_path / "model", model)
    Tokenizer.train(["def f():\n    return 1\n\n    x = 2\n" * 50], CONFIG.vocab_size).save(tmp_path / "tokenizer.json")

    def build(**fields) -> RunnerSpec:
        return RunnerSpec(
            model_dir=tmp_path / "model",
            tokenizer_path=tmp_path / "tokenizer.json",
            episode=EpisodeLimits(),
            engine=EngineConfig(**({"num_slots": 6, "max_len": 48, "dtype": "float64"} | fields)),
        )

    return build


def generated(runner: EpisodeRunner) -> list[list[int]]:
    """Tokens of six requests at once, in order of their seeds."""
    engine, done = runner.engine, {}
    for seed in range(6):
        prompt = np.random.default_rng(seed).integers(0, 400, 8 + seed).tolist()
        params = SamplingParams(max_tokens=20)
        engine.submit(Request(token_ids=tuple(prompt), params=params, session=f"{seed}", group=f"{seed}", seed=seed))
    while engine.has_work:
        done |= {finished.session: finished.generation.token_ids.tolist() for finished in engine.step()}
    return [done[f"{seed}"] for seed in range(6)]


def test_small_pages_change_no_token_and_are_really_small(spec):
    plain, paged = EpisodeRunner(spec()), EpisodeRunner(spec(page_size=4, num_pages=20))
    assert generated(paged) == generated(plain)
    assert (plain.engine.cache.page_size, plain.engine.cache.num_pages) == (48, 6)
    assert (paged.engine.cache.page_size, paged.engine.cache.num_pages) == (4, 20)
    assert paged.stats()["engine_preemptions"] > 0
    assert plain.stats()["engine_drafted_tokens"] == 0


def test_drafts_can_be_asked_for(spec):
    runner = EpisodeRunner(spec(speculative=True))
    assert {len(tokens) for tokens in generated(runner)} == {20}
    assert runner.stats()["engine_drafted_tokens"] > 0
    model = Transformer(ModelConfig(num_nextn_predict_layers=0))
    with pytest.raises(ValueError, match="speculative is True"):
        EngineConfig(speculative=True).open(model)


def test_the_fields_are_config_like_any_other():
    config = EngineConfig(page_size=16, num_pages=100, speculative=True)
    assert from_json(EngineConfig, to_json(config)) == config
    assert apply_overrides(EngineConfig(), ["--page-size", "16", "--num-pages", "100", "--speculative"]) == config
    assert EngineConfig().open(Transformer(ModelConfig())).model.lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": 385}, "page_size is 385"),
        ({"page_size": 16, "num_pages": 23}, "num_pages is 23, accepted is at least one window of 24"),
        ({"num_pages": 0}, "num_pages is 0"),
    ],
)
def test_sizes_that_do_not_fit_name_the_field(fields, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)
