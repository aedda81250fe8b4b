"""Fault 53, under context parallelism: parity on one dense sequence hides a wrong packed path; ppo_kl was off by 220x.

Four packed documents of unequal length; every other parity test of tests/dist packs as well."""

import pytest


@pytest.mark.dist
def test_kl_of_four_packed_documents_is_that_of_one_rank(run_ranks):
    found = run_ranks("faults_job.py", "job", 2)["53"]
    assert abs(found["single"]) > 1
    assert found["context_parallel"] == pytest.approx(found["single"], rel=1e-10)
