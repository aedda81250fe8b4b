"""Reading a model: a name of a published family or a folder goes in, its parameter counts and cache size come out.

    total    parameters of the trunk, embedding and head included; MTP modules counted apart, selection biases not
    active   total without the routed experts a token does not see
    kv_values_per_token_per_layer   numbers cached for a token in one layer

Source: rows X1 (inspect model) M8.
Choice: parameters are counted on a model built on the meta device, not by a formula: what is counted is what runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table

from composer2.model.checkpoint.huggingface import plan_huggingface
from composer2.model.checkpoint.native import load_config
from composer2.model.checkpoint.published import FAMILY_OF, MULTIMODAL, is_published
from composer2.model.config import ModelConfig
from composer2.model.families import FAMILIES
from composer2.model.transformer import Transformer
from composer2.start import newest_model

Record = dict[str, Any]


def model_record(config: ModelConfig) -> Record:
    """Counts of a config, all of them numbers of parameters or of cached values."""
    with torch.device("meta"):
        model = Transformer(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    mtp = sum(size for name, size in sizes.items() if name.startswith("mtp."))
    routed = sum(size for name, size in sizes.items() if ".experts." in name and not name.startswith("mtp."))
    total = sum(sizes.values()) - mtp
    return {
        "total": total,
        "active": total - routed + routed * config.num_experts_per_tok // config.n_routed_experts,
        "mtp": mtp,
        "kv_values_per_token_per_layer": config.cache_dim,
        "num_hidden_layers": config.num_hidden_layers,
        "num_moe_layers": config.num_moe_layers,
        "n_routed_experts": config.n_routed_experts if config.num_moe_layers else 0,
        "num_experts_per_tok": config.num_experts_per_tok if config.num_moe_layers else 0,
        "attention": config.attention,
        "max_position_embeddings": config.max_position_embeddings,
    }


def _stored_config(folder: Path) -> ModelConfig:
    """Config of a model folder of a run; ValueError names what is accepted besides."""
    try:
        return load_config(folder)
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no config.json, accepted is a folder with a model") from None
    except ValueError as error:
        raise ValueError(f"{error}; published ones are {', '.join((*FAMILY_OF, *MULTIMODAL))}") from error


def inspect_model(name: str) -> tuple[RenderableType, Record]:
    """What `composer2 inspect model NAME|DIR` shows, for people and as one dict.

    NAME is a key of `FAMILIES`; DIR a Hugging Face directory, whose shards are checked, a run, or one of its models.
    ValueError for anything else, or naming what does not fit in a directory."""
    record: Record = {"model": name}
    if name in FAMILIES:
        record |= model_record(FAMILIES[name]())
    elif is_published(name):
        plan = plan_huggingface(name)
        stored = {entry.file for source in plan.sources for entry in (source.data, source.scale) if entry is not None}
        record |= {"family": plan.published.family, **model_record(plan.config)}
        record["stored_bytes"] = sum(path.stat().st_size for path in stored)
    elif (Path(name) / "models").is_dir():
        record |= model_record(load_config(newest_model(Path(name))))
    elif Path(name).is_dir():
        record |= model_record(_stored_config(Path(name)))
    else:
        raise ValueError(f"model is {name!r}, accepted is a folder with a model or one of {', '.join(FAMILIES)}")
    table = Table("figure", "value", title=f"Model {name}", title_justify="left")
    for key, figure in record.items():
        if key != "model":
            table.add_row(key, f"{figure:,}" if isinstance(figure, int) else str(figure))
    return table, record
