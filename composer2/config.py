"""Configs: frozen dataclasses <-> JSON, overrides from the command line, presets by name.

In: a dataclass, JSON data, or a list of command-line arguments. Out: a checked config, or an error that names the
field, the value, and what is accepted.

Source: rows X1 X5.
Choice: a config file must name known fields only, because a misspelt field that is ignored changes a run in silence;
fields left out keep their defaults, so that old config files stay readable.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import tyro

from composer2.log import fail

ConfigT = TypeVar("ConfigT")


# ---------------------------------------------------------------------------------------------------------------------
# To JSON


def to_json(config: Any) -> dict[str, Any]:
    """A dataclass instance as JSON data: tuples become lists, enums their values, paths text."""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise ValueError(f"config is {config!r}, accepted is a dataclass instance")
    return {f.name: _encode(getattr(config, f.name), f.name) for f in dataclasses.fields(config) if f.init}


def _encode(value: Any, place: str) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: _encode(getattr(value, f.name), f"{place}.{f.name}") for f in dataclasses.fields(value) if f.init
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _encode(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_encode(item, f"{place}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"{place} is {value!r}, accepted in a config are dataclasses, numbers, text, enums, tuples and dicts"
    )


# ---------------------------------------------------------------------------------------------------------------------
# From JSON


def from_json(cls: type[ConfigT], data: Mapping[str, Any], *, place: str = "") -> ConfigT:
    """Build `cls` from JSON data. ValueError names the dotted place of an unknown, ill-typed or missing field."""
    if not isinstance(data, Mapping):
        raise ValueError(
            f"{place or cls.__name__} is {data!r}, accepted is an object with the fields of {cls.__name__}"
        )
    fields = {f.name: f for f in dataclasses.fields(cast(Any, cls)) if f.init}
    for key in data:
        if key not in fields:
            raise ValueError(f"{_join(place, key)} is not a field of {cls.__name__}{nearest_names(key, fields)}")
    hints = get_type_hints(cls)
    values = {name: _decode(hints[name], data[name], _join(place, name)) for name in fields if name in data}
    for name, spec in fields.items():
        if name not in data and spec.default is MISSING and spec.default_factory is MISSING:
            raise ValueError(f"{_join(place, name)} is missing, accepted is {_type_name(hints[name])}")
    return cls(**values)


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _decode(kind: Any, value: Any, place: str) -> Any:
    """`value` as the annotated type `kind`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _decode_union(kind, value, place)
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
        near = nearest_names(value, arguments) if isinstance(value, str) else ""
        raise ValueError(f"{place} is {value!r}, accepted is one of {', '.join(map(repr, arguments))}{near}")
    if origin is tuple:
        return _decode_tuple(kind, value, place)
    if origin in (list, Sequence) or kind is list:
        _require(isinstance(value, list), place, value, kind)
        items = [_decode(arguments[0] if arguments else Any, item, f"{place}[{i}]") for i, item in enumerate(value)]
        return tuple(items) if origin is Sequence else items
    if origin in (dict, Mapping) or kind is dict:
        _require(isinstance(value, Mapping), place, value, kind)
        return {key: _decode(arguments[1] if arguments else Any, item, f"{place}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return from_json(cast(type, kind), value, place=place)
    return _decode_scalar(kind, value, place)


def _decode_union(kind: Any, value: Any, place: str) -> Any:
    options = get_args(kind)
    if value is None and type(None) in options:
        return None
    errors = []
    for option in options:
        if option is type(None):
            continue
        try:
            return _decode(option, value, place)
        except ValueError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    raise ValueError(f"{place} is {value!r}, accepted is {_type_name(kind)}")


def _decode_tuple(kind: Any, value: Any, place: str) -> tuple[Any, ...]:
    arguments = get_args(kind)
    _require(isinstance(value, list | tuple), place, value, kind)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_decode(arguments[0], item, f"{place}[{i}]") for i, item in enumerate(value))
    if len(value) != len(arguments):
        raise ValueError(f"{place} has {len(value)} items, accepted is exactly {len(arguments)}: {_type_name(kind)}")
    return tuple(_decode(arguments[i], item, f"{place}[{i}]") for i, item in enumerate(value))


def _decode_scalar(kind: Any, value: Any, place: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, Enum):
        choices = [member.value for member in kind]
        if value not in choices:
            near = nearest_names(value, choices) if isinstance(value, str) else ""
            raise ValueError(f"{place} is {value!r}, accepted is one of {', '.join(map(repr, choices))}{near}")
        return kind(value)
    if kind is float:  # a float such as 1.0 may have been written as 1
        _require(isinstance(value, int | float) and not isinstance(value, bool), place, value, kind)
        return float(value)
    if kind is int:
        _require(isinstance(value, int) and not isinstance(value, bool), place, value, kind)
        return value
    if kind is Path:
        _require(isinstance(value, str), place, value, kind)
        return Path(value)
    if kind in (bool, str, type(None)):
        _require(isinstance(value, kind), place, value, kind)
        return value
    raise ValueError(f"{place} is annotated {_type_name(kind)}, which no config can hold")


def _require(holds: bool, place: str, value: Any, kind: Any) -> None:
    if not holds:
        raise ValueError(f"{place} is {value!r} ({type(value).__name__}), accepted is {_type_name(kind)}")


def _type_name(kind: Any) -> str:
    if kind is type(None):
        return "null"
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_type_name(option) for option in get_args(kind))
    if get_origin(kind) is not None:
        return str(kind).replace("typing.", "")
    return getattr(kind, "__name__", str(kind))


# ---------------------------------------------------------------------------------------------------------------------
# Files


def save_config(path: Path | str, config: Any) -> None:
    """Write `config` as indented JSON, in one rename: a reader sees the old file or the new one, never half."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(to_json(config), indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def load_config(path: Path | str, cls: type[ConfigT]) -> ConfigT:
    """Read a config file written by `save_config` or by hand. ValueError names the file and the place."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} line {error.lineno} is not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start})") from error
    try:
        return from_json(cls, data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def differences(known: Any, wanted: Any) -> list[str]:
    """Fields in which two configs of one type differ, as "PLACE is WANTED, not KNOWN"."""
    return _differences("", to_json(known), to_json(wanted))


def _differences(place: str, known: Any, wanted: Any) -> list[str]:
    if isinstance(known, dict) and isinstance(wanted, dict) and known.keys() == wanted.keys():
        return [found for name in known for found in _differences(_join(place, name), known[name], wanted[name])]
    if isinstance(known, list) and isinstance(wanted, list) and len(known) == len(wanted):
        pairs = enumerate(zip(known, wanted, strict=True))
        return [found for n, pair in pairs for found in _differences(_join(place, str(n)), *pair)]
    return [] if known == wanted else [f"{place} is {wanted!r}, not {known!r}"]


def apply_overrides(config: ConfigT, args: Sequence[str], *, prog: str = "composer2") -> ConfigT:
    """`config` with `--rl.max-staleness 0` style arguments applied. `--help` lists every field with its docstring.

    An unknown field or a value that does not fit prints what is accepted and exits with code 2. An optional part that
    is None in `config` has no fields to override: choose a preset or a config file that has it.
    """
    accepted = _flags(config)
    for arg in args:
        flag = arg.split("=", 1)[0]
        if flag.startswith("--") and flag != "--help" and flag.replace("_", "-") not in accepted:
            fail(f"{flag} is not a field of {type(config).__name__}{nearest_names(flag, accepted)}")
    return tyro.cli(type(config), default=config, args=list(args), prog=prog, config=(tyro.conf.AvoidSubcommands,))


def _flags(config: Any, prefix: str = "--") -> dict[str, None]:
    """Every accepted flag, in field order."""
    flags: dict[str, None] = {}
    for spec in dataclasses.fields(config):
        value, name = getattr(config, spec.name), spec.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            flags |= _flags(value, f"{prefix}{name}.")
        elif isinstance(value, tuple) and value and all(dataclasses.is_dataclass(item) for item in value):
            for index, item in enumerate(value):  # as tyro names the parts of a fixed number of items
                flags |= _flags(item, f"{prefix}{name}.{index}.")
        else:
            flags[prefix + name] = None
            if isinstance(value, bool):
                flags[f"{prefix}no-{name}"] = None
    return flags


def choose_preset(name: str, presets: Mapping[str, ConfigT]) -> ConfigT:
    """The preset called `name`; an unknown one prints the nearest names and exits with code 2."""
    if name not in presets:
        fail(f"preset is {name!r}, accepted are {', '.join(presets)}{nearest_names(name, presets)}")
    return presets[name]


def nearest_names(name: str, accepted: Iterable[Any], *, count: int = 3) -> str:
    """`; nearest accepted: a, b` to end an error message with."""
    names = [str(item) for item in accepted]
    near = difflib.get_close_matches(name, names, n=count, cutoff=0.6)
    if not near:  # the right word at the wrong place, e.g. `--lr` for `--rl.lr`
        last = name.lstrip("-").rsplit(".", 1)[-1]
        near = [item for item in names if item.lstrip("-").rsplit(".", 1)[-1] == last][:count]
    if not near:
        near = difflib.get_close_matches(name, names, n=count, cutoff=0.3) or names[:count]
    return f"; nearest accepted: {', '.join(near)}" if near else ""
