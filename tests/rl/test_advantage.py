"""Advantages by hand: baseline, what counts, chains, the KL term."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.rl.advantage import AdvantageConfig, group_advantages, group_samples, is_degenerate
from composer2.rl.kl import KLConfig
from composer2.types import RolloutStatus, Span, SpanKind

rewards_lists = st.lists(st.floats(-10, 10, allow_nan=False), min_size=2, max_size=8)


def test_dr_grpo_by_hand():
    advantages = group_advantages(np.array([1, 0, 0, 1.0]), np.ones(4, bool), AdvantageConfig())
    assert advantages.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_rloo_is_reward_minus_mean_of_the_others():
    rewards = np.array([1.0, 0.0, 0.5, 0.25])
    advantages = group_advantages(rewards, np.ones(4, bool), AdvantageConfig(baseline="rloo"))
    expected = [r - np.mean(np.delete(rewards, i)) for i, r in enumerate(rewards)]
    np.testing.assert_allclose(advantages, expected, atol=1e-15)


def test_grpo_divides_by_the_population_std():
    advantages = group_advantages(np.array([1.0, 0, 0, 1]), np.ones(4, bool), AdvantageConfig(baseline="grpo"))
    np.testing.assert_allclose(advantages, [1, -1, -1, 1], atol=1e-5)


@given(rewards_lists)
@settings(max_examples=50)
def test_dr_grpo_keeps_small_differences_small_and_grpo_blows_them_up(rewards):
    rewards = np.array(rewards)
    counts = np.ones(len(rewards), bool)
    plain = group_advantages(rewards, counts, AdvantageConfig())
    np.testing.assert_allclose(plain.sum(), 0, atol=1e-9)
    scaled = group_advantages(rewards * 1024.0, counts, AdvantageConfig())
    np.testing.assert_allclose(scaled, plain * 1024.0, atol=1e-7)


@given(st.floats(-10, 10, allow_nan=False), st.integers(1, 9))
@settings(max_examples=50)
def test_equal_rewards_give_exact_zeros_whatever_the_rounding(reward, size):
    for baseline in ("dr_grpo", "grpo", "rloo"):
        config = AdvantageConfig(baseline=baseline)
        assert (group_advantages(np.full(size, reward), np.ones(size, bool), config) == 0.0).all()


def test_degenerate_groups():
    assert is_degenerate(np.array([1.0, 1.0]), np.array([True, True]))
    assert is_degenerate(np.array([1.0, 0.0]), np.array([True, False]))
    assert not is_degenerate(np.array([1.0, 0.0]), np.array([True, True]))
    assert is_degenerate(np.zeros(0), np.zeros(0, bool))


def test_every_sampled_token_of_a_chain_gets_the_advantage(build):
    chain = (build.segment(6, 3), build.segment(8, 2, seed=1), build.segment(5, 4, seed=2))
    group = build.group([1.0, 0.0], segments=[chain, (build.segment(4, 1),)])
    samples = group_samples(group, AdvantageConfig())
    assert [len(sample.token_ids) for sample in samples] == [6, 8, 5, 4]
    for sample, part in zip(samples[:3], chain, strict=True):
        assert (sample.loss_mask == part.sampled).all()
        assert (sample.advantages[part.sampled] == 0.5).all()
        assert (sample.advantages[~part.sampled] == 0).all()
    assert samples[3].advantages.tolist() == [0, 0, 0, -0.5]


def test_summaries_can_be_left_out_of_the_loss_as_a_control(build):
    """Window 0: an action at 3 and 4, a summary at 5 to 7. Window 1: nothing but a summary. Window 2: an action."""
    spans = (
        (Span(kind=SpanKind.ACTION, start=3, stop=5), Span(kind=SpanKind.SUMMARY, start=5, stop=8)),
        (Span(kind=SpanKind.SUMMARY, start=4, stop=6),),
        (Span(kind=SpanKind.ACTION, start=2, stop=4),),
    )
    sizes = ((8, 5), (6, 2), (4, 2))
    chain = [replace(build.segment(*size), spans=kinds) for size, kinds in zip(sizes, spans, strict=True)]
    group = build.group([1.0, 0.0], segments=[chain, (build.segment(4, 1),)])
    first, last, _ = group_samples(group, AdvantageConfig(train_summaries=False))
    assert first.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 3
    assert first.advantages.tolist() == [0, 0, 0, 0.5, 0.5, 0, 0, 0]
    assert last.advantages.tolist() == [0, 0, 0.5, 0.5]
    assert (first.behaviour_logprobs == chain[0].logprobs).all()
    # by default they take the advantage of the chain
    assert [s.advantages.sum() for s in group_samples(group, AdvantageConfig())] == [2.5, 1.0, 1.0, -0.5]


def test_truncated_rollouts_are_trained_and_counted(build):
    group = build.group([1.0, 0.0, 0.0])
    cut = [
        build.rollout(0.0, index=1, status=status) for status in (RolloutStatus.MAX_TURNS, RolloutStatus.CONTEXT_FULL)
    ]
    group = type(group)(task=group.task, rollouts=(group.rollouts[0], *cut))
    samples = group_samples(group, AdvantageConfig())
    assert len(samples) == 3
    np.testing.assert_allclose([sample.advantages[-1] for sample in samples], [2 / 3, -1 / 3, -1 / 3], rtol=1e-6)


def test_segments_without_sampled_tokens_yield_no_sample(build):
    group = build.group([1.0, 0.0], segments=[(build.segment(4, 0), build.segment(4, 2)), (build.segment(4, 1),)])
    assert len(group_samples(group, AdvantageConfig())) == 2


def test_a_rollout_exactly_at_the_mean_yields_no_sample(build):
    assert len(group_samples(build.group([1.0, 0.5, 0.0]), AdvantageConfig())) == 2


def test_kl_term_is_the_weighted_k1_still_to_come_over_the_chain(build):
    chain = (build.segment(4, 2, logprobs=-1.0), build.segment(4, 1, logprobs=-2.0))
    group = build.group([1.0, 0.0], segments=[chain, (build.segment(3, 1),)])
    reference = [[np.full(4, -1.5, np.float32), np.full(4, -4.0, np.float32)], [np.full(3, -1.0, np.float32)]]
    config = AdvantageConfig(kl=KLConfig(weight=0.1))
    first, second, other = group_samples(group, config, reference_logprobs=reference)
    # k1 = log q - log p: 0.5, 0.5 in the first window, 2 in the second.
    np.testing.assert_allclose(first.advantages, [0, 0, 0.5 - 0.1 * 3.0, 0.5 - 0.1 * 2.5], rtol=1e-6)
    np.testing.assert_allclose(second.advantages, [0, 0, 0, 0.5 - 0.1 * 2.0], rtol=1e-6)
    np.testing.assert_allclose(other.advantages, [0, 0, -0.5], rtol=1e-6)


def test_the_length_norm_divides_the_kl_term_too(build):
    group = build.group([1.0, 0.0], segments=[(build.segment(5, 2),), (build.segment(3, 1),)])
    reference = [[np.full(5, -1.5, np.float32)], [np.full(3, -1.0, np.float32)]]
    config = AdvantageConfig(length_norm=True, kl=KLConfig(weight=0.1))
    first, _ = group_samples(group, config, reference_logprobs=reference)
    # k1 is 0.5 a token, so 1 and 0.5 are still to come; two tokens were sampled.
    np.testing.assert_allclose(first.advantages[-2:], [(0.5 - 0.1) / 2, (0.5 - 0.05) / 2], rtol=1e-6)


def test_kl_needs_a_reference_of_the_right_shape(build):
    config = AdvantageConfig(kl=KLConfig(weight=0.1))
    with pytest.raises(ValueError, match="reference_logprobs is given for None rollouts"):
        group_samples(build.group([1.0, 0.0]), config)
    with pytest.raises(
        ValueError, match=r"reference_logprobs\[0\] has shape \(5,\), accepted is one per token: \(6,\)"
    ):
        group_samples(build.group([1.0, 0.0]), config, reference_logprobs=[[np.zeros(5)], [np.zeros(6)]])


def test_first_token_cannot_be_sampled(build):
    with pytest.raises(ValueError, match=r"sampled\[0\]"):
        group_samples(build.group([1.0, 0.0], segments=[(build.segment(3, 3),)] * 2), AdvantageConfig())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"baseline": "ppo"}, "AdvantageConfig.baseline is 'ppo'"),
        ({"std_epsilon": 0}, "AdvantageConfig.std_epsilon is 0"),
        ({"std_epsilon": float("inf")}, "AdvantageConfig.std_epsilon is inf"),
        ({"max_token_age": -1}, "AdvantageConfig.max_token_age is -1"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        AdvantageConfig(**fields)


def test_rewards_must_be_finite():
    with pytest.raises(ValueError, match="finite"):
        group_advantages(np.array([1.0, np.nan]), np.ones(2, bool), AdvantageConfig())


def test_several_groups_in_one_array_are_refused():
    """They would share one baseline."""
    with pytest.raises(ValueError, match=r"rewards_G has shape \(2, 2\), accepted is \[G\]"):
        group_advantages(np.array([[1, 0], [5, 5]]), np.ones((2, 2), bool), AdvantageConfig())
