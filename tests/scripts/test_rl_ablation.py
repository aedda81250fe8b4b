"""The RL ablation: arms by their fields, interval and figures by hand, jobs that fail or are stopped, one real job."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from composer2.log import Console
from composer2.recipes import tiny_smoke
from composer2.rl.advantage import group_advantages
from composer2.rl.train import RLConfig


@pytest.fixture
def script(load_script):
    return load_script("rl_ablation")


def result(passed, reward, steps=6):
    """What one arm with one seed gives."""
    curves = {
        "reward_mean": [0.0] * (steps - 2) + [reward] * 2,
        "pass_rate": [0.0] * steps,
        "entropy": [float("nan")] * (steps - 1) + [0.5],
        "mismatch_p99": [0.1, 0.3] * (steps // 2),
        "clip_frac": [0.0] * steps,
        "grad_norm": [1.0] * steps,
        "degenerate_frac": [0.0] * steps,
        "response_tokens": [30.0] * steps,
        "staleness_mean": [1.0] * steps,
    }
    return {"curves": curves, "passed": passed, "kl": 0.1, "cpu_seconds": 1.0}


def test_each_arm_changes_what_its_name_says(script):
    base = RLConfig(num_steps=7)
    arms = script.arms(base)
    assert arms["dr_grpo"] == base
    assert arms["replay_off"] == replace(base, replay=False)
    assert arms["kl_k1"].advantage.kl.weight == arms["kl_k3"].advantage.kl.weight > 0
    assert (arms["kl_k1"].advantage.kl.estimator, arms["kl_k3"].advantage.kl.estimator) == ("k1", "k3")
    assert all(arm.num_steps == 7 for arm in arms.values())
    rewards, counts = np.array([1.0, 0, 0, 0]), np.ones(4, dtype=bool)
    plain, by_std = (group_advantages(rewards, counts, arms[name].advantage) for name in ("dr_grpo", "std_norm"))
    np.testing.assert_allclose(by_std, plain / rewards.std(), rtol=1e-5)
    assert [name for name, arm in arms.items() if arm.advantage.length_norm] == ["length_norm", "grpo"]
    assert [name for name, arm in arms.items() if arm.loss.correction == "cispo"] == ["cispo"]
    assert {name for names in script.PANELS.values() for name in names} == arms.keys()


@pytest.mark.parametrize("freedom", range(1, 10))
def test_student_quantiles_by_integration(script, freedom):
    """Integral of the density (1 + x^2/n)^(-(n+1)/2), normalised numerically: substitute x = sqrt(n) tan u."""
    u = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(u) ** (freedom - 1)
    inside = u <= np.arctan(script.T_975[freedom - 1] / np.sqrt(freedom))
    assert np.trapezoid(density[inside], u[inside]) / np.trapezoid(density, u) == pytest.approx(0.95, abs=1e-4)


def test_interval_by_hand(script):
    # Standard deviation 1, so the half width is 4.303 / sqrt(3).
    assert script.student_interval(np.array([1.0, 2.0, 3.0])) == pytest.approx((2.0, -0.4843, 4.4843), abs=1e-4)


def test_differences_are_paired_over_seeds(script):
    found = {
        "start": [result([[0, 0]], 0), result([[1, 1]], 0)],
        "dr_grpo": [result([[0, 1]], 0.2), result([[1, 1]], 0.4)],
        "cispo": [result([[1, 0]], 0.6), result([[1, 1]], 0.8)],
    }
    figures = script.summarise(found)
    assert figures["pass_start"] == 0.5
    assert figures["pass_end_cispo"] == 0.75
    assert "pass_minus_dr_grpo_dr_grpo" not in figures
    # Both seeds differ by nothing, though seeds differ among themselves: the paired interval has no width.
    for end in ("", "_low", "_high"):
        assert figures[f"pass_minus_dr_grpo_cispo{end}"] == 0
    assert figures["gain_cispo"] == 0.25
    assert figures["gain_cispo_high"] == pytest.approx(0.25 + 12.706 * 0.25)
    assert figures["reward_end_cispo"] == pytest.approx(0.7)
    assert figures["reward_start_cispo"] == 0
    assert figures["entropy_end_cispo"] == 0.5  # a step that trained nothing has no entropy
    assert figures["mismatch_p99_cispo"] == pytest.approx(0.2)


def test_smooth_by_hand(script):
    smoothed = script.smooth(np.array([[2.0, 4.0, 6.0, 8.0]]), width=2)
    np.testing.assert_array_equal(smoothed, [[2.0, 3.0, 5.0, 7.0]])


SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_failed_job_ends_the_others(script, tmp_path):
    commands = {"sleeps": SLEEP, "fails": [sys.executable, "-c", "print('why'); raise SystemExit(3)"]}
    with Console("quiet") as console, pytest.raises(RuntimeError, match="fails ended with 3"):
        script.run_jobs(commands, tmp_path, console, width=2)
    assert (tmp_path / "fails.log").read_text() == "why\n"


def test_ctrl_c_leaves_no_job_behind(script, tmp_path, monkeypatch):
    started = []

    class Popen(script.subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(script.subprocess, "Popen", Popen)
    monkeypatch.setattr(script.time, "sleep", interrupt)
    with Console("quiet") as console, pytest.raises(KeyboardInterrupt):
        script.run_jobs({"one": SLEEP, "two": SLEEP, "three": SLEEP}, tmp_path, console, width=2)
    assert [process.returncode for process in started] == [-15, -15]


def test_whole_script_runs_only_what_is_missing(script, smoke_start, tmp_path, monkeypatch):
    """Every result but one is there already."""
    smoke = tiny_smoke()
    config = replace(smoke, rl=replace(smoke.rl, num_steps=2, eval_every=0))
    monkeypatch.setattr(script, "settings", lambda quick: (config, 2))
    monkeypatch.setattr(sys, "argv", ["script", "--out", str(tmp_path), "--quick", "--start", str(smoke_start)])
    (tmp_path / "arms").mkdir()
    for arm in ("start", *script.arms(config.rl)):
        for seed in range(2):
            text = json.dumps(result([[0, 1], [1, 1]], 0.5, steps=2))
            (tmp_path / "arms" / f"{arm}-{seed}.json").write_text(text)
    (tmp_path / "arms" / "kl_k3-1.json").unlink()
    assert script.main() == 0
    log = (tmp_path / "arms" / "kl_k3-1.log").read_text()
    assert [path.name for path in (tmp_path / "arms").glob("*.log")] == ["kl_k3-1.log"], log
    ran = json.loads((tmp_path / "arms" / "kl_k3-1.json").read_text())
    assert len(ran["curves"]["reward_mean"]) == 2
    assert np.shape(ran["passed"]) == (4, 2)
    # Without training no episode passes: no reward differs, and at the start the KL has no gradient.
    assert ran["curves"]["pass_rate"] == ran["curves"]["reward_mean"] == [0.0, 0.0]
    assert ran["kl"] == pytest.approx(0.0, abs=1e-5)
    figures = json.loads((tmp_path / "rl_ablation.json").read_text())
    assert figures["num_seeds"] == 2
    assert figures["pass_end_dr_grpo"] == 0.75
    assert (tmp_path / "rl_ablation.png").stat().st_size > 10_000
    assert len((tmp_path / "curves.jsonl").read_text().splitlines()) == 8 * 2 * 2 + 2 * 2
