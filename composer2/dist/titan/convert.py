"""Checkpoints in and out: a published model becomes one that torchtitan starts from, and a run becomes a published one.

    python -m composer2.dist.titan.convert import --model DIR --out SEED      then --checkpoint.initial_load_path SEED
    python -m composer2.dist.titan.convert export --checkpoint OUT/checkpoint/step-100 --run NAME --out DIR

Distributed checkpoints hold tensors by name, whatever layout wrote them, so both run on one process without a GPU.
Source: rows D5 M9. Choice: a step of its own instead of torchtitan's adapter, because the whole model then passes
through the one reader and writer that the rest of the project tests (model/checkpoint/huggingface.py). It wants the
model in the memory of one machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from composer2.model.checkpoint.huggingface import load_huggingface, save_huggingface
from composer2.model.config import ModelConfig
from composer2.model.transformer import Transformer

RUNS = ("debug_rl", "debug_cpt", "rl", "cpt")


def import_model(directory: Path | str, out: Path | str) -> None:
    """Write the published model in `directory` as a distributed checkpoint, float32. Errors as `load_huggingface`."""
    model = load_huggingface(directory, dtype=torch.float32)
    dcp.save(model.state_dict(), checkpoint_id=str(out))


def load_checkpoint(checkpoint: Path | str, sizes: ModelConfig) -> Transformer:
    """The model of a run's checkpoint, whole, in float32. torch's errors for a checkpoint of another model."""
    model = Transformer(sizes)
    dcp.load(model.state_dict(), checkpoint_id=str(checkpoint))
    return model


def export_model(checkpoint: Path | str, sizes: ModelConfig, out: Path | str) -> None:
    """Write `out` as the published family stores it: safetensors and a config."""
    save_huggingface(out, load_checkpoint(checkpoint, sizes))


def sizes_of(run: str) -> ModelConfig:
    """The model of a run of config_registry.py. ValueError for another name."""
    if run not in RUNS:
        raise ValueError(f"run is {run!r}, accepted is one of {RUNS}")
    from composer2.dist.titan.compat import prepare

    prepare()
    from composer2.dist.titan import config_registry

    sizes: ModelConfig = getattr(config_registry, run)().model_spec.model.sizes
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    reader = commands.add_parser("import", help="published model -> checkpoint")
    reader.add_argument("--model", type=Path, required=True, help="folder of the published model")
    writer = commands.add_parser("export", help="checkpoint -> published model")
    writer.add_argument("--checkpoint", type=Path, required=True, help="folder of one step")
    writer.add_argument("--run", required=True, choices=RUNS, help="run that the checkpoint is of")
    for command in (reader, writer):
        command.add_argument("--out", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args()
    if arguments.command == "import":
        import_model(arguments.model, arguments.out)
    else:
        export_model(arguments.checkpoint, sizes_of(arguments.run), arguments.out)


if __name__ == "__main__":
    main()
