"""A sampled turn in a model's own format: token ids go in, parts of exactly these ids and the calls they make come out.

    ids      | <think> … </think> | text | <tool_call> … </tool_call> | <|im_end|> |
    parts    | think              | text | calls                      | end        |  tail

Parts tile the ids: none is lost, repeated or changed, and nothing is tokenised again. Marks are found as token ids;
text is decoded for reading only, between them.

Source: row E6 (a malformed call gets a precise error and never crashes); the tool-calling guides of the models.
Choice: a closed block is a whole call even if the turn was cut after it; an open one is an error at its place.
Choice: a call inside reasoning is not made, and the model is told.
Choice: a value of a tagged call becomes what the tool's schema says if it reads as that, else it stays text, for the
schema check to complain about. Only line breaks that the format itself writes around it are dropped.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from composer2.env.chat_formats import ChatFormat, IdCalls, XmlCalls
from composer2.env.chat_render import render_turn
from composer2.env.template import FOREIGN_CALL, malformed
from composer2.env.tools.registry import ToolSpec
from composer2.env.tools.schema import show
from composer2.types import ParsedTurn, TokenizerLike, ToolCall, ToolResult

CALL_ID = re.compile(r"(?:functions\.)?([^\s:]+)(?::\d+)?")
INTEGER = re.compile(r"[+-]?\d{1,15}", re.ASCII)
NUMBER = re.compile(r"[+-]?\d{1,15}(?:\.\d{1,15})?(?:[eE][+-]?\d{1,3})?", re.ASCII)


class PartKind(StrEnum):
    """What a stretch of a turn is."""

    THINK = "think"
    TEXT = "text"
    CALLS = "calls"
    END = "end"
    TAIL = "tail"
    """Ids after the end of the turn, which no sampler gives."""


@dataclass(frozen=True, kw_only=True)
class TurnPart:
    """Tokens [start, stop) of a turn, marks included."""

    kind: PartKind
    start: int
    stop: int
    is_closed: bool = True
    """False for a block of calls, or reasoning, without its closing mark."""


class ChatParser:
    """Reads turns of one format; `tools` give the types of tagged values."""

    def __init__(
        self, form: ChatFormat, tokenizer: TokenizerLike, tools: Sequence[ToolSpec], *, eos_ids: Sequence[int] = ()
    ) -> None:
        """`eos_ids`: further tokens that end a turn. ValueError when a mark of the format is no token."""
        self.form, self.tokenizer = form, tokenizer
        self.mark_ids = {mark: tokenizer.special_id(mark) for mark in form.marks}
        self._marks = frozenset(self.mark_ids.values())
        self.end_ids = tuple(dict.fromkeys((self.mark_ids[form.end], *eos_ids)))
        self._open, self._close = self._mark(form.calls.open), self._mark(form.calls.close)
        self._think_open = self._think_close = -1
        if form.think is not None:
            self._think_open, self._think_close = self._mark(form.think.open), self._mark(form.think.close)
        self._schemas = {tool.name: tool.parameters.get("properties", {}) for tool in tools}
        example = render_turn(form, "", [ToolCall(name="NAME", arguments={"ARGUMENT": "VALUE"})])
        self._example = "".join(example).strip()

    def _mark(self, literal: str) -> int:
        return self.mark_ids[literal.strip()]

    # -- parts

    def split(self, token_ids: Sequence[int], *, starts_thinking: bool = False) -> tuple[TurnPart, ...]:
        """Parts that tile `token_ids` in order; `starts_thinking`: the prompt has opened the reasoning."""
        ids = list(token_ids)
        stop = next((i for i, token in enumerate(ids) if token in self.end_ids), len(ids))
        parts: list[TurnPart] = []
        is_thinking = self.form.think is not None and (starts_thinking or self._closes_first(ids[:stop]))
        kind, start = PartKind.THINK if is_thinking else PartKind.TEXT, 0

        def finish(until: int, *, is_closed: bool = True) -> None:
            nonlocal start
            if until > start:
                parts.append(TurnPart(kind=kind, start=start, stop=until, is_closed=is_closed))
            start = until

        for i, token in enumerate(ids[:stop]):
            if kind is PartKind.TEXT and token in (self._open, self._think_open):
                finish(i)
                kind = PartKind.CALLS if token == self._open else PartKind.THINK
            elif kind is PartKind.CALLS and token == self._open:
                finish(i, is_closed=False)
            elif (kind, token) in ((PartKind.CALLS, self._close), (PartKind.THINK, self._think_close)):
                finish(i + 1)
                kind = PartKind.TEXT
        finish(stop, is_closed=kind is PartKind.TEXT)
        if stop < len(ids):
            kind = PartKind.END
            finish(stop + 1)
            kind = PartKind.TAIL
            finish(len(ids))
        return tuple(parts)

    def _closes_first(self, ids: Sequence[int]) -> bool:
        """The first mark of reasoning closes it: a template outside this one had opened it."""
        first = next((token for token in ids if token in (self._think_open, self._think_close, self._open)), None)
        return first is not None and first == self._think_close

    # -- calls

    def parse(self, token_ids: Sequence[int], *, starts_thinking: bool = False) -> ParsedTurn:
        """Read one generation. Never raises: whatever cannot be read becomes an error result at its place."""
        ids = list(map(int, token_ids))
        parts = self.split(ids, starts_thinking=starts_thinking)
        ended = any(part.kind is PartKind.END for part in parts)
        calls: list[ToolCall | ToolResult] = []
        texts: dict[PartKind, list[str]] = {PartKind.THINK: [], PartKind.TEXT: []}
        num_text = 0
        for part in parts:
            tokens = ids[part.start : part.stop]
            if part.kind is PartKind.CALLS:
                body = tokens[1:-1] if part.is_closed else tokens[1:]
                calls += self._read_block(body, is_closed=part.is_closed, ended=ended)
            elif part.kind in texts:
                num_text += len(tokens)
                calls += self._stray(tokens, part.kind)
                plain = [token for token in tokens if token not in self._marks]
                texts[part.kind].append(self.tokenizer.decode(plain))
        text, reasoning = (" ".join(t for t in map(str.strip, texts[k]) if t) for k in (PartKind.TEXT, PartKind.THINK))
        if not calls and ended and FOREIGN_CALL.search(text):
            calls.append(malformed(f"a call is written as {self._example}"))
        return ParsedTurn(text=text, reasoning=reasoning, calls=tuple(calls), ended=ended, num_text_tokens=num_text)

    def _stray(self, tokens: Sequence[int], kind: PartKind) -> Iterator[ToolResult]:
        """At most one complaint about marks where they mean nothing."""
        if kind is PartKind.THINK and self._open in tokens:
            close = self.tokenizer.decode([self._think_close])
            yield malformed(f"a call inside the reasoning is not made; it belongs after {close}")
        stray = next((t for t in tokens if t in self._marks), None) if kind is PartKind.TEXT else None
        if stray is not None:
            yield malformed(f"{self.tokenizer.decode([stray])} has no place here; a call is written as {self._example}")

    def _read_block(self, body: Sequence[int], *, is_closed: bool, ended: bool) -> list[ToolCall | ToolResult]:
        shape = self.form.calls
        found: list[ToolCall | ToolResult]
        if isinstance(shape, IdCalls):
            found = list(self._read_ids(shape, body))
        elif isinstance(shape, XmlCalls):
            found = list(self._read_tags(shape, self.tokenizer.decode(body)))
        else:
            found = [read_json_call(self.tokenizer.decode(body))] if is_closed else []
        if is_closed:
            return found or [malformed(f"no call inside; a call is written as {self._example}")]
        close = self.form.calls.close.strip()
        # What an open block holds last may be the beginning of something longer; calls before it are whole.
        whole = found[:-1] if found and isinstance(found[-1], ToolResult) else found
        return [*whole, malformed(f"a call was {'not closed with' if ended else 'cut before'} {close}")]

    def _read_ids(self, shape: IdCalls, body: Sequence[int]) -> Iterator[ToolCall | ToolResult]:
        """Calls of a section; they are cut at tokens, so no argument can hold a mark."""
        begin, middle, close = (self.mark_ids[m] for m in (shape.call_open, shape.call_middle, shape.call_close))
        ids, position = list(body), 0
        while position < len(ids):
            start = ids.index(begin, position) if begin in ids[position:] else len(ids)
            between = self.tokenizer.decode(ids[position:start])
            if between.strip():
                yield malformed(f"{show(between.strip())} stands between calls; each begins with {shape.call_open}")
            if start == len(ids):
                return
            stop = ids.index(close, start) if close in ids[start:] else len(ids)
            yield self._read_id_call(shape, ids[start + 1 : stop], middle, is_closed=stop < len(ids))
            position = stop + 1

    def _read_id_call(
        self, shape: IdCalls, ids: Sequence[int], middle: int, *, is_closed: bool
    ) -> ToolCall | ToolResult:
        if not is_closed:
            return malformed(f"a call was not closed with {shape.call_close}")
        if middle not in ids:
            return malformed(f"a call needs {shape.call_middle} between its id and its arguments")
        cut = list(ids).index(middle)
        call_id = self.tokenizer.decode(ids[:cut]).strip()
        name = CALL_ID.fullmatch(call_id)
        if name is None:
            return malformed(f"the id of a call is functions.NAME:INDEX; got {show(call_id)}")
        arguments = read_object(self.tokenizer.decode(ids[cut + 1 :]), "the arguments of a call")
        if isinstance(arguments, ToolResult):
            return replace(arguments, call_id=call_id)
        return ToolCall(name=name[1], arguments=arguments, call_id=call_id)

    def _read_tags(self, shape: XmlCalls, text: str) -> Iterator[ToolCall | ToolResult]:
        """Calls written as tags, one after the other; after a broken one, on behind its closing tag."""
        opening, closing = shape.function_open[0], shape.function_close.strip()
        position = 0
        while position < len(text.rstrip()):
            start = text.find(opening, position)
            between = text[position : start if start >= 0 else len(text)].strip()
            if between:
                yield malformed(f"{show(between)} stands outside a call; each begins with {opening}")
            if start < 0:
                return
            call, stop = self._read_tag_call(shape, text, start + len(opening))
            yield call
            if stop < 0:
                following = text.find(closing, start)
                stop = len(text) if following < 0 else following + len(closing)
            position = stop

    def _read_tag_call(self, shape: XmlCalls, text: str, start: int) -> tuple[ToolCall | ToolResult, int]:
        """The call whose name begins at `start`, and where to read on; -1 after an error."""
        name_end, function_close = shape.function_open[1].rstrip(), shape.function_close.strip()
        opening, value_begin = shape.parameter_open[0], shape.parameter_open[1]
        closing = shape.parameter_close.strip()
        # The last closing tag before the next tag of the format: a value may hold the closing tag as text.
        value_end = re.compile(re.escape(closing) + rf"(?=\s*(?:{re.escape(opening)}|{re.escape(function_close)}|$))")
        stop = text.find(name_end, start)
        name = text[start:stop].strip()
        if stop < 0 or "\n" in name:
            return malformed(f"the name of a call is closed with {name_end}"), -1
        position = stop + len(name_end)
        arguments: dict[str, Any] = {}
        while True:
            position = len(text) - len(text[position:].lstrip())
            if text.startswith(function_close, position):
                return ToolCall(name=name, arguments=arguments), position + len(function_close)
            if not text.startswith(opening, position):
                rest = show(text[position : position + 40]) if position < len(text) else "the end of the block"
                return malformed(f"{show(name)}: {opening} or {function_close} was expected; got {rest}"), -1
            middle = text.find(value_begin.rstrip(), position)
            key = text[position + len(opening) : middle].strip()
            begin = middle + len(value_begin.rstrip())
            end = value_end.search(text, begin) if middle >= 0 else None
            if end is None:
                return malformed(f"{show(name)}: argument {show(key)} is not closed with {closing}"), -1
            if key in arguments:
                return malformed(f"{show(name)}: argument {show(key)} is given twice"), -1
            value = _inside(text[begin : end.start()], shape)
            arguments[key] = typed_value(value, self._schemas.get(name, {}).get(key, {}).get("type", "string"))
            position = end.end()


def _inside(value: str, shape: XmlCalls) -> str:
    """A value without the line breaks that the format writes around it."""
    if shape.parameter_open[1].endswith("\n"):
        value = value.removeprefix("\n")
    return value.removesuffix("\n") if shape.parameter_close.startswith("\n") else value


def typed_value(text: str, kind: str) -> Any:
    """`text` as the JSON type `kind`, or the text itself where it does not read as that."""
    word = text.strip()
    if kind == "integer" and INTEGER.fullmatch(word):
        return int(word)
    if kind == "number" and NUMBER.fullmatch(word):
        number = int(word) if INTEGER.fullmatch(word) else float(word)
        return number if math.isfinite(number) else text
    if kind == "boolean" and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if kind in ("object", "array"):
        value, problem = _load(word)
        is_kind = problem is None and isinstance(value, dict if kind == "object" else list)
        return value if is_kind else text
    return text


def read_json_call(text: str) -> ToolCall | ToolResult:
    """A call written as one JSON object with `name` and `arguments`."""
    value = read_object(text, "a call")
    if isinstance(value, ToolResult):
        return value
    if not isinstance(value.get("name"), str) or not isinstance(value.get("arguments", {}), dict):
        return malformed("a call needs a string `name` and an object `arguments`")
    extra = sorted(value.keys() - {"name", "arguments"})
    if extra:
        return malformed(f"a call holds `name` and `arguments`; got {show(extra[0])} too")
    return ToolCall(name=value["name"], arguments=value.get("arguments", {}))


def read_object(text: str, what: str) -> dict[str, Any] | ToolResult:
    """A JSON object, or the error that says where it breaks."""
    value, problem = _load(text.strip())
    if problem is not None:
        return ToolResult(content=f"error: {problem}", is_error=True, event="bad_json")
    return value if isinstance(value, dict) else malformed(f"{what} is {show(value)}, accepted is a JSON object")


def _load(text: str) -> tuple[Any, str | None]:
    """Value of a JSON text, or what is wrong with it."""
    try:
        return json.loads(text, parse_constant=_no_constant), None
    except json.JSONDecodeError as problem:
        return None, f"broken JSON at line {problem.lineno} column {problem.colno}: {problem.msg}"
    except (ValueError, RecursionError) as problem:
        return None, f"JSON not accepted: {str(problem)[:100]}"


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")
