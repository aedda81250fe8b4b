"""Figures of the log by hand, intervals by simulation."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.rl.advantage import AdvantageConfig
from composer2.rl.metrics import (
    best_of_k,
    bootstrap_mean,
    group_metrics,
    paired_difference,
    pass_at_1,
    rollout_metrics,
    staleness_histogram,
    staleness_metrics,
)
from composer2.types import RolloutStats, RolloutStatus


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.data())
@settings(max_examples=50)
def test_best_of_k_is_the_mean_over_all_subsets(passed, data):
    k = data.draw(st.integers(1, len(passed)))
    subsets = list(itertools.combinations(passed, k))
    assert best_of_k(np.array([passed]), k)[0] == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_1_and_errors():
    assert pass_at_1(np.array([[True, False], [True, True]])).tolist() == [0.5, 1.0]
    with pytest.raises(ValueError, match=r"k is 3, accepted is 1\.\.2"):
        best_of_k(np.zeros((1, 2)), 3)
    with pytest.raises(ValueError, match="passed_NK"):
        pass_at_1(np.array([0.5, 1.0]))


def test_bootstrap_interval_covers_as_promised():
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        interval = bootstrap_mean(generator.random(60), generator, num_resamples=200)
        covered += interval.low <= 0.5 <= interval.high
    assert 0.88 <= covered / 200 <= 0.99


def test_bootstrap_repeats_with_its_generator():
    values = np.random.default_rng(1).random(20)
    one, two = (bootstrap_mean(values, np.random.default_rng(2), num_resamples=50) for _ in range(2))
    assert one == two
    assert one.mean == pytest.approx(values.mean())
    assert one.low < one.mean < one.high


def test_pairing_removes_what_tasks_share():
    generator = np.random.default_rng(0)
    before = generator.random(100)
    paired = paired_difference(before, before + 0.1, generator, num_resamples=100)
    assert (paired.low, paired.high) == pytest.approx((0.1, 0.1))
    with pytest.raises(ValueError, match="after_N has shape"):
        paired_difference(before, before[:5], generator)


def test_interval_of_nothing_is_nan_and_bad_levels_are_refused():
    assert np.isnan(bootstrap_mean(np.zeros(0), np.random.default_rng(0)).low)
    with pytest.raises(ValueError, match="level is 95"):
        bootstrap_mean(np.zeros(3), np.random.default_rng(0), level=95)
    with pytest.raises(ValueError, match="num_resamples is 0"):
        bootstrap_mean(np.zeros(3), np.random.default_rng(0), num_resamples=0)


def test_staleness_counts_sampled_tokens_only(build):
    rollouts = [build.rollout(segments=(build.segment(6, 3, versions=4), build.segment(5, 1, versions=2)))]
    histogram = staleness_histogram(rollouts, policy_version=5)
    assert histogram == {1: 3, 3: 1}
    assert staleness_metrics(histogram) == {"staleness_mean": 1.5, "staleness_max": 3.0}
    assert staleness_metrics({}) == {"staleness_mean": 0.0, "staleness_max": 0.0}


def test_rollout_metrics_leave_out_infrastructure(build):
    rollouts = [
        build.rollout(1.0, stats=RolloutStats(num_turns=2), events={"invalid_edit": 1}, reward_components={"a": 1.0}),
        build.rollout(
            0.0, stats=RolloutStats(num_turns=4), status=RolloutStatus.MAX_TURNS, reward_components={"a": 0.5}
        ),
        build.rollout(9.0, stats=RolloutStats(num_turns=90), status=RolloutStatus.INFRASTRUCTURE),
    ]
    metrics = rollout_metrics(rollouts)
    assert metrics["num_rollouts"] == 3
    assert metrics["infra_failure_rate"] == pytest.approx(1 / 3)
    assert metrics["reward_mean"] == 0.5
    assert metrics["pass_rate"] == 0.5
    assert metrics["num_turns"] == 3
    assert metrics["status/max_turns"] == 0.5
    assert metrics["event/invalid_edit"] == 0.5
    assert metrics["reward/a"] == 0.75
    assert rollout_metrics([]) == {"num_rollouts": 0.0, "infra_failure_rate": 0.0}


def test_group_metrics_by_hand(build):
    groups = [
        build.group([1.0, 1.0]),
        build.group([0.0, 0.0]),
        build.group([1.0, 0.0]),
        build.group([1.0, 0.0], lost=(0,)),
    ]
    metrics = group_metrics(groups, AdvantageConfig())
    assert metrics["degenerate_group_frac"] == 0.75
    assert metrics["all_passed_group_frac"] == 0.25
    assert metrics["none_passed_group_frac"] == 0.5
    assert metrics["best_of_group"] == 0.5
    assert metrics["zero_advantage_frac"] == pytest.approx(5 / 7)
    assert metrics["advantage_abs_mean"] == pytest.approx(1 / 7)
    assert metrics["withheld_frac"] == 0.0
