"""Records of rollouts and the views on a run directory."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from composer2.inspect_run import (
    changed_lines,
    choose_rollouts,
    inspect_run,
    load_run,
    read_rollouts,
    rollout_record,
)
from composer2.log import MetricsWriter
from composer2.types import Message, Role, Rollout, RolloutStats, RolloutStatus, Segment, Task, ToolCall, ToolResult

TASK = Task(
    task_id="t-1",
    instruction="count items above the limit",
    files={"solution.py": "def f(xs):\n    return sum(x < 3 for x in xs)\n"},
    meta={"bug_kind": "comparison"},
)


def made_rollout(*, passed: bool = True) -> Rollout:
    segment = Segment(
        token_ids=np.arange(3, dtype=np.int32),
        sampled=np.array([False, True, True]),
        logprobs=np.zeros(3, dtype=np.float32),
        policy_versions=np.zeros(3, dtype=np.int32),
        routes=np.zeros((3, 1, 2), dtype=np.int16),
    )
    edit = ToolCall(name="edit", arguments={"line": 2, "old": " <", "new": " >"})
    messages = (
        Message(role=Role.ASSISTANT, tool_calls=(edit, ToolCall(name="run"))),
        Message(role=Role.TOOL, tool_results=(ToolResult(content="ok"), ToolResult(content="fail 7", is_error=True))),
        Message(role=Role.ASSISTANT, content="done", tool_calls=(ToolCall(name="finish"),)),
    )
    return Rollout(
        task_id="t-1",
        sample_index=2,
        segments=(segment,),
        status=RolloutStatus.FINISHED,
        passed=passed,
        stats=RolloutStats(num_turns=2, sampled_tokens=12),
        events={"invalid_edit": 1},
        attempts=(False, True),
        reward=0.9,
        reward_components={"tests": 1.0, "length": -0.1},
        messages=messages,
        final_files={"solution.py": "def f(xs):\n    return sum(x > 3 for x in xs)\n"},
    )


def text_of(renderable: object) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100).print(renderable)
    return stream.getvalue()


def written_run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    with MetricsWriter(run / "metrics.jsonl") as writer:
        writer.write("cpt", 10, loss=3.0)
        writer.write("rl", 4, reward_mean=0.25, **{"time/step_s": 1.0})
    (run / "summary.json").write_text(json.dumps({"rl_pass_at_1": 0.43}))
    record = rollout_record(TASK, made_rollout(), split="test", step=4)
    (run / "rollouts.jsonl").write_text(json.dumps(record) + "\n" + '{"torn')
    return run


def test_record_is_json_and_reads_back(tmp_path: Path):
    run = written_run(tmp_path)
    (record,) = read_rollouts(run)
    assert record["split"] == "test"
    assert record["step"] == 4
    assert record["kind"] == "comparison"
    assert record["stats"]["num_turns"] == 2
    assert record["messages"][0]["tool_calls"][0] == {
        "name": "edit",
        "arguments": {"line": 2, "old": " <", "new": " >"},
    }
    assert record["messages"][1]["tool_results"][1] == {"content": "fail 7", "is_error": True}
    assert record["instruction"] == TASK.instruction


def test_extra_fields_cannot_replace_the_outcome():
    assert rollout_record(TASK, made_rollout(), seed=3)["seed"] == 3
    with pytest.raises(ValueError, match="extra names passed"):
        rollout_record(TASK, made_rollout(), passed=False)


def test_changed_lines_is_the_diff_of_the_repository():
    lines = changed_lines(rollout_record(TASK, made_rollout()))
    assert [line for line in lines if line[0] in "+-" and line[1] == " "] == [
        "-    return sum(x < 3 for x in xs)",
        "+    return sum(x > 3 for x in xs)",
    ]
    assert changed_lines({"files": {"a.py": "1"}, "final_files": {}}) == []


def test_one_rollout_turn_by_turn(tmp_path: Path):
    shown, data = inspect_run(written_run(tmp_path), rollout=0)
    text = text_of(shown)
    for words in ("turn 1: assistant", "edit(line=2, old=' <', new=' >')", "← fail 7", "turn 2: assistant", "done",
                  "+    return sum(x > 3", "tests +1.0000", "length -0.1000", "passed"):  # fmt: skip
        assert words in text
    assert text.index("← fail 7") < text.index("turn 2")
    assert data["reward"] == 0.9


def test_overview_and_list(tmp_path: Path):
    run = written_run(tmp_path)
    text = text_of(inspect_run(run)[0])
    assert "reward_mean 0.25" in text
    assert "time/step_s" not in text
    assert "rl_pass_at_1" in text
    assert inspect_run(run)[1]["stages"]["rl"]["reward_mean"] == 0.25
    shown, data = inspect_run(run, show_list=True)
    assert "comparison" in text_of(shown)
    assert "messages" not in data["rollouts"][0]
    json.dumps(data)


def test_bad_folder_and_bad_number_say_what_is_accepted(tmp_path: Path):
    with pytest.raises(ValueError, match=r"accepted is a folder with at least one of config\.json"):
        load_run(tmp_path)
    with pytest.raises(ValueError, match="rollout is 5, accepted is 0 to 0"):
        inspect_run(written_run(tmp_path), rollout=5)


def test_chosen_rollouts_cover_what_can_happen():
    def record(step: int, **fields: object) -> dict[str, object]:
        return {"task_id": "t", "split": "test", "step": step, "passed": False, **fields}

    records = [record(step) for step in range(20)]
    records[3] |= {"passed": True, "attempts": [True]}
    records[5] |= {"passed": True, "attempts": [False, True]}
    records[7] |= {"stats": {"num_summaries": 1}}
    records[8] |= {"split": "ood"}
    chosen = choose_rollouts(records)
    assert len(chosen) == 6
    for index in (5, 7, 8):
        assert records[index] in chosen
    assert choose_rollouts(records) == chosen
    assert choose_rollouts([], 6) == []
    assert len(choose_rollouts(records[:2], 6)) == 2


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("summary.json", b"[]"),
        ("summary.json", b"\xff"),
        ("config.json", b"[1]"),
        ("rollouts.jsonl", b"{}\n"),
        ("rollouts.jsonl", b"[1]\n"),
        ("metrics.jsonl", b"{}\n"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=name):
        inspect_run(tmp_path)
