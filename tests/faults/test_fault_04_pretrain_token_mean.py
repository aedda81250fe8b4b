"""Fault 4: a token mean per micro-batch gives the tokens of short micro-batches too much weight."""

import numpy as np
import torch
import torch.nn.functional as F

from composer2.model.config import ModelConfig
from composer2.model.pretrain.data import PretrainBatch, concatenate
from composer2.model.pretrain.loop import next_token_loss, train
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


def row(trained: int, seed: int) -> PretrainBatch:
    """One row of 201 tokens whose last `trained` tokens carry loss."""
    ids = np.random.default_rng(seed).integers(32, size=(1, 201)).astype(np.int32)
    positions = np.arange(201, dtype=np.int32)[None]
    weights = (positions > 200 - trained).astype(np.float32)
    return PretrainBatch(token_ids=ids, position_ids=positions, document_ids=np.zeros_like(ids), weights=weights)


def test_two_and_two_hundred_tokens_weigh_as_one_batch_of_202():
    parts = [row(2, 0), row(200, 1)]
    model = Transformer(CONFIG)
    init_weights(model, 0)
    model.double()
    nll = []
    for part in parts:
        ids = torch.from_numpy(part.token_ids).long()
        taken = torch.from_numpy(part.weights[0, 1:] > 0)
        nll.append(F.cross_entropy(model(ids).logits_BTV[0, :-1][taken], ids[0, 1:][taken], reduction="none"))
    joined = torch.cat(nll)
    assert len(joined) == 202
    parameters = [p for name, p in model.named_parameters() if not name.startswith("mtp")]
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(joined.mean(), parameters)])
    before = torch.cat([p.detach().flatten().clone() for p in parameters])
    metrics = []
    train(
        model,
        torch.optim.SGD(parameters, lr=1.0),
        lambda _: 1.0,
        lambda _: concatenate(parts),
        next_token_loss,
        num_steps=1,
        accumulation=2,
        clip=0.0,
        on_step=metrics.append,
    )
    found = before - torch.cat([p.detach().flatten() for p in parameters])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert abs(metrics[0]["loss"] - float(joined.mean().detach())) < 1e-5
