"""Global packing: the sequences of a step over data-parallel ranks and micro-batches, so that no rank has to wait.

In: the lengths of all sequences of a step, a number of ranks, a token cap. Out: for each rank the same number of
micro-batches, each a list of sequences; an empty one is filled by a dummy row.

    cost(s)  = a s + b s^2                        the quadratic part is attention
    bound    = max(mean cost of a rank, cost of the largest sequence)          no plan can beat it
    M        = the most micro-batches that any rank needs under the token cap; every rank gets M

Source: report §6.1 (global sequence packing before each step, which allows for the attention cost of long sequences);
row R12 (the formula of the cost); faults 49 and 4.
Choice, as the report names no algorithm:
sequences go, costliest first, to the rank with the least cost so far; then single moves and swaps between the worst
and the lightest rank shrink what is left. Inside a rank they are spread over the M micro-batches in the same way, under
the cap. Micro-batches are ordered by falling cost, so that the k-th of all ranks are alike: sharded weights are
gathered once for each micro-batch, and everyone waits for the slowest.

Choice: the cap is on tokens of a micro-batch, for memory; a longer sequence is refused, since cutting it would leave
tokens untrained. Choice: ranks are balanced by cost, micro-batch counts follow; where the two conflict, a rank runs
dummy rows. A dummy row has one token and no trained one: it takes part in every collective and adds exactly nothing.
Everything is deterministic: ties go to the lower index, so that all ranks compute the same plan without talking.

Shape letters: N sequences, R ranks, M micro-batches.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from composer2.rl.pack import PackCost, fill
from composer2.types import Batch, Sample

MAX_SWAPS = 400
"""Moves and swaps of the second phase; each is O(sequences of two ranks)."""


@dataclass(frozen=True, kw_only=True)
class BalancedPlan:
    """Which sequence goes where."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """[rank][micro-batch] -> indices of sequences, falling length; empty where a dummy row runs."""

    @property
    def num_micro_batches(self) -> int:
        """The same for every rank."""
        return len(self.micro_batches[0])


def plan_ranks(
    lengths: Sequence[int], *, num_ranks: int, max_tokens: int, cost: PackCost | None = None
) -> BalancedPlan:
    """Every index exactly once; at most `max_tokens` tokens a micro-batch; equal micro-batch counts, at least 1.

    `lengths`: tokens, integers. Raises ValueError for other numbers and for a sequence that is empty or longer than
    `max_tokens`."""
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}, accepted is >= 1")
    if len(lengths) and not np.issubdtype(np.asarray(lengths).dtype, np.integer):
        raise ValueError(f"lengths has dtype {np.asarray(lengths).dtype}, accepted are integers")
    lengths_N = np.asarray(lengths, dtype=np.int64)
    for wrong in np.flatnonzero((lengths_N < 1) | (lengths_N > max_tokens))[:1]:
        raise ValueError(f"sequence {wrong} has {lengths_N[wrong]} tokens, accepted is 1..max_tokens = {max_tokens}")
    costs_N = sequence_costs(lengths_N, cost or PackCost())
    ranks = _shrink_worst(_least_loaded(costs_N, num_ranks), costs_N)
    tight = [_best_fit(members, lengths_N, max_tokens) for members in ranks]
    num_micro_batches = max(1, max(len(bins) for bins in tight))
    return BalancedPlan(
        micro_batches=tuple(
            _spread(members, bins, lengths_N, costs_N, num_micro_batches, max_tokens)
            for members, bins in zip(ranks, tight, strict=True)
        )
    )


def sequence_costs(lengths_N: np.ndarray, cost: PackCost) -> np.ndarray:
    """a s + b s^2, float64 [N]."""
    wide_N = np.asarray(lengths_N, dtype=np.float64)
    return cost.linear * wide_N + cost.quadratic * wide_N**2


def _least_loaded(costs_N: np.ndarray, num_ranks: int) -> list[list[int]]:
    """Costliest first, each to the rank with the least cost so far."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for index in np.argsort(-costs_N, kind="stable").tolist():
        total, rank = heap[0]
        ranks[rank].append(index)
        heapq.heapreplace(heap, (total + float(costs_N[index]), rank))
    return ranks


def _shrink_worst(ranks: list[list[int]], costs_N: np.ndarray) -> list[list[int]]:
    """Move one sequence from the worst rank to the lightest, or swap two, while that lowers the worst of the pair."""
    totals_R = np.array([costs_N[members].sum() for members in ranks])
    for _ in range(MAX_SWAPS):
        worst, lightest = int(totals_R.argmax()), int(totals_R.argmin())
        gap = float(totals_R[worst] - totals_R[lightest])
        if gap == 0:
            break
        given = costs_N[ranks[worst]]
        # What comes back: a sequence of the lightest rank, or nothing (cost 0, index -1).
        back = np.array([-1, *ranks[lightest]])
        back_costs = np.concatenate([[0.0], costs_N[ranks[lightest]]])
        order = np.argsort(back_costs, kind="stable")
        # The best transfer is half the gap: for each sequence given, the return that comes nearest from below or above.
        near = np.searchsorted(back_costs[order], given - gap / 2)
        candidates = np.stack([np.clip(near - 1, 0, len(back) - 1), np.clip(near, 0, len(back) - 1)])
        moved = given[None] - back_costs[order][candidates]
        distance = np.where((moved > 0) & (moved < gap), np.abs(moved - gap / 2), np.inf)
        if not np.isfinite(distance.min()):
            break
        side, position = np.unravel_index(int(distance.argmin()), distance.shape)
        transfer = float(moved[side, position])
        if transfer <= 1e-9 * totals_R[worst] or gap - transfer <= 1e-9 * totals_R[worst]:
            break
        returned = int(back[order][candidates[side, position]])
        ranks[lightest].append(ranks[worst].pop(int(position)))
        if returned >= 0:
            ranks[lightest].remove(returned)
            ranks[worst].append(returned)
        totals_R[worst] -= transfer
        totals_R[lightest] += transfer
    return ranks


def _best_fit(members: Sequence[int], lengths_N: np.ndarray, max_tokens: int) -> list[list[int]]:
    """Few micro-batches: longest first, each into the fullest one that still takes it."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), sorted
    for index in sorted(members, key=lambda i: (-lengths_N[i], i)):
        length = int(lengths_N[index])
        at = bisect_left(room, (length, -1))
        if at == len(room):
            bins.append([])
            free, chosen = max_tokens, len(bins) - 1
        else:
            free, chosen = room.pop(at)
        bins[chosen].append(index)
        insort(room, (free - length, chosen))
    return bins


def _spread(
    members: Sequence[int],
    tight: list[list[int]],
    lengths_N: np.ndarray,
    costs_N: np.ndarray,
    num_micro_batches: int,
    max_tokens: int,
) -> tuple[tuple[int, ...], ...]:
    """Exactly `num_micro_batches` of like cost under the cap; `tight` is what is used when spreading does not fit."""
    bins: list[list[int]] = [[] for _ in range(num_micro_batches)]
    open_bins = [(0.0, number, max_tokens) for number in range(num_micro_batches)]  # heap of (cost, bin, free tokens)
    # Lengths fall, so a bin too full for this one is parked until one comes that fits: every bin moves once a sequence.
    parked: list[tuple[int, float, int]] = []  # heap of (-free tokens, cost, bin)
    for index in sorted(members, key=lambda i: (-lengths_N[i], i)):
        length = int(lengths_N[index])
        while parked and -parked[0][0] >= length:
            negative, total, number = heapq.heappop(parked)
            heapq.heappush(open_bins, (total, number, -negative))
        while open_bins and open_bins[0][2] < length:
            total, number, free = heapq.heappop(open_bins)
            heapq.heappush(parked, (-free, total, number))
        if not open_bins:
            bins = tight + [[] for _ in range(num_micro_batches - len(tight))]
            break
        total, number, free = open_bins[0]
        heapq.heapreplace(open_bins, (total + float(costs_N[index]), number, free - length))
        bins[number].append(index)
    ordered = sorted(range(num_micro_batches), key=lambda number: (-float(costs_N[bins[number]].sum()), number))
    return tuple(tuple(bins[number]) for number in ordered)


# ---------------------------------------------------------------------------------------------------------------------
# What a plan is worth, and its batches


def balance_report(plan: BalancedPlan, lengths: Sequence[int], cost: PackCost | None = None) -> dict[str, float]:
    """worst_over_bound, rank_imbalance (worst / mean), lockstep_imbalance (sum over micro-batches of the worst rank /
    mean cost), num_micro_batches, num_dummies, token_fill (tokens / the fullest micro-batch's, all micro-batches)."""
    lengths_N = np.asarray(lengths, dtype=np.int64)
    costs_N = sequence_costs(lengths_N, cost or PackCost())
    costs_RM = np.array([[costs_N[list(part)].sum() for part in parts] for parts in plan.micro_batches])
    tokens_RM = np.array([[lengths_N[list(part)].sum() for part in parts] for parts in plan.micro_batches])
    if not len(lengths_N):
        costs_RM = np.ones_like(costs_RM, dtype=np.float64)
    ranks_R = costs_RM.sum(axis=1)
    bound = max(float(ranks_R.mean()), float(costs_N.max(initial=0.0)))
    return {
        "worst_over_bound": float(ranks_R.max()) / bound,
        "rank_imbalance": float(ranks_R.max() / ranks_R.mean()),
        "lockstep_imbalance": float(costs_RM.max(axis=0).sum() / ranks_R.mean()),
        "num_micro_batches": float(plan.num_micro_batches),
        "num_dummies": float(sum(not part for parts in plan.micro_batches for part in parts)),
        "token_fill": float(tokens_RM.sum() / max(tokens_RM.max() * tokens_RM.size, 1)),
    }


def dummy_sample(like: Sample) -> Sample:
    """One token of padding with nothing to train: its row runs through the model and adds exactly zero."""
    return replace(
        like,
        token_ids=like.token_ids[:1],
        loss_mask=np.zeros(1, dtype=bool),
        advantages=np.zeros(1, dtype=np.float32),
        behaviour_logprobs=np.zeros(1, dtype=np.float32),
        policy_versions=np.full(1, -1, dtype=np.int32),
        routes=np.full((1, *like.routes.shape[1:]), -1, dtype=np.int16),
    )


def rank_batches(samples: Sequence[Sample], plan: BalancedPlan, rank: int, *, pad_id: int = 0) -> list[Batch]:
    """The micro-batches of one rank, one row each; `samples` are those of the whole step, in the order of the plan.

    Raises ValueError for a step of more than one temperature, for a step without samples, for another number of
    samples than the plan places, and for a rank that it lacks."""
    if not samples:
        raise ValueError("samples is empty, accepted is a step with at least one sample (the dummy row copies it)")
    temperatures = {sample.temperature for sample in samples}
    if len(temperatures) != 1:
        raise ValueError(f"Sample.temperature takes the values {sorted(temperatures)}, accepted is one per step")
    planned = sum(len(part) for parts in plan.micro_batches for part in parts)
    if planned != len(samples):
        raise ValueError(f"samples holds {len(samples)}, accepted are as many as the plan places: {planned}")
    if not 0 <= rank < len(plan.micro_batches):
        raise ValueError(f"rank is {rank}, accepted is 0..{len(plan.micro_batches) - 1}")
    dummy = dummy_sample(samples[0])
    return [fill([[samples[index] for index in part] or [dummy]], pad_id=pad_id) for part in plan.micro_batches[rank]]
