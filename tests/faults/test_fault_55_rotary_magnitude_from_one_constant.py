"""Fault 55: the rotary magnitude computed from one YaRN constant instead of the ratio of the two."""

import math

import pytest
import torch

from composer2.model.attention import LatentAttention
from composer2.model.config import ModelConfig, YarnConfig
from composer2.model.layers import rope_tables


def test_equal_constants_leave_cos_and_sin_alone_and_scale_the_softmax():
    yarn = YarnConfig(factor=40, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707)
    assert yarn.cos_sin_scale == 1.0
    assert yarn.softmax_scale == pytest.approx((0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert yarn.softmax_scale == pytest.approx(1.59, abs=0.005)

    config = ModelConfig(rope_scaling=yarn)
    cos, sin = rope_tables(torch.tensor([[0, 1, 5000, 100000]]), config, torch.float64)
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos), rtol=1e-12, atol=0)
    assert LatentAttention(config).scale == pytest.approx(48**-0.5 * yarn.softmax_scale)
