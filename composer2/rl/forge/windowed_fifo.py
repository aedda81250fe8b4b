"""Windowed FIFO: finished rollouts may overtake slow ones, but only so far.

In: rollouts in the order they were started, and news of which are finished. Out: which one is trained next.

    queue    T_0 T_1 ... in order of start; the head i is the oldest that is neither taken nor given up
    window   T_i ... T_{i+W-1}: inside it any finished rollout may be taken, the oldest first; beyond it none

W = 1 is FIFO, where everyone waits for the slowest; W as long as the queue is greedy, where short rollouts are trained
first and the mix drifts from what was drawn. The window moves only when its head goes.

Source: MiniMax-M2 report (windowed FIFO); row A4; fault 80.
Choice: a head that never ends still stalls the queue once its window is used up. The queue says so (`is_stalled`), and
its owner, who has the clock, may `give_up` the head: the window then moves on, and the rollout counts as lost.
`simulate` shows the trade: time the trainer waits against how much shorter than the average the rollouts are that it
has trained so far.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

import numpy as np

Item = TypeVar("Item", bound=Hashable)


class _State(Enum):
    RUNNING = "running"
    FINISHED = "finished"
    GONE = "gone"


class WindowedFifo(Generic[Item]):
    """The queue. Items are ids; each may be put in once."""

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"window is {window}, accepted is >= 1")
        self.window = window
        self._queue: deque[Item] = deque()
        self._state: dict[Item, _State] = {}

    def __len__(self) -> int:
        """Items that are neither taken nor given up."""
        return sum(self._state[item] is not _State.GONE for item in self._queue)

    def put(self, item: Item) -> None:
        """A rollout was started."""
        if item in self._state:
            raise ValueError(f"item {item!r} was put in before, accepted is each once")
        self._state[item] = _State.RUNNING
        self._queue.append(item)

    def finish(self, item: Item) -> None:
        """A rollout ended; news of one that was given up is ignored."""
        if item not in self._state:
            raise ValueError(f"item {item!r} was never put in, accepted is one that was")
        if self._state[item] is _State.RUNNING:
            self._state[item] = _State.FINISHED

    def take(self) -> Item | None:
        """The oldest finished rollout of the window, or None when there is none."""
        for item in self._in_window():
            if self._state[item] is _State.FINISHED:
                self._remove(item)
                return item
        return None

    def give_up(self, item: Item) -> None:
        """A rollout will never be taken; the window no longer waits for it."""
        if self._state.get(item) not in (_State.RUNNING, _State.FINISHED):
            raise ValueError(f"item {item!r} is not in the queue, accepted is one that is")
        self._remove(item)

    @property
    def head(self) -> Item | None:
        """The oldest item, which the window waits for; None when the queue is empty."""
        return self._queue[0] if self._queue else None

    @property
    def is_stalled(self) -> bool:
        """True when only the head, still running, is left in a window that others wait behind."""
        inside = [item for item in self._in_window() if self._state[item] is not _State.GONE]
        return len(inside) == 1 and self._state[inside[0]] is _State.RUNNING and len(self._queue) > self.window

    def _in_window(self) -> list[Item]:
        return [self._queue[index] for index in range(min(self.window, len(self._queue)))]

    def _remove(self, item: Item) -> None:
        self._state[item] = _State.GONE
        while self._queue and self._state[self._queue[0]] is _State.GONE:
            self._queue.popleft()


# ---------------------------------------------------------------------------------------------------------------------
# What a window costs and saves


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What happened in a simulated run."""

    order: tuple[int, ...]
    """Indices of rollouts in the order they were trained."""
    idle_frac: float
    """Share of the time that the trainer waited."""
    max_lead: int
    """Most places by which a rollout was trained before its turn."""
    shift: float
    """Mean over the run of 1 - (mean duration of those trained so far) / (mean of all): 0 is an unbiased mix."""


def simulate(durations: Sequence[float], *, window: int, num_running: int, train_seconds: float) -> Schedule:
    """Rollouts start in order, `num_running` at a time; the trainer takes one at a time and needs `train_seconds`.

    A running place is free again when its rollout ends, so samplers never wait. Ties go to the lower index."""
    queue: WindowedFifo[int] = WindowedFifo(window)
    pending = deque(range(len(durations)))
    running: list[tuple[float, int]] = []
    now = busy = 0.0
    order: list[int] = []

    def start(moment: float) -> None:
        if pending:
            index = pending.popleft()
            queue.put(index)
            heapq.heappush(running, (moment + float(durations[index]), index))

    def advance(moment: float) -> None:
        while running and running[0][0] <= moment:
            ended, index = heapq.heappop(running)
            queue.finish(index)
            start(ended)

    for _ in range(num_running):
        start(0.0)
    while len(order) < len(durations):
        advance(now)
        taken = queue.take()
        if taken is None:
            now = running[0][0]
            continue
        order.append(taken)
        now, busy = now + train_seconds, busy + train_seconds
    trained = np.array([durations[index] for index in order], dtype=np.float64)
    so_far = np.cumsum(trained) / np.arange(1, len(trained) + 1)
    return Schedule(
        order=tuple(order),
        idle_frac=1.0 - busy / now,
        max_lead=max((index - place for place, index in enumerate(order)), default=0),
        shift=float((trained.mean() - so_far).mean() / trained.mean()),
    )
