"""The mismatch script: its interval and slot counts by hand, and the whole script at the scale of `tiny-smoke`."""

import json
import sys

import numpy as np
import pytest

from composer2.recipes import tiny_smoke
from composer2.rl.mismatch import Comparison


@pytest.fixture
def script(load_script):
    return load_script("router_replay_mismatch")


def comparison(used, recorded, num_replaced=0):
    """Three sampled tokens; experts as [T, L, K]."""
    return Comparison(
        trainer_N=np.array([-1.0, -2.0, -3.0], dtype=np.float32),
        sampler_N=np.array([-1.5, -2.0, -2.0], dtype=np.float32),
        used_TLK=np.array(used),
        recorded_TLK=np.array(recorded),
        num_replaced=num_replaced,
        num_recorded=6,
    )


def test_slots_that_differ_are_counted_as_sets(script):
    # Token 0 swaps the order, token 1 differs in one slot, token 2 in both, token 3 was not recorded.
    used = [[[0, 1]], [[0, 1]], [[0, 1]], [[0, 1]]]
    recorded = [[[1, 0]], [[2, 1]], [[2, 3]], [[-1, -1]]]
    assert script.differing_slots(comparison(used, recorded)) == 3


def test_summary_by_hand(script):
    off = comparison([[[0, 1]], [[0, 1]]], [[[0, 1]], [[0, 2]]])
    on = comparison([[[0, 1]], [[0, 2]]], [[[0, 1]], [[0, 2]]], num_replaced=1)
    figures = script.summarise({"off": [off, off], "on": [on, on]}, seed=0)
    assert figures["num_tokens"] == 6
    assert figures["p50_on"] == 0.5
    assert figures["max_on"] == 1.0
    assert (figures["differing_expert_frac_off"], figures["differing_expert_frac_on"]) == (0.5, 0.0)
    assert figures["replaced_expert_frac_on"] == pytest.approx(2 / 12)
    assert figures["replaced_of_differing_on"] == 1.0


def test_interval_of_the_p99_difference(script):
    rng = np.random.default_rng(0)
    low = [rng.exponential(1.0, 100) for _ in range(40)]
    high = [values + 0.5 for values in low]
    # Adding a constant moves every quantile by it, whatever tasks are drawn.
    assert script.p99_difference(high, low, rng, 50) == pytest.approx((0.5, 0.5, 0.5))
    # Two tasks of one token: a draw holds the 1 twice, once (p99 between 0 and 1 is .99) or, one time in four, never.
    zeros, one = [np.zeros(1), np.zeros(1)], [np.ones(1), np.zeros(1)]
    assert script.p99_difference(one, zeros, rng, 200) == pytest.approx((0.99, 0.0, 1.0))


def test_whole_script(script, smoke_start, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "settings", lambda quick, seed: tiny_smoke())
    monkeypatch.setattr(script, "MIN_TOKENS", 100)
    monkeypatch.setattr(script, "COHORT", 2)
    monkeypatch.setattr(sys, "argv", ["script", "--out", str(tmp_path), "--quick", "--start", str(smoke_start)])
    assert script.main() == 0
    figures = json.loads((tmp_path / "router_replay_mismatch.json").read_text())
    assert figures["num_tokens"] >= 100
    assert (tmp_path / "router_replay_mismatch.png").stat().st_size > 10_000
    for setting in ("off", "on", *(f"filter_tau{tau:g}" for tau in script.TAUS[1:])):
        assert 0 <= figures[f"p50_{setting}"] <= figures[f"p99_{setting}"] <= figures[f"max_{setting}"]
    assert figures["max_off"] > 0  # bf16 against fp32
    assert figures["differing_expert_frac_on"] == figures["replaced_expert_frac_on"] == 0
    replaced = [figures[f"replaced_of_differing_filter_tau{tau:g}"] for tau in script.TAUS[1:]]
    assert replaced == sorted(replaced)
    assert replaced[-1] <= 1.0


def test_a_start_is_adopted_once(script, smoke_start, tmp_path):
    script.adopt_start(tmp_path / "run", smoke_start)
    script.adopt_start(tmp_path / "run", smoke_start)
    with pytest.raises(ValueError, match=r"holds a policy of .*start, accepted is the same start"):
        script.adopt_start(tmp_path / "run", tmp_path / "run")
    with pytest.raises(ValueError, match="accepted is a run folder with models/sft"):
        script.adopt_start(tmp_path / "other", tmp_path / "nothing")
