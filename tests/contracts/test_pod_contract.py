"""What every pod backend promises (rows E1 E5 E7): files, commands, test calls, and how each of them fails."""

import asyncio
import errno
import os
import random
import signal
import time

import pytest

from composer2.env.local import ServedPods
from composer2.env.pod import open_backend
from composer2.env.tasks.procedural import TaskConfig, generate_task
from composer2.env.tasks.record import compile_calls, run_calls
from composer2.types import CallOutcome, CallStatus, Pod, PodBackend, PodError, PodLimits

GRACE_SECONDS = 0.5


@pytest.fixture(scope="module", params=["local", "process"])
def backend(request):
    try:
        opened, _ = open_backend(request.param, allow_unsafe=True)
    except PodError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    yield opened
    asyncio.run(opened.close())


def in_pod(backend, use, files=None, limits=None):
    """The result of `use(pod)` on a fresh pod, which is destroyed afterwards."""

    async def body():
        pod = await backend.create(files or {}, limits)
        try:
            return await use(pod)
        finally:
            await pod.destroy()

    return asyncio.run(body())


def call(backend, source, *calls, timeout=0.3, files=None):
    files = {"solution.py": source, **(files or {})}
    return in_pod(backend, lambda pod: pod.run_calls("solution.py", calls, timeout=timeout), files)


def returned(value):
    return CallOutcome(status=CallStatus.RETURNED, value=value)


def test_protocols(backend):
    async def use(pod):
        assert isinstance(pod, Pod)

    in_pod(backend, use)
    for method in ("create", "close"):
        assert callable(getattr(backend, method))
    typed: PodBackend = backend
    assert typed.name


# Files ---------------------------------------------------------------------------------------------------------------


def test_files_round_trip(backend):
    async def use(pod):
        await pod.write("b/c/data.bin", bytes(range(256)))
        await pod.write("a.py", b"y = 2\n")
        return await pod.read("b/c/data.bin"), await pod.read("a.py"), await pod.list_files(), await pod.list_files("b")

    data, text, everything, below = in_pod(backend, use, {"a.py": "x = 1\n", "é.txt": "ü"})
    assert data == bytes(range(256))
    assert text == b"y = 2\n"
    assert everything == ["a.py", "b/c/data.bin", "é.txt"]
    assert below == ["b/c/data.bin"]


def test_large_file(backend):
    data = os.urandom(3 << 20)

    async def use(pod):
        await pod.write("big", data)
        return await pod.read("big")

    assert in_pod(backend, use) == data


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("none.py", FileNotFoundError),
        ("folder", IsADirectoryError),
        ("folder/a.py/b", NotADirectoryError),
        ("../etc/passwd", PermissionError),
        ("/etc/passwd", PermissionError),
        ("", ValueError),
        ("a\0b", ValueError),
        (7, ValueError),
        ("pipe", PermissionError),
    ],
)
def test_read_errors(backend, path, error):
    async def use(pod):
        await pod.exec(["mkfifo", "pipe"])
        with pytest.raises(error):
            await pod.read(path)
        return await pod.read("folder/a.py")

    assert in_pod(backend, use, {"folder/a.py": "1"}) == b"1"


def test_write_errors_leave_the_pod_usable(backend):
    async def use(pod):
        with pytest.raises(IsADirectoryError):
            await pod.write("folder", b"")
        with pytest.raises(NotADirectoryError):
            await pod.write("folder/a.py/b", b"")
        with pytest.raises(PermissionError):
            await pod.write("../x", b"")
        return await pod.list_files()

    assert in_pod(backend, use, {"folder/a.py": "1"}) == ["folder/a.py"]


def test_a_link_never_shows_a_file_of_the_host(backend, tmp_path):
    (tmp_path / "canary").write_text("secret")

    async def use(pod):
        await pod.exec(["ln", "-s", str(tmp_path / "canary"), "link"])
        with pytest.raises((PermissionError, FileNotFoundError)):
            await pod.read("link")
        return await pod.list_files()

    assert in_pod(backend, use) == ["link"]


# Commands ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "code", "stdout"),
    [
        ("echo a; exit 3", 3, b"a\n"),
        ("kill -9 $$", 137, b""),
        (r"printf '\377\376'", 0, b"\xff\xfe"),
        ("cat", 0, b""),
        ("cat solution.py", 0, b"x = 1\n"),
    ],
)
def test_exec(backend, script, code, stdout):
    result = in_pod(backend, lambda pod: pod.exec(["sh", "-c", script]), {"solution.py": "x = 1\n"})
    assert (result.exit_code, result.stdout, result.timed_out, result.truncated) == (code, stdout, False, False)


def test_exec_stdin_stderr_cwd(backend):
    async def use(pod):
        data = b"z" * 300_000
        copied = await pod.exec(["wc", "-c"], stdin=data)
        listed = await pod.exec(["ls"], cwd="/repo/folder")
        complained = await pod.exec(["sh", "-c", "echo out; echo err >&2"])
        return copied.stdout, listed.stdout, (complained.stdout, complained.stderr)

    assert in_pod(backend, use, {"folder/a": ""}) == (b"300000\n", b"a\n", (b"out\n", b"err\n"))


def test_exec_of_what_cannot_start(backend):
    async def use(pod):
        missing = await pod.exec(["no-such-command"])
        not_executable = await pod.exec(["./a"])
        no_folder = await pod.exec(["ls"], cwd="/repo/none")
        for argv in ("ls", [], ["a\0b"], [1]):
            with pytest.raises(ValueError, match="argv"):
                await pod.exec(argv)
        return missing.exit_code, not_executable.exit_code, no_folder.exit_code

    assert in_pod(backend, use, {"a": ""}) == (127, 126, 127)


def test_output_flood_is_cut(backend):
    async def use(pod):
        flood = await pod.exec(["sh", "-c", "yes | head -c 30000000; yes | head -c 30000000 >&2; echo end > mark"])
        endless = await pod.exec(["yes"], timeout=0.3)
        return flood, endless, await pod.read("mark")

    flood, endless, mark = in_pod(backend, use, limits=PodLimits(output_bytes=1000))
    assert (len(flood.stdout), len(flood.stderr), flood.truncated, flood.exit_code) == (1000, 1000, True, 0)
    assert (len(endless.stdout), endless.truncated, endless.timed_out) == (1000, True, True)
    assert mark == b"end\n"


def test_a_background_child_does_not_hold_exec_open(backend):
    started = time.monotonic()
    result = in_pod(backend, lambda pod: pod.exec(["sh", "-c", "sleep 30 & echo done"]))
    assert result.stdout == b"done\n"
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "script",
    [
        "echo before; sleep 61.5",
        "setsid sleep 61.5; echo x",
        "(setsid sh -c 'sleep 61.5 &' &) ; echo before; sleep 61.5",
        "trap '' TERM INT HUP; echo before; while :; do sleep 61.5; done",
        "sleep 61.5 & kill -STOP $$",
    ],
)
def test_timeout_ends_the_whole_tree(backend, script):
    async def use(pod):
        started = time.monotonic()
        result = await pod.exec(["sh", "-c", script], timeout=0.4)
        seconds = time.monotonic() - started
        left = await pod.exec(["pgrep", "-x", "sleep", "-a"])
        return result, seconds, [line for line in left.stdout.splitlines() if b"61.5" in line]

    result, seconds, left = in_pod(backend, use)
    assert (result.timed_out, result.exit_code) == (True, 137)
    assert seconds < 0.4 + GRACE_SECONDS
    assert left == []
    assert result.stdout in (b"before\n", b"")


# Test calls ----------------------------------------------------------------------------------------------------------


def test_calls_return_plain_values_and_raise(backend):
    source = "def f(x):\n    return x\ndef g():\n    raise KeyError(1)\nclass Odd(Exception): pass\ndef h(): raise Odd"
    expected = ["1", "[1, (2,), {'a': {3}}]", "-0.0", "None", "b'x'", "{1, 2, 10}", "frozenset({1})", "set()"]
    outcomes = call(backend, source, *(f"f({text})" for text in expected), "g()", "h()", "f(1/0)")
    assert outcomes[: len(expected)] == [returned(text) for text in expected]
    assert [(o.status, o.value) for o in outcomes[len(expected) :]] == [
        (CallStatus.RAISED, "KeyError"),
        (CallStatus.RAISED, "Odd"),
        (CallStatus.RAISED, "ZeroDivisionError"),
    ]


@pytest.mark.parametrize(
    "expression",
    ["lambda: 1", "P()", "S('a')", "[S('a')]", "L", "10 ** 10000", "'a' * 10000", "list(range(10**6))", "deep", "f"],
)
def test_values_that_are_not_plain_crash(backend, expression):
    source = (
        "class P:\n    def __repr__(self): return '1'\nclass S(str): pass\n"
        "L = []\nL.append(L)\ndeep = []\nfor _ in range(500): deep = [deep]\ndef f(): pass\n"
    )
    outcomes = call(backend, source, expression, "1 + 1")
    assert outcomes[0].status == CallStatus.CRASHED
    assert outcomes[1] == returned("2")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("os._exit(0)", CallStatus.CRASHED),
        ("sys.exit(0)", CallStatus.RAISED),
        ("print('1 passed'); os.write(1, b'1 passed'); os._exit(0)", CallStatus.CRASHED),
        ("os.kill(os.getpid(), 9)", CallStatus.CRASHED),
        ("os.closerange(0, 1000)", CallStatus.CRASHED),
        ("ctypes.string_at(0)", CallStatus.CRASHED),
        ("os.fork() or time.sleep(50); os._exit(1)", CallStatus.CRASHED),
        ("exec('while True: pass')", CallStatus.TIMEOUT),
        ("[print(i) for i in iter(int, 1)]", CallStatus.TIMEOUT),
        ("f(x)", CallStatus.RAISED),
        ("raise KeyboardInterrupt", CallStatus.RAISED),
        ("[os.write(fd, b'junk' * 9) for fd in range(3, 60) if is_open(fd)]", CallStatus.CRASHED),
    ],
)
def test_hostile_calls_have_true_outcomes_and_never_hang(backend, body, status):
    source = f"""
import ctypes, os, sys, time
def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
def f(x):
    {body}
"""
    started = time.monotonic()
    outcomes = call(backend, source, "f(1)", timeout=0.1)
    assert [outcome.status for outcome in outcomes] == [status]
    assert time.monotonic() - started < 5


def test_sleeping_call_is_bounded_in_wall_time(backend):
    started = time.monotonic()
    outcomes = call(backend, "import time\ndef f(): time.sleep(60)\n", "f()", timeout=0.05)
    assert [outcome.status for outcome in outcomes] == [CallStatus.TIMEOUT]
    assert time.monotonic() - started < 4


def test_runaway_code_that_ignores_the_timer_is_stopped(backend):
    source = "import signal\ndef f():\n    signal.signal(signal.SIGPROF, signal.SIG_IGN)\n    while True: pass\n"
    assert call(backend, source, "f()", timeout=0.05) == [CallOutcome(status=CallStatus.TIMEOUT)]


def test_a_call_that_dies_costs_its_own_outcome_only(backend):
    source = "import os\ndef f(x):\n    return x if x != 2 else os._exit(0)\n"
    outcomes = call(backend, source, "f(1)", "f(2)", "f(3)")
    assert outcomes == [returned("1"), CallOutcome(status=CallStatus.CRASHED, value="exit code 0"), returned("3")]


def test_two_timeouts_decide_the_remaining_calls(backend):
    started = time.process_time()
    outcomes = call(backend, "def f(x):\n    while x: pass\n", "f(0)", *["f(1)"] * 20, timeout=0.05)
    assert outcomes == [returned("None")] + [CallOutcome(status=CallStatus.TIMEOUT)] * 20
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    "source", ["import nothing_of_that_name", "def f(:", "raise SystemExit", "import os; os._exit(0)", "1/0"]
)
def test_a_module_that_does_not_import_crashes_every_call(backend, source):
    assert [o.status for o in call(backend, source, "1", "2")] == [CallStatus.CRASHED] * 2


def test_missing_module_crashes(backend):
    outcomes = in_pod(backend, lambda pod: pod.run_calls("none.py", ["1"]))
    assert outcomes == [CallOutcome(status=CallStatus.CRASHED, value="module did not import: FileNotFoundError")]


def test_poison_dies_with_its_process(backend):
    poison = "import sys, builtins\nsys.modules['math'] = None\nbuiltins.len = lambda x: 7\nbuiltins.repr = str\n"

    async def use(pod):
        first = await pod.run_calls("poison.py", ["len([])"])
        second = await pod.run_calls("solution.py", ["len([])", "math.floor(1.5)"])
        return first, second

    first, second = in_pod(backend, use, {"poison.py": poison, "solution.py": "import math"})
    assert first[0].status in (CallStatus.RETURNED, CallStatus.CRASHED)
    assert second == [returned("0"), returned("1")]


def test_planted_files_have_no_effect(backend):
    planted = "import os; os._exit(0)"
    names = ("conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.py")
    assert call(backend, "x = 1", "x", files=dict.fromkeys(names, planted)) == [returned("1")]


def test_modules_of_the_repository_come_first(backend):
    files = {"heapq.py": "def heappush(): return 'mine'", "pkg/__init__.py": "", "pkg/a.py": "from .b import x\n"}

    async def use(pod):
        return await pod.run_calls("solution.py", ["heapq.heappush()"]), await pod.run_calls("pkg/a.py", ["x"])

    assert in_pod(backend, use, {**files, "solution.py": "import heapq", "pkg/b.py": "x = 5"}) == (
        [returned("'mine'")],
        [returned("5")],
    )


def test_an_edit_of_the_same_size_is_seen_at_once(backend):
    async def use(pod):
        values = []
        for digit in "123":
            await pod.write("solution.py", f"import part\nx = {digit}, part.y".encode())
            await pod.write("part.py", f"y = {digit}".encode())
            values += await pod.run_calls("solution.py", ["x"])
        return values

    assert in_pod(backend, use) == [returned(f"({d}, {d})") for d in "123"]


def test_outcomes_are_deterministic(backend):
    source = "import random\ndef f():\n    return hash('abc'), random.random(), list({'a', 'b', 'c', 'd'})\n"
    assert call(backend, source, "f()") == call(backend, source, "f()")


# Life ----------------------------------------------------------------------------------------------------------------


def test_destroy_is_idempotent_and_final(backend):
    async def use(pod):
        await pod.destroy()
        await pod.destroy()
        with pytest.raises(PodError, match="destroyed"):
            await pod.read("a")

    in_pod(backend, use)


def test_wall_seconds_end_a_pod(backend):
    async def use(pod):
        with pytest.raises(PodError, match="wall_seconds"):
            await pod.exec(["sleep", "30"])
        with pytest.raises(PodError, match="wall_seconds"):
            await pod.read("a")

    in_pod(backend, use, limits=PodLimits(wall_seconds=0.4))


def test_cancelled_request_destroys_its_pod_only(backend):
    async def body():
        pod, other = await backend.create({"a": "1"}), await backend.create({"a": "2"})
        task = asyncio.create_task(pod.exec(["sleep", "30"]))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(PodError, match="cancelled"):
            await pod.read("a")
        data = await other.read("a")
        await other.destroy()
        return data

    assert asyncio.run(body()) == b"2"


def test_a_slow_pod_delays_no_other(backend):
    async def body():
        slow = await backend.create({})
        sleeping = asyncio.create_task(slow.exec(["sleep", "1.5"]))
        started = time.monotonic()
        pods = await asyncio.gather(*(backend.create({"m.py": f"x = {i}"}) for i in range(20)))
        outcomes = await asyncio.gather(*(pod.run_calls("m.py", ["x"]) for pod in pods))
        seconds, still_sleeping = time.monotonic() - started, not sleeping.done()
        await asyncio.gather(sleeping, *(pod.destroy() for pod in pods))
        await slow.destroy()
        return outcomes, still_sleeping or seconds > 1.5

    outcomes, overlapped = asyncio.run(body())
    assert outcomes == [[returned(str(i))] for i in range(20)]
    assert overlapped


def test_requests_of_one_pod_wait_for_each_other(backend):
    async def use(pod):
        return await asyncio.gather(*(pod.exec(["echo", str(i)]) for i in range(5)))

    assert [result.stdout for result in in_pod(backend, use)] == [f"{i}\n".encode() for i in range(5)]


def test_death_of_the_server_is_a_pod_error_and_the_next_create_starts_another(backend):
    if not isinstance(backend, ServedPods):
        pytest.skip("a backend without a server process of its own")

    async def body():
        pod = await backend.create({"a": "1"})
        request = asyncio.create_task(pod.exec(["sleep", "30"]))
        await asyncio.sleep(0.1)
        backend._server.process.send_signal(signal.SIGKILL)
        with pytest.raises(PodError):
            await request
        with pytest.raises(PodError):
            await pod.read("a")
        await pod.destroy()
        fresh = await backend.create({"a": "2"})
        data = await fresh.read("a")
        await fresh.destroy()
        return data

    assert asyncio.run(body()) == b"2"


def test_close_ends_all_pods(backend):
    async def body():
        pods = [await backend.create({"a": "1"}) for _ in range(3)]
        await backend.close()
        for pod in pods:
            with pytest.raises(PodError):
                await pod.read("a")
            await pod.destroy()
        again = await backend.create({"a": "3"})
        data = await again.read("a")
        await again.destroy()
        return data

    assert asyncio.run(body()) == b"3"


def test_files_that_do_not_fit_are_a_pod_error(backend):
    async def body():
        with pytest.raises(PodError, match="do not fit"):
            await backend.create({"a/b": "1", "a": "2"})
        with pytest.raises(ValueError, match="path"):
            await backend.create({"": "1"})

    asyncio.run(body())


def test_os_errors_carry_their_number(backend):
    async def use(pod):
        with pytest.raises(FileNotFoundError) as caught:
            await pod.list_files("none")
        return caught.value.errno

    assert in_pod(backend, use) == errno.ENOENT


LOCATED = """def half(x):
    if x == 0:
        raise ValueError
    for n in (1, 2):
        x = [x, n][0]
    return x // 2


def twice(x):
    y = half(x)
    return 4 * y
"""


def test_the_line_where_a_call_ended(backend):
    calls = ("half(4)", "half(0)", "twice(4)", "twice(0)", "missing(1)", "1 + 1")
    outcomes = call(backend, LOCATED, *calls)
    assert [outcome.line for outcome in outcomes] == [6, 3, 11, 10, 0, 0]


def test_trusted_runs_and_pods_name_the_same_lines(backend):
    tasks = [generate_task(random.Random(seed), "train", TaskConfig()) for seed in range(12)]
    differing = 0
    for task in tasks:
        path = task.meta["path"]
        calls = [test.call for test in (*task.fail_to_pass, *task.pass_to_pass)]
        trusted = run_calls(task.files[path], compile_calls(calls), locate=True)
        in_a_pod = in_pod(
            backend, lambda pod, path=path, calls=calls: pod.run_calls(path, calls, timeout=0.3), dict(task.files)
        )
        assert trusted == in_a_pod
        assert [outcome.line for outcome in trusted] == [outcome.line for outcome in in_a_pod]
        differing += len({outcome.line for outcome in trusted}) > 1
    assert differing > 1
