"""The preset `tiny-smoke` from raw text to the report, through the command line, and what can be done with the run."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from composer2.inspect_run import read_rollouts
from composer2.log import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def proof() -> ModuleType:
    """`scripts/resume_proof.py`, whose steps these tests take one at a time."""
    spec = importlib.util.spec_from_file_location("composer2_resume_proof", ROOT / "scripts" / "resume_proof.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def smoke_run(proof: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, seed 3, synchronous."""
    folder = tmp_path_factory.mktemp("smoke") / "run"
    proof.run_whole(folder)
    return folder


def composer2(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "composer2.cli", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200, check=False)


def test_summary_has_every_figure(smoke_run: Path) -> None:
    summary = json.loads((smoke_run / "summary.json").read_text(encoding="utf-8"))
    figures = (
        "cpt_heldout_loss_start cpt_heldout_loss_end loss_fit_r2 mtp_acceptance sft_pass_at_1 rl_pass_at_1 pass_gain "
        "pass_gain_ci_low sft_best_of_4 rl_best_of_4 best_of_4_ci_high summaries_used trained_twice staleness_mean "
        "replaced_expert_frac mismatch_p99_replay_on mismatch_p99_replay_off mismatch_tokens differing_expert_frac "
        "ood_sft_pass_at_1 ood_rl_pass_at_1 humaneval_sft_pass_at_1 humaneval_rl_pass_at_1"
    )
    missing = [name for name in figures.split() if not isinstance(summary.get(name), int | float)]
    assert not missing
    assert summary["trained_twice"] == 0
    assert summary["staleness_mean"] == 0
    assert summary["cpt_heldout_loss_end"] < summary["cpt_heldout_loss_start"] - 0.5
    assert 0 < summary["mtp_acceptance"] <= 1


def test_run_directory_holds_report_metrics_rollouts_weights(smoke_run: Path) -> None:
    assert (smoke_run / "report.html").stat().st_size > 10_000
    assert (smoke_run / "models" / "rl" / "model.safetensors").exists()
    metrics = read_metrics(smoke_run / "metrics.jsonl")
    assert {"cpt", "mtp", "cpt-long", "sft", "rl", "eval"} <= {record["stage"] for record in metrics}
    assert [record["step"] for record in metrics if record["stage"] == "rl"] == [1, 2, 3, 4]
    rollouts = read_rollouts(smoke_run)
    assert {"train", "test", "ood", "humaneval"} <= {record["split"] for record in rollouts}
    shown = composer2("inspect", "run", str(smoke_run), "0", "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)


def test_finished_run_is_not_run_again(smoke_run: Path, proof: ModuleType) -> None:
    before = proof.fingerprint(smoke_run)
    written = {path: path.stat().st_mtime_ns for path in (smoke_run / "stages").iterdir() if path.stem != "report"}
    proof.run_whole(smoke_run)
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert proof.fingerprint(smoke_run) == before


def test_other_configuration_does_not_enter_the_folder(smoke_run: Path) -> None:
    refused = composer2("train", "tiny-smoke", "--seed", "4", "--run-dir", str(smoke_run))
    assert refused.returncode == 2
    assert "another configuration" in refused.stderr


def test_generate_continues_a_text(smoke_run: Path) -> None:
    arguments = ("generate", "--model", str(smoke_run), "--prompt", "def f(x):", "--max-tokens", "12", "--json")
    answers = [composer2(*arguments) for _ in range(2)]
    assert answers[0].returncode == 0, answers[0].stderr
    assert json.loads(answers[0].stdout)["text"].startswith("def f(x):")
    assert answers[0].stdout == answers[1].stdout


def test_solve_leaves_the_folder_alone_without_apply(smoke_run: Path, tmp_path: Path) -> None:
    files = {
        "count.py": "def count_big(values):\n    return sum(1 for value in values if value >= 3)\n",
        "test_count.py": "from count import count_big\n\n\ndef test_edge():\n    assert count_big([3, 4]) == 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    answer = composer2("solve", str(tmp_path), "3 does not count", "--model", str(smoke_run), "--samples", "2")
    assert answer.returncode in (0, 1), answer.stderr
    assert "would change" in answer.stdout
    assert "Traceback" not in answer.stderr
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == files


def test_killed_run_resumes_bit_for_bit(smoke_run: Path, proof: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = proof.start(folder, tmp_path / "log")
    deadline = time.monotonic() + 200
    while not (folder / "checkpoints" / "rl").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    members = proof.family(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert len(members) > 2  # a worker and its pods too
    assert proof.seconds_until_gone(members) is not None
    assert not (folder / "summary.json").exists()
    proof.run_whole(folder)
    assert proof.fingerprint(folder) == proof.fingerprint(smoke_run)


@pytest.mark.parametrize("presses", [1, 2])
def test_interrupt_leaves_no_process(proof: ModuleType, tmp_path: Path, presses: int) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    process = proof.start(folder, log)
    deadline = time.monotonic() + 60
    while not (folder / "tokenizer.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    members = proof.family(process.pid)
    for _ in range(presses):
        with contextlib.suppress(ProcessLookupError):  # the first one was enough
            os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.01)
    started = time.monotonic()
    assert process.wait(20) in ((130,) if presses == 1 else (130, -signal.SIGINT))  # the second may meet the exit
    assert time.monotonic() - started < 10
    assert proof.seconds_until_gone(members) is not None
    assert presses == 2 or "Traceback" not in log.read_text(encoding="utf-8")


def test_empty_corpus_folder_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    answer = composer2(
        "cpt", "tiny-smoke", "--run-dir", str(tmp_path / "run"), "--corpus.sources.0.path", str(tmp_path / "corpus")
    )
    assert answer.returncode == 1
    assert answer.stderr.startswith("error: ")
    assert len(answer.stderr.splitlines()) == 1
    assert str(tmp_path / "corpus") in answer.stderr
