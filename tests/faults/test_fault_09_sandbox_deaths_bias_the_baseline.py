"""Fault 9: sandbox deaths scored as reward 0 bias the baseline of their group."""

import numpy as np

from composer2.rl.advantage import AdvantageConfig, group_samples
from composer2.rl.loss import LossConfig, loss_denominator
from composer2.rl.metrics import rollout_metrics


def test_two_deaths_of_eight_leave_statistics_over_six(build):
    rewards = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    group = build.group(rewards, lost=(3, 6))
    samples = group_samples(group, AdvantageConfig())
    assert len(samples) == 6
    np.testing.assert_allclose([s.advantages[-1] for s in samples], [4 / 6] * 2 + [-2 / 6] * 4, rtol=1e-6)
    metrics = rollout_metrics(group.rollouts)
    assert metrics["infra_failure_rate"] == 0.25
    assert metrics["pass_rate"] == 2 / 6


def test_deaths_do_not_change_the_scale_of_the_step():
    """The denominator counts planned rollouts, so the siblings' gradient is what it would have been."""
    assert loss_denominator(LossConfig(norm_length=16), num_rollouts_planned=8) == 128
