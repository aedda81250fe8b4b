"""Fault 20: after a few updates a gap in log-probs appears that follows the training expert-parallel degree."""

import pytest


@pytest.mark.dist
def test_log_probs_of_one_and_two_expert_ranks_agree_after_each_of_eight_steps(run_ranks):
    gaps = run_ranks("faults_job.py", "job", 2)["20"]
    assert len(gaps) == 8
    assert max(gaps) <= 1e-5
