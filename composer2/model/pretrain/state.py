"""Training checkpoints: everything a run needs to go on, bit for bit, or nothing.

In: model, optimizer, step, free metadata. Out: `FOLDER/step-00000042-00/` with `model.safetensors`,
`optimizer.safetensors` and `state.json`.

Source: row P2 (atomic checkpoints, resume bit-identical on CPU).
Choice: a checkpoint is written to a hidden folder beside its final place, every file flushed to disk, and renamed at
the end. A name that exists is therefore whole. A failure on the way (disk full) removes the hidden folder, leaves every
older checkpoint as it was and raises `CheckpointError`.
Choice: saving a step that is already there takes the next number behind it (`-01`), so no moment exists without it.
Data need no state: the order of rows is a function of the step (`data.py`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

_NAME = re.compile(r"step-(\d{8})-(\d{2})")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or does not fit; says which folder and why."""


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """What `load_state` found beside the tensors."""

    step: int
    """Next step to take."""
    path: Path
    metadata: Mapping[str, Any] = field(default_factory=dict)


def save_state(
    folder: Path | str,
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    metadata: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Write a checkpoint atomically, then delete all but the newest `keep` (0 keeps all). Returns its folder.

    `step` is the next step to take; `metadata` must be JSON. Raises CheckpointError and changes nothing on failure.
    """
    folder = Path(folder)
    text = json.dumps({"step": step, "metadata": dict(metadata or {})}, indent=1)
    temporary: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
        _write_tensors(temporary / "model.safetensors", model_tensors(model))
        if optimizer is not None:
            _write_tensors(temporary / "optimizer.safetensors", optimizer_tensors(model, optimizer))
        _write_text(temporary / "state.json", text)
        _flush(temporary)
        final = folder / _free_name(folder, step)
        os.rename(temporary, final)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"could not save step {step} in {folder}: {error}; older checkpoints there are whole"
        ) from error
    if keep > 0:
        for old in list_states(folder)[:-keep]:
            os.rename(old, folder / f".old-{old.name}")  # a half-deleted folder must not carry the name of a whole one
    for pattern in (".saving-*", ".old-*"):
        for orphan in folder.glob(pattern):  # those of killed processes too
            shutil.rmtree(orphan, ignore_errors=True)
    return final


def list_states(folder: Path | str) -> list[Path]:
    """Whole checkpoints of a folder, oldest first; an absent folder has none."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def load_state(
    folder: Path | str, *, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> SavedState | None:
    """Load the newest checkpoint of `folder` in place; None when there is none. Checks all names and shapes first."""
    states = list_states(folder)
    return load_state_from(states[-1], model=model, optimizer=optimizer) if states else None


def load_state_from(
    path: Path | str, *, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> SavedState:
    """Load one checkpoint in place. Raises CheckpointError naming the tensor that is missing, extra or misshaped."""
    path = Path(path)
    try:
        saved = json.loads((path / "state.json").read_text(encoding="utf-8"))
        weights = load_file(path / "model.safetensors")
        moments = load_file(path / "optimizer.safetensors") if optimizer is not None else {}
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise CheckpointError(f"could not read checkpoint {path}: {error}") from error
    live = model_tensors(model)
    _compare(path / "model.safetensors", live, weights)
    if optimizer is not None:
        known = {name.rpartition("/")[0] for name in moments}
        _compare(path / "optimizer.safetensors", _moment_shapes(model, optimizer, known), moments)
        _load_moments(model, optimizer, moments)
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(weights[name])
    return SavedState(step=saved["step"], path=path, metadata=saved["metadata"])


# ---------------------------------------------------------------------------------------------------------------------
# Tensors by name


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, the live tensors, each shared one once under its first name."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """State of every parameter as `PARAMETER/FIELD`, the live tensors; empty before the first step."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in _optimized(model, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = torch.as_tensor(value).detach()
    return tensors


def _optimized(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(id(parameter) in names for parameter in parameters), "the optimizer holds a parameter of another model"
    return [(names[id(parameter)], parameter) for parameter in parameters]


def _moment_shapes(
    model: nn.Module, optimizer: torch.optim.Optimizer, known: Collection[str]
) -> dict[str, torch.Tensor]:
    """What the file must hold. A parameter that never had a gradient has no moments, in memory as on disk."""
    shapes: dict[str, torch.Tensor] = {}
    for name, parameter in _optimized(model, optimizer):
        if name not in known:
            continue
        shapes[f"{name}/step"] = torch.zeros((), dtype=torch.float32)
        for key in ("exp_avg", "exp_avg_sq"):
            shapes[f"{name}/{key}"] = parameter.detach()
    return shapes


def _load_moments(model: nn.Module, optimizer: torch.optim.Optimizer, moments: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in _optimized(model, optimizer):
        optimizer.state.pop(parameter, None)
        if f"{name}/step" not in moments:
            continue
        optimizer.state[parameter] = {
            "step": moments[f"{name}/step"].clone(),
            "exp_avg": moments[f"{name}/exp_avg"].to(parameter.device),
            "exp_avg_sq": moments[f"{name}/exp_avg_sq"].to(parameter.device),
        }


def _compare(file: Path, expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
    for name in expected.keys() - found.keys():
        raise CheckpointError(f"{file} lacks tensor {name}")
    for name in found.keys() - expected.keys():
        raise CheckpointError(f"{file} holds tensor {name}, which the model does not have")
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"{file} tensor {name} has shape {tuple(tensor.shape)}, accepted is {tuple(expected[name].shape)}"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Files


def _write_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, file)
    _flush(file)


def _write_text(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    _flush(file)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_name(folder: Path, step: int) -> str:
    taken = [int(path.name[14:]) for path in list_states(folder) if int(path.name[5:13]) == step]
    return f"step-{step:08d}-{max(taken, default=-1) + 1:02d}"
