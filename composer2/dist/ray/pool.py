"""Rollout workers as Ray actors: requests go in, groups come back, as with processes of one machine.

An actor runs `take_messages`, the body that a worker process runs, too. Each `submit` is one streaming call: a group
leaves the actor when it ends, through the object store, owned by the trainer.

    message n of a worker is taken after message n - 1, whatever order the transport delivers them in

Source: report §4.1, §6.2; rows A1 A3 A7.
Choice: requests that a dead actor owes are sent again to a fresh one, at most `max_restarts` times a worker, as the
local pool does. Ray's own restarts are not used: a restarted actor would not know its weights.
Choice: finished groups wait for their step in the object store (`ObjectShelf`), which spills to disk when it is full,
so that samplers that run ahead cost the trainer no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer2.dist.ray.cluster import here, ray
from composer2.rl.system.worker import GroupRequest, GroupRunner, WorkerError, take_messages
from composer2.types import Group

# ---------------------------------------------------------------------------------------------------------------------
# Inside the actor


class SamplerActor:
    """One worker: an inference engine and the episodes that use it. Made into an actor where it is placed."""

    def __init__(self, setup: Callable[[Any], GroupRunner], payload: Any, lockstep: bool) -> None:
        self._runner = setup(payload)
        self._lockstep = lockstep
        self._inbox: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self._stopped = asyncio.Event()
        self._early: dict[int, tuple[Any, ...]] = {}
        self._next = 0
        self._answers: dict[int, asyncio.Future[tuple[int, Group, dict[str, float]]]] = {}
        self._body: asyncio.Task[None] | None = None

    def where(self) -> str:
        """The node."""
        return here()

    async def tell(self, number: int, message: tuple[Any, ...]) -> None:
        """Take a message that has no answer, e.g. ("weights", version, path)."""
        self._deliver(number, message)

    async def run(
        self, number: int, requests: Sequence[GroupRequest]
    ) -> AsyncIterator[tuple[int, Group, dict[str, float]]]:
        """(key, group, counters) of each request as it ends."""
        loop = asyncio.get_running_loop()
        answers = {request.key: loop.create_future() for request in requests}
        self._answers |= answers
        self._deliver(number, ("cohort", requests))
        for answer in asyncio.as_completed(list(answers.values())):
            yield await answer

    async def stop(self) -> None:
        """End the session; returns when its pods are gone."""
        self._stopped.set()
        self._inbox.put_nowait(("stop",))
        if self._body is not None:
            await asyncio.wait({self._body})

    def _deliver(self, number: int, message: tuple[Any, ...]) -> None:
        if self._body is None:
            self._body = asyncio.ensure_future(
                take_messages(self._inbox, self._stopped, self._runner, self, self._lockstep)
            )
            self._body.add_done_callback(self._ended)
        self._early[number] = message
        while self._next in self._early:
            self._inbox.put_nowait(self._early.pop(self._next))
            self._next += 1
        if self._body.done():
            self._ended(self._body)

    def put(self, message: tuple[Any, ...], /) -> None:
        """What the body has to say (it is the body's outbox)."""
        if message[0] == "group":
            _, key, group, counters = message
            answer = self._answers.pop(key, None)
            if answer is not None and not answer.done():  # done: its stream was given up
                answer.set_result((key, group, counters))

    def _ended(self, body: asyncio.Task[None]) -> None:
        error = None if body.cancelled() else body.exception()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error or RuntimeError("the worker was stopped"))
        self._answers.clear()


# ---------------------------------------------------------------------------------------------------------------------
# On the trainer's side


@dataclass
class _Worker:
    actor: Any
    index: int
    sent: int = 0
    pending: dict[int, GroupRequest] = field(default_factory=dict)
    streams: list[Any] = field(default_factory=list)
    restarts: int = 0
    counters: dict[str, float] = field(default_factory=dict)


class RayPool:
    """A `Pool` of actors; `start(index)` makes the handle of a `SamplerActor`, again after a loss."""

    def __init__(
        self,
        start: Callable[[int], Any],
        *,
        num_workers: int = 1,
        max_restarts: int = 2,
        on_loss: Callable[[int], None] = lambda index: None,
    ) -> None:
        """`on_loss(index)` is called when worker `index` died, before it is replaced."""
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}, accepted is 1 or more")
        self._start, self._on_loss, self._max_restarts = start, on_loss, max_restarts
        self._weights: tuple[int, Path] | None = None
        self._held: list[tuple[int, Group]] = []
        self.num_restarts = 0
        self._workers = [_Worker(start(index), index) for index in range(num_workers)]

    @property
    def num_pending(self) -> int:
        """Requests not answered yet."""
        return sum(len(worker.pending) for worker in self._workers)

    def nodes(self) -> list[str]:
        """Where the workers are, waiting until all of them have started. WorkerError when one does not start."""
        try:
            return ray.get([worker.actor.where.remote() for worker in self._workers])
        except ray.exceptions.RayActorError as error:
            raise WorkerError(f"a rollout worker does not start:\n{error}") from error

    def publish(self, version: int, path: Path) -> None:
        """Tell every worker to load a version from a folder that its node can read."""
        self._weights = (version, path)
        for worker in self._workers:
            self._tell(worker, ("weights", version, path))

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Send groups; group `key` goes to worker `key mod num_workers`."""
        for worker in self._workers:
            mine = [request for request in requests if request.key % len(self._workers) == worker.index]
            if mine:
                worker.pending |= {request.key: request for request in mine}
                self._run(worker, mine)

    def poll(self, timeout: float) -> list[tuple[int, Group]]:
        """Groups that ended, waiting at most `timeout` seconds for the first. WorkerError when a worker failed."""
        finished, self._held = self._held, []
        wait = 0.0 if finished else timeout
        while True:
            owners = {stream: worker for worker in self._workers for stream in worker.streams}
            if not owners:
                time.sleep(wait)
                return finished
            ready, _ = ray.wait(list(owners), num_returns=1, timeout=wait)
            if not ready:
                return finished
            finished += self._take(owners[ready[0]], ready[0])
            wait = 0.0 if finished else wait

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
            for name, value in worker.counters.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def close(self, *, grace: float = 5.0) -> None:
        """End all workers, by force those that take longer than `grace` seconds."""
        stops = [worker.actor.stop.remote() for worker in self._workers]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=grace)
        for worker in self._workers:
            ray.kill(worker.actor)
        self._workers = []

    def _tell(self, worker: _Worker, message: tuple[Any, ...]) -> None:
        worker.actor.tell.remote(worker.sent, message)
        worker.sent += 1

    def _run(self, worker: _Worker, requests: Sequence[GroupRequest]) -> None:
        worker.streams.append(worker.actor.run.options(num_returns="streaming").remote(worker.sent, requests))
        worker.sent += 1

    def _take(self, worker: _Worker, stream: Any) -> list[tuple[int, Group]]:
        """The next group of a stream that has one; none at its end, or when the worker is gone."""
        try:
            key, group, worker.counters = ray.get(next(stream))
        except StopIteration:
            worker.streams.remove(stream)
            return []
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            self._replace(worker, error)
            return []
        except ray.exceptions.RayTaskError as error:
            raise WorkerError(f"a rollout worker failed:\n{error}") from error
        worker.pending.pop(key, None)
        return [(key, group)]

    def _replace(self, worker: _Worker, error: Exception) -> None:
        if worker.restarts >= self._max_restarts:
            raise WorkerError(
                f"a rollout worker died {worker.restarts + 1} times, the last time with: {error}; "
                f"{len(worker.pending)} groups were open"
            ) from error
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(worker.actor)  # one that only could not be reached must not answer, too
        self._on_loss(worker.index)
        fresh = _Worker(self._start(worker.index), worker.index, restarts=worker.restarts + 1, pending=worker.pending)
        self._workers[worker.index] = fresh
        self.num_restarts += 1
        if self._weights is not None:
            self._tell(fresh, ("weights", *self._weights))
        if fresh.pending:
            self._run(fresh, list(fresh.pending.values()))


class ObjectShelf(MutableMapping[int, Group]):
    """Finished groups by position, in the object store; what is full there lies on disk."""

    def __init__(self) -> None:
        self._refs: dict[int, Any] = {}
        self.num_samples = 0
        """Rollouts that were put here, ever."""

    def __setitem__(self, position: int, group: Group) -> None:
        self._refs[position] = ray.put(group)
        self.num_samples += len(group.rollouts)

    def __getitem__(self, position: int) -> Group:
        """WorkerError when the node that held the group is gone."""
        try:
            group: Group = ray.get(self._refs[position])
        except ray.exceptions.ObjectLostError as error:
            raise WorkerError(f"the group at position {position} was lost with its node: {error}") from error
        return group

    def __delitem__(self, position: int) -> None:
        del self._refs[position]

    def __iter__(self) -> Iterator[int]:
        return iter(self._refs)

    def __len__(self) -> int:
        return len(self._refs)
