"""C(x): known values, the limit at q = 1, and its shape as properties."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.rl.length_penalty import EffortWeights, LengthPenaltyConfig, concave_cost, effort, length_penalty
from composer2.types import RolloutStats

ks = st.floats(1e-3, 10)
qs = st.one_of(st.floats(0.05, 5), st.floats(1 - 1e-9, 1 + 1e-9))
xs = st.floats(0, 1e4)


def test_values_by_hand():
    # k = 1, q = 2: 1 - 1 / (1 + x).  k = 2, q = 1/2: sqrt(1 + 2x) - 1.  q = 0: x.  q = 1, k = 2: log(1 + 2x) / 2.
    assert concave_cost(3.0, k=1, q=2) == pytest.approx(float(1 - Fraction(1, 4)))
    assert concave_cost(4.0, k=2, q=0.5) == pytest.approx(2.0)
    assert concave_cost(7.0, k=3, q=0) == pytest.approx(7.0)
    assert concave_cost(4.0, k=2, q=1) == pytest.approx(math.log(9) / 2)


@given(xs, ks, st.floats(0.05, 5).filter(lambda q: abs(q - 1) > 0.01))
def test_equals_the_printed_formula_away_from_the_limit(x, k, q):
    assert concave_cost(x, k=k, q=q) == pytest.approx(((1 + k * x) ** (1 - q) - 1) / (k * (1 - q)), rel=1e-6, abs=1e-9)


@given(xs, ks, st.floats(-1e-6, 1e-6))
def test_is_continuous_at_q_1(x, k, delta):
    limit = math.log1p(k * x) / k
    slack = abs(delta) * math.log1p(k * x) ** 2 / k + 1e-12
    assert abs(float(concave_cost(x, k=k, q=1 + delta)) - limit) <= slack


@pytest.mark.parametrize("delta", [0.0, 5e-324, 1e-300, 1e-17, 1e-12, -1e-12])
def test_is_accurate_next_to_the_limit(delta):
    assert concave_cost(100.0, k=0.5, q=1 + delta) == pytest.approx(math.log(51) / 0.5, rel=1e-10)


@given(xs, st.floats(1e-2, 1e3), ks, qs)
@settings(max_examples=200)
def test_is_increasing_and_concave(x, step, k, q):
    a, b, c = (float(concave_cost(x + i * step, k=k, q=q)) for i in range(3))
    rounding = 1e-12 * c  # the curve is flat to the last digit where it saturates
    assert a - rounding <= b <= c + rounding
    assert c - b <= (b - a) * (1 + 1e-9) + 1e-9


@given(ks, qs)
def test_starts_at_zero_with_slope_one(k, q):
    assert concave_cost(0.0, k=k, q=q) == 0.0
    h = 1e-7
    assert float(concave_cost(h, k=k, q=q)) / h == pytest.approx(1.0, abs=1e-5)


def test_strictly_concave_for_positive_q():
    values = concave_cost(np.arange(5.0), k=1, q=0.5)
    assert (np.diff(values) > 0).all()
    assert (np.diff(values, n=2) < -1e-3).all()


def test_effort_is_the_weighted_sum():
    stats = RolloutStats(
        num_turns=2,
        num_tool_calls=3,
        thinking_tokens=5,
        tool_call_tokens=7,
        tool_output_tokens=11,
        final_message_tokens=13,
        sampled_tokens=999,
    )
    weights = EffortWeights(
        thinking_tokens=1,
        tool_call_tokens=10,
        tool_output_tokens=100,
        final_message_tokens=1e3,
        num_tool_calls=1e4,
        num_turns=1e5,
    )
    assert effort(stats, weights) == 5 + 70 + 1100 + 13e3 + 3e4 + 2e5


def test_parallel_calls_cost_less_than_the_same_calls_in_turns():
    config = LengthPenaltyConfig()
    one = effort(RolloutStats(num_turns=1, num_tool_calls=3), config.effort)
    three = effort(RolloutStats(num_turns=3, num_tool_calls=3), config.effort)
    assert one < three


def test_apply_to_passed_spares_failures(build):
    stats = RolloutStats(num_turns=3)
    failed, passed = (build.rollout(passed=verdict, stats=stats) for verdict in (False, True))
    config = LengthPenaltyConfig(apply_to="passed")
    assert length_penalty(failed, config) == 0.0
    assert length_penalty(passed, config) == length_penalty(failed, LengthPenaltyConfig()) > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LengthPenaltyConfig(k=0), "LengthPenaltyConfig.k is 0"),
        (lambda: LengthPenaltyConfig(q=-0.1), "LengthPenaltyConfig.q is -0.1"),
        (lambda: LengthPenaltyConfig(apply_to="some"), "LengthPenaltyConfig.apply_to is 'some'"),
        (lambda: EffortWeights(num_turns=float("nan")), "EffortWeights.num_turns is nan"),
        (lambda: concave_cost(-1.0, k=1, q=1), "x holds -1.0"),
        (lambda: concave_cost(float("nan"), k=1, q=1), "x holds nan"),
        (lambda: concave_cost(float("inf"), k=1, q=2), "x holds inf"),
        (lambda: concave_cost(1.0, k=0, q=1), "k is 0"),
        (lambda: concave_cost(1.0, k=1, q=-1), "q is -1"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
