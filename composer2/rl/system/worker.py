"""Rollout workers: processes that own an inference engine and run episodes; tasks go in, groups of rollouts come out.

The trainer's side is `RolloutPool`; the worker's side is `worker_main`, which drives any `GroupRunner` (recipes join
the engine and the environments into one, since `rl` does not import `env`).

Source: report §4.1 and §6.2 (decoupled services, in-flight weight updates); rows A1 A3 A7.
Choice: one pipe a worker carries everything, so weights and requests keep the order in which they were sent. With
`lockstep` a worker runs the requests of one `submit` as a cohort, one cohort after the other: what is in the decode
batch then depends on the requests alone, which makes synchronous training reproducible bit for bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing as mp
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from composer2.types import Group, Task


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """Run `num_samples` episodes of one task."""

    key: int
    """Identifies the group to the trainer; also fixes the worker it goes to."""
    task: Task
    num_samples: int
    seed: int
    temperature: float = 1.0
    policy_version: int = 0
    """Trainer version when the request was made."""


class GroupRunner(Protocol):
    """What a worker process runs; built inside the process by the `setup` function of the pool."""

    def session(self) -> AbstractAsyncContextManager[Any]:
        """Everything the runner needs while it runs (engine driver, pods)."""
        ...

    async def run_cohort(self, requests: Sequence[GroupRequest], done: Callable[[int, Group], None]) -> None:
        """Run the groups of one submit concurrently and call `done(key, group)` as each one ends."""
        ...

    def load_weights(self, version: int, path: Path) -> None:
        """Switch to another policy version, in the middle of generations."""
        ...

    def stats(self) -> dict[str, float]:
        """Counters since the start, for the metrics."""
        ...


class Outbox(Protocol):
    """Takes what a worker has to say, without waiting."""

    def put(self, message: tuple[Any, ...], /) -> None: ...


class Pool(Protocol):
    """Workers, seen from the trainer: processes of this machine (`RolloutPool`) or actors (`dist.ray.pool.RayPool`)."""

    num_restarts: int
    """Workers that were replaced."""

    def publish(self, version: int, path: Path) -> None:
        """Tell every worker to load a version; takes effect between two decode steps."""
        ...

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Send groups; group `key` goes to worker `key mod num_workers`."""
        ...

    def poll(self, timeout: float) -> list[tuple[int, Group]]:
        """Groups that ended, waiting at most `timeout` seconds for the first. WorkerError when a worker failed."""
        ...

    def collect(
        self, keys: Iterable[int], *, should_stop: Callable[[], bool], timeout: float = 0.5
    ) -> dict[int, Group]:
        """Wait for all `keys`; returns early with what there is when `should_stop` says so. Other groups that end
        meanwhile are kept for the next `poll`."""
        ...

    def close(self, *, grace: float = 5.0) -> None:
        """End all workers, by force those that take longer than `grace` seconds."""
        ...


class WorkerError(RuntimeError):
    """A worker failed with a bug or died more often than allowed; the text holds its traceback or exit code."""


# ---------------------------------------------------------------------------------------------------------------------
# Inside the worker process


def _send_all(connection: Connection, outbox: queue.SimpleQueue[tuple[Any, ...] | None]) -> None:
    try:
        while (message := outbox.get()) is not None:
            connection.send(message)
    except OSError:
        return  # the trainer is gone; the reader sees the end of the pipe and stops


async def _serve(connection: Connection, runner: GroupRunner, lockstep: bool) -> None:
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
    stopped = asyncio.Event()

    def receive() -> None:
        try:
            while connection.poll():
                message = connection.recv()
                inbox.put_nowait(message)
                if message[0] == "stop":
                    stopped.set()
        except (EOFError, OSError):
            loop.remove_reader(connection.fileno())
            inbox.put_nowait(("stop",))
            stopped.set()

    loop.add_reader(connection.fileno(), receive)
    outbox: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
    # Sending from a thread keeps this loop reading: two sides that both block in send would wait for ever.
    sender = threading.Thread(target=_send_all, args=(connection, outbox), daemon=True)
    sender.start()
    try:
        await take_messages(inbox, stopped, runner, outbox, lockstep)
    finally:
        outbox.put(None)
        sender.join(2.0)


async def take_messages(
    inbox: asyncio.Queue[tuple[Any, ...]],
    stopped: asyncio.Event,
    runner: GroupRunner,
    outbox: Outbox,
    lockstep: bool,
) -> None:
    """The body of a worker, whatever carries its messages: ("weights", version, path), ("cohort", requests), ("stop",)
    come in; ("ready",) and ("group", key, group, stats) go out. Returns at "stop", raises what the runner raises."""
    running: set[asyncio.Task[None]] = set()

    def done(key: int, group: Group) -> None:
        outbox.put(("group", key, group, runner.stats()))

    async with runner.session():
        outbox.put(("ready",))
        while True:
            message = asyncio.ensure_future(inbox.get())
            await asyncio.wait({message, *running}, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in running if task.done()]:
                running.discard(task)
                task.result()
            if not message.done():
                message.cancel()
                continue
            kind, *body = message.result()
            if kind == "stop":
                break
            if kind == "weights":
                runner.load_weights(*body)
            elif lockstep:
                await _run_unless(stopped, runner.run_cohort(body[0], done))
            else:
                running.add(asyncio.create_task(runner.run_cohort(body[0], done)))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _run_unless(stopped: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, or cancel it as soon as `stopped` is set."""
    task, stop = asyncio.ensure_future(work), asyncio.ensure_future(stopped.wait())
    await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def worker_main(connection: Connection, setup: Callable[[Any], GroupRunner], payload: Any, lockstep: bool) -> None:
    """Entry point of a worker process. Ctrl-C is the trainer's business; end of the pipe ends the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        asyncio.run(_serve(connection, setup(payload), lockstep))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the trainer is gone
    except BaseException:  # noqa: BLE001 - the trainer raises it again as WorkerError
        try:
            connection.send(("error", traceback.format_exc()))
        except OSError:
            return
        raise SystemExit(1) from None


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until the block ends, and processes started in it begin with Ctrl-C held."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---------------------------------------------------------------------------------------------------------------------
# On the trainer's side


@dataclass
class _Worker:
    process: mp.process.BaseProcess
    connection: Connection
    pending: dict[int, GroupRequest] = field(default_factory=dict)
    ready: bool = False
    restarts: int = 0
    stats: dict[str, float] = field(default_factory=dict)


class RolloutPool:
    """Worker processes, requests out, groups back.

    A worker that dies is replaced and its open requests are sent again (row A7), at most `max_restarts` times each.
    """

    def __init__(
        self,
        setup: Callable[[Any], GroupRunner],
        payload: Any,
        *,
        num_workers: int = 1,
        lockstep: bool = False,
        max_restarts: int = 2,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}, accepted is 1 or more")
        self._context = mp.get_context("spawn")
        self._setup, self._payload, self._lockstep = setup, payload, lockstep
        self._max_restarts = max_restarts
        self._weights: tuple[int, Path] | None = None
        self.num_restarts = 0
        self._held: list[tuple[int, Group]] = []
        self._workers = [self._start() for _ in range(num_workers)]

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=worker_main, args=(theirs, self._setup, self._payload, self._lockstep), daemon=True
        )
        with _interrupts_held():
            process.start()
        theirs.close()
        return _Worker(process=process, connection=ours)

    @property
    def num_pending(self) -> int:
        """Requests not answered yet."""
        return sum(len(worker.pending) for worker in self._workers)

    def publish(self, version: int, path: Path) -> None:
        """Tell every worker to load a version; takes effect between two decode steps."""
        self._weights = (version, path)
        for worker in self._workers:
            self._send(worker, ("weights", version, path))

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Send groups; group `key` goes to worker `key mod num_workers`."""
        for index, worker in enumerate(self._workers):
            mine = [request for request in requests if request.key % len(self._workers) == index]
            if mine:
                worker.pending |= {request.key: request for request in mine}
                self._send(worker, ("cohort", mine))

    def poll(self, timeout: float) -> list[tuple[int, Group]]:
        """Groups that ended, waiting at most `timeout` seconds for the first."""
        by_connection = {worker.connection: worker for worker in self._workers}
        finished, self._held = self._held, []
        for connection in wait(list(by_connection), 0.0 if finished else timeout):
            worker = by_connection[connection]  # type: ignore[index]
            try:
                while worker.connection.poll():
                    finished += self._handle(worker, worker.connection.recv())
            except (EOFError, OSError):
                self._replace(worker)
        return finished

    def collect(
        self, keys: Iterable[int], *, should_stop: Callable[[], bool], timeout: float = 0.5
    ) -> dict[int, Group]:
        """Wait for all `keys`; returns early with what there is when `should_stop` says so. Other groups that end
        meanwhile are kept for the next `poll`."""
        wanted, got = set(keys), dict[int, Group]()
        others: list[tuple[int, Group]] = []
        while wanted - got.keys() and not should_stop():
            for key, group in self.poll(timeout):
                if key in wanted:
                    got[key] = group
                else:
                    others.append((key, group))
        self._held += others
        return got

    def stats(self) -> dict[str, float]:
        """Sum of the workers' counters."""
        total: dict[str, float] = {}
        for worker in self._workers:
            for name, value in worker.stats.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def close(self, *, grace: float = 5.0) -> None:
        """End all workers, by force those that take longer than `grace` seconds."""
        for worker in self._workers:
            self._send(worker, ("stop",))
        deadline = time.monotonic() + grace
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.connection.close()
        self._workers = []

    def __enter__(self) -> RolloutPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, worker: _Worker, message: tuple[Any, ...]) -> None:
        try:
            worker.connection.send(message)
        except OSError:
            return  # the worker is gone: poll() notices, replaces it and sends again what was open

    def _handle(self, worker: _Worker, message: tuple[Any, ...]) -> list[tuple[int, Group]]:
        kind, *body = message
        if kind == "error":
            raise WorkerError(f"a rollout worker failed:\n{body[0]}")
        if kind == "ready":
            worker.ready = True
            return []
        key, group, worker.stats = body
        worker.pending.pop(key, None)
        return [(key, group)]

    def _replace(self, worker: _Worker) -> None:
        worker.process.join(5.0)
        if worker.restarts >= self._max_restarts:
            raise WorkerError(
                f"a rollout worker died {worker.restarts + 1} times, the last time with exit code "
                f"{worker.process.exitcode}; {len(worker.pending)} groups were open"
            )
        fresh = self._start()
        fresh.restarts, fresh.pending = worker.restarts + 1, worker.pending
        self._workers[self._workers.index(worker)] = fresh
        self.num_restarts += 1
        if self._weights is not None:
            self._send(fresh, ("weights", *self._weights))
        if fresh.pending:
            self._send(fresh, ("cohort", list(fresh.pending.values())))
