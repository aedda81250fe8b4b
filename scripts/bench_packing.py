"""How even global packing is, and how long it takes: `python scripts/bench_packing.py --out DIR [--quick]`.

In: log-normal lengths, clipped to 100 .. 200,000 tokens, drawn here from a seed. Out: `DIR/bench_packing.json`, flat
figures, and `DIR/bench_packing.png`.

    worst_over_bound   worst over all settings of (cost of the worst rank) / max(mean rank cost, largest sequence)
    ffd_ ... , kk_ ... the same for two well-known ways, on the same lengths
    caps_held          1 when every micro-batch is under the token cap; equal_counts: 1 when all ranks have as many
    seconds_100k       the slowest plan of 100,000 sequences

Source: report §6.1; row R12. Two costs: attention as heavy as the matrices at 1,000 tokens, and at 50,000.
First-fit-decreasing packs tokens into micro-batches under the cap and deals them to the ranks in turn. Karmarkar-Karp
(largest differencing) splits the costs over the ranks and knows no token cap.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from composer2.rl.balance import balance_report, plan_ranks, sequence_costs
from composer2.rl.pack import PackCost

MAX_TOKENS = 200_000
RANKS = (8, 16, 32, 64, 128, 256)
NUM_SEQUENCES = 8192
NUM_MANY = 100_000
"""Sequences of the plan that is timed for itself."""
COSTS = {"attention_heavy": PackCost(linear=1.0, quadratic=1e-3), "matrix_heavy": PackCost(linear=1.0, quadratic=2e-5)}


def draw_lengths(rng: np.random.Generator, count: int, mean_log: float, deviation: float) -> np.ndarray:
    """Log-normal, clipped to 100 .. 200,000, int64 [count]."""
    return np.clip(rng.lognormal(mean_log, deviation, count), 100, 200_000).astype(np.int64)


def first_fit_decreasing(lengths_N: np.ndarray, costs_N: np.ndarray, num_ranks: int) -> np.ndarray:
    """Cost of every rank, float64 [R]."""
    room = np.zeros(0, dtype=np.int64)
    bins: list[float] = []
    for index in np.argsort(-lengths_N, kind="stable"):
        fitting = np.flatnonzero(room >= lengths_N[index])
        if len(fitting):
            chosen = int(fitting[0])
        else:
            chosen = len(bins)
            bins.append(0.0)
            room = np.append(room, MAX_TOKENS)
        room[chosen] -= lengths_N[index]
        bins[chosen] += float(costs_N[index])
    ranks_R = np.zeros(num_ranks)
    for number, total in enumerate(bins):
        ranks_R[number % num_ranks] += total
    return ranks_R


def karmarkar_karp(costs_N: np.ndarray, num_ranks: int) -> np.ndarray:
    """Cost of every rank, float64 [R]: the two partial splits that are least even are joined, heavy part to light."""
    heap: list[tuple[float, int, np.ndarray]] = []
    for number, cost in enumerate(costs_N.tolist()):
        sums_R = np.zeros(num_ranks)
        sums_R[0] = cost  # falling
        heap.append((-cost, number, sums_R))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = np.sort(first + second[::-1])[::-1]
        number += 1
        heapq.heappush(heap, (-(joined[0] - joined[-1]), number, joined))
    return heap[0][2]


def measure(lengths_N: np.ndarray, num_ranks: int, cost: PackCost) -> dict[str, float]:
    """Ours, first-fit-decreasing and Karmarkar-Karp on the same lengths."""
    costs_N = sequence_costs(lengths_N, cost)
    bound = max(float(costs_N.sum()) / num_ranks, float(costs_N.max()))
    started = time.perf_counter()
    plan = plan_ranks(lengths_N.tolist(), num_ranks=num_ranks, max_tokens=MAX_TOKENS, cost=cost)
    seconds = time.perf_counter() - started
    tokens = [int(lengths_N[list(part)].sum()) for parts in plan.micro_batches for part in parts]
    counted = np.bincount([i for parts in plan.micro_batches for part in parts for i in part], minlength=len(lengths_N))
    if not (counted == 1).all():
        raise AssertionError("a sequence was lost or packed twice")
    figures = balance_report(plan, lengths_N.tolist(), cost) | {
        "seconds": seconds,
        "caps_held": float(max(tokens) <= MAX_TOKENS),
        "equal_counts": float(len({len(parts) for parts in plan.micro_batches}) == 1),
    }
    started = time.perf_counter()
    figures["ffd_over_bound"] = float(first_fit_decreasing(lengths_N, costs_N, num_ranks).max()) / bound
    figures["ffd_seconds"] = time.perf_counter() - started
    started = time.perf_counter()
    figures["kk_over_bound"] = float(karmarkar_karp(costs_N, num_ranks).max()) / bound
    figures["kk_seconds"] = time.perf_counter() - started
    return figures


def draw(results: dict[tuple[str, int], dict[str, float]], path: Path) -> None:
    """Worst rank over the bound against the number of ranks."""
    figure, axes = plt.subplots(1, len(COSTS), figsize=(10, 4), sharey=True)
    for axis, name in zip(axes, COSTS, strict=True):
        ranks = sorted({num_ranks for setting, num_ranks in results if setting == name})
        for key, label, marker in (
            ("worst_over_bound", "global packing", "o"),
            ("kk_over_bound", "Karmarkar–Karp", "x"),
            ("ffd_over_bound", "first-fit-decreasing", "s"),
        ):
            axis.plot(ranks, [results[name, r][key] for r in ranks], marker=marker, label=label)
        axis.set(xscale="log", xlabel="data-parallel ranks", title=name.replace("_", " "))
        axis.set_xticks(ranks, [str(r) for r in ranks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("worst rank / bound")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="one seed instead of five")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[tuple[str, int], dict[str, float]] = {}
    for name, cost in COSTS.items():
        for num_ranks in RANKS:
            for seed in range(1 if options.quick else 5):
                lengths_N = draw_lengths(np.random.default_rng([seed, num_ranks]), NUM_SEQUENCES, 8.5, 1.2)
                found = measure(lengths_N, num_ranks, cost)
                kept = results.setdefault((name, num_ranks), found)
                lowest = ("caps_held", "equal_counts", "token_fill")
                for key, value in found.items():
                    kept[key] = min(kept[key], value) if key in lowest else max(kept[key], value)
            print(
                name, num_ranks, {key: round(value, 4) for key, value in results[name, num_ranks].items()}, flush=True
            )
    seconds = []
    for num_ranks in (RANKS[0], RANKS[-1]):
        lengths = draw_lengths(np.random.default_rng(num_ranks), NUM_MANY, 8.5, 1.2).tolist()
        started = time.perf_counter()
        plan_ranks(lengths, num_ranks=num_ranks, max_tokens=MAX_TOKENS)
        seconds.append(time.perf_counter() - started)
    figures = {
        "num_sequences": float(NUM_SEQUENCES),
        "worst_over_bound": max(found["worst_over_bound"] for found in results.values()),
        "ffd_worst_over_bound": max(found["ffd_over_bound"] for found in results.values()),
        "kk_worst_over_bound": max(found["kk_over_bound"] for found in results.values()),
        "caps_held": min(found["caps_held"] for found in results.values()),
        "equal_counts": min(found["equal_counts"] for found in results.values()),
        "seconds_8192": max(found["seconds"] for found in results.values()),
        "kk_seconds_8192": max(found["kk_seconds"] for found in results.values()),
        "ffd_seconds_8192": max(found["ffd_seconds"] for found in results.values()),
        "seconds_100k": max(seconds),
    }
    for (name, num_ranks), found in results.items():
        figures |= {f"{name}_ranks{num_ranks}_{key}": value for key, value in found.items()}
    (options.out / "bench_packing.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    draw(results, options.out / "bench_packing.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
