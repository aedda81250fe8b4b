"""Run trusted, generator-made code on recorded calls within bounds, and say what a model would see.

In: source text and call expressions. Out: `CallOutcome`s, compared with `TestCase`s.

Source: rows E5 E6 (tests are recorded on the reference, F2P and P2P decided by running).
Choice: this runs in the calling process, because the code is ours and a pod per mutation would cost more than
training. Code that a model wrote must never come here: it belongs in a pod. Bounds are counted in loop rounds and
calls, not in seconds, so that a seed gives the same tasks on any machine under any load, in any thread.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

from composer2.env.guest_calls import MAX_VALUE_CHARS, NotPlain, plain_repr
from composer2.types import CallOutcome, CallStatus, TestCase

CODE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
"""What running code may raise."""


MAX_STEPS = 3000
"""Loop rounds and function calls of one test call."""
MAX_BITS = 4096
"""Size of an integer, and length of a text or list, that a loop may build."""
WHILE = re.compile(r"^([ ]*)while (.+):$", re.MULTILINE)
FOR = re.compile(r"^([ ]*)for (.+?) in (.+):$", re.MULTILINE)
DEF = re.compile(r"^([ ]*)def ", re.MULTILINE)


class OutOfSteps(BaseException):
    """The bound is reached. Not an Exception, so that the code under test cannot swallow it."""


class Guard:
    """Counts the steps of one call; the instrumented source calls it in every loop round and function."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0

    def tick(self) -> bool:
        """One round of a `while`; True, to stand before its condition."""
        self.steps += 1
        if self.steps & 7 == 0:
            self.check(sys._getframe(1))
        return True

    def bounded(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a `for`, counted."""
        for item in items:
            self.steps += 1
            if self.steps & 7 == 0:
                self.check(sys._getframe(1))
            yield item

    def entry(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator that counts calls."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise OutOfSteps
            return function(*args, **kwargs)

        return counted

    def check(self, frame: FrameType) -> None:
        """Raise when there were too many steps or a local value grew too large: eight squarings are harmless."""
        if self.steps > MAX_STEPS:
            raise OutOfSteps
        for value in frame.f_locals.values():
            kind = type(value)
            if kind is int:
                if value.bit_length() > MAX_BITS:
                    raise OutOfSteps
            elif (kind is str or kind is list) and len(value) > MAX_BITS:
                raise OutOfSteps


def instrument(source: str) -> str:
    """Source with every loop and function counted; each statement stands on one line, as `ast.unparse` writes it."""
    source = WHILE.sub(r"\1while _tick() and (\2):", source)
    source = FOR.sub(r"\1for \2 in _bounded(\3):", source)
    return DEF.sub(r"\1@_entry\n\1def ", source)


def is_simple(value: object) -> bool:
    """Whether `repr` writes the value as a pod would: numbers, text, None, and small lists, tuples, dicts of them."""
    open_values = [value]
    for _ in range(MAX_VALUE_CHARS):
        if not open_values:
            return True
        item = open_values.pop()
        kind = type(item)
        if kind is list or kind is tuple:
            open_values += item  # type: ignore[arg-type]
        elif kind is dict:
            open_values += item.keys()  # type: ignore[attr-defined]
            open_values += item.values()  # type: ignore[attr-defined]
        elif kind is int:
            if item.bit_length() > MAX_BITS:  # type: ignore[attr-defined]
                return False
        elif kind not in (str, bool, float, type(None)):
            return False
    return not open_values


def compile_calls(calls: Sequence[str]) -> list[CodeType]:
    """Compiled call expressions, for repeated use."""
    return [compile(call, "<call>", "eval") for call in calls]


def run_calls(source: str, calls: Sequence[CodeType], *, locate: bool = False) -> list[CallOutcome]:
    """Outcome of each call over the names of `source`, all in one namespace; `locate` fills `CallOutcome.line`.

    The first call that exceeds its steps is TIMEOUT, and so are those after it, unrun. Source that does not compile or
    import makes every call CRASHED.
    """
    guard = Guard()
    namespace: dict[str, Any] = {
        "__name__": "solution",
        "_tick": guard.tick,
        "_bounded": guard.bounded,
        "_entry": guard.entry,
    }
    outcomes: list[CallOutcome] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # a mutation may well read `3[0]`
            instrumented = instrument(source)
            code = compile(instrumented, "<task>", "exec")
        exec(code, namespace)
        added = [n for n, line in enumerate(instrumented.split("\n"), 1) if line.endswith("@_entry")] if locate else []
        for call in calls:
            guard.steps = 0
            if not locate:
                outcomes.append(_run_call(call, namespace))
                continue
            with last_line() as seen:
                outcome = _run_call(call, namespace)
            outcomes.append(replace(outcome, line=seen[0] - bisect(added, seen[0])))
    except OutOfSteps:
        outcomes += [CallOutcome(status=CallStatus.TIMEOUT)] * (len(calls) - len(outcomes))
    except (SyntaxError, *CODE_ERRORS):
        outcomes = [CallOutcome(status=CallStatus.CRASHED)] * len(calls)
    return outcomes


@contextmanager
def last_line() -> Iterator[list[int]]:
    """A list whose one entry becomes the line on which the outermost function of `<task>` ended; 0 before that."""
    seen = [0]

    def note_line(frame: FrameType, event: str, argument: object) -> None:
        if event == "return" and frame.f_code.co_filename == "<task>":
            seen[0] = frame.f_lineno

    previous = sys.getprofile()
    sys.setprofile(note_line)
    try:
        yield seen
    finally:
        sys.setprofile(previous)


def _run_call(call: CodeType, namespace: dict[str, Any]) -> CallOutcome:
    try:
        value = eval(call, namespace)
        text = repr(value) if is_simple(value) else plain_repr(value)
    except NotPlain:
        return CallOutcome(status=CallStatus.CRASHED)
    except CODE_ERRORS as error:
        return CallOutcome(status=CallStatus.RAISED, value=type(error).__name__)
    if len(text) > MAX_VALUE_CHARS:
        return CallOutcome(status=CallStatus.CRASHED)
    return CallOutcome(status=CallStatus.RETURNED, value=text)


def is_passing(test: TestCase, outcome: CallOutcome) -> bool:
    """Whether the outcome is the one the test expects."""
    if test.raises:
        return outcome.status is CallStatus.RAISED and outcome.value == test.raises
    return outcome.status is CallStatus.RETURNED and outcome.value == test.expected


def run_tests(source: str, tests: Sequence[TestCase], *, compiled: Sequence[CodeType] | None = None) -> list[bool]:
    """Pass or fail of every test on trusted source, in order."""
    outcomes = run_calls(source, compiled or compile_calls([test.call for test in tests]))
    return [is_passing(test, outcome) for test, outcome in zip(tests, outcomes, strict=True)]


def plain_tests(test_files: Mapping[str, str], modules: Mapping[str, str]) -> list[TestCase]:
    """Tests from `assert CALL == LITERAL` lines of test files: the module is the one that defines the called name.

    Nothing is executed. Assertions of any other form are left out."""
    owners = {
        node.name: path for path, text in modules.items() for node in ast.parse(text).body if hasattr(node, "name")
    }
    tests = []
    for path, text in test_files.items():
        for node in ast.walk(ast.parse(text)):
            if not (isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare)):
                continue
            left, ops, rights = node.test.left, node.test.ops, node.test.comparators
            if not (
                isinstance(left, ast.Call) and isinstance(left.func, ast.Name) and [type(op) for op in ops] == [ast.Eq]
            ):
                continue
            if left.func.id not in owners:
                continue
            try:
                expected = plain_repr(ast.literal_eval(rights[0]))
            except ValueError:
                continue
            name = f"{path}:{node.lineno}"
            tests.append(TestCase(name=name, module=owners[left.func.id], call=ast.unparse(left), expected=expected))
    return tests
