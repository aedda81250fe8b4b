"""Pid 1 of a pod. In: frames on one socket. Out: their answers; it serves files, commands and test calls until the
socket closes.

Source: report §6.2 (the guest side of a pod); rows E1 E5 E7.
Simplified: one request at a time. Requests are `{"op": ...}` with bytes beside; an answer carries `ok` or an `error`
of kind `os` (with its errno), `value` or `fatal`. The child that runs model-edited code is at the bottom,
`evaluate_calls`. Standard library only: this file runs in pods, where nothing else is visible, and with modules warm
that test code tends to import.
"""

from __future__ import annotations

import errno
import gc
import importlib
import importlib.util
import json
import os
import random
import resource
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from composer2.env import frames, guest_calls, guest_files
from composer2.env.guest_processes import PodBroken, ProcessTree, reap_any, run_command

WARM_MODULES = (
    "abc",
    "bisect",
    "cmath",
    "collections",
    "collections.abc",
    "contextlib",
    "copy",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "math",
    "numbers",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "struct",
    "textwrap",
    "time",
    "types",
    "typing",
)
"""Imported once by the server, so that test calls need not import them again."""

RECURSION_LIMIT = 1000


@dataclass(frozen=True, kw_only=True)
class Guest:
    """The pod as seen from within."""

    stream: socket.socket
    root: str
    tree: ProcessTree
    output_bytes: int
    environment: Mapping[str, str]

    def serve(self) -> None:
        """Answer requests until the host hangs up."""
        while self._wait_for_request():
            request = frames.receive(self.stream)
            if request is None:
                return
            head, body = self._answer(*request)
            self.stream.sendall(frames.pack(head, body))

    def _wait_for_request(self) -> bool:
        """Reap orphans once a second as long as there are any."""
        poll = select.poll()
        poll.register(self.stream, select.POLLIN)
        while not poll.poll(1000 if reap_any() else None):
            pass
        return True

    def _answer(self, request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        try:
            answer, data = self._do(request, body)
        except OSError as error:
            text = error.strerror or str(error)
            return {"error": {"kind": "os", "errno": error.errno or errno.EIO, "text": text}}, b""
        except ValueError as error:
            return {"error": {"kind": "value", "text": str(error)}}, b""
        except PodBroken as error:
            return {"error": {"kind": "fatal", "text": str(error)}}, b""
        return {"ok": True, **answer}, data

    def _do(self, request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        match request["op"]:
            case "run_calls":
                outcomes = guest_calls.run_calls(
                    self.tree, self._evaluate, request["module"], request["calls"], timeout=request["timeout"]
                )
                return {"outcomes": outcomes}, b""
            case "exec":
                cwd = request["cwd"]
                if cwd == "/repo" or cwd.startswith("/repo/"):
                    cwd = self.root + cwd[len("/repo") :]
                return run_command(
                    self.tree,
                    request["argv"],
                    cwd=cwd,
                    environment=self.environment,
                    timeout=request["timeout"],
                    stdin=body,
                    output_bytes=self.output_bytes,
                )
            case "read":
                return {}, guest_files.read_file(self._path(request["path"]))
            case "write":
                start = 0
                for path, length in request["files"]:
                    guest_files.write_file(self._path(path), body[start : start + length])
                    start += length
                return {}, b""
            case "list":
                return {"files": guest_files.list_files(self.root, self._path(request["path"]))}, b""
            case "probe":
                return {"seen": _look_around()}, b""
        raise ValueError(f"request {request['op']!r} is unknown")

    def _path(self, path: str) -> str:
        return guest_files.resolve(self.root, path, links_may_leave=self.tree.has_pid_namespace)

    def _evaluate(self, module: str, calls: Sequence[str], first: int, pipe: int, timeout: float) -> None:
        evaluate_calls(self.root, module, calls, first, pipe, timeout)


def _look_around() -> dict[str, Any]:
    """What the kernel says about this process, for `guarantees`."""
    with open("/proc/self/status", encoding="ascii") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    return {
        "pid": os.getpid(),
        "uid": os.getuid(),
        "capabilities": status["CapEff"].strip() + status["CapPrm"].strip() + status.get("CapBnd", "").strip(),
        "no_new_privs": status.get("NoNewPrivs", "").strip(),
        "seccomp": status.get("Seccomp", "").strip(),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "root": sorted(os.listdir("/")),
        "python": os.access(sys.executable, os.X_OK),
    }


def evaluate_calls(root: str, module: str, calls: Sequence[str], first: int, pipe: int, timeout: float) -> NoReturn:
    """In the forked child: import, evaluate, report, end. Whatever the module does to this process dies with it."""
    exit_now, write, set_timer, profile = os._exit, os.write, signal.setitimer, signal.ITIMER_PROF
    pack, plain_repr, evaluate = guest_calls.RECORD.pack, guest_calls.plain_repr, eval
    set_profile, source = sys.setprofile, os.path.join(root, module)
    last_line = 0

    def report(index: int, status: int, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")[: guest_calls.MAX_VALUE_BYTES]
        write(pipe, pack(index, status, last_line, len(data)) + data)

    def note_line(frame: FrameType, event: str, argument: object) -> None:
        nonlocal last_line
        if event == "return" and frame.f_code.co_filename == source:
            last_line = frame.f_lineno

    try:
        _become_call_process(pipe, cpu_seconds=timeout * (len(calls) - first) + guest_calls.IMPORT_CPU_SECONDS)
        set_timer(profile, timeout + guest_calls.IMPORT_CPU_SECONDS)
        try:
            names = _import_fresh(root, module)
        except BaseException as error:
            reason = f"module did not import: {type(error).__name__}"
            report(first, guest_calls.IMPORTED, "")
            for index in range(first, len(calls)):
                report(index, guest_calls.CRASHED, reason)
            exit_now(0)
        report(first, guest_calls.IMPORTED, "")
        for index in range(first, len(calls)):
            set_timer(profile, timeout)
            last_line = 0
            set_profile(note_line)
            try:
                value = evaluate(calls[index], names)
            except BaseException as error:
                set_profile(None)
                set_timer(profile, timeout)
                report(index, guest_calls.RAISED, type(error).__name__)
                continue
            set_profile(None)
            set_timer(profile, timeout)
            try:
                status, text = guest_calls.RETURNED, plain_repr(value)
            except ValueError as error:
                status, text = guest_calls.CRASHED, str(error)[:200]
            report(index, status, text)
        exit_now(0)
    finally:
        exit_now(70)


def _become_call_process(pipe: int, *, cpu_seconds: float) -> None:
    """A session of its own, nothing open but the pipe, streams to nowhere, CPU time bounded by the kernel as well."""
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.closerange(3, pipe)
    os.closerange(pipe + 1, 1 << 20)
    limit = int(cpu_seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    random.seed(0)
    sys.setrecursionlimit(RECURSION_LIMIT)
    gc.enable()


def _import_fresh(root: str, module: str) -> dict[str, Any]:
    """Names of the module at path `module`, imported as Python would with `root` first on its path.

    Warm modules that a file of the repository shadows are forgotten first. Cached bytecode is never read.
    """
    sys.path.insert(0, root)
    sys.pycache_prefix = "/nonexistent"
    sys.dont_write_bytecode = True
    local = {name.partition(".")[0] for name in os.listdir(root)}
    for loaded in [name for name in sys.modules if name.partition(".")[0] in local]:
        if loaded not in ("sys", "builtins", "__main__"):
            del sys.modules[loaded]
    path = os.path.join(root, module)
    name = module.removesuffix(".py").replace("/", ".")
    if "." in name:
        importlib.import_module(name.rpartition(".")[0])
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{module} is not a Python module")
    loaded_module = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded_module
    spec.loader.exec_module(loaded_module)
    return vars(sys.modules.get(name, loaded_module))


def fatal(stream: socket.socket, reason: str) -> NoReturn:
    """Tell the host why there is no pod, in answer to its first request, and end."""
    stream.sendall(frames.pack({"error": {"kind": "fatal", "text": reason}}))
    os._exit(1)


def warm_up() -> None:
    """Import what pods need, once, before the first fork."""
    for name in WARM_MODULES:
        importlib.import_module(name)
    json.dumps({})
    gc.collect()
    gc.disable()
    gc.freeze()
