"""What a run says and records: a console with live progress, metrics as JSON lines. The only file that prints.

In: stages, steps and figures of a run. Out: text on a terminal, or JSON events on standard output, and `metrics.jsonl`.

Source: rows X2 X4 R7.
Choice: every figure that depends on the clock carries the key prefix `time/`, so that two runs of the same seed can be
compared line by line after dropping those keys, and an interrupted and resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Mode = Literal["rich", "quiet", "json"]
MODES: tuple[Mode, ...] = ("rich", "quiet", "json")
TIME_PREFIX = "time/"
PLAIN_SECONDS = 10.0
"""Seconds between progress lines when standard output is not a terminal."""


# ---------------------------------------------------------------------------------------------------------------------
# Figures as text


def format_figure(value: Any) -> str:
    """A number as a reader wants it: 4 significant digits, thousands grouped, integers whole."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def format_seconds(seconds: float) -> str:
    """Seconds as `42s`, `3m05s` or `1h07m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _figures_line(figures: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {format_figure(value)}" for name, value in figures.items())


# ---------------------------------------------------------------------------------------------------------------------
# Console


class Stage:
    """One stage of a run on the console, a context manager: left with an exception, it reports where it stopped."""

    def __init__(self, console: Console, name: str, total: int, first_step: int) -> None:
        self.name = name
        self.total = total
        self.step = first_step
        self.figures: dict[str, Any] = {}
        self._console = console
        self._first_step = first_step
        self._start = console.clock()

    @property
    def elapsed(self) -> float:
        """Seconds since this stage began in this process."""
        return self._console.clock() - self._start

    @property
    def eta(self) -> float | None:
        """Seconds to go at the mean speed of this process (steps before a resume do not count); None before a step."""
        done = self.step - self._first_step
        return self.elapsed / done * (self.total - self.step) if done > 0 else None

    def update(self, step: int, **figures: Any) -> None:
        """`step` steps are done; `figures` replace the live figures of the same names."""
        self.step = step
        self.figures.update(figures)
        self._console._on_progress(self)

    def end(self, **figures: Any) -> None:
        """The stage is complete; `figures` are its result."""
        self.figures.update(figures)
        self._console._on_stage_end(self, stopped=False)

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.current is self:
            self._console._on_stage_end(self, stopped=kind is not None)


class Console:
    """Where a command reports. `rich`: live bar on a terminal, plain lines elsewhere; `quiet`: only final lines;
    `json`: one JSON object per event on `stream`. Errors go to `error_stream` in every mode but `json`.

    At most one stage is open at a time. `clock` returns seconds and is an argument so that tests need not wait.
    """

    def __init__(
        self,
        mode: Mode = "rich",
        *,
        stream: TextIO | None = None,
        error_stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"Console.mode is {mode!r}, accepted are {', '.join(MODES)}")
        self.mode = mode
        self.clock = clock
        self.current: Stage | None = None
        self._stream = stream if stream is not None else sys.stdout
        self._error_stream = error_stream if error_stream is not None else sys.stderr
        self._rich = RichConsole(file=self._stream, highlight=False, soft_wrap=False)
        self._live: Live | None = None
        self._planned: tuple[str, ...] = ()
        self._last_line = -math.inf

    # Stages

    def plan(self, stages: Sequence[str]) -> None:
        """Name the stages to come, so that each can say `2/5`."""
        self._planned = tuple(stages)

    def stage(self, name: str, *, total: int, first_step: int = 0, detail: str = "") -> Stage:
        """Open a stage of `total` steps, `first_step` of them done before a resume."""
        assert self.current is None, f"stage {self.current.name if self.current else ''} is still open"
        stage = Stage(self, name, total, first_step)
        self.current = stage
        self._last_line = self.clock()
        if self.mode == "json":
            self._event("stage_start", stage=name, total=total, first_step=first_step, detail=detail)
        elif self.mode == "rich":
            resumed = f" (resumed at step {first_step})" if first_step else ""
            self._line(f"{self._label(name)}  {detail}{resumed}".rstrip(), style="bold")
            if self._rich.is_terminal:
                self._live = Live(
                    self._bar(stage),
                    console=self._rich,
                    refresh_per_second=4,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start()
        return stage

    def _label(self, name: str) -> str:
        if name in self._planned:
            return f"[{self._planned.index(name) + 1}/{len(self._planned)}] {name}"
        return name

    def _bar(self, stage: Stage) -> RenderableType:
        eta = format_seconds(stage.eta) if stage.eta is not None else "–"
        row = Table.grid(padding=(0, 1), expand=False)
        row.add_row(
            Text(self._label(stage.name), style="bold cyan"),
            ProgressBar(total=max(stage.total, 1), completed=stage.step, width=28),
            Text(f"{stage.step}/{stage.total}"),
            Text(f"{format_seconds(stage.elapsed)} · ETA {eta}", style="dim"),
        )
        return Group(row, Text(_figures_line(stage.figures), style="green", overflow="ellipsis", no_wrap=True))

    def _on_progress(self, stage: Stage) -> None:
        if self.mode == "json":
            self._event("progress", stage=stage.name, step=stage.step, total=stage.total, **_clocked(stage))
        elif self._live is not None:
            self._live.update(self._bar(stage))
        elif self.mode == "rich" and self.clock() - self._last_line >= PLAIN_SECONDS:
            self._last_line = self.clock()
            eta = f"  ETA {format_seconds(stage.eta)}" if stage.eta is not None else ""
            self._line(f"  {stage.name} {stage.step}/{stage.total}  {_figures_line(stage.figures)}{eta}")

    def _on_stage_end(self, stage: Stage, *, stopped: bool) -> None:
        self._stop_live()
        self.current = None
        if self.mode == "json":
            self._event("stage_stop" if stopped else "stage_end", stage=stage.name, step=stage.step, **_clocked(stage))
        elif self.mode == "rich":
            verb = f"stopped at step {stage.step}/{stage.total} after" if stopped else "done in"
            self._line(f"  {stage.name} {verb} {format_seconds(stage.elapsed)}  {_figures_line(stage.figures)}")

    # Lines

    def note(self, text: str, **fields: Any) -> None:
        """Something worth knowing while the run goes on (which pod backend, a checkpoint, a resume)."""
        if self.mode == "json":
            self._event("note", text=text, **fields)
        elif self.mode == "rich":
            self._line(f"  {text}", style="dim")

    def warning(self, text: str, **fields: Any) -> None:
        """Something the user should look at; shown in every mode."""
        if self.mode == "json":
            self._event("warning", text=text, **fields)
        else:
            print(f"warning: {text}", file=self._error_stream, flush=True)

    def error(self, text: str, **fields: Any) -> None:
        """Why a command fails; shown in every mode."""
        self._stop_live()
        if self.mode == "json":
            self._event("error", text=text, **fields)
        else:
            print(f"error: {text}", file=self._error_stream, flush=True)

    def final(self, text: str, **fields: Any) -> None:
        """A result line: the only thing the quiet mode prints."""
        if self.mode == "json":
            self._event("final", text=text, **fields)
        else:
            self._line(text)

    def show(self, renderable: RenderableType, data: Any) -> None:
        """The answer of a command such as `inspect`: `renderable` for people, `data` as one JSON object otherwise."""
        if self.mode == "json":
            self._write(json.dumps(_plain(data), allow_nan=False))
        else:
            self._rich.print(renderable)

    def close(self) -> None:
        """Give the terminal back. Idempotent."""
        self._stop_live()

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, text: str, *, style: str = "") -> None:
        self._rich.print(Text(text, style=style), soft_wrap=True)
        self._stream.flush()

    def _event(self, event: str, **fields: Any) -> None:
        self._write(json.dumps(_plain({"event": event, **fields}), allow_nan=False))

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def fail(text: str, *, exit_code: int = 2) -> NoReturn:
    """Print why a command line is refused and leave with `exit_code` (2: bad usage)."""
    print(f"error: {text}", file=sys.stderr, flush=True)
    raise SystemExit(exit_code)


def _clocked(stage: Stage) -> dict[str, Any]:
    return {"figures": dict(stage.figures), "time/elapsed_s": stage.elapsed, "time/eta_s": stage.eta}


# ---------------------------------------------------------------------------------------------------------------------
# Metrics


def _plain(value: Any) -> Any:
    """`value` with numpy and torch scalars as Python numbers, and non-finite floats as the strings nan, inf, -inf."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Path):
        return str(value)
    raise TypeError(
        f"a record holds {value!r} of type {type(value).__name__}, accepted are numbers, text, lists, dicts"
    )


def _revive(value: Any) -> Any:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    return value


class MetricsWriter:
    """Appends one JSON object per line, `{"stage": …, "step": …, …}`, each flushed, so that a killed run loses no line.

    Floats are written by `repr`, which reads back to the same bits.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, stage: str, step: int, **values: Any) -> None:
        """Append one record. Keyword names with a slash are given as `**{"time/step_s": …}`."""
        self._file.write(json.dumps(_plain({"stage": stage, "step": step, **values}), allow_nan=False) + "\n")
        self._file.flush()

    def truncate_after(self, last_steps: Mapping[str, int]) -> None:
        """Drop every record of a named stage whose step is above the given one, and a torn last line.

        A resumed run calls this with the steps of its checkpoint, then writes the lost steps again; `{"rl": -1}` drops
        a stage whole. Stages not named stay. The file is replaced in one rename.
        """
        self._file.close()
        kept = [
            line
            for line, record in _whole_lines(self.path, ("stage", "step"))
            if record["stage"] not in last_steps or record["step"] <= last_steps[record["stage"]]
        ]
        partial = self.path.with_name(self.path.name + ".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _whole_lines(path: Path, required: Sequence[str] = ()) -> list[tuple[str, dict[str, Any]]]:
    """Lines of a JSONL file with their records, which have the `required` fields. A last line without a newline was
    torn by a kill and is left out."""
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start})") from error
    lines = text.split("\n")[:-1]
    pairs = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path} line {number} is not JSON ({error.msg}), accepted is one object a line"
            ) from error
        if not isinstance(record, dict) or any(name not in record for name in required):
            needed = f" with {', '.join(required)}" if required else ""
            raise ValueError(f"{path} line {number} is {line[:60]}, accepted is one object a line{needed}")
        pairs.append((line, record))
    return pairs


def read_jsonl(path: Path | str, required: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Objects of a JSONL file in order; an absent file is an empty list, a torn last line is left out. ValueError names
    the file and the line that is no object with the `required` fields."""
    return [record for _, record in _whole_lines(Path(path), required)]


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Records of a metrics file in order, as `read_jsonl`, with nan and infinities as floats again."""
    return [{key: _revive(value) for key, value in record.items()} for record in read_jsonl(path, ("stage", "step"))]


def without_time(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The records with every `time/` field dropped: what must be equal between two runs of one seed."""
    return [{k: v for k, v in record.items() if not k.startswith(TIME_PREFIX)} for record in records]
