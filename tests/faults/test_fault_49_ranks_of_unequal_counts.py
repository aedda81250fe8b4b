"""Fault 49: ranks end up with different numbers of micro-batches, and a collective waits forever.

Run as a script, this file is one rank: `python FILE RANK STORE OUT`."""

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from composer2.rl.balance import plan_ranks, rank_batches
from composer2.rl.loss import LossConfig, policy_loss, token_logprobs
from composer2.rl.pack import PackCost, to_tensors
from composer2.types import Sample

COST = PackCost(linear=0.0, quadratic=1.0)
LENGTHS = [40, 17, 17, 17, 17, 17]
"""One long and five short: 1600 against 5 * 289 by cost, one micro-batch of 40 tokens against three."""
CONFIG = LossConfig(norm_length=4)
DENOMINATOR = len(LENGTHS) * 4.0


def samples():
    made = []
    for index, length in enumerate(LENGTHS):
        rng = np.random.default_rng(index)
        mask = np.arange(length) >= length // 2
        made.append(
            Sample(
                token_ids=rng.integers(0, 16, length).astype(np.int32),
                loss_mask=mask,
                advantages=np.where(mask, index - 2.5, 0).astype(np.float32),
                behaviour_logprobs=np.where(mask, -2.5, 0).astype(np.float32),
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
                routes=np.full((length, 1, 1), -1, np.int16),
            )
        )
    return made


def gradient(batches, after_each=lambda: None):
    table = torch.nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).double())
    for batch in map(to_tensors, batches):
        logprobs, _ = token_logprobs(table[batch.token_ids], batch.token_ids)
        policy_loss(logprobs, batch, CONFIG, DENOMINATOR)[0].backward()
        after_each()
    return table.grad


def test_the_plan_is_the_hard_case():
    plan = plan_ranks(LENGTHS, num_ranks=2, max_tokens=40, cost=COST)
    assert plan.micro_batches[0] == ((0,), (), ())
    assert sorted(len(part) for part in plan.micro_batches[1]) == [1, 2, 2]


@pytest.mark.dist
def test_two_ranks_finish_with_the_gradient_of_one(tmp_path):
    command = [sys.executable, __file__]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), str(tmp_path / f"{rank}.pt")])
        for rank in range(2)
    ]
    try:
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    seconds = [torch.load(tmp_path / f"{rank}.pt")["seconds"] for rank in range(2)]
    assert max(seconds) < 30
    single = gradient(rank_batches(samples(), plan_ranks(LENGTHS, num_ranks=1, max_tokens=40), 0))
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt")["grad"], single, atol=1e-12, rtol=1e-12)


def main(rank: int, store: str, out: Path) -> None:
    started = time.monotonic()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=25)
    )
    # Every micro-batch ends in a collective, as gathered weights do: unequal counts would hang here.
    plan = plan_ranks(LENGTHS, num_ranks=2, max_tokens=40, cost=COST)
    grad = gradient(rank_batches(samples(), plan, rank), lambda: dist.barrier())
    dist.all_reduce(grad)
    torch.save({"grad": grad, "seconds": time.monotonic() - started}, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
