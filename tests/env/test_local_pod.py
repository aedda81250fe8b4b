"""Isolation of local pods (rows E1 E7): what code in a pod cannot see, reach or use up, with the outcome."""

import asyncio
import errno
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer2.env import cgroups, seccomp
from composer2.env.local import LocalPods
from composer2.env.pod import open_backend
from composer2.env.process import ProcessPods
from composer2.types import CallOutcome, CallStatus, PodError, PodLimits, PodRefused

PACKAGE_PARENT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def backend():
    try:
        opened, _ = open_backend("local")
    except PodError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    yield opened
    asyncio.run(opened.close())


def in_pod(backend, use, files=None, limits=None):
    async def body():
        pod = await backend.create(files or {}, limits)
        try:
            return await use(pod)
        finally:
            await pod.destroy()

    return asyncio.run(body())


def python(backend, source, *, limits=None, timeout=20.0):
    """What a script prints in a pod of its own."""
    result = in_pod(backend, lambda pod: pod.exec(["python3", "-c", source], timeout=timeout), limits=limits)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


def processes_with(canary):
    """Host process ids whose command line holds `canary`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if canary in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def gone_within(canary, seconds):
    deadline = time.monotonic() + seconds
    while processes_with(canary) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not processes_with(canary)


# What is in force ----------------------------------------------------------------------------------------------------


def test_guarantees_are_read_from_the_kernel(backend):
    guarantees = backend.guarantees()
    for name in ("own_processes", "no_capabilities", "no_new_privs"):
        assert guarantees[name] is True, name
    assert guarantees["own_network"] == "loopback only"
    assert "home" not in str(guarantees["private_root"]).split()
    unsafe = ProcessPods(allow_unsafe=True).guarantees()
    assert unsafe.keys() == guarantees.keys()
    assert [name for name, value in unsafe.items() if value] == ["process_limits"]


def test_every_denied_system_call_is_denied(backend):
    column = seccomp.architecture()
    assert column is not None
    numbers = [numbers[column] for numbers in seccomp.DENIED_SYSCALLS.values()]
    source = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print([libc.syscall(n, -1, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() for n in {numbers}])
"""
    assert python(backend, source) == str([errno.EPERM] * len(numbers))


def test_namespaces_vsock_and_limits_of_pid_1_are_denied(backend):
    source = """
import ctypes, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
def failure(do):
    try:
        do()
    except OSError as error:
        return error.errno
print([
    libc.unshare(0x10000000) and ctypes.get_errno(),
    libc.clone(None, None, 0x10000000, None) and ctypes.get_errno(),
    failure(lambda: socket.socket(40, socket.SOCK_STREAM)),
    failure(lambda: socket.socket(38, socket.SOCK_SEQPACKET)),
    failure(lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3))),
    resource.getrlimit(resource.RLIMIT_CORE)[1],
])
"""
    refused = [errno.EPERM, errno.EINVAL, errno.EAFNOSUPPORT, errno.EAFNOSUPPORT, errno.EPERM, 0]
    assert python(backend, source) == str(refused)


# What a pod sees -----------------------------------------------------------------------------------------------------


def test_no_file_of_the_host_is_visible(backend, tmp_path):
    (tmp_path / "canary").write_text("secret")
    hidden = [str(tmp_path / "canary"), str(PACKAGE_PARENT / "composer2" / "types.py"), "/etc/shadow", "/etc/hostname"]
    hidden += ["/sys", "/home", "/var", "/boot", "/run", "/dev/kvm", "/dev/mem", "/dev/pts"]
    assert python(backend, f"import os; print([path for path in {hidden} if os.path.exists(path)])") == "[]"


def test_a_home_folder_shows_nothing_but_the_interpreter(backend):
    prefix = os.path.realpath(sys.base_prefix)
    source = f"""
import os
home, prefix = {str(Path.home())!r}, {prefix!r}
shown = [os.path.join(folder, name) for folder, _, names in os.walk(home) for name in names]
print([path for path in shown if not path.startswith(prefix + "/")])
"""
    assert python(backend, source) == "[]"


def test_only_repo_and_tmp_can_be_written(backend):
    source = """
import os
def writable(folder):
    try:
        open(folder + "/new", "w").close()
    except OSError:
        return False
    return True
print([folder for folder in ("/", "/usr", "/usr/bin", "/dev", "/etc", "/proc", "/proc/sys/kernel", "/repo", "/tmp")
       if writable(folder)])
print([os.access(f"/proc/sys/{name}", os.W_OK) for name in ("kernel/panic", "vm/drop_caches", "net/ipv4/ip_forward")])
"""
    assert python(backend, source).splitlines() == ["['/repo', '/tmp']", "[False, False, False]"]


def test_pid_1_is_out_of_reach(backend):
    source = """
import os, signal
def failure(do):
    try:
        do()
    except OSError as error:
        return type(error).__name__
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGSEGV):
    os.kill(1, number)
print([failure(lambda: open("/proc/1/mem", "r+b")), failure(lambda: os.listdir("/proc/1/fd")),
       failure(lambda: os.listdir("/proc/1/cwd/")), failure(lambda: open("/proc/1/environ").read())])
"""

    async def use(pod):
        result = await pod.exec(["python3", "-c", source])
        assert (await pod.exec(["echo", "alive"])).stdout == b"alive\n"
        return result.stdout.decode().strip()

    assert in_pod(backend, use) == str(["PermissionError"] * 4)


def test_pods_do_not_see_each_other(backend):
    async def body():
        first, second = await backend.create({"mine": "1"}), await backend.create({})
        await first.exec(["sh", "-c", "echo x > /tmp/mine; sleep 62.25 & sleep 0.1"])
        seen = await second.exec(["sh", "-c", "ls /repo /tmp; ps ax | grep -c '[6]2.25'; id -u"])
        own = await first.exec(["sh", "-c", "ps ax | grep -c '[6]2.25'; id -u"])
        await first.destroy()
        await second.destroy()
        return seen.stdout.split(), own.stdout.split(), backend.guarantees()["unprivileged_user"]

    seen, own, user = asyncio.run(body())
    assert seen[:3] == [b"/repo:", b"/tmp:", b"0"]
    assert own[0] == b"1"
    assert b"0" not in (seen[3], own[1])
    assert seen[3] != own[1] or user == "own user namespace"


def test_the_loopback_of_the_host_is_another(backend):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = f"""
import socket
def connect(port):
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError as error:
        return type(error).__name__
    return "connected"
own = socket.create_server(("127.0.0.1", 0))
print(connect({port}), connect(own.getsockname()[1]))
"""
        assert python(backend, source) == "ConnectionRefusedError connected"


# What a pod can use up -----------------------------------------------------------------------------------------------


def test_memory_hog_fails_and_the_pod_lives(backend):
    limits = PodLimits(memory_bytes=96 << 20)
    source = "def f():\n    return len(bytearray(200 << 20))\n"

    async def use(pod):
        outcomes = await pod.run_calls("solution.py", ["f()"])
        hog = await pod.exec(["python3", "-c", "x = bytearray(200 << 20)"])
        return outcomes, hog.exit_code, (await pod.exec(["echo", "alive"])).stdout

    outcomes, code, alive = in_pod(backend, use, {"solution.py": source}, limits)
    assert outcomes == [CallOutcome(status=CallStatus.RAISED, value="MemoryError")]
    assert code == 1
    assert alive == b"alive\n"


def test_many_small_memory_hogs_are_killed_and_the_pod_lives(backend):
    if backend.guarantees()["pod_memory_limit"] is not True:
        pytest.skip(f"memory of a whole pod: {backend.guarantees()['pod_memory_limit']}")
    source = """
import os, time
children = []
for _ in range(6):
    pid = os.fork()
    if pid == 0:
        x = bytearray(40 << 20)
        time.sleep(20)
        os._exit(0)
    children.append(pid)
print(os.wait()[1])
"""

    async def use(pod):
        result = await pod.exec(["python3", "-c", source], timeout=10)
        return result, (await pod.exec(["echo", "alive"])).stdout, await pod.read("a")

    result, alive, data = in_pod(backend, use, {"a": "1"}, PodLimits(memory_bytes=96 << 20))
    assert not result.timed_out
    assert result.exit_code == 137 or result.stdout == b"9\n"
    assert (alive, data) == (b"alive\n", b"1")


def test_fork_bomb_is_contained(backend):
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"

    async def use(pod):
        started = time.monotonic()
        result = await pod.exec(["python3", "-c", bomb], timeout=0.5)
        seconds = time.monotonic() - started
        return result.timed_out, seconds, (await pod.exec(["sh", "-c", "ps ax | wc -l"])).stdout

    timed_out, seconds, left = in_pod(backend, use, limits=PodLimits(num_processes=24))
    assert timed_out
    assert seconds < 1.5
    assert int(left) <= 5  # header, pid 1, sh, ps, wc


def test_number_of_processes_is_limited(backend):
    source = """
import subprocess, sys
children = []
try:
    for _ in range(40):
        children.append(subprocess.Popen(["sleep", "5"]))
except OSError as error:
    print(type(error).__name__, len(children) < 20)
"""
    assert python(backend, source, limits=PodLimits(num_processes=20)) == "BlockingIOError True"


def test_full_disk(backend):
    fill = "import sys\nfor i in range(99):\n    open(f'{sys.argv[1]}/fill{i}', 'wb').write(bytes(1 << 20))\n"

    async def use(pod):
        errors = [(await pod.exec(["python3", "-c", fill, folder])).stderr[-60:] for folder in ("/repo", "/tmp")]
        with pytest.raises(OSError, match="No space left") as caught:
            await pod.write("a", bytes(1 << 20))
        return errors, caught.value.errno, await pod.read("a")

    errors, number, data = in_pod(backend, use, {"a": "old"}, PodLimits(disk_bytes=4 << 20))
    assert all(b"No space left on device" in error for error in errors)
    assert (number, data) == (errno.ENOSPC, b"old")


def test_inodes_are_limited(backend):
    source = (
        "i = 0\ntry:\n    while i < 9999: open(f'f{i}', 'w').close(); i += 1\nexcept OSError as e: print(e.errno)\n"
    )
    assert python(backend, source, limits=PodLimits(disk_bytes=1 << 20)) == str(errno.ENOSPC)


def test_orphans_are_reaped(backend):
    async def use(pod):
        await pod.exec(["sh", "-c", "for i in $(seq 50); do (sleep 0.05 &); done"])
        await asyncio.sleep(1.3)
        return (await pod.exec(["sh", "-c", "ps -eo stat | grep -c Z"])).stdout

    assert in_pod(backend, use) == b"0\n"


def test_150_pods_live_at_once(backend):
    async def body():
        pods = await asyncio.gather(*(backend.create({"m.py": f"x = {i}"}) for i in range(150)))
        outcomes = await asyncio.gather(*(pod.run_calls("m.py", ["x"]) for pod in pods))
        await asyncio.gather(*(pod.destroy() for pod in pods))
        return outcomes

    values = [outcome.value for (outcome,) in asyncio.run(body())]
    assert values == [str(i) for i in range(150)]


# Deaths --------------------------------------------------------------------------------------------------------------


def test_destroy_leaves_no_process(backend):
    script = "trap '' TERM; setsid sh -c '(sleep 63.125 &)'; kill -STOP $$"

    async def body():
        pod = await backend.create({})
        request = asyncio.create_task(pod.exec(["sh", "-c", script]))
        while not processes_with(b"63.125"):
            await asyncio.sleep(0.01)
        started = time.monotonic()
        await pod.destroy()
        seconds = time.monotonic() - started
        with pytest.raises(PodError, match="destroyed"):
            await request
        return seconds

    assert asyncio.run(body()) < 2
    assert processes_with(b"63.125") == []


def test_kill_of_the_host_ends_the_server_and_its_pods(backend):
    host = f"""
import asyncio, sys
sys.path.insert(0, {str(PACKAGE_PARENT)!r})
from composer2.env.local import LocalPods
async def main():
    pod = await LocalPods().create({{}})
    task = asyncio.create_task(pod.exec(["sh", "-c", "setsid sleep 64.125"]))
    await asyncio.sleep(0.3)
    print("ready", flush=True)
    await task
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", host], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    servers = processes_with(f"\0local\0{process.pid}\0".encode())
    assert len(servers) == 3  # launcher, server, the pod's pid 1
    assert processes_with(b"64.125")
    process.kill()
    process.wait()
    process.stdout.close()
    assert gone_within(b"64.125", 3)
    assert gone_within(f"\0local\0{process.pid}\0".encode(), 3)


# Refusals ------------------------------------------------------------------------------------------------------------


def test_process_pods_are_refused_unless_asked_for():
    with pytest.raises(PodError, match=r"do not isolate.*--unsafe-process-pods"):
        ProcessPods()
    with pytest.raises(PodError, match="--unsafe-process-pods"):
        open_backend("process")
    with pytest.raises(ValueError, match="backend is 'vm', accepted is one of auto, local, process"):
        open_backend("vm")


def test_auto_never_falls_back_silently(monkeypatch):
    def refuse(self):
        raise PodRefused("unshare(0x20000000): Operation not permitted")

    monkeypatch.setattr(LocalPods, "start", refuse)
    for name in ("auto", "local"):
        with pytest.raises(PodError, match=r"unshare.*not permitted.*--unsafe-process-pods"):
            open_backend(name)
    with pytest.raises(PodError, match="not permitted"):
        open_backend("local", allow_unsafe=True)
    pods, reason = open_backend("auto", allow_unsafe=True)
    asyncio.run(pods.close())
    assert pods.name == "process"
    assert "--unsafe-process-pods" in reason
    assert "not permitted" in reason


def test_a_slow_server_is_no_reason_to_go_without_isolation(monkeypatch):
    def slow(self):
        raise PodError("the pod server gave no sign within 60 seconds: killed")

    monkeypatch.setattr(LocalPods, "start", slow)
    for name in ("auto", "local"):
        with pytest.raises(PodError, match=r"^the pod server gave no sign within 60 seconds"):
            open_backend(name, allow_unsafe=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up capabilities, which needs root")
def test_a_machine_that_does_not_permit_it_gives_the_kernels_reason():
    source = f"""
import sys
sys.path.insert(0, {str(PACKAGE_PARENT)!r})
from composer2.env.pod import open_backend
try:
    open_backend("auto")
except RuntimeError as error:
    sys.stdout.write(str(error))
"""
    without = "from composer2.env.isolate import drop_bounding_set as drop; drop(); import os, sys; "
    start = f"import sys; sys.path.insert(0, {str(PACKAGE_PARENT)!r}); {without}os.execv(sys.executable, sys.argv[1:])"
    argv = [sys.executable, "-c", start, sys.executable, "-c", source]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert "Operation not permitted" in result.stdout, result
    assert "--unsafe-process-pods" in result.stdout


def test_own_groups():
    text = "5:pids:/a\n4:cpu,cpuacct:/\n1:name=systemd:/x\n0::/user.slice\n"
    assert cgroups.own_groups(text) == {
        "pids": "/a",
        "cpu": "/",
        "cpuacct": "/",
        "name=systemd": "/x",
        "": "/user.slice",
    }
