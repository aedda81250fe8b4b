"""Fault 103: a task whose reference does not always pass its own tests."""

import random

import pytest

from composer2.env.tasks.evalsets import build_eval_set
from composer2.env.tasks.procedural import SPLITS, generate_task
from composer2.env.tasks.record import run_tests


def check(task):
    tests = (*task.fail_to_pass, *task.pass_to_pass)
    for _ in range(5):
        assert all(run_tests(task.reference[task.meta["path"]], tests))


@pytest.mark.parametrize("split", SPLITS)
def test_generated_references_pass_five_times(split):
    rng = random.Random(103)
    for _ in range(60):
        check(generate_task(rng, split))


@pytest.mark.parametrize("name", ["humaneval", "stdlib"])
def test_real_references_pass_five_times(name):
    for task in build_eval_set(name, 80, seed=103):
        check(task)
