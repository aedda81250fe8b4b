"""Further skeletons of generated functions, the structures held out for the split "ood", and the tables of both.

In: a `Scope` of names. Out: a `Sketch`, as in `skeletons`.

Source: report §2; rows T1 E6.
Choice: held-out structures differ from the trained ones in how the loop moves (windows, pairs, runs, merges, rows), not
only in what it computes.
"""

from __future__ import annotations

from collections.abc import Callable

from composer2.env.tasks import skeletons as base
from composer2.env.tasks.parts import Scope, condition, value
from composer2.env.tasks.skeletons import Sketch


def while_count(s: Scope) -> Sketch:
    """Count the steps of a shrinking number."""
    kind = s.kind("half", "third", "minus", "parity")
    low = s.constant(0, 5)
    step = s.constant(2, 4)
    gain = s.kind("one", "value")
    move, how = {
        "half": (f"    {s.x} //= 2", s.say("halving", "halving down")),
        "third": (f"    {s.x} //= 3", "dividing by 3"),
        "minus": (f"    {s.x} -= {step}", s.say(f"taking away {step}", f"subtracting {step}")),
        "parity": (f"    {s.x} = {s.x} // 2 if {s.x} % 2 == 0 else {s.x} - 1", "halving if even, else minus 1"),
    }[kind]
    amount, what = ("1", s.say("steps", "count the steps")) if gain == "one" else (s.x, s.say("sum of", "total of"))
    words = f"{what} {s.x} while {s.x} is {s.say('above', 'more than')} {low}, {how}"
    body = (f"{s.out} = 0", f"while {s.x} > {low}:", f"    {s.out} += {amount}", move, f"return {s.out}")
    return Sketch(body, words, ((s.x, "large"),))


def two_pointers(s: Scope) -> Sketch:
    """Walk from both ends at once."""
    kind = s.kind("eq", "ne", "gt", "lt", "even")
    left, right = f"{s.xs}[{s.i}]", f"{s.xs}[-{s.i} - 1]"
    test, when = {
        "eq": (f"{left} == {right}", s.say("match", "are equal")),
        "ne": (f"{left} != {right}", s.say("differ", "are not equal")),
        "gt": (f"{left} > {right}", "fall"),
        "lt": (f"{left} < {right}", "rise"),
        "even": (f"({left} + {right}) % 2 == 0", "have an even sum"),
    }[kind]
    gain = s.kind("one", "left", "both")
    amount, what = {
        "one": ("1", "number of"),
        "left": (left, "sum of left in"),
        "both": (f"{left} + {right}", "sum of"),
    }[gain]
    body = (
        f"{s.out} = 0",
        f"for {s.i} in range(len({s.xs}) // 2):",
        f"    if {test}:",
        f"        {s.out} += {amount}",
        f"return {s.out}",
    )
    return Sketch(body, f"{what} {s.say('mirrored', 'opposite')} pairs of {s.xs} that {when}", ((s.xs, "close"),))


def word_list(s: Scope) -> Sketch:
    """Comprehension over words."""
    test, when = condition(s, s.x, "word")
    item, what = value(s, s.x, "word")
    kind = s.kind("list", "join", "sorted")
    inner = f"[{item} for {s.x} in {s.xs} if {test}]"
    if kind == "join" and "len" not in item:
        return Sketch((f"return ' '.join({inner})",), f"join {what} for {s.x} {when}", ((s.xs, "words"),))
    if kind == "sorted":
        return Sketch(
            (f"return sorted({inner})",), f"{s.say('sorted', 'ordered')} {what} for {s.x} {when}", ((s.xs, "words"),)
        )
    return Sketch((f"return {inner}",), f"{s.say('list of', 'collect')} {what} for {s.x} {when}", ((s.xs, "words"),))


def range_loop(s: Scope) -> Sketch:
    """Numbers from a range."""
    first = s.constant(0, 3)
    kind = s.kind("upto", "below")
    test, when = condition(s, s.i)
    item, what = value(s, s.i)
    stop, until = (f"{s.x} + 1", s.say("to", "up to")) if kind == "upto" else (s.x, s.say("below", "up to but not"))
    body = (
        f"{s.out} = 0",
        f"for {s.i} in range({first}, {stop}):",
        f"    if {test}:",
        f"        {s.out} += {item}",
        f"return {s.out}",
    )
    words = f"{s.say('sum of', 'total of')} {what} for {s.i} from {first} {until} {s.x}, {s.i} {when}"
    return Sketch(body, words, ((s.x, "small"),))


def early_stop(s: Scope) -> Sketch:
    """Collect until a condition holds, or skip where it holds."""
    kind = s.kind("break", "continue")
    test, when = condition(s, s.x)
    item, what = value(s, s.x)
    words = f"{s.say('list of', 'collect')} {what}, " + (
        f"{s.say('until', 'stopping at')} {s.x} {when}"
        if kind == "break"
        else f"{s.say('skipping', 'leaving out')} {s.x} {when}"
    )
    body = (
        f"{s.out} = []",
        f"for {s.x} in {s.xs}:",
        f"    if {test}:",
        f"        {kind}",
        f"    {s.out}.append({item})",
        f"return {s.out}",
    )
    return Sketch(body, words, ((s.xs, "numbers"),))


def places(s: Scope) -> Sketch:
    """Positions and values together."""
    kind = s.kind("even", "odd", "weight")
    test, when = condition(s, s.x, simple=True)
    item, what = value(s, s.x)
    if kind == "weight":
        amount, place = f"{s.i} * {s.x}", f"{s.i} times {s.x}"
        check = test
    else:
        amount, place = item, f"{what} at {kind} {s.i}"
        check = (
            f"{s.i} % 2 == {int(kind == 'odd')} and ({test})"
            if " or " in test
            else (f"{s.i} % 2 == {int(kind == 'odd')} and {test}")
        )
    body = (
        f"{s.out} = 0",
        f"for {s.i}, {s.x} in enumerate({s.xs}):",
        f"    if {check}:",
        f"        {s.out} += {amount}",
        f"return {s.out}",
    )
    return Sketch(body, f"{s.say('sum of', 'total of')} {place} for {s.x} {when}", ((s.xs, "numbers"),))


def quantified(s: Scope) -> Sketch:
    """any or all inside a comprehension over rows."""
    kind = s.kind("any", "all")
    test, when = condition(s, s.x)
    gain = s.kind("rows", "count", "sums")
    inner = f"{kind}({test} for {s.x} in {s.i})"
    code, what = {
        "rows": (f"[{s.i} for {s.i} in {s.xs} if {inner}]", s.say("list of", "keep")),
        "count": (f"len([{s.i} for {s.i} in {s.xs} if {inner}])", s.say("number of", "count")),
        "sums": (f"[sum({s.i}) for {s.i} in {s.xs} if {inner}]", s.say("sums of", "total of each of")),
    }[gain]
    word = "some" if kind == "any" else s.say("every", "each")
    return Sketch((f"return {code}",), f"{what} the {s.i} in {s.xs} where {word} {s.x} is {when}", ((s.xs, "rows"),))


# ---------------------------------------------------------------------------------------------------------------------
# Held out


def window(s: Scope) -> Sketch:
    """Sliding window."""
    kind = s.kind("sum", "max", "min", "gap")
    width = s.constant(2, 3)
    part = f"{s.xs}[{s.i}:{s.i} + {width}]"
    code, what = {
        "sum": (f"sum({part})", "sum"),
        "max": (f"max({part})", s.say("largest", "maximum")),
        "min": (f"min({part})", s.say("smallest", "minimum")),
        "gap": (f"max({part}) - min({part})", "spread"),
    }[kind]
    body = (
        f"{s.out} = []",
        f"for {s.i} in range(len({s.xs}) - {width - 1}):",
        f"    {s.out}.append({code})",
        f"return {s.out}",
    )
    return Sketch(body, f"{what} of every {width} neighbours in {s.xs}", ((s.xs, "some"),))


def pairs(s: Scope) -> Sketch:
    """All pairs of positions."""
    kind = s.kind("sum", "gap", "inverted", "product")
    n = s.constant(3, 8)
    a, b = f"{s.xs}[{s.i}]", f"{s.xs}[{s.x}]"
    test, when = {
        "sum": (f"{a} + {b} == {n}", f"sum to {n}"),
        "gap": (f"abs({a} - {b}) <= {n - 2}", f"differ by at most {n - 2}"),
        "inverted": (f"{a} > {b}", "are out of order"),
        "product": (f"{a} * {b} > {n}", f"multiply to more than {n}"),
    }[kind]
    body = (
        f"{s.out} = 0",
        f"for {s.i} in range(len({s.xs})):",
        f"    for {s.x} in range({s.i} + 1, len({s.xs})):",
        f"        if {test}:",
        f"            {s.out} += 1",
        f"return {s.out}",
    )
    return Sketch(body, f"{s.say('number of', 'count')} pairs in {s.xs} that {when}", ((s.xs, "close"),))


def longest_run(s: Scope) -> Sketch:
    """Longest run of elements that satisfy a condition."""
    test, when = condition(s, s.x)
    body = (
        f"{s.out} = 0",
        f"{s.i} = 0",
        f"for {s.x} in {s.xs}:",
        f"    {s.i} = {s.i} + 1 if {test} else 0",
        f"    {s.out} = max({s.out}, {s.i})",
        f"return {s.out}",
    )
    return Sketch(body, f"{s.say('length of the', 'the')} longest run of {s.x} {when}", ((s.xs, "numbers"),))


def merge(s: Scope) -> Sketch:
    """Merge two sorted lists."""
    kind = s.kind("up", "down")
    operator, words, order = ("<=", "ascending", "sorted") if kind == "up" else (">=", "descending", "falling")
    body = (
        f"{s.out} = []",
        f"{s.i} = 0",
        f"for {s.x} in {s.xs}:",
        f"    while {s.i} < len({s.ys}) and {s.ys}[{s.i}] {operator} {s.x}:",
        f"        {s.out}.append({s.ys}[{s.i}])",
        f"        {s.i} += 1",
        f"    {s.out}.append({s.x})",
        f"return {s.out} + {s.ys}[{s.i}:]",
    )
    return Sketch(body, f"merge {words} {s.xs} and {s.ys}", ((s.xs, order), (s.ys, order)))


def rows(s: Scope) -> Sketch:
    """One number for each row of a table."""
    kind = s.kind("sum", "count")
    test, when = condition(s, s.x)
    item, what = value(s, s.x) if kind == "sum" else ("1", "number")
    body = (
        f"{s.out} = []",
        f"for {s.i} in {s.xs}:",
        f"    {s.out}.append(0)",
        f"    for {s.x} in {s.i}:",
        f"        if {test}:",
        f"            {s.out}[-1] += {item}",
        f"return {s.out}",
    )
    return Sketch(
        body, f"for each {s.i}, {'sum' if kind == 'sum' else 'count'} of {what} for {s.x} {when}", ((s.xs, "rows"),)
    )


TRAIN_SKELETONS: tuple[Callable[[Scope], Sketch], ...] = (
    base.accumulate,
    base.comprehension,
    base.reduction,
    base.find,
    base.running_best,
    base.group,
    base.adjacent,
    base.prefix,
    base.text_count,
    base.text_build,
    base.recursion,
    base.digits,
    base.zipped,
    base.sliced,
    base.branches,
    while_count,
    two_pointers,
    word_list,
    range_loop,
    early_stop,
    places,
    quantified,
)
OOD_SKELETONS: tuple[Callable[[Scope], Sketch], ...] = (window, pairs, longest_run, merge, rows)
