"""Published models as configs: a name goes in, the sizes of a released model come out; nothing is downloaded.

The counts of these configs (embedding and head included, MTP modules not):

    kimi-k2.5            1,026,408,209,408 total   32,861,477,888 active   576 cached values a token a layer
    deepseek-v3            671,026,404,352         37,552,282,624          576
    minimax-m2             228,689,748,992         11,030,537,216        2,048
    qwen3-coder-30b-a3b     30,532,122,624          3,353,032,704        1,024

Source: the `config.json` published with each model; report §3 (the Kimi K2.5 base); row M8. The report writes 1.04T
/ 32B for K2.5: a text model of its published shapes has 1.026T.
Choice: Kimi K2.5 is its text model; the vision tower is not built. It ships no MTP module; a policy made from it adds
its own (`dataclasses.replace(kimi_k2_5(), num_nextn_predict_layers=1)`).
Choice: MiniMax-M2 announces three MTP modules but their layout is not described with the weights: none are built.
"""

from __future__ import annotations

from collections.abc import Callable

from composer2.model.config import ModelConfig, YarnConfig


def kimi_k2_5() -> ModelConfig:
    """Kimi K2.5, text: one group, 384 experts, YaRN from 4k to 256k."""
    return ModelConfig(
        vocab_size=163_840,
        hidden_size=7168,
        num_hidden_layers=61,
        first_k_dense_replace=1,
        intermediate_size=18_432,
        moe_intermediate_size=2048,
        n_routed_experts=384,
        num_experts_per_tok=8,
        routed_scaling_factor=2.827,
        num_attention_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=50_000.0,
        max_position_embeddings=262_144,
        rope_scaling=YarnConfig(factor=64.0, original_max_position_embeddings=4096, mscale_all_dim=1.0),
        num_nextn_predict_layers=0,
    )


def deepseek_v3() -> ModelConfig:
    """DeepSeek-V3: eight groups of 32 experts, of which four may be used; one MTP module."""
    return ModelConfig(
        vocab_size=129_280,
        hidden_size=7168,
        num_hidden_layers=61,
        first_k_dense_replace=3,
        intermediate_size=18_432,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        num_attention_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=163_840,
        rope_scaling=YarnConfig(factor=40.0, original_max_position_embeddings=4096, mscale_all_dim=1.0),
        num_nextn_predict_layers=1,
    )


def moonlight_16b_a3b() -> ModelConfig:
    """Moonlight-16B-A3B: the family in small, with full-rank queries, two shared experts and plain positions."""
    return ModelConfig(
        vocab_size=163_840,
        hidden_size=2048,
        num_hidden_layers=27,
        first_k_dense_replace=1,
        intermediate_size=11_264,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=2,
        routed_scaling_factor=2.446,
        num_attention_heads=16,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=50_000.0,
        max_position_embeddings=8192,
        num_nextn_predict_layers=0,
    )


def minimax_m2() -> ModelConfig:
    """MiniMax-M2: grouped-query attention, QK-norm over the flattened projection, half of a head rotary."""
    return ModelConfig(
        vocab_size=200_064,
        hidden_size=3072,
        num_hidden_layers=62,
        first_k_dense_replace=0,
        intermediate_size=1536,
        moe_intermediate_size=1536,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=0,
        attention="grouped",
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        rotary_dim=64,
        qk_norm="flat",
        rope_theta=5e6,
        max_position_embeddings=196_608,
        num_nextn_predict_layers=0,
    )


def _qwen3_moe(*, intermediate_size: int, rope_theta: float, max_position_embeddings: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=151_936,
        hidden_size=2048,
        num_hidden_layers=48,
        first_k_dense_replace=0,
        intermediate_size=intermediate_size,
        moe_intermediate_size=768,
        n_routed_experts=128,
        num_experts_per_tok=8,
        n_shared_experts=0,
        scoring_func="softmax",
        attention="grouped",
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        qk_norm="head",
        rope_theta=rope_theta,
        max_position_embeddings=max_position_embeddings,
        num_nextn_predict_layers=0,
    )


def qwen3_30b_a3b() -> ModelConfig:
    """Qwen3-30B-A3B: softmax router, QK-norm per head."""
    return _qwen3_moe(intermediate_size=6144, rope_theta=1e6, max_position_embeddings=40_960)


def qwen3_coder_30b_a3b() -> ModelConfig:
    """Qwen3-Coder-30B-A3B: the same shape, 256k context."""
    return _qwen3_moe(intermediate_size=5472, rope_theta=1e7, max_position_embeddings=262_144)


def _qwen3(*, hidden_size: int, intermediate_size: int, layers: int, heads: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=151_936,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        intermediate_size=intermediate_size,
        n_shared_experts=0,
        attention="grouped",
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        qk_norm="head",
        rope_theta=1e6,
        max_position_embeddings=40_960,
        tie_word_embeddings=tied,
        num_nextn_predict_layers=0,
    )


def qwen3_0_6b() -> ModelConfig:
    """Qwen3-0.6B, dense: the cheapest real policy for one GPU."""
    return _qwen3(hidden_size=1024, intermediate_size=3072, layers=28, heads=16, tied=True)


def qwen3_1_7b() -> ModelConfig:
    """Qwen3-1.7B, dense."""
    return _qwen3(hidden_size=2048, intermediate_size=6144, layers=28, heads=16, tied=True)


def qwen3_4b() -> ModelConfig:
    """Qwen3-4B, dense."""
    return _qwen3(hidden_size=2560, intermediate_size=9728, layers=36, heads=32, tied=True)


def qwen3_8b() -> ModelConfig:
    """Qwen3-8B, dense."""
    return _qwen3(hidden_size=4096, intermediate_size=12_288, layers=36, heads=32, tied=False)


def tiny() -> ModelConfig:
    """The tiny preset of the recipes: CPU, minutes."""
    return ModelConfig()


FAMILIES: dict[str, Callable[[], ModelConfig]] = {
    "kimi-k2.5": kimi_k2_5,
    "deepseek-v3": deepseek_v3,
    "moonlight-16b-a3b": moonlight_16b_a3b,
    "minimax-m2": minimax_m2,
    "qwen3-coder-30b-a3b": qwen3_coder_30b_a3b,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "qwen3-0.6b": qwen3_0_6b,
    "qwen3-1.7b": qwen3_1_7b,
    "qwen3-4b": qwen3_4b,
    "qwen3-8b": qwen3_8b,
    "tiny": tiny,
}
"""Name -> config, for `composer2 inspect model NAME`."""
