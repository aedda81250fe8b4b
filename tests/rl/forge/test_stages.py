"""Stages: ratios met at every moment, per domain and difficulty; contexts; single epoch."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.rl.forge.stages import DomainShare, Stage, apportion, draw_stages, example_stages
from composer2.types import Task


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.integers(0, 120))
def test_every_prefix_has_its_shares_to_within_one(weights, count):
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    order = apportion([float(share) for share in shares], count)
    num = sum(weight > 0 for weight in weights)
    limit = 1 - Fraction(1, 2 * num - 2) if num > 1 else 0
    drawn = [0] * len(weights)
    for n, index in enumerate(order, start=1):
        drawn[index] += 1
        assert max(abs(share * n - done) for share, done in zip(shares, drawn, strict=True)) <= limit + 1e-6
    assert len(order) == count


def test_by_hand():
    assert apportion([0.5, 0.5], 4) in ([0, 1, 0, 1], [0, 1, 1, 0])
    assert sorted(apportion([0.25, 0.75], 4)) == [0, 1, 1, 1]
    assert apportion([0.0, 1.0], 3) == [1, 1, 1]


def pool(counts):
    """Tasks for (domain, bucket) -> count; with their two lookups."""
    tasks, domain_of, bucket_of = [], {}, {}
    for (domain, bucket), count in counts.items():
        for i in range(count):
            task = Task(task_id=f"{domain}{bucket}.{i}", instruction=f"{domain} {bucket} {i}", files={})
            tasks.append(task)
            domain_of[task.task_id], bucket_of[task.task_id] = domain, bucket
    return tasks, domain_of, bucket_of


DOMAINS = ("reasoning", "coding", "agent", "general")


def test_example_has_the_stated_ratios_contexts_and_difficulties_in_every_stage_and_step():
    stages = example_stages(600, 8192)
    tasks, domain_of, bucket_of = pool({(domain, bucket): 250 for domain in DOMAINS for bucket in range(3)})
    drawn = draw_stages(stages, tasks, domain_of, bucket_of, np.random.default_rng(0))
    assert len(drawn) == 600
    assert len({staged.task.task_id for staged in drawn}) == 600
    start = 0
    for stage in stages:
        part = drawn[start : start + stage.num_prompts]
        start += stage.num_prompts
        assert {staged.stage for staged in part} == {stage.name}
        for share in stage.domains:
            mine = [staged for staged in part if staged.domain == share.domain]
            assert abs(len(mine) - share.ratio * stage.num_prompts) < 1
            assert {staged.max_context for staged in mine} == {share.max_context}
            assert {domain_of[staged.task.task_id] for staged in mine} == {share.domain}
            for bucket, expected in enumerate(share.difficulty):
                found = sum(bucket_of[staged.task.task_id] == bucket for staged in mine)
                assert abs(found - expected * len(mine)) < 1
            for step in range(0, len(part), 20):
                found = sum(staged.domain == share.domain for staged in part[step : step + 20])
                assert abs(found - share.ratio * 20) < 2
    # What the report says in words: later stages hold more code and agents, longer contexts, harder tasks.
    by_name = [{share.domain: share for share in stage.domains} for stage in stages]
    for earlier, later in itertools.pairwise(by_name):
        for domain in ("coding", "agent"):
            assert later[domain].ratio > earlier[domain].ratio
            assert later[domain].max_context > earlier[domain].max_context
            assert later[domain].difficulty[-1] > earlier[domain].difficulty[-1]
        for domain in ("reasoning", "general"):
            assert later[domain].ratio < earlier[domain].ratio


@settings(deadline=None)
@given(st.integers(0, 1000))
def test_stage_sizes_add_up(num_prompts):
    assert sum(stage.num_prompts for stage in example_stages(num_prompts, 1024)) == num_prompts


def test_a_pool_that_does_not_last_is_an_error():
    stages = example_stages(60, 1024)
    tasks, domain_of, bucket_of = pool({(domain, bucket): 1 for domain in DOMAINS for bucket in range(3)})
    with pytest.raises(ValueError, match=r"stage 'foundation' needs more tasks of domain '\w+', difficulty bucket \d"):
        draw_stages(stages, tasks, domain_of, bucket_of, np.random.default_rng(0))
    last = tasks[-1].task_id
    for name, table in (("domain_of", domain_of), ("bucket_of", bucket_of)):
        tables = {"domain_of": domain_of, "bucket_of": bucket_of}
        tables[name] = {key: value for key, value in table.items() if key != last}
        with pytest.raises(ValueError, match=f"^{name} lacks task '{last}', accepted"):
            draw_stages(stages, tasks, generator=np.random.default_rng(0), **tables)


def test_errors():
    share = DomainShare(domain="a", ratio=1.0, max_context=8)
    with pytest.raises(ValueError, match="ratios of stage 'x' are"):
        Stage(name="x", num_prompts=1, domains=(DomainShare(domain="a", ratio=0.9, max_context=8),))
    with pytest.raises(ValueError, match="each name once"):
        Stage(name="x", num_prompts=1, domains=(share, share))
    with pytest.raises(ValueError, match="num_prompts"):
        Stage(name="x", num_prompts=-1, domains=(share,))
    with pytest.raises(ValueError, match="difficulty of 'a' are"):
        DomainShare(domain="a", ratio=1.0, max_context=8, difficulty=(0.5, 0.4))
    with pytest.raises(ValueError, match="max_context"):
        DomainShare(domain="a", ratio=1.0, max_context=0)
    with pytest.raises(ValueError, match="ratio of 'a'"):
        DomainShare(domain="a", ratio=-0.1, max_context=8)
    with pytest.raises(ValueError, match="shares are"):
        apportion([], 3)
