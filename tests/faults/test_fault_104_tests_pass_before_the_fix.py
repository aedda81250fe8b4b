"""Fault 104: tests listed as fail-to-pass already pass before the fix. Checked in process and in pods."""

import asyncio
import random

import pytest

from composer2.env.grade import validate_task
from composer2.env.pod import open_backend
from composer2.env.tasks.evalsets import build_eval_set
from composer2.env.tasks.procedural import SPLITS, generate_task
from composer2.env.tasks.record import run_tests


def check(task):
    source = task.files[task.meta["path"]]
    for _ in range(3):
        assert not any(run_tests(source, task.fail_to_pass))
        assert all(run_tests(source, task.pass_to_pass))
    assert task.fail_to_pass


@pytest.mark.parametrize("split", SPLITS)
def test_generated_tasks_fail_before(split):
    rng = random.Random(104)
    for _ in range(60):
        check(generate_task(rng, split))


@pytest.mark.parametrize("name", ["humaneval", "stdlib"])
def test_real_functions_fail_before(name):
    for task in build_eval_set(name, 80, seed=104):
        check(task)


def test_pods_agree_with_the_recording():
    """The recorded values are those of a pod, in the pod's own writing."""
    rng = random.Random(5)
    tasks = [generate_task(rng, split) for split in SPLITS for _ in range(5)]
    tasks += build_eval_set("humaneval", 12, seed=0) + build_eval_set("stdlib", 8, seed=0)

    async def validate():
        backend, _ = open_backend("process", allow_unsafe=True)  # the code is ours
        try:
            for task in tasks:
                await validate_task(task, backend)
        finally:
            await backend.close()

    asyncio.run(validate())
