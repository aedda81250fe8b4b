"""Our own checkpoint of a policy: a folder with `config.json` and `model.safetensors`, written whole or not at all.

In: a model, out: a folder, and back. Parameters and selection biases keep their names and dtypes.

Source: rows M9 (every misfit names the tensor, nothing is half-loaded) and P2 (atomic).
Choice: the folder is written beside its place under a hidden name, flushed to disk and renamed. A folder cannot be
renamed onto a full one, so the old one steps aside as `.NAME.previous` for a moment; a reader that finds only that one
(the writer was killed in between) reads it: at any moment a whole checkpoint can be loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from composer2.config import from_json, to_json
from composer2.model.config import ModelConfig
from composer2.model.transformer import Transformer

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
MODEL_TYPE = "composer2"


def save_model(directory: Path | str, model: Transformer) -> None:
    """Write the model's config and tensors. OSError when the disk refuses; an older checkpoint there is then whole."""
    with whole_directory(directory) as temporary:
        config = {"model_type": MODEL_TYPE, **to_json(model.config)}
        (temporary / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file({name: tensor.contiguous() for name, tensor in _stored(model).items()}, temporary / WEIGHTS_FILE)


@contextlib.contextmanager
def whole_directory(directory: Path | str) -> Iterator[Path]:
    """A hidden folder to fill; when the block ends well it takes the place of `directory`, else it is gone.

    OSError when the disk refuses or safetensors fails to write; what was there before is then whole."""
    directory = Path(directory).absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.saving-", dir=directory.parent))
    try:
        temporary.chmod(0o755)  # mkdtemp makes a private folder
        yield temporary
        for path in (*sorted(temporary.iterdir()), temporary):
            _flush(path)
        _replace(temporary, directory)
    except (OSError, SafetensorError) as error:
        raise OSError(f"could not save the model to {directory}: {error}; what was there before is whole") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _stored(model: Transformer) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint: a tied head is the embedding, and stored once."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def load_config(directory: Path | str) -> ModelConfig:
    """The config of a saved model. ValueError names an unknown or ill-typed field."""
    path = _existing(Path(directory)) / CONFIG_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict) or data.pop("model_type", None) != MODEL_TYPE:
        raise ValueError(f"{path} is not a {MODEL_TYPE} config, accepted is an object with model_type {MODEL_TYPE!r}")
    return from_json(ModelConfig, data, place=str(path))


def load_model(directory: Path | str, *, device: torch.device | str = "cpu") -> Transformer:
    """The saved model, in the dtypes it was saved in. FileNotFoundError without one, ValueError for a misfit."""
    config = load_config(directory)
    path = _existing(Path(directory)) / WEIGHTS_FILE
    with torch.device("meta"):
        model = Transformer(config)
    expected = _stored(model)
    tensors: dict[str, torch.Tensor] = {}
    name = "its header"
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            _compare(path, expected, {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()})  # noqa: SIM118
            for name in expected:
                # a copy: at the file's odd addresses matrix products round differently, and resumed runs would drift
                tensors[name] = file.get_tensor(name).clone()
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged, reading {name}: {error}") from error
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    model.load_state_dict(tensors, assign=True)
    model.tie_weights()
    return model


def _compare(path: Path, expected: Mapping[str, torch.Tensor], found: Mapping[str, tuple[int, ...]]) -> None:
    """ValueError naming the first tensor that is missing, extra or misshaped."""
    for name in expected:
        if name not in found:
            raise ValueError(f"{path} lacks tensor {name} of shape {tuple(expected[name].shape)}")
    for name, shape in found.items():
        if name not in expected:
            raise ValueError(f"{path} holds tensor {name}, which a model of {CONFIG_FILE} does not have")
        if shape != tuple(expected[name].shape):
            raise ValueError(f"{path} tensor {name} has shape {shape}, accepted is {tuple(expected[name].shape)}")


def _existing(directory: Path) -> Path:
    """The folder, or the one an interrupted save left aside."""
    directory = directory.absolute()
    previous = _previous(directory)
    return previous if previous.is_dir() and not directory.exists() else directory


def _previous(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.previous")


def _replace(temporary: Path, directory: Path) -> None:
    """Put `temporary` in the place of `directory`; put the old one back when that fails."""
    previous = _previous(directory)
    if not directory.exists():
        os.rename(temporary, directory)
    else:
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(directory, previous)
        try:
            os.rename(temporary, directory)
        except OSError:
            os.rename(previous, directory)
            raise
    _flush(directory.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _flush(path: Path) -> None:
    """Force a file or a folder's entries to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
