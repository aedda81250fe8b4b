"""Recorded experts: what is refused, and the mismatch figures by hand."""

from dataclasses import replace

import numpy as np
import pytest

from composer2.rl.pack import pack
from composer2.rl.routes import (
    check_batch_routes,
    check_routes,
    common_shape,
    differing_expert_frac,
    logprob_mismatch,
    recorded_frac,
)


def routes_of(*tokens):
    return np.array(tokens, dtype=np.int16)


def test_good_routes_pass():
    check_routes(routes_of([[0, 1]], [[-1, -1]], [[3, 2]]), num_tokens=3, shape_LK=(1, 2), num_experts=4)
    check_routes(np.zeros((3, 0, 0), np.int16), num_tokens=3, shape_LK=(0, 0), num_experts=4)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (routes_of([[0, 1]]), r"shape \(1, 1, 2\), accepted is \[tokens, layers, experts\] = \(2, 1, 2\)"),
        (routes_of([[0, 1]], [[0, 1]], [[0, 1]]), r"shape \(3, 1, 2\)"),
        (routes_of([[0, 1]], [[0, -1]]), "token 1 are partly -1"),
        (routes_of([[0, 4]], [[0, 1]]), r"expert 0\.\.4, accepted is 0\.\.3"),
        (routes_of([[0, -2]], [[0, 1]]), r"expert -2\.\.1"),
        (routes_of([[2, 2]], [[0, 1]]), "one expert twice"),
        (np.zeros((2, 1, 2)), "dtype float64"),
    ],
)
def test_bad_routes_are_refused(routes, message):
    with pytest.raises(ValueError, match=message):
        check_routes(routes, num_tokens=2, shape_LK=(1, 2), num_experts=4)


def test_samples_must_agree_on_layers_and_experts(build):
    one, two = build.sample(3, layers=1), build.sample(3, layers=2)
    assert common_shape([two, two]) == (2, 1)
    with pytest.raises(ValueError, match="accepted is one"):
        common_shape([one, two])


def test_packed_batches_are_checked_as_a_whole(build):
    (batch,) = pack(
        [build.sample(4, layers=2, experts=2), build.sample(7, layers=2, experts=2)], row_length=7, rows_per_batch=2
    )
    check_batch_routes(batch, shape_LK=(2, 2), num_experts=4)
    assert recorded_frac(batch) == pytest.approx(9 / 11)
    with pytest.raises(ValueError, match="experts at padding"):
        check_batch_routes(
            replace(batch, routes=np.where(batch.routes < 0, [0, 1], batch.routes)), shape_LK=(2, 2), num_experts=4
        )
    with pytest.raises(ValueError, match=r"Batch\.routes has shape"):
        check_batch_routes(replace(batch, routes=batch.routes[:, :-1]), shape_LK=(2, 2), num_experts=4)


def test_differing_experts_compare_sets_per_layer():
    a = routes_of([[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]], [[-1, -1], [-1, -1]])
    b = routes_of([[1, 0], [3, 2]], [[0, 1], [2, 0]], [[0, 2], [1, 3]], [[0, 1], [2, 3]])
    assert differing_expert_frac(a, b) == pytest.approx(2 / 3)
    assert np.isnan(differing_expert_frac(a[3:], b[3:]))
    with pytest.raises(ValueError, match="routes_b has shape"):
        differing_expert_frac(a, b[:2])


def test_logprob_mismatch_by_hand():
    sampler = np.array([-1.0, -2.0, -3.0, 50.0])
    trainer = np.array([-1.0, -1.5, -4.0, 0.0])
    result = logprob_mismatch(sampler, trainer, np.array([True, True, True, False]))
    assert result["num_tokens"] == 3
    assert result["mismatch_mean"] == pytest.approx(0.5)
    assert result["mismatch_p50"] == pytest.approx(0.5)
    assert result["mismatch_p99"] == pytest.approx(0.99)  # linear between 0.5 and 1 at rank 1.98
    assert result["mismatch_max"] == pytest.approx(1.0)
    assert result["mismatch_k1"] == pytest.approx((0 - 0.5 + 1.0) / 3)
    assert np.isnan(logprob_mismatch(sampler, trainer, np.zeros(4, bool))["mismatch_p99"])
