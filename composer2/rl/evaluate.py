"""Evaluation of a policy on held-out tasks: the same pool, harness and pods as training; in go tasks, out come figures.

Source: report §5 and Fig. 5 (mean and best-of-K through training, side by side); row V2, row R7.
Choice: intervals are percentile bootstraps over tasks, since samples of one task are not independent.

Shape letters: N tasks, K samples of a task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from composer2.rl.metrics import best_of_k, bootstrap_mean, paired_difference, pass_at_1
from composer2.rl.system.worker import GroupRequest, Pool
from composer2.types import Group, Rollout, RolloutStatus, Task

EVAL_KEYS = 1 << 40
"""Keys of evaluation groups begin here, far above those of training."""


@dataclass(frozen=True, kw_only=True)
class EvalSpec:
    """One evaluation set."""

    name: str
    """test (unseen compositions), dev, ood (unseen skeletons), humaneval or stdlib (mutants of real functions)."""
    num_tasks: int
    """Tasks, the same ones before and after RL."""
    num_samples: int = 8
    """K: samples of each task."""

    def __post_init__(self) -> None:
        for name in ("num_tasks", "num_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"EvalSpec.{name} is {getattr(self, name)}, accepted is 1 or more")


def run_tasks(
    pool: Pool,
    tasks: Sequence[Task],
    *,
    num_samples: int,
    seed: int,
    temperature: float = 1.0,
    cohort: int = 16,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[Group]:
    """`num_samples` episodes of each task, in the order of `tasks`; fewer groups when stopped.

    Tasks go out in cohorts with two on the way, so that a lockstep pool decodes the same batches in every run."""
    keys = [EVAL_KEYS + index for index in range(len(tasks))]
    requests = [
        GroupRequest(
            key=key, task=task, num_samples=num_samples, seed=seed * 1_000_003 + index, temperature=temperature
        )
        for index, (key, task) in enumerate(zip(keys, tasks, strict=True))
    ]
    chunks = [slice(start, start + cohort) for start in range(0, len(tasks), cohort)]
    got: dict[int, Group] = {}
    for index, chunk in enumerate(chunks):
        pool.submit(requests[chunk])
        if index:
            got |= pool.collect(keys[chunks[index - 1]], should_stop=should_stop)
            on_progress(len(got))
    if chunks:
        got |= pool.collect(keys[chunks[-1]], should_stop=should_stop)
        on_progress(len(got))
    return [got[key] for key in keys if key in got]


def passed_table(groups: Sequence[Group]) -> np.ndarray:
    """float64 [N, K] of 0 and 1. An infrastructure failure counts as not passed; its number is in `eval_figures`."""
    return np.array([[float(rollout.passed) for rollout in group.rollouts] for group in groups])


def passed_by_try(rollout: Rollout, tries: int) -> bool:
    """True when one of the first `tries` test runs of the episode passed."""
    return any(rollout.attempts[:tries])


def first_edit_is_valid(rollout: Rollout) -> bool:
    """True when the first edit of the episode was carried out (its old text was found and something changed)."""
    names: list[str] = []
    for message in rollout.messages:
        if message.tool_calls:
            names = [call.name for call in message.tool_calls]
        for name, result in zip(names, message.tool_results, strict=False):
            if name == "edit":
                return not result.is_error
    return False


def eval_figures(groups: Sequence[Group], rng: np.random.Generator) -> dict[str, Any]:
    """Pass@1 and best of K with 95 % intervals, what the episodes took, and how the first and later tries did.

    `later_try_pass`: of rollouts whose first run failed, the share that passed at the second; `independent_try_pass`:
    the chance of a fresh first try on the same tasks, weighed by how often each task's first try failed. Feedback helps
    when the former is above the latter: `later_try_gain` is their difference."""
    table_NK = passed_table(groups)
    mean, best = (
        bootstrap_mean(values, rng) for values in (pass_at_1(table_NK), best_of_k(table_NK, table_NK.shape[1]))
    )
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    valid_first = [rollout for rollout in rollouts if first_edit_is_valid(rollout)]
    figures: dict[str, Any] = {
        "num_tasks": len(groups),
        "num_samples": table_NK.shape[1],
        "pass_at_1": mean.mean,
        "pass_ci_low": mean.low,
        "pass_ci_high": mean.high,
        f"best_of_{table_NK.shape[1]}": best.mean,
        "best_ci_low": best.low,
        "best_ci_high": best.high,
        "tokens": float(np.mean([rollout.stats.sampled_tokens for rollout in rollouts])),
        "turns": float(np.mean([rollout.stats.num_turns for rollout in rollouts])),
        "summaries": sum(rollout.stats.num_summaries for rollout in rollouts),
        "infra_failures": sum(rollout.status is RolloutStatus.INFRASTRUCTURE for rollout in rollouts),
        "first_edit_valid": len(valid_first) / len(rollouts),
        "pass_given_valid": _share(passed_by_try(rollout, 1) for rollout in valid_first),
        "by_kind": by_kind(groups),
    }
    figures |= later_tries(groups, rng)
    return figures | {f"pass_by_try_{n}": _share(passed_by_try(rollout, n) for rollout in rollouts) for n in (1, 2, 3)}


def later_tries(groups: Sequence[Group], rng: np.random.Generator, num_resamples: int = 2000) -> dict[str, float]:
    """The second try against a fresh one, and their difference with a 95 % bootstrap interval over tasks."""
    counts_N3 = np.zeros((len(groups), 3))  # first tries that failed, second tries that passed, fresh ones expected to
    for row_3, group in zip(counts_N3, groups, strict=True):
        if len(group.rollouts) < 2:
            continue
        first = np.array([passed_by_try(rollout, 1) for rollout in group.rollouts])
        for index, rollout in enumerate(group.rollouts):
            if rollout.attempts and not rollout.attempts[0]:
                fresh = np.delete(first, index).mean()
                row_3 += (1.0, float(passed_by_try(rollout, 2)), fresh)
    failed, later, independent = counts_N3.sum(axis=0)
    if failed == 0:
        return dict.fromkeys(("later_try_pass", "independent_try_pass"), 0.0)
    sums_R3 = np.array(
        [counts_N3[rng.integers(len(groups), size=len(groups))].sum(axis=0) for _ in range(num_resamples)]
    )
    gains_R = (sums_R3[:, 1] - sums_R3[:, 2]) / np.maximum(sums_R3[:, 0], 1)
    low, high = np.quantile(gains_R, [0.025, 0.975])
    return {
        "later_try_pass": later / failed,
        "independent_try_pass": independent / failed,
        "later_try_gain": (later - independent) / failed,
        "later_try_gain_ci_low": float(low),
        "later_try_gain_ci_high": float(high),
    }


def by_kind(groups: Sequence[Group]) -> dict[str, dict[str, float]]:
    """Pass@1 for each kind of bug."""
    found: dict[str, list[float]] = {}
    for group in groups:
        kind = str(group.task.meta.get("bug_kind", "other"))
        found.setdefault(kind, []).append(float(np.mean([rollout.passed for rollout in group.rollouts])))
    return {kind: {"n": len(values), "pass_at_1": float(np.mean(values))} for kind, values in sorted(found.items())}


def compare(before_NK: np.ndarray, after_NK: np.ndarray, rng: np.random.Generator) -> Mapping[str, float]:
    """Paired differences of pass@1 and best of K over the same tasks, with 95 % bootstrap intervals."""
    gain = paired_difference(pass_at_1(before_NK), pass_at_1(after_NK), rng)
    k = before_NK.shape[1]
    best = paired_difference(best_of_k(before_NK, k), best_of_k(after_NK, k), rng)
    return {
        "pass_gain": gain.mean,
        "pass_gain_ci_low": gain.low,
        "pass_gain_ci_high": gain.high,
        "best_gain": best.mean,
        "best_ci_low": best.low,
        "best_ci_high": best.high,
    }


def _share(values: Any) -> float:
    collected = [float(value) for value in values]
    return sum(collected) / len(collected) if collected else 0.0
