"""Fault 4: a token mean per micro-batch gives the tokens of short micro-batches too much weight."""

import pytest
import torch

from composer2.rl.loss import LossConfig, loss_denominator, policy_loss
from composer2.rl.pack import pack, to_tensors


@pytest.mark.parametrize("normaliser", ["constant", "tokens"])
def test_two_and_two_hundred_tokens_weigh_the_same_each(build, normaliser):
    config = LossConfig(normaliser=normaliser)
    samples = [build.sample(3, num_sampled=2), build.sample(201, num_sampled=200, seed=1)]
    denominator = loss_denominator(config, num_rollouts_planned=2, num_tokens=202)
    slopes = []
    for row_length, rows_per_batch in ((201, 1), (204, 1)):  # two micro-batches, then one
        collected = []
        for batch in map(to_tensors, pack(samples, row_length=row_length, rows_per_batch=rows_per_batch)):
            logprobs = batch.behaviour_logprobs.clone().requires_grad_()
            gradient = torch.autograd.grad(policy_loss(logprobs, batch, config, denominator)[0], logprobs)[0]
            collected.append(gradient[batch.loss_mask])
        slopes.append((len(collected), torch.cat(collected)))
    assert [count for count, _ in slopes] == [2, 1]
    expected = torch.full((202,), -1 / denominator)
    for _, slope in slopes:
        torch.testing.assert_close(slope, expected)
