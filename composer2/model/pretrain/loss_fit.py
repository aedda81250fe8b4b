"""How evaluation loss falls with tokens: a straight line in log(tokens).

In: (tokens, loss) points of held-out evaluation. Out: `LossFit` with intercept, slope and R².

Source: report §3.1 and Fig. 2 right (the loss decreases log-linearly over the run), row P5.
Equations, with x = ln(tokens), y = loss in nats a token, means over the points used:
  b = sum (x - mean x)(y - mean y) / sum (x - mean x)^2      a = mean y - b mean x
  R² = 1 - sum (y - a - b x)^2 / sum (y - mean y)^2
Choice: points inside the learning-rate warm-up are not used, and at least ten must be left; both are recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_POINTS = 10


@dataclass(frozen=True, kw_only=True)
class LossFit:
    """loss = intercept + slope * ln(tokens)."""

    intercept: float
    slope: float
    """Nats a token for every factor e of tokens; negative while training helps."""
    r2: float
    points: tuple[tuple[int, float], ...]
    """The (tokens, loss) points used."""

    def loss_at(self, tokens: float) -> float:
        """Loss of the fitted line."""
        return self.intercept + self.slope * float(np.log(tokens))


def fit_loss(points: Sequence[tuple[int, float]], *, after_tokens: int = 0, min_points: int = MIN_POINTS) -> LossFit:
    """Least squares over the points with tokens > `after_tokens`. ValueError when fewer than `min_points` are left."""
    used = tuple((int(tokens), float(loss)) for tokens, loss in points if tokens > max(0, after_tokens))
    distinct = len({tokens for tokens, _ in used})
    if distinct < max(2, min_points):
        raise ValueError(
            f"{distinct} distinct points after {after_tokens} tokens, accepted is at least {max(2, min_points)}"
        )
    x = np.log(np.array([tokens for tokens, _ in used], dtype=np.float64))
    y = np.array([loss for _, loss in used], dtype=np.float64)
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    intercept = float(y.mean() - slope * x.mean())
    spread = float(((y - y.mean()) ** 2).sum())
    residual = float(((y - intercept - slope * x) ** 2).sum())
    return LossFit(intercept=intercept, slope=slope, r2=1.0 - residual / spread if spread else 1.0, points=used)


def log_spaced_steps(first: int, last: int, count: int) -> tuple[int, ...]:
    """About `count` distinct steps from `first` to `last`, both included, evenly spaced in their logarithm.

    Where rounding makes neighbours equal the next free step is taken, so `count` steps come back whenever
    last - first + 1 >= count; otherwise all of first..last.
    """
    if not 1 <= first <= last or count < 2:
        raise ValueError(f"steps {first}..{last} x {count}, accepted is 1 <= first <= last and at least 2 points")
    if last - first + 1 <= count:
        return tuple(range(first, last + 1))
    steps: list[int] = []
    for index, value in enumerate(np.geomspace(first, last, count)):
        lowest = steps[-1] + 1 if steps else first
        steps.append(min(max(round(float(value)), lowest), last - (count - 1 - index)))
    return tuple(steps)
