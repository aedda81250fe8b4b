"""Fault 6, over ranks: the gradient norm that clipping uses changes with the number of data-parallel ranks.

Here it is the single process's for every layout, experts and dense weights on meshes of their own included."""

import pytest

LAYOUTS = {2: ("2,1,2", "1,2,1", "1,2,2"), 4: ("2,2,4", "2,2,2", "1,4,4")}


@pytest.mark.dist
@pytest.mark.parametrize("world", LAYOUTS)
def test_the_norm_is_that_of_one_process(run_ranks, world):
    found = run_ranks("parity.py", "job", world)
    for layout in LAYOUTS[world]:
        assert found[f"{layout}-float64-replay-right"]["norm"] < 1e-10
    if world == 2:  # the mean over ranks, FSDP's default, halves it: the test can tell
        assert 0.4 < found["2,1,2-float64-replay-divide_factor"]["norm"] < 0.6
