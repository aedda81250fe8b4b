"""Which prompts come when: late in training, tasks that took more turns and more thinking are drawn more often.

In: tasks, and rollouts of a few of them that are never trained (probes). Out: the order in which tasks are drawn, each
at most once.

    weight of family f at progress x  =  (turns_f / mean turns)^(a s)  *  (thinking_f / mean thinking)^(b s)
    s(x) = strength * clip((x - start_frac) / (1 - start_frac), 0, 1)
    P(next task from f)  ~  weight_f * tasks of f that are left;  uniform inside f

Source: report §4 (upsampling of harder data by turns and thinking tokens of rollouts); rows R1 R6.
Choice: a prompt that may still be trained has no rollouts, since nothing is trained twice. So the statistics are those
of its family, measured on probes: tasks taken out of the pool for good, a few of each family. They may be measured
again in mid-run with further probes; `already_drawn` goes on from there.
Choice: upsampling draws from what is left, without replacement. The harder families run out first, never repeat: single
epoch holds for ids and for identical prompts under different ids, which are refused.
Choice: counts are taken plus one, so that a family without thinking has a finite weight. Probes lost to infrastructure
do not count, failed ones do: effort, not success, is what the report names.

Shape letters: F families.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from composer2.types import Group, RolloutStatus, Task


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """When the tilt begins and how steep it becomes."""

    start_frac: float = 0.5
    """Share of the run drawn evenly."""
    strength: float = 1.0
    """Exponent at the end of the run; 0 draws evenly throughout."""
    turns_exponent: float = 1.0
    """a: how much the turns of a family count."""
    thinking_exponent: float = 1.0
    """b: how much its thinking tokens count."""
    probes_per_family: int = 4
    """Tasks of each family taken out of training to measure it."""

    def __post_init__(self) -> None:
        if not 0 <= self.start_frac < 1:
            raise ValueError(f"CurriculumConfig.start_frac is {self.start_frac}, accepted is in [0, 1)")
        for name in ("strength", "turns_exponent", "thinking_exponent"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"CurriculumConfig.{name} is {value}, accepted is a finite number >= 0")
        if self.probes_per_family < 1:
            raise ValueError(f"CurriculumConfig.probes_per_family is {self.probes_per_family}, accepted is >= 1")


@dataclass(frozen=True, kw_only=True)
class FamilyStats:
    """What the probes of one family took."""

    num_rollouts: int
    """Rollouts that count."""
    mean_turns: float
    """Turns a rollout."""
    mean_thinking_tokens: float
    """Thinking tokens a rollout."""


def split_probes(
    tasks: Sequence[Task], config: CurriculumConfig, generator: np.random.Generator
) -> tuple[list[Task], list[Task]]:
    """(probes, tasks to train), disjoint, each in the order given; at most `probes_per_family` probes of a family."""
    check_distinct(tasks)
    chosen: set[int] = set()
    for members in _by_family(tasks).values():
        picked = generator.permutation(len(members))[: config.probes_per_family]
        chosen |= {members[i] for i in picked}
    probes = [task for index, task in enumerate(tasks) if index in chosen]
    return probes, [task for index, task in enumerate(tasks) if index not in chosen]


def family_stats(probed: Iterable[Group]) -> dict[str, FamilyStats]:
    """Means over the probe rollouts of each family; a family all of whose rollouts were lost is missing."""
    turns: dict[str, list[int]] = {}
    thinking: dict[str, list[int]] = {}
    for group in probed:
        for rollout in group.rollouts:
            if rollout.status is not RolloutStatus.INFRASTRUCTURE:
                turns.setdefault(group.task.family, []).append(rollout.stats.num_turns)
                thinking.setdefault(group.task.family, []).append(rollout.stats.thinking_tokens)
    return {
        family: FamilyStats(
            num_rollouts=len(counts),
            mean_turns=float(np.mean(counts)),
            mean_thinking_tokens=float(np.mean(thinking[family])),
        )
        for family, counts in turns.items()
    }


def strength_at(progress: float, config: CurriculumConfig) -> float:
    """s(x) of the top of the file; progress 0 .. 1."""
    ramp = (progress - config.start_frac) / (1 - config.start_frac)
    return config.strength * min(max(ramp, 0.0), 1.0)


def family_weights(stats: Mapping[str, FamilyStats], config: CurriculumConfig, progress: float) -> dict[str, float]:
    """Weight of one task of each family at `progress`; 1 for a family of average effort. Means are over families."""
    strength = strength_at(progress, config)
    turns_F = np.array([1 + found.mean_turns for found in stats.values()])
    thinking_F = np.array([1 + found.mean_thinking_tokens for found in stats.values()])
    effort_F = (turns_F / turns_F.mean()) ** config.turns_exponent
    effort_F = effort_F * (thinking_F / thinking_F.mean()) ** config.thinking_exponent
    return dict(zip(stats, (effort_F**strength).tolist(), strict=True))


def draw_order(
    tasks: Sequence[Task],
    stats: Mapping[str, FamilyStats],
    config: CurriculumConfig,
    generator: np.random.Generator,
    *,
    count: int | None = None,
    already_drawn: int = 0,
    total: int | None = None,
) -> list[Task]:
    """`count` of the tasks (default: all), none twice. Draw i stands at progress (already_drawn + i) / total.

    `total`: draws of the whole run, default `already_drawn + count`. Raises ValueError for tasks of a family without
    statistics, for equal ids or prompts, and when there are fewer than `count` tasks."""
    check_distinct(tasks)
    count = len(tasks) if count is None else count
    if not 0 <= count <= len(tasks):
        raise ValueError(f"count is {count}, accepted is 0..{len(tasks)}: no task is drawn twice")
    total = already_drawn + count if total is None else total
    left = {family: list(members) for family, members in _by_family(tasks).items()}
    unknown = sorted(set(left) - set(stats))
    if unknown:
        raise ValueError(f"stats lack the family {unknown[0]!r}, accepted is one entry for each family of the tasks")
    for members in left.values():
        generator.shuffle(members)
    families = sorted(left)
    sizes_F = np.array([len(left[family]) for family in families], dtype=np.float64)
    order = []
    for index in range(count):
        weights = family_weights(stats, config, (already_drawn + index) / max(total, 1))
        shares_F = sizes_F * np.array([weights[family] for family in families])
        family = int(generator.choice(len(families), p=shares_F / shares_F.sum()))
        sizes_F[family] -= 1
        order.append(tasks[left[families[family]].pop()])
    return order


def check_distinct(tasks: Sequence[Task]) -> None:
    """Raise ValueError when two tasks share an id, or show the model the same prompt under two ids."""
    ids: set[str] = set()
    prompts: dict[object, str] = {}
    for task in tasks:
        if task.task_id in ids:
            raise ValueError(f"task_id {task.task_id!r} occurs twice, accepted is once: a prompt is trained only once")
        ids.add(task.task_id)
        prompt = (task.instruction, tuple(sorted(task.files.items())), task.recent_files, task.tools)
        other = prompts.setdefault(prompt, task.task_id)
        if other != task.task_id:
            raise ValueError(
                f"tasks {other!r} and {task.task_id!r} have the same prompt, accepted are distinct ones: a prompt is "
                "trained only once"
            )


def _by_family(tasks: Sequence[Task]) -> dict[str, list[int]]:
    members: dict[str, list[int]] = {}
    for index, task in enumerate(tasks):
        members.setdefault(task.family, []).append(index)
    return members
