"""A run over Ray: the command stays here and shows what happens; all services of the run are actors.

    this process ── runs stages, stop, output ──► trainer ── requests, weights ──► samplers, evaluation ──► environments
                                                      ◄── groups, through the object store ──┘

The stages are those of one machine (`pipeline.run_stages`); only the `Services` of the run differ.

Source: report §6.2; row A1.
Choice: the run directory is on a file system that all nodes share; weights travel through it as on one machine.
Choice: what the trainer prints travels to this process as text, so that a run on another node looks the same here.
"""

from __future__ import annotations

import io
import signal
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from composer2.dist.ray.cluster import Cluster, RayConfig, here, in_bundle, node_number, ray, store_figures
from composer2.dist.ray.environments import EnvironmentActor, make_remote_runner
from composer2.dist.ray.pool import ObjectShelf, RayPool, SamplerActor
from composer2.log import Console, Mode
from composer2.pipeline import run_stages
from composer2.recipes import RunConfig
from composer2.rl.system.worker import Pool, WorkerError
from composer2.run import Run
from composer2.runner import RunnerSpec
from composer2.types import Group

CLOSE_SECONDS = 10.0
POLL_SECONDS = 0.3


class RayServices:
    """The `Services` of a run whose workers are actors; used inside the trainer actor."""

    is_evaluation_apart = True

    def __init__(self, group: Any, environments: list[Any]) -> None:
        """`environments[i]` serves the episodes of worker i, in bundle i + 1 of the placement group."""
        self._group, self._environments = group, environments
        self._shelf = ObjectShelf()
        self._pools: dict[str, RayPool] = {}
        self._placements = {"trainer": self._place(here(), 0)}
        for index, environment in enumerate(environments):
            self._placements[f"environment-{index}"] = self._place(ray.get(environment.where.remote()), index + 1)

    @staticmethod
    def _place(node_id: str, bundle: int) -> str:
        return f"node {node_number(node_id)} bundle {bundle}"

    def open_pool(self, role: str, spec: RunnerSpec, num_workers: int) -> Pool:
        """Actors of one role; `sampler` has CPUs of its own, the others take turns with it."""
        starts: dict[int, int] = {}
        owners: dict[int, str] = {}
        spread = len(self._environments)

        def start(index: int) -> Any:
            # A worker that replaces another one owns other pods, so that those of the lost one can be told apart.
            starts[index] = starts.get(index, 0) + 1
            owners[index] = f"{role}-{index}-{starts[index]}"
            options = in_bundle(self._group, 1 + index % spread)
            options["num_cpus"] = 1 if role == "sampler" else 0
            payload = (spec, self._environments[index % spread], owners[index])
            return ray.remote(SamplerActor).options(**options).remote(make_remote_runner, payload, spec.lockstep)

        def on_loss(index: int) -> None:
            self._environments[index % spread].release.remote(owners[index])

        pool = RayPool(start, num_workers=num_workers, on_loss=on_loss)
        self._pools[role] = pool
        for index, node in enumerate(pool.nodes()):
            self._placements[f"{role}-{index}"] = self._place(node, 1 + index % spread)
        return pool

    def open_shelf(self) -> MutableMapping[int, Group]:
        return self._shelf

    def figures(self) -> dict[str, Any]:
        """Rollouts that waited in the object store, its bytes made and spilled, lost workers, and who runs where."""
        return {
            "ray_samples": self._shelf.num_samples,
            **store_figures(),
            "ray_restarts": sum(pool.num_restarts for pool in self._pools.values()),
            "ray_placements": dict(self._placements),
        }


class _Mailbox(io.StringIO):
    """A text stream whose text another thread takes away."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[str] = []
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            self._parts.append(text)
        return len(text)

    def take(self) -> str:
        with self._lock:
            text, self._parts = "".join(self._parts), []
        return text


class TrainerActor:
    """The trainer and its stages; `run` has one thread, `output` and `stop` another."""

    def __init__(self, folder: Path, config: RunConfig, mode: Mode, group: Any, environments: list[Any]) -> None:
        self._arguments = (folder, config, mode, group, environments)
        self._out, self._errors = _Mailbox(), _Mailbox()
        self._run: Run | None = None
        self._stop_requested = False

    def run(self, last: str) -> bool:
        """All stages up to `last`; False when it was asked to stop."""
        folder, config, mode, group, environments = self._arguments
        with Console(mode, stream=self._out, error_stream=self._errors) as console:
            self._run = Run(folder, config, console, RayServices(group, environments))
            self._run.stop_requested = self._stop_requested
            return run_stages(self._run, last=last)

    def output(self) -> tuple[str, str]:
        """Text for standard output and standard error since the last call."""
        return self._out.take(), self._errors.take()

    def stop(self) -> None:
        """Stop at the next step; what is done is saved."""
        self._stop_requested = True
        if self._run is not None:
            self._run.stop_requested = True


def run_on_ray(folder: Path, config: RunConfig, *, last: str, console: Console, ray_config: RayConfig) -> bool:
    """`run_stages` with every service an actor. False when it was interrupted; the same command goes on.

    What ends a run raises here as it does on one machine. ClusterError when the services cannot be placed."""
    if config.engine.device != "cpu":
        raise ValueError(f"engine.device is {config.engine.device!r}, accepted over Ray is 'cpu'")
    num_samplers, gpus = config.rl.num_workers, int(config.device == "cuda")
    with Cluster(ray_config, num_samplers=num_samplers, trainer_gpus=gpus) as cluster:
        environments: list[Any] = [
            ray.remote(EnvironmentActor)
            .options(num_cpus=1, max_restarts=-1, **in_bundle(cluster.group, index + 1))
            .remote(config.pods)
            for index in range(num_samplers)
        ]
        trainer = (
            ray.remote(TrainerActor)
            .options(num_cpus=1, num_gpus=gpus, max_concurrency=3, **in_bundle(cluster.group, 0))
            .remote(folder.resolve(), config, console.mode, cluster.group, environments)
        )
        try:
            with raised_as_there():
                for reason in set(ray.get([environment.open.remote() for environment in environments])):
                    console.note(f"pods: {reason}")
                return _watch(trainer, last)
        finally:
            closed = [environment.close.remote() for environment in environments]
            ray.wait(closed, num_returns=len(closed), timeout=CLOSE_SECONDS)


def _watch(trainer: Any, last: str) -> bool:
    """Show what the trainer says until its stages are done; the first Ctrl-C asks it to stop."""
    with _stop_on_interrupt(lambda: trainer.stop.remote()):
        result = trainer.run.remote(last)
        while True:
            done, _ = ray.wait([result], timeout=POLL_SECONDS)
            for text, stream in zip(ray.get(trainer.output.remote()), (sys.stdout, sys.stderr), strict=True):
                stream.write(text)
                stream.flush()
            if done:
                return bool(ray.get(result))


@contextmanager
def _stop_on_interrupt(stop: Callable[[], Any]) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) calls `stop`, the second one ends at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        stop()

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def raised_as_there() -> Iterator[None]:
    """An error of an actor's own code raises here as itself, the loss of an actor as WorkerError."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayActorError as error:
        raise WorkerError(f"a service of the run is gone:\n{error}") from error
