"""Difficulty upsampling: weights by hand, frequencies against their probabilities, no prompt twice."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.rl.curriculum import (
    CurriculumConfig,
    FamilyStats,
    check_distinct,
    draw_order,
    family_stats,
    family_weights,
    split_probes,
    strength_at,
)
from composer2.types import Group, RolloutStats, RolloutStatus, Task


def tasks_of(**counts):
    return [
        Task(task_id=f"{family}{i}", instruction=f"{family} {i}", files={}, family=family)
        for family, count in counts.items()
        for i in range(count)
    ]


def stats_of(**turns):
    """Families with these turns and nine times as many thinking tokens."""
    return {
        family: FamilyStats(num_rollouts=4, mean_turns=value - 1, mean_thinking_tokens=9 * value - 1)
        for family, value in turns.items()
    }


def test_strength_ramps_from_its_start_to_the_end():
    config = CurriculumConfig(start_frac=0.6, strength=2.0)
    assert [strength_at(x, config) for x in (0.0, 0.6, 0.8, 1.0)] == pytest.approx([0, 0, 1, 2])


def test_weights_by_hand():
    config = CurriculumConfig(start_frac=0.0, strength=0.5)
    # turns + 1 are 1 and 3, mean 2: ratios 1/2 and 3/2; the same for thinking. At progress 1: (ratio * ratio)^0.5.
    assert family_weights(stats_of(easy=1, hard=3), config, 1.0) == pytest.approx({"easy": 0.5, "hard": 1.5})
    assert family_weights(stats_of(easy=1, hard=3), config, 0.0) == {"easy": 1.0, "hard": 1.0}
    only_turns = replace(config, thinking_exponent=0.0)
    assert family_weights(stats_of(easy=1, hard=3), only_turns, 1.0)["hard"] == pytest.approx(1.5**0.5)


def test_thinking_counts_beside_turns_by_hand():
    """The same turns; thinking tokens + 1 are 10 and 30, mean 20: ratios 1/2 and 3/2, squared by their exponent."""
    stats = {
        name: FamilyStats(num_rollouts=1, mean_turns=3, mean_thinking_tokens=tokens)
        for name, tokens in (("short", 9), ("long", 29))
    }
    config = CurriculumConfig(start_frac=0.0, thinking_exponent=2.0)
    assert family_weights(stats, config, 1.0) == pytest.approx({"short": 0.25, "long": 2.25})


def test_stats_leave_failures_of_the_machinery_out_and_keep_failed_rollouts(build):
    def rollout(turns, thinking, status=RolloutStatus.FINISHED, reward=0.0):
        stats = RolloutStats(num_turns=turns, thinking_tokens=thinking)
        return build.rollout(reward, status=status, stats=stats)

    groups = [
        Group(task=tasks_of(a=1)[0], rollouts=(rollout(2, 10), rollout(4, 20, reward=1.0))),
        Group(task=tasks_of(a=2)[1], rollouts=(rollout(6, 30), rollout(99, 99, RolloutStatus.INFRASTRUCTURE))),
        Group(task=tasks_of(b=1)[0], rollouts=(rollout(1, 1, RolloutStatus.INFRASTRUCTURE),)),
    ]
    assert family_stats(groups) == {"a": FamilyStats(num_rollouts=3, mean_turns=4.0, mean_thinking_tokens=20.0)}


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1), st.integers(0, 99))
def test_probes_and_training_tasks_are_disjoint(counts, seed):
    tasks = tasks_of(**counts)
    probes, rest = split_probes(tasks, CurriculumConfig(probes_per_family=2), np.random.default_rng(seed))
    assert sorted(t.task_id for t in (*probes, *rest)) == sorted(t.task_id for t in tasks)
    for family, count in counts.items():
        assert sum(task.family == family for task in probes) == min(2, count)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1), st.floats(0, 5), st.integers(0, 99))
def test_everything_is_drawn_once_whatever_the_weights(counts, strength, seed):
    tasks = tasks_of(**counts)
    stats = stats_of(**{family: 1 + 10 * i for i, family in enumerate(counts)})
    config = CurriculumConfig(start_frac=0.0, strength=strength)
    order = draw_order(tasks, stats, config, np.random.default_rng(seed))
    assert sorted(task.task_id for task in order) == sorted(task.task_id for task in tasks)


def test_first_draw_has_the_stated_probability():
    tasks, stats = tasks_of(easy=30, hard=10), stats_of(easy=1, hard=3)
    config = CurriculumConfig(start_frac=0.0, strength=1.0)
    # At progress 1 the weights are (1/2)^2 and (3/2)^2: hard has 10 * 9/4 of 10 * 9/4 + 30 * 1/4 = 3/4, evenly 1/4.
    for already, expected in ((0, 0.25), (100, 0.75)):
        hits = [
            draw_order(tasks, stats, config, np.random.default_rng(seed), count=1, already_drawn=already, total=100)[
                0
            ].family
            == "hard"
            for seed in range(2000)
        ]
        assert np.mean(hits) == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 2000) ** 0.5)


def test_hard_tasks_come_late_more_often_and_evenly_before():
    tasks, stats = tasks_of(easy=400, hard=400), stats_of(easy=1, hard=4)
    shares = []
    for seed in range(20):
        order = draw_order(
            tasks, stats, CurriculumConfig(start_frac=0.5, strength=1.0), np.random.default_rng(seed), count=400
        )
        hard = np.array([task.family == "hard" for task in order])
        shares.append((hard[:200].mean(), hard[-50:].mean()))
    early, late = np.mean(shares, axis=0)
    assert early == pytest.approx(0.5, abs=0.03)
    assert late > 0.75


def test_going_on_after_a_new_measurement_repeats_nothing():
    tasks, config = tasks_of(a=20, b=20), CurriculumConfig(start_frac=0.0)
    first = draw_order(tasks, stats_of(a=1, b=9), config, np.random.default_rng(0), count=15, total=30)
    left = [task for task in tasks if task not in first]
    second = draw_order(
        left, stats_of(a=9, b=1), config, np.random.default_rng(1), count=15, already_drawn=15, total=30
    )
    assert len({task.task_id for task in (*first, *second)}) == 30


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_the_same_seed_gives_the_same_order(seed):
    tasks, stats = tasks_of(a=5, b=5), stats_of(a=1, b=2)
    orders = [draw_order(tasks, stats, CurriculumConfig(), np.random.default_rng(seed)) for _ in range(2)]
    assert orders[0] == orders[1]


def test_no_prompt_twice_under_one_id_or_two():
    tasks = tasks_of(a=2)
    with pytest.raises(ValueError, match="'a0' occurs twice"):
        check_distinct([*tasks, tasks[0]])
    with pytest.raises(ValueError, match="'a0' and 'other' have the same prompt"):
        draw_order([*tasks, replace(tasks[0], task_id="other")], stats_of(a=1), CurriculumConfig(), None)


def test_errors():
    with pytest.raises(ValueError, match="stats lack the family 'b'"):
        draw_order(tasks_of(a=1, b=1), stats_of(a=1), CurriculumConfig(), np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"count is 3, accepted is 0\.\.2"):
        draw_order(tasks_of(a=2), stats_of(a=1), CurriculumConfig(), np.random.default_rng(0), count=3)
    for fields in ({"start_frac": 1.0}, {"strength": -1.0}, {"thinking_exponent": -1}, {"probes_per_family": 0}):
        with pytest.raises(ValueError, match=rf"CurriculumConfig\.{next(iter(fields))} is"):
            CurriculumConfig(**fields)
