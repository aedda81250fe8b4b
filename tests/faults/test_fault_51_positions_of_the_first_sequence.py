"""Fault 51: under context parallelism later packed sequences take the rotary positions of the first."""

import pytest


@pytest.mark.dist
def test_both_of_two_packed_sequences_have_the_logits_of_one_rank(run_ranks):
    found = run_ranks("faults_job.py", "job", 2)["51"]
    assert max(found["right"]) < 1e-12
    assert min(found["of_the_rank"]) > 1e-3  # places on the rank for positions: both sequences show it
