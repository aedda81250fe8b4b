"""Fault 15: k3 gives spikes of loss and gradient where k1 does not."""

import math

import pytest
import torch

from composer2.rl.kl import estimate

# log q - log p -> (value, slope in log q) of each estimator at one token.
EXPECTED = {
    ("k1", 5.0): (5.0, 1.0),
    ("k1", -5.0): (-5.0, 1.0),
    ("k2", 5.0): (12.5, 5.0),
    ("k2", -5.0): (12.5, -5.0),
    ("k3", 5.0): (math.exp(-5) - 1 + 5, 1 - math.exp(-5)),
    ("k3", -5.0): (math.exp(5) - 1 - 5, 1 - math.exp(5)),
}


@pytest.mark.parametrize(("estimator", "log_gap"), list(EXPECTED))
def test_value_and_slope(estimator, log_gap):
    policy = torch.tensor(-6.0 + log_gap, dtype=torch.float64, requires_grad=True)
    value = estimate(estimator, policy, torch.tensor(-6.0, dtype=torch.float64))
    (slope,) = torch.autograd.grad(value, policy)
    assert (float(value.detach()), float(slope)) == pytest.approx(EXPECTED[estimator, log_gap])


def test_only_k3_spikes_as_a_weight_of_the_policy_gradient():
    """In the advantage the value itself is the weight: 5 for k1, 142 for k3 at the same token."""
    assert estimate("k3", torch.tensor(-11.0), torch.tensor(-6.0)) > 28 * abs(
        estimate("k1", torch.tensor(-11.0), torch.tensor(-6.0))
    )
