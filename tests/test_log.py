"""Console modes and the metrics file."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.log import Console, MetricsWriter, fail, format_figure, format_seconds, read_metrics, without_time


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_two_stages(console: Console, clock: FakeClock) -> None:
    console.plan(["cpt", "rl"])
    with console.stage("cpt", total=4, detail="1,000 tokens") as stage:
        for step in range(1, 5):
            clock.now += 6
            stage.update(step, loss=5.0 - step)
        stage.end(heldout_loss=2.5)
    console.note("checkpoint saved")
    console.final("report: runs/x/report.html", report="runs/x/report.html")


def test_plain_lines_come_every_ten_seconds_when_not_a_terminal():
    stream, clock = io.StringIO(), FakeClock()
    run_two_stages(Console("rich", stream=stream, clock=clock), clock)
    lines = stream.getvalue().splitlines()
    # Steps end at 6, 12, 18 and 24 s: lines at 12 and 24 only.
    assert lines == [
        "[1/2] cpt  1,000 tokens",
        "  cpt 2/4  loss 3  ETA 12s",
        "  cpt 4/4  loss 1  ETA 0s",
        "  cpt done in 24s  loss 1  heldout_loss 2.5",
        "  checkpoint saved",
        "report: runs/x/report.html",
    ]


def test_quiet_prints_only_final_lines():
    stream, clock = io.StringIO(), FakeClock()
    run_two_stages(Console("quiet", stream=stream, clock=clock), clock)
    assert stream.getvalue() == "report: runs/x/report.html\n"


def test_json_prints_one_object_per_event():
    stream, clock = io.StringIO(), FakeClock()
    run_two_stages(Console("json", stream=stream, clock=clock), clock)
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [e["event"] for e in events] == ["stage_start", *["progress"] * 4, "stage_end", "note", "final"]
    assert events[1]["figures"] == {"loss": 4.0}
    assert events[1]["time/eta_s"] == 18.0
    assert events[-1]["report"] == "runs/x/report.html"


def test_a_terminal_shows_a_bar_with_step_and_eta():
    stream, clock = FakeTerminal(), FakeClock()
    run_two_stages(Console("rich", stream=stream, clock=clock), clock)
    text = stream.getvalue()
    assert "4/4" in text
    assert "ETA" in text
    assert "loss 1" in text


def test_interrupted_stage_says_where_it_stopped_and_eta_ignores_steps_before_a_resume():
    stream, clock = io.StringIO(), FakeClock()
    console = Console("rich", stream=stream, clock=clock)
    stage = console.stage("rl", total=100, first_step=90)
    clock.now += 4
    stage.update(92)
    assert stage.eta == 16.0  # 2 s a step, 8 to go
    with pytest.raises(KeyboardInterrupt), stage:
        raise KeyboardInterrupt
    assert "resumed at step 90" in stream.getvalue()
    assert "stopped at step 92/100" in stream.getvalue()
    assert console.current is None


def test_errors_and_warnings_go_to_the_error_stream_even_in_quiet():
    out, err = io.StringIO(), io.StringIO()
    console = Console("quiet", stream=out, error_stream=err)
    console.warning("pods are not isolated")
    console.error("no such folder")
    assert err.getvalue() == "warning: pods are not isolated\nerror: no such folder\n"
    assert out.getvalue() == ""


def test_show_prints_data_in_json_mode_and_the_renderable_otherwise():
    stream = io.StringIO()
    Console("json", stream=stream).show("for people", {"n": np.int64(3), "bad": math.nan})
    assert json.loads(stream.getvalue()) == {"n": 3, "bad": "nan"}
    stream = io.StringIO()
    Console("rich", stream=stream).show("for people", {"n": 3})
    assert stream.getvalue() == "for people\n"


def test_unknown_mode_names_what_is_accepted():
    with pytest.raises(ValueError, match="'loud', accepted are rich, quiet, json"):
        Console("loud")  # type: ignore[arg-type]


def test_fail_exits_with_code_two(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        fail("no such preset")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: no such preset\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "3"),
     (12345, "12,345"), (0.123456, "0.1235"), (0.0000123, "1.23e-05"), (0.0, "0"),
     (np.float32(0.5), "0.5"), (123456.7, "123,457"),
     (True, "True"), ("x", "x"), (math.inf, "inf")],
)  # fmt: skip
def test_format_figure(value: object, text: str):
    assert format_figure(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59, "59s"), (185, "3m05s"), (4020, "1h07m")])
def test_format_seconds(seconds: float, text: str):
    assert format_seconds(seconds) == text


# ---------------------------------------------------------------------------------------------------------------------
# Metrics


def write_run(path: Path, *, steps: range, seconds: float) -> None:
    with MetricsWriter(path) as writer:
        for step in steps:
            writer.write("rl", step, reward_mean=1 / (step + 3), events={"bad": step}, **{"time/step_s": seconds})


def test_resumed_file_equals_the_uninterrupted_one_but_for_time(tmp_path: Path):
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    with MetricsWriter(whole) as writer:
        writer.write("cpt", 7, loss=2.0)
    resumed.write_bytes(whole.read_bytes())
    write_run(whole, steps=range(10), seconds=1.0)
    write_run(resumed, steps=range(8), seconds=1.0)
    with resumed.open("a") as file:
        file.write('{"stage": "rl", "st')  # a kill in the middle of a line
    with MetricsWriter(resumed) as writer:
        writer.truncate_after({"rl": 4})
        assert [r["step"] for r in read_metrics(resumed)] == [7, 0, 1, 2, 3, 4]
    write_run(resumed, steps=range(5, 10), seconds=9.0)
    assert without_time(read_metrics(resumed)) == without_time(read_metrics(whole))
    assert read_metrics(resumed) != read_metrics(whole)


def test_truncate_can_drop_a_whole_stage(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        writer.write("sft", 3, loss=1.0)
        writer.write("rl", 0, loss=1.0)
        writer.truncate_after({"rl": -1})
        writer.write("eval", 0, split="dev")
    assert [(r["stage"], r["step"]) for r in read_metrics(path)] == [("sft", 3), ("eval", 0)]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=5))
def test_floats_read_back_to_the_same_bits(tmp_path_factory: pytest.TempPathFactory, values: list[float]):
    path = tmp_path_factory.mktemp("m") / "m.jsonl"
    with MetricsWriter(path) as writer:
        for step, value in enumerate(values):
            writer.write("x", step, value=value, array=np.float64(value))
    for record, value in zip(read_metrics(path), values, strict=True):
        assert record["value"] == value
        assert math.copysign(1, record["value"]) == math.copysign(1, value)
        assert record["array"] == value


def test_nan_survives_as_valid_json(tmp_path: Path):
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write("x", 0, value=math.nan)
    assert '"nan"' in (tmp_path / "m.jsonl").read_text()
    assert math.isnan(read_metrics(tmp_path / "m.jsonl")[0]["value"])


def test_absent_file_is_empty_and_a_broken_line_is_named(tmp_path: Path):
    assert read_metrics(tmp_path / "none.jsonl") == []
    (tmp_path / "m.jsonl").write_text('{"stage": "x", "step": 0}\nnonsense\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_metrics(tmp_path / "m.jsonl")


@pytest.mark.parametrize("line", [b"[1]", b'{"a": 1}', b'"text"', b"\xff"])
def test_a_line_that_is_no_record_names_the_file(tmp_path, line):
    (tmp_path / "m.jsonl").write_bytes(line + b"\n")
    with pytest.raises(ValueError, match=r"m\.jsonl (line 1 is .*accepted is one object .* stage, step|is not UTF-8)"):
        read_metrics(tmp_path / "m.jsonl")


def test_a_value_no_json_holds_is_refused(tmp_path: Path):
    with MetricsWriter(tmp_path / "m.jsonl") as writer, pytest.raises(TypeError, match="accepted are numbers"):
        writer.write("x", 0, value=object())
