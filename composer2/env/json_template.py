"""A template for models that write a call as a line of text: `{"name": …, "arguments": {…}}`.

In and out as in `template.py`; the frame of special tokens is the same, so is the schema check behind it.

    turn     { text line | {"name": NAME, "arguments": {…}} } <|end|>

Source: row E6 (one harness for every model; a malformed call gets a precise error and never crashes).
Choice: a line that starts with `{` is a call or an error, never prose: a call that no parser saw is the worse fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from composer2.env.template import FOREIGN_CALL, PromptCache, malformed
from composer2.env.tools.lines import number_lines
from composer2.env.tools.registry import tool_specs
from composer2.types import ParsedTurn, Task, TokenizerLike, ToolCall, ToolResult

CALL_START = re.compile(r"^[ \t]*\{", re.MULTILINE)
SUMMARY_REQUEST = "The context is full. Summarise what was tried and what is left to do.\n"


class JsonTemplate:
    """Calls as JSON lines; implements `types.Template`."""

    def __init__(self, tokenizer: TokenizerLike, *, num_cached_prompts: int = 64) -> None:
        """`tokenizer` must know the special names task, file, result, summary, agent and end."""
        self.tokenizer = tokenizer
        self._id = {name: tokenizer.special_id(name) for name in ("task", "file", "result", "summary", "agent", "end")}
        self._end = self._id["end"]
        self._prompts = PromptCache(num_cached_prompts)
        self._decoder = json.JSONDecoder(parse_constant=_no_constant)
        self.stop_ids: tuple[int, ...] = (self._end,)

    def render_prompt(self, task: Task, *, summary: Sequence[int] | None = None) -> list[int]:
        """Tool specifications, instruction, recent files, then a summary if there is one."""
        ids = list(self._prompts.get(task, self._opening))
        if summary is not None:
            ids += [self._id["summary"], *map(int, summary)]
            if ids[-1] != self._end:
                ids.append(self._end)
        ids.append(self._id["agent"])
        return ids

    def _opening(self, task: Task) -> list[int]:
        specs = [
            json.dumps({"name": s.name, "description": s.description, "parameters": s.parameters})
            for s in tool_specs(task.tools)
        ]
        head = "\n".join(("Tools:", *specs, 'Call one by a line {"name": NAME, "arguments": {…}}.', task.instruction))
        ids = [self._id["task"], *self.tokenizer.encode(head)]
        for path in task.recent_files:
            ids += [self._id["file"], *self.tokenizer.encode(f"{path}\n{number_lines(task.files[path])}")]
        return ids

    def render_calls(self, calls: Sequence[ToolCall], *, text: str = "") -> list[int]:
        """Text, then one line a call."""
        lines = [json.dumps({"name": call.name, "arguments": dict(call.arguments)}) for call in calls]
        return [*self.tokenizer.encode("\n".join(([text] if text else []) + lines)), self._end]

    def render_results(self, results: Sequence[ToolResult]) -> list[int]:
        """Plain text after `<|result|>`, one per call."""
        ids: list[int] = []
        for result in results:
            ids += [self._id["result"], *self.tokenizer.encode(result.content)]
        return [*ids, self._id["agent"]]

    def render_summary_request(self) -> list[int]:
        """A sentence."""
        return self.tokenizer.encode(SUMMARY_REQUEST)

    def render_summary(self, text: str) -> list[int]:
        """A summary as the model would sample it."""
        return [*self.tokenizer.encode(text), self._end]

    def parse_turn(self, token_ids: Sequence[int]) -> ParsedTurn:
        """Read one generation. Never raises; an object that is no call, or no JSON, becomes an error result."""
        ids = list(map(int, token_ids))
        ended = self._end in ids
        source = self.tokenizer.decode(ids[: ids.index(self._end)] if ended else ids)
        calls: list[ToolCall | ToolResult] = []
        prose, position = [], 0
        while (match := CALL_START.search(source, position)) is not None:
            prose.append(source[position : match.start()])
            call, position = self._parse_call(source, match.end() - 1)
            calls.append(call)
        text = "".join((*prose, source[position:])).strip()
        if not calls and ended and FOREIGN_CALL.search(text):
            calls.append(malformed('a call is a line {"name": NAME, "arguments": {…}}'))
        num_text = len(self.tokenizer.encode(text)) if calls else len(ids) - ended
        return ParsedTurn(text=text, calls=tuple(calls), ended=ended, num_text_tokens=num_text)

    def _parse_call(self, source: str, start: int) -> tuple[ToolCall | ToolResult, int]:
        """The call that opens at `start`, and where to read on; after an error that is the next line."""
        next_line = source.find("\n", start)
        next_line = len(source) if next_line < 0 else next_line
        try:
            value, stop = self._decoder.raw_decode(source, start)
        except json.JSONDecodeError as problem:
            where = f"line {problem.lineno} column {problem.colno}"
            return _bad_json(f"broken JSON at {where}: {problem.msg}"), next_line
        except (ValueError, RecursionError) as problem:
            return _bad_json(f"JSON not accepted: {str(problem)[:100]}"), next_line
        if not isinstance(value.get("name"), str) or not isinstance(value.get("arguments", {}), dict):
            return malformed("a call needs a string `name` and an object `arguments`"), stop
        if value.keys() - {"name", "arguments"}:
            extra = sorted(value.keys() - {"name", "arguments"})[0][:60]
            return malformed(f"a call holds `name` and `arguments`; got {extra!r} too"), stop
        return ToolCall(name=value["name"], arguments=value.get("arguments", {})), stop


def _bad_json(message: str) -> ToolResult:
    return ToolResult(content=f"error: {message}", is_error=True, event="bad_json")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")
