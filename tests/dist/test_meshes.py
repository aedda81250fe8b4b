"""Degrees that divide, degrees that do not, and those of the report."""

import pytest

from composer2.dist.meshes import Degrees, pretraining_degrees, rl_degrees
from composer2.model.config import ModelConfig


def test_expert_ranks_come_from_data_and_context_ranks():
    degrees = Degrees(dp=4, cp=2, ep=4)
    assert (degrees.world, degrees.efsdp) == (8, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dp": 3, "ep": 2}, "ep is 2, accepted is a divisor of dp \\* cp = 3"),
        ({"dp": 2, "ep": 2, "tp": 2}, "tp is 2 with ep 2, accepted is 1"),
        ({"cp": 0}, "cp is 0"),
        ({"dp": 1.5}, "dp is 1.5"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Degrees(**fields)


@pytest.mark.parametrize(
    ("degrees", "config", "length", "message"),
    [
        (Degrees(dp=3, ep=3), ModelConfig(), 64, "n_routed_experts is 8, accepted is a multiple of ep 3"),
        (Degrees(cp=4), ModelConfig(), 60, "row_length is 60, accepted is a multiple of 2 \\* cp = 8"),
        (Degrees(cp=2), ModelConfig(attention="grouped"), 64, "attention is 'grouped', accepted with cp 2 is 'latent'"),
    ],
)
def test_models_and_rows_that_do_not_divide_are_refused(degrees, config, length, message):
    with pytest.raises(ValueError, match=message):
        degrees.check(config, length)


def test_degrees_of_the_report():
    """EP 8 with CP 2 in continued pretraining, with CP 8 in RL; the rest is data parallel."""
    assert pretraining_degrees(8) == Degrees(dp=4, cp=2, ep=8)
    assert rl_degrees(8) == Degrees(dp=1, cp=8, ep=8)
    assert rl_degrees(64) == Degrees(dp=8, cp=8, ep=8)
    with pytest.raises(ValueError, match="num_ranks is 12"):
        rl_degrees(12)
