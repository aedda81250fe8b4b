"""One run directory and what its stages share: files, metric lines, rollouts, the worker pool, the wish to stop.

In: a folder and a `RunConfig`. Out: `Run`, which `pipeline.py` drives through its stages.

Source: row X1, row X2, row X4.
Choice: what was written before an interruption is not written again; training is deterministic, so a resumed stage
would write the same lines.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

import torch

from composer2.config import differences, load_config, save_config
from composer2.env.tasks.expert import sft_example
from composer2.env.tasks.procedural import generate_task
from composer2.inspect_run import ROLLOUTS_FILE, read_rollouts, rollout_record
from composer2.log import Console, MetricsWriter, read_metrics
from composer2.model.pretrain.corpus import load_corpus
from composer2.model.pretrain.data import Example, TokenisedCorpus, tokenise_corpus
from composer2.model.tokenizer import Tokenizer
from composer2.recipes import RunConfig
from composer2.rl.system.weight_sync import FolderSink
from composer2.rl.system.worker import Pool, RolloutPool
from composer2.runner import RunnerSpec, make_runner, require_device, stable_seed
from composer2.start import check_start
from composer2.templates import Chat, open_template, read_chat
from composer2.types import Group, Task, Template

KEPT_ROLLOUTS = 24
"""Rollouts of an evaluation set, and of a training step that is kept, written to rollouts.jsonl."""

STOP_GRACE = 1.0
"""Seconds that workers of an interrupted run have to end by themselves."""


class Interrupted(BaseException):
    """The run was asked to stop; everything is saved, and the same command goes on.

    Like KeyboardInterrupt no `Exception`: a signal may raise it anywhere, and nobody's error handling may eat it."""


class Services(Protocol):
    """Where the decoupled parts of a run live (row A1): on this machine, or over Ray actors (`dist.ray`)."""

    def open_pool(self, role: str, spec: RunnerSpec, num_workers: int) -> Pool:
        """Sampling workers; `role` is `sampler` (training), `evaluation` or `mismatch`."""
        ...

    @property
    def is_evaluation_apart(self) -> bool:
        """Evaluation has workers of its own."""
        ...

    def open_shelf(self) -> MutableMapping[int, Group]:
        """Where finished groups wait for the trainer."""
        ...

    def figures(self) -> dict[str, Any]:
        """What there is to say about them, for metrics and summary; empty when nothing."""
        ...


class LocalServices:
    """Worker processes of this machine; evaluation takes turns with training on them."""

    is_evaluation_apart = False

    def open_pool(self, role: str, spec: RunnerSpec, num_workers: int) -> Pool:
        return RolloutPool(make_runner, spec, num_workers=num_workers, lockstep=spec.lockstep)

    def open_shelf(self) -> MutableMapping[int, Group]:
        return {}

    def figures(self) -> dict[str, Any]:
        return {}


class Run:
    """One run directory and what its stages share."""

    def __init__(self, folder: Path, config: RunConfig, console: Console, services: Services | None = None) -> None:
        self.folder, self.config, self.console = folder, config, console
        self.services: Services = LocalServices() if services is None else services
        self.stop_requested = False
        self.may_abort = False
        require_run_folder(folder)
        require_device("RunConfig.device", config.device)
        require_device("EngineConfig.device", config.engine.device)
        if config.start and not (folder / "stages" / "sft.json").exists():
            check_start(config)
        for name in ("stages", "checkpoints", "models"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(folder)
        stored = folder / "config.json"
        if stored.exists() and any(any((folder / name).iterdir()) for name in ("stages", "checkpoints", "models")):
            known = load_config(stored, RunConfig)
            others = differences(replace(known, rl=replace(known.rl, reward=config.rl.reward)), config)
            if others:
                self._lock.close()
                rest = f" and {len(others) - 3} more" if len(others) > 3 else ""
                raise ValueError(
                    f"{folder} holds a run with another configuration ({'; '.join(others[:3])}{rest}), accepted is the "
                    "same configuration to resume it (rl.reward may differ), or another --run-dir"
                )
            if known != config:
                self._change_reward(stored)
        else:
            save_config(stored, config)
        self.metrics = MetricsWriter(folder / "metrics.jsonl")
        self.forget_after({})
        self._pools: dict[str, Pool] = {}
        torch.set_num_threads(1)

    def _change_reward(self, stored: Path) -> None:
        """Steps of RL still to come are rewarded otherwise (row R4): the metrics of each step tell its weights. The
        configuration before is kept as config.until-1.json, -2, ..."""
        if self.result("rl") is not None:
            self._lock.close()
            raise ValueError(f"rl.reward differs from that of {stored}, accepted after RL is the same one")
        number = len(list(self.folder.glob("config.until-*.json"))) + 1
        os.replace(stored, self.folder / f"config.until-{number}.json")
        save_config(stored, self.config)
        self.console.note("rl.reward is another one from here on")

    # Files

    def result(self, stage: str) -> dict[str, Any] | None:
        """Result of a finished stage, or None."""
        path = self.folder / "stages" / f"{stage}.json"
        if not path.exists():
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); without it the stage runs again") from error

    def finish(self, stage: str, result: Mapping[str, Any]) -> None:
        """Mark a stage as finished, atomically."""
        write_json(self.folder / "stages" / f"{stage}.json", result)

    def model_dir(self, name: str) -> Path:
        """Where the weights of a finished stage lie."""
        return self.folder / "models" / name

    @staticmethod
    def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
        return (record["stage"], record["step"], "heldout_loss" in record, record.get("split"))

    @staticmethod
    def _rollout_key(record: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(record.get(name) for name in ("split", "step", "when", "task_id", "sample_index"))

    def log(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl, unless the run wrote it before it was interrupted."""
        key = self._key({"stage": stage, "step": step, **values})
        if key not in self._written:
            self._written.add(key)
            self.metrics.write(stage, step, **values)

    def is_logged(self, stage: str, step: int, **values: Any) -> bool:
        """Whether such a line of metrics.jsonl is written already."""
        return self._key({"stage": stage, "step": step, **values}) in self._written

    def forget_after(self, last: Mapping[str, int]) -> None:
        """Drop metric lines of these stages after these steps, kept rollouts of RL likewise, and torn last lines."""
        self.metrics.truncate_after(last)
        self._written = {self._key(record) for record in read_metrics(self.metrics.path)}
        path = self.folder / ROLLOUTS_FILE
        found = read_rollouts(self.folder)
        kept = [r for r in found if r["split"] != "train" or r["step"] <= last.get("rl", r["step"])]
        if path.exists():
            write_text(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._kept = {self._rollout_key(record) for record in kept}

    def keep_rollouts(self, groups: Sequence[Group], **extra: Any) -> None:
        """Append up to KEPT_ROLLOUTS rollouts, two of each group, for reading; those that are there are left out."""
        records = [rollout_record(group.task, rollout, **extra) for group in groups for rollout in group.rollouts[:2]]
        fresh = [record for record in records[:KEPT_ROLLOUTS] if self._rollout_key(record) not in self._kept]
        self._kept |= {self._rollout_key(record) for record in fresh}
        with (self.folder / ROLLOUTS_FILE).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in fresh)

    # Shared parts

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """That of the run's own pretraining."""
        return Tokenizer.load(self.folder / "tokenizer.json")

    @cached_property
    def chat(self) -> Chat | None:
        """How to talk to the published model that the run began with, if it did."""
        return read_chat(self.folder)

    @cached_property
    def template(self) -> Template:
        return open_template(self.folder / "tokenizer.json", self.chat)[0]

    @cached_property
    def corpus(self) -> TokenisedCorpus:
        with self.abortable():
            return tokenise_corpus(load_corpus(self.config.corpus), self.tokenizer)

    def task_at(self, index: int) -> Task:
        """The index-th training task of this run."""
        rng = random.Random(stable_seed(self.config.seed, "rl", index))
        return generate_task(rng, "train", self.config.tasks)

    def examples_at(self, step: int) -> list[Example]:
        """The fine-tuning examples of one step."""
        rng = random.Random(stable_seed(self.config.seed, "sft", step))
        found: list[Example] = []
        while len(found) < self.config.sft.batch_size:
            task = generate_task(rng, "train", self.config.tasks)
            windows = sft_example(
                task, self.template, rng, self.config.expert, locate_failures=self.config.episode.locate_failures
            )
            found += [(window.token_ids, window.weights) for window in windows]
        return found

    def should_stop(self) -> bool:
        return self.stop_requested

    def check_stop(self) -> None:
        if self.stop_requested:
            raise Interrupted

    @contextmanager
    def abortable(self) -> Iterator[None]:
        """Work that stores nothing until its end: a stop leaves it at once."""
        self.check_stop()
        self.may_abort = True
        try:
            yield
        finally:
            self.may_abort = False

    def spec(self, model: str, **engine: Any) -> RunnerSpec:
        """What a rollout worker needs."""
        return RunnerSpec(
            model_dir=self.model_dir(model),
            tokenizer_path=self.folder / "tokenizer.json",
            episode=self.config.episode,
            chat=self.chat,
            engine=replace(self.config.engine, **engine),
            pods=self.config.pods,
            lockstep=self.config.rl.max_staleness == 0,
        )

    @property
    def pool(self) -> Pool:
        """The workers of training, started when first needed."""
        return self._pool("sampler")

    @property
    def evaluation_pool(self) -> Pool:
        """The workers of evaluation, which may be those of training."""
        return self._pool("evaluation" if self.services.is_evaluation_apart else "sampler")

    def _pool(self, role: str) -> Pool:
        if role not in self._pools:
            self._pools[role] = self.services.open_pool(role, self.spec("sft"), self.config.rl.num_workers)
        return self._pools[role]

    @cached_property
    def sink(self) -> FolderSink:
        return FolderSink(self.folder / "weights")

    def close(self) -> None:
        """End the workers, at once when the run was asked to stop."""
        while self._pools:
            _, pool = self._pools.popitem()
            pool.close(grace=STOP_GRACE if self.stop_requested else 5.0)
        self.metrics.close()
        self._lock.close()


def require_run_folder(folder: Path) -> None:
    """ValueError when the folder's `config.json` is something else's, say a published model's: a run writes its own."""
    stored = folder / "config.json"
    if not stored.exists():
        return
    try:
        data = json.loads(stored.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{stored} is no JSON ({error}), accepted is the config of a run, or none") from error
    if not isinstance(data, dict) or "preset" not in data:
        raise ValueError(f"{stored} is not the config of a run, accepted is a new --run-dir or that of a run")


def lock_folder(folder: Path) -> IO[str]:
    """A file that this process holds until it closes it or ends, however that is; ValueError when another one does.

    Choice: two processes in one run directory would drop each other's lines and checkpoints."""
    file = (folder / "lock").open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ValueError(f"{folder} is in use by another process, accepted is one at a time") from error
    return file


def write_json(path: Path, value: Any) -> None:
    """Indented JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=1, default=float))


def write_text(path: Path, text: str) -> None:
    """Write beside the final name, then rename."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


@contextmanager
def stop_on_interrupt(run: Run) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) asks for a stop at the next step, the second one ends at once.

    Outside of the main thread, which alone hears signals, whoever started the thread sets `stop_requested`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if run.stop_requested:
            raise KeyboardInterrupt
        run.stop_requested = True
        if run.may_abort:
            raise Interrupted

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        # A stopped run is about to leave: one more Ctrl-C must not tear the clean-up at exit.
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if run.stop_requested else handler)
