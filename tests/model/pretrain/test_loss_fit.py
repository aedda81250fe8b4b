"""The log-linear fit against numpy and by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.model.pretrain.loss_fit import fit_loss, log_spaced_steps


def test_an_exact_line_by_hand():
    points = [(round(math.e**k * 1000), 0.0) for k in range(10)]
    points = [(tokens, 5.0 - 0.25 * math.log(tokens)) for tokens, _ in points]
    fit = fit_loss(points)
    assert (fit.intercept, fit.slope, fit.r2) == pytest.approx((5.0, -0.25, 1.0))
    assert fit.loss_at(math.e**4) == pytest.approx(4.0)


def test_three_points_by_hand():
    # ln tokens 0, 1, 2 with losses 3, 1, 2: slope -1/2, mean 2, R² = 1 - 1.5 / 2
    fit = fit_loss([(1, 3.0), (1, 3.0), (1, 3.0)] + [(10, 1.0)] * 3 + [(100, 2.0)] * 3, min_points=3)
    step = math.log(10)
    assert (fit.intercept, fit.slope, fit.r2) == pytest.approx((2.5, -0.5 / step, 0.25))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.5, 9.0), min_size=12, max_size=20), st.integers(1, 2000))
def test_equals_polyfit(losses, first):
    points = [(first * 2**index, loss) for index, loss in enumerate(losses)]
    fit = fit_loss(points)
    x, y = np.log([tokens for tokens, _ in points]), np.array(losses)
    slope, intercept = np.polyfit(x, y, 1)
    assert fit.slope == pytest.approx(slope, abs=1e-9)
    assert fit.intercept == pytest.approx(intercept, abs=1e-8)
    if y.std() > 1e-3:
        assert fit.r2 == pytest.approx(np.corrcoef(x, y)[0, 1] ** 2, abs=1e-8)


def test_warm_up_points_are_left_out_and_counted():
    points = [(100 * k, 9.0 - k) for k in range(0, 13)]
    fit = fit_loss(points, after_tokens=200)
    assert [tokens for tokens, _ in fit.points] == [100 * k for k in range(3, 13)]
    with pytest.raises(ValueError, match="9 distinct points after 300 tokens, accepted is at least 10"):
        fit_loss(points, after_tokens=300)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 50), st.integers(0, 400), st.integers(2, 30))
def test_log_spaced_steps_are_distinct_and_complete(first, span, count):
    steps = log_spaced_steps(first, first + span, count)
    assert len(steps) == min(count, span + 1)
    assert list(steps) == sorted(set(steps))
    assert (steps[0], steps[-1]) == (first, first + span)


def test_log_spaced_steps_by_hand():
    assert log_spaced_steps(1, 1000, 4) == (1, 10, 100, 1000)
