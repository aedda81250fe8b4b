"""Mixed-domain training in stages: every stage draws from all domains at once, in its own ratios.

In: a plan of stages, tasks with a domain and a difficulty bucket. Out: the order of tasks, each with its stage and the
context length its rollouts get.

Along the stages three things change: the ratio of the domains, the context length of each domain, and how the
difficulties inside a domain are spread.

Source: MiniMax-M2 report (mixed-domain RL training); rows R1 R10.
Choice: the report gives no ratios; `example_stages` follows its words (reasoning and general first, coding and agent
later, contexts growing, difficulty shifting up).
Choice: ratios are met by counting, not by chance. After any n draws of a stage, every domain has had its share of n to
within less than one prompt, so that every step is mixed; the same holds for the buckets inside a domain. This is the
chairman-assignment rule: of those that are due, the one with the earliest deadline is next,

    due      ratio_i n - drawn_i >= 1 / (2k - 2)
    deadline (1 - 1 / (2k - 2) - (ratio_i n - drawn_i)) / ratio_i          deviation at most 1 - 1 / (2k - 2)

Choice: a domain or bucket that runs out is an error, before anything is drawn: neither repeated nor silently replaced.

Shape letters: K domains or buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from composer2.rl.curriculum import check_distinct
from composer2.types import Task


@dataclass(frozen=True, kw_only=True)
class DomainShare:
    """What one stage takes from one domain."""

    domain: str
    """Name of the domain."""
    ratio: float
    """Share of the stage's prompts."""
    max_context: int
    """Tokens a rollout of this domain may fill in this stage."""
    difficulty: tuple[float, ...] = (1.0,)
    """Share of each difficulty bucket, easiest first."""

    def __post_init__(self) -> None:
        if not self.ratio >= 0:
            raise ValueError(f"DomainShare.ratio of {self.domain!r} is {self.ratio}, accepted is >= 0")
        if self.max_context < 1:
            raise ValueError(f"DomainShare.max_context of {self.domain!r} is {self.max_context}, accepted is >= 1")
        _check_shares(f"DomainShare.difficulty of {self.domain!r}", self.difficulty)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stretch of training with fixed ratios."""

    name: str
    """For logs."""
    num_prompts: int
    """Prompts drawn in it."""
    domains: tuple[DomainShare, ...]
    """Each domain once; ratios sum to 1."""

    def __post_init__(self) -> None:
        if self.num_prompts < 0:
            raise ValueError(f"Stage.num_prompts of {self.name!r} is {self.num_prompts}, accepted is >= 0")
        names = [share.domain for share in self.domains]
        if len(names) != len(set(names)):
            raise ValueError(f"Stage.domains of {self.name!r} names {names}, accepted is each name once")
        _check_shares(f"ratios of stage {self.name!r}", [share.ratio for share in self.domains])


@dataclass(frozen=True, kw_only=True)
class StagedTask:
    """One prompt of the run."""

    task: Task
    stage: str
    """Name of the stage that draws it."""
    domain: str
    """Its domain."""
    max_context: int
    """Context budget of its rollouts."""


def _check_shares(what: str, shares: Sequence[float]) -> None:
    if not len(shares) or any(not share >= 0 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(f"{what} are {list(shares)}, accepted are numbers >= 0 that sum to 1")


def apportion(shares: Sequence[float], count: int) -> list[int]:
    """`count` indices into `shares`; after every n of them index i has occurred shares[i] * n times, to within one."""
    _check_shares("shares", shares)
    ratios_K = np.asarray(shares, dtype=np.float64)
    ratios_K = ratios_K / ratios_K.sum()
    num = int((ratios_K > 0).sum())
    slack = 1 / (2 * num - 2) if num > 1 else 0.0
    drawn_K = np.zeros(len(ratios_K))
    order = []
    for n in range(1, count + 1):
        owed_K = ratios_K * n - drawn_K
        deadline_K = np.full(len(ratios_K), np.inf)
        due_K = (owed_K >= slack - 1e-9) & (ratios_K > 0)
        deadline_K[due_K] = (1 - slack - owed_K[due_K]) / ratios_K[due_K]
        chosen = int(deadline_K.argmin())
        drawn_K[chosen] += 1
        order.append(chosen)
    return order


def draw_stages(
    stages: Sequence[Stage],
    tasks: Sequence[Task],
    domain_of: Mapping[str, str],
    bucket_of: Mapping[str, int],
    generator: np.random.Generator,
) -> list[StagedTask]:
    """The prompts of all stages in order, no task twice over the whole run.

    `domain_of` and `bucket_of` are read by task id. Raises ValueError, naming stage, domain and bucket, when a stage
    needs more tasks than are left."""
    check_distinct(tasks)
    for name, table in (("domain_of", domain_of), ("bucket_of", bucket_of)):
        missing = [task.task_id for task in tasks if task.task_id not in table]
        if missing:
            raise ValueError(f"{name} lacks task {missing[0]!r}, accepted is one with every task")
    pools: dict[tuple[str, int], list[Task]] = {}
    for index in generator.permutation(len(tasks)):
        task = tasks[index]
        pools.setdefault((domain_of[task.task_id], bucket_of[task.task_id]), []).append(task)
    drawn = []
    for stage in stages:
        order = apportion([share.ratio for share in stage.domains], stage.num_prompts)
        buckets = [iter(apportion(share.difficulty, order.count(k))) for k, share in enumerate(stage.domains)]
        for k in order:
            share, bucket = stage.domains[k], next(buckets[k])
            pool = pools.get((share.domain, bucket), [])
            if not pool:
                raise ValueError(
                    f"stage {stage.name!r} needs more tasks of domain {share.domain!r}, difficulty bucket {bucket}, "
                    "than there are, accepted is a pool that lasts for the run"
                )
            drawn.append(
                StagedTask(task=pool.pop(), stage=stage.name, domain=share.domain, max_context=share.max_context)
            )
    return drawn


def example_stages(num_prompts: int, max_context: int) -> tuple[Stage, ...]:
    """Three stages of equal length over the four domains of the M2 report; agent contexts grow to `max_context`."""
    table = {
        "foundation": ((0.35, 0.2, 0.1, 0.35), 4, (0.4, 0.3, 0.3)),
        "mixed": ((0.25, 0.3, 0.25, 0.2), 2, (0.3, 0.35, 0.35)),
        "agentic": ((0.15, 0.35, 0.4, 0.1), 1, (0.1, 0.3, 0.6)),
    }
    stages = []
    for number, (name, (ratios, divisor, difficulty)) in enumerate(table.items()):
        # Long horizons matter to code and agents; the other two keep a short context throughout.
        contexts = [max_context // 4, max_context // divisor, max_context // divisor, max_context // 4]
        shares = tuple(
            DomainShare(domain=domain, ratio=ratio, max_context=max(context, 1), difficulty=difficulty)
            for domain, ratio, context in zip(
                ("reasoning", "coding", "agent", "general"), ratios, contexts, strict=True
            )
        )
        size = num_prompts * (number + 1) // 3 - num_prompts * number // 3
        stages.append(Stage(name=name, num_prompts=size, domains=shares))
    return tuple(stages)
