"""Model sizes: counts against a built model, and what is refused."""

import math

import pytest
import torch

from composer2.model.config import ModelConfig, YarnConfig
from composer2.model.transformer import Transformer


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": 24, "n_shared_experts": 0, "num_nextn_predict_layers": 2},
        {"first_k_dense_replace": 0, "n_routed_experts": 12, "n_group": 3, "topk_group": 2, "n_shared_experts": 2},
        {"first_k_dense_replace": 4, "num_nextn_predict_layers": 0},
    ],
)
def test_counts_equal_a_model_on_the_meta_device(changes):
    config = ModelConfig(**changes)
    with torch.device("meta"):
        model = Transformer(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    mtp = sum(size for name, size in sizes.items() if name.startswith("mtp."))
    assert config.num_mtp_parameters == mtp
    assert config.num_parameters == sum(sizes.values()) - mtp
    routed = sum(size for name, size in sizes.items() if ".experts." in name and not name.startswith("mtp."))
    idle = routed * (config.n_routed_experts - config.num_experts_per_tok) // config.n_routed_experts
    assert config.num_active_parameters == config.num_parameters - idle


def test_published_sizes_of_the_family():
    """DeepSeek-V3, counted from the published tensor shapes, without and for its MTP module."""
    config = ModelConfig(
        vocab_size=129280,
        hidden_size=7168,
        num_hidden_layers=61,
        first_k_dense_replace=3,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        num_attention_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    assert config.num_parameters == 671_026_404_352
    assert config.num_active_parameters == 37_552_282_624
    assert config.num_mtp_parameters == 11_610_067_968
    assert config.cache_dim == 576


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 0),
        ("scoring_func", "tanh"),
        ("n_group", 3),
        ("topk_group", 2),
        ("num_experts_per_tok", 9),
        ("qk_rope_head_dim", 7),
        ("first_k_dense_replace", 5),
        ("q_lora_rank", 0),
        ("rms_norm_eps", 0.0),
        ("num_nextn_predict_layers", -1),
    ],
)
def test_misfits_name_the_field(field, value):
    with pytest.raises(ValueError, match=f"^{field} is {value!r}, accepted is"):
        ModelConfig(**{field: value})


def test_yarn_misfits_name_the_field():
    with pytest.raises(ValueError, match=r"^factor is 0\.5"):
        YarnConfig(factor=0.5, original_max_position_embeddings=32)
    with pytest.raises(ValueError, match=r"^beta_fast is 0\.5"):
        YarnConfig(factor=2, original_max_position_embeddings=32, beta_fast=0.5)
    yarn = YarnConfig(factor=2, original_max_position_embeddings=32)
    with pytest.raises(ValueError, match=r"^rope_theta is 1\.0, accepted is with rope_scaling a number > 1"):
        ModelConfig(rope_theta=1.0, rope_scaling=yarn)


def test_yarn_magnitudes_by_hand():
    yarn = YarnConfig(factor=64, original_max_position_embeddings=4096, mscale=1, mscale_all_dim=1)
    assert yarn.cos_sin_scale == 1
    assert yarn.softmax_scale == pytest.approx(2.00474, abs=1e-5)
    yarn = YarnConfig(factor=math.e**10, original_max_position_embeddings=4096)
    assert yarn.cos_sin_scale == pytest.approx(2)
    assert yarn.softmax_scale == 1
