"""Fault 1: the step shrinks as accumulation grows, because the loss is divided again by the number of micro-steps."""

import pytest
import torch

from composer2.rl.loss import LossConfig, loss_denominator, policy_loss, token_logprobs
from composer2.rl.pack import pack, to_tensors


def gradient(samples, rows_per_batch, row_length):
    """Gradient of a bigram softmax over all micro-batches of a step, as the trainer accumulates it."""
    torch.manual_seed(0)
    table = torch.nn.Parameter(torch.randn(32, 32, dtype=torch.float64))
    config = LossConfig()
    denominator = loss_denominator(config, num_rollouts_planned=8)
    batches = pack(samples, row_length=row_length, rows_per_batch=rows_per_batch)
    for batch in map(to_tensors, batches):
        logprobs, _ = token_logprobs(table[batch.token_ids], batch.token_ids)
        policy_loss(logprobs, batch, config, denominator)[0].backward()
    return table.grad, len(batches)


@pytest.mark.parametrize("rows_per_batch", [4, 2, 1])
def test_gradient_does_not_depend_on_accumulation(build, rows_per_batch):
    samples = [build.sample(8, num_sampled=1 + i % 5, advantage=i - 3.5, seed=i, logprob=-3.5) for i in range(8)]
    whole, one = gradient(samples, rows_per_batch=8, row_length=8)
    parts, many = gradient(samples, rows_per_batch=rows_per_batch, row_length=8)
    assert (one, many) == (1, 8 // rows_per_batch)
    assert whole.abs().max() > 1e-3
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=0)
