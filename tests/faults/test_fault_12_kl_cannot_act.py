"""Fault 12: KL terms computed without gradient, so that the penalty cannot act."""

import numpy as np
import torch

from composer2.rl.advantage import AdvantageConfig, group_samples
from composer2.rl.kl import KLConfig
from composer2.rl.loss import LossConfig, policy_loss, token_logprobs
from composer2.rl.pack import pack, to_tensors


def test_with_zero_advantage_the_kl_alone_moves_the_policy_towards_the_reference(build):
    table = torch.nn.Parameter(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))
    group = build.group([1.0, 1.0])
    reference = [[np.full(6, -3.0)], [np.full(6, -3.0)]]  # less likely than the behaviour's -1: k1 = 2
    samples = group_samples(group, AdvantageConfig(kl=KLConfig(weight=1.0)), reference_logprobs=reference)
    (batch,) = map(to_tensors, pack(samples, row_length=16, rows_per_batch=1))
    logprobs, _ = token_logprobs(table[batch.token_ids], batch.token_ids)
    policy_loss(logprobs, batch, LossConfig(correction="none"), 1.0)[0].backward()
    assert table.grad.abs().max() > 0.1
    with torch.no_grad():
        table -= 0.01 * table.grad
        after, _ = token_logprobs(table[batch.token_ids], batch.token_ids)
    assert after[batch.loss_mask].sum() < logprobs.detach()[batch.loss_mask].sum()
