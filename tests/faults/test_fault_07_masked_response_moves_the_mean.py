"""Fault 7: a response whose tokens are all masked still moves the mean of its group."""

import numpy as np
import pytest

from composer2.rl.advantage import AdvantageConfig, group_advantages, group_samples, rewards_of


def test_the_mean_runs_over_the_other_three(build):
    segments = [(build.segment(6, 3, seed=i),) for i in range(4)]
    segments[1] = (build.segment(6, 0),)
    group = build.group([1.0, 1.0, 0.0, 0.0], segments=segments)
    advantages = group_advantages(*rewards_of(group), AdvantageConfig())
    np.testing.assert_allclose(advantages, [2 / 3, 0, -1 / 3, -1 / 3])
    samples = group_samples(group, AdvantageConfig())
    assert [sample.advantages[-1] for sample in samples] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    grpo = group_advantages(*rewards_of(group), AdvantageConfig(baseline="grpo"))
    np.testing.assert_allclose(grpo[[0, 2, 3]], np.array([2, -1, -1]) / 2**0.5, atol=1e-5)
