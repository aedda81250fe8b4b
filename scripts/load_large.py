"""Measures what loading a large checkpoint costs in memory, and that every damaged one is refused by name.

    python scripts/load_large.py --out DIR [--quick]

In: nothing. Out: `DIR/load_large.json` (flat figures). A random bfloat16 model of the DeepSeek-V3 family, 2 GB in at
least 8 shards (--quick: 0.2 GB), is written and read back, each in a process of its own; then six damaged copies are.

    peak_extra_rss_over_model   (highest resident memory while loading - resident memory before - bytes of the model)
                                / bytes of the largest shard; resident memory counts the mapped pages of the shards.
                                At most 1.2 (row M9)
    save_peak_extra_rss         (highest resident memory while saving - resident memory before) / the same
    misfits_named               damaged copies, of 6, whose error names file and tensor

Source: row M9. The figures come from VmRSS and VmHWM of /proc/self/status (Linux), the latter reset before the
measured call. Choice: a tiny model is loaded before, so that code that torch imports on first use is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from composer2.log import Console
from composer2.model.checkpoint.huggingface import load_huggingface, save_huggingface
from composer2.model.checkpoint.shards import INDEX_FILE
from composer2.model.config import ModelConfig
from composer2.model.transformer import Transformer

NUM_SHARDS = 8


def config_of(quick: bool) -> ModelConfig:
    """About 1.0 (quick: 0.1) billion parameters, most of them in experts."""
    hidden, layers = (512, 4) if quick else (1024, 8)
    return ModelConfig(
        vocab_size=16_384,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=4 * hidden,
        moe_intermediate_size=hidden // 2,
        n_routed_experts=72 if quick else 100,
        num_experts_per_tok=8,
        num_attention_heads=8,
        q_lora_rank=256,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        num_nextn_predict_layers=0,
    )


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"field is {field!r}, accepted is a line of /proc/self/status")


def measured(call: Callable[[], Any]) -> tuple[Any, int, float]:
    """Result, highest resident memory during the call above the one before it, and seconds."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, start = resident("VmRSS"), time.perf_counter()
    result = call()
    return result, resident("VmHWM") - before, time.perf_counter() - start


def write(folder: Path, quick: bool) -> dict[str, float]:
    """Fill a model with random numbers and save it."""
    model = Transformer(config_of(quick)).bfloat16()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.05, 0.05, generator=generator)
    size = sum(parameter.nbytes for parameter in model.parameters())
    _, extra, seconds = measured(lambda: save_huggingface(folder, model, max_shard_bytes=size // NUM_SHARDS))
    return {"save_peak_extra_bytes": extra, "save_s": seconds}


def read(folder: Path, quick: bool) -> dict[str, float]:
    """Load it, after a tiny model, so that the code that loads is resident before."""
    tiny = Transformer(ModelConfig(num_nextn_predict_layers=0))
    with tempfile.TemporaryDirectory() as place:
        save_huggingface(Path(place) / "tiny", tiny)
        load_huggingface(Path(place) / "tiny")
    model, extra, seconds = measured(lambda: load_huggingface(folder))
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert model.config == config_of(quick)
    return {"model_bytes": size, "load_peak_extra_bytes": extra - size, "load_s": seconds}


def in_child(step: str, folder: Path, quick: bool) -> dict[str, float]:
    """Run `write` or `read` in a fresh process, so that nothing of the other is resident."""
    command = [sys.executable, __file__, "--step", step, "--out", str(folder), *(["--quick"] if quick else [])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


# ---------------------------------------------------------------------------------------------------------------------
# Damaged copies


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a shard and leave its data as they are."""
    whole = path.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.unlink()  # a hard link: the original stays
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])


def damage(folder: Path, kind: str) -> tuple[str, str]:
    """Damage a copy; returns the names of file and tensor that its error has to hold."""
    index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    tensor = "model.norm.weight"
    path = folder / index["weight_map"][tensor]
    if kind == "truncated file":
        header = path.read_bytes()
        length = struct.unpack("<Q", header[:8])[0]
        places = {name: item["data_offsets"][1] for name, item in json.loads(header[8 : 8 + length]).items()
                  if name != "__metadata__"}  # fmt: skip
        tensor = max(places, key=places.__getitem__)
        path.unlink()
        path.write_bytes(header[:-1])
        return path.name, tensor
    if kind == "missing tensor":
        rewrite_header(path, lambda header: header.pop(tensor))
        return path.name, tensor
    if kind == "extra tensor":
        rewrite_header(path, lambda header: header.update(extra=header[tensor]))
        return path.name, "extra"
    if kind == "wrong shape":
        rewrite_header(path, lambda header: header[tensor].update(shape=[2, header[tensor]["shape"][0] // 2]))
    if kind == "wrong dtype":
        rewrite_header(path, lambda header: header[tensor].update(dtype="I16"))
    if kind == "index pointing nowhere":
        index["weight_map"][tensor] = "model-00099-of-00099.safetensors"
        (folder / INDEX_FILE).unlink()
        (folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
        return INDEX_FILE, tensor
    return path.name, tensor


KINDS = ("truncated file", "missing tensor", "extra tensor", "wrong shape", "wrong dtype", "index pointing nowhere")


def misfits(folder: Path) -> dict[str, str]:
    """Kind of damage -> the error, or "" when it does not name file and tensor."""
    errors = {}
    for kind in KINDS:
        copy = folder.with_name("damaged")
        shutil.copytree(folder, copy, copy_function=os.link)
        names = damage(copy, kind)
        try:
            load_huggingface(copy)
            errors[kind] = ""
        except ValueError as error:
            errors[kind] = str(error) if all(name in str(error) for name in names) else ""
        shutil.rmtree(copy)
    return errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="a tenth of the size")
    parser.add_argument("--step", choices=("write", "read"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    if options.step:
        figures = {"write": write, "read": read}[options.step](options.out, options.quick)
        console.final(json.dumps(figures))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out) as place:
        folder = Path(place) / "model"
        figures = in_child("write", folder, options.quick)
        sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
        figures |= in_child("read", folder, options.quick)
        errors = misfits(folder)
    largest = max(sizes)
    figures |= {
        "checkpoint_bytes": sum(sizes),
        "num_shards": len(sizes),
        "largest_shard_bytes": largest,
        "peak_extra_rss_over_model": figures["load_peak_extra_bytes"] / largest,
        "save_peak_extra_rss": figures["save_peak_extra_bytes"] / largest,
        "misfits_named": sum(bool(error) for error in errors.values()),
    }
    path = options.out / "load_large.json"
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    for kind, error in errors.items():
        console.note(f"{kind}: {error or 'NOT NAMED'}")
    bounded, named = figures["peak_extra_rss_over_model"] <= 1.2, figures["misfits_named"] == len(KINDS)
    console.final(f"{path}: peak {figures['peak_extra_rss_over_model']:.2f} shards above the model, "
                  f"{figures['misfits_named']} of {len(KINDS)} misfits named")  # fmt: skip
    return 0 if bounded and named and len(sizes) >= NUM_SHARDS else 1


if __name__ == "__main__":
    raise SystemExit(main())
