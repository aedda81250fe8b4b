"""Fault 22: the sampler's expert activation was rounded to bf16 once more than the trainer's."""

import copy

import torch
import torch.nn.functional as F

from composer2.model.config import ModelConfig
from composer2.model.moe import MoE

NUM_INPUTS = 10_000
CONFIG = ModelConfig(hidden_size=32, moe_intermediate_size=64)


def moe() -> MoE:
    generator = torch.Generator().manual_seed(0)
    layer = MoE(CONFIG)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return layer


def test_training_and_sampling_give_the_same_bits_on_10000_inputs() -> None:
    """The trainer holds float32 weights and computes in bf16 under autocast; the sampler holds them in bf16, its router
    in float32, as the engine does."""
    trainer = moe()
    sampler = copy.deepcopy(trainer).to(torch.bfloat16).eval().requires_grad_(False)
    sampler.gate = copy.deepcopy(trainer.gate)
    x_BTD = torch.randn(1, NUM_INPUTS, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trained, selection = trainer(x_BTD)
    with torch.inference_mode():
        sampled, chosen = sampler(x_BTD)
    assert trained.requires_grad
    assert trained.dtype == sampled.dtype == torch.bfloat16
    assert torch.equal(selection.expert_ids_TK, chosen.expert_ids_TK)
    assert torch.equal(trained, sampled)


def test_the_comparison_sees_one_rounding_more() -> None:
    """What the fault looks like: silu rounded before the product with `up`, or not, differs in many inputs."""
    generator = torch.Generator().manual_seed(2)
    gate, up = (torch.randn(NUM_INPUTS, generator=generator).bfloat16() for _ in range(2))
    twice = F.silu(gate) * up
    once = (F.silu(gate.float()) * up.float()).bfloat16()
    assert 0.1 < (twice != once).float().mean().item() < 0.9
