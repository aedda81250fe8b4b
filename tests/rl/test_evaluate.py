"""Evaluation figures on small groups, by hand."""

import numpy as np
import pytest

from composer2.rl.evaluate import (
    EVAL_KEYS,
    EvalSpec,
    by_kind,
    compare,
    eval_figures,
    first_edit_is_valid,
    passed_by_try,
    passed_table,
    run_tasks,
)
from composer2.types import (
    Group,
    Message,
    Role,
    Rollout,
    RolloutStats,
    RolloutStatus,
    Task,
    ToolCall,
    ToolResult,
)


def task(name, kind="comparison"):
    return Task(task_id=name, instruction="", files={}, meta={"bug_kind": kind})


def turn(*calls):
    """An assistant message and the results: `calls` are (name, is_error)."""
    return (
        Message(role=Role.ASSISTANT, tool_calls=tuple(ToolCall(name=name) for name, _ in calls)),
        Message(role=Role.TOOL, tool_results=tuple(ToolResult(content="", is_error=bad) for _, bad in calls)),
    )


def rollout(attempts=(), *, index=0, tokens=10, turns=2, summaries=0, bad_edit=False, **fields):
    return Rollout(
        task_id="t",
        sample_index=index,
        segments=(),
        **({"status": RolloutStatus.FINISHED, "passed": any(attempts)} | fields),
        attempts=tuple(attempts),
        stats=RolloutStats(sampled_tokens=tokens, num_turns=turns, num_summaries=summaries),
        messages=turn(("edit", bad_edit), ("run", False)),
    )


def group(name, rollouts, kind="comparison"):
    return Group(task=task(name, kind), rollouts=tuple(rollouts))


GROUPS = [
    group("a", [rollout([True]), rollout([False, True], tokens=20, turns=4), rollout([False, False], bad_edit=True)]),
    group(
        "b",
        [rollout([False, False, True], summaries=1), rollout([], status=RolloutStatus.INFRASTRUCTURE), rollout([True])],
        "operator",
    ),
]


def test_figures_by_hand():
    figures = eval_figures(GROUPS, np.random.default_rng(0))
    assert figures["num_tasks"] == 2
    assert figures["num_samples"] == 3
    assert figures["pass_at_1"] == pytest.approx(2 / 3)  # a: 2 of 3, b: 2 of 3
    assert figures["pass_ci_low"] == figures["pass_ci_high"] == pytest.approx(2 / 3)
    assert figures["best_of_3"] == 1.0
    assert figures["tokens"] == pytest.approx(70 / 6)
    assert figures["turns"] == pytest.approx(14 / 6)
    assert figures["summaries"] == 1
    assert figures["infra_failures"] == 1
    assert figures["first_edit_valid"] == pytest.approx(5 / 6)
    assert figures["pass_given_valid"] == pytest.approx(2 / 5)
    assert figures["pass_by_try_1"] == pytest.approx(2 / 6)
    assert figures["pass_by_try_2"] == pytest.approx(3 / 6)
    assert figures["pass_by_try_3"] == pytest.approx(4 / 6)


def test_second_try_against_a_fresh_first_try():
    figures = eval_figures(GROUPS, np.random.default_rng(0))
    # First runs failed in three rollouts: a1 passed at its second, a2 and b0 did not.
    assert figures["later_try_pass"] == pytest.approx(1 / 3)
    # Fresh first tries of the same tasks: a1 -> (a0 yes, a2 no), a2 -> (a0 yes, a1 no), b0 -> (b1 no, b2 yes).
    assert figures["independent_try_pass"] == pytest.approx(1 / 2)
    assert figures["later_try_gain"] == pytest.approx(1 / 3 - 1 / 2)
    # Resampled tasks are a twice (1/2 - 1/2), b twice (0 - 1/2) or one of each.
    assert figures["later_try_gain_ci_low"] == pytest.approx(-1 / 2)
    assert figures["later_try_gain_ci_high"] == pytest.approx(0)


def test_independent_try_weighs_tasks_by_their_failures():
    hard = group("hard", [rollout([False]), rollout([False]), rollout([False]), rollout([False])])
    easy = group("easy", [rollout([False]), rollout([True]), rollout([True]), rollout([True])])
    figures = eval_figures([hard, easy], np.random.default_rng(0))
    assert figures["independent_try_pass"] == pytest.approx((4 * 0 + 1 * 1) / 5)
    assert figures["later_try_pass"] == 0.0


def test_shares_of_nothing_are_zero():
    figures = eval_figures([group("a", [rollout([True])])], np.random.default_rng(0))
    assert figures["later_try_pass"] == figures["independent_try_pass"] == 0.0


def test_tries_of_one_rollout():
    tried = rollout([False, True, False])
    assert [passed_by_try(tried, n) for n in (0, 1, 2, 3)] == [False, False, True, True]


def test_first_edit_is_the_first_call_named_edit():
    def of(*turns):
        return Rollout(
            task_id="t", sample_index=0, segments=(), status=RolloutStatus.FINISHED, messages=sum(turns, start=())
        )

    assert first_edit_is_valid(of(turn(("edit", False))))
    assert first_edit_is_valid(of(turn(("read", True), ("edit", False)), turn(("edit", True))))
    assert not first_edit_is_valid(of(turn(("edit", True)), turn(("edit", False))))
    assert first_edit_is_valid(of(turn(("run", False)), turn(("edit", False))))
    assert not first_edit_is_valid(of(turn(("run", False), ("finish", False))))
    assert not first_edit_is_valid(of())


def test_an_infrastructure_failure_counts_as_not_passed():
    assert passed_table(GROUPS).tolist() == [[1, 1, 0], [1, 0, 1]]


def test_by_kind():
    groups = [*GROUPS, group("c", [rollout([False])], "operator")]
    found = by_kind(groups)
    assert found["comparison"] == {"n": 1, "pass_at_1": pytest.approx(2 / 3)}
    assert found["operator"] == {"n": 2, "pass_at_1": pytest.approx((2 / 3 + 0) / 2)}
    assert list(found) == sorted(found)


def test_compare_is_paired():
    before = np.array([[0, 0], [1, 0], [1, 1]])
    after = np.array([[1, 0], [1, 1], [1, 1]])
    figures = compare(before, after, np.random.default_rng(0))
    assert figures["pass_gain"] == pytest.approx((0.5 + 0.5 + 0) / 3)
    assert figures["best_gain"] == pytest.approx((1 + 0 + 0) / 3)
    # Every resample of the paired gains lies in what the tasks gained.
    assert 0 <= figures["pass_gain_ci_low"] <= figures["pass_gain"] <= figures["pass_gain_ci_high"] <= 0.5
    same = compare(after, after, np.random.default_rng(0))
    assert set(same.values()) == {0.0}


def test_specs_are_checked():
    with pytest.raises(ValueError, match=r"EvalSpec.num_samples is 0"):
        EvalSpec(name="test", num_tasks=1, num_samples=0)


class InstantPool:
    """Answers each request when it is collected, and records how many were on the way."""

    def __init__(self):
        self.open, self.cohorts, self.most_open = {}, [], 0

    def submit(self, requests):
        self.cohorts.append([request.key for request in requests])
        self.open |= {request.key: request for request in requests}
        self.most_open = max(self.most_open, len(self.open))

    def collect(self, keys, *, should_stop):
        if should_stop():
            return {}
        found = {key: self.open.pop(key) for key in keys}
        return {
            key: Group(task=request.task, rollouts=tuple(rollout(index=i) for i in range(request.num_samples)))
            for key, request in reversed(found.items())
        }


def test_tasks_come_back_in_order_with_two_cohorts_on_the_way():
    pool, progress = InstantPool(), []
    tasks = [task(f"t{index}") for index in range(10)]
    groups = run_tasks(pool, tasks, num_samples=2, seed=3, cohort=4, on_progress=progress.append)
    assert [found.task.task_id for found in groups] == [f"t{index}" for index in range(10)]
    assert [len(keys) for keys in pool.cohorts] == [4, 4, 2]
    assert min(key for keys in pool.cohorts for key in keys) == EVAL_KEYS
    assert pool.most_open == 8
    assert progress == [4, 8, 10]


def test_a_stop_returns_what_there_is():
    pool = InstantPool()
    assert run_tasks(pool, [task("a")], num_samples=1, seed=0, should_stop=lambda: True) == []
    assert run_tasks(pool, [], num_samples=1, seed=0) == []
