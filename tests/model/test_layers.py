"""Rotary positions, YaRN and norms against transformers' own functions and by hand."""

import math

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

from composer2.model.config import ModelConfig, YarnConfig
from composer2.model.layers import RMSNorm, SwiGLU, apply_rope, rope_frequencies, rope_tables

YARNS = [
    YarnConfig(factor=40, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707),
    YarnConfig(factor=64, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0),
    YarnConfig(factor=8, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.5, beta_fast=8, beta_slow=2),
    YarnConfig(factor=4, original_max_position_embeddings=32),
    YarnConfig(factor=1, original_max_position_embeddings=32, mscale_all_dim=1.0),
]


@pytest.mark.parametrize("yarn", YARNS)
@pytest.mark.parametrize(("rope_dim", "theta"), [(64, 10000.0), (16, 50000.0)])
def test_yarn_equals_transformers(yarn, rope_dim, theta):
    config = ModelConfig(qk_rope_head_dim=rope_dim, rope_theta=theta, rope_scaling=yarn)
    parameters = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_position_embeddings,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }
    theirs = DeepseekV3Config(qk_rope_head_dim=rope_dim, rope_parameters=parameters)
    frequencies, cos_sin_scale = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    torch.testing.assert_close(torch.tensor(rope_frequencies(config)), frequencies, rtol=1e-5, atol=0)
    assert yarn.cos_sin_scale == pytest.approx(cos_sin_scale, rel=1e-12)
    assert yarn.softmax_scale == pytest.approx(yarn_apply_mscale(parameters, 1.0), rel=1e-12)


def test_plain_frequencies_by_hand():
    assert rope_frequencies(ModelConfig(qk_rope_head_dim=4, rope_theta=100.0)) == pytest.approx([1.0, 0.1])


def test_rotation_turns_interleaved_pairs():
    config = ModelConfig(qk_rope_head_dim=4, rope_theta=100.0)
    cos, sin = rope_tables(torch.tensor([[3]]), config, torch.float64)
    assert cos.dtype == torch.float64
    out = apply_rope(torch.tensor([[[1.0, 0.0, 0.0, 2.0]]], dtype=torch.float64), cos, sin)[0, 0]
    # pair (1, 0) turns by 3 rad, pair (0, 2) by 0.3 rad; first halves of the pairs come first
    expected = [math.cos(3), -2 * math.sin(0.3), math.sin(3), 2 * math.cos(0.3)]
    assert out.tolist() == pytest.approx(expected)


def test_dot_products_depend_on_distance_only():
    config = ModelConfig(rope_scaling=YARNS[2])
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 16, generator=generator, dtype=torch.float64)
    products = []
    for start in (0, 5, 1000):
        q = apply_rope(query, *rope_tables(torch.tensor([[start + 7]]), config, torch.float64))
        k = apply_rope(key, *rope_tables(torch.tensor([[start]]), config, torch.float64))
        products.append(float((q * k).sum()))
    assert products == pytest.approx([products[0]] * 3, rel=1e-10)


def test_norm_and_feed_forward_by_hand():
    norm = RMSNorm(2, eps=0.0)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0]))
    out = norm(torch.tensor([[3.0, 4.0]]))
    root = math.sqrt((9 + 16) / 2)
    assert out[0].tolist() == pytest.approx([3 / root, 8 / root])
    layer = SwiGLU(1, 1)
    with torch.no_grad():
        layer.gate_proj.weight.fill_(2.0)
        layer.up_proj.weight.fill_(3.0)
        layer.down_proj.weight.fill_(5.0)
    silu = 2.0 / (1 + math.exp(-2.0))
    assert layer(torch.ones(1, 1)).item() == pytest.approx(5 * silu * 3)


def test_norm_under_autocast_keeps_the_dtype_of_its_weight():
    norm = RMSNorm(8, eps=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.float32
