"""The concave length penalty: each further step costs less than the one before.

In: the counts of a rollout. Out: C(x) >= 0, which the reward subtracts with a weight.

Source: report §4.2 and Fig. 6; row R5.

    C(x) = ((1 + k x)^(1-q) - 1) / (k (1-q)),    limit log(1 + k x) / k at q = 1

C(0) = 0, C'(0) = 1, increasing; concave for q > 0, linear for q = 0. k sets where the bend begins, q how hard it bends.
It is computed as (L / k) * expm1(z) / z with L = log1p(k x), z = (1-q) L, which is accurate at and around q = 1.

Choice: `apply_to="all"` is the default, since the report adds the term to the reward without a condition. It makes a
short failure better than a long one; `passed` charges only rollouts that solved the task.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from composer2.types import Rollout, RolloutStats

ApplyTo = Literal["all", "passed"]


@dataclass(frozen=True, kw_only=True)
class EffortWeights:
    """Weights of the sum x; each is the cost of one unit, before the bend."""

    thinking_tokens: float = 0.01
    """A token of reasoning."""
    tool_call_tokens: float = 0.01
    """A token of a tool call."""
    tool_output_tokens: float = 0.001
    """A token a tool answered: cheap, but it fills the context."""
    final_message_tokens: float = 0.01
    """A token of the last message."""
    num_tool_calls: float = 0.1
    """A tool call; parallel calls count one each."""
    num_turns: float = 0.2
    """A turn, the part of the cost that parallel calls save."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"EffortWeights.{name} is {value}, accepted is a finite number >= 0")


@dataclass(frozen=True, kw_only=True)
class LengthPenaltyConfig:
    """Shape of the penalty. Its weight in the reward belongs to the reward component `length_penalty`."""

    k: float = 1.0
    """Curvature scale, in units of 1/x."""
    q: float = 1.0
    """Curvature exponent; 0 is linear, 1 logarithmic, above 1 bounded by 1 / (k (q - 1))."""
    effort: EffortWeights = field(default_factory=EffortWeights)
    """How the counts of a rollout add up to x."""
    apply_to: ApplyTo = "all"
    """`all` rollouts, or only those that `passed`."""

    def __post_init__(self) -> None:
        if not (np.isfinite(self.k) and self.k > 0):
            raise ValueError(f"LengthPenaltyConfig.k is {self.k}, accepted is a finite number > 0")
        if not (np.isfinite(self.q) and self.q >= 0):
            raise ValueError(f"LengthPenaltyConfig.q is {self.q}, accepted is a finite number >= 0")
        if self.apply_to not in ("all", "passed"):
            raise ValueError(f"LengthPenaltyConfig.apply_to is {self.apply_to!r}, accepted is 'all' or 'passed'")


def concave_cost(x: float | np.ndarray, *, k: float, q: float) -> np.ndarray:
    """C(x) of the formula at the top, float64, elementwise; x >= 0, k > 0, q >= 0, all finite."""
    x = np.asarray(x, dtype=np.float64)
    wrong = x[~(np.isfinite(x) & (x >= 0))]
    if wrong.size:
        raise ValueError(f"x holds {wrong[0]}, accepted are finite numbers >= 0")
    if not (np.isfinite(k) and k > 0):
        raise ValueError(f"k is {k}, accepted is a finite number > 0")
    if not (np.isfinite(q) and q >= 0):
        raise ValueError(f"q is {q}, accepted is a finite number >= 0")
    log_term = np.log1p(k * x)
    z = (1.0 - q) * log_term
    safe = np.where(z == 0.0, 1.0, z)
    return (log_term / k) * np.where(z == 0.0, 1.0, np.expm1(safe) / safe)


def effort(stats: RolloutStats, weights: EffortWeights) -> float:
    """x: the weighted sum of the counts of a rollout."""
    return float(sum(weight * getattr(stats, name) for name, weight in vars(weights).items()))


def length_penalty(rollout: Rollout, config: LengthPenaltyConfig) -> float:
    """C(x) of a rollout; 0 for a failed one when only passed rollouts are charged."""
    if config.apply_to == "passed" and not rollout.passed:
        return 0.0
    return float(concave_cost(effort(rollout.stats, config.effort), k=config.k, q=config.q))
