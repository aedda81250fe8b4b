"""Text of source files as the tools see it: numbered lines to read, and edits that hit whole tokens only.

In: the text of a file. Out: its numbered form, or the text after one edit. Pure functions; no pod, no model.

Source: row E5 (read file, edit file); report §6.2 gives the tool library no more detail.
Choice: the line of an edit is a hint. The occurrence of `old` on that line wins, else the one on the nearest line: a
small model names a line that is off by one far more often than it names a token that does not exist.
Choice: `old` must begin and end where a token of the file does, so that `x` is not found inside `max`, `1` not inside
`10` and `=` not inside `>=`.
"""

from __future__ import annotations

import re

TOKEN_PATTERN = re.compile(
    r"[^\W\d]\w*"  # identifiers and keywords
    r"|\d+(?:\.\d+)?\w*"  # numbers
    r"|\*\*=|//=|>>=|<<=|\.\.\.|!=|->|:=|==|<=|>=|\+=|-=|\*=|/=|%=|&=|\|=|\^=|@=|//|\*\*|<<|>>"
    r"|\r?\n"
    r"|[ \t]+"
    r"|."
    r"|\r"
)


class EditError(ValueError):
    """An edit that cannot be applied; the text is an answer for the model."""


def split_lines(text: str) -> list[str]:
    """Lines without their `\\n`; a text that ends in a line break has no empty line after it."""
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def number_lines(text: str, *, start: int = 1, limit: int | None = None) -> str:
    """`"{n} {line}\\n"` for each line from number `start` on, at most `limit` of them."""
    lines = split_lines(text)
    stop = len(lines) if limit is None else min(len(lines), start - 1 + limit)
    return "".join(f"{n + 1} {lines[n]}\n" for n in range(start - 1, stop))


def find_edit(text: str, *, line: int, old: str) -> int | None:
    """Offset in `text` of the token-aligned occurrence of `old` that starts on `line` (from 1) or nearest to it.

    On one line the first occurrence wins, of two lines equally near the upper one. None where there is none.
    """
    core = old.strip(" \t") or old
    if not old or core not in text:
        return None
    starts, ends = set(), set()
    for token in TOKEN_PATTERN.finditer(text):
        starts.add(token.start())
        ends.add(token.end())
    lead = old.index(core)
    best: tuple[int, int] | None = None
    position = text.find(old)
    while position >= 0:
        first = position + lead
        if first in starts and first + len(core) in ends:
            distance = abs(text.count("\n", 0, first) + 1 - line)
            if best is None or distance < best[0]:
                best = (distance, position)
        position = text.find(old, position + 1)
    return None if best is None else best[1]


def apply_edit(text: str, *, line: int, old: str, new: str, path: str = "the file") -> str:
    """Text with one occurrence of `old` replaced by `new`, all else kept. EditError says what is wrong."""
    if not old:
        raise EditError("old is empty")
    if old == new:
        raise EditError("old and new are equal")
    position = find_edit(text, line=line, old=old)
    if position is None:
        raise EditError(f"{old!r} is not in {path}")
    return text[:position] + new + text[position + len(old) :]
