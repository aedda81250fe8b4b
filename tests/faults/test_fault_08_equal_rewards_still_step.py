"""Fault 8: groups of equal rewards have zero advantage but take a KL step nobody asked for."""

import numpy as np
import pytest

from composer2.rl.advantage import BASELINES, AdvantageConfig, group_samples
from composer2.rl.kl import KLConfig


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -0.3])
def test_without_kl_an_equal_group_has_no_samples_and_so_exactly_no_gradient(build, baseline, reward):
    assert group_samples(build.group([reward] * 7), AdvantageConfig(baseline=baseline)) == []


def test_with_kl_an_equal_group_takes_exactly_its_kl_step(build):
    """Stated behaviour: the KL term does not depend on the rewards of the group."""
    reference = [[np.where(np.arange(6) >= 3, -2.0, 0.0)]] * 2
    config = AdvantageConfig(kl=KLConfig(weight=0.5))
    equal = group_samples(build.group([1.0, 1.0]), config, reference_logprobs=reference)
    mixed = group_samples(build.group([1.0, 0.0]), config, reference_logprobs=reference)
    # k1 = -1 - (-2) = 1 at each of three tokens: -0.5 * (3, 2, 1)
    for sample in equal:
        np.testing.assert_allclose(sample.advantages, [0, 0, 0, -1.5, -1.0, -0.5])
    for sample, advantage in zip(mixed, (0.5, -0.5), strict=True):
        np.testing.assert_allclose(sample.advantages[3:] - advantage, [-1.5, -1.0, -0.5])


def test_other_groups_are_unaffected_by_an_equal_one(build):
    """Nothing is computed over more than one group."""
    alone = group_samples(build.group([1.0, 0.0]), AdvantageConfig(baseline="grpo"))
    group_samples(build.group([1.0, 1.0]), AdvantageConfig(baseline="grpo"))
    again = group_samples(build.group([1.0, 0.0]), AdvantageConfig(baseline="grpo"))
    assert all((a.advantages == b.advantages).all() for a, b in zip(alone, again, strict=True))
