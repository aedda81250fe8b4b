"""Which training task comes at which place of a run: fresh ones evenly, in stages, or harder ones late.

In: a `RunConfig`, an index. Out: the task of that index, the same one whenever it is asked for, so that a run resumes.

    even        generate_task(seed, index)
    stages      index -> (stage, domain, difficulty bucket), met by counting; the domain's context length goes along
    curriculum  variants that take more turns and thinking weigh more, the later the more

Source: report §4 (harder data late), MiniMax-M2 report (mixed-domain stages); rows R1 R6 R10.
Choice: the tiny family has one domain, so its variants (plain, long, unopened, search) stand for domains, and for the
families of the curriculum. A bucket of difficulty counts the lines of the file with the bug.
Choice: the source is endless, so what is drawn is the kind of task; drawing without replacement from a stored pool is
in `rl.curriculum` and `rl.forge.stages`, whose weights and ratios are used here.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from composer2.env.tasks.procedural import VARIANTS, TaskConfig, generate_task
from composer2.recipes import RunConfig
from composer2.rl.curriculum import FamilyStats, family_weights
from composer2.rl.forge.stages import DomainShare, apportion
from composer2.runner import stable_seed
from composer2.types import Task

MAX_DRAWS = 10_000
"""Tasks drawn in search of one of a bucket."""
LINES_OF_BUCKET = 2
FIRST_LINES = 5
"""Bucket 0 holds files of fewer lines than this, each further bucket LINES_OF_BUCKET more, the last one all others."""


def only(variant: str, tasks: TaskConfig) -> TaskConfig:
    """The same tasks, of one variant."""
    return weighted(tasks, {name: float(name == variant) for name in VARIANTS})


def weighted(tasks: TaskConfig, weights: Mapping[str, float]) -> TaskConfig:
    """The same tasks with these weights of the variants."""
    fields: dict[str, Any] = {f"{variant}_weight": weight for variant, weight in weights.items()}
    return replace(tasks, **fields)


def difficulty(task: Task, num_buckets: int) -> int:
    """Bucket of a task: 0 for the shortest files."""
    lines = next(text.count("\n") for path, text in task.files.items() if task.reference[path] != text)
    return min(max(lines - FIRST_LINES + LINES_OF_BUCKET, 0) // LINES_OF_BUCKET, num_buckets - 1)


def probe_tasks(config: RunConfig) -> list[Task]:
    """Tasks of each variant that the run draws, to be measured and never trained; `family` is the variant."""
    found = []
    for variant, weight in zip(VARIANTS, config.tasks.variant_weights(), strict=True):
        for index in range(config.curriculum.probes_per_family if weight else 0):
            rng = random.Random(stable_seed(config.seed, "probe", variant, index))
            task = generate_task(rng, "train", only(variant, config.tasks))
            found.append(replace(task, family=variant))
    return found


class TaskSource:
    """The training tasks of a run, by index."""

    def __init__(self, config: RunConfig, stats: Mapping[str, FamilyStats] | None = None) -> None:
        """`stats` of the probes, by variant: needed when the curriculum's strength is positive."""
        self.config, self.stats = config, stats
        self.total = config.rl.num_steps * config.rl.prompts_per_step
        self.excluded = frozenset[str]()
        self.plan: list[tuple[DomainShare, int]] = []
        for stage in config.stages:
            order = apportion([share.ratio for share in stage.domains], stage.num_prompts)
            buckets = [iter(apportion(share.difficulty, order.count(k))) for k, share in enumerate(stage.domains)]
            self.plan += [(stage.domains[k], next(buckets[k])) for k in order]
        if config.curriculum.strength > 0:
            missing = [v for v, w in zip(VARIANTS, config.tasks.variant_weights(), strict=True) if w]
            missing = [variant for variant in missing if variant not in (stats or {})]
            if missing:
                raise ValueError(f"stats lack {missing[0]!r}, accepted is one entry for each variant that is drawn")
            self.excluded = frozenset(task.task_id for task in probe_tasks(config))

    def at(self, index: int) -> Task:
        """The index-th task. Past the planned prompts (repeated draws shift them) the last stage goes on."""
        if self.plan:
            return self._staged(index)
        tasks = self.config.tasks if self.stats is None else self._tilted(index)
        for retry in range(MAX_DRAWS):
            parts = (index,) if retry == 0 else (index, retry)
            task = generate_task(random.Random(stable_seed(self.config.seed, "rl", *parts)), "train", tasks)
            if task.task_id not in self.excluded:
                return task
        raise ValueError(f"{MAX_DRAWS} tasks in a row are probes, accepted is a task family with more tasks")

    def weights(self, index: int) -> dict[str, float]:
        """Weight of each variant at the index-th draw."""
        base = dict(zip(VARIANTS, self.config.tasks.variant_weights(), strict=True))
        assert self.stats is not None
        tilt = family_weights(self.stats, self.config.curriculum, min(index / max(self.total, 1), 1.0))
        return {variant: weight * tilt.get(variant, 1.0) for variant, weight in base.items()}

    def _tilted(self, index: int) -> TaskConfig:
        return weighted(self.config.tasks, self.weights(index))

    def _staged(self, index: int) -> Task:
        last = self.config.stages[-1].num_prompts or len(self.plan)
        place = index if index < len(self.plan) else len(self.plan) - last + (index - len(self.plan)) % last
        share, bucket = self.plan[place]
        tasks = only(share.domain, self.config.tasks)
        for retry in range(MAX_DRAWS):
            rng = random.Random(stable_seed(self.config.seed, "rl", index, share.domain, bucket, retry))
            task = generate_task(rng, "train", tasks)
            if difficulty(task, len(share.difficulty)) == bucket:
                return replace(task, context_budget=share.max_context)
        raise ValueError(
            f"DomainShare.difficulty of {share.domain!r} asks for bucket {bucket} of {len(share.difficulty)}, accepted "
            f"are buckets that occur: none of {MAX_DRAWS} tasks is in it"
        )
