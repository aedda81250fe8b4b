"""Fault 58: expert gradients are doubled with two expert ranks; the loss curves look the same."""

import pytest


@pytest.mark.dist
def test_expert_gradients_do_not_grow_with_the_expert_ranks(run_ranks):
    ratios = run_ranks("faults_job.py", "job", 2)["58"]
    assert len(ratios) == 4  # two layers, two stacks
    assert all(ratio == pytest.approx(1.0, rel=1e-10) for ratio in ratios.values())
