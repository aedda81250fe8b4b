"""The prefix-tree benchmark at a scale of seconds: its keys, and token ratios by hand."""

import json

import numpy as np
import pytest

from composer2.model.config import ModelConfig
from composer2.model.transformer import Transformer, init_weights


def test_figures_of_tiny_groups(load_script, tmp_path, monkeypatch):
    script = load_script("bench_prefix_tree")
    monkeypatch.setattr(script, "GROUPS", (2, 3))
    monkeypatch.setattr(script, "SHARES", (0, 90))
    monkeypatch.setattr(script, "LENGTH", 40)
    monkeypatch.setattr("sys.argv", ["bench_prefix_tree", "--out", str(tmp_path), "--quick"])
    script.main()
    figures = json.loads((tmp_path / "bench_prefix_tree.json").read_text())
    assert (tmp_path / "bench_prefix_tree.png").stat().st_size > 1000
    # 39 tokens of a sample run, its last one predicts nothing; 36 of them are common at 90 %, 1 at "0 %".
    for size in (2, 3):
        assert figures[f"token_ratio_g{size}_s90"] == pytest.approx(39 * size / (36 + 3 * size))
        assert figures[f"token_ratio_g{size}_s0"] == pytest.approx(39 * size / (1 + 38 * size))
    assert figures["token_ratio"] == figures["token_ratio_g3_s90"]
    assert figures["max_rel_grad_error"] <= 1e-5
    at_90 = [figures[f"speedup_g{size}_s90"] / figures[f"token_ratio_g{size}_s90"] for size in (2, 3)]
    assert figures["speedup_over_token_ratio_at_90"] == min(at_90) > 0


def test_gradients_of_other_advantages_are_seen(load_script, monkeypatch):
    """The error is a comparison that can fail: an advantage 1 % larger is found as such."""
    script = load_script("bench_prefix_tree")
    monkeypatch.setattr(script, "LENGTH", 20)
    model = Transformer(ModelConfig(vocab_size=64))
    init_weights(model, 0)
    samples = script.group_of(2, 50, model.config, np.random.default_rng(0))
    _, ours = script.one_step(model, samples, script.CONFIG)
    larger = {name: gradient * 1.01 for name, gradient in ours.items()}
    assert script.grad_error(larger, ours) == pytest.approx(0.01, rel=1e-3)
    with pytest.raises(RuntimeError, match="different parameters"):
        script.grad_error(ours, dict(list(ours.items())[1:]))
