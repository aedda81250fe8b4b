"""Global packing against brute force, hand calculation and its own promises."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.rl.balance import balance_report, dummy_sample, plan_ranks, rank_batches, sequence_costs
from composer2.rl.loss import LossConfig, policy_loss, token_logprobs
from composer2.rl.pack import PackCost, to_tensors

LINEAR = PackCost(linear=1.0, quadratic=0.0)
LENGTHS = st.lists(st.integers(1, 50), max_size=40)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 6), st.integers(50, 120))
def test_every_sequence_once_under_the_cap_in_equal_counts(lengths, num_ranks, max_tokens):
    plan = plan_ranks(lengths, num_ranks=num_ranks, max_tokens=max_tokens)
    found = sorted(i for parts in plan.micro_batches for part in parts for i in part)
    assert found == list(range(len(lengths)))
    assert len(plan.micro_batches) == num_ranks
    assert {len(parts) for parts in plan.micro_batches} == {plan.num_micro_batches}
    assert plan.num_micro_batches >= 1
    for parts in plan.micro_batches:
        assert all(sum(lengths[i] for i in part) <= max_tokens for part in parts)
    # No rank could do with fewer: best fit leaves at most one micro-batch half empty or less.
    most = max(sum(lengths[i] for part in parts for i in part) for parts in plan.micro_batches)
    assert plan.num_micro_batches <= 2 * most / max_tokens + 1


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_the_worst_rank_against_every_assignment(lengths, num_ranks):
    """Costliest first has a known guarantee, 4/3 - 1/(3R) of the optimum; the swaps only lower the worst rank."""
    costs = sequence_costs(np.array(lengths), PackCost())
    best = min(
        max(sum(c for c, r in zip(costs, ranks, strict=True) if r == rank) for rank in range(num_ranks))
        for ranks in itertools.product(range(num_ranks), repeat=len(lengths))
    )
    plan = plan_ranks(lengths, num_ranks=num_ranks, max_tokens=400)
    worst = max(sum(costs[i] for part in parts for i in part) for parts in plan.micro_batches)
    assert best - 1e-9 <= worst <= (4 / 3 - 1 / (3 * num_ranks)) * best + 1e-9


def test_swaps_repair_what_costliest_first_leaves():
    # Costliest first puts {5, 3, 3} = 11 against {5, 4} = 9; moving nothing but swapping 5 and 4 gives 10 and 10.
    plan = plan_ranks([5, 5, 4, 3, 3], num_ranks=2, max_tokens=20, cost=LINEAR)
    assert balance_report(plan, [5, 5, 4, 3, 3], LINEAR)["rank_imbalance"] == pytest.approx(1.0)


def test_a_rank_with_one_long_sequence_runs_dummy_rows():
    """By hand, squares: 80 costs 6400 and so do sixteen of 20, which need four micro-batches of 80."""
    lengths, square = [80] + [20] * 16, PackCost(linear=0, quadratic=1)
    plan = plan_ranks(lengths, num_ranks=2, max_tokens=80, cost=square)
    assert [len(part) for part in plan.micro_batches[0]] == [1, 0, 0, 0]
    assert [len(part) for part in plan.micro_batches[1]] == [4, 4, 4, 4]
    report = balance_report(plan, lengths, square)
    assert report == {
        "worst_over_bound": 1.0,
        "rank_imbalance": 1.0,
        "lockstep_imbalance": pytest.approx((6400 + 3 * 1600) / 6400),
        "num_micro_batches": 4.0,
        "num_dummies": 3.0,
        "token_fill": pytest.approx(400 / (80 * 8)),
    }


def test_the_cap_goes_before_even_costs_by_hand():
    """Squares, cap 10. The light micro-batch is full when the 1 comes, so it goes to the costly one; in the second case
    spreading leaves no place for the last 3, and the tight filling {6, 4}, {4, 3, 3} is used."""
    square = PackCost(linear=0, quadratic=1)
    plan = plan_ranks([9, 2, 2, 2, 2, 2, 1], num_ranks=1, max_tokens=10, cost=square)
    assert plan.micro_batches == (((0, 6), (1, 2, 3, 4, 5)),)
    plan = plan_ranks([6, 4, 4, 3, 3], num_ranks=1, max_tokens=10, cost=square)
    assert plan.micro_batches == (((0, 1), (2, 3, 4)),)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 3), st.integers(50, 120))
def test_a_rank_is_spread_as_a_plain_search_would(lengths, num_ranks, max_tokens):
    """Longest first, each into the cheapest micro-batch that has room, every one of them looked at every time."""
    costs = sequence_costs(np.array(lengths), PackCost(linear=0.0, quadratic=1.0))
    plan = plan_ranks(lengths, num_ranks=num_ranks, max_tokens=max_tokens, cost=PackCost(linear=0.0, quadratic=1.0))
    for parts in plan.micro_batches:
        bins = [[] for _ in parts]
        for index in sorted((i for part in parts for i in part), key=lambda i: (-lengths[i], i)):
            fitting = [part for part in bins if sum(lengths[i] for i in part) + lengths[index] <= max_tokens]
            if not fitting:
                break  # then the tight filling stands in
            min(fitting, key=lambda part: sum(costs[i] for i in part)).append(index)
        else:
            assert sorted(map(tuple, bins)) == sorted(parts)


@pytest.mark.parametrize("num_ranks", [8, 64, 256])
def test_within_two_percent_of_the_bound_on_log_normal_lengths(num_ranks):
    rng = np.random.default_rng(num_ranks)
    lengths = np.clip(rng.lognormal(8.5, 1.2, 8192), 100, 200_000).astype(int).tolist()
    report = balance_report(plan_ranks(lengths, num_ranks=num_ranks, max_tokens=200_000), lengths)
    assert 1 - 1e-9 <= report["worst_over_bound"] <= 1.02


def test_micro_batches_of_a_rank_come_in_falling_cost():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 90, 200).tolist()
    costs = sequence_costs(np.array(lengths), PackCost())
    for parts in plan_ranks(lengths, num_ranks=4, max_tokens=100).micro_batches:
        sums = [costs[list(part)].sum() for part in parts]
        assert sums == sorted(sums, reverse=True)


def test_an_empty_step_is_one_dummy_a_rank():
    plan = plan_ranks([], num_ranks=3, max_tokens=10)
    assert plan.micro_batches == (((),),) * 3
    assert balance_report(plan, [])["rank_imbalance"] == 1.0


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_summed_ranks_have_the_gradient_of_one_by_one(build, num_ranks):
    """The data-parallel size changes nothing, dummy rows included; every rank runs as many passes."""
    samples = [build.sample(3 + 5 * (i % 4), num_sampled=1 + i % 2, advantage=i - 2.5, seed=i) for i in range(7)]
    config = LossConfig(norm_length=4)

    def gradient(batches):
        table = torch.nn.Parameter(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).double())
        for batch in map(to_tensors, batches):
            logprobs, _ = token_logprobs(table[batch.token_ids], batch.token_ids)
            policy_loss(logprobs, batch, config, 7 * 4.0)[0].backward()
        return table.grad

    plan = plan_ranks([len(s.token_ids) for s in samples], num_ranks=num_ranks, max_tokens=20)
    ranks = [rank_batches(samples, plan, rank) for rank in range(num_ranks)]
    assert {len(batches) for batches in ranks} == {plan.num_micro_batches}
    one_by_one = [
        batch
        for sample in samples
        for batch in rank_batches([sample], plan_ranks([len(sample.token_ids)], num_ranks=1, max_tokens=20), 0)
    ]
    torch.testing.assert_close(
        sum(gradient(batches) for batches in ranks), gradient(one_by_one), atol=1e-12, rtol=1e-12
    )


def test_a_dummy_row_has_exactly_no_gradient_but_a_graph(build):
    dummy = dummy_sample(build.sample(9, layers=2, experts=2))
    assert dummy.routes.shape == (1, 2, 2)
    assert (dummy.routes == -1).all()
    plan = plan_ranks([9], num_ranks=2, max_tokens=9)
    (batch,) = map(to_tensors, rank_batches([build.sample(9)], plan, 1))
    assert not batch.loss_mask.any()
    table = torch.nn.Parameter(torch.randn(32, 32))
    logprobs, _ = token_logprobs(table[batch.token_ids], batch.token_ids)
    policy_loss(logprobs, batch, LossConfig(), 1.0)[0].backward()
    assert table.grad is not None
    assert (table.grad == 0).all()


def test_errors(build):
    with pytest.raises(ValueError, match="num_ranks is 0"):
        plan_ranks([1], num_ranks=0, max_tokens=1)
    with pytest.raises(ValueError, match=r"sequence 1 has 11 tokens, accepted is 1\.\.max_tokens = 10"):
        plan_ranks([3, 11], num_ranks=1, max_tokens=10)
    with pytest.raises(ValueError, match="sequence 0 has 0 tokens"):
        plan_ranks([0], num_ranks=1, max_tokens=10)
    mixed = [build.sample(4), build.sample(4, temperature=0.5)]
    with pytest.raises(ValueError, match="temperature"):
        rank_batches(mixed, plan_ranks([4, 4], num_ranks=1, max_tokens=8), 0)
    with pytest.raises(ValueError, match="samples is empty"):
        rank_batches([], plan_ranks([], num_ranks=1, max_tokens=8), 0)


def test_a_plan_of_other_samples_is_refused(build):
    """More samples than planned would go untrained, and rank -1 would be the last one."""
    plan = plan_ranks([4, 4], num_ranks=2, max_tokens=8)
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"samples holds {count}, accepted are as many as the plan places: 2"):
            rank_batches([build.sample(4)] * count, plan, 0)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=rf"rank is {rank}, accepted is 0\.\.1"):
            rank_batches([build.sample(4)] * 2, plan, rank)
    with pytest.raises(ValueError, match="lengths has dtype float64, accepted are integers"):
        plan_ranks([1.7, 2.2], num_ranks=1, max_tokens=8)
