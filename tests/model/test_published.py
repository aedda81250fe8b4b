"""Published families: counts, configs both ways, and the default model, which is what it was before them."""

import dataclasses
import hashlib
import json

import pytest
import torch

from composer2.inspect_model import inspect_model, model_record
from composer2.model.checkpoint.native import load_config, save_model
from composer2.model.checkpoint.published import family_of, is_published, read_published, write_published
from composer2.model.config import ModelConfig, YarnConfig
from composer2.model.families import FAMILIES
from composer2.model.transformer import Transformer, init_weights

COUNTS = {
    "kimi-k2.5": (1_026_408_209_408, 32_861_477_888, 576),
    "deepseek-v3": (671_026_404_352, 37_552_282_624, 576),
    "minimax-m2": (228_689_748_992, 11_030_537_216, 2 * 8 * 128),
    "qwen3-coder-30b-a3b": (30_532_122_624, 3_353_032_704, 2 * 4 * 128),
    "qwen3-0.6b": (596_049_920, 596_049_920, 2 * 8 * 128),
}
"""Total and active parameters of the published tensor shapes, embedding and head included, and cached values."""


@pytest.mark.parametrize("name", FAMILIES)
def test_counts_of_published_models(name):
    config = FAMILIES[name]()
    _, record = inspect_model(name)
    assert (record["total"], record["active"]) == (config.num_parameters, config.num_active_parameters)
    assert record["mtp"] == config.num_mtp_parameters
    if name in COUNTS:
        found = (record["total"], record["active"], record["kv_values_per_token_per_layer"])
        assert found == COUNTS[name]


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": "flat", "num_key_value_heads": 2, "head_dim": 24},
        {"qk_norm": "head", "num_key_value_heads": 1, "tie_word_embeddings": True, "num_nextn_predict_layers": 0},
        {"sliding_window": 8, "full_attention_every": 4, "num_sink_tokens": 2},
    ],
)
def test_counts_of_grouped_attention(changes):
    config = ModelConfig(attention="grouped", **changes)
    record = model_record(config)
    counted = (config.num_parameters, config.num_active_parameters, config.num_mtp_parameters)
    assert (record["total"], record["active"], record["mtp"]) == counted


def test_mtp_layer_of_deepseek():
    """With one MTP layer of its own shape K2.5 reaches the 1.04T the report writes."""
    assert FAMILIES["deepseek-v3"]().num_mtp_parameters == 11_610_067_968
    with_mtp = dataclasses.replace(FAMILIES["kimi-k2.5"](), num_nextn_predict_layers=1)
    assert with_mtp.num_parameters + with_mtp.num_mtp_parameters == 1_043_570_356_224


@pytest.mark.parametrize("name", FAMILIES)
def test_configs_round_trip(tmp_path, name):
    config = FAMILIES[name]()
    for prefix in ("", "language_model.") if family_of(config) == "deepseek_v3" else ("",):
        data = write_published(config, torch.bfloat16, prefix=prefix)
        (tmp_path / "config.json").write_text(json.dumps(data))
        read = read_published(tmp_path)
        assert read.config == config
        assert (read.prefix, read.dtype, read.family) == (prefix, torch.bfloat16, family_of(config))


ROPE_K2 = {
    "type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
KIMI = {
    "model_type": "kimi_k25",
    "dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152},
    "text_config": {
        **{"model_type": "kimi_k2", "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 61},
        **{"first_k_dense_replace": 1, "intermediate_size": 18432, "moe_intermediate_size": 2048},
        **{"n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1, "num_attention_heads": 64},
        **{"num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128},
        **{"qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc"},
        **{"scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.827, "rms_norm_eps": 1e-5},
        **{"rope_theta": 50000.0, "rope_scaling": ROPE_K2, "max_position_embeddings": 262144, "moe_layer_freq": 1},
        **{"aux_loss_alpha": 0.001, "seq_aux": True, "num_nextn_predict_layers": 0, "tie_word_embeddings": False},
        **{"eos_token_id": 163585, "hidden_act": "silu"},
    },
}
MINIMAX = {
    **{"model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072, "num_hidden_layers": 62},
    **{"num_local_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 1536, "num_attention_heads": 48},
    **{"num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64, "rope_theta": 5000000, "scoring_func": "sigmoid"},
    **{"use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer", "shared_intermediate_size": 0},
    **{"max_position_embeddings": 196608, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "use_mtp": True},
    **{"num_mtp_modules": 3, "attn_type_list": [1] * 62, "hidden_act": "silu"},
}
QWEN = {
    **{"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48},
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 5472},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "rope_theta": 10000000},
    **{"max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "norm_topk_prob": True, "mlp_only_layers": []},
    **{"tie_word_embeddings": False, "decoder_sparse_step": 1, "rope_scaling": None, "torch_dtype": "bfloat16"},
    **{"use_sliding_window": False, "sliding_window": None, "eos_token_id": [151645, 151643]},
}


YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("data", "name", "eos"),
    [
        (KIMI, "kimi-k2.5", (163585,)),
        (MINIMAX, "minimax-m2", ()),
        (QWEN, "qwen3-coder-30b-a3b", (151645, 151643)),
    ],
)
def test_published_files_are_the_named_configs(tmp_path, data, name, eos):
    (tmp_path / "config.json").write_text(json.dumps(data))
    read = read_published(tmp_path)
    assert read.config == FAMILIES[name]()
    assert read.eos_ids == eos


def test_ends_of_the_generation_config_count_too(tmp_path):
    """Kimi names the end of a text in one file and the end of a turn in the other."""
    (tmp_path / "config.json").write_text(json.dumps(KIMI))
    path = tmp_path / "generation_config.json"
    for value, ends in ((163586, (163585, 163586)), ([163586, 163585], (163585, 163586)), (None, (163585,))):
        path.write_text(json.dumps({"eos_token_id": value}))
        assert read_published(tmp_path).eos_ids == ends
    path.write_text('{"eos_token_id": "x"}')
    with pytest.raises(ValueError, match=f"{path}: eos_token_id is 'x'"):
        read_published(tmp_path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match=f"{path} holds list"):
        read_published(tmp_path)


def test_a_scheme_inside_the_text_config_is_read(tmp_path):
    scheme = {"quant_method": "compressed-tensors"}
    nested = KIMI | {"text_config": KIMI["text_config"] | {"quantization_config": scheme}}
    for data in (nested, KIMI | {"quantization_config": scheme}):
        (tmp_path / "config.json").write_text(json.dumps(data))
        assert read_published(tmp_path).quantisation == scheme


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers is \[3\]"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "type 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "original_max_position_embeddings"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"torch_dtype": "int8"}, "dtype is 'int8'"),
        ({"layer_types": ["linear_attention"]}, "'linear_attention'"),
        ({"layer_types": 3}, "layer_types is 3, accepted is a list or null"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"rope_scaling": {"factor": 4}}, "rope_scaling has factor 4 and no type"),
        ({"rope_scaling": YARN | {"factor": "2"}}, "factor is '2', accepted is a number"),
        ({"rope_scaling": YARN | {"truncate": False}}, "truncate of rope_scaling is False"),
        ({"rope_scaling": YARN | {"attention_factor": 1.0}}, "attention_factor is 1.0, accepted is 1.0693"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6'"),
        ({"rope_theta": 0}, "rope_theta is 0.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob is 'false'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"torch_dtype": {"a": 1}}, "dtype is {'a': 1}"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, change, message):
    (tmp_path / "config.json").write_text(json.dumps(QWEN | change))
    with pytest.raises(ValueError, match=f"{tmp_path}/config.json: .*{message}"):
        read_published(tmp_path)


def test_yarn_that_states_its_own_factor_is_read(tmp_path):
    """0.1 ln 2 + 1, as the YaRN paper has it."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"rope_scaling": YARN | {"attention_factor": 1.06931472}}))
    assert read_published(tmp_path).config.rope_scaling.cos_sin_scale == pytest.approx(1.06931472, abs=1e-8)


def test_another_score_than_minimax_has_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MINIMAX | {"scoring_func": "softmax"}))
    with pytest.raises(ValueError, match=r"config\.json: scoring_func is 'softmax', accepted is 'sigmoid'"):
        read_published(tmp_path)


def test_only_qwen3_moe_derives_the_width_of_a_head(tmp_path):
    """transformers derives it there; its default of the other two is a number of one released model."""
    for data in (QWEN, MINIMAX, QWEN | {"model_type": "qwen3"}):
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in data.items() if k != "head_dim"}))
        if data is QWEN:
            assert read_published(tmp_path).config.grouped_head_dim == 2048 // 32
            continue
        with pytest.raises(ValueError, match="head_dim is missing"):
            read_published(tmp_path)


def test_a_missing_key_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in QWEN.items() if k != "vocab_size"}))
    with pytest.raises(ValueError, match="vocab_size is missing"):
        read_published(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "grouped", "num_nextn_predict_layers": 0, "sliding_window": 4},
        {"attention": "grouped", "num_nextn_predict_layers": 0, "n_shared_experts": 0},
        {"attention": "grouped", "qk_norm": "flat"},
        {"scoring_func": "softmax"},
    ],
)
def test_what_no_family_expresses_is_refused(changes):
    with pytest.raises(ValueError, match="accepted"):
        family_of(ModelConfig(**changes))


@pytest.mark.parametrize(
    ("field", "value", "others"),
    [
        ("num_key_value_heads", 3, {"attention": "grouped"}),
        ("num_key_value_heads", 2, {}),
        ("head_dim", 0, {"attention": "grouped"}),
        ("rotary_dim", 3, {"attention": "grouped"}),
        ("rotary_dim", 64, {"attention": "grouped"}),
        ("qk_norm", "flat", {}),
        ("sliding_window", 0, {"attention": "grouped"}),
        ("attention", "linear", {}),
    ],
)
def test_grouped_misfits_name_the_field(field, value, others):
    with pytest.raises(ValueError, match=f"^{field} is {value!r}, accepted is"):
        ModelConfig(**{field: value}, **others)


def test_yarn_leaves_the_softmax_scale_of_grouped_attention():
    yarn = YarnConfig(factor=2.0, original_max_position_embeddings=8, mscale_all_dim=1.0)
    with pytest.raises(ValueError, match=r"^mscale_all_dim is 1"):
        ModelConfig(attention="grouped", rope_scaling=yarn)


def test_inspect_reads_folders(tmp_path):
    model = Transformer(ModelConfig())
    init_weights(model, 0)
    save_model(tmp_path / "m", model)
    assert not is_published(tmp_path / "m")
    assert inspect_model(str(tmp_path / "m"))[1]["total"] == 1_679_744
    with pytest.raises(ValueError, match=r"accepted is a folder with a model or one of kimi-k2\.5"):
        inspect_model(str(tmp_path / "nothing"))


def test_a_config_saved_before_there_were_families_still_loads(tmp_path):
    model = Transformer(ModelConfig())
    save_model(tmp_path / "m", model)
    path = tmp_path / "m" / "config.json"
    new = ("attention", "num_key_value_heads", "head_dim", "rotary_dim", "qk_norm", "sliding_window")
    new += ("full_attention_every", "num_sink_tokens", "tie_word_embeddings")
    data = {key: value for key, value in json.loads(path.read_text()).items() if key not in new}
    path.write_text(json.dumps(data))
    assert load_config(tmp_path / "m") == ModelConfig()


def test_the_default_model_is_what_it_was():
    """Names, order and values of a seeded tiny model, and its logits in float64, as before the families came."""
    model = Transformer(ModelConfig())
    init_weights(model, 7)
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest() == "4eb8f13384e3d98c0a3e8fba17bf24331d56c4b647344ce4be5bb0b8e9e4c2cd"
    tokens = torch.randint(0, 1024, (2, 40), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0] * 25 + [1] * 15, [0] * 40])
    with torch.no_grad():
        logits = model.double()(tokens, document_ids_BT=documents).logits_BTV
    rounded = logits.mul(1e8).round().long().numpy().tobytes()
    expected = "eb3fda04060b14292a1042f0dfcd21081feb4d3b0abb9513199ecc24985f7d95"
    assert hashlib.sha256(rounded).hexdigest() == expected
