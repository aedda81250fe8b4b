"""Conversations in a model's own format: messages and tools go in, the text its published template gives comes out.

    [tools of Kimi]  system [+ tools]  { user | assistant: [reasoning] text [calls] | results }  [opening of a turn]

The text comes as pieces: `Fixed` ones belong to the format and may hold marks, plain ones are contents and never do. So
no file, no tool output and no prompt forges a mark, which is the one deliberate difference from a published template.

Source: the templates published with the models (chat_formats.py); row E6.
Choice: a user message counts as a question even if its text looks like a tool's answer; an empty system text counts as
no system message; reasoning written inside `content` is not taken apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer2.env.chat_formats import ChatFormat, IdCalls, JsonCalls, XmlCalls
from composer2.env.tools.registry import ToolSpec
from composer2.types import Message, Role, ToolCall, ToolResult


class Fixed(str):
    """Text of the format itself, in which marks are tokens."""

    __slots__ = ()


def render_conversation(
    form: ChatFormat, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, opens_turn: bool = True,
    thinks: bool = True,
) -> list[str]:  # fmt: skip
    """Pieces of a whole conversation. `opens_turn`: end with what makes the model speak; `thinks`: let it reason.

    ValueError for an order of messages or a wish that the format has no place for."""
    pieces: list[str] = [Fixed(form.start)]
    body = list(messages)
    system = body.pop(0).content if body and body[0].role is Role.SYSTEM else ""
    pieces += _system(form, system, tools)
    kept_from = _first_kept(form, body)
    num_calls = 0
    call_ids: list[str] = []
    for index, message in enumerate(body):
        if message.role is Role.TOOL:
            padded = [*call_ids, *[""] * len(message.tool_results)]
            owned = zip(message.tool_results, padded, strict=False)
            pieces += render_results(form, [replace(r, call_id=r.call_id or call_id) for r, call_id in owned])
            continue
        opening = {Role.SYSTEM: form.system, Role.USER: form.user, Role.ASSISTANT: form.assistant}[message.role]
        pieces.append(Fixed(opening))
        if message.role is Role.ASSISTANT:
            is_last = index == len(body) - 1
            pieces += _reasoning(form, message, is_kept=index >= kept_from, is_last=is_last)
            trims = form.think is not None and form.think.trims and index >= kept_from
            text = message.content.lstrip("\n") if trims and (message.reasoning or is_last) else message.content
            pieces += render_turn(form, text, message.tool_calls, first_index=num_calls)
            call_ids = [call_id_of(call, num_calls + place) for place, call in enumerate(message.tool_calls)]
            num_calls += len(message.tool_calls)
        else:
            pieces.append(message.content)
        pieces.append(Fixed(form.end + form.after_end))
    return [*pieces, *(open_turn(form, thinks=thinks) if opens_turn else ())]


def open_turn(form: ChatFormat, *, thinks: bool = True) -> list[str]:
    """What comes right before a sampled turn."""
    prefill = form.prefill if thinks else form.prefill_plain
    if prefill is None:
        raise ValueError(f"thinks is {thinks}, accepted in format {form.name} is True: it always reasons")
    return [Fixed(form.assistant + prefill)]


def render_results(form: ChatFormat, results: Sequence[ToolResult]) -> list[str]:
    """Messages with the results of one turn's calls."""
    pieces: list[str] = []
    for index, result in enumerate(results):
        if index == 0 or not form.results_share_message:
            pieces.append(Fixed(form.tool))
        before, marker, after = form.result_open.partition("{id}")
        pieces.append(Fixed(before))
        if marker:
            pieces += [result.call_id or "functions.unknown:0", Fixed(after)]
        pieces += [result.content, Fixed(form.result_close)]
        if index == len(results) - 1 or not form.results_share_message:
            pieces.append(Fixed(form.end + form.after_end))
    return pieces


def render_turn(form: ChatFormat, text: str, calls: Sequence[ToolCall], *, first_index: int = 0) -> list[str]:
    """What an assistant says, without reasoning, opening and end. `first_index`: calls made before in the episode."""
    shape = form.calls
    if not calls:
        return [text]
    if shape.trims_text:
        text = text.strip()
    pieces: list[str] = [text, Fixed(shape.lead_after_text if text else shape.lead)]
    if isinstance(shape, IdCalls):
        pieces.append(Fixed(shape.open))
        for index, call in enumerate(calls):
            pieces += [Fixed(shape.call_open), call_id_of(call, first_index + index), Fixed(shape.call_middle)]
            pieces.append(to_json(dict(call.arguments)))
            pieces.append(Fixed(shape.call_close))
        return [*pieces, Fixed(shape.close)]
    is_block_open = False
    for index, call in enumerate(calls):
        if index:
            pieces.append(Fixed(shape.join))
        if not is_block_open:
            pieces.append(Fixed(shape.open))
            is_block_open = isinstance(shape, XmlCalls) and not shape.one_block_each
        pieces += _json_call(call) if isinstance(shape, JsonCalls) else _xml_call(shape, call)
        if not is_block_open:
            pieces.append(Fixed(shape.close))
    return [*pieces, Fixed(shape.close)] if is_block_open else pieces


def call_id_of(call: ToolCall, index: int) -> str:
    """Id of the `index`-th call of an episode, where it has none from the model."""
    return call.call_id or f"functions.{call.name}:{index}"


def to_json(value: object, separators: tuple[str, str] = (", ", ": ")) -> str:
    """JSON as `transformers` writes it in a template: in the order given, letters of any script as they are."""
    return json.dumps(value, ensure_ascii=False, separators=separators)


def wrapped_tool(spec: ToolSpec) -> dict[str, Any]:
    """A tool as it is handed to a published template."""
    inner = {"name": spec.name, "description": spec.description, "parameters": _plain(spec.parameters)}
    return {"type": "function", "function": inner}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _json_call(call: ToolCall) -> Iterator[str]:
    yield f'{{"name": "{call.name}", "arguments": {to_json(dict(call.arguments))}}}'


def _xml_call(shape: XmlCalls, call: ToolCall) -> Iterator[str]:
    yield from (Fixed(shape.function_open[0]), call.name, Fixed(shape.function_open[1]))
    for name, value in call.arguments.items():
        is_json = shape.json_scalars or isinstance(value, (Mapping, list, tuple))
        text = value if isinstance(value, str) else to_json(value) if is_json else str(value)
        yield from (Fixed(shape.parameter_open[0]), name, Fixed(shape.parameter_open[1]), text)
        yield Fixed(shape.parameter_close)
    yield Fixed(shape.function_close)


def _first_kept(form: ChatFormat, body: Sequence[Message]) -> int:
    """Index of the first message whose reasoning is still shown."""
    if form.think is None:
        return len(body)
    for index in range(len(body) - 1, -1, -1):
        message = body[index]
        is_answer = message.role is Role.ASSISTANT and not message.tool_calls
        if message.role is Role.USER if form.think.kept_since == "user" else is_answer:
            return index + 1
    # Without a question Qwen3 and MiniMax-M2 part ways: the last message counts as one, or nothing does.
    return len(body) if form.think.trims else 0


def _reasoning(form: ChatFormat, message: Message, *, is_kept: bool, is_last: bool) -> list[str]:
    think = form.think
    if think is None:
        return []
    if not is_kept:
        return [Fixed(think.dropped)]
    is_shown = message.reasoning or think.when_empty == "always" or (think.when_empty == "last" and is_last)
    reasoning = message.reasoning.strip("\n") if think.trims else message.reasoning
    return [Fixed(think.open), reasoning, Fixed(think.close)] if is_shown else []


def _system(form: ChatFormat, text: str, tools: Sequence[ToolSpec]) -> list[str]:
    pieces: list[str] = []
    if tools and form.tools_first:
        before, after = form.tools_first
        pieces += [Fixed(before), to_json([wrapped_tool(t) for t in tools], form.json_separators), Fixed(after)]
    default = form.default_system_with_tools if tools else form.default_system
    written = text or default
    has_tools = bool(tools) and not form.tools_first
    if written is None and not has_tools:
        return pieces
    pieces.append(Fixed(form.system))
    if written is not None:
        pieces.append(written)
    if has_tools:
        pieces.append(Fixed((form.system_join if written is not None else "") + form.tools_open))
        pieces += (piece for tool in tools for piece in _declare(form, tool))
        pieces.append(Fixed(form.tools_close))
    return [*pieces, Fixed(form.end + form.after_end)]


def _declare(form: ChatFormat, tool: ToolSpec) -> list[str]:
    wrapped = wrapped_tool(tool)
    if form.tool_style == "json-lines":
        return ["\n" + to_json(wrapped, form.json_separators)]
    if form.tool_style == "json-tags":
        return ["<tool>" + to_json(wrapped["function"], form.json_separators) + "</tool>\n"]
    inner = wrapped["function"]
    lines = ["", "<function>", f"<name>{tool.name}</name>", f"<description>{tool.description.strip()}</description>"]
    lines.append("<parameters>")
    for name, schema in inner["parameters"].get("properties", {}).items():
        lines += ["<parameter>", f"<name>{name}</name>"]
        lines += [f"<type>{schema['type']}</type>"] if "type" in schema else []
        lines += [f"<description>{schema['description'].strip()}</description>"] if "description" in schema else []
        lines += [*_extra(schema, ("name", "type", "description")), "</parameter>"]
    lines += [*_extra(inner["parameters"], ("type", "properties")), "</parameters>", "</function>"]
    return ["\n".join(lines)]


def _extra(schema: Mapping[str, Any], told: Sequence[str]) -> Iterator[str]:
    for key, value in schema.items():
        if key not in told:
            text = to_json(value) if isinstance(value, (dict, list)) else str(value)
            yield f"<{key}>{text}</{key}>"
