"""Counts what context parallelism sends: latents against expanded keys and values, on real gloo ranks.

    python scripts/bench_context_parallel.py --out DIR [--quick]

In: nothing. Out: `DIR/bench_context_parallel.json` (flat figures) and `DIR/bench_context_parallel.png`. One attention
layer of Kimi K2's head shape (64 heads; keys 128 + 64 wide, values 128; latent 512 + 64) runs forward and backward over
CP ranks, once gathering latents and expanding them on every rank, once gathering the expanded keys and values. Every
collective a rank calls is seen at the moment of the call, and the bytes it sends to the others are added up.

    latent_bytes_cp{N}, expanded_bytes_cp{N}   bytes a rank sends a layer, forward and backward
    latent_over_expanded     their ratio, the largest of all N; by arithmetic 576 / 20480
    max_rel_error            output and input gradient of the two ways apart, float32, relative
    imbalance_packed_cp{N}   pairs of the busiest rank over the mean, rows of packed documents of unequal length
    imbalance_single_cp{N}   the same for one document, 1 exactly

Source: report §6.1 (latent gathering); row D2. Choice: bytes, not seconds: gloo on one machine says nothing of a GPU's
links. Choice: the model width is small, because it changes nothing that is sent.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from composer2.dist.context_parallel import GatherLatents, chunk_places, gathered_places, imbalance, visible_until
from composer2.log import Console
from composer2.model.attention import KeyView, LatentAttention
from composer2.model.config import ModelConfig
from composer2.model.layers import rope_tables

matplotlib.use("Agg")
import matplotlib.pyplot as plt

K2 = ModelConfig(
    hidden_size=256, num_attention_heads=64, q_lora_rank=64, kv_lora_rank=512, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128,
)  # fmt: skip
"""Head shape of Kimi K2; the width of the residual stream is not that of the model."""
CALLS = ("all_gather_single", "reduce_scatter_single", "all_reduce", "all_to_all_single", "broadcast", "all_gather")


class Counter:
    """Adds up what this rank sends in every collective it calls, by replacing the calls with counting ones."""

    def __init__(self) -> None:
        self.sent = 0
        for name in CALLS:
            setattr(dist, name, self._counting(name, getattr(dist, name)))

    def _counting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*tensors: Any, **options: Any) -> Any:
            others = dist.get_world_size(options.get("group")) - 1
            if name == "all_gather_single":  # own part to every other rank
                self.sent += tensors[1].numel() * tensors[1].element_size() * others
            elif name == "reduce_scatter_single":  # every other rank's part
                self.sent += tensors[0].numel() * tensors[0].element_size() * others
            else:
                raise RuntimeError(f"{name} was called, which this measurement does not expect")
            return call(*tensors, **options)

        return counted


class ExpandedAttention(LatentAttention):
    """The usual way: each rank expands the keys and values of its own tokens, and those are gathered."""

    def forward(
        self, x_BTD: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None
    ) -> torch.Tensor:
        B, T, _ = x_BTD.shape
        latent, k_rope = self._latent(x_BTD, rope)
        k_nope, value = (
            self.kv_b_proj(latent).unflatten(-1, (self.num_heads, -1)).split((self.nope, self.value_dim), -1)
        )
        key = torch.cat((k_nope, k_rope[:, :, None].expand(-1, -1, self.num_heads, -1)), dim=-1)
        assert self.gather is not None
        both = self.gather(torch.cat((key.flatten(2), value.flatten(2)), dim=-1))()
        key, value = both.split((self.num_heads * (self.nope + self.rope), self.num_heads * self.value_dim), dim=-1)
        key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (key, value))
        query = torch.cat(self._query(x_BTD, rope), dim=-1).transpose(1, 2)
        out = self.attend(query, key, F.pad(value, (0, self.nope + self.rope - self.value_dim)), mask, self.scale)
        return self.o_proj(out[..., : self.value_dim].transpose(1, 2).reshape(B, T, -1))


def documents(length: int) -> torch.Tensor:
    """One row of documents of unequal length, int64 [1, length]."""
    ends = np.unique((np.array([0.07, 0.31, 0.38, 0.8, 1.0]) * length).astype(int))
    return torch.from_numpy(np.searchsorted(ends, np.arange(length), side="right"))[None]


def layer(kind: type[LatentAttention]) -> LatentAttention:
    """Equal weights for both ways."""
    made = kind(K2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * draw if parameter.ndim == 1 else draw * parameter.shape[-1] ** -0.5)
    return made


def measure(rank: int, cp: int, length: int) -> dict[str, float]:
    """Bytes of both ways on this rank, and how far their results are apart."""
    ids = documents(length)
    x = torch.randn(1, length, K2.hidden_size, generator=torch.Generator().manual_seed(1))
    places, order = chunk_places(length, cp, rank), gathered_places(length, cp)
    view = KeyView(query_index_T=places, key_index_M=order, visible_until_BM=visible_until(ids)[:, order])
    rope = rope_tables(places[None], K2, torch.float32)
    counter, results, sent = Counter(), [], []
    for kind in (LatentAttention, ExpandedAttention):
        attention, before = layer(kind), counter.sent
        attention.gather = GatherLatents(dist.group.WORLD)  # type: ignore[arg-type]
        here = x[:, places].clone().requires_grad_()
        out = attention(here, rope, view.mask())
        out.square().sum().backward()
        results.append((out.detach(), here.grad))
        sent.append(float(counter.sent - before))
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True)]
    return {"latent_bytes": sent[0], "expanded_bytes": sent[1], "error": max(errors)}


def run(cp: int, length: int) -> dict[str, float]:
    """The same on `cp` forked ranks: figures of rank 0. RuntimeError when a rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(cp):
            child = os.fork()
            if child == 0:
                os._exit(_rank_main(rank, cp, length, Path(folder)))
            ranks.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in ranks]
        if any(statuses):
            raise RuntimeError(f"ranks ended with {statuses}")
        parts = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(cp)]
    if len({part["latent_bytes"] for part in parts}) != 1:
        raise RuntimeError("ranks sent different amounts of latents")
    return {**parts[0], "error": max(part["error"] for part in parts)}


def _rank_main(rank: int, cp: int, length: int, folder: Path) -> int:
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=cp, timeout=timedelta(seconds=120)
        )
        (folder / f"{rank}.json").write_text(json.dumps(measure(rank, cp, length)))
        dist.destroy_process_group()
    except (RuntimeError, OSError, ValueError):
        traceback.print_exc()
        return 1
    return 0


def draw(figures: dict[str, float], degrees: tuple[int, ...], path: Path) -> None:
    """Bytes of both ways by number of ranks."""
    figure, axes = plt.subplots(figsize=(5, 4))
    for way in ("expanded", "latent"):
        axes.plot(degrees, [figures[f"{way}_bytes_cp{cp}"] / 1e6 for cp in degrees], "o-", label=way)
    axes.set_yscale("log")
    axes.set_xticks(degrees)
    axes.set_xlabel("context-parallel ranks")
    axes.set_ylabel("MB a rank sends, a layer, forward and backward")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="rows of 64 tokens instead of 512, 2 and 4 ranks only")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    length, degrees = (64, (2, 4)) if arguments.quick else (512, (2, 4, 8))
    figures: dict[str, float] = {"num_tokens": float(length)}
    with Console().stage("context parallel", total=len(degrees)) as stage:
        for done, cp in enumerate(degrees, start=1):
            measured = run(cp, length)
            figures |= {f"{name}_cp{cp}": value for name, value in measured.items()}
            figures[f"imbalance_packed_cp{cp}"] = imbalance(documents(length), cp)
            figures[f"imbalance_single_cp{cp}"] = imbalance(torch.zeros(1, length, dtype=torch.int64), cp)
            stage.update(done, **measured)
    ratios = [figures[f"latent_bytes_cp{cp}"] / figures[f"expanded_bytes_cp{cp}"] for cp in degrees]
    figures["latent_over_expanded"] = max(ratios)
    figures["max_rel_error"] = max(figures.pop(f"error_cp{cp}") for cp in degrees)
    (arguments.out / "bench_context_parallel.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    draw(figures, degrees, arguments.out / "bench_context_parallel.png")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
