import threading

import pytest

from composer2.env.guest_calls import plain_repr
from composer2.env.tasks.record import MAX_STEPS, compile_calls, instrument, is_simple, run_calls, run_tests
from composer2.types import CallStatus, TestCase


def outcomes(source, *calls):
    return [(o.status, o.value) for o in run_calls(source, compile_calls(calls))]


def test_values_and_exceptions():
    source = "def f(x):\n    return 6 // x\n"
    assert outcomes(source, "f(4)", "f(0)", "g(1)") == [
        (CallStatus.RETURNED, "1"),
        (CallStatus.RAISED, "ZeroDivisionError"),
        (CallStatus.RAISED, "NameError"),
    ]


@pytest.mark.parametrize(
    "body",
    [
        "    while x > 1:\n        x += 1\n",
        "    while x > 1:\n        r = 1\n        r -= 3\n",
        "    r = [x]\n    for v in r:\n        r.append(v)\n",
        "    while True:\n        x *= x\n",
        "    r = 'ab'\n    while True:\n        r += r\n",
        "    try:\n        while True:\n            x += 1\n    except Exception:\n        return 0\n",
    ],
)
def test_endless_code_runs_out_of_steps(body):
    found = outcomes(f"def f(x):\n{body}    return x\n", "f(7)", "f(1)")
    assert [status for status, _ in found] == [CallStatus.TIMEOUT] * 2


def test_exponential_recursion_runs_out_of_steps():
    source = "def f(n):\n    if n < 2:\n        return n\n    return f(n - 1) + f(n - 2)\n"
    assert outcomes(source, "f(10)", "f(40)") == [(CallStatus.RETURNED, "55"), (CallStatus.TIMEOUT, "")]


def test_steps_are_counted_for_each_call_alone():
    source = f"def f(n):\n    while n > 0:\n        n -= 1\n    return n\nN = {MAX_STEPS - 10}\n"
    assert [s for s, _ in outcomes(source, "f(N)", "f(N)", "f(N)")] == [CallStatus.RETURNED] * 3


def test_code_that_does_not_compile_or_import_crashes():
    assert outcomes("def f(:\n", "1") == [(CallStatus.CRASHED, "")]
    assert outcomes("1 / 0\n", "1") == [(CallStatus.CRASHED, "")]


def test_results_that_are_not_plain_or_too_long_crash():
    source = "def f(n):\n    return [0] * n\n"
    assert outcomes(source, "f", "f(9999)", "10 ** 9999") == [(CallStatus.CRASHED, "")] * 3


def test_results_are_written_as_in_a_pod():
    assert outcomes("", "{'b', 'a', 'c'}", "{1: (2, None)}", "b'x'") == [
        (CallStatus.RETURNED, plain_repr({"a", "b", "c"})),
        (CallStatus.RETURNED, "{1: (2, None)}"),
        (CallStatus.RETURNED, "b'x'"),
    ]
    loop = []
    loop += [loop] * 9
    assert not is_simple(loop)


def test_instrumented_source_by_hand():
    source = "def f(xs):\n    for i, x in enumerate(xs):\n        while x < 3 or i:\n            x += 1\n"
    assert instrument(source) == (
        "@_entry\ndef f(xs):\n    for i, x in _bounded(enumerate(xs)):\n"
        "        while _tick() and (x < 3 or i):\n            x += 1\n"
    )


def test_works_outside_the_main_thread():
    found = []
    source = "def f():\n    while True:\n        pass\n"
    thread = threading.Thread(target=lambda: found.extend(outcomes(source, "f()")))
    thread.start()
    thread.join(20)
    assert found == [(CallStatus.TIMEOUT, "")]


def test_tests_pass_and_fail():
    tests = [
        TestCase(name="a", module="m.py", call="f(1)", expected="2"),
        TestCase(name="b", module="m.py", call="f(2)", expected="2"),
        TestCase(name="c", module="m.py", call="f('')", raises="TypeError"),
    ]
    assert run_tests("def f(x):\n    return x + 1\n", tests) == [True, False, True]


def test_strange_code_warns_nobody(recwarn):
    assert outcomes("def f():\n    return 3[0]\n", "f()") == [(CallStatus.RAISED, "TypeError")]
    assert len(recwarn) == 0
