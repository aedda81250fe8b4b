"""Fault 1: a loss already divided by the tokens of the window is divided again by the number of micro-steps."""

import numpy as np
import pytest
import torch

from composer2.model.config import ModelConfig
from composer2.model.pretrain.data import pack_examples
from composer2.model.pretrain.loop import train
from composer2.model.pretrain.mtp import joint_loss
from composer2.model.transformer import Transformer, init_weights

CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=32,
    num_hidden_layers=2,
    intermediate_size=32,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_attention_heads=2,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
)


def gradient_of_a_step(accumulation: int) -> torch.Tensor:
    """Flat gradient: what one step of plain descent at rate 1 takes off the weights."""
    model = Transformer(CONFIG)
    init_weights(model, 0)
    model.double()
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    rng = np.random.default_rng(0)
    batch = pack_examples([(rng.integers(32, size=12), np.ones(12)) for _ in range(8)], row_len=12, pad_id=0)
    assert batch.num_rows == 8
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    train(
        model,
        optimizer,
        lambda _: 1.0,
        lambda _: batch,
        joint_loss(0.3),
        num_steps=1,
        accumulation=accumulation,
        clip=0.0,
    )
    return before - torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("accumulation", [2, 4, 8])
def test_the_gradient_does_not_depend_on_accumulation(accumulation):
    one, many = gradient_of_a_step(1), gradient_of_a_step(accumulation)
    assert one.norm() > 0.1
    torch.testing.assert_close(many, one, atol=1e-6, rtol=0)
