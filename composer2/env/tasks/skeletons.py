"""Skeletons of generated functions: the loop or expression around conditions and values, with one line of words.

In: a `Scope` of names. Out: a `Sketch`: body lines formatted as `ast.unparse` writes them, words, argument kinds.

Source: report §2; rows T1 E6.
Choice: one small function per skeleton instead of a grammar, so that each can be read as the Python it makes; the
skeletons of `OOD_SKELETONS` are structures that no training split ever holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from composer2.env.tasks.parts import Scope, condition, value


@dataclass(frozen=True, slots=True)
class Sketch:
    """Body of one function. `arguments` pairs each parameter name with the kind of input it takes."""

    body: tuple[str, ...]
    words: str
    arguments: tuple[tuple[str, str], ...]


def accumulate(s: Scope) -> Sketch:
    """Add or multiply values in a loop with a condition."""
    kind = s.kind("sum", "sum", "product", "from", "minus")
    test, when = condition(s, s.x)
    item, what = value(s, s.x)
    start, operator = {"sum": (0, "+="), "product": (1, "*="), "from": (s.constant(2, 9), "+="), "minus": (0, "-=")}[
        kind
    ]
    words = {
        "sum": s.say("sum of", "total of", "add up"),
        "product": s.say("product of", "multiply"),
        "from": f"{start} plus the sum of",
        "minus": s.say("minus the sum of", "subtract from 0"),
    }[kind]
    body = (
        f"{s.out} = {start}",
        f"for {s.x} in {s.xs}:",
        f"    if {test}:",
        f"        {s.out} {operator} {item}",
        f"return {s.out}",
    )
    return Sketch(body, f"{words} {what} for {s.x} {when}", ((s.xs, "few" if kind == "product" else "numbers"),))


def comprehension(s: Scope) -> Sketch:
    """List comprehension with a condition."""
    test, when = condition(s, s.x)
    item, what = value(s, s.x)
    words = f"{s.say('list of', 'list', 'collect')} {what} for {s.x} {when}"
    return Sketch((f"return [{item} for {s.x} in {s.xs} if {test}]",), words, ((s.xs, "numbers"),))


def reduction(s: Scope) -> Sketch:
    """One builtin over a generator."""
    kind = s.kind("sum", "max", "min", "len", "sorted")
    test, when = condition(s, s.x)
    item, what = value(s, s.x)
    inner = f"{item} for {s.x} in {s.xs} if {test}"
    code = {
        "sum": f"sum({inner})",
        "max": f"max(({inner}), default=0)",
        "min": f"min(({inner}), default=0)",
        "len": f"len({{{inner}}})",
        "sorted": f"sorted([{inner}])",
    }[kind]
    words = {
        "sum": s.say("sum of", "total of"),
        "max": s.say("largest", "maximum of", "greatest"),
        "min": s.say("smallest", "minimum of", "least"),
        "len": s.say("number of different", "how many different"),
        "sorted": s.say("sorted list of", "in order,"),
    }[kind]
    return Sketch((f"return {code}",), f"{words} {what} for {s.x} {when}", ((s.xs, "numbers"),))


def find(s: Scope) -> Sketch:
    """First or last match, or its index."""
    kind = s.kind("first", "last", "index", "rindex")
    test, when = condition(s, s.x)
    if kind in ("index", "rindex"):
        other = -1 if s.rng.random() < 0.7 else s.constant(0, 1)
        loop = f"for {s.i}, {s.x} in enumerate({s.xs}):"
        item, what = s.i, f"{s.say('index', 'position')} of the {'first' if kind == 'index' else 'last'} {s.x}"
    else:
        other = s.constant(0, 9)
        loop = f"for {s.x} in {s.xs}:"
        item, what = value(s, s.x)
        what = f"{what} for the {kind} {s.x}"
    words = f"{what} {when}, {s.say('else', 'otherwise', 'or')} {other}"
    if kind in ("first", "index"):
        body: tuple[str, ...] = (loop, f"    if {test}:", f"        return {item}", f"return {other}")
    else:
        body = (f"{s.out} = {other}", loop, f"    if {test}:", f"        {s.out} = {item}", f"return {s.out}")
    return Sketch(body, words, ((s.xs, "numbers"),))


def running_best(s: Scope) -> Sketch:
    """Element whose value is extreme; ties decided by strictness."""
    kind = s.kind("gt", "lt", "ge", "le")
    operator = {"gt": ">", "lt": "<", "ge": ">=", "le": "<="}[kind]
    key = ["square", "mod", "abs", "distance", "neg", "rsub", "cap", "same"][s.constant(0, 7)]
    state = s.rng.getstate()
    mark = len(s.kinds)
    item, what = value(s, s.x, kind=key)
    s.rng.setstate(state)
    del s.kinds[mark:]
    best, _ = value(s, s.out, kind=key)
    extreme = s.say("largest", "greatest", "most") if kind in ("gt", "ge") else s.say("smallest", "least")
    tie = "first" if kind in ("gt", "lt") else "last"
    body = (
        f"{s.out} = {s.xs}[0]",
        f"for {s.x} in {s.xs}[1:]:",
        f"    if {item} {operator} {best}:",
        f"        {s.out} = {s.x}",
        f"return {s.out}",
    )
    return Sketch(body, f"{tie} {s.x} with the {extreme} {what}", ((s.xs, "some"),))


def group(s: Scope) -> Sketch:
    """Dictionary from a key to a count or a sum."""
    kind = s.kind("count", "sum", "list")
    key, per = value(s, s.x, kind=["mod", "div", "abs", "cap", "mod"][s.constant(0, 4)])
    test, when = condition(s, s.x, simple=True)
    if kind == "list":
        step = f"{s.out}.setdefault({key}, []).append({s.x})"
        what = s.say("lists of", "group")
    else:
        step = f"{s.out}[{key}] = {s.out}.get({key}, 0) + {'1' if kind == 'count' else s.x}"
        what = {"count": s.say("count", "number of"), "sum": s.say("sum", "total of")}[kind]
    body = (f"{s.out} = {{}}", f"for {s.x} in {s.xs}:", f"    if {test}:", f"        {step}", f"return {s.out}")
    return Sketch(body, f"{what} {s.x} {when} {s.say('per', 'by', 'for each')} {per}", ((s.xs, "numbers"),))


def adjacent(s: Scope) -> Sketch:
    """Compare every element with the one before it."""
    kind = s.kind("rise", "fall", "same", "jump", "drop", "parity")
    here, before = f"{s.xs}[{s.i}]", f"{s.xs}[{s.i} - 1]"
    gap = s.constant(2, 5)
    test, when = {
        "rise": (f"{here} > {before}", s.say("rises", "goes up")),
        "fall": (f"{here} < {before}", s.say("falls", "goes down")),
        "same": (f"{here} == {before}", s.say("repeats", "stays the same")),
        "jump": (f"{here} - {before} >= {gap}", f"rises by at least {gap}"),
        "drop": (f"{before} - {here} > {gap}", f"falls by more than {gap}"),
        "parity": (f"({here} + {before}) % 2 == 0", "and the one before have an even sum"),
    }[kind]
    gain = s.kind("one", "here", "gap")
    amount, what = {
        "one": ("1", s.say("count the steps", "how many times")),
        "here": (here, s.say("sum of the items", "total of the items")),
        "gap": (f"{here} - {before}", s.say("sum of the changes", "total change")),
    }[gain]
    body = (
        f"{s.out} = 0",
        f"for {s.i} in range(1, len({s.xs})):",
        f"    if {test}:",
        f"        {s.out} += {amount}",
        f"return {s.out}",
    )
    return Sketch(body, f"{what} where {s.xs} {when}", ((s.xs, "close"),))


def prefix(s: Scope) -> Sketch:
    """List of running totals or extremes."""
    kind = s.kind("sum", "max", "min")
    item, what = value(s, s.x)
    step = f"{s.i} += {item}" if kind == "sum" else f"{s.i} = {kind}({s.i}, {item})"
    words = {"sum": "running sums of", "max": "running maximum of", "min": "running minimum of"}[kind]
    test, when = condition(s, s.x, simple=True)
    body = (
        f"{s.i} = 0",
        f"{s.out} = []",
        f"for {s.x} in {s.xs}:",
        f"    if {test}:",
        f"        {step}",
        f"    {s.out}.append({s.i})",
        f"return {s.out}",
    )
    return Sketch(body, f"{words} 0 and {what} for {s.x} {when}", ((s.xs, "numbers"),))


def text_count(s: Scope) -> Sketch:
    """Count characters of a text."""
    kind = s.kind("count", "index", "double")
    test, when = condition(s, s.char, "char")
    loop = f"for {s.i}, {s.char} in enumerate({s.text}):" if kind == "index" else f"for {s.char} in {s.text}:"
    amount = {"count": "1", "index": s.i, "double": str(s.constant(2, 4))}[kind]
    words = {
        "count": s.say("count", "number of"),
        "index": s.say("sum of positions of", "total index of"),
        "double": f"{amount} points for each",
    }[kind]
    body = (f"{s.out} = 0", loop, f"    if {test}:", f"        {s.out} += {amount}", f"return {s.out}")
    return Sketch(body, f"{words} {s.char} {when}", ((s.text, "text"),))


def text_build(s: Scope) -> Sketch:
    """Build a text character by character."""
    test, when = condition(s, s.char, "char")
    kind = s.kind("keep", "front", "else")
    item, what = value(s, s.char, "char")
    step = f"{s.out} = {item} + {s.out}" if kind == "front" else f"{s.out} += {item}"
    body = [f"{s.out} = ''", f"for {s.char} in {s.text}:", f"    if {test}:", f"        {step}"]
    words = f"{s.say('join', 'text of')} {what} for {s.char} {when}"
    if kind == "front":
        words += s.say(", backwards", ", in reverse")
    if kind == "else":
        mark = "*.-_"[s.constant(0, 3)]
        body += ["    else:", f"        {s.out} += '{mark}'"]
        words += f", {s.say('else', 'otherwise')} {mark}"
    return Sketch((*body, f"return {s.out}"), words, ((s.text, "text"),))


def recursion(s: Scope) -> Sketch:
    """Recursion over a number or a list."""
    kind = s.kind("down", "list", "times")
    if kind == "list":
        test, when = condition(s, f"{s.xs}[0]", simple=True)
        rest = f"{s.name}({s.xs}[1:]{', ' + s.parameter if s.uses_parameter else ''})"
        body: tuple[str, ...] = (
            f"if not {s.xs}:",
            "    return 0",
            f"if {test}:",
            f"    return {s.xs}[0] + {rest}",
            f"return {rest}",
        )
        return Sketch(body, f"{s.say('sum of', 'total of')} the {s.xs} {when}, one by one", ((s.xs, "numbers"),))
    low, first, step = s.constant(0, 2), s.constant(1, 5), s.constant(1, 3)
    s.allows_parameter = False
    item, what = value(s, s.x)
    body = (f"if {s.x} <= {low}:", f"    return {first}", f"return {s.name}({s.x} - {step}) + {item}")
    words = f"{first} for {s.x} {s.say('at most', 'up to')} {low}, else {what} plus the result for {s.x} minus {step}"
    if kind == "times":
        factor = s.constant(2, 3)
        body = (*body[:2], f"return {s.name}({s.x} - {step}) * {factor} + {item}")
        words = words.replace("plus the", f"plus {factor} times the")
    return Sketch(body, words, ((s.x, "small"),))


def digits(s: Scope) -> Sketch:
    """Loop over the decimal digits of a number."""
    kind = s.kind("sum", "count", "product")
    test, when = condition(s, s.i)
    item, what = value(s, s.i, kind="same" if kind == "count" else "")
    start, step = {"sum": (0, f"+= {item}"), "count": (0, "+= 1"), "product": (1, f"*= {item}")}[kind]
    words = {
        "sum": f"{s.say('sum of', 'total of')} {what} for digits {s.i}",
        "count": f"{s.say('count', 'number of')} digits {s.i}",
        "product": f"product of {what} for digits {s.i}",
    }[kind]
    body = (
        f"{s.out} = {start}",
        f"while {s.x} > 0:",
        f"    {s.i} = {s.x} % 10",
        f"    if {test}:",
        f"        {s.out} {step}",
        f"    {s.x} //= 10",
        f"return {s.out}",
    )
    return Sketch(body, f"{words} {when}", ((s.x, "large"),))


def zipped(s: Scope) -> Sketch:
    """Two lists side by side."""
    kind = s.kind("gt", "lt", "ge", "le", "eq", "ne")
    operator = {"gt": ">", "lt": "<", "ge": ">=", "le": "<=", "eq": "==", "ne": "!="}[kind]
    relation = {"gt": "above", "lt": "below", "ge": "at least", "le": "at most", "eq": "equal to", "ne": "other than"}
    gain = s.kind("product", "difference", "sum", "max", "min", "one")
    a, b = s.x, s.i
    amount, what = {
        "product": (f"{a} * {b}", f"{a} times {b}"),
        "difference": (f"{a} - {b}", f"{a} minus {b}"),
        "sum": (f"{a} + {b}", f"{a} plus {b}"),
        "max": (f"max({a}, {b})", f"the larger of {a} and {b}"),
        "min": (f"min({a}, {b})", f"the smaller of {a} and {b}"),
        "one": ("1", s.say("pairs", "places")),
    }[gain]
    words = f"{s.say('sum of', 'total of')} {what} where {a} in {s.xs} is {relation[kind]} {b} in {s.ys}"
    body = (
        f"{s.out} = 0",
        f"for {a}, {b} in zip({s.xs}, {s.ys}):",
        f"    if {a} {operator} {b}:",
        f"        {s.out} += {amount}",
        f"return {s.out}",
    )
    return Sketch(body, words, ((s.xs, "close"), (s.ys, "close")))


def sliced(s: Scope) -> Sketch:
    """A slice, then a value for each element."""
    kind = s.kind("from", "until", "every", "back", "both")
    n = s.constant(1, 3)
    part, where = {
        "from": (f"[{n}:]", s.say(f"after the first {n}", f"without the first {n}")),
        "until": (f"[:-{n}]", s.say(f"before the last {n}", f"without the last {n}")),
        "every": (f"[{n - 1}::{n + 1}]", f"at every {n + 1} places from {n - 1}"),
        "back": ("[::-1]", s.say("in reverse", "from the back")),
        "both": (f"[{n}:-1]", f"after the first {n} and before the last"),
    }[kind]
    item, what = value(s, s.x)
    shape = s.kind("list", "sum", "if")
    if shape == "sum":
        code, words = f"sum([{item} for {s.x} in {s.xs}{part}])", f"{s.say('sum of', 'total of')} {what}"
    else:
        code, words = f"[{item} for {s.x} in {s.xs}{part}]", f"{s.say('list of', 'collect')} {what}"
    if shape == "if":
        test, when = condition(s, s.x, simple=True)
        code, words = code[:-1] + f" if {test}]", words + f" for {s.x} {when}"
    return Sketch((f"return {code}",), f"{words}, {s.xs} {where}", ((s.xs, "numbers"),))


def branches(s: Scope) -> Sketch:
    """Two conditions on one number, three values."""
    (test, when), (item, what) = condition(s, s.x), value(s, s.x)
    (test2, when2), (item2, what2) = condition(s, s.x, simple=True), value(s, s.x)
    item3, what3 = value(s, s.x)
    body = (f"if {test}:", f"    return {item}", f"if {test2}:", f"    return {item2}", f"return {item3}")
    return Sketch(
        body, f"{what} if {s.x} {when}, {what2} if {when2}, {s.say('else', 'otherwise')} {what3}", ((s.x, "any"),)
    )
