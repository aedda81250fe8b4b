"""Training tasks by index: even, in stages with exact ratios, tilted late; probes are never trained."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from composer2.env.tasks.procedural import VARIANTS, generate_task
from composer2.recipes import tiny
from composer2.rl.curriculum import CurriculumConfig, FamilyStats
from composer2.rl.forge.stages import DomainShare, Stage
from composer2.runner import stable_seed
from composer2.task_source import TaskSource, difficulty, only, probe_tasks

STATS = {
    variant: FamilyStats(num_rollouts=8, mean_turns=turns, mean_thinking_tokens=0.0)
    for variant, turns in zip(VARIANTS, (1.0, 1.0, 3.0, 7.0), strict=True)
}


def staged(*stages):
    base = tiny()
    total = sum(stage.num_prompts for stage in stages)
    return replace(base, stages=stages, rl=replace(base.rl, num_steps=total // 10, prompts_per_step=10))


FIRST = Stage(
    name="short",
    num_prompts=40,
    domains=(
        DomainShare(domain="plain", ratio=0.75, max_context=300, difficulty=(0.5, 0.5)),
        DomainShare(domain="search", ratio=0.25, max_context=350),
    ),
)
SECOND = Stage(name="long", num_prompts=20, domains=(DomainShare(domain="long", ratio=1.0, max_context=400),))


def test_without_stages_or_curriculum_a_task_is_a_function_of_seed_and_index():
    config = tiny()
    source = TaskSource(config)
    for index in (0, 7):
        expected = generate_task(random.Random(stable_seed(config.seed, "rl", index)), "train", config.tasks)
        assert source.at(index) == expected


def test_stages_meet_their_ratios_buckets_and_contexts():
    source = TaskSource(staged(FIRST, SECOND))
    first = [source.at(index) for index in range(40)]
    assert Counter(task.meta["variant"] for task in first) == {"plain": 30, "search": 10}
    assert {(task.meta["variant"], task.context_budget) for task in first} == {("plain", 300), ("search", 350)}
    plain = [difficulty(task, 2) for task in first if task.meta["variant"] == "plain"]
    assert Counter(plain) == {0: 15, 1: 15}
    for index in (40, 59, 60, 75):  # past the plan the last stage goes on
        assert (source.at(index).meta["variant"], source.at(index).context_budget) == ("long", 400)
    assert source.at(3) == TaskSource(staged(FIRST, SECOND)).at(3)


def test_a_bucket_that_does_not_occur_is_named(monkeypatch):
    monkeypatch.setattr("composer2.task_source.MAX_DRAWS", 20)
    share = DomainShare(domain="long", ratio=1.0, max_context=400, difficulty=(1.0, 0.0, 0.0))
    stage = Stage(name="odd", num_prompts=10, domains=(share,))
    with pytest.raises(ValueError, match=r"DomainShare.difficulty of 'long' asks for bucket 0 of 3, accepted"):
        TaskSource(staged(stage)).at(0)


def curriculum(**fields):
    base = tiny()
    return replace(base, curriculum=CurriculumConfig(strength=1.0, start_frac=0.5, **fields))


def test_the_tilt_begins_late_and_follows_the_turns_of_the_probes():
    source = TaskSource(curriculum(), STATS)
    even = dict(zip(VARIANTS, tiny().tasks.variant_weights(), strict=True))
    assert source.weights(0) == pytest.approx(even)
    assert source.weights(source.total // 2) == pytest.approx(even)
    # At the end: weight times (1 + turns) / mean(1 + turns), by hand with 1 + turns = 2, 2, 4, 8 and mean 4.
    expected = {v: even[v] * f for v, f in zip(VARIANTS, (0.5, 0.5, 1.0, 2.0), strict=True)}
    assert source.weights(source.total) == pytest.approx(expected)
    drawn = Counter(source.at(index).meta["variant"] for index in range(source.total - 1, source.total + 399))
    share = expected["search"] / sum(expected.values())
    assert abs(drawn["search"] / 400 - share) < 4 * np.sqrt(share * (1 - share) / 400)


def test_probes_are_of_each_variant_and_never_trained(monkeypatch):
    config = curriculum(probes_per_family=3)
    probes = probe_tasks(config)
    assert Counter(task.family for task in probes) == dict.fromkeys(VARIANTS, 3)
    source = TaskSource(config, STATS)
    trained = source.at(5)
    monkeypatch.setattr(source, "excluded", frozenset({trained.task_id}))
    assert source.at(5).task_id != trained.task_id


def test_a_variant_without_statistics_is_named():
    with pytest.raises(ValueError, match="stats lack 'search', accepted is one entry for each variant"):
        TaskSource(curriculum(), {v: s for v, s in STATS.items() if v != "search"})


def test_only_draws_one_variant():
    config = only("unopened", tiny().tasks)
    assert {generate_task(random.Random(seed), "train", config).meta["variant"] for seed in range(10)} == {"unopened"}
