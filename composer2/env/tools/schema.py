"""Check of a tool call's arguments against a small part of JSON Schema, with messages a model can act on.

In: arguments as parsed, and a schema. Out: the arguments to use and a list of problems, each naming the
field, its value and what is accepted.

Source: report §6.2 (stricter argument checks in training than in use, decided per environment); row E5.
Choice: the part of JSON Schema that tool arguments need: type (object string integer number boolean array), properties,
required, additionalProperties false, items, enum, minimum. A schema using anything else is refused, not half obeyed.
Choice: `lenient` turns digit strings into integers and drops unknown arguments; nothing else is forgiven.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KEYWORDS = frozenset(
    ("type", "properties", "required", "additionalProperties", "items", "enum", "minimum", "description")
)
TYPE_NAMES = {
    "object": "an object",
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
}
MAX_SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class CheckedArguments:
    """Outcome of a check."""

    arguments: Mapping[str, Any]
    """What to call the tool with; equal to the input in strict mode."""
    problems: tuple[str, ...] = ()
    """Empty when the call may be made."""
    forgiven: tuple[str, ...] = ()
    """What lenient mode changed."""


@dataclass
class _Findings:
    lenient: bool
    problems: list[str] = field(default_factory=list)
    forgiven: list[str] = field(default_factory=list)


def check_schema(schema: Mapping[str, Any]) -> None:
    """ValueError for a schema that uses more of JSON Schema than is checked here."""
    unknown = set(schema) - KEYWORDS
    if unknown:
        raise ValueError(f"schema uses {sorted(unknown)}, accepted keywords are {sorted(KEYWORDS)}")
    if schema.get("type") not in TYPE_NAMES:
        raise ValueError(f"schema type is {schema.get('type')!r}, accepted is one of {sorted(TYPE_NAMES)}")
    for part in (*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])):
        check_schema(part)


def check_arguments(
    arguments: Mapping[str, Any], schema: Mapping[str, Any], *, lenient: bool = False
) -> CheckedArguments:
    """Compare `arguments` with a schema of type object. Never raises, whatever JSON the arguments hold."""
    findings = _Findings(lenient=lenient)
    checked = _check_object("", arguments, schema, findings)
    return CheckedArguments(arguments=checked, problems=tuple(findings.problems), forgiven=tuple(findings.forgiven))


def show(value: object) -> str:
    """`repr` of a value, short enough for a message. Huge numbers have no repr, so they are only named."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return "a huge integer"
    if isinstance(value, str):
        value = value[: MAX_SHOWN + 1]
    elif isinstance(value, (list, tuple, dict)):
        return f"a {'list' if not isinstance(value, dict) else 'object'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def _check_object(where: str, value: Mapping[str, Any], schema: Mapping[str, Any], out: _Findings) -> dict[str, Any]:
    properties: Mapping[str, Any] = schema.get("properties", {})
    checked: dict[str, Any] = {}
    for name in schema.get("required", ()):
        if name not in value:
            out.problems.append(f"{where}{name} is missing, accepted is {_accepted(properties.get(name, {}))}")
    for name, item in value.items():
        if name in properties:
            checked[name] = _check(f"{where}{name}", item, properties[name], out)
        elif schema.get("additionalProperties", True):
            checked[name] = item
        elif out.lenient:
            out.forgiven.append(f"{where}{show(name)[1:-1]} dropped")
        else:
            names = ", ".join(properties) or "none"
            out.problems.append(f"{show(name)} is no argument, accepted are {names}")
    return checked


def _check(where: str, value: Any, schema: Mapping[str, Any], out: _Findings) -> Any:
    kind = schema["type"]
    if out.lenient and kind == "integer" and isinstance(value, str):
        digits = value.strip()
        if digits.isascii() and digits.isdigit() and len(digits) <= 9:
            out.forgiven.append(f"{where} {show(value)} read as {int(digits)}")
            value = int(digits)
    if not _has_type(value, kind) or not _in_range(value, schema):
        out.problems.append(f"{where} is {show(value)}, accepted is {_accepted(schema)}")
    elif kind == "object":
        return _check_object(f"{where}.", value, schema, out)
    elif kind == "array" and "items" in schema:
        return [_check(f"{where}[{i}]", item, schema["items"], out) for i, item in enumerate(value)]
    return value


def _has_type(value: Any, kind: str) -> bool:
    if kind == "boolean":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    types: dict[str, type | tuple[type, ...]] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "array": (list, tuple),
        "object": Mapping,
    }
    return isinstance(value, types[kind])


def _in_range(value: Any, schema: Mapping[str, Any]) -> bool:
    return value in schema.get("enum", (value,)) and ("minimum" not in schema or value >= schema["minimum"])


def _accepted(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(map(show, schema["enum"]))
    text = TYPE_NAMES.get(schema.get("type", ""), "a value")
    return f"{text} of at least {schema['minimum']}" if "minimum" in schema else text
