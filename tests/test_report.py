"""The HTML report, drawn from made-up runs. Every number here is synthetic."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from composer2.inspect_run import load_run
from composer2.log import MetricsWriter
from composer2.report import before_after, contract_records, kind_rows, report_html, summed, write_report
from composer2.report_figures import eval_step, moving_mean, series, short_count

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Checker(HTMLParser):
    """Tags must nest; collects section anchors, ids and every attribute that could fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.ids: list[str] = []
        self.fetches: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.stack.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.fetches.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.stack, f"</{tag}> closes nothing"
        assert self.stack.pop() == tag


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.stack == []
    return checker


def synthetic_rollout(i: int) -> dict[str, Any]:
    passed = i % 2 == 0
    results = [{"content": "fail 7", "is_error": False}]
    calls = [{"name": "edit", "arguments": {"line": 2, "old": " <", "new": " >"}}, {"name": "run", "arguments": {}}]
    return {
        "task_id": f"synthetic-{i}",
        "split": "test" if i % 3 else "ood",
        "step": i,
        "kind": ["comparison", "constant"][i % 2],
        "passed": passed,
        "reward": 0.9 if passed else -0.1,
        "reward_components": {"tests": float(passed), "length": -0.1},
        "status": "finished",
        "stats": {"num_turns": 2, "sampled_tokens": 17, "num_summaries": int(i == 4)},
        "events": {"invalid_edit": 1} if i == 3 else {},
        "attempts": [False, passed],
        "messages": [
            {"role": "assistant", "content": "", "tool_calls": calls, "tool_results": []},
            {"role": "tool", "content": "", "tool_calls": [], "tool_results": results},
            {"role": "assistant", "content": "synthetic <b>words</b>", "tool_calls": [], "tool_results": []},
        ],
        "instruction": "synthetic task: count items above the limit",
        "files": {"solution.py": "def f(xs):\n    return sum(x < 3 for x in xs)\n"},
        "final_files": {"solution.py": "def f(xs):\n    return sum(x > 3 for x in xs)\n"},
    }  # fmt: skip


def write_synthetic_run(run: Path) -> Path:
    rng = random.Random(0)
    with MetricsWriter(run / "metrics.jsonl") as writer:
        for step in range(1, 101):
            writer.write("cpt", step, loss=6.9 - 0.8 * math.log(step) + rng.gauss(0, 0.1), tokens=step * 3072)
        for tokens in np.geomspace(2e4, 3e5, 12):
            loss = 9.0 - 0.45 * math.log(tokens) + rng.gauss(0, 0.02)
            writer.write("cpt", round(tokens / 3072), heldout_loss=loss, tokens=round(tokens))
        for step in range(0, 60, 5):
            writer.write("mtp", step, loss=2 * math.exp(-step / 20), acceptance=0.5 - 0.4 * math.exp(-step / 20))
        for step in range(200):
            writer.write("sft", step, loss=0.6 + 2 * math.exp(-step / 40) + rng.gauss(0, 0.05))
        for step in range(100):
            rise = 1 - math.exp(-step / 50)
            writer.write(
                "rl", step, reward_mean=0.33 + 0.1 * rise + rng.gauss(0, 0.03), pass_rate=0.35 + 0.1 * rise,
                best_of_k=0.6 + rng.gauss(0, 0.04), response_tokens=18.5 - 2 * rise, turns=2.5 - 0.2 * rise,
                entropy=0.69 - 0.2 * rise, mismatch_p50=1e-5, mismatch_p99=2e-3, mismatch_max=0.05,
                staleness_mean=0.8, staleness_hist={"0": 300, "1": 800, "2": 40}, degenerate_frac=0.5,
                replaced_expert_frac=0.01, summaries=0.1, clip_frac=0.001, grad_norm=0.4, events={"invalid_edit": 20},
            )  # fmt: skip
        for split, base in (("test", 0.33), ("ood", 0.14), ("humaneval", 0.19)):
            for step, when in enumerate(("sft", "rl-50", "rl")):
                mean = base + 0.045 * step
                writer.write(
                    "eval", 50 * step, split=split, when=when, pass_at_1=mean, pass_ci_low=mean - 0.03,
                    pass_ci_high=mean + 0.03, best_of_8=base + 0.27, tokens=18.0 - step, turns=2.4,
                )  # fmt: skip
    summary = {"cpt_heldout_loss_start": 6.93, "cpt_heldout_loss_end": 3.4, "loss_fit_r2": 0.98, "mtp_acceptance": 0.47,
               "sft_pass_at_1": 0.33, "rl_pass_at_1": 0.43, "sft_best_of_8": 0.6, "rl_best_of_8": 0.62,
               "staleness_mean": 0.77, "summaries_used": 310, "mtp_acceptance_mid": 0.41,
               "mtp_acceptance_after_move": 0.38, "mtp_acceptance_end": 0.47}  # fmt: skip
    for setting, scale in (("replay_off", 1.0), ("replay_on", 0.2), ("replay_filter", 0.25)):
        summary |= {f"mismatch_{rank}_{setting}": scale * v for rank, v in (("p50", 3e-4), ("p99", 0.02), ("max", 0.6))}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "config.json").write_text(json.dumps({"name": "synthetic-test-data", "seed": 0}))
    (run / "rollouts.jsonl").write_text("".join(json.dumps(synthetic_rollout(i)) + "\n" for i in range(9)))
    return run


@pytest.fixture(scope="module")
def full_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = write_report(write_synthetic_run(tmp_path_factory.mktemp("runs") / "synthetic"))
    assert path.name == "report.html"
    return path.read_text(encoding="utf-8")


def test_whole_report_is_well_formed_and_fetches_nothing(full_page: str):
    checker = checked(full_page)
    assert checker.fetches == []
    assert "script" not in checker.tags
    assert "link" not in checker.tags
    assert len(checker.ids) == len(set(checker.ids))
    assert "url(http" not in full_page
    assert "@import" not in full_page
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\"' <)]+", full_page)) <= namespaces


def test_every_section_is_drawn(full_page: str):
    assert "Not in this run" not in full_page
    sections = dict(re.findall(r'<section id="(\w+)">(.*?)</section>', full_page, flags=re.DOTALL))
    figures = {"cpt": 2, "mtp": 3, "sft": 1, "reward": 2, "length": 3, "entropy": 3, "mismatch": 3, "staleness": 2,
               "groups": 1}  # fmt: skip
    for name, count in figures.items():
        assert sections[name].count("<svg") == count, name
    assert "R² = 0.9" in sections["cpt"]
    assert "invalid_edit" in sections["groups"]
    assert "2,000" in sections["groups"]
    assert "comparison" in sections["kinds"]
    assert sections["rollouts"].count("<details") == 6


def test_axes_are_labelled(full_page: str):
    for svg in re.findall(r"<svg.*?</svg>", full_page, flags=re.DOTALL):
        assert len(re.findall(r"<text", svg)) >= 4
    assert "DejaVu" not in full_page
    assert "'system-ui'" not in full_page  # quoted, it would be the name of one font
    for label in ("training tokens", "held-out loss (nats per token)", "RL step", "entropy (nats per token)",
                  "share of sampled tokens", "|Δ log-prob| per token (nats)"):  # fmt: skip
        assert label in full_page


def test_text_of_the_run_is_escaped_and_turns_come_in_order(full_page: str):
    assert "synthetic <b>words" not in full_page
    assert "synthetic &lt;b&gt;words" in full_page
    first = full_page[full_page.index('id="rollouts"') :]
    places = [first.index(words) for words in ("turn 1", "edit(line=2", "← fail 7", "turn 2", "change left behind")]
    assert places == sorted(places)


def test_the_same_run_gives_the_same_page(full_page: str, tmp_path: Path):
    again = write_report(write_synthetic_run(tmp_path / "synthetic"))
    assert again.read_text(encoding="utf-8") == full_page


@pytest.mark.parametrize("missing", ["metrics.jsonl", "summary.json", "rollouts.jsonl", "config.json"])
def test_a_missing_file_is_said_and_not_fatal(tmp_path: Path, missing: str):
    run = write_synthetic_run(tmp_path / "synthetic")
    (run / missing).unlink()
    page = report_html(load_run(run))
    checked(page)
    assert ("Not in this run" in page) == (missing in ("metrics.jsonl", "rollouts.jsonl"))


def test_an_almost_empty_run_has_a_report(tmp_path: Path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write("cpt", 1, heldout_loss=5.0, tokens=100)
        writer.write("rl", 0, reward_mean=math.nan, mismatch_max=0.0)
        writer.write("eval", 0, split="dev", when="sft", pass_at_1=0.3)
    checked(report_html(load_run(tmp_path)))


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="accepted is a folder"):
        write_report(tmp_path)


def test_names_of_rl_metrics_are_read_as_the_contract_names():
    written = {"stage": "rl", "step": 0, "num_turns": 2.0, "best_of_group": 0.5}
    (record,) = contract_records([written | {"num_rollouts": 128, "event/invalid_edit": 0.25}])
    assert record["turns"] == 2.0
    assert record["best_of_k"] == 0.5
    assert record["events"] == {"invalid_edit": 32}


def test_sums_series_and_smoothing_by_hand():
    records = [{"stage": "rl", "step": s, "staleness_hist": {"0": 1, "1": s}, "entropy": float(s)} for s in range(3)]
    records.append({"stage": "sft", "step": 0, "entropy": 9.0})
    assert summed(records, "staleness_hist") == {"0": 3, "1": 3}
    steps, values = series(records, "rl", "entropy")
    assert steps.tolist() == [0, 1, 2]
    assert moving_mean(values, 3).tolist() == [0.5, 1.0, 1.5]


def test_counts_on_axes():
    assert [short_count(n) for n in (20, 5e4, 2e6, 1.5e9)] == ["20", "50k", "2M", "1.5B"]


def test_evaluation_times():
    assert [eval_step({"when": when}, 120) for when in ("sft", "rl-40", "rl")] == [0, 40, 120]


def test_before_after_and_kinds():
    evals = [
        {"stage": "eval", "step": 0, "split": "test", "when": "sft", "pass_at_1": 0.331, "best_of_8": 0.6,
         "by_kind": {"op": {"n": 54, "pass_at_1": 0.45}}},
        {"stage": "eval", "step": 9, "split": "test", "when": "rl", "pass_at_1": 0.426, "pass_ci_low": 0.4,
         "pass_ci_high": 0.45, "by_kind": {"op": {"n": 54, "pass_at_1": 0.5}}},
    ]  # fmt: skip
    assert before_after(evals) == [["test", "0.331 → 0.426 [0.400, 0.450]", "0.600 → –", "– → –", "– → –"]]
    assert kind_rows(evals, []) == (
        ["kind of task", "tasks", "pass@1, sft", "pass@1, rl"],
        [["op", "54", "0.450", "0.500"]],
    )
    rollouts = [{"kind": "op", "passed": p, "stats": {"num_turns": 2}} for p in (True, False)]
    assert kind_rows([], rollouts)[1] == [["op", "2", "0.500", "2.00"]]


def test_reports_do_not_need_torch():
    code = "import sys, composer2.report, composer2.inspect_run; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
