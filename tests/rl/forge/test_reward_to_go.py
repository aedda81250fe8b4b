"""Step credit: by hand, and its expected gradient against the exact one of a two-step decision process, enumerated."""

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.env.template import TinyTemplate
from composer2.rl.advantage import AdvantageConfig, group_samples
from composer2.rl.forge.reward_to_go import (
    StepRewardConfig,
    process_rewards,
    speed,
    step_advantages,
    step_credit,
    step_rewards,
    step_samples,
    steps_of,
    trajectory_baselines,
)
from composer2.rl.kl import KLConfig
from composer2.types import Message, Role, Span, SpanKind, ToolResult

PLAIN = StepRewardConfig(alpha=0.0, beta=0.0)


def with_spans(build, *counts, seed=0):
    """A segment whose steps sample that many tokens each, with two tokens of prompt or result before every step."""
    length = sum(counts) + 2 * len(counts)
    part = build.segment(length, 0, seed=seed)
    sampled, spans, start = np.zeros(length, bool), [], 0
    for number, count in enumerate(counts):
        spans.append(Span(kind=SpanKind.RESULT if number else SpanKind.PROMPT, start=start, stop=start + 2))
        kind = SpanKind.SUMMARY if number == 1 else SpanKind.ACTION
        spans.append(Span(kind=kind, start=start + 2, stop=start + 2 + count))
        sampled[start + 2 : start + 2 + count] = True
        start += 2 + count
    versions = np.where(sampled, 0, -1).astype(np.int32)
    return replace(part, sampled=sampled, policy_versions=versions, spans=tuple(spans))


def test_composite_reward_by_hand():
    config = StepRewardConfig(alpha=0.5, beta=0.2, base_seconds=10.0)
    # process 1, -2, 0; 30 s against 10 s: h = 1/4.
    found = step_rewards(np.array([1.0, -2.0, 0.0]), 1.0, 30.0, config)
    np.testing.assert_allclose(found, [0.5, -1.0, 0.2 * 0.25 + 1.0])


@settings(deadline=None)
@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_speed_falls_and_is_bounded(one, other):
    low, high = sorted((one, other))
    assert 1 >= speed(low) >= speed(high) > 0
    assert speed(0.0) == 1.0
    assert speed(1.0) == 0.5


def test_reward_to_go_minus_the_mean_of_the_others_by_hand():
    rewards = [np.array([1.0, 2.0]), np.array([0.0, 0.0, 3.0]), np.array([6.0])]
    first, second, third = step_advantages(rewards, StepRewardConfig())
    # returns 3, 3, 6; means of the others 4.5, 4.5, 3
    np.testing.assert_allclose(first, [3 - 4.5, 2 - 4.5])
    np.testing.assert_allclose(second, [3 - 4.5, 3 - 4.5, 3 - 4.5])
    np.testing.assert_allclose(third, [6 - 3])
    np.testing.assert_allclose(step_advantages(rewards, StepRewardConfig(baseline="group"))[2], [6 - 4])
    np.testing.assert_allclose(step_advantages(rewards, StepRewardConfig(baseline="none"))[0], [3, 2])


# A decision process: action a in {0, 1}, then b in {0, 1}. theta[0] are the logits of a, theta[1 + a] those of b.
THETA = torch.tensor([[0.3, -0.4], [0.8, 0.1], [-0.5, 0.6]], dtype=torch.float64)
FIRST = np.array([0.7, -0.2])
SECOND = np.array([[0.1, 1.0], [0.5, -0.3]])
PATHS = list(itertools.product(range(2), range(2)))


def log_probs(theta, path):
    a, b = path
    return torch.stack([torch.log_softmax(theta[0], 0)[a], torch.log_softmax(theta[1 + a], 0)[b]])


def rewards_of(path):
    a, b = path
    return np.array([FIRST[a], SECOND[a, b]])


def expected_gradient(config, num_samples, *, to_go=True):
    """E of the mean over rollouts of sum_t A_t grad log pi, over all combinations of paths of a group."""
    theta = THETA.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for combination in itertools.product(PATHS, repeat=num_samples):
        weight = float(sum(log_probs(THETA, path).sum() for path in combination).exp())
        advantages = step_advantages([rewards_of(path) for path in combination], config)
        for path, advantages_S in zip(combination, advantages, strict=True):
            credit = torch.from_numpy(advantages_S if to_go else np.full(2, advantages_S[0]))
            total = total + weight / num_samples * (credit * log_probs(theta, path)).sum()
    return torch.autograd.grad(total, theta)[0]


def exact_gradient():
    theta = THETA.clone().requires_grad_()
    value = sum(log_probs(theta, path).sum().exp() * rewards_of(path).sum() for path in PATHS)
    return torch.autograd.grad(value, theta)[0]


@pytest.mark.parametrize("num_samples", [2, 3])
@pytest.mark.parametrize("baseline", ["others", "group", "none"])
def test_expected_gradient_is_exact(baseline, num_samples):
    scale = (num_samples - 1) / num_samples if baseline == "group" else 1.0
    found = expected_gradient(StepRewardConfig(baseline=baseline), num_samples)
    torch.testing.assert_close(found, scale * exact_gradient(), atol=1e-12, rtol=1e-10)
    assert exact_gradient().abs().max() > 0.05


def test_reward_to_go_has_less_variance_than_the_whole_return():
    """The same expectation from the return at every step, with more variance: enumerated for one rollout."""

    def second_moment(to_go):
        total = 0.0
        for path in PATHS:
            theta = THETA.clone().requires_grad_()
            rewards = rewards_of(path)
            credit = rewards[::-1].cumsum()[::-1].copy() if to_go else np.full(2, rewards.sum())
            score = torch.autograd.grad((torch.from_numpy(credit) * log_probs(theta, path)).sum(), theta)[0]
            total += float(log_probs(THETA, path).sum().exp() * (score**2).sum())
        return total

    torch.testing.assert_close(
        expected_gradient(StepRewardConfig(baseline="none"), 2, to_go=False), exact_gradient(), atol=1e-12, rtol=1e-10
    )
    assert second_moment(True) < second_moment(False)


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6), st.sampled_from(["others", "group"]))
def test_without_step_rewards_every_step_gets_what_the_report_gives(rewards, baseline):
    per_step = [np.array([0.0, 0.0, reward]) for reward in rewards]
    scale = len(rewards) / (len(rewards) - 1) if baseline == "others" else 1.0
    for reward, found in zip(rewards, step_advantages(per_step, StepRewardConfig(baseline=baseline)), strict=True):
        np.testing.assert_allclose(found, scale * (reward - np.mean(rewards)), atol=1e-9)


def test_samples_carry_the_advantage_of_their_step_across_segments(build):
    chain = (with_spans(build, 2, 1), with_spans(build, 3, seed=1))
    group = build.group([1.0, 0.0], segments=[chain, (with_spans(build, 2, seed=2),)])
    assert steps_of(group.rollouts[0]) == [(0, 2, 4), (0, 6, 7), (1, 2, 5)]
    process = [np.array([0.0, -1.0, 0.0]), np.array([0.0])]
    samples = step_samples(group, process, [0.0, 0.0], StepRewardConfig(alpha=1.0, beta=0.0), group_index=5)
    # step rewards 0, -1, 1 against 0: returns 0 and 0
    np.testing.assert_allclose(samples[0].advantages, [0, 0, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(samples[1].advantages, [0, 0, 1, 1, 1])
    assert len(samples) == 2  # the other rollout has exactly zero advantage
    assert {sample.group for sample in samples} == {5}
    samples = step_samples(group, process, [0.0, 0.0], StepRewardConfig(alpha=0.5, beta=0.0))
    # 0, -0.5, 1: to go 0.5, 0.5, 1; the other returned 0, and its own baseline is 0.5
    np.testing.assert_allclose(samples[0].advantages, [0, 0, 0.5, 0.5, 0, 0, 0.5])
    np.testing.assert_allclose(samples[1].advantages, [0, 0, 1, 1, 1])
    np.testing.assert_allclose(samples[2].advantages, [0, 0, -0.5, -0.5])


def test_the_harness_marks_every_sampled_token_with_one_step(fakes):
    turns = ["<|read|>solution.py<|end|>", "<|search|>value<|end|>", "done<|end|>"]
    tokenizer = fakes.ByteTokenizer()
    script = [tokenizer.ids(turn) for turn in turns]
    rollout, _, _ = asyncio.run(fakes.run_script(fakes.make_task(), script, template=TinyTemplate(tokenizer)))
    steps = steps_of(rollout)
    assert len(steps) == 3
    assert sum(stop - start for _, start, stop in steps) == sum(int(s.sampled.sum()) for s in rollout.segments)


def test_plain_group_baseline_equals_dr_grpo_sample_by_sample(build):
    segments = [(with_spans(build, 2, 3, seed=i),) for i in range(4)]
    group = build.group([1.0, 0.0, 0.5, 0.0], segments=segments, lost=(3,))
    ours = step_samples(group, [np.zeros(2)] * 4, [0.0] * 4, replace(PLAIN, baseline="group"))
    theirs = group_samples(group, AdvantageConfig())
    assert len(ours) == len(theirs) == 2  # 0.5 is the mean of the three that count
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one.advantages, other.advantages, atol=1e-7)
        assert (one.loss_mask == other.loss_mask).all()


def test_failures_are_in_no_baseline_and_lone_rollouts_teach_nothing(build):
    segments = [(with_spans(build, 2, seed=i),) for i in range(3)]
    group = build.group([1.0, 0.0, 100.0], segments=segments, lost=(2,))
    samples = step_samples(group, [np.zeros(1)] * 2 + [np.zeros(0)], [0.0] * 3, PLAIN)
    assert [float(sample.advantages[-1]) for sample in samples] == [1.0, -1.0]
    alone = build.group([1.0, 0.0, 0.0], segments=segments, lost=(1, 2))
    assert step_samples(alone, [np.zeros(1)] * 3, [0.0] * 3, PLAIN) == []
    equal = build.group([0.1, 0.1, 0.1], segments=segments)
    assert step_samples(equal, [np.zeros(1)] * 3, [0.0] * 3, PLAIN) == []


def test_errors(build):
    group = build.group([1.0, 0.0], segments=[(with_spans(build, 2),), (with_spans(build, 1, 1),)])
    with pytest.raises(ValueError, match=r"process\[1\] has 1 rewards, accepted is one a step: 2"):
        step_samples(group, [np.zeros(1)] * 2, [0.0] * 2, PLAIN)
    with pytest.raises(ValueError, match="one entry for each of the 2 rollouts"):
        step_samples(group, [np.zeros(1)], [0.0], PLAIN)
    with pytest.raises(ValueError, match="each by exactly one action or summary"):
        steps_of(build.rollout(1.0, [build.segment(5, 2)]))
    with pytest.raises(ValueError, match="at least two"):
        trajectory_baselines(np.array([1.0]), "others")
    with pytest.raises(ValueError, match="time_ratio is -1"):
        speed(-1.0)
    with pytest.raises(ValueError, match="finite"):
        step_rewards(np.array([np.nan]), 0.0, 0.0, PLAIN.__class__(alpha=1.0))
    with pytest.raises(ValueError, match=r">= 1 steps"):
        step_rewards(np.zeros(0), 0.0, 0.0, PLAIN)
    for fields in ({"alpha": -1.0}, {"beta": float("nan")}, {"base_seconds": 0.0}, {"baseline": "critic"}):
        with pytest.raises(ValueError, match=rf"StepRewardConfig\.{next(iter(fields))} is"):
            StepRewardConfig(**fields)


def test_credit_for_the_trainer_by_hand(build):
    """Two rollouts of two steps: one had an error in its first step, and it failed; the other passed at once."""
    config = StepRewardConfig(alpha=0.5, beta=0.2, base_seconds=10.0)
    wrong = ToolResult(content="error: no", is_error=True)
    right = ToolResult(content="ok")
    rollouts = []
    for reward, seconds, answers in ((0.0, 30.0, (wrong, right)), (1.0, 10.0, (right, right))):
        messages = [Message(role=Role.USER, content="task")]
        for answer in answers:
            messages += [Message(role=Role.ASSISTANT), Message(role=Role.TOOL, tool_results=(answer,))]
        rollout = replace(build.rollout(), segments=(with_spans(build, 2, 1),), reward=reward, seconds=seconds)
        rollouts.append(replace(rollout, messages=tuple(messages)))
    group = build.group([0.0, 1.0])
    group = replace(group, rollouts=tuple(rollouts))
    np.testing.assert_array_equal(process_rewards(rollouts[0]), [-1.0, 0.0])
    samples = step_credit(config)(group, AdvantageConfig(), temperature=0.7, policy_version=3, group_index=5)
    # Returns: -.5 + .2 * 1/4 = -.45 and .2 * 1/2 + 1 = 1.1; each is the other's baseline.
    for sample, (first, second) in zip(samples, [(-0.45 - 1.1, 0.05 - 1.1), (1.1 + 0.45, 1.1 + 0.45)], strict=True):
        np.testing.assert_allclose(sample.advantages[sample.loss_mask], [first, first, second], rtol=1e-6)
        assert (sample.temperature, sample.group) == (0.7, 5)


def test_one_error_among_the_answers_of_a_turn_counts(build):
    wrong, right = ToolResult(content="error: no", is_error=True), ToolResult(content="ok")
    messages = [Message(role=Role.USER, content="task")]
    for answers in ((right, wrong), (), (right,)):
        messages += [Message(role=Role.ASSISTANT), Message(role=Role.TOOL, tool_results=answers)]
    messages.append(Message(role=Role.ASSISTANT))  # a summary, or a last word: nothing answers it
    rollout = replace(build.rollout(), messages=tuple(messages))
    np.testing.assert_array_equal(process_rewards(rollout), [-1.0, 0.0, 0.0, 0.0])


def test_credit_for_steps_refuses_a_kl_term(build):
    with pytest.raises(ValueError, match=r"KLConfig.weight is 0.1, accepted with credit for steps is 0"):
        step_credit(PLAIN)(build.group([0.0, 1.0]), AdvantageConfig(kl=KLConfig(weight=0.1)))


def test_credit_for_steps_heeds_age_and_summaries_and_refuses_the_rest(build):
    """Whoever sets a field of the advantage config gets it, or is told that there is no such thing here."""
    part = with_spans(build, 2, 1, 2)  # the second step is a summary
    old = replace(part, policy_versions=np.where(part.sampled, 3, -1).astype(np.int32))
    group = build.group([1.0, 0.0], segments=[(old,), (part,)])
    turns = (Message(role=Role.ASSISTANT),) * 3
    group = replace(group, rollouts=tuple(replace(rollout, messages=turns) for rollout in group.rollouts))
    credit = step_credit(PLAIN)

    (fresh,) = credit(group, AdvantageConfig(max_token_age=2), policy_version=5)
    assert fresh.policy_versions.max() == 3
    assert fresh.advantages[fresh.loss_mask].tolist() == [1.0] * 5  # the withheld one is still the baseline
    with pytest.raises(ValueError, match="policy_version is None"):
        credit(group, AdvantageConfig(max_token_age=2))

    for sample in credit(group, AdvantageConfig(train_summaries=False)):
        assert np.flatnonzero(sample.loss_mask).tolist() == [2, 3, 9, 10]
        assert (sample.advantages[~sample.loss_mask] == 0).all()

    for field, value in (("baseline", "grpo"), ("length_norm", True)):
        with pytest.raises(ValueError, match=rf"AdvantageConfig.{field} is {value!r}, accepted with credit for steps"):
            credit(group, AdvantageConfig(**{field: value}))
