"""Fault 3: the constant-length reduction sums over sequences, so that the gradient scales with the micro-batch size."""

import pytest
import torch

from composer2.rl.loss import LossConfig, loss_denominator, policy_loss, token_logprobs
from composer2.rl.pack import pack, to_tensors


def gradient(samples, rows_per_batch, row_length, num_rollouts):
    torch.manual_seed(0)
    table = torch.nn.Parameter(torch.randn(32, 32, dtype=torch.float64))
    config = LossConfig()
    for batch in map(to_tensors, pack(samples, row_length=row_length, rows_per_batch=rows_per_batch)):
        logprobs, _ = token_logprobs(table[batch.token_ids], batch.token_ids)
        policy_loss(logprobs, batch, config, loss_denominator(config, num_rollouts_planned=num_rollouts))[0].backward()
    return table.grad


@pytest.mark.parametrize(("rows_per_batch", "row_length"), [(1, 10), (2, 10), (4, 10), (8, 10), (1, 80), (2, 23)])
def test_micro_batches_of_any_size_give_one_gradient(build, rows_per_batch, row_length):
    samples = [build.sample(4 + i % 7, num_sampled=1 + i % 3, advantage=i - 3.5, seed=i) for i in range(8)]
    reference = gradient(samples, 8, 10, num_rollouts=8)
    torch.testing.assert_close(
        gradient(samples, rows_per_batch, row_length, num_rollouts=8), reference, atol=1e-9, rtol=0
    )


def test_the_same_samples_twice_give_the_same_mean_gradient(build):
    """Averaged over rollouts, not summed: a step of twice the rollouts has the same scale."""
    samples = [build.sample(4 + i % 7, num_sampled=1 + i % 3, advantage=i - 3.5, seed=i) for i in range(8)]
    once, twice = gradient(samples, 4, 10, num_rollouts=8), gradient(samples * 2, 4, 10, num_rollouts=16)
    torch.testing.assert_close(twice, once, atol=1e-9, rtol=0)
