"""The tools a model may call: their schemas, and one object per episode that makes the calls.

In: a `ToolCall`. Out: a `ToolResult`, whatever the call holds; only a failing machine raises (`PodError`).

Source: report §6.2 (tool set and strictness decided per environment); rows E5 E6 (a precise error and a countable
event for a malformed call).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from composer2.env.grade import compare_outcome, run_tests
from composer2.env.tools.files import Workspace, edit_tool, error, ok, read_tool, search_tool
from composer2.env.tools.schema import check_arguments, show
from composer2.types import CallOutcome, CallStatus, Task, TestCase, ToolCall, ToolResult


@dataclass(frozen=True, kw_only=True)
class ToolSpec:
    """What a model is told about a tool."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema of the arguments."""


def _spec(name: str, description: str, required: Sequence[str] = (), **properties: Mapping[str, Any]) -> ToolSpec:
    schema = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return ToolSpec(name=name, description=description, parameters=schema)


_TEXT: Mapping[str, Any] = {"type": "string"}
_COUNT: Mapping[str, Any] = {"type": "integer", "minimum": 1}

_TODO: Mapping[str, Any] = {
    "type": "object",
    "properties": {"text": _TEXT, "done": {"type": "boolean"}},
    "required": ["text", "done"],
    "additionalProperties": False,
}

TOOLS: Mapping[str, ToolSpec] = {
    spec.name: spec
    for spec in (
        _spec("read", "Show a file with numbered lines.", ["path"], path=_TEXT, start=_COUNT, limit=_COUNT),
        _spec("search", "List the lines that hold a text.", ["pattern"], pattern=_TEXT),
        _spec(
            "edit",
            "Replace `old` by `new` on or near a line. `old` must begin and end at whole tokens. "
            "`restart` first brings back the files as they were at the start.",
            ["line", "old", "new"],
            line=_COUNT,
            old=_TEXT,
            new=_TEXT,
            path=_TEXT,
            restart={"type": "boolean"},
        ),
        _spec("run", "Run the visible tests; answers `pass`, or `fail` and how many passed."),
        _spec("todo", "Write the whole to-do list anew.", ["items"], items={"type": "array", "items": _TODO}),
        _spec("finish", "End the episode.", message=_TEXT),
    )
}
"""Every tool there is. A task names the ones its environment offers."""


def tool_specs(names: Sequence[str]) -> tuple[ToolSpec, ...]:
    """Specs of the named tools, in order; ValueError for a name that does not exist."""
    for name in names:
        if name not in TOOLS:
            raise ValueError(f"tool is {name!r}, accepted is one of {sorted(TOOLS)}")
    return tuple(TOOLS[name] for name in names)


class OutcomeSource(Protocol):
    """Finds the outcomes of a task's tests on given files; `PodGrader` is one."""

    async def outcomes(self, task: Task, final_files: Mapping[str, str]) -> Sequence[CallOutcome]:
        """Outcomes of the fail-to-pass tests, then of the pass-to-pass tests."""
        ...


def run_answer(tests: Sequence[TestCase], outcomes: Sequence[CallOutcome], *, locate: bool) -> str:
    """What `run` answers: `pass`, or `fail` and how many tests passed (9 for more).

    With `locate` the line follows on which the first failing test's call ended, as a traceback would tell it; 0 where
    it reached no line."""
    passed = [compare_outcome(test, outcome) for test, outcome in zip(tests, outcomes, strict=True)]
    if all(passed):
        return "pass"
    line = f" {outcomes[passed.index(False)].line}" if locate else ""
    return f"fail {min(sum(passed), 9)}{line}"


class Toolbox:
    """The tools of one episode. Counts events, remembers every test run and whether the model has finished."""

    def __init__(
        self,
        workspace: Workspace,
        *,
        run_timeout: float = 2.0,
        locate: bool = False,
        lenient: Sequence[str] = (),
        shared_runs: OutcomeSource | None = None,
    ) -> None:
        """`locate`: a failed `run` also names a line, see `run_answer`. `lenient`: tools whose arguments are checked
        leniently. `shared_runs`: answers `run` in place of the episode's own pod, as long as no code ran there."""
        task = workspace.task
        self._workspace, self._run_timeout, self._locate = workspace, run_timeout, locate
        self._specs = {spec.name: spec for spec in tool_specs(task.tools)}
        self._lenient, self._shared_runs = frozenset(lenient), shared_runs
        self._tools: dict[str, Callable[[Mapping[str, Any]], Awaitable[ToolResult]]] = {
            "read": lambda arguments: read_tool(workspace, arguments),
            "search": lambda arguments: search_tool(workspace, arguments),
            "edit": lambda arguments: edit_tool(workspace, arguments),
            "run": self._run,
            "todo": self._todo,
            "finish": self._finish,
        }
        self.events: Counter[str] = Counter()
        self.attempts: list[bool] = []
        self.is_finished = False

    async def call(self, call: ToolCall) -> ToolResult:
        """Make one call. Errors are answers; `PodError` means the machine failed."""
        result = await self._call(call)
        if result.event is not None:
            self.events[result.event] += 1
        return replace(result, call_id=call.call_id) if call.call_id else result

    async def _call(self, call: ToolCall) -> ToolResult:
        spec = self._specs.get(call.name)
        if spec is None:
            return error(f"no tool {show(call.name)}; tools are {', '.join(self._specs)}", "unknown_tool")
        checked = check_arguments(call.arguments, spec.parameters, lenient=call.name in self._lenient)
        if checked.problems:
            return error("; ".join(checked.problems), "bad_arguments")
        if checked.forgiven:
            self.events["forgiven_arguments"] += 1
        return await self._tools[call.name](checked.arguments)

    async def _run(self, arguments: Mapping[str, Any]) -> ToolResult:
        task = self._workspace.task
        tests = (*task.fail_to_pass, *task.pass_to_pass)
        if not tests:
            return error("there are no tests", "no_tests")
        files = self._workspace.known_files()
        outcomes: Sequence[CallOutcome]
        if self._shared_runs is not None and files is not None:
            outcomes = await self._shared_runs.outcomes(task, files)
        else:
            outcomes = await run_tests(await self._workspace.pod(), tests, timeout=self._run_timeout)
        if any(outcome.status is CallStatus.TIMEOUT for outcome in outcomes):
            self.events["test_timeout"] += 1
        answer = run_answer(tests, outcomes, locate=self._locate)
        self.attempts.append(answer == "pass")
        return ok(answer)

    async def _todo(self, arguments: Mapping[str, Any]) -> ToolResult:
        num_open = sum(not item["done"] for item in arguments["items"])
        return ok(f"{num_open} of {len(arguments['items'])} open")

    async def _finish(self, arguments: Mapping[str, Any]) -> ToolResult:
        self.is_finished = True
        return ok("ok")
