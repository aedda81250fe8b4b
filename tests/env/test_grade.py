import asyncio

import pytest

from composer2.env.grade import PodGrader, compare_outcome, is_protected, validate_task
from composer2.types import CallOutcome, CallStatus, PodError, TestCase


def fixed(fakes):
    return {"solution.py": fakes.SOURCE.replace("x > 3", "x >= 3")}


@pytest.mark.parametrize(
    ("test", "status", "value", "passes"),
    [
        ({"expected": "3"}, CallStatus.RETURNED, "3", True),
        ({"expected": "3"}, CallStatus.RETURNED, "3.0", False),
        ({"expected": "3"}, CallStatus.RAISED, "3", False),
        ({"expected": ""}, CallStatus.CRASHED, "", False),
        ({"expected": ""}, CallStatus.TIMEOUT, "", False),
        ({"raises": "KeyError"}, CallStatus.RAISED, "KeyError", True),
        ({"raises": "KeyError"}, CallStatus.RAISED, "LookupError", False),
        ({"raises": "KeyError"}, CallStatus.RETURNED, "KeyError", False),
    ],
)
def test_outcomes_are_compared_as_text(test, status, value, passes):
    case = TestCase(name="t", module="m.py", call="f()", **test)
    assert compare_outcome(case, CallOutcome(status=status, value=value)) is passes


def test_verdict_before_and_after_the_fix(fakes):
    task, backend = fakes.make_task(), fakes.MemoryBackend()

    async def go():
        grader = PodGrader(backend)
        return await grader.grade(task, {}), await grader.grade(task, fixed(fakes))

    before, after = asyncio.run(go())
    assert (before.passed, before.passed_frac) == (False, 0.75)
    assert before.fail_to_pass == {"t0": False}
    assert before.pass_to_pass == {"t1": True, "t2": True, "t3": True}
    assert (after.passed, after.passed_frac) == (True, 1.0)
    assert backend.num_created == backend.num_destroyed == 2


def test_no_tests_is_no_pass(fakes):
    task = fakes.make_task(fail_to_pass=(), pass_to_pass=())
    grade = asyncio.run(PodGrader(fakes.MemoryBackend()).grade(task, {}))
    assert (grade.passed, grade.passed_frac) == (False, 0.0)


def test_equal_results_share_one_pod_even_at_the_same_time(fakes):
    task, backend = fakes.make_task(), fakes.MemoryBackend(delay=0.01)

    async def go():
        grader = PodGrader(backend)
        grades = await asyncio.gather(*(grader.grade(task, fixed(fakes)) for _ in range(8)), grader.grade(task, {}))
        await grader.grade(task, fixed(fakes))
        # the same content named as no change at all
        await grader.grade(task, dict(task.files))
        return grader, grades

    grader, grades = asyncio.run(go())
    assert [grade.passed for grade in grades] == [True] * 8 + [False]
    assert (grader.num_requests, grader.num_pods, backend.num_created) == (11, 2, 2)


def test_a_cancelled_waiter_does_not_take_the_verdict_from_the_others(fakes):
    task, backend = fakes.make_task(), fakes.MemoryBackend(delay=0.02)

    async def go():
        grader = PodGrader(backend)
        first = asyncio.create_task(grader.grade(task, {}))
        second = asyncio.create_task(grader.grade(task, {}))
        await asyncio.sleep(0.005)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await second

    assert asyncio.run(go()).passed_frac == 0.75
    assert backend.num_created == backend.num_destroyed == 1


def test_failure_is_not_remembered(fakes):
    task, backend = fakes.make_task(), fakes.MemoryBackend(fail_from=0)

    async def go():
        grader = PodGrader(backend)
        with pytest.raises(PodError, match="no pod today"):
            await grader.grade(task, {})
        backend.fail_from = None
        return await grader.grade(task, {})

    assert asyncio.run(go()).passed_frac == 0.75


def test_store_forgets_the_oldest(fakes):
    task, backend = fakes.make_task(), fakes.MemoryBackend()

    async def go():
        grader = PodGrader(backend, num_cached=1)
        for files in ({}, fixed(fakes), {}):
            await grader.grade(task, files)

    asyncio.run(go())
    assert backend.num_created == 3


def test_test_files_are_restored_and_new_ones_dropped(fakes):
    files = {"solution.py": fakes.SOURCE, "tests/test_f.py": "assert f(3) == 3\n"}
    task, backend = fakes.make_task(files=files), fakes.MemoryBackend()
    final = {**fixed(fakes), "tests/test_f.py": "pass\n", "conftest.py": "import os\n", "sub/test_x.py": ""}
    asyncio.run(PodGrader(backend).grade(task, final))
    assert backend.pods[0].files == {
        "solution.py": fixed(fakes)["solution.py"].encode(),
        "tests/test_f.py": b"assert f(3) == 3\n",
    }
    assert [is_protected(path) for path in ("a_test.py", "latest.py", "tests/x/y.txt", "test.py")] == [
        True,
        False,
        True,
        False,
    ]


def validate(fakes, **changes):
    asyncio.run(validate_task(fakes.make_task(**changes), fakes.MemoryBackend()))


def test_a_good_task_validates(fakes):
    validate(fakes)


def test_bad_tasks_name_the_test(fakes):
    good = fakes.make_task()
    with pytest.raises(ValueError, match="reference fails 't0'"):
        validate(fakes, reference={"solution.py": fakes.SOURCE})
    with pytest.raises(ValueError, match="fail-to-pass test passes before the fix: 't1'"):
        validate(fakes, fail_to_pass=good.pass_to_pass[:1], pass_to_pass=())
    extra = TestCase(name="t9", module="solution.py", call="f(3)", expected="3")
    with pytest.raises(ValueError, match="pass-to-pass test fails before the fix: 't0'"):
        validate(fakes, fail_to_pass=(extra,), pass_to_pass=good.fail_to_pass)
    with pytest.raises(ValueError, match="fail_to_pass is empty"):
        validate(fakes, fail_to_pass=())
    with pytest.raises(ValueError, match="'t0' is used twice"):
        validate(fakes, pass_to_pass=good.fail_to_pass)


def test_settings_are_checked(fakes):
    with pytest.raises(ValueError, match="timeout is 0"):
        PodGrader(fakes.MemoryBackend(), timeout=0)
    with pytest.raises(ValueError, match="num_cached is 0"):
        PodGrader(fakes.MemoryBackend(), num_cached=0)
