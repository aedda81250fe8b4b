"""Fault 30: the load-balance bias keeps being updated from replayed choices though replay ignores the bias.

Stated behaviour: reinforcement learning never updates the bias. Only pretraining calls `update_router_bias`; the RL
step has no path to it, so the samplers' routing moves with the weights alone.
"""

from dataclasses import replace

import numpy as np
import torch

from composer2.model.config import ModelConfig
from composer2.model.transformer import Transformer, init_weights
from composer2.rl.pack import fill
from composer2.rl.train import RLConfig, make_optimizer, update


def test_twenty_steps_with_replay_leave_the_bias_alone(build):
    config = ModelConfig(vocab_size=32, hidden_size=16, kv_lora_rank=8)
    model = Transformer(config)
    init_weights(model, 0)
    model.update_router_bias(torch.arange(3 * 8).view(3, 8), rate=0.01)
    biases = {
        name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")
    }
    assert len(biases) >= config.num_moe_layers
    assert any(bias.abs().max() > 0 for bias in biases.values())
    weight = model.lm_head.weight.detach().clone()
    samples = []
    for seed in range(4):
        routes = np.zeros((8, config.num_moe_layers, 2), dtype=np.int16)
        routes[..., 1] = 1  # everything goes to experts 0 and 1: a load the rule would fight at once
        sample = build.sample(8, advantage=1.0 - seed % 2 * 2, seed=seed, layers=3, experts=2)
        samples.append(replace(sample, routes=routes))
    assert fill([samples]).routes.shape == (1, 32, 3, 2)
    rl = RLConfig(prompts_per_step=1, group_size=4)
    optimizer = make_optimizer(model, rl)
    for step in range(20):
        update(model, optimizer, samples, rl, step)
    assert not torch.equal(model.lm_head.weight, weight)
    for name, buffer in model.named_buffers():
        if name in biases:
            assert torch.equal(buffer, biases[name])
