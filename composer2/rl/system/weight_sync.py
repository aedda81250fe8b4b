"""Weights from the trainer to the samplers: a state dict and a version go in, a file that samplers load comes out.

Source: report §6.2 (fast weight sync, in-flight updates), rows A3 A5.
Choice: in first form the whole state travels through a folder (a memory file system on one node), written beside its
final name and renamed, so that a reader never sees half a file. Deltas through object storage keep this interface.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file


class FolderSink:
    """A `WeightSink` over a folder: keeps the newest `keep` versions, each `weights-VERSION.safetensors`."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, accepted is 1 or more")
        self.folder = folder
        self.keep = keep
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, version: int) -> Path:
        """Where `version` lies."""
        return self.folder / f"weights-{version:08d}.safetensors"

    def publish(self, version: int, state: Mapping[str, torch.Tensor]) -> Path:
        """Write one version and drop the oldest; returns its path. Blocks for one copy of the weights."""
        final = self.path(version)
        partial = final.with_suffix(".partial")
        try:
            save_file(_apart(state), str(partial))
        except SafetensorError as error:
            partial.unlink(missing_ok=True)
            raise OSError(f"could not write {final}: {error}") from error
        os.replace(partial, final)
        for old in sorted(self.folder.glob("weights-*.safetensors"))[: -self.keep]:
            old.unlink(missing_ok=True)
        return final


def _apart(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that share no memory, as the file format asks for: a tied head travels a second time."""
    apart: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        tensor = tensor.detach().contiguous()
        address = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return apart


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The state dict of one published version; FileNotFoundError if it was dropped."""
    return load_file(str(path))
