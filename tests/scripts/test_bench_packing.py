"""The packing benchmark at a scale of seconds: the keys that readers rely on, and what no plan may do."""

import json

import numpy as np
import pytest

from composer2.rl.pack import PackCost


def test_every_setting_keeps_the_bound_and_the_caps(load_script, tmp_path, monkeypatch):
    script = load_script("bench_packing")
    monkeypatch.setattr(script, "RANKS", (2, 4))
    monkeypatch.setattr(script, "NUM_SEQUENCES", 300)
    monkeypatch.setattr(script, "NUM_MANY", 1000)
    monkeypatch.setattr("sys.argv", ["bench_packing", "--out", str(tmp_path), "--quick"])
    assert script.main() == 0
    figures = json.loads((tmp_path / "bench_packing.json").read_text())
    assert (tmp_path / "bench_packing.png").stat().st_size > 1000
    assert figures["num_sequences"] == 300
    assert figures["caps_held"] == figures["equal_counts"] == 1
    assert 0 < figures["seconds_100k"] < 5
    for name in ("worst_over_bound", "ffd_worst_over_bound", "kk_worst_over_bound"):
        assert figures[name] >= 1, name  # a bound
    assert figures["worst_over_bound"] <= 1.02
    for setting in ("attention_heavy", "matrix_heavy"):
        for ranks in (2, 4):
            assert figures[f"{setting}_ranks{ranks}_worst_over_bound"] <= figures["worst_over_bound"]
            assert 0 < figures[f"{setting}_ranks{ranks}_token_fill"] <= 1


def test_a_setting_by_hand(load_script):
    """Costs 6, 3, 2, 1 over two ranks: 6 against 3 + 2 + 1 is the bound, for ours and for Karmarkar-Karp. First-fit
    puts all 12 tokens into one micro-batch under the cap, so one rank has everything: twice the bound."""
    found = load_script("bench_packing").measure(np.array([6, 3, 2, 1]), 2, PackCost(linear=1.0, quadratic=0.0))
    assert found["worst_over_bound"] == found["kk_over_bound"] == 1
    assert found["ffd_over_bound"] == 2
    assert found["rank_imbalance"] == 1
    assert found["num_dummies"] == 0


def test_a_plan_that_loses_a_sequence_ends_the_benchmark(load_script, monkeypatch):
    script = load_script("bench_packing")
    whole = script.plan_ranks
    monkeypatch.setattr(script, "plan_ranks", lambda lengths, **options: whole(lengths[:-1], **options))
    with pytest.raises(AssertionError, match="lost or packed twice"):
        script.measure(np.array([6, 3, 2, 1]), 2, PackCost())
