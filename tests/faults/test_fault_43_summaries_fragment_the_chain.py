"""Fault 43: a summarising harness fragments the trajectory, so that summaries are not trained or count as rollouts."""

import numpy as np

from composer2.rl.advantage import AdvantageConfig, group_samples
from composer2.rl.metrics import group_metrics, rollout_metrics
from composer2.types import RolloutStats, Segment, Span, SpanKind


def chain(build):
    """Three windows; the first two end in a sampled summary."""
    parts = []
    for index in range(3):
        part = build.segment(10, 5, seed=index)
        kinds = [Span(kind=SpanKind.PROMPT, start=0, stop=5), Span(kind=SpanKind.ACTION, start=5, stop=7)]
        kinds.append(Span(kind=SpanKind.SUMMARY if index < 2 else SpanKind.ACTION, start=7, stop=10))
        parts.append(Segment(**(vars(part) | {"spans": tuple(kinds)})))
    return tuple(parts)


def test_one_reward_reaches_every_sampled_token_of_the_chain(build):
    segments = [chain(build), (build.segment(6, 2, seed=7),), (build.segment(6, 2, seed=8),)]
    group = build.group([1.0, 0.0, 0.0], segments=segments)
    samples = group_samples(group, AdvantageConfig())
    assert len(samples) == 5
    for sample, segment in zip(samples, segments[0], strict=False):
        np.testing.assert_allclose(sample.advantages[5:], 2 / 3, rtol=1e-6)  # summary tokens 7..9 of windows 0, 1 too
        assert sample.loss_mask[5:].all()
        assert not sample.loss_mask[:5].any()
        assert (sample.token_ids == segment.token_ids).all()
    # The chain is one rollout: the mean is 1/3, not 3/5.
    np.testing.assert_allclose([s.advantages[-1] for s in samples[3:]], [-1 / 3, -1 / 3], rtol=1e-6)


def test_the_group_keeps_its_size(build):
    group = build.group([1.0, 0.0], segments=[chain(build), (build.segment(6, 2),)])
    assert rollout_metrics(group.rollouts)["num_rollouts"] == 2
    assert group_metrics([group], AdvantageConfig())["advantage_abs_mean"] == 0.5


def test_a_malformed_summary_is_trained_like_any_other(build):
    group = build.group([0.0, 1.0], segments=[chain(build)[:2], (build.segment(6, 2),)])
    broken = build.rollout(
        0.0, group.rollouts[0].segments, events={"malformed_summary": 1}, stats=RolloutStats(num_summaries=1)
    )
    samples = group_samples(type(group)(task=group.task, rollouts=(broken, group.rollouts[1])), AdvantageConfig())
    assert [float(sample.advantages[-1]) for sample in samples] == [-0.5, -0.5, 0.5]


def test_a_chain_that_the_machinery_lost_is_in_no_baseline(build):
    """Its windows and its summaries were sampled and are on record, and yet nobody knows what they led to."""
    group = build.group([0.0, 1.0, 0.0], lost=(0,), segments=[chain(build)[:2], *[(build.segment(6, 2),)] * 2])
    samples = group_samples(group, AdvantageConfig())
    assert [float(sample.advantages[-1]) for sample in samples] == [0.5, -0.5]
