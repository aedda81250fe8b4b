"""Reading a run directory: what happened, which rollouts were kept, and one rollout turn by turn.

In: a run directory (`config.json`, `metrics.jsonl`, `summary.json`, `rollouts.jsonl`; each may be missing). Out: rich
renderables for people and plain dicts for programs. Also the record format of `rollouts.jsonl`.

Source: rows X1 (inspect run) X3.
Choice: a record holds messages, not tokens, because it is for reading; training data is never read back from it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from composer2.log import format_figure, read_jsonl, read_metrics
from composer2.types import Message, Rollout, Task

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
ROLLOUTS_FILE = "rollouts.jsonl"

Record = dict[str, Any]


# ---------------------------------------------------------------------------------------------------------------------
# Records of rollouts


def rollout_record(task: Task, rollout: Rollout, **extra: Any) -> Record:
    """One line of `rollouts.jsonl`. `extra` adds fields such as `split` and `step`; it cannot replace a field."""
    record: Record = {
        "task_id": task.task_id,
        "sample_index": rollout.sample_index,
        "split": "",
        "step": 0,
        "kind": str(task.meta.get("bug_kind", "")),
        "category": task.category.value,
        "passed": rollout.passed,
        "passed_frac": rollout.passed_frac,
        "reward": rollout.reward,
        "reward_components": dict(rollout.reward_components),
        "status": rollout.status.value,
        "stats": dataclasses.asdict(rollout.stats),
        "events": dict(rollout.events),
        "attempts": list(rollout.attempts),
        "error": rollout.error,
        "messages": [_message_record(message) for message in rollout.messages],
        "instruction": task.instruction,
        "files": dict(task.files),
        "final_files": dict(rollout.final_files),
    }
    taken = sorted((set(extra) & set(record)) - {"split", "step"})
    if taken:
        raise ValueError(f"extra names {', '.join(taken)}, accepted are split, step and names not in a record")
    return record | extra


def _message_record(message: Message) -> Record:
    return {
        "role": message.role.value,
        "content": message.content,
        **({"reasoning": message.reasoning} if message.reasoning else {}),
        "tool_calls": [{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls],
        "tool_results": [{"content": result.content, "is_error": result.is_error} for result in message.tool_results],
    }


def read_rollouts(run_dir: Path | str) -> list[Record]:
    """Records of a run in order; no file is an empty list, a torn last line is left out."""
    return read_jsonl(Path(run_dir) / ROLLOUTS_FILE, ("task_id", "split", "step"))


def changed_lines(record: Mapping[str, Any]) -> list[str]:
    """Unified diff, without context, of what the rollout did to the repository."""
    before, after = record.get("files", {}), record.get("final_files", {})
    lines: list[str] = []
    for path in sorted(set(before) | set(after)) if after else []:
        old, new = before.get(path, "").splitlines(), after.get(path, "").splitlines()
        lines += difflib.unified_diff(old, new, path, path, n=0, lineterm="")
    return lines


def _traits(record: Mapping[str, Any]) -> set[str]:
    attempts = record.get("attempts", [])
    traits = {f"split {record.get('split', '')}", "passed" if record.get("passed") else "failed"}
    if record.get("passed") and len(attempts) > 1:
        traits.add("passed after a failed try")
    if record.get("stats", {}).get("num_summaries", 0):
        traits.add("summarised")
    if record.get("events"):
        traits.add("events")
    if record.get("stats", {}).get("num_turns", 0) > 2:
        traits.add("long")
    return traits


def choose_rollouts(records: Sequence[Record], count: int = 6) -> list[Record]:
    """At most `count` records that together show the most: each next one adds the most unseen traits (passed, failed,
    summarised, events, splits …), the latest step first among equals. The same records give the same choice."""
    left = sorted(range(len(records)), key=lambda i: (-int(records[i].get("step", 0)), i))
    chosen: list[Record] = []
    seen: set[str] = set()
    while left and len(chosen) < count:
        best = max(left, key=lambda i: len(_traits(records[i]) - seen))  # max keeps the first among equals
        left.remove(best)
        seen |= _traits(records[best])
        chosen.append(records[best])
    return chosen


# ---------------------------------------------------------------------------------------------------------------------
# A run


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The readable files of a run directory. A missing file is an empty value."""

    path: Path
    config: Record
    metrics: list[Record]
    summary: Record
    rollouts: list[Record]


def load_run(run_dir: Path | str) -> RunFiles:
    """Read a run directory. ValueError when the folder holds none of the files of a run, or a model."""
    path = Path(run_dir)
    names = (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, ROLLOUTS_FILE)
    if not any((path / name).is_file() for name in names):
        raise ValueError(
            f"run directory is {str(path)!r}, accepted is a folder with at least one of {', '.join(names)}"
        )
    config = _read_object(path / CONFIG_FILE)
    if "model_type" in config:
        raise ValueError(f"run directory is {str(path)!r}, which holds a model, accepted is the folder of a run")
    return RunFiles(
        path=path,
        config=config,
        metrics=read_metrics(path / METRICS_FILE),
        summary=_read_object(path / SUMMARY_FILE),
        rollouts=read_rollouts(path),
    )


def _read_object(path: Path) -> Record:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} line {error.lineno} is not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {str(value)[:60]}, accepted is one JSON object")
    return value


def overview_data(run: RunFiles) -> Record:
    """The run in one object: last record of every stage, the summary, and how many rollouts are kept."""
    stages: dict[str, Record] = {}
    for record in run.metrics:
        stages[record["stage"]] = record
    return {
        "run": str(run.path),
        "stages": stages,
        "summary": run.summary,
        "num_rollouts": len(run.rollouts),
        "config": run.config,
    }


def overview(run: RunFiles) -> RenderableType:
    """The same for people."""
    stages = Table("stage", "last step", "figures", title=f"Run {run.path.name}", title_justify="left")
    for name, record in overview_data(run)["stages"].items():
        figures = [
            f"{k} {format_figure(v)}" for k, v in record.items() if k not in ("stage", "step") and _is_shown(k, v)
        ]
        stages.add_row(name, str(record["step"]), "  ".join(figures))
    parts: list[RenderableType] = [stages if run.metrics else Text("No metrics yet.")]
    if run.summary:
        table = Table("figure", "value", title="Summary", title_justify="left")
        for key, value in run.summary.items():
            table.add_row(key, format_figure(value))
        parts.append(table)
    parts.append(Text(f"{len(run.rollouts)} rollouts are kept; their number after the folder shows one turn by turn."))
    return Group(*parts)


def _is_shown(key: str, value: Any) -> bool:
    return isinstance(value, int | float | str) and not key.startswith("time/")


def rollout_list(records: Sequence[Record]) -> RenderableType:
    """One row a rollout, numbered as `inspect run DIR N` counts them."""
    table = Table("N", "split", "step", "kind", "task", "passed", "reward", "turns", "tokens", "summaries", "events")
    for number, record in enumerate(records):
        stats = record.get("stats", {})
        table.add_row(
            str(number),
            str(record.get("split", "")),
            str(record.get("step", "")),
            str(record.get("kind", "")),
            str(record["task_id"])[:16],
            Text("yes", style="green") if record.get("passed") else Text("no", style="red"),
            f"{record.get('reward', 0.0):.3f}",
            str(stats.get("num_turns", "")),
            str(stats.get("sampled_tokens", "")),
            str(stats.get("num_summaries", "")),
            ", ".join(f"{name} {count}" for name, count in record.get("events", {}).items()),
        )
    return table


def rollout_view(record: Mapping[str, Any]) -> RenderableType:
    """One rollout turn by turn: the task, every message with calls and results, the outcome and its reward terms."""
    verdict = Text("passed", style="bold green") if record.get("passed") else Text("not passed", style="bold red")
    head = Text.assemble(
        f"{record.get('split', '')} step {record.get('step', '')}  task {record['task_id']}  ", verdict,
        f"  reward {record.get('reward', 0.0):.3f}  {record.get('status', '')}",
    )  # fmt: skip
    parts: list[RenderableType] = [head, Rule("task")]
    if record.get("instruction"):
        parts.append(Text(record["instruction"]))
    for path, text in record.get("files", {}).items():
        parts += [Text(path, style="bold"), Text(numbered(text), style="dim")]
    turn = 0
    for message in record.get("messages", []):
        turn += message["role"] == "assistant"
        title = f"turn {turn}: {message['role']}" if message["role"] == "assistant" else message["role"]
        parts.append(Rule(title, align="left"))
        if message.get("reasoning"):
            parts.append(Text(message["reasoning"], style="dim italic"))
        if message.get("content"):
            parts.append(Text(message["content"]))
        parts += [Text(f"→ {call_text(call)}", style="cyan") for call in message.get("tool_calls", [])]
        for result in message.get("tool_results", []):
            parts.append(Text(f"← {result['content']}", style="red" if result.get("is_error") else "green"))
    parts.append(Rule("outcome"))
    for line in changed_lines(record):
        parts.append(Text(line, style={"+": "green", "-": "red"}.get(line[0], "dim")))
    parts += [Text(f"{name} {value:+.4f}") for name, value in record.get("reward_components", {}).items()]
    if record.get("error"):
        parts.append(Text(f"error: {record['error']}", style="red"))
    return Group(*parts)


def numbered(text: str) -> str:
    """The lines of a file with their numbers, as the prompt shows them."""
    return "\n".join(f"{number:>3} {line}" for number, line in enumerate(text.splitlines(), start=1))


def call_text(call: Mapping[str, Any]) -> str:
    """A tool call on one line: `edit(line=3, old=' <', new=' <=')`."""
    return f"{call['name']}({', '.join(f'{k}={v!r}' for k, v in call.get('arguments', {}).items())})"


def inspect_run(
    run_dir: Path | str, *, rollout: int | None = None, show_list: bool = False
) -> tuple[RenderableType, Record]:
    """What `composer2 inspect run DIR` shows, for people and as one dict: the overview, the list of rollouts, or
    rollout number `rollout`. ValueError names an impossible number."""
    run = load_run(run_dir)
    if rollout is not None:
        if not 0 <= rollout < len(run.rollouts):
            raise ValueError(f"rollout is {rollout}, accepted is 0 to {len(run.rollouts) - 1} in {run.path}")
        return rollout_view(run.rollouts[rollout]), run.rollouts[rollout]
    if show_list:
        brief = [{k: v for k, v in r.items() if k not in ("messages", "files", "final_files")} for r in run.rollouts]
        return rollout_list(run.rollouts), {"run": str(run.path), "rollouts": brief}
    return overview(run), overview_data(run)
