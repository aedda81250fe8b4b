"""Where the rows of a step come from: folders of samples for RL, a corpus for continued pretraining.

    DIR/step-000007.npz    the samples of optimizer step 7 (from 0) and the constant its loss is divided by

In RL the file of a step is written when its rollouts are there; ranks that come early wait. Every rank reads it, makes
the same plan (rl/balance.py: equal micro-batch counts, balanced attention) and takes its own part.
Source: report §6.1 (global packing before each step); rows R12 D4 P1; fault 49.
Choice: a file a step, renamed into place when it is whole, is all that trainer and samplers share: no queue to lose.
Choice: the whole state of a loader is the step it reads next, so that a run resumes on any number of ranks.
"""

from __future__ import annotations

import os
import tempfile
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX

from composer2.model.config import ModelConfig
from composer2.model.pretrain.corpus import CorpusConfig, load_corpus
from composer2.model.pretrain.data import PackedBatches, tokenise_corpus
from composer2.model.tokenizer import Tokenizer
from composer2.rl.balance import plan_ranks, rank_batches
from composer2.rl.pack import BatchTensors, to_tensors
from composer2.types import Sample

FIELDS = ("token_ids", "loss_mask", "advantages", "behaviour_logprobs", "policy_versions", "routes")


def step_path(folder: Path | str, step: int) -> Path:
    """The file of optimizer step `step`, counted from 0."""
    return Path(folder) / f"step-{step:06d}.npz"


def save_step(folder: Path | str, step: int, samples: Sequence[Sample], denominator: float) -> None:
    """Write the samples of a step, whole or not at all. ValueError without samples or with several temperatures."""
    temperatures = {sample.temperature for sample in samples}
    if len(temperatures) != 1:
        raise ValueError(f"Sample.temperature takes the values {sorted(temperatures)}, accepted is one per step")
    path = step_path(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.concatenate([getattr(sample, name) for sample in samples]) for name in FIELDS}
    lengths = np.array([len(sample.token_ids) for sample in samples])
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".step-", delete=False) as file:
        scalars = {"denominator": np.array(denominator), "temperature": np.array(temperatures.pop())}
        np.savez(file, lengths=lengths, **scalars, **arrays)  # type: ignore[arg-type]
    os.replace(file.name, path)


def load_step(folder: Path | str, step: int) -> tuple[list[Sample], float]:
    """What `save_step` wrote."""
    with np.load(step_path(folder, step)) as stored:
        ends = stored["lengths"].cumsum()
        parts = {name: np.split(stored[name], ends[:-1]) for name in FIELDS}
        temperature, denominator = float(stored["temperature"]), float(stored["denominator"])
    samples = []
    for index in range(len(ends)):
        fields: dict[str, Any] = {name: parts[name][index] for name in FIELDS}
        samples.append(Sample(temperature=temperature, **fields))
    return samples, denominator


class StepLoader(BaseDataLoader):
    """Micro-batches of whole rows for this data rank; every step begins with `start_step`."""

    def __init__(self, dp_world_size: int, dp_rank: int) -> None:
        self.world, self.rank, self.step = dp_world_size, dp_rank, 0
        self._ready: list[dict[str, Any]] = []

    @abstractmethod
    def read(self, step: int) -> list[dict[str, Any]] | None:
        """This rank's micro-batches of a step, or None when there is no such step."""

    def start_step(self) -> int:
        """Read the next step; its number of micro-batches, the same on every rank. 0 at the end of the data."""
        assert not self._ready, "the last step was not used up"
        self._ready = list(reversed(self.read(self.step) or []))
        self.step += bool(self._ready)
        return len(self._ready)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        while self._ready:
            fields = self._ready.pop()
            labels = torch.where(fields["loss_mask"], fields["input"], IGNORE_INDEX)
            yield fields, labels

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = int(state_dict["step"])


def fields_of(batch: BatchTensors, denominator: float | None) -> dict[str, Any]:
    """A batch as torchtitan carries it: the tokens as "input", everything else beside it."""
    fields = dict(vars(batch))
    return {"input": fields.pop("token_ids"), "denominator": denominator, **fields}


def batch_of(fields: dict[str, Any]) -> BatchTensors:
    """The inverse of `fields_of`, but for the denominator."""
    rest = {name: value for name, value in fields.items() if name not in ("input", "denominator")}
    return BatchTensors(token_ids=fields["input"], **rest)


class SampleLoader(StepLoader):
    """RL: the samples of each step, balanced over the data ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        wait_seconds: float = 0.0
        """How long to wait for the file of a step; then the data has ended."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, **kwargs: Any) -> None:
        super().__init__(dp_world_size, dp_rank)
        if config.dataset_path is None:
            raise ValueError("dataloader.dataset_path is None, accepted is the folder of the steps' samples")
        self.folder, self.max_tokens, self.wait_seconds = config.dataset_path, seq_len, config.wait_seconds

    def read(self, step: int) -> list[dict[str, Any]] | None:
        deadline = time.monotonic() + self.wait_seconds
        while not step_path(self.folder, step).exists():
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.2)
        samples, denominator = load_step(self.folder, step)
        plan = plan_ranks([len(s.token_ids) for s in samples], num_ranks=self.world, max_tokens=self.max_tokens)
        batches = rank_batches(samples, plan, self.rank)
        return [fields_of(to_tensors(batch), denominator) for batch in batches]


class CorpusLoader(StepLoader):
    """Continued pretraining: packed rows of a corpus, an order that seed and step fix."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        corpus: CorpusConfig = field(default_factory=CorpusConfig)
        """Sources and their weights."""
        sizes: ModelConfig = field(default_factory=ModelConfig)
        """The model, for the shape of its routes."""
        rows_per_step: int = 8
        """Rows of a step over all ranks, a multiple of the data ranks."""
        seed: int = 0
        """Order of the rows."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(dp_world_size, dp_rank)
        if config.dataset_path is None:
            raise ValueError("dataloader.dataset_path is None, accepted is a file with a tokenizer")
        corpus = tokenise_corpus(load_corpus(config.corpus), Tokenizer.load(config.dataset_path))
        self.rows_at_once, self.sizes = local_batch_size, config.sizes
        self.batches = PackedBatches(
            corpus, seq_len=seq_len, num_rows=config.rows_per_step, seed=config.seed, rank=dp_rank, world=dp_world_size
        )

    def read(self, step: int) -> list[dict[str, Any]] | None:
        rows = self.batches(step)
        integers = {
            name: torch.from_numpy(getattr(rows, name).astype(np.int64))
            for name in ("token_ids", "position_ids", "document_ids")
        }
        weights_BT = torch.from_numpy(rows.weights)
        routes_shape = (*weights_BT.shape, self.sizes.num_moe_layers, self.sizes.num_experts_per_tok)
        whole = {
            **integers,
            "loss_mask": weights_BT > 0,
            "advantages": weights_BT,
            "behaviour_logprobs": torch.zeros_like(weights_BT),
            "policy_versions": torch.full(weights_BT.shape, -1),
            "routes": torch.full((1,), -1).expand(routes_shape),
        }
        cuts = range(0, rows.num_rows, self.rows_at_once)
        parts: list[dict[str, Any]] = [
            {name: value[cut : cut + self.rows_at_once] for name, value in whole.items()} for cut in cuts
        ]
        return [fields_of(BatchTensors(**part), None) for part in parts]
