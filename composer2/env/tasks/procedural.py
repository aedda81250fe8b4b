"""Endless fresh debugging tasks: a generated function with one wrong token, its docstring, and recorded tests.

In: an explicit `random.Random`, a split, a `TaskConfig`. Out: a `Task` whose reference passes every test and whose
files fail at least one.

Source: report §2 (problems the agent can verify), §4.1 (held-out problems); rows T1 E6 V1.
Choice: splits are made by composition (skeleton and kinds of its parts): md5(composition) % 10 is 0 for test, 1 for
dev, else train. The skeletons of "ood" occur in no other split. Nothing is stored: a task is a function of the
generator's state.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from composer2.env.tasks.mutate import (
    BUG_KINDS,
    Mutation,
    apply_mutation,
    as_edit,
    mutation_sites,
)
from composer2.env.tasks.parts import Scope, draw_scope, words_of
from composer2.env.tasks.record import compile_calls, is_passing, run_calls
from composer2.env.tasks.skeletons_more import OOD_SKELETONS, TRAIN_SKELETONS
from composer2.types import CallStatus, Task, TestCase

SPLITS = ("train", "dev", "test", "ood")
VARIANTS = ("plain", "long", "unopened", "search")
MAX_CHARS = {"plain": 500, "long": 230, "unopened": 230, "search": 230}
"""Longest function of each variant: a file that is read must fit an answer, a long file must leave room to act."""
LONG_CHARS = (260, 360)
"""Size of a "long" file: about 150 to 200 tokens of a small vocabulary."""
PATHS = ("main.py", "code.py", "util.py", "core.py", "base.py", "data.py", "text.py", "list.py")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Which tasks are drawn."""

    plain_weight: float = 0.80
    """The prompt shows the one file."""
    long_weight: float = 0.12
    """The file also holds one or two further, correct functions."""
    unopened_weight: float = 0.05
    """The instruction names the file, the agent has to read it."""
    search_weight: float = 0.03
    """Several files; the instruction names the function, the agent has to find it."""
    variable_weight: float = 0.3
    """Weight of wrong-variable bugs against 1 for each other kind: they are the hardest."""
    num_tests: int = 10
    """Calls recorded for each task; the feedback of `run` is one digit, so at most 10."""
    min_distinct: int = 3
    """Distinct results the reference must give, so that tests are worth something."""

    def __post_init__(self) -> None:
        for name in ("plain_weight", "long_weight", "unopened_weight", "search_weight", "variable_weight"):
            if not 0.0 <= getattr(self, name) <= 1e6:
                raise ValueError(f"TaskConfig.{name}: {getattr(self, name)}, accepted is a weight of 0 or more")
        if not any(self.variant_weights()):
            raise ValueError("TaskConfig.plain_weight: all variant weights are 0, accepted is at least one above 0")
        if not 1 <= self.num_tests <= 10:
            raise ValueError(f"TaskConfig.num_tests: {self.num_tests}, accepted is 1 to 10")
        if not 1 <= self.min_distinct <= self.num_tests:
            raise ValueError(f"TaskConfig.min_distinct: {self.min_distinct}, accepted is 1 to num_tests")

    def variant_weights(self) -> tuple[float, ...]:
        """In the order of `VARIANTS`."""
        return (self.plain_weight, self.long_weight, self.unopened_weight, self.search_weight)


@dataclass(frozen=True, slots=True)
class Function:
    """One generated function."""

    name: str
    source: str
    composition: str
    argument_kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bug:
    """A broken text, the edit that repairs it, and which tests it fails."""

    source: str
    fix: Mutation
    passed: tuple[bool, ...]


def split_of(composition: str) -> str:
    """The split a composition of trained skeletons belongs to."""
    digit = int(hashlib.md5(composition.encode()).hexdigest(), 16) % 10
    return {0: "test", 1: "dev"}.get(digit, "train")


def generate_function(rng: random.Random, split: str) -> Function:
    """A function of the split, drawn until its composition fits."""
    skeletons = OOD_SKELETONS if split == "ood" else TRAIN_SKELETONS
    while True:
        skeleton = skeletons[int(rng.random() * len(skeletons))]
        scope = draw_scope(rng)
        sketch = skeleton(scope)
        composition = "|".join((skeleton.__name__, *scope.kinds))
        if split == "ood" or split_of(composition) == split:
            return _write(scope, sketch.body, sketch.words, sketch.arguments, composition)


def _write(
    scope: Scope, body: Sequence[str], words: str, arguments: Sequence[tuple[str, str]], composition: str
) -> Function:
    if scope.uses_parameter:
        arguments = (*arguments, (scope.parameter, "parameter"))
    names = ", ".join(name for name, _ in arguments)
    lines = [f"def {scope.name}({names}):", f'    """{words}"""', *("    " + line for line in body)]
    return Function(scope.name, "\n".join(lines) + "\n", composition, tuple(kind for _, kind in arguments))


# ---------------------------------------------------------------------------------------------------------------------
# Inputs

LETTERS = "aaabcdeeiknorstuABEKT0129"
WORDS = words_of("ab sea toes abbot best oboe east stone tabs a to set bee lotto as area")


def draw_argument(rng: random.Random, kind: str) -> Any:
    """One random input of a kind that skeletons name."""

    def number(low: int, high: int) -> int:
        return low + int(rng.random() * (high - low + 1))

    if kind == "numbers":
        return [number(-4, 11) for _ in range(number(1, 8))]
    if kind == "some":
        return [number(-4, 11) for _ in range(number(3, 7))]
    if kind == "few":
        return [number(-3, 9) for _ in range(number(2, 4))]
    if kind == "close":
        return [number(0, 7) for _ in range(number(2, 7))]
    if kind == "sorted":
        return sorted(number(0, 9) for _ in range(number(1, 4)))
    if kind == "falling":
        return sorted((number(0, 9) for _ in range(number(1, 4))), reverse=True)
    if kind == "rows":
        return [[number(-3, 9) for _ in range(number(1, 3))] for _ in range(number(1, 4))]
    if kind == "text":
        return "".join(LETTERS[number(0, len(LETTERS) - 1)] for _ in range(number(2, 9)))
    if kind == "words":
        return [WORDS[number(0, len(WORDS) - 1)] for _ in range(number(1, 5))]
    low, high = {"any": (-6, 14), "small": (0, 12), "large": (0, 999), "parameter": (1, 8)}[kind]
    return number(low, high)


def draw_calls(rng: random.Random, function: Function, count: int) -> list[str]:
    """Call expressions with random arguments."""
    calls = []
    for _ in range(count):
        arguments = ", ".join(repr(draw_argument(rng, kind)) for kind in function.argument_kinds)
        calls.append(f"{function.name}({arguments})")
    return calls


# ---------------------------------------------------------------------------------------------------------------------
# Bugs and tests


def record_tests(
    source: str, calls: Sequence[str], compiled: Sequence[CodeType], path: str, min_distinct: int
) -> list[TestCase] | None:
    """Tests expecting what `source` returns, or None when some call does not return or results are too alike."""
    outcomes = run_calls(source, compiled)
    if any(outcome.status is not CallStatus.RETURNED for outcome in outcomes):
        return None
    if len({outcome.value for outcome in outcomes}) < min_distinct:
        return None
    return [
        TestCase(name=f"t{n}", module=path, call=call, expected=outcome.value)
        for n, (call, outcome) in enumerate(zip(calls, outcomes, strict=True))
    ]


def draw_bug(
    rng: random.Random, source: str, tests: Sequence[TestCase], compiled: Sequence[CodeType], variable_weight: float
) -> Bug | None:
    """One mutation that fails a test and never runs out of time; its kind is drawn first. None when no draw does."""
    sites = mutation_sites(source)
    kinds = [kind for kind in BUG_KINDS if kind in sites]
    while kinds:
        weights = [variable_weight if kind == "variable" else 1.0 for kind in kinds]
        if not any(weights):
            return None
        kind = rng.choices(kinds, weights)[0]
        kinds.remove(kind)
        for number, start, stop, new in rng.sample(sites[kind], min(3, len(sites[kind]))):
            lines = source.split("\n")
            line = lines[number - 1]
            broken = line[:start] + new + line[stop:]
            fix = as_edit(broken, number, start, start + len(new), line[start:stop], kind)
            lines[number - 1] = broken
            text = "\n".join(lines)
            outcomes = run_calls(text, compiled)
            statuses = {outcome.status for outcome in outcomes}
            if CallStatus.TIMEOUT in statuses or CallStatus.CRASHED in statuses:
                continue
            passed = tuple(is_passing(test, outcome) for test, outcome in zip(tests, outcomes, strict=True))
            if not all(passed):
                return Bug(text, fix, passed)
    return None


def task_hash(instruction: str, files: Mapping[str, str], recent_files: Sequence[str]) -> str:
    """Identity of what the model can see."""
    text = json.dumps([instruction, sorted(files.items()), list(recent_files)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_task(
    *,
    bug: Bug,
    reference: str,
    tests: Sequence[TestCase],
    path: str,
    family: str,
    variant: str = "plain",
    other_files: Mapping[str, str] | None = None,
    instruction: str = "",
    meta: Mapping[str, Any] | None = None,
) -> Task:
    """Assemble a task around a bug in `path`."""
    others = dict(other_files or {})
    files = dict(sorted({**others, path: bug.source}.items()))
    recent = () if variant in ("unopened", "search") else (path,)
    assert apply_mutation(bug.source, bug.fix) == reference
    return Task(
        task_id=task_hash(instruction, files, recent),
        instruction=instruction,
        files=files,
        recent_files=recent,
        fail_to_pass=tuple(test for test, passed in zip(tests, bug.passed, strict=True) if not passed),
        pass_to_pass=tuple(test for test, passed in zip(tests, bug.passed, strict=True) if passed),
        reference={**files, path: reference},
        family=family,
        meta={
            "bug_kind": bug.fix.kind,
            "line": bug.fix.line,
            "old": bug.fix.old,
            "new": bug.fix.new,
            "path": path,
            "variant": variant,
            **(meta or {}),
        },
    )


def generate_task(rng: random.Random, split: str = "train", config: TaskConfig | None = None) -> Task:
    """A fresh task of the split: "train", "dev", "test" or "ood". About one millisecond."""
    if split not in SPLITS:
        raise ValueError(f"split: {split!r}, accepted is one of {', '.join(SPLITS)}")
    config = config or TaskConfig()
    variant = rng.choices(VARIANTS, config.variant_weights())[0]
    while True:
        function = generate_function(rng, split)
        if len(function.source) > MAX_CHARS[variant]:
            continue
        calls = draw_calls(rng, function, config.num_tests)
        compiled = compile_calls(calls)
        path = PATHS[int(rng.random() * len(PATHS))] if variant in ("unopened", "search") else PATHS[0]
        tests = record_tests(function.source, calls, compiled, path, config.min_distinct)
        if tests is None:
            continue
        bug = draw_bug(rng, function.source, tests, compiled, config.variable_weight)
        if bug is None:
            continue
        return _dress(rng, split, variant, function, bug, tests, path)


def _dress(
    rng: random.Random, split: str, variant: str, function: Function, bug: Bug, tests: Sequence[TestCase], path: str
) -> Task:
    """Put the bug into the files of its variant."""
    reference = function.source
    others: dict[str, str] = {}
    instruction = {"unopened": f"fix {path}", "search": f"fix {function.name}"}.get(variant, "")
    if variant == "long":
        low, high = LONG_CHARS
        size = len(function.source)
        helpers = _helpers(rng, split, function, at_least=low - size, at_most=high - size)
        above = [h.source for h in helpers if rng.random() < 0.5]
        below = [h.source for h in helpers if h.source not in above]
        shift = sum(text.count("\n") + 1 for text in above)
        fix = Mutation(bug.fix.line + shift, bug.fix.old, bug.fix.new, bug.fix.kind)
        bug = Bug("\n".join((*above, bug.source, *below)), fix, bug.passed)
        reference = "\n".join((*above, reference, *below))
    elif variant == "search":
        helpers = _helpers(rng, split, function, at_least=150, at_most=400)
        paths = rng.sample([p for p in PATHS if p != path], len(helpers))
        others = {p: helper.source for p, helper in zip(paths, helpers, strict=True)}
    return make_task(
        bug=bug,
        reference=reference,
        tests=tests,
        path=path,
        family=function.composition,
        variant=variant,
        other_files=others,
        instruction=instruction,
        meta={"split": split, "function": function.name},
    )


def _helpers(rng: random.Random, split: str, function: Function, *, at_least: int, at_most: int) -> list[Function]:
    """Correct functions with other names, until together they have the wanted number of characters.

    They are of the same split; beside held-out skeletons stand held-out compositions, which can be shorter.
    """
    helpers: list[Function] = []
    size = 0
    while size < at_least:
        helper = generate_function(rng, "test" if split == "ood" else split)
        fits = size + len(helper.source) <= at_most
        if fits and helper.name not in {function.name, *(other.name for other in helpers)}:
            helpers.append(helper)
            size += len(helper.source) + 1
    return helpers
