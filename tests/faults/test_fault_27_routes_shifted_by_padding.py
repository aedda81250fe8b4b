"""Fault 27: recorded routes misaligned with padding: the same sample replays other experts in another place."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from composer2.model.config import ModelConfig
from composer2.model.transformer import Transformer, init_weights
from composer2.rl.loss import LossConfig, policy_loss, token_logprobs
from composer2.rl.pack import fill, pack, to_tensors

CONFIG = ModelConfig(vocab_size=32, hidden_size=16, kv_lora_rank=8)


def sample_with_random_routes(build, length, seed):
    sample = build.sample(length, seed=seed, layers=CONFIG.num_moe_layers, experts=2)
    generator = np.random.default_rng(seed)
    routes = np.argsort(generator.random((length, CONFIG.num_moe_layers, 8)), axis=-1)[..., :2].astype(np.int16)
    routes[-1] = -1
    return replace(sample, routes=routes)


def shifted(batch, left, right):
    """The batch with pads on either side, every field alike."""
    pads = {"document_ids": -1, "policy_versions": -1, "routes": -1}
    names = "token_ids position_ids document_ids loss_mask advantages behaviour_logprobs policy_versions routes"
    fields = {}
    for name in names.split():
        values = getattr(batch, name)
        width = [(0, 0), (left, right)] + [(0, 0)] * (values.ndim - 2)
        fields[name] = np.pad(values, width, constant_values=pads.get(name, 0))
    return replace(batch, **fields)


@pytest.mark.parametrize(("left", "right"), [(0, 5), (5, 0), (5, 5)])
def test_padding_on_either_side_replays_the_same_experts(build, left, right):
    model = Transformer(CONFIG).double()
    init_weights(model, 0)
    plain = fill([[sample_with_random_routes(build, 9, 3)]])

    def run(batch):
        tensors = to_tensors(batch)
        out = model(
            tensors.token_ids,
            position_ids_BT=tensors.position_ids,
            document_ids_BT=tensors.document_ids,
            routes_BTLK=tensors.routes,
        )
        logprobs, _ = token_logprobs(out.logits_BTV, tensors.token_ids)
        real = tensors.document_ids >= 0
        return out.routing.expert_ids_BTLK[real], policy_loss(logprobs, tensors, LossConfig(), 16.0)[0]

    (experts, loss), (moved_experts, moved_loss) = run(plain), run(shifted(plain, left, right))
    assert (experts.sort(-1).values == moved_experts.sort(-1).values).all()
    recorded = torch.from_numpy(plain.routes[0, :-1]).long()
    assert (experts[:-1].long().sort(-1).values == recorded.sort(-1).values).all()
    torch.testing.assert_close(moved_loss, loss, atol=1e-12, rtol=0)


def test_every_token_keeps_its_routes_through_packing(build):
    samples = [sample_with_random_routes(build, 5 + i, seed=i) for i in range(6)]
    (batch,) = pack(samples, row_length=24, rows_per_batch=8)
    found = 0
    for b, row in enumerate(batch.document_ids):
        for document in range(row.max() + 1):
            at = row == document
            (source,) = [s for s in samples if np.array_equal(s.token_ids, batch.token_ids[b, at])]
            assert (batch.routes[b, at] == source.routes).all()
            found += 1
    assert found == 6
