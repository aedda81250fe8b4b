"""Hugging Face directories of the published families: a directory goes in, a policy comes out, and back.

In: `config.json`, safetensors shards and their index. Out: a `Transformer`, its experts stacked, quantised weights as
plain numbers; or the other way round a directory that transformers loads.

    plan:  every tensor the model needs has a place in a header, with fitting shape and dtype, and nothing is left over
    load:  shard by shard, each tensor copied to its place; memory beside the model: the pages of one shard

Source: row M9 (streaming; peak memory above the model at most 1.2 x the largest shard; a misfit names file and tensor;
nothing is half-loaded). FP8-block and INT4-group weights are recognised by their dtypes and names (dequantise.py).
Choice: parameters get one dtype, selection biases stay float32: they are sums of many small steps (row M5).
Choice: a checkpoint without any MTP tensor gives a model without MTP modules, whatever its config says, because
transformers drops them when it saves. DeepSeek's copies of embedding and head must equal the originals.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from composer2.model.attention import Attend, sdpa_attend
from composer2.model.checkpoint.dequantise import dequantise_fp8_block, dequantise_int4_group
from composer2.model.checkpoint.names import BIAS, Piece, mtp_layers_of, pieces
from composer2.model.checkpoint.native import whole_directory
from composer2.model.checkpoint.published import CONFIG_FILE, Published, family_of, read_published, write_published
from composer2.model.checkpoint.shards import Entry, read_entries, write_shards
from composer2.model.config import ModelConfig
from composer2.model.transformer import Transformer

FLOATS = ("F64", "F32", "F16", "BF16")
SCALE_DTYPES = (*FLOATS,)
IGNORED_ENDINGS = ("rotary_emb.inv_freq",)
"""Tensors old checkpoints carry that follow from the config."""
COMPARED_ROWS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a piece of the model comes from."""

    piece: Piece
    data: Entry
    scale: Entry | None = None
    shape: Entry | None = None
    """`weight_shape` of an INT4 tensor."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checkpoint whose every tensor fits."""

    config: ModelConfig
    published: Published
    sources: list[Source]
    copies: list[Source]
    """Second copies of tensors, compared at the end."""
    block: tuple[int, int]
    """Rows and columns of a block of FP8 codes with one scale."""
    group_size: int
    """INT4 codes with one scale."""


def load_huggingface(
    directory: Path | str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    attend: Attend = sdpa_attend,
    grouped_backend: str = "auto",
) -> Transformer:
    """The model of a directory, parameters in `dtype` (None: the one its config names).

    FileNotFoundError without config or weights; ValueError naming file and tensor, before anything is loaded, when one
    is missing, left over, misshaped, of a wrong dtype or cut off."""
    plan = plan_huggingface(directory)
    dtype = dtype or plan.published.dtype
    with torch.device("meta"):
        model = Transformer(plan.config, attend=attend, grouped_backend=grouped_backend)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    for buffer in model.buffers():
        buffer.zero_()
    state = model.state_dict()
    by_file: dict[Path, list[Source]] = {}
    for source in plan.sources:
        by_file.setdefault(source.data.file, []).append(source)
    for path, sources in by_file.items():
        _load_shard(path, sources, state, plan)
    for source in plan.copies:
        _compare_copy(source, state[source.piece.ours])
    return model


def save_huggingface(
    directory: Path | str,
    model: Transformer,
    *,
    max_shard_bytes: int = 5_000_000_000,
    prefix: str = "",
    eos_ids: Sequence[int] = (),
    tokenizer: Path | None = None,
    files: Sequence[Path] = (),
) -> None:
    """Write the model as its published family stores it, whole or not at all; `prefix` `language_model.` as Kimi K2.5.
    A copy of `tokenizer` becomes tokenizer.json; copies of `files` keep their names.

    ValueError names a field that no family expresses, or a selection bias that the family has no tensor for. OSError
    when the disk refuses; an older checkpoint there is then whole."""
    config, state = model.config, model.state_dict()
    family = family_of(config)
    for name, tensor in state.items():
        if name.endswith(BIAS) and config.scoring_func == "softmax" and bool(tensor.any()):
            raise ValueError(f"{name} is not zero, accepted in {family} is a router without selection bias")
    data = write_published(config, model.embed_tokens.weight.dtype, prefix=prefix)
    ends: Any = list(eos_ids) if len(eos_ids) != 1 else eos_ids[0]
    data |= {"bos_token_id": None, "eos_token_id": ends or None, "pad_token_id": None}
    tensors = []
    for piece in pieces(state, config, family, prefix):
        tensor = state[piece.ours]
        tensors.append((piece.theirs, tensor[piece.where] if piece.where else tensor))
    with whole_directory(directory) as temporary:
        (temporary / CONFIG_FILE).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        write_shards(temporary, tensors, max_shard_bytes=max_shard_bytes)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, temporary / "tokenizer.json")
        for path in files:
            shutil.copyfile(path, temporary / path.name)


# ---------------------------------------------------------------------------------------------------------------------
# Planning


def plan_huggingface(directory: Path | str) -> Plan:
    """Read config and headers and give every tensor its place; errors as in `load_huggingface`."""
    published = read_published(directory)
    entries = read_entries(directory)
    config = published.config
    modules = mtp_layers_of(entries, config, published.prefix)
    config = dataclasses.replace(config, num_nextn_predict_layers=modules)
    block, group_size = _quantisation(published.quantisation, Path(directory) / CONFIG_FILE)
    with torch.device("meta"):
        state = Transformer(config).state_dict()
    wanted = pieces(state, config, published.family, published.prefix)
    if config.tie_word_embeddings:
        shape = tuple(state["embed_tokens.weight"].shape)
        name = f"{published.prefix}lm_head.weight"
        wanted.append(Piece(ours="embed_tokens.weight", theirs=name, where=(), shape=shape, is_copy=True))
    sources, copies, used = [], [], set()
    for piece in wanted:
        if piece.is_copy and piece.theirs not in entries:
            continue
        source = _source(piece, entries, Path(directory), block, group_size)
        used |= {entry.name for entry in (source.data, source.scale, source.shape) if entry is not None}
        if piece.is_copy:
            copies.append(source)
        else:
            sources.append(source)
    for name, entry in entries.items():
        foreign = not name.startswith(published.prefix) or name.endswith(IGNORED_ENDINGS)
        if name not in used and not foreign:
            raise ValueError(f"{entry.file} holds tensor {name}, which a model of its {CONFIG_FILE} does not have")
    return Plan(config=config, published=published, sources=sources, copies=copies, block=block, group_size=group_size)


def _source(
    piece: Piece, entries: Mapping[str, Entry], directory: Path, block: tuple[int, int], group_size: int
) -> Source:
    """The stored tensors a piece is made of."""
    data = entries.get(piece.theirs)
    stem = piece.theirs.removesuffix(".weight")
    if data is None:
        packed = entries.get(f"{stem}.weight_packed")
        if packed is None or len(piece.shape) != 2:
            raise ValueError(f"{directory} lacks tensor {piece.theirs} of shape {piece.shape}")
        scale, shape = (_companion(packed, f"{stem}.{name}", entries) for name in ("weight_scale", "weight_shape"))
        _check(packed, (piece.shape[0], -(-piece.shape[1] // 8)), ("I32",))
        _check(scale, (piece.shape[0], -(-piece.shape[1] // group_size)), SCALE_DTYPES)
        _check(shape, (2,), ("I32", "I64"))
        return Source(piece=piece, data=packed, scale=scale, shape=shape)
    if data.dtype == "F8_E4M3" and len(piece.shape) == 2:
        scale = _companion(data, f"{stem}.weight_scale_inv", entries)
        _check(data, piece.shape, ("F8_E4M3",))
        _check(scale, (-(-piece.shape[0] // block[0]), -(-piece.shape[1] // block[1])), SCALE_DTYPES)
        return Source(piece=piece, data=data, scale=scale)
    _check(data, piece.shape, FLOATS)
    return Source(piece=piece, data=data)


def _companion(data: Entry, name: str, entries: Mapping[str, Entry]) -> Entry:
    if name not in entries:
        raise ValueError(f"{data.file} holds tensor {data.name} ({data.dtype}), but {name} is nowhere")
    return entries[name]


def _check(entry: Entry, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if entry.shape != shape:
        raise ValueError(f"{entry.file} tensor {entry.name} has shape {entry.shape}, accepted is {shape}")
    if entry.dtype not in dtypes:
        raise ValueError(f"{entry.file} tensor {entry.name} has dtype {entry.dtype}, accepted is {' or '.join(dtypes)}")


def _quantisation(data: Mapping[str, Any], path: Path) -> tuple[tuple[int, int], int]:
    """Block of FP8 and group of INT4 weights; ValueError for what is not dequantised here."""
    block, group_size = (128, 128), 32
    method = data.get("quant_method")
    if method == "fp8":
        size = data.get("weight_block_size") or block
        if len(size) != 2 or min(size) < 1:
            raise ValueError(f"{path}: weight_block_size is {size}, accepted is two positive numbers")
        block = (int(size[0]), int(size[1]))
    elif method == "compressed-tensors":
        groups = data.get("config_groups") or {}
        for group in groups.values():
            weights = group.get("weights") or {}
            accepted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
            for key, value in accepted.items():
                if weights.get(key, value) != value:
                    raise ValueError(f"{path}: {key} of config_groups is {weights[key]!r}, accepted is {value!r}")
            group_size = int(weights.get("group_size") or group_size)
        if data.get("format", "pack-quantized") != "pack-quantized":
            raise ValueError(f"{path}: format is {data['format']!r}, accepted is 'pack-quantized'")
    elif method is not None:
        raise ValueError(f"{path}: quant_method is {method!r}, accepted is 'fp8' or 'compressed-tensors'")
    return block, group_size


# ---------------------------------------------------------------------------------------------------------------------
# Loading


@torch.no_grad()
def _load_shard(path: Path, sources: Sequence[Source], state: Mapping[str, torch.Tensor], plan: Plan) -> None:
    """Copy the tensors of one file to their places; companions in other files are opened for the moment."""
    name = "its header"
    try:
        with ExitStack() as stack:
            files = {path: stack.enter_context(safe_open(path, framework="pt", device="cpu"))}

            def read(entry: Entry) -> torch.Tensor:
                if entry.file not in files:
                    files[entry.file] = stack.enter_context(safe_open(entry.file, framework="pt", device="cpu"))
                return files[entry.file].get_tensor(entry.name)

            for source in sources:
                name = source.data.name
                target = state[source.piece.ours]
                if source.piece.where:
                    target = target[source.piece.where]
                _fill(target, source, read, plan)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged, reading {name}: {error}") from error


def _fill(target: torch.Tensor, source: Source, read: Any, plan: Plan) -> None:
    """Write one piece, dequantised when it is quantised."""
    data = read(source.data)
    if source.scale is None:
        target.copy_(data)
        return
    scale = read(source.scale)
    place = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
    try:
        if source.shape is None:
            dequantise_fp8_block(data, scale, plan.block, place)
        else:
            stated = tuple(read(source.shape).tolist())
            if stated != source.piece.shape:
                raise ValueError(f"weight_shape says {stated}, accepted is {source.piece.shape}")
            dequantise_int4_group(data, scale, plan.group_size, place)
    except ValueError as error:
        raise ValueError(f"{source.data.file} tensor {source.data.name}: {error}") from error
    if place is not target:
        target.copy_(place)


def _compare_copy(source: Source, original: torch.Tensor) -> None:
    """ValueError when a second copy of a tensor differs from the tensor."""
    entry = source.data
    if source.scale is not None:
        raise ValueError(f"{entry.file} tensor {entry.name} is quantised, accepted is {' or '.join(FLOATS)}")
    with safe_open(entry.file, framework="pt", device="cpu") as file:
        rows = file.get_slice(entry.name)
        for first in range(0, entry.shape[0], COMPARED_ROWS):
            part = original[first : first + COMPARED_ROWS]
            if not torch.equal(rows[first : first + COMPARED_ROWS].to(part.dtype), part.cpu()):
                raise ValueError(
                    f"{entry.file} tensor {entry.name} differs from {source.piece.ours}, accepted is a copy of it"
                )
