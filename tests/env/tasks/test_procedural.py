import ast
import collections
import hashlib
import random
import re
import subprocess
import sys
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.env.tasks.mutate import BUG_KINDS
from composer2.env.tasks.procedural import (
    SPLITS,
    TaskConfig,
    generate_function,
    generate_task,
    split_of,
)
from composer2.env.tasks.record import compile_calls, run_calls, run_tests
from composer2.env.tasks.skeletons_more import OOD_SKELETONS, TRAIN_SKELETONS
from composer2.env.tools.lines import apply_edit
from composer2.types import CallStatus

OOD_NAMES = {skeleton.__name__ for skeleton in OOD_SKELETONS}


def many(count, split="train", seed=0, **config):
    rng = random.Random(seed)
    return [generate_task(rng, split, TaskConfig(**config)) for _ in range(count)]


def test_same_seed_same_tasks_whatever_the_global_generator():
    random.seed(1)
    first = many(40)
    random.seed(2)
    assert many(40) == first
    assert many(40, seed=1) != first


def test_tasks_do_not_depend_on_the_hash_seed():
    """The order of sets must not leak into a draw."""
    code = (
        "import random; from composer2.env.tasks.evalsets import build_eval_set;"
        "print([t.task_id for name in ('dev', 'humaneval', 'stdlib') for t in build_eval_set(name, 20, 0)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**40))
def test_no_composition_is_in_two_splits(seed):
    rng = random.Random(seed)
    found = {split: {generate_function(rng, split).composition for _ in range(15)} for split in SPLITS}
    for split in ("train", "dev", "test"):
        assert {split_of(composition) for composition in found[split]} == {split}
        assert not {composition.split("|")[0] for composition in found[split]} & OOD_NAMES
    assert {composition.split("|")[0] for composition in found["ood"]} <= OOD_NAMES


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**40))
def test_helper_functions_of_train_tasks_are_no_test_functions(seed):
    """A held-out function must not be shown as a correct one either: regenerate every test function's text."""
    rng = random.Random(seed)
    held_out = {_shape(generate_function(rng, "test").source) for _ in range(150)}
    for task in many(8, seed=seed, plain_weight=0, unopened_weight=0, search_weight=0):
        for text in task.reference["main.py"].split("\n\n"):
            assert _shape(text) not in held_out


def _shape(source):
    """Code without docstring, names and constants."""
    body = re.sub(r'""".*?"""', "", source)
    return re.sub(r"\s+", " ", body).strip()


def test_split_rule_by_hand():
    for composition in ("accumulate|sum|gt|madd", "find|first|even|msame", "x"):
        digit = int(hashlib.md5(composition.encode()).hexdigest()[-8:], 16)
        full = int(hashlib.md5(composition.encode()).hexdigest(), 16)
        assert full % 2 == digit % 2
        assert split_of(composition) == {0: "test", 1: "dev"}.get(full % 10, "train")


@pytest.mark.parametrize("split", SPLITS)
def test_reference_passes_and_bug_fails(split):
    for task in many(60, split, seed=5):
        path = task.meta["path"]
        tests = (*task.fail_to_pass, *task.pass_to_pass)
        assert len(tests) == 10
        assert task.fail_to_pass
        assert all(run_tests(task.reference[path], tests))
        before = run_tests(task.files[path], tests)
        assert before == [False] * len(task.fail_to_pass) + [True] * len(task.pass_to_pass)
        assert len({test.expected for test in tests}) >= 3
        assert {test.module for test in tests} == {path}


@pytest.mark.parametrize("split", SPLITS)
def test_the_noted_edit_gives_the_reference(split):
    for task in many(80, split, seed=6):
        meta = task.meta
        changed = apply_edit(task.files[meta["path"]], line=meta["line"], old=meta["old"], new=meta["new"])
        assert {**task.files, meta["path"]: changed} == task.reference


def test_code_is_spaced_as_ast_unparse_writes_it():
    rng = random.Random(7)
    for split in ("train", "ood"):
        for _ in range(300):
            source = generate_function(rng, split).source
            again = re.sub(
                r"(sum|any|all|len)\(\((.*? for .*?)\)\)$", r"\1(\2)", ast.unparse(ast.parse(source)), flags=re.M
            )
            spaced = lambda text: re.sub(r"[()]", "", text).strip()  # noqa: E731
            assert spaced(again) == spaced(source)


def test_there_are_enough_parts_and_hardly_any_repeats():
    assert len(TRAIN_SKELETONS) >= 15
    assert len(OOD_SKELETONS) >= 4
    rng = random.Random(8)
    functions = [generate_function(rng, "train") for _ in range(3000)]
    kinds = {kind for f in functions for kind in f.composition.split("|")[1:]}
    conditions = {
        k.rstrip("p")
        for k in kinds
        if re.fullmatch(
            r"(gt|ge|lt|le|eq|ne|even|odd|div|rem|between|outside|"
            r"positive|negative|small|apart)p?",
            k,
        )
    }
    values = {k for k in kinds if k.startswith("m") and k not in ("max", "min", "minus")}
    assert len(conditions) >= 13
    assert len(values) >= 14
    assert any("-and-" in k for k in kinds)
    assert any("-or-" in k for k in kinds)
    assert len({f.source for f in functions}) > 2940
    assert len({f.composition for f in functions}) > 1200
    assert len({f.composition.split("|")[0] for f in functions}) == len(TRAIN_SKELETONS)


def test_docstring_decides_constants():
    """Two functions whose code differs in a constant have different words."""
    rng = random.Random(9)
    by_words = collections.defaultdict(set)
    for _ in range(4000):
        name, words, *body = generate_function(rng, "train").source.split("\n")
        by_words[name, words].add("\n".join(body))
    ambiguous = sum(len(bodies) > 1 for bodies in by_words.values())
    assert ambiguous <= 4


def test_bug_kinds_are_spread_and_wrong_variables_rarer():
    counts = collections.Counter(task.meta["bug_kind"] for task in many(800))
    assert set(counts) == set(BUG_KINDS)
    for kind in ("compare", "arithmetic", "assign", "constant", "word"):
        assert counts[kind] > 60
    assert 20 < counts["variable"] < 130
    none = many(200, variable_weight=0.0)
    assert not any(task.meta["bug_kind"] == "variable" for task in none)


def test_variants_have_their_shares_and_forms():
    tasks = many(1500, seed=2)
    by_variant = collections.defaultdict(list)
    for task in tasks:
        by_variant[task.meta["variant"]].append(task)
    assert 0.76 < len(by_variant["plain"]) / 1500 < 0.84
    assert 0.09 < len(by_variant["long"]) / 1500 < 0.15
    assert 0.03 < len(by_variant["unopened"]) / 1500 < 0.07
    assert 0.015 < len(by_variant["search"]) / 1500 < 0.05
    for task in by_variant["plain"]:
        assert task.instruction == ""
        assert task.recent_files == tuple(task.files) == ("main.py",)
    for task in by_variant["long"]:
        assert task.files["main.py"].count("def ") >= 2
        assert 200 <= len(task.files["main.py"]) <= 400
    for task in by_variant["unopened"]:
        assert task.recent_files == ()
        assert task.instruction == f"fix {task.meta['path']}"
    for task in by_variant["search"]:
        assert len(task.files) >= 2
        holders = [path for path, text in task.files.items() if f"def {task.meta['function']}(" in text]
        assert holders == [task.meta["path"]]
        assert task.instruction == f"fix {task.meta['function']}"
    lengths = [len(task.files["main.py"]) for task in by_variant["plain"]]
    assert 150 < median(lengths) < 210
    assert max(lengths) < 400


def test_identical_prompts_have_identical_ids():
    tasks = many(1000, seed=3)
    by_id = collections.defaultdict(set)
    for task in tasks:
        by_id[task.task_id].add((task.instruction, tuple(sorted(task.files.items())), task.recent_files))
    assert all(len(prompts) == 1 for prompts in by_id.values())
    assert len(by_id) > 995


def test_bugs_end_by_themselves():
    """No task starts from code that runs for ever: a pod would have to wait for its time limit."""
    for task in many(300, seed=4):
        calls = compile_calls([test.call for test in task.fail_to_pass])
        statuses = {outcome.status for outcome in run_calls(task.files[task.meta["path"]], calls)}
        assert statuses <= {CallStatus.RETURNED, CallStatus.RAISED}


@pytest.mark.parametrize(
    ("field", "value"),
    [("plain_weight", -1.0), ("num_tests", 11), ("num_tests", 0), ("min_distinct", 11), ("variable_weight", -0.1)],
)
def test_config_names_what_is_wrong(field, value):
    with pytest.raises(ValueError, match=f"TaskConfig.{field}: {value}"):
        TaskConfig(**{field: value})


def test_unknown_split_and_empty_weights():
    with pytest.raises(ValueError, match="split: 'valid'"):
        generate_task(random.Random(0), "valid")
    with pytest.raises(ValueError, match="all variant weights are 0"):
        TaskConfig(plain_weight=0, long_weight=0, unopened_weight=0, search_weight=0)
