"""Fault 89: ageing out one member cancels its whole group."""

import numpy as np
import pytest

from composer2.rl.advantage import AdvantageConfig, group_samples
from composer2.rl.metrics import group_metrics


def test_the_old_member_is_withheld_and_its_siblings_keep_the_baseline(build):
    fresh = [(build.segment(6, 3, versions=9, seed=i),) for i in range(3)]
    old = (build.segment(6, 3, versions=5), build.segment(6, 3, versions=9))  # began long ago, ended just now
    group = build.group([1.0, 1.0, 0.0, 0.0], segments=[old, *fresh])
    config = AdvantageConfig(max_token_age=3)
    samples = group_samples(group, config, policy_version=9)
    np.testing.assert_allclose([s.advantages[-1] for s in samples], [0.5, -0.5, -0.5])
    assert group_metrics([group], config, policy_version=9)["withheld_frac"] == 0.25
    assert len(group_samples(group, config, policy_version=8)) == 5  # just young enough: both its windows
    assert len(group_samples(group, AdvantageConfig(), policy_version=99)) == 5


def test_the_age_needs_a_version_to_count_from(build):
    with pytest.raises(ValueError, match="policy_version is None"):
        group_samples(build.group([1.0, 0.0]), AdvantageConfig(max_token_age=3))
