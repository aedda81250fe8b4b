"""Episodes on a policy: joins the inference engine and the environments; in go group requests, out come groups.

This is what a rollout worker process runs, and what evaluation, `solve` and training share, so that all of them use the
same harness (row E6: train/test match).

Source: report §6.2; rows A1 E6 I1.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch

from composer2.env.grade import PodGrader
from composer2.env.harness import EpisodeLimits, run_episode
from composer2.env.pod import open_backend
from composer2.model.checkpoint.huggingface import load_huggingface
from composer2.model.checkpoint.native import load_model
from composer2.model.checkpoint.published import is_published
from composer2.model.engine.engine import Engine
from composer2.model.engine.service import AsyncSampler
from composer2.model.transformer import Transformer
from composer2.rl.system.weight_sync import read_weights
from composer2.rl.system.worker import GroupRequest
from composer2.templates import Chat, open_template
from composer2.types import Group, PodBackend, Rollout, SamplingParams, Template

DEVICES = ("cpu", "cuda")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class PodsConfig:
    """Where untrusted code runs."""

    backend: str = "auto"
    """auto, local or process; `auto` takes local namespaces and says so, or fails with the reason."""
    allow_unsafe: bool = False
    """Accept pods without isolation (`--unsafe-process-pods`)."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Size and precision of the sampler."""

    num_slots: int = 160
    """Context windows held at once."""
    max_len: int = 384
    """Tokens of one window."""
    dtype: str = "float32"
    """float32, bfloat16 or float64."""
    device: str = "cpu"
    """Where the sampler runs: cpu or cuda."""
    cache_on_update: Literal["keep", "recompute"] = "keep"
    """`keep` or `recompute` the KV cache when new weights arrive in the middle of a rollout (row A3)."""
    page_size: int | None = None
    """Tokens of one page of the cache; None: a page is a window (row I2)."""
    num_pages: int | None = None
    """Pages in all; None: enough for every window at once. With fewer, requests wait and the newest may start over."""
    speculative: bool = False
    """Decode with drafts of the model's first MTP module: same distribution, other draws (row I5)."""
    num_concurrent_groups: int = 16
    """Groups running at once in one worker."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"EngineConfig.dtype is {self.dtype!r}, accepted is one of {sorted(DTYPES)}")
        if self.device not in DEVICES:
            raise ValueError(f"EngineConfig.device is {self.device!r}, accepted is one of {', '.join(DEVICES)}")
        if self.cache_on_update not in ("keep", "recompute"):
            raise ValueError(
                f"EngineConfig.cache_on_update is {self.cache_on_update!r}, accepted is 'keep' or 'recompute'"
            )
        for name in ("num_slots", "max_len", "num_concurrent_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"EngineConfig.{name} is {getattr(self, name)}, accepted is 1 or more")
        page_size = self.max_len if self.page_size is None else self.page_size
        if not 1 <= page_size <= self.max_len:
            raise ValueError(f"EngineConfig.page_size is {page_size}, accepted is 1 .. max_len {self.max_len}")
        window = -(-self.max_len // page_size)
        if self.num_pages is not None and self.num_pages < window:
            raise ValueError(
                f"EngineConfig.num_pages is {self.num_pages}, accepted is at least one window of {window} pages"
            )

    def open(self, model: Transformer) -> Engine:
        """An engine of this size for the model. ValueError for windows or drafts the model does not have."""
        return Engine(
            model,
            num_slots=self.num_slots,
            max_len=self.max_len,
            dtype=DTYPES[self.dtype],
            page_size=self.page_size,
            num_pages=self.num_pages,
            speculative=self.speculative,
        )


@dataclass(frozen=True, kw_only=True)
class RunnerSpec:
    """Everything a worker process needs; picklable."""

    model_dir: Path
    """A model folder of a run, or a Hugging Face directory."""
    tokenizer_path: Path
    episode: EpisodeLimits
    chat: Chat | None = None
    """How to talk to a published model; None: the template of the tiny presets."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    pods: PodsConfig = field(default_factory=PodsConfig)
    lockstep: bool = False


def require_device(field: str, device: str) -> None:
    """ValueError when `device` (cpu, cuda or cuda:N) is not on this machine; nothing falls back to another one."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"{field} is {device!r}, accepted is cpu, cuda or cuda:N")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"{field} is {device!r}, accepted on this machine is 'cpu': torch finds no CUDA device "
            "(device is the trainer's, engine.device the sampler's)"
        )


def open_model(directory: Path, device: str) -> Transformer:
    """The policy of a run's model folder or of a Hugging Face directory, in the dtype it is stored in."""
    require_device("device", device)
    return (load_huggingface if is_published(directory) else load_model)(directory, device=device)


def stable_seed(*parts: int | str) -> int:
    """A 62-bit integer that depends on nothing but its arguments (Python's own hash changes between processes)."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


class EpisodeRunner:
    """A `GroupRunner`: one engine, one pod backend, many concurrent episodes."""

    def __init__(self, spec: RunnerSpec) -> None:
        torch.set_num_threads(1)
        self.spec = spec
        self.engine = spec.engine.open(open_model(spec.model_dir, spec.engine.device))
        self.sampler = AsyncSampler(self.engine, lockstep=spec.lockstep)
        self.template: Template = open_template(spec.tokenizer_path, spec.chat)[0]
        self.backend: PodBackend | None = None
        self.grader: PodGrader | None = None
        self._slots = asyncio.Semaphore(spec.engine.num_concurrent_groups)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EpisodeRunner]:
        """Pods and the engine's driver, for as long as the block runs."""
        self.backend = self.open_pods()
        self.grader = PodGrader(self.backend, timeout=self.spec.episode.run_timeout)
        try:
            async with self.sampler:
                yield self
        finally:
            await self.backend.close()

    def open_pods(self) -> PodBackend:
        """Where episodes run: on this machine. PodError when it cannot make pods."""
        return open_backend(self.spec.pods.backend, allow_unsafe=self.spec.pods.allow_unsafe)[0]

    def load_weights(self, version: int, path: Path) -> None:
        """Switch the policy between two decode steps."""
        self.engine.load_weights(read_weights(path), version, cache=self.spec.engine.cache_on_update)

    def stats(self) -> dict[str, float]:
        """Engine and grader counters."""
        return {f"engine_{name}": float(value) for name, value in asdict(self.engine.stats).items()}

    async def run_cohort(self, requests: Sequence[GroupRequest], done: Callable[[int, Group], None]) -> None:
        """All groups of one request list. In lockstep every episode joins before the first token is drawn."""
        if self.spec.lockstep:
            episodes = [self._group_tasks(request) for request in requests]
            try:
                for request, tasks in zip(requests, episodes, strict=True):
                    done(request.key, self._group(request, await asyncio.gather(*tasks)))
            finally:  # a cohort that is stopped leaves no episode behind
                unfinished = [task for tasks in episodes for task in tasks]
                for task in unfinished:
                    task.cancel()
                await asyncio.gather(*unfinished, return_exceptions=True)
            return

        async def one(request: GroupRequest) -> None:
            async with self._slots:
                done(request.key, self._group(request, await asyncio.gather(*self._group_tasks(request))))

        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(one(request))

    def _group_tasks(self, request: GroupRequest) -> list[asyncio.Task[Rollout]]:
        return [asyncio.create_task(self._episode(request, index)) for index in range(request.num_samples)]

    @staticmethod
    def _group(request: GroupRequest, rollouts: Sequence[Rollout]) -> Group:
        return Group(task=request.task, rollouts=tuple(rollouts), policy_version_start=request.policy_version)

    async def _episode(self, request: GroupRequest, index: int) -> Rollout:
        assert self.backend is not None, "run inside `async with runner.session()`"
        assert self.grader is not None
        async with self.sampler.episode():
            return await run_episode(
                request.task,
                sampler=self.sampler,
                backend=self.backend,
                grader=self.grader,
                template=self.template,
                limits=self.spec.episode,
                sampling=SamplingParams(temperature=request.temperature),
                session=f"{request.key}.{index}",
                group=str(request.key),
                seed=stable_seed(request.seed, index),
                sample_index=index,
            )


def make_runner(spec: RunnerSpec) -> EpisodeRunner:
    """The `setup` function of a rollout pool (top-level, so that a spawned process can import it)."""
    return EpisodeRunner(spec)
