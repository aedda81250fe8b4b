"""Fault 13: the KL averaged without the mask; a directly differentiated k1 ignores the reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from composer2.rl.advantage import AdvantageConfig, group_samples
from composer2.rl.kl import KLConfig
from composer2.rl.loss import LossConfig, policy_loss
from composer2.rl.pack import pack, to_tensors


def loss_and_slope(build, reference_logprob, num_pads):
    reference = [[np.full(6, reference_logprob)], [np.full(6, reference_logprob)]]
    samples = group_samples(
        build.group([1.0, 0.0]), AdvantageConfig(kl=KLConfig(weight=0.3)), reference_logprobs=reference
    )
    (batch,) = pack(samples, row_length=12, rows_per_batch=1)
    pads = {"document_ids": -1, "policy_versions": -1, "routes": -1}
    padded = {}
    for name in ("token_ids", "position_ids", "document_ids", "loss_mask", "advantages", "behaviour_logprobs",
                 "policy_versions", "routes"):  # fmt: skip
        values = getattr(batch, name)
        width = [(0, 0), (0, num_pads)] + [(0, 0)] * (values.ndim - 2)
        padded[name] = np.pad(values, width, constant_values=pads.get(name, 0))
    tensors = to_tensors(replace(batch, **padded))
    logprobs = torch.full(tensors.token_ids.shape, -1.2, requires_grad=True)
    loss, _ = policy_loss(logprobs, tensors, LossConfig(), 16.0)
    return float(loss.detach()), torch.autograd.grad(loss, logprobs)[0][tensors.loss_mask]


def test_a_hundred_pads_change_nothing(build):
    plain, padded = loss_and_slope(build, -2.0, 0), loss_and_slope(build, -2.0, 100)
    assert plain[0] == pytest.approx(padded[0], rel=1e-6)
    torch.testing.assert_close(plain[1], padded[1])


def test_another_reference_changes_the_gradient(build):
    assert (loss_and_slope(build, -2.0, 0)[1] - loss_and_slope(build, -2.5, 0)[1]).abs().min() > 1e-3
