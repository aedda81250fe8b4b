"""Every named algorithm against its published objective, written out as loops over rollouts and tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.rl.advantage import AdvantageConfig, group_advantages, group_samples
from composer2.rl.balance import plan_ranks, rank_batches
from composer2.rl.loss import LossConfig, loss_denominator, policy_loss, sequence_ratio, token_logprobs
from composer2.rl.pack import pack, to_tensors
from composer2.rl.variants import VARIANTS, cispo, dapo, dr_grpo, gspo

NORM_LENGTH = 16.0
PLANNED = 8


def table():
    """A policy that looks at the last token only: row = token before, column = logit of the next."""
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()


@pytest.fixture
def groups(build):
    """Two groups of four with rollouts of unlike lengths; off-policy by up to +-0.6 a token. One rollout is a chain."""
    made = []
    for number, rewards in enumerate(([1.0, 0.0, 0.25, 0.0], [0.0, 1.0, 1.0, 0.5])):
        rng = np.random.default_rng(number)
        segments = []
        for index in range(4):
            parts = []
            for _ in range(2 if (number, index) == (1, 2) else 1):
                part = build.segment(5 + 2 * index, 2 + index, seed=10 * number + index)
                log_probs = torch.log_softmax(table().detach(), -1).numpy()
                scored = log_probs[part.token_ids[:-1], part.token_ids[1:]]
                behaviour = np.concatenate([[0.0], scored]) + rng.uniform(-0.6, 0.6, len(part.token_ids))
                parts.append(replace(part, logprobs=np.where(part.sampled, behaviour, 0.0).astype(np.float32)))
            segments.append(tuple(parts))
        made.append(build.group(rewards, segments=segments))
    return made


def ours(groups, algorithm, batches_of):
    """Gradient of the table through samples, packing and the loss; `batches_of` cuts the samples into micro-batches."""
    policy = table()
    samples = [s for group in groups for s in group_samples(group, algorithm.advantage)]
    denominator = loss_denominator(
        algorithm.loss,
        num_rollouts_planned=PLANNED,
        num_tokens=sum(int(sample.loss_mask.sum()) for sample in samples),
    )
    for batch in map(to_tensors, batches_of(samples)):
        logprobs, _ = token_logprobs(policy[batch.token_ids], batch.token_ids)
        policy_loss(logprobs, batch, algorithm.loss, denominator)[0].backward()
    return policy.grad


def packed(samples):
    return pack(samples, row_length=24, rows_per_batch=2)


def sequences(rollout, policy):
    """For each segment: (new log-probs, old log-probs) of the sampled tokens."""
    log_probs = torch.log_softmax(policy, -1)
    for part in rollout.segments:
        where = np.flatnonzero(part.sampled)
        yield log_probs[part.token_ids[where - 1], part.token_ids[where]], torch.from_numpy(part.logprobs[where])


def clipped(ratio, advantage, low, high):
    return torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)


def written_out(name, groups):
    """The objective as published, as a scalar to minimise."""
    policy = table()
    total, num_tokens = 0.0, 0
    for group in groups:
        rewards = np.array([rollout.reward for rollout in group.rollouts])
        for index, rollout in enumerate(group.rollouts):
            centred = rewards[index] - rewards.mean()
            scaled = centred / (np.sqrt(((rewards - rewards.mean()) ** 2).mean()) + 1e-6)
            length = sum(int(part.sampled.sum()) for part in rollout.segments)
            for new, old in sequences(rollout, policy):
                ratio = (new - old).exp()
                num_tokens += len(new)
                if name == "dr_grpo":
                    total = total + clipped(ratio, centred, 0.2, 0.28).sum() / (PLANNED * NORM_LENGTH)
                elif name == "grpo":
                    total = total + clipped(ratio, scaled, 0.2, 0.2).sum() / length / PLANNED
                elif name == "rloo":
                    others = np.delete(rewards, index).mean()
                    total = total + (rewards[index] - others) * new.sum() / PLANNED
                elif name == "dapo":
                    total = total + clipped(ratio, scaled, 0.2, 0.28).sum()
                elif name == "cispo":
                    total = total + (ratio.detach().clamp(0, 1.28) * scaled * new).sum()
                elif name == "gspo":
                    sequence_ratio = (new - old).mean().exp()
                    share = len(new) / length  # 1 unless the rollout is a chain
                    total = total + share * clipped(sequence_ratio, scaled, 3e-4, 4e-4) / PLANNED
    if name in ("dapo", "cispo"):
        total = total / num_tokens
    return torch.autograd.grad(-total, policy)[0]


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_gradient_is_that_of_the_published_objective(name, groups):
    # No reward equals its group's mean, so that every rollout has samples and `tokens` counts all of them.
    expected = written_out(name, groups)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(ours(groups, VARIANTS[name](), packed), expected, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_micro_batching_accumulation_and_ranks_change_nothing(name, num_ranks, groups):
    algorithm = VARIANTS[name]()
    reference = ours(groups, algorithm, packed)

    def over_ranks(samples):
        lengths = [len(sample.token_ids) for sample in samples]
        plan = plan_ranks(lengths, num_ranks=num_ranks, max_tokens=30)
        return [batch for rank in range(num_ranks) for batch in rank_batches(samples, plan, rank)]

    def one_row_each(samples):
        return pack(samples, row_length=1, rows_per_batch=1)

    for batches_of in (over_ranks, one_row_each):
        torch.testing.assert_close(ours(groups, algorithm, batches_of), reference, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("name", sorted(VARIANTS))
@given(
    st.lists(st.floats(-2, 2), min_size=2, max_size=7),
    st.lists(st.floats(-2, 2), min_size=1, max_size=3),
)
@settings(max_examples=25, deadline=None)
def test_failures_leave_every_other_advantage_as_it_was(name, rewards, lost):
    config = VARIANTS[name]().advantage
    alone = group_advantages(np.array(rewards), np.ones(len(rewards), bool), config)
    mixed = group_advantages(np.array([*lost, *rewards]), np.array([False] * len(lost) + [True] * len(rewards)), config)
    assert (mixed[: len(lost)] == 0).all()
    assert mixed[len(lost) :].tolist() == alone.tolist()


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_equal_rewards_yield_no_sample_in_any_variant(name, build):
    assert group_samples(build.group([0.7] * 5), VARIANTS[name]().advantage) == []


def test_length_norm_counts_the_sampled_tokens_of_the_whole_chain(build):
    chain = (build.segment(6, 3), build.segment(8, 2, seed=1))
    group = build.group([1.0, 0.0], segments=[chain, (build.segment(4, 1),)])
    first, second, other = group_samples(group, AdvantageConfig(length_norm=True))
    np.testing.assert_allclose(first.advantages[-3:], [0.1] * 3, rtol=1e-6)
    np.testing.assert_allclose(second.advantages[-2:], [0.1] * 2, rtol=1e-6)
    np.testing.assert_allclose(other.advantages[-1:], [-0.5], rtol=1e-6)


def test_grpo_favours_short_right_answers_and_dr_grpo_does_not(build):
    """The length bias, by hand: two right answers of 1 and 4 tokens; total weight of each over its tokens."""
    group = build.group([1.0, 1.0, 0.0, 0.0], segments=[(build.segment(9, n, seed=n),) for n in (1, 4, 2, 2)])
    short, long = group_samples(group, VARIANTS["grpo"]().advantage)[:2]
    assert short.advantages[-1] == pytest.approx(4 * long.advantages[-1])
    short, long = group_samples(group, dr_grpo().advantage)[:2]
    assert short.advantages[-1] == long.advantages[-1]


def test_sequence_ratio_by_hand(build):
    """Two documents in one row and one in another: geometric means of 2 and 8, of 1/4 alone, of 3 and 3."""
    samples = [build.sample(4, num_sampled=2), build.sample(3, num_sampled=1), build.sample(5, num_sampled=2)]
    batch = to_tensors(pack(samples, row_length=7, rows_per_batch=2)[0])
    ratios = {4: [2.0, 8.0], 3: [0.25], 5: [3.0, 3.0]}
    log_ratio = torch.zeros(batch.token_ids.shape, dtype=torch.float64)
    expected = torch.zeros_like(log_ratio)
    for b in range(2):
        for document in batch.document_ids[b][batch.document_ids[b] >= 0].unique():
            inside = batch.document_ids[b] == document
            trained = inside & batch.loss_mask[b]
            values = torch.tensor(ratios[int(inside.sum())], dtype=torch.float64)
            log_ratio[b][trained] = values.log()
            expected[b][trained] = float(np.prod(ratios[int(inside.sum())]) ** (1 / len(values)))
    found = sequence_ratio(log_ratio[batch.loss_mask].requires_grad_(), batch)
    torch.testing.assert_close(found, expected[batch.loss_mask])


def test_an_empty_micro_batch_of_gspo_is_a_zero_with_a_graph(build):
    sample = replace(build.sample(5), loss_mask=np.zeros(5, bool))
    batch = to_tensors(pack([sample], row_length=5, rows_per_batch=1)[0])
    logprobs = torch.zeros(1, 5, requires_grad=True)
    loss, _ = policy_loss(logprobs, batch, gspo().loss, 1.0)
    loss.backward()
    assert (logprobs.grad == 0).all()


def test_what_each_variant_is():
    """The table at the top of the file."""
    assert dr_grpo().advantage == AdvantageConfig()
    assert dr_grpo().loss == LossConfig()
    assert not any(VARIANTS[name]().advantage.length_norm for name in ("dr_grpo", "rloo", "dapo", "cispo"))
    assert dapo().loss.eps_high > dapo().loss.eps_low
    assert cispo().loss.correction == "cispo"
    assert [VARIANTS[name]().loss.normaliser for name in VARIANTS] == [
        "constant", "constant", "constant", "tokens", "tokens", "constant",
    ]  # fmt: skip
