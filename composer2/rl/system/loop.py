"""The training loop around the rollout pool: fills it with groups, trains the steps that are ready, publishes versions.

In: a model, a pool of rollout workers, a source of tasks by index. Out: a trained model, step by step, and everything a
restart needs (`LoopState`).

Source: report §4.1 and §6.2; rows A2 A3 R1 R7.
The same loop is synchronous (`max_staleness = 0`) and asynchronous; what may start is the reconciler's decision alone.

Choice: a restart keeps weights, optimizer and the reconciler's line; groups that were finished but not yet trained run
again, since their data is not stored. A stop stores the line as it was after the last whole step, so that attempts get
the same numbers again, and synchronous training goes on bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from composer2.model.transformer import Transformer
from composer2.rl.advantage import group_samples
from composer2.rl.metrics import group_metrics, rollout_metrics, staleness_histogram, staleness_metrics
from composer2.rl.system.reconciler import Reconciler, ReconcilerConfig, Start
from composer2.rl.system.weight_sync import FolderSink
from composer2.rl.system.worker import GroupRequest, Pool
from composer2.rl.train import Credit, RLConfig, score_groups, train_step
from composer2.types import Group, RolloutStatus, Task

MAX_DUPLICATES = 1000


class TaskSourceError(RuntimeError):
    """The source of tasks repeats itself: no fresh prompt was found."""


@dataclass(kw_only=True)
class LoopState:
    """What a restart needs beside weights and optimizer; plain JSON data."""

    reconciler: Mapping[str, Any] | None = None
    next_task: int = 0
    """Index of the next task to draw from the source."""
    live_tasks: dict[str, int] = field(default_factory=dict)
    """task_id -> index, for tasks that wait or run."""


@dataclass(frozen=True, kw_only=True)
class LoopHooks:
    """What the caller does at each step; all are called in the trainer's thread."""

    on_step: Callable[[int, dict[str, Any], Sequence[Group]], None]
    """(steps done, metrics, scored groups)."""
    checkpoint: Callable[[int, LoopState], None]
    """(steps done, state): save model and optimizer with it."""
    evaluate: Callable[[int], None]
    """(steps done), every `eval_every` steps; again at the start of a loop that was stopped or killed around it."""
    should_stop: Callable[[], bool]


class RLLoop:
    """One RL run over one pool."""

    def __init__(
        self,
        model: Transformer,
        optimizer: torch.optim.Optimizer,
        config: RLConfig,
        *,
        pool: Pool,
        sink: FolderSink,
        task_at: Callable[[int], Task],
        seed: int,
        state: LoopState | None = None,
        reference: Transformer | None = None,
        credit: Credit = group_samples,
        shelf: MutableMapping[int, Group] | None = None,
    ) -> None:
        """`shelf`: where finished groups wait, by position, until they are trained; None: this process's memory."""
        self.model, self.optimizer, self.config = model, optimizer, config
        self.pool, self.sink, self.task_at, self.seed, self.reference = pool, sink, task_at, seed, reference
        self.credit = credit
        state = state or LoopState()
        shape = ReconcilerConfig(
            prompts_per_step=config.prompts_per_step,
            group_size=config.group_size,
            num_slots=config.prompts_per_step * config.group_size * (config.max_staleness + 1),
            max_staleness=config.max_staleness,
            min_valid=min(2, config.group_size),
            num_steps=config.num_steps,
        )
        if state.reconciler is None:
            self.reconciler = Reconciler(shape)
        else:
            self.reconciler = Reconciler.restore(state.reconciler, shape, kept_positions=())
        self._next_task = state.next_task
        self._index_of = dict(state.live_tasks)
        self._tasks = {task_id: task_at(index) for task_id, index in self._index_of.items()}
        self._starts: dict[int, Start] = {}
        self._ready: MutableMapping[int, Group] = {} if shelf is None else shelf
        self._settled = self.state()
        """After the last whole step."""

    def state(self) -> LoopState:
        """Everything a restart needs, as of now."""
        return LoopState(
            reconciler=self.reconciler.snapshot(), next_task=self._next_task, live_tasks=dict(self._index_of)
        )

    def publish(self) -> None:
        """Send the current weights to the samplers."""
        version = self.reconciler.version
        self.pool.publish(version, self.sink.publish(version, self.model.state_dict()))

    def run(self, hooks: LoopHooks) -> bool:
        """Train until the last step (True) or until asked to stop (False). A stop leaves the last whole step."""
        self.publish()
        self._evaluate(self.reconciler.version, hooks)
        step_started = time.perf_counter()
        while not self.reconciler.is_finished:
            if hooks.should_stop():
                hooks.checkpoint(self.reconciler.version, self._settled)
                return False
            self._fill()
            plan = self.reconciler.begin_step()
            if plan is None:
                for key, group in self.pool.poll(0.2):
                    self._accept(key, group)
                continue
            groups = score_groups(
                [self._ready.pop(position) for position in plan.positions], self.config, plan.step, self.seed
            )
            train_started = time.perf_counter()
            metrics: dict[str, Any] = dict(
                train_step(
                    self.model,
                    self.optimizer,
                    groups,
                    self.config,
                    step=plan.step,
                    reference=self.reference,
                    credit=self.credit,
                )
            )
            done = self.reconciler.end_step()
            for task_id in plan.task_ids:
                self._index_of.pop(task_id), self._tasks.pop(task_id)
            self._settled = self.state()
            self.publish()
            now = time.perf_counter()
            metrics |= step_metrics(groups, self.config, plan.step)
            metrics |= {"trained_twice": self.reconciler.trained_twice}
            # Totals of the run: an attempt that was lost as a whole is in no group, and so in no rate of a step.
            lost = ("num_failed_samples", "num_failed_attempts", "num_replaced_tasks")
            metrics |= {name.removeprefix("num_"): getattr(self.reconciler.counters, name) for name in lost}
            metrics |= {"time/step_s": now - step_started, "time/train_s": now - train_started}
            step_started = now
            hooks.on_step(done, metrics, groups)
            if done % self.config.checkpoint_every == 0 or self.reconciler.is_finished:
                hooks.checkpoint(done, self._settled)
            self._evaluate(done, hooks)
        return True

    def _evaluate(self, done: int, hooks: LoopHooks) -> None:
        if self.config.eval_every and done and done % self.config.eval_every == 0 and not self.reconciler.is_finished:
            hooks.evaluate(done)

    def _fill(self) -> None:
        requests = []
        while True:
            if self.reconciler.needs_task:
                self._offer()
            start = self.reconciler.next_start()
            if start is None:
                break
            self._starts[start.attempt] = start
            requests.append(
                GroupRequest(
                    key=start.attempt,
                    task=self._tasks[start.task_id],
                    num_samples=self.config.group_size,
                    # A retry draws anew, a restart repeats.
                    seed=self.seed * 1_000_003 + start.position * 101 + start.num_failures,
                    temperature=self.config.temperature,
                    policy_version=start.policy_version,
                )
            )
        if requests:
            self.pool.submit(requests)

    def _offer(self) -> None:
        for _ in range(MAX_DUPLICATES):
            index, self._next_task = self._next_task, self._next_task + 1
            task = self.task_at(index)
            if self.reconciler.offer(task.task_id):
                self._tasks[task.task_id], self._index_of[task.task_id] = task, index
                return
        raise TaskSourceError(
            f"{MAX_DUPLICATES} tasks in a row were drawn before (the last is {task.task_id}); a prompt is never "
            "trained twice, so the run needs a larger source of tasks"
        )

    def _accept(self, key: int, group: Group) -> None:
        start = self._starts.pop(key, None)
        if start is None:
            return  # an evaluation group, or an attempt that was given up
        for index, rollout in enumerate(group.rollouts):
            if rollout.status is RolloutStatus.INFRASTRUCTURE:
                self.reconciler.sample_failed(start.position, start.attempt, index)
            else:
                self.reconciler.rollout_ended(start.position, start.attempt, index)
                self.reconciler.verified(start.position, start.attempt, index)
        state = self.reconciler.state_of(start.position)
        if state is None:  # the task was given up
            self._index_of.pop(start.task_id), self._tasks.pop(start.task_id)
        elif state.value == "ready":
            self._ready[start.position] = group


def step_metrics(groups: Sequence[Group], config: RLConfig, version: int) -> dict[str, Any]:
    """What the rollouts of a step looked like; names as the report reads them."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    measured = rollout_metrics(rollouts)
    shares = group_metrics(groups, config.advantage, version)
    histogram = staleness_histogram(rollouts, version)
    events: dict[str, int] = {}
    for rollout in rollouts:
        for name, count in rollout.events.items():
            events[name] = events.get(name, 0) + count
    return {
        **{name: value for name, value in measured.items() if not name.startswith("event/")},
        **{f"reward_weight/{c.name}": c.weight_at(version) for c in config.reward.components},
        **staleness_metrics(histogram),
        "staleness_hist": {str(age): count for age, count in histogram.items()},
        "best_of_k": shares["best_of_group"],
        "degenerate_frac": shares["degenerate_group_frac"],
        "zero_advantage_frac": shares["zero_advantage_frac"],
        "withheld_frac": shares["withheld_frac"],
        "response_tokens": measured.get("sampled_tokens", 0.0),
        "turns": measured.get("num_turns", 0.0),
        "summaries": sum(r.stats.num_summaries for r in rollouts if r.status is not RolloutStatus.INFRASTRUCTURE),
        "events": events,
    }
