"""What the run log says about rollouts, groups and evaluations.

In: rollouts, groups, or a table of passes. Out: flat dicts of floats, and intervals.

Source: report Fig. 5 (mean reward and best-of-K); row R7. For n samples of a task of which c passed, the chance that
at least one of k drawn without replacement passed is 1 - C(n-c, k) / C(n, k); its mean over tasks is best-of-k.
Intervals are percentile bootstraps over tasks: the samples of one task are not independent, tasks are. A difference is
resampled in pairs, since both models saw the same tasks.

Shape letters: N tasks, K samples a task, R resamples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from composer2.rl.advantage import AdvantageConfig, group_advantages, is_degenerate, is_withheld, rewards_of
from composer2.types import Group, Rollout, RolloutStats, RolloutStatus


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with its bootstrap interval."""

    mean: float
    low: float
    high: float


def pass_at_1(passed_NK: np.ndarray) -> np.ndarray:
    """Share of passed samples for each task, float64 [N]."""
    return _table(passed_NK).mean(axis=1)


def best_of_k(passed_NK: np.ndarray, k: int) -> np.ndarray:
    """Unbiased chance that one of k samples passes, for each task, float64 [N]; 1 <= k <= K."""
    table_NK = _table(passed_NK)
    num_samples = table_NK.shape[1]
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k}, accepted is 1..{num_samples}, the samples of each task")
    total = comb(num_samples, k)
    return np.array([1.0 - comb(num_samples - int(count), k) / total for count in table_NK.sum(axis=1)])


def bootstrap_mean(
    values_N: np.ndarray, generator: np.random.Generator, *, num_resamples: int = 2000, level: float = 0.95
) -> Interval:
    """Mean over tasks with a percentile bootstrap interval; NaN throughout without tasks."""
    values_N = np.asarray(values_N, dtype=np.float64)
    if num_resamples < 1:
        raise ValueError(f"num_resamples is {num_resamples}, accepted is >= 1")
    if not 0 < level < 1:
        raise ValueError(f"level is {level}, accepted is in (0, 1)")
    if len(values_N) == 0:
        return Interval(mean=float("nan"), low=float("nan"), high=float("nan"))
    means_R = np.array(
        [values_N[generator.integers(len(values_N), size=len(values_N))].mean() for _ in range(num_resamples)]
    )
    low, high = np.quantile(means_R, [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean=float(values_N.mean()), low=float(low), high=float(high))


def paired_difference(
    before_N: np.ndarray,
    after_N: np.ndarray,
    generator: np.random.Generator,
    *,
    num_resamples: int = 2000,
    level: float = 0.95,
) -> Interval:
    """Mean of after - before over the same tasks in the same order, with a paired bootstrap interval."""
    before_N, after_N = np.asarray(before_N, dtype=np.float64), np.asarray(after_N, dtype=np.float64)
    if before_N.shape != after_N.shape:
        raise ValueError(f"after_N has shape {after_N.shape}, accepted is that of before_N: {before_N.shape}")
    return bootstrap_mean(after_N - before_N, generator, num_resamples=num_resamples, level=level)


def staleness_histogram(rollouts: Iterable[Rollout], policy_version: int) -> dict[int, int]:
    """How many sampled tokens are how many versions behind `policy_version`, in rising order of age."""
    ages: Counter[int] = Counter()
    for rollout in rollouts:
        for segment in rollout.segments:
            versions = segment.policy_versions[segment.sampled]
            for version, count in zip(*np.unique(versions, return_counts=True), strict=True):
                ages[policy_version - int(version)] += int(count)
    return dict(sorted(ages.items()))


def staleness_metrics(histogram: dict[int, int]) -> dict[str, float]:
    """staleness_mean and staleness_max over tokens; 0 without tokens."""
    total = sum(histogram.values())
    return {
        "staleness_mean": sum(age * count for age, count in histogram.items()) / total if total else 0.0,
        "staleness_max": float(max(histogram, default=0)),
    }


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over rollouts that are no infrastructure failure, and the failure rate over all.

    Keys: num_rollouts, infra_failure_rate, reward_mean, reward_std, pass_rate, passed_frac_mean, the means of every
    field of `RolloutStats`, status/*, event/* and reward/* (raw component values), all per rollout."""
    valid = [rollout for rollout in rollouts if rollout.status is not RolloutStatus.INFRASTRUCTURE]
    metrics = {
        "num_rollouts": float(len(rollouts)),
        "infra_failure_rate": (len(rollouts) - len(valid)) / len(rollouts) if rollouts else 0.0,
    }
    if not valid:
        return metrics
    rewards = np.array([rollout.reward for rollout in valid])
    metrics |= {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "pass_rate": _mean(rollout.passed for rollout in valid),
        "passed_frac_mean": _mean(rollout.passed_frac for rollout in valid),
        "num_attempts": _mean(len(rollout.attempts) for rollout in valid),
    }
    for name in RolloutStats.__dataclass_fields__:
        metrics[name] = _mean(getattr(rollout.stats, name) for rollout in valid)
    for status in (RolloutStatus.FINISHED, RolloutStatus.MAX_TURNS, RolloutStatus.CONTEXT_FULL):
        metrics[f"status/{status.value}"] = _mean(rollout.status is status for rollout in valid)
    for name in sorted({name for rollout in valid for name in rollout.events}):
        metrics[f"event/{name}"] = _mean(rollout.events.get(name, 0) for rollout in valid)
    for name in sorted({name for rollout in valid for name in rollout.reward_components}):
        metrics[f"reward/{name}"] = _mean(rollout.reward_components.get(name, 0.0) for rollout in valid)
    return metrics


def group_metrics(
    groups: Sequence[Group], config: AdvantageConfig, policy_version: int | None = None
) -> dict[str, float]:
    """How much of a step can teach anything: shares over its groups and rollouts.

    Keys: num_groups, degenerate_group_frac, all_passed_group_frac, none_passed_group_frac, best_of_group,
    zero_advantage_frac (of counted rollouts), withheld_frac, advantage_abs_mean."""
    degenerate, all_passed, none_passed, best = [], [], [], []
    absolute: list[float] = []
    withheld = num_rollouts = 0
    for group in groups:
        rewards_G, counts_G = rewards_of(group)
        passed = [rollout.passed for rollout, counts in zip(group.rollouts, counts_G, strict=True) if counts]
        degenerate.append(is_degenerate(rewards_G, counts_G))
        all_passed.append(bool(passed) and all(passed))
        none_passed.append(not any(passed))
        best.append(any(passed))
        absolute += np.abs(group_advantages(rewards_G, counts_G, config)[counts_G]).tolist()
        withheld += sum(is_withheld(rollout, config, policy_version) for rollout in group.rollouts)
        num_rollouts += len(group.rollouts)
    return {
        "num_groups": float(len(groups)),
        "degenerate_group_frac": _mean(degenerate),
        "all_passed_group_frac": _mean(all_passed),
        "none_passed_group_frac": _mean(none_passed),
        "best_of_group": _mean(best),
        "zero_advantage_frac": _mean(value == 0.0 for value in absolute),
        "withheld_frac": withheld / num_rollouts if num_rollouts else 0.0,
        "advantage_abs_mean": _mean(absolute),
    }


def _mean(values: Iterable[float]) -> float:
    collected = [float(value) for value in values]
    return sum(collected) / len(collected) if collected else 0.0


def _table(passed_NK: np.ndarray) -> np.ndarray:
    table_NK = np.asarray(passed_NK, dtype=np.float64)
    if table_NK.ndim != 2 or not np.isin(table_NK, (0.0, 1.0)).all():
        raise ValueError(f"passed_NK has shape {table_NK.shape}, accepted is a table [tasks, samples] of 0 and 1")
    return table_NK
