"""How an episode is written in tokens: prompts, turns, tool results and summaries to ids, sampled ids back to calls.

In: tasks, calls, results. Out: token ids; from sampled ids, tool calls or a precise error for each that cannot be read.

    prompt   <|task|> instruction { <|file|> path \\n numbered lines } [ <|summary|> summary <|end|> ] <|agent|>
    turn     text { <|edit|> LINE <|sep|> OLD <|sep|> NEW | <|run|> | <|read|> PATH [<|sep|> START [<|sep|> LIMIT]]
                  | <|search|> PATTERN | <|finish|> message } <|end|>
    results  { <|result|> content } <|agent|>
    summary  <|summarize|> summary <|end|>        (the request follows the last <|agent|> of a full window)

Source: report §2 and §6.2, row E6: one harness and one template for training, evaluation and use; row R3.
Choice: a call is opened by a special token and its arguments are parted by `<|sep|>`, so an edit costs some ten tokens
and no argument needs quoting. Special tokens cannot be written as text, so no file and no tool output forges a turn.
Choice: an edit of this template restores the repository first, so each edit is a fresh try and two wrong tries cannot
pile up.
Choice: an answer's leading word (`ok`, `pass`, `fail`, `error`) is a special token of its own.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence

from composer2.env.tools.lines import number_lines
from composer2.types import ParsedTurn, Task, TokenizerLike, ToolCall, ToolResult

CALL_NAMES = ("edit", "run", "read", "search", "finish")
MAX_INTEGER_DIGITS = 9
FOREIGN_CALL = re.compile(
    r'<(?:\|tool_call|minimax:tool_call|tool_call|function|invoke)|\{\s*"(?:name|tool|function|arguments)"\s*:'
)
"""Call formats of other models. In a turn without a readable call they are an error, not a final message (a parser that
silently matches nothing looks like a model that calls nothing)."""


def to_integer(text: str) -> int | str:
    """The number a short run of digits names, else the text itself, for the schema check to complain about."""
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= MAX_INTEGER_DIGITS else text


class PromptCache:
    """The opening tokens of recent tasks, because all samples of a group share one prompt."""

    def __init__(self, size: int) -> None:
        """Keep the prompts of the `size` tasks used last."""
        if size < 1:
            raise ValueError(f"PromptCache size is {size}, accepted is 1 or more")
        self._size = size
        self._entries: OrderedDict[str, tuple[Task, list[int]]] = OrderedDict()

    def get(self, task: Task, encode: Callable[[Task], list[int]]) -> list[int]:
        """Stored ids of the task's prompt, else those `encode` makes. The caller must not change the list."""
        entry = self._entries.get(task.task_id)
        if entry is not None and (entry[0] is task or _same_prompt(entry[0], task)):
            self._entries.move_to_end(task.task_id)
            return entry[1]
        ids = encode(task)
        self._entries[task.task_id] = (task, ids)
        self._entries.move_to_end(task.task_id)
        if len(self._entries) > self._size:
            self._entries.popitem(last=False)
        return ids


def _same_prompt(a: Task, b: Task) -> bool:
    return (a.instruction, a.recent_files, a.tools) == (b.instruction, b.recent_files, b.tools) and a.files == b.files


class TinyTemplate:
    """The template of the tiny presets; implements `types.Template`."""

    def __init__(self, tokenizer: TokenizerLike, *, num_cached_prompts: int = 64) -> None:
        """`tokenizer` must know the special names used above."""
        self.tokenizer = tokenizer
        self._id = {
            name: tokenizer.special_id(name)
            for name in (*CALL_NAMES, "task", "file", "sep", "end", "result", "error", "ok", "pass", "fail")
            + ("summarize", "summary", "agent")
        }
        self._call_of_id = {self._id[name]: name for name in CALL_NAMES}
        self._end = self._id["end"]
        self._prompts = PromptCache(num_cached_prompts)
        self.stop_ids: tuple[int, ...] = (self._end,)

    # -- rendering

    def render_prompt(self, task: Task, *, summary: Sequence[int] | None = None) -> list[int]:
        """Opening of a segment. `summary`: the sampled ids; a missing `<|end|>` is added, nothing else is changed."""
        ids = list(self._prompts.get(task, self._opening))
        if summary is not None:
            ids += [self._id["summary"], *map(int, summary)]
            if ids[-1] != self._end:
                ids.append(self._end)
        ids.append(self._id["agent"])
        return ids

    def _opening(self, task: Task) -> list[int]:
        ids = [self._id["task"], *self.tokenizer.encode(task.instruction)]
        for path in task.recent_files:
            if path not in task.files:
                raise ValueError(
                    f"Task.recent_files has {path!r}, accepted are paths of Task.files: {sorted(task.files)}"
                )
            ids += [self._id["file"], *self.tokenizer.encode(f"{path}\n{number_lines(task.files[path])}")]
        return ids

    def render_calls(self, calls: Sequence[ToolCall], *, text: str = "") -> list[int]:
        """Tokens of a turn that makes `calls`; ValueError for arguments this template has no place for."""
        ids = self.tokenizer.encode(text)
        for call in calls:
            if call.name not in CALL_NAMES:
                raise ValueError(f"ToolCall.name is {call.name!r}, accepted is one of {CALL_NAMES}")
            ids.append(self._id[call.name])
            for position, part in enumerate(_parts(call)):
                ids += ([self._id["sep"]] if position else []) + self.tokenizer.encode(part)
        return [*ids, self._end]

    def render_results(self, results: Sequence[ToolResult]) -> list[int]:
        """Tokens of the answers, one per call, then the token that gives the floor to the model."""
        ids: list[int] = []
        for result in results:
            ids.append(self._id["result"])
            ids += self._content(result)
        return [*ids, self._id["agent"]]

    def _content(self, result: ToolResult) -> list[int]:
        content = result.content
        if result.is_error:
            return [self._id["error"], *self.tokenizer.encode(content.removeprefix("error:"))]
        if content in ("ok", "pass"):
            return [self._id[content]]
        if content.startswith("fail ") and content[5:].replace(" ", "").isdigit():
            return [self._id["fail"], *self.tokenizer.encode(content[5:])]
        return self.tokenizer.encode(content)

    def render_summary_request(self) -> list[int]:
        """One token; it follows the `<|agent|>` of the window that is full."""
        return [self._id["summarize"]]

    def render_summary(self, text: str) -> list[int]:
        """A summary as the model would sample it."""
        return [*self.tokenizer.encode(text), self._end]

    # -- parsing

    def parse_turn(self, token_ids: Sequence[int]) -> ParsedTurn:
        """Read one generation. Never raises: whatever cannot be read becomes an error result at its place.

        The last call of a turn that lacks `<|end|>` may be cut and is not made.
        """
        ids = list(map(int, token_ids))
        ended = self._end in ids
        if ended:
            ids = ids[: ids.index(self._end)]
        starts = [i for i, token in enumerate(ids) if token in self._call_of_id]
        head = ids[: starts[0]] if starts else ids
        text = self.tokenizer.decode(head)
        calls: list[ToolCall | ToolResult] = []
        stray = next((token for token in head if self.tokenizer.is_special(token)), None)
        if stray is not None:
            calls.append(malformed(f"{self.tokenizer.decode([stray])} is not a call"))
        elif not starts and ended and FOREIGN_CALL.search(text):
            calls.append(malformed("a call begins with its own token, as <|run|>"))
        for start, stop in zip(starts, [*starts[1:], len(ids)], strict=False):
            name = self._call_of_id[ids[start]]
            if stop == len(ids) and not ended:
                calls.append(malformed(f"{name} was cut before <|end|>"))
            else:
                calls.append(self._parse_call(name, ids[start + 1 : stop]))
        return ParsedTurn(text=text, calls=tuple(calls), ended=ended, num_text_tokens=len(head))

    def _parse_call(self, name: str, ids: Sequence[int]) -> ToolCall | ToolResult:
        pieces: list[list[int]] = [[]]
        for token in ids:
            if token == self._id["sep"]:
                pieces.append([])
            elif self.tokenizer.is_special(token):
                return malformed(f"{self.tokenizer.decode([token])} inside the arguments of {name}")
            else:
                pieces[-1].append(token)
        parts = [self.tokenizer.decode(piece) for piece in pieces]
        if name == "edit":
            if len(parts) != 3:
                return malformed(f"edit takes line, old, new separated by <|sep|>; got {_count(parts)}")
            line, old, new = parts
            return ToolCall(name="edit", arguments={"line": to_integer(line), "old": old, "new": new, "restart": True})
        if name == "run":
            return ToolCall(name="run") if parts == [""] else malformed("run takes no arguments")
        if name == "read":
            if len(parts) > 3:
                return malformed(f"read takes path, start, limit separated by <|sep|>; got {_count(parts)}")
            numbers = dict(zip(("start", "limit"), map(to_integer, parts[1:]), strict=False))
            return ToolCall(name="read", arguments={"path": parts[0], **numbers})
        if len(parts) != 1:
            return malformed(f"{name} takes 1 part; got {_count(parts)}")
        if name == "search":
            return ToolCall(name="search", arguments={"pattern": parts[0]})
        return ToolCall(name="finish", arguments={"message": parts[0]} if parts[0] else {})


def malformed(message: str) -> ToolResult:
    """The answer to a call that could not be read."""
    return ToolResult(content=f"error: {message}", is_error=True, event="malformed_call")


def _count(parts: Sequence[str]) -> str:
    return f"{len(parts)} part" if len(parts) == 1 else f"{len(parts)} parts"


def _parts(call: ToolCall) -> list[str]:
    """Arguments of a call in the order the template writes them."""
    arguments = dict(call.arguments)
    if arguments.get("restart") is True:
        del arguments["restart"]
    names = {"edit": ("line", "old", "new"), "run": (), "read": ("path", "start", "limit")}.get(
        call.name, ("pattern",) if call.name == "search" else ("message",)
    )
    given = [name for name in names if name in arguments]
    required = {"edit": 3, "read": 1, "search": 1}.get(call.name, 0)
    if list(arguments.keys() - set(names)) or given != list(names[: len(given)]) or len(given) < required:
        raise ValueError(f"arguments of {call.name} are {dict(call.arguments)}, accepted in this template are {names}")
    return [str(arguments[name]) for name in given]
