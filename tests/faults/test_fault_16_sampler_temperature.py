"""Fault 16: log-probs without the sampling temperature on one side made the first ratio about 2 at T=0.6."""

import numpy as np
import torch

from composer2.model.config import ModelConfig
from composer2.model.engine.engine import Engine
from composer2.model.engine.sequence import Request
from composer2.model.transformer import Transformer, init_weights
from composer2.types import SamplingParams

TEMPERATURE = 0.6


def test_ratio_is_one_on_every_token_at_temperature_0_6() -> None:
    model = Transformer(ModelConfig(initializer_range=0.05))
    init_weights(model, 0)
    engine = Engine(model, num_slots=8, max_len=128)
    prompt = np.random.default_rng(0).integers(0, 1024, 30).tolist()
    params = SamplingParams(temperature=TEMPERATURE, top_p=0.9, top_k=200, max_tokens=40)
    for i in range(8):
        engine.submit(Request(token_ids=tuple(prompt), params=params, session=str(i), group="g", seed=i))
    done = []
    while engine.has_work:
        done += engine.step()
    assert len(done) == 8
    for finished in done:
        generation = finished.generation
        token_ids = torch.tensor([[*prompt, *generation.token_ids.tolist()]])
        with torch.no_grad():
            logits_TV = model(token_ids).logits_BTV[0, len(prompt) - 1 : -1]
        logprobs_TV = torch.log_softmax(logits_TV / TEMPERATURE, -1)
        trained = logprobs_TV.gather(1, token_ids[0, len(prompt) :, None])[:, 0].numpy()
        assert np.abs(np.exp(trained - generation.logprobs) - 1).max() <= 1e-3
        wrong = torch.log_softmax(logits_TV, -1).gather(1, token_ids[0, len(prompt) :, None])[:, 0].numpy()
        assert np.abs(np.exp(wrong - generation.logprobs) - 1).max() > 1e-2
