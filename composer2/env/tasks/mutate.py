"""Single-token mutations of Python source, written as the edits a model would make.

In: source text. Out: `Mutation`s, each meaning: on this line replace the first token-aligned `old` by `new`.

Source: report §2 (bugs with failing tests); rows T1 E6.
Choice: the space before a token belongs to it (" >" and not ">"), as in byte-level BPE, so that the tokens of an edit
are those of the file. Mutations come in pairs that undo each other, so that every bug can be undone by one of the
candidates of the broken file. Powers (`**`) are left alone: a mutated power can take unbounded time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from composer2.env.tools.lines import find_edit

TOKEN = re.compile(
    r"""[A-Za-z_]\w*|\d+(?:\.\d+)?|(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    r"""|\*\*=|//=|>>=|<<=|\*\*|//|->|==|!=|<=|>=|\+=|-=|\*=|/=|%=|&=|\|=|\^=|:=|<<|>>|\S"""
)
KEYWORDS = frozenset(
    [
        "False",
        "None",
        "True",
        "and",
        "as",
        "assert",
        "async",
        "await",
        "break",
        "class",
        "continue",
        "def",
        "del",
        "elif",
        "else",
        "except",
        "finally",
        "for",
        "from",
        "global",
        "if",
        "import",
        "in",
        "is",
        "lambda",
        "nonlocal",
        "not",
        "or",
        "pass",
        "raise",
        "return",
        "try",
        "while",
        "with",
        "yield",
    ]
)
COMPARE = {
    "<": ("<=", ">"),
    "<=": ("<", ">="),
    ">": (">=", "<"),
    ">=": (">", "<="),
    "==": ("!=",),
    "!=": ("==",),
}
ARITHMETIC = {"+": ("-", "*"), "-": ("+",), "*": ("+", "//"), "//": ("*", "%"), "%": ("//",)}
ASSIGN = {"+=": ("-=", "=", "*="), "-=": ("+=",), "*=": ("+=",), "//=": ("%=",), "%=": ("//=",), "=": ("+=",)}
WORD_PAIRS = (
    "min max,any all,sum len,and or,upper lower,isupper islower,isdigit isalpha,True False,continue break,"
    "startswith endswith,lstrip rstrip,find rfind,append extend"
)
WORDS = {a: b for pair in WORD_PAIRS.split(",") for a, b in (pair.split(), pair.split()[::-1])}
BUG_KINDS = ("compare", "arithmetic", "assign", "constant", "word", "index", "variable")
KINDS = (*BUG_KINDS, "negate")
"""`negate` inserts a `not`: the way back from a dropped one, too plain to be a bug itself."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """On `line` (from 1) replace the first token-aligned `old` by `new`."""

    line: int
    old: str
    new: str
    kind: str


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    start: int
    stop: int


@lru_cache(maxsize=4096)
def split_line(line: str) -> tuple[Token, ...]:
    """Python tokens of one line, by a regular expression; the inside of a string literal is one token."""
    return tuple(Token(m.group(), m.start(), m.end()) for m in TOKEN.finditer(line))


def apply_mutation(source: str, mutation: Mutation) -> str:
    """Source after the edit. Raises ValueError when `old` is not on the line."""
    lines = source.split("\n")
    line = lines[mutation.line - 1]
    at = find_edit(line, line=1, old=mutation.old)
    if at is None:
        raise ValueError(f"old: {mutation.old!r} is not on line {mutation.line} ({line!r})")
    lines[mutation.line - 1] = line[:at] + mutation.new + line[at + len(mutation.old) :]
    return "\n".join(lines)


def as_edit(line: str, number: int, start: int, stop: int, new: str, kind: str) -> Mutation:
    """Write "replace columns [start, stop) of `line` by `new`" as an edit whose first match is that place.

    Grows `old` by as few whole tokens as it takes until its first aligned occurrence is the place itself.
    """
    tokens = split_line(line)
    first = next(n for n, t in enumerate(tokens) if t.stop > start)
    last = next(n for n in range(len(tokens) - 1, -1, -1) if tokens[n].start < stop)
    for grow in range(len(tokens)):
        for more in range(min(grow, first) + 1):
            left, right = first - more, min(last + grow - more, len(tokens) - 1)
            begin, end = min(tokens[left].start, start), max(tokens[right].stop, stop)
            if begin > 0 and line[begin - 1] == " ":
                begin -= 1
            old = line[begin:end]
            if find_edit(line, line=1, old=old) == begin:
                return Mutation(number, old, line[begin:start] + new + line[stop:end], kind)
    raise AssertionError(f"the whole line is no match of itself: {line!r}")


def code_lines(source: str) -> Iterator[tuple[int, str]]:
    """Numbered lines that may be edited: no signature, no decorator, no docstring, no blank line."""
    inside = False
    for number, line in enumerate(source.split("\n"), 1):
        text = line.strip()
        quotes = text.count('"""')
        if inside or quotes:
            inside = inside != (quotes == 1)
            continue
        if text and not text.startswith(("def ", "@", "#", "class ", "import ", "from ")):
            yield number, line


def variables_by_line(source: str) -> dict[int, tuple[str, ...]]:
    """For each line the local names of the function around it: parameters and assigned names."""
    names: list[str] = []
    current: dict[int, list[str]] = {}
    for number, line in enumerate(source.split("\n"), 1):
        text = line.strip()
        if text.startswith("def ") and line.startswith("def "):
            names = re.findall(r"[(,] ?\*{0,2}([A-Za-z_]\w*)", text)
        elif text.startswith("for ") or " for " in text:
            names += [n for m in re.findall(r"\bfor ([\w, ]+?) in ", text) for n in m.split(", ")]
        found = re.match(r"([A-Za-z_]\w*)(?:, ([A-Za-z_]\w*))? (?:=|[-+*/%]+=) ", text)
        if found:
            names += [n for n in found.groups() if n]
        current[number] = names
    return {number: tuple(dict.fromkeys(found)) for number, found in current.items()}


def candidate_mutations(source: str, kinds: tuple[str, ...] = KINDS) -> list[Mutation]:
    """Every single mutation of `source` in file order, without duplicates."""
    variables = variables_by_line(source) if "variable" in kinds else {}
    found: dict[Mutation, None] = {}
    for number, line in code_lines(source):
        for start, stop, new, kind in line_mutations(line, variables.get(number, ())):
            if kind in kinds:
                found[as_edit(line, number, start, stop, new, kind)] = None
    return list(found)


def mutation_sites(source: str) -> dict[str, list[tuple[int, int, int, str]]]:
    """The same, by kind and as plain places (line, start, stop, new): cheap, for drawing one."""
    variables = variables_by_line(source)
    sites: dict[str, list[tuple[int, int, int, str]]] = {}
    for number, line in code_lines(source):
        for start, stop, new, kind in line_mutations(line, variables[number]):
            sites.setdefault(kind, []).append((number, start, stop, new))
    return sites


def line_mutations(line: str, variables: tuple[str, ...]) -> Iterator[tuple[int, int, str, str]]:
    """(start, stop, new text, kind) of the mutations of one line."""
    tokens = split_line(line)
    depth = 0
    for n, token in enumerate(tokens):
        text = token.text
        before = tokens[n - 1].text if n else ""
        after = tokens[n + 1].text if n + 1 < len(tokens) else ""
        depth += (text in "([{") - (text in ")]}")
        operand_before = before != "" and (before[-1].isalnum() or before[-1] in "_)]}'\"") and before not in KEYWORDS
        if text in COMPARE:
            for new in COMPARE[text]:
                yield token.start, token.stop, new, "compare"
        elif text in ARITHMETIC:
            if operand_before:
                for new in ARITHMETIC[text]:
                    yield token.start, token.stop, new, "arithmetic"
        elif text in ASSIGN:
            if depth == 0 and (text != "=" or (n == 1 and line.startswith("        "))):
                for new in ASSIGN[text]:
                    yield token.start, token.stop, new, "assign"
        elif text.isdecimal():
            for new in (str(int(text) + 1), str(int(text) - 1)) if text != "0" else ("1",):
                yield token.start, token.stop, new, "constant"
        elif text in WORDS and (text not in variables or text in KEYWORDS):
            yield token.start, token.stop, WORDS[text], "word"
        elif text in ("if", "elif", "while"):
            if after not in ("not", ""):
                start = tokens[n + 1].start
                yield start, tokens[n + 1].stop, f"not {after}", "negate"
        elif text == "not":
            if after == "in":
                yield token.start, tokens[n + 1].stop, "in", "word"
            elif before != "is" and n + 2 <= len(tokens):
                yield token.start, tokens[n + 1].stop, after, "word"
        elif text == "in":
            if before != "not" and "for" not in (tokens[n - 2].text, tokens[max(n - 4, 0)].text):
                yield token.start, token.stop, "not in", "word"
        elif text in variables and text not in KEYWORDS and before != ".":
            yield from name_mutations(tokens, n, variables)


def name_mutations(
    tokens: tuple[Token, ...], n: int, variables: tuple[str, ...]
) -> Iterator[tuple[int, int, str, str]]:
    """Wrong variable, and index moved by one, at the variable `tokens[n]`."""
    token = tokens[n]
    before = tokens[n - 1].text if n else ""
    after = tokens[n + 1].text if n + 1 < len(tokens) else ""
    if after not in ("(", "=") and before != "for":
        for other in variables:
            if other != token.text:
                yield token.start, token.stop, other, "variable"
    holder = tokens[n - 2].text if n >= 2 else ""
    subscript = before == "[" and holder not in KEYWORDS and (holder[-1:].isalnum() or holder[-1:] in ("_", ")", "]"))
    if (subscript or before == ":") and after in ("]", ":"):
        yield token.start, token.stop, f"{token.text} + 1", "index"
        yield token.start, token.stop, f"{token.text} - 1", "index"
    elif subscript and after in ("+", "-") and n + 3 < len(tokens):
        amount, closing = tokens[n + 2], tokens[n + 3]
        if amount.text == "1" and closing.text in ("]", ":"):
            yield token.start, amount.stop, token.text, "index"
