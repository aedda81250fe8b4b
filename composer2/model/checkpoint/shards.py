"""Safetensors shards as files: headers are read and checked before any weight, and tensors are written one by one.

In: a directory, out: where each tensor lies, with dtype and shape; or in: named tensors, out: shards and their index.

    file = length of the header (8 bytes, little endian), header (JSON: name -> dtype, shape, data_offsets), data

Source: the safetensors format description; row M9 (streaming, errors that name file and tensor).
Choice: headers are parsed here, because a truncated file should name the tensor it breaks in before anything is loaded.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LARGEST_HEADER = 100_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One stored tensor."""

    file: Path
    name: str
    dtype: str
    """As the header spells it, e.g. BF16."""
    shape: tuple[int, ...]


def read_entries(directory: Path | str) -> dict[str, Entry]:
    """Every tensor of a checkpoint, from its index and headers. FileNotFoundError without weights; ValueError names the
    file, and the tensor where one is at fault: index pointing nowhere, tensor not in its file, truncated file."""
    directory = Path(directory)
    index = directory / INDEX_FILE
    if not index.exists():
        single = directory / SINGLE_FILE
        if not single.exists():
            raise FileNotFoundError(f"{directory} holds neither {INDEX_FILE} nor {SINGLE_FILE}")
        return read_header(single)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        by_file: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            by_file.setdefault(file, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged ({error!r}), accepted is an object with weight_map") from error
    for file, names in by_file.items():
        if not isinstance(file, str) or Path(file).name != file or not (directory / file).is_file():
            raise ValueError(f"{index} puts tensor {names[0]} into {file}, which is no file of {directory}")
    entries: dict[str, Entry] = {}
    for file, names in sorted(by_file.items()):
        path = directory / file
        header = read_header(path)
        for name in names:
            if name not in header:
                raise ValueError(f"{path} lacks tensor {name}, which {INDEX_FILE} puts there")
        for name, entry in header.items():
            if weight_map.get(name) != file:
                raise ValueError(f"{path} holds tensor {name}, which {INDEX_FILE} does not put there")
            entries[name] = entry
    return entries


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one file, all of which are within it and as long as their shapes say."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if len(start) < 8 or length > min(size - 8, LARGEST_HEADER):
            raise ValueError(f"{path} is truncated or no safetensors file: {size} bytes, a header of {length}")
        text = file.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        entries, ends, lengths = {}, {}, {}
        for name, item in header.items():
            entries[name] = Entry(file=path, name=name, dtype=str(item["dtype"]), shape=tuple(map(int, item["shape"])))
            begin, ends[name] = map(int, item["data_offsets"])
            lengths[name] = ends[name] - begin
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} has a damaged header ({error!r})") from error
    for name, entry in entries.items():
        _check_length(entry, lengths[name])
    for name in sorted(ends, key=ends.__getitem__):
        if 8 + length + ends[name] > size:
            raise ValueError(
                f"{path} is truncated: tensor {name} ends at byte {8 + length + ends[name]}, the file at {size}"
            )
    return entries


def _check_length(entry: Entry, length: int) -> None:
    if entry.dtype not in DTYPES:
        raise ValueError(f"{entry.file} tensor {entry.name} has dtype {entry.dtype}, accepted is {', '.join(DTYPES)}")
    expected = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
    if length != expected:
        raise ValueError(
            f"{entry.file} tensor {entry.name} has {length} bytes, accepted is {expected} for {entry.dtype} "
            f"{list(entry.shape)}"
        )


def write_shards(
    directory: Path, tensors: Sequence[tuple[str, torch.Tensor]], *, max_shard_bytes: int
) -> dict[str, int]:
    """Write named tensors (views are fine) in this order into as many files as needed; returns their sizes in bytes.

    A shard holds at most `max_shard_bytes` of data, or a single tensor. Beside the tensors themselves no more memory is
    taken than one of them. More than one file get an index."""
    shards: list[list[tuple[str, torch.Tensor]]] = [[]]
    filled = 0
    for name, tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, tensor))
        filled += tensor.nbytes
    files = [SINGLE_FILE]
    if len(shards) > 1:
        files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name, _ in shard}
        total = sum(tensor.nbytes for _, tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for file, shard in zip(files, shards, strict=True):
        with (directory / file).open("wb") as opened:
            _write_shard(opened, shard)
    return {file: (directory / file).stat().st_size for file in files}


def _write_shard(file: BinaryIO, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    tensors = list(tensors)
    for name, tensor in tensors:
        place = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for _, tensor in tensors:
        file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
