"""Fault 2: the normaliser counts the generation batch while the gradient covers a shorter optimiser window."""

import pytest
import torch

from composer2.rl.loss import LossConfig, loss_denominator, policy_loss, token_logprobs
from composer2.rl.pack import pack, to_tensors


@pytest.mark.parametrize("normaliser", ["constant", "tokens"])
def test_each_optimiser_window_equals_a_one_shot_reference_on_its_own_samples(build, normaliser):
    """A generation batch of 8 samples, two optimiser windows of 4: a window is normalised by what it holds."""
    samples = [build.sample(8, num_sampled=1 + i % 5, advantage=i - 3.5, seed=i, logprob=-3.5) for i in range(8)]
    config = LossConfig(correction="none", normaliser=normaliser, norm_length=4)
    table = torch.nn.Parameter(torch.randn(32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    for window in (samples[:4], samples[4:]):
        table.grad = None
        num_tokens = sum(int(sample.loss_mask.sum()) for sample in window)
        denominator = loss_denominator(config, num_rollouts_planned=len(window), num_tokens=num_tokens)
        for batch in map(to_tensors, pack(window, row_length=8, rows_per_batch=1)):
            logprobs, _ = token_logprobs(table[batch.token_ids], batch.token_ids)
            policy_loss(logprobs, batch, config, denominator)[0].backward()
        divisor = 4 * 4 if normaliser == "constant" else num_tokens
        reference = torch.zeros_like(table)
        for sample in window:
            tokens = torch.from_numpy(sample.token_ids).long()
            for t in sample.loss_mask.nonzero()[0]:
                before, token = tokens[t - 1], tokens[t]
                score = -torch.softmax(table[before].detach(), 0)
                score[token] += 1
                reference[before] -= float(sample.advantages[t]) * score / divisor
        torch.testing.assert_close(table.grad, reference, atol=1e-9, rtol=0)
