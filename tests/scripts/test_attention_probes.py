"""The attention probes: accuracies by hand, arms as they are described, and a run that writes what it promises."""

import json

import numpy as np
import pytest


def test_accuracies_by_hand(load_script):
    """Window 12, reach 4 * 11: one query a row of the table."""
    found = {
        "hops": np.array([1, 1, 1, 1, 2, 2, 2, 2]),
        "nearest": np.array([11, 12, 45, 44, 3, 12, 46, 5]),
        "farthest": np.array([11, 12, 45, 44, 11, 30, 47, 13]),
        "right": np.array([True, True, False, True, False, True, False, True]),
    }
    figures = load_script("attention_probes").accuracies(found)
    assert figures == {
        "retrieval_acc": pytest.approx(2 / 3),  # 12, 45, 44
        "retrieval_acc_inside": 1.0,  # 11
        "retrieval_acc_beyond_reach": 0.0,  # 45
        "multihop_acc": 0.5,  # 12, 46
        "multihop_acc_inside": 0.0,  # 3 .. 11
        "multihop_acc_beyond_reach": 0.0,  # 46
    }


def test_arms_have_the_windows_they_say(load_script):
    script = load_script("attention_probes")
    windowed = {
        arm: [layer.is_windowed for layer in script.build(every, 0).layers] for arm, every in script.ARMS.items()
    }
    assert windowed == {
        "full": [False] * 4,
        "hybrid": [True, False, True, False],
        "hybrid1": [True, True, True, False],
        "window": [True] * 4,
    }


def test_a_short_run_writes_figures_and_a_picture(load_script, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["attention_probes", "--out", str(tmp_path), "--quick", "--steps", "2"])
    script = load_script("attention_probes")
    monkeypatch.setattr(script, "EVAL_ROWS", 600)
    assert script.main() == 0
    figures = json.loads((tmp_path / "attention_probes.json").read_text())
    for task in ("retrieval", "multihop"):
        assert figures[f"{task}_loss_of_full"] == 0
        for arm in script.ARMS:
            # untrained: a guess among the eight nodes, or the other three of the row
            assert 0 < figures[f"{task}_acc_{arm}"] < 0.45
            loss = figures[f"{task}_acc_full"] - figures[f"{task}_acc_{arm}"]
            assert figures[f"{task}_loss_of_{arm}"] == pytest.approx(loss)
    assert (tmp_path / "attention_probes.png").stat().st_size > 5000
