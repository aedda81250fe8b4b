"""`config.json` of published families: JSON goes in, a `ModelConfig` comes out, and back.

    deepseek_v3   DeepSeek-V3, Moonlight, Kimi K2 (model_type kimi_k2) and, under `text_config`, Kimi K2.5
    minimax_m2    MiniMax-M2
    qwen3_moe     Qwen3 mixture-of-experts
    qwen3         Qwen3 dense

Source: the configurations published with the models; rows M8 M9. Both spellings of rotary positions are read:
`rope_theta` with `rope_scaling` (the published files; what is written here) and `rope_parameters` (newer transformers).
Choice: what the decoder does not compute (biases, other activations, other rotary scalings, windows in a published
file, layers of mixed kinds) is refused by name and never ignored; keys without influence on the function are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from composer2.model.config import ModelConfig, YarnConfig

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TEXT_PREFIX = "language_model."
"""What tensor names of a text model inside a multimodal checkpoint begin with."""
FAMILY_OF = {
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "minimax_m2": "minimax_m2",
    "qwen3_moe": "qwen3_moe",
    "qwen3": "qwen3",
}
"""model_type -> family."""
MULTIMODAL = ("kimi_k25", "kimi_k2.5", "kimi_k2_5")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SHARED_KEYS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps"),
    *("max_position_embeddings", "tie_word_embeddings", "initializer_range"),
)
LATENT_KEYS = (
    *("first_k_dense_replace", "intermediate_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
    *("n_shared_experts", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "q_lora_rank"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
HARMLESS = {"initializer_range": 0.02, "tie_word_embeddings": False, "n_shared_experts": 0, "q_lora_rank": None}
"""Keys a published file may leave out."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a published `config.json` says."""

    config: ModelConfig
    family: str
    prefix: str
    """Put before every tensor name."""
    dtype: torch.dtype
    """Dtype of the weights; of a quantised checkpoint the one they are computed in."""
    quantisation: Mapping[str, Any]
    """`quantization_config`, empty without one."""
    eos_ids: tuple[int, ...]
    """Tokens that end a text: those of `config.json`, then further ones of a `generation_config.json`."""


def is_published(directory: Path | str) -> bool:
    """Whether `directory` holds a config of a published family."""
    path = Path(directory) / CONFIG_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and data.get("model_type") in (*FAMILY_OF, *MULTIMODAL)


def read_published(directory: Path | str) -> Published:
    """The config of a directory. FileNotFoundError without one, ValueError naming file, key and value of a misfit."""
    path, generation = (Path(directory) / name for name in (CONFIG_FILE, GENERATION_FILE))
    data = _read_object(path)
    further = _ends(generation, _read_object(generation).get("eos_token_id")) if generation.is_file() else ()
    text, prefix = data, ""
    if data.get("model_type") in MULTIMODAL:
        text, prefix = data.get("text_config"), TEXT_PREFIX  # type: ignore[assignment]
        if not isinstance(text, dict):
            raise ValueError(f"{path}: text_config is {text!r}, accepted is an object")
    ends = _ends(path, text.get("eos_token_id", data.get("eos_token_id")))
    try:
        family = _family(text)
        dtype_name = text.get("dtype") or text.get("torch_dtype") or data.get("dtype") or data.get("torch_dtype")
        dtype_name = dtype_name or "float32"
        if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
            raise ValueError(f"dtype is {dtype_name!r}, accepted is one of {', '.join(DTYPES)}")
        quantisation = text.get("quantization_config") or data.get("quantization_config") or {}
        if not isinstance(quantisation, dict):
            raise ValueError(f"quantization_config is {quantisation!r}, accepted is an object or null")
        return Published(
            config=_READERS[family](text),
            family=family,
            prefix=prefix,
            dtype=DTYPES[dtype_name],
            quantisation=quantisation,
            eos_ids=tuple(dict.fromkeys((*ends, *further))),
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds {type(data).__name__}, accepted is an object")
    return data


def _ends(path: Path, value: Any) -> tuple[int, ...]:
    ends = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(isinstance(token, int) for token in ends):
        raise ValueError(f"{path}: eos_token_id is {value!r}, accepted is a token id, a list of them or null")
    return ends


def write_published(config: ModelConfig, dtype: torch.dtype, *, prefix: str = "") -> dict[str, Any]:
    """The `config.json` of a model, of the family `family_of` finds. ValueError names what no family expresses."""
    family = family_of(config)
    if dtype not in DTYPES.values():
        raise ValueError(f"dtype is {dtype}, accepted is one of {', '.join(DTYPES)}")
    name = next(name for name, value in DTYPES.items() if value == dtype)
    data: dict[str, Any] = {"architectures": [ARCHITECTURES[family]], "model_type": family, "dtype": name}
    data |= {"torch_dtype": name, "hidden_act": "silu", "attention_bias": False, "use_cache": True}
    data |= {key: getattr(config, key) for key in SHARED_KEYS}
    data |= _WRITERS[family](config)
    data |= _written_rope(config)
    if prefix:
        kind = "kimi_k2" if family == "deepseek_v3" else family
        return {"model_type": MULTIMODAL[0], "dtype": name, "text_config": {**data, "model_type": kind}}
    return data


def family_of(config: ModelConfig) -> str:
    """The published family that computes what `config` does. ValueError names the field that fits none."""
    if config.sliding_window is not None:
        raise ValueError(f"sliding_window is {config.sliding_window}, accepted in a published family is None")
    if config.attention == "latent":
        _only(config, "deepseek_v3", scoring_func="sigmoid")
        return "deepseek_v3"
    if config.num_nextn_predict_layers:
        raise ValueError(f"num_nextn_predict_layers is {config.num_nextn_predict_layers}, accepted is 0: only "
                         "deepseek_v3 describes MTP weights")  # fmt: skip
    if config.num_moe_layers == 0:
        _only(config, "qwen3", qk_norm="head", rotary_dim=(None, config.grouped_head_dim))
        return "qwen3"
    _only(config, "qwen3_moe and minimax_m2", n_group=1, n_shared_experts=0, routed_scaling_factor=1.0)
    if config.qk_norm == "flat":
        _only(config, "minimax_m2", scoring_func="sigmoid", norm_topk_prob=True, first_k_dense_replace=0)
        return "minimax_m2"
    fields = {"scoring_func": "softmax", "qk_norm": "head", "rotary_dim": (None, config.grouped_head_dim)}
    _only(config, "qwen3_moe", **fields)
    return "qwen3_moe"


def _only(config: ModelConfig, family: str, **accepted: Any) -> None:
    for field, values in accepted.items():
        value = getattr(config, field)
        if value not in (values if isinstance(values, tuple) else (values,)):
            raise ValueError(f"{field} is {value!r}, accepted in {family} is {values!r}")


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def _family(data: Mapping[str, Any]) -> str:
    kind = data.get("model_type")
    if kind not in FAMILY_OF:
        raise ValueError(f"model_type is {kind!r}, accepted is one of {', '.join((*FAMILY_OF, *MULTIMODAL))}")
    refused = {
        "attention_bias": (False, None),
        "hidden_act": ("silu", None),
        "use_sliding_window": (False, None),
        "moe_layer_freq": (1, None),
        "decoder_sparse_step": (1, None),
        "rope_interleave": (True, None),
        "topk_method": ("noaux_tc", None),
        "use_qk_norm": (True, None),
        "qk_norm_type": ("per_layer", None),
        "use_routing_bias": (True, None),
        "shared_intermediate_size": (0, None),
    }
    for key, accepted in refused.items():
        if data.get(key) not in accepted:
            raise ValueError(f"{key} is {data[key]!r}, accepted is {accepted[0]!r}")
    kinds = data.get("layer_types") or data.get("attn_type_list") or []
    if not isinstance(kinds, list):
        raise ValueError(f"layer_types is {kinds!r}, accepted is a list or null")
    odd = [kind for kind in kinds if kind not in ("full_attention", 1)]
    if odd:
        raise ValueError(f"a layer has attention {odd[0]!r}, accepted is full attention in every layer")
    return FAMILY_OF[kind]


def _get(data: Mapping[str, Any], *names: str) -> Any:
    """The first key present; ValueError when all are missing and the first has no harmless value."""
    for name in names:
        if name in data:
            return data[name]
    if names[0] in HARMLESS:
        return HARMLESS[names[0]]
    raise ValueError(f"{names[0]} is missing")


def _fields(data: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    fields = {key: _get(data, key) for key in (*SHARED_KEYS, *keys)}
    if fields.get("n_shared_experts", 0) is None:
        fields["n_shared_experts"] = 0
    return fields


def _rope(data: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
    """rope_theta and rope_scaling of either spelling."""
    given = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ValueError(f"rope_scaling is {given!r}, accepted is an object or null")
    scaling = dict(given)
    thetas = (scaling.pop("rope_theta", None), data.get("rope_theta"), default_theta)
    theta = next(value for value in thetas if value is not None)
    if not isinstance(theta, int | float):
        raise ValueError(f"rope_theta is {theta!r}, accepted is a number > 0")
    theta = float(theta)
    turning = scaling.get("partial_rotary_factor", data.get("partial_rotary_factor"))
    if turning not in (None, 1) and FAMILY_OF[data["model_type"]] != "minimax_m2":
        raise ValueError(f"partial_rotary_factor is {turning!r}, accepted is 1")
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    if kind == "default":
        if "factor" in scaling:
            raise ValueError(f"rope_scaling has factor {scaling['factor']!r} and no type, accepted is type 'yarn'")
        return {"rope_theta": theta, "rope_scaling": None}
    if kind != "yarn":
        raise ValueError(f"rope_scaling has type {kind!r}, accepted is 'yarn' or none")
    if scaling.get("truncate", True) is not True:
        raise ValueError(f"truncate of rope_scaling is {scaling['truncate']!r}, accepted is true")
    names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    numbers = {name: scaling[name] for name in names if scaling.get(name) is not None}
    missing = [name for name in names[:2] if name not in numbers]
    if missing:
        raise ValueError(f"{missing[0]} of rope_scaling is missing")
    yarn = YarnConfig(**numbers)
    stated = scaling.get("attention_factor")
    if stated is not None and abs(stated - yarn.cos_sin_scale) > 1e-6:
        raise ValueError(f"attention_factor is {stated}, accepted is {yarn.cos_sin_scale}, of factor and mscale")
    return {"rope_theta": theta, "rope_scaling": yarn}


def _read_deepseek(data: Mapping[str, Any]) -> ModelConfig:
    fields = _fields(data, LATENT_KEYS) | _rope(data, 10_000.0)
    _require_sigmoid(data)
    predicted = data.get("num_nextn_predict_layers", data.get("num_mtp_layers")) or 0
    return ModelConfig(**fields, num_nextn_predict_layers=predicted)


def _require_sigmoid(data: Mapping[str, Any]) -> None:
    scoring = data.get("scoring_func", "sigmoid")
    if scoring != "sigmoid":
        raise ValueError(f"scoring_func is {scoring!r}, accepted is 'sigmoid'")


def _grouped(data: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
    """The fields every family with grouped-query attention has."""
    # Without the key qwen3_moe takes hidden_size // num_attention_heads; the others have no such rule.
    derived = data.get("head_dim") is None and FAMILY_OF[data["model_type"]] == "qwen3_moe"
    keys = ("num_key_value_heads",) if derived else ("num_key_value_heads", "head_dim")
    fields: dict[str, Any] = {"attention": "grouped", "num_nextn_predict_layers": 0, "n_shared_experts": 0}
    return fields | _fields(data, keys) | _rope(data, default_theta)


def _read_minimax(data: Mapping[str, Any]) -> ModelConfig:
    _require_sigmoid(data)
    fields = _grouped(data, 5e6)
    head = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    factor = (data.get("rope_parameters") or {}).get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0))
    width = data.get("rotary_dim")
    return ModelConfig(
        **fields,
        first_k_dense_replace=0,
        intermediate_size=_get(data, "intermediate_size"),
        moe_intermediate_size=_get(data, "intermediate_size"),
        n_routed_experts=_get(data, "num_local_experts", "num_experts"),
        num_experts_per_tok=_get(data, "num_experts_per_tok"),
        rotary_dim=int(head * factor) if width is None else width,
        qk_norm="flat",
    )


def _read_qwen3_moe(data: Mapping[str, Any]) -> ModelConfig:
    dense = data.get("mlp_only_layers") or []
    if sorted(dense) != list(range(len(dense))):
        raise ValueError(f"mlp_only_layers is {dense!r}, accepted is the first layers, [0, 1, …]")
    return ModelConfig(
        **_grouped(data, 10_000.0),
        first_k_dense_replace=len(dense),
        intermediate_size=_get(data, "intermediate_size"),
        moe_intermediate_size=_get(data, "moe_intermediate_size"),
        n_routed_experts=_get(data, "num_experts", "num_local_experts"),
        num_experts_per_tok=_get(data, "num_experts_per_tok"),
        norm_topk_prob=data.get("norm_topk_prob", False),
        scoring_func="softmax",
        qk_norm="head",
    )


def _read_qwen3(data: Mapping[str, Any]) -> ModelConfig:
    layers, width = _get(data, "num_hidden_layers"), _get(data, "intermediate_size")
    return ModelConfig(
        **_grouped(data, 10_000.0), first_k_dense_replace=layers, intermediate_size=width, qk_norm="head"
    )


_READERS = {
    "deepseek_v3": _read_deepseek,
    "minimax_m2": _read_minimax,
    "qwen3_moe": _read_qwen3_moe,
    "qwen3": _read_qwen3,
}

# ---------------------------------------------------------------------------------------------------------------------
# Writing


def _written_rope(config: ModelConfig) -> dict[str, Any]:
    yarn = config.rope_scaling
    if yarn is None:
        return {"rope_theta": config.rope_theta, "rope_scaling": None}
    scaling = {"type": "yarn", "rope_type": "yarn", "factor": yarn.factor, "beta_fast": yarn.beta_fast}
    scaling |= {"beta_slow": yarn.beta_slow, "original_max_position_embeddings": yarn.original_max_position_embeddings}
    if config.attention == "latent":
        scaling |= {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    elif yarn.mscale != 1:
        raise ValueError(f"mscale is {yarn.mscale}, accepted with attention 'grouped' in a published family is 1")
    return {"rope_theta": config.rope_theta, "rope_scaling": scaling}


def _write_deepseek(config: ModelConfig) -> dict[str, Any]:
    data = {key: getattr(config, key) for key in LATENT_KEYS}
    data |= {"num_key_value_heads": config.num_attention_heads, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return data | {"moe_layer_freq": 1, "num_nextn_predict_layers": config.num_nextn_predict_layers}


def _write_heads(config: ModelConfig) -> dict[str, Any]:
    return {"num_key_value_heads": config.grouped_kv_heads, "head_dim": config.grouped_head_dim}


def _write_minimax(config: ModelConfig) -> dict[str, Any]:
    experts = {"num_local_experts": config.n_routed_experts, "num_experts_per_tok": config.num_experts_per_tok}
    norm = {"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True}
    rotary = {"rotary_dim": config.rope_dim, "intermediate_size": config.moe_intermediate_size}
    return _write_heads(config) | experts | norm | rotary


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    keys = ("intermediate_size", "moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob")
    dense = {"mlp_only_layers": list(range(config.first_k_dense_replace)), "decoder_sparse_step": 1}
    experts = {"num_experts": config.n_routed_experts, "use_sliding_window": False}
    return _write_heads(config) | {key: getattr(config, key) for key in keys} | dense | experts


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return _write_heads(config) | {"intermediate_size": config.intermediate_size, "use_sliding_window": False}


_WRITERS = {
    "deepseek_v3": _write_deepseek,
    "minimax_m2": _write_minimax,
    "qwen3_moe": _write_qwen3_moe,
    "qwen3": _write_qwen3,
}
