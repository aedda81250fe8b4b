"""Tensor names of published checkpoints: our parameters go in, pieces of them under their published names come out.

One table serves both directions: a piece says which part of which of our tensors is which tensor of the file.

    ours                                  theirs (deepseek_v3, qwen3_moe)                minimax_m2
    layers.1.mlp.experts.gate_up_proj     model.layers.1.mlp.experts.E.gate_proj.weight  …block_sparse_moe.experts.E.w1
      [E, :F] and [E, F:]                   and …up_proj.weight                            and …w3
    layers.1.mlp.experts.down_proj [E]    …experts.E.down_proj.weight                    …experts.E.w2
    layers.1.mlp.gate.weight              model.layers.1.mlp.gate.weight                 …block_sparse_moe.gate
    mtp.0.block.* / enorm / norm          model.layers.L.* / enorm / shared_head.norm    -

Source: the tensor listings published with DeepSeek-V3, Kimi K2.5 (prefix `language_model.`), MiniMax-M2 and Qwen3; row
M9. DeepSeek-V3 stores MTP module j as layer num_hidden_layers + j, with copies of the embedding and of the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from composer2.model.config import ModelConfig

BIAS = "e_score_correction_bias"


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One tensor of a published checkpoint."""

    ours: str
    """Name in `Transformer.state_dict()`."""
    theirs: str
    where: tuple[int | slice, ...]
    """Index of the piece in our tensor; () for all of it."""
    shape: tuple[int, ...]
    is_copy: bool = False
    """A second copy of a tensor that has a piece of its own: written, and on reading only compared."""


def pieces(state: Mapping[str, torch.Tensor], config: ModelConfig, family: str, prefix: str = "") -> list[Piece]:
    """Every published tensor of a model whose state dict (on any device, meta included) is `state`, in its order."""
    found: list[Piece] = []
    for name, tensor in state.items():
        if name.endswith(BIAS) and config.scoring_func == "softmax":
            continue  # these families have no such tensor; ours is zero
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = prefix + _their_name(name, config, family)
        if ".experts." in name:
            found += _expert_pieces(name, theirs, tensor, config, family)
        else:
            found.append(Piece(ours=name, theirs=theirs, where=(), shape=tuple(tensor.shape)))
    for module in range(config.num_nextn_predict_layers):
        layer = f"{prefix}model.layers.{config.num_hidden_layers + module}"
        for ours, theirs in (("embed_tokens.weight", "embed_tokens"), ("lm_head.weight", "shared_head.head")):
            shape = tuple(state[ours].shape)
            found.append(Piece(ours=ours, theirs=f"{layer}.{theirs}.weight", where=(), shape=shape, is_copy=True))
    return found


def mtp_layers_of(names: Iterator[str] | Mapping[str, object], config: ModelConfig, prefix: str) -> int:
    """MTP modules of which a checkpoint holds at least one tensor, counted from the first."""
    first = config.num_hidden_layers
    beginnings = [f"{prefix}model.layers.{first + module}." for module in range(config.num_nextn_predict_layers)]
    found = [False] * len(beginnings)
    for name in names:
        for module, beginning in enumerate(beginnings):
            found[module] = found[module] or name.startswith(beginning)
    return max((module + 1 for module, here in enumerate(found) if here), default=0)


def _their_name(name: str, config: ModelConfig, family: str) -> str:
    if name == "lm_head.weight":
        return name
    if name.startswith("mtp."):
        _, module, rest = name.split(".", 2)
        rest = rest.removeprefix("block.")
        if rest == "norm.weight":
            rest = "shared_head.norm.weight"
        name = f"layers.{config.num_hidden_layers + int(module)}.{rest}"
    if family == "minimax_m2":
        name = name.replace(f".mlp.gate.{BIAS}", f".block_sparse_moe.{BIAS}").replace(".mlp.", ".block_sparse_moe.")
    return f"model.{name}"


def _expert_pieces(name: str, theirs: str, tensor: torch.Tensor, config: ModelConfig, family: str) -> list[Piece]:
    """The matrices of every expert in a stack of them."""
    stem, part = theirs.rsplit(".", 1)
    width = config.moe_intermediate_size
    parts: dict[str, slice] = {"down_proj": slice(None)}
    if part == "gate_up_proj":
        parts = {"gate_proj": slice(0, width), "up_proj": slice(width, 2 * width)}
    if family == "minimax_m2":
        short = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        parts = {short[label]: rows for label, rows in parts.items()}
    rows_of = tensor.shape[1] if part == "down_proj" else width
    shape = (rows_of, tensor.shape[2])
    return [
        Piece(ours=name, theirs=f"{stem}.{expert}.{label}.weight", where=(expert, rows), shape=shape)
        for expert in range(len(tensor))
        for label, rows in parts.items()
    ]
