"""Fault 32: routes recorded for another number of tokens are broadcast or cut on the way into a packed batch."""

from dataclasses import replace

import numpy as np
import pytest

from composer2.rl.pack import pack
from composer2.rl.routes import check_batch_routes
from composer2.types import Segment


@pytest.mark.parametrize("num_rows", [0, 1, 5, 7])
def test_a_sample_with_routes_of_another_length_is_refused(build, num_rows):
    good = build.sample(6)
    bad = replace(good, routes=np.zeros((num_rows, 1, 1), np.int16))
    with pytest.raises(
        ValueError, match=rf"sample 1: routes has shape \({num_rows}, 1, 1\), accepted is .*\(6, 1, 1\)"
    ):
        pack([good, bad], row_length=16, rows_per_batch=1)


def test_a_segment_and_a_batch_are_checked_too(build):
    part = build.segment(6)
    with pytest.raises(ValueError, match=r"Segment\.routes has 5 rows, accepted is exactly one per token: 6"):
        Segment(**(vars(part) | {"routes": part.routes[:-1]}))
    (batch,) = pack([build.sample(6)], row_length=8, rows_per_batch=1)
    with pytest.raises(ValueError, match=r"Batch\.routes has shape \(1, 5, 1, 1\), accepted begins with \(1, 6\)"):
        check_batch_routes(replace(batch, routes=batch.routes[:, 1:]), shape_LK=(1, 1), num_experts=4)
