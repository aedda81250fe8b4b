"""The life cycle of samples and groups, as a pure state machine: no clock, no input or output, no random draw.

In: events (a task is offered, a rollout ended, a verdict came, a step ended). Out: what may start, and which groups a
step trains.

Source: report §6.2 (central reconciler, slot-based sample life cycle, throughput against staleness); rows A2 R1.

    sample:  free slot -> rollout -> verifying -> complete | failed
    group:   pending -> running -> ready -> training -> done,   running -> pending (again) on failure

Groups stand in a line of positions 0, 1, 2 ... Step s trains exactly positions s*P .. s*P+P-1 (P prompts a step), so
slow groups are waited for, never overtaken: the batch does not drift towards short rollouts. A position may start when
its step is at most `max_staleness` ahead of the trainer's version; 0 gives the synchronous run by the same code.

A group whose attempt fails (fewer than `min_valid` valid samples, or an error of the machinery) starts again with the
same task up to `max_retries` times; then its position takes the next queued task, and the old one is given up.
Single epoch: a task id is accepted once in a run, and a group enters training once; both are counted.

A restart restores a snapshot: done stays done, ready groups stay ready (the caller keeps their data), everything in
flight is pending again, everything in training is ready again. Every event names its attempt, so that what comes late
from a failed one is ignored; samplers do not outlive the process, so nothing comes from before a restart.

Choice: a sample slot is held from start to verdict and a group starts only when all its samples have one, which keeps
the samples of a prompt together (prefix reuse).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from composer2.types import Admission

SNAPSHOT_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ReconcilerConfig:
    """Shape of a step and patience with failures."""

    prompts_per_step: int = 16
    """P: groups trained in one step."""
    group_size: int = 8
    """G: samples of one prompt."""
    num_slots: int = 256
    """Samples that may be in flight (sampling or verifying) at once."""
    max_staleness: int = 1
    """Steps that a group may start ahead of the trainer; 0 is synchronous."""
    max_retries: int = 2
    """Further attempts of a failed group with the same task."""
    min_valid: int = 2
    """Fewer samples that are no infrastructure failure fail the attempt: one alone has no baseline."""
    num_steps: int | None = None
    """Positions of later steps never start; None: no end."""

    def __post_init__(self) -> None:
        smallest = {"prompts_per_step": 1, "group_size": 1, "min_valid": 1, "max_staleness": 0, "max_retries": 0}
        for name, least in smallest.items():
            if getattr(self, name) < least:
                raise ValueError(f"ReconcilerConfig.{name} is {getattr(self, name)}, accepted is >= {least}")
        if self.num_slots < self.group_size:
            raise ValueError(
                f"ReconcilerConfig.num_slots is {self.num_slots}, accepted is >= group_size ({self.group_size})"
            )
        if self.min_valid > self.group_size:
            raise ValueError(
                f"ReconcilerConfig.min_valid is {self.min_valid}, accepted is <= group_size ({self.group_size})"
            )
        if self.num_steps is not None and self.num_steps < 0:
            raise ValueError(f"ReconcilerConfig.num_steps is {self.num_steps}, accepted is None or >= 0")


@dataclass(frozen=True, kw_only=True)
class BoundedStaleness:
    """`types.Admission`: group number n belongs to step n // P, which may be at most `max_staleness` ahead."""

    prompts_per_step: int
    max_staleness: int

    def may_start(self, *, groups_started: int, policy_version: int) -> bool:
        """`groups_started`: groups before this one in the line, that is its position."""
        return groups_started // self.prompts_per_step - policy_version <= self.max_staleness


class SampleState(StrEnum):
    """Where one sample of the current attempt stands."""

    ROLLOUT = "rollout"
    VERIFYING = "verifying"
    COMPLETE = "complete"
    FAILED = "failed"


class GroupState(StrEnum):
    """Where a position of the line stands. Positions of past steps are done and forgotten."""

    PENDING = "pending"
    RUNNING = "running"
    READY = "ready"
    TRAINING = "training"


IN_FLIGHT = (SampleState.ROLLOUT, SampleState.VERIFYING)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Order to run all samples of a group."""

    position: int
    """Place in the line; the group belongs to step position // P."""
    task_id: str
    attempt: int
    """Names this attempt in events."""
    num_failures: int
    """Earlier failed attempts of this task. Seeds may depend on it: a retry draws anew, a restart repeats."""
    policy_version: int
    """Trainer version at the start."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The groups of one training step, in order of position."""

    step: int
    positions: tuple[int, ...]
    task_ids: tuple[str, ...]


@dataclass(kw_only=True)
class _Entry:
    """A live position."""

    task_id: str
    state: GroupState = GroupState.PENDING
    attempt: int = -1
    num_failures: int = 0
    samples: list[SampleState] = field(default_factory=list)


@dataclass(kw_only=True)
class Counters:
    """Totals of the run, kept in snapshots."""

    num_refused: int = 0
    """Offers of a task id that was offered before."""
    num_late_events: int = 0
    """Events of attempts that are over."""
    num_failed_attempts: int = 0
    num_replaced_tasks: int = 0
    """Tasks given up after all their retries."""
    num_failed_samples: int = 0


class Reconciler:
    """Decides what starts and what trains. One owner calls it; methods return at once."""

    def __init__(self, config: ReconcilerConfig, admission: Admission | None = None) -> None:
        self.config = config
        self.admission: Admission = admission or BoundedStaleness(
            prompts_per_step=config.prompts_per_step, max_staleness=config.max_staleness
        )
        self.version = 0
        """Finished training steps, which is the policy version."""
        self.counters = Counters()
        self.trained: list[str] = []
        """Task ids of all groups trained so far, in order."""
        self._queue: deque[str] = deque()
        self._offered: set[str] = set()
        self._entries: dict[int, _Entry] = {}
        self._next_attempt = 0

    def offer(self, task_id: str) -> bool:
        """Queue a task; False (and counted) when this id was offered before in the run."""
        if task_id in self._offered:
            self.counters.num_refused += 1
            return False
        self._offered.add(task_id)
        self._queue.append(task_id)
        return True

    @property
    def needs_task(self) -> bool:
        """True when the next position could start, but for a task."""
        position = self._startable()
        return position is not None and position not in self._entries and not self._queue

    def next_start(self) -> Start | None:
        """Start the lowest startable position, all its samples at once; None when nothing may start now."""
        position = self._startable()
        if position is None or self.needs_task:
            return None
        if position not in self._entries:
            self._entries[position] = _Entry(task_id=self._queue.popleft())
        entry = self._entries[position]
        entry.state = GroupState.RUNNING
        entry.attempt = self._next_attempt
        self._next_attempt += 1
        entry.samples = [SampleState.ROLLOUT] * self.config.group_size
        return Start(
            position=position,
            task_id=entry.task_id,
            attempt=entry.attempt,
            num_failures=entry.num_failures,
            policy_version=self.version,
        )

    def rollout_ended(self, position: int, attempt: int, sample: int) -> bool:
        """A sample stopped sampling and waits for its verdict. False when the attempt is over."""
        return self._move(position, attempt, sample, (SampleState.ROLLOUT,), SampleState.VERIFYING)

    def verified(self, position: int, attempt: int, sample: int) -> bool:
        """A sample has its verdict and reward. False when the attempt is over."""
        return self._move(position, attempt, sample, (SampleState.VERIFYING,), SampleState.COMPLETE)

    def sample_failed(self, position: int, attempt: int, sample: int) -> bool:
        """A sample was lost to the machinery, or given up as hanging. False when the attempt is over."""
        moved = self._move(position, attempt, sample, IN_FLIGHT, SampleState.FAILED)
        self.counters.num_failed_samples += moved
        return moved

    def group_failed(self, position: int, attempt: int) -> bool:
        """The whole attempt is lost. False when it is over already."""
        entry = self._current(position, attempt)
        if entry is None:
            return False
        self._fail(position, entry)
        return True

    def begin_step(self) -> StepPlan | None:
        """Take the groups of the next step; None until all of them are ready (or the run is over)."""
        if self.is_finished:
            return None
        positions = self._step_positions()
        entries = [self._entries.get(position) for position in positions]
        if not all(entry is not None and entry.state is GroupState.READY for entry in entries):
            return None
        for position in positions:
            self._entries[position].state = GroupState.TRAINING
        return StepPlan(
            step=self.version,
            positions=tuple(positions),
            task_ids=tuple(self._entries[position].task_id for position in positions),
        )

    def end_step(self) -> int:
        """The step was applied to the weights: its groups are done. Returns the new version."""
        for position in self._training_positions():
            self.trained.append(self._entries.pop(position).task_id)
        self.version += 1
        return self.version

    def abort_step(self) -> None:
        """The step was not applied: its groups are ready again."""
        for position in self._training_positions():
            self._entries[position].state = GroupState.READY

    @property
    def is_finished(self) -> bool:
        """True when all steps of the run are done."""
        return self.config.num_steps is not None and self.version >= self.config.num_steps

    @property
    def num_in_flight(self) -> int:
        """Occupied sample slots."""
        return sum(state in IN_FLIGHT for entry in self._entries.values() for state in entry.samples)

    @property
    def trained_twice(self) -> int:
        """Trainings of a task id beyond its first; the invariant is 0."""
        return len(self.trained) - len(set(self.trained))

    def state_of(self, position: int) -> GroupState | None:
        """State of a live position; None when it is done or was never given a task."""
        entry = self._entries.get(position)
        return None if entry is None else entry.state

    def groups_by_state(self) -> dict[str, int]:
        """How many live groups are in each state, for the log."""
        return {state.value: sum(e.state is state for e in self._entries.values()) for state in GroupState}

    def snapshot(self) -> dict[str, Any]:
        """Everything a restart needs, as plain JSON data. Store it together with the weights of the same version."""
        return {
            "format": SNAPSHOT_FORMAT,
            "shape": [self.config.prompts_per_step, self.config.group_size],
            "version": self.version,
            "next_attempt": self._next_attempt,
            "queue": list(self._queue),
            "offered": sorted(self._offered),
            "trained": list(self.trained),
            "counters": dict(vars(self.counters)),
            "groups": [
                {
                    "position": position,
                    "task_id": entry.task_id,
                    "state": entry.state.value,
                    "num_failures": entry.num_failures,
                }
                for position, entry in sorted(self._entries.items())
            ],
        }

    @classmethod
    def restore(
        cls,
        snapshot: Mapping[str, Any],
        config: ReconcilerConfig,
        *,
        admission: Admission | None = None,
        kept_positions: Collection[int] | None = None,
    ) -> Reconciler:
        """Continue from a snapshot. `kept_positions`: ready groups whose data the caller still has (None: all); others
        run again. Groups that were in training are ready again, for the weights are those before the step."""
        if snapshot.get("format") != SNAPSHOT_FORMAT:
            raise ValueError(f"snapshot format is {snapshot.get('format')!r}, accepted is {SNAPSHOT_FORMAT}")
        if list(snapshot["shape"]) != (shape := [config.prompts_per_step, config.group_size]):
            raise ValueError(f"[prompts_per_step, group_size] is {shape}, accepted on restart is {snapshot['shape']}")
        self = cls(config, admission)
        self.version = int(snapshot["version"])
        self._next_attempt = int(snapshot["next_attempt"])
        self._queue = deque(snapshot["queue"])
        self._offered = set(snapshot["offered"])
        self.trained = list(snapshot["trained"])
        self.counters = Counters(**snapshot["counters"])
        for group in snapshot["groups"]:
            position = int(group["position"])
            had_data = group["state"] in (GroupState.READY, GroupState.TRAINING)
            keeps_data = had_data and (kept_positions is None or position in kept_positions)
            self._entries[position] = _Entry(
                task_id=group["task_id"],
                state=GroupState.READY if keeps_data else GroupState.PENDING,
                num_failures=int(group["num_failures"]),
            )
        return self

    def _step_positions(self) -> range:
        first = self.version * self.config.prompts_per_step
        return range(first, first + self.config.prompts_per_step)

    def _training_positions(self) -> Iterable[int]:
        positions = list(self._step_positions())
        for position in positions:
            if self.state_of(position) is not GroupState.TRAINING:
                raise ValueError(f"position {position} is {self.state_of(position)}, accepted is a step that has begun")
        return positions

    def _startable(self) -> int | None:
        """Lowest position that is not started, if it is admitted and its samples find free slots."""
        position = self._step_positions().start
        while self.state_of(position) not in (None, GroupState.PENDING):
            position += 1
        limit = self.config.num_steps
        is_last = limit is not None and position >= limit * self.config.prompts_per_step
        is_full = self.num_in_flight + self.config.group_size > self.config.num_slots
        if is_last or is_full or not self.admission.may_start(groups_started=position, policy_version=self.version):
            return None
        return position

    def _current(self, position: int, attempt: int) -> _Entry | None:
        entry = self._entries.get(position)
        if entry is None or entry.state is not GroupState.RUNNING or entry.attempt != attempt:
            self.counters.num_late_events += 1
            return None
        return entry

    def _move(
        self, position: int, attempt: int, sample: int, before: tuple[SampleState, ...], after: SampleState
    ) -> bool:
        if not 0 <= sample < self.config.group_size:
            raise ValueError(f"sample is {sample}, accepted is 0..{self.config.group_size - 1}")
        entry = self._current(position, attempt)
        if entry is None:
            return False
        if entry.samples[sample] not in before:
            self.counters.num_late_events += 1
            return False
        entry.samples[sample] = after
        if not any(state in IN_FLIGHT for state in entry.samples):
            num_valid = sum(state is SampleState.COMPLETE for state in entry.samples)
            if num_valid >= self.config.min_valid:
                entry.state = GroupState.READY
            else:
                self._fail(position, entry)
        return True

    def _fail(self, position: int, entry: _Entry) -> None:
        self.counters.num_failed_attempts += 1
        entry.num_failures += 1
        entry.state, entry.samples = GroupState.PENDING, []
        if entry.num_failures > self.config.max_retries:
            del self._entries[position]
            self.counters.num_replaced_tasks += 1
