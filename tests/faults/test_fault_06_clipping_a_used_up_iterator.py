"""Fault 6: clipping given a one-shot iterator sees no gradients; the norm changes with the number of shards."""

import pytest
import torch

from composer2.rl.loss import LossConfig, clip_gradients, loss_denominator, policy_loss, token_logprobs
from composer2.rl.pack import pack, to_tensors


def linear_with_gradient():
    layer = torch.nn.Linear(3, 2)
    layer.weight.grad = torch.full((2, 3), 3.0)
    layer.bias.grad = torch.full((2,), 4.0)
    return layer


def test_an_iterator_is_clipped():
    layer = linear_with_gradient()
    norm = clip_gradients(layer.parameters(), 1.0)
    assert float(norm) == pytest.approx((6 * 9 + 2 * 16) ** 0.5)
    clipped = sum(float((p.grad**2).sum()) for p in layer.parameters()) ** 0.5
    assert clipped == pytest.approx(1.0, rel=1e-5)


def test_an_exhausted_iterator_is_an_error():
    parameters = linear_with_gradient().parameters()
    list(parameters)
    with pytest.raises(ValueError, match="hold no gradient"):
        clip_gradients(parameters, 1.0)


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_summed_shards_have_the_norm_of_the_whole(build, num_shards):
    """Data parallelism in one process: with the global constant denominator, shard gradients simply add up."""
    samples = [build.sample(8, num_sampled=1 + i % 5, advantage=i - 3.5, seed=i) for i in range(8)]
    config = LossConfig()
    denominator = loss_denominator(config, num_rollouts_planned=8)

    def norm(shards):
        table = torch.nn.Parameter(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))
        for shard in shards:
            for batch in map(to_tensors, pack(shard, row_length=16, rows_per_batch=2)):
                logprobs, _ = token_logprobs(table[batch.token_ids], batch.token_ids)
                policy_loss(logprobs, batch, config, denominator)[0].backward()
        return float(clip_gradients(iter([table]), 1e9))

    assert norm([samples[i::num_shards] for i in range(num_shards)]) == pytest.approx(norm([samples]), rel=1e-5)
