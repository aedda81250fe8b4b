"""The numbers behind the redrawn figures against closed forms, and the keys that readers of their JSON rely on."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def load(name):
    spec = importlib.util.spec_from_file_location(f"composer2_script_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.0, 4.0])
def test_exact_moments_of_the_estimators(mu):
    """By hand: k1 is N(mu^2/2, mu^2); k2 is half its square; Var k3 = exp(mu^2) - 1 - mu^2."""
    found = load("fig4_kl_estimators").exact_moments(mu)
    assert found["k1"] == pytest.approx((mu**2 / 2, mu**2), rel=1e-9)
    # y = log r ~ N(-m, s^2), m = mu^2/2, s = mu: E y^2 = s^2 + m^2, Var y^2 = 2 s^4 + 4 m^2 s^2
    assert found["k2"] == pytest.approx(((mu**2 + mu**4 / 4) / 2, (2 * mu**4 + mu**6) / 4), rel=1e-9)
    assert found["k3"] == pytest.approx((mu**2 / 2, np.exp(mu**2) - 1 - mu**2), rel=1e-8)


def run(name, folder, monkeypatch):
    monkeypatch.setattr("sys.argv", [name, "--out", str(folder), "--quick"])
    assert load(name).main() == 0
    assert (folder / f"{name}.png").stat().st_size > 1000
    return json.loads((folder / f"{name}.json").read_text())


def test_figure_4(tmp_path, monkeypatch):
    figures = run("fig4_kl_estimators", tmp_path, monkeypatch)
    assert figures["k1_var_mu2"] == pytest.approx(4.0)
    assert figures["k3_var_mu2"] == pytest.approx(np.exp(4) - 5)
    assert figures["k3_var_sampled_mu4"] < 0.05 * figures["k3_var_mu4"]  # what sampling cannot see
    assert abs(figures["k1_as_loss_grad"]) < 3 * figures["k1_as_loss_grad_se"]
    assert abs(figures["k1_as_loss_grad"] - figures["exact_grad"]) > 10 * figures["k1_as_loss_grad_se"]
    assert abs(figures["k1_in_reward_grad"] - figures["exact_grad"]) < 3 * figures["k1_in_reward_grad_se"]
    assert figures["k1_as_loss_grad_se_from_zero"] < 3 < 10 < figures["k1_as_loss_grad_se_from_exact"]
    assert figures["k1_in_reward_grad_se_from_exact"] < 3
    assert figures["seq_k1_own_token_grad_se_from_exact"] > 10


def test_figure_6(tmp_path, monkeypatch):
    figures = run("fig6_length_penalty", tmp_path, monkeypatch)
    assert figures["value_at_zero_error"] == 0
    assert figures["slope_at_zero_error"] < 1e-5
    for name in ("formula_error", "slope_error", "limit_error", "convexity"):
        assert figures[name] < 1e-6, name
    assert figures["decrease"] <= 0
    assert figures["bound_error"] <= 0
    assert figures["cost_k1_q1_x10"] == pytest.approx(np.log(11))
    assert figures["cost_k1_q2_x10"] == pytest.approx(10 / 11)


def test_karmarkar_karp_by_hand():
    """The textbook example {4, 5, 6, 7, 8}: differencing gives 16 against 14."""
    script = load("bench_packing")
    assert script.karmarkar_karp(np.array([4.0, 5, 6, 7, 8]), 2).tolist() == [16.0, 14.0]
    costs = np.array([3.0, 3, 2, 2, 2])
    assert sum(script.karmarkar_karp(costs, 3)) == pytest.approx(12.0)


def test_first_fit_decreasing_by_hand():
    # Cap 200,000: 150k + 50k, 120k + 80k, 60k; dealt to two ranks in turn.
    lengths = np.array([50_000, 80_000, 60_000, 120_000, 150_000])
    ranks = load("bench_packing").first_fit_decreasing(lengths, lengths.astype(float), 2)
    assert ranks.tolist() == [200_000 + 60_000, 200_000]
