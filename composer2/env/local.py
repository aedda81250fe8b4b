"""The local pod, seen from the host. In: files, commands, test calls. Out: their results, with the work done in
isolated processes.

Source: report §6.2; rows E1 E5 E7.
A backend owns one pod server (`pod_server.py`) and talks to every pod on a socket of its own, one request at a time
for each pod. Whatever breaks, a pod that does not answer, a server that died, becomes `PodError`; what the code in a
pod does never does.
Choice: a request that is interrupted (cancelled) leaves an answer under way, so its pod is destroyed.
Not a boundary for hostile code in production: pods share the kernel of the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from composer2.env import frames
from composer2.env.pod_server import MAX_PACKET_BYTES
from composer2.types import CallOutcome, CallStatus, ExecResult, PodError, PodLimits, PodRefused

_START_SECONDS = 60.0
"""For the server's first word; a crowded machine needs some."""
_FILE_SECONDS = 60.0
_GRACE_SECONDS = 20.0
"""Time beyond a request's own limit before the pod counts as broken; a crowded machine needs some."""
_DESTROY_SECONDS = 10.0
_BOOT = (
    "import os, sys; sys.path.append(os.getcwd()); from composer2.env.pod_server import main; sys.path.pop(); "
    "main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))"
)


class LocalPod:
    """One pod (see `types.Pod`)."""

    def __init__(self, server: _Server, number: int, stream: socket.socket) -> None:
        self.pod_id = f"{server.mode}-{server.process.pid}-{number}"
        self.number = number
        self._server = server
        self._stream = stream
        self._lock = asyncio.Lock()
        self._why_gone = ""

    async def exec(
        self, argv: Sequence[str], *, timeout: float = 30.0, stdin: bytes = b"", cwd: str = "/repo"
    ) -> ExecResult:
        """Run a command; see `types.Pod`. A command that cannot start ends with 126 or 127, as in a shell."""
        if isinstance(argv, str) or not argv:
            raise ValueError(f"argv is {argv!r}, accepted is a non-empty list of strings")
        for text in (*argv, cwd):
            _check_text("argv and cwd", text)
        request = {"op": "exec", "argv": list(argv), "timeout": timeout, "cwd": cwd}
        head, body = await self._request(request, stdin, seconds=timeout + _GRACE_SECONDS)
        split = head["stdout_bytes"]
        return ExecResult(
            exit_code=head["exit_code"],
            stdout=body[:split],
            stderr=body[split:],
            timed_out=head["timed_out"],
            truncated=head["truncated"],
        )

    async def read(self, path: str) -> bytes:
        """Bytes of a regular file of at most 16 MiB; OSError as `open` raises it."""
        _check_text("path", path)
        return (await self._request({"op": "read", "path": path}))[1]

    async def write(self, path: str, data: bytes) -> None:
        """Replace a file, making parent folders; OSError (a full disk, a folder in the way) leaves the old one."""
        _check_text("path", path)
        await self.write_files({path: data})

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Replace several files in one request."""
        listed = [(path, len(data)) for path, data in files.items()]
        await self._request({"op": "write", "files": listed}, b"".join(files.values()))

    async def list_files(self, path: str = ".") -> list[str]:
        """Relative paths of all files and links below `path`, sorted."""
        _check_text("path", path)
        return (await self._request({"op": "list", "path": path}))[0]["files"]

    async def run_calls(self, module: str, calls: Sequence[str], *, timeout: float = 2.0) -> list[CallOutcome]:
        """Evaluate test calls; see `types.Pod`. Every process of the pod is ended afterwards, daemons included.

        After two calls that killed their process or ran out of time, the remaining ones get the outcome of the second.
        """
        _check_text("module", module)
        if timeout <= 0:
            raise ValueError(f"timeout is {timeout}, accepted is a number above 0")
        request = {"op": "run_calls", "module": module, "calls": list(calls), "timeout": timeout}
        wall = 10 * timeout * (len(calls) + 2) + 10  # the guest's own bound, see guest_calls
        head, _ = await self._request(request, seconds=wall + _GRACE_SECONDS)
        return [
            CallOutcome(status=CallStatus(status), value=value, line=line) for status, value, line in head["outcomes"]
        ]

    async def destroy(self) -> None:
        """Kill everything and wait until it is gone."""
        self.forget("it was destroyed")
        await self._server.kill(self.number)

    def forget(self, reason: str) -> None:
        """The pod is gone: later requests fail with `reason`."""
        self._why_gone = self._why_gone or reason
        if self._lock.locked():  # closing a socket that the event loop waits for would leave it waiting
            with contextlib.suppress(OSError):
                self._stream.shutdown(socket.SHUT_RDWR)
        else:
            self._stream.close()

    async def _request(
        self, head: Mapping[str, Any], body: bytes = b"", *, seconds: float = _FILE_SECONDS
    ) -> tuple[dict[str, Any], bytes]:
        frame = frames.pack(head, body)
        async with self._lock:
            if self._why_gone:
                raise PodError(f"pod {self.pod_id} is gone: {self._why_gone}")
            try:
                async with asyncio.timeout(seconds):
                    answer, data = await self._exchange(frame)
            except TimeoutError as error:
                self._break(f"no answer to {head['op']} within {seconds:.0f} s")
                raise PodError(f"pod {self.pod_id}: {self._why_gone}") from error
            except (OSError, EOFError, ValueError) as error:
                reason = self._why_gone or await self._server.why_gone(self.number)
                self._break(reason)
                raise PodError(f"pod {self.pod_id} is gone: {reason}") from error
            except asyncio.CancelledError:
                self._break("a request was cancelled")
                raise
            finally:
                if self._why_gone:
                    self._stream.close()
        if "error" in answer:
            self._raise(answer["error"])
        return answer, data

    def _break(self, reason: str) -> None:
        self._server.send_kill(self.number)
        self.forget(reason)

    def _raise(self, error: Mapping[str, Any]) -> None:
        if error["kind"] == "os":
            raise OSError(error["errno"], error["text"])
        if error["kind"] == "value":
            raise ValueError(error["text"])
        self._break(error["text"])
        raise PodError(f"pod {self.pod_id}: {error['text']}")

    async def _exchange(self, frame: bytes) -> tuple[dict[str, Any], bytes]:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._stream, frame)
        buffer = bytearray()
        needed = frames.LENGTHS.size
        head_length = body_length = -1
        while len(buffer) < needed:
            chunk = await loop.sock_recv(self._stream, 1 << 18)
            if not chunk:
                raise EOFError("end of the pod's stream")
            buffer += chunk
            if head_length < 0 and len(buffer) >= needed:
                head_length, body_length = frames.lengths(bytes(buffer[:needed]))
                needed += head_length + body_length
        start = frames.LENGTHS.size
        return json.loads(buffer[start : start + head_length]), bytes(buffer[start + head_length :])


def _check_text(field: str, text: object) -> None:
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"{field} holds {text!r}, accepted is a non-empty string without NUL")


class _Server:
    """A running pod server and the pods it has. Belongs to the event loop that uses it."""

    def __init__(self, mode: str) -> None:
        """Start the process and wait for its first word. PodError with its reason when it refuses."""
        self.mode = mode
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        package_parent = str(Path(__file__).resolve().parents[2])
        executable = os.path.realpath(sys.executable)
        environment = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PATH": os.defpath}
        fd = theirs.fileno()
        self.process = subprocess.Popen(
            [executable, "-S", "-s", "-P", "-B", "-c", _BOOT, mode, str(os.getpid()), str(fd)],
            pass_fds=[fd],
            env=environment,
            cwd=package_parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        theirs.close()
        self.pods: dict[int, LocalPod] = {}
        self._waiting: dict[int, asyncio.Event] = {}
        self._reasons: dict[int, str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.why_dead = ""
        self.hello = self._receive_hello()

    def _receive_hello(self) -> dict[str, Any]:
        self.control.settimeout(_START_SECONDS)
        try:
            packet = self.control.recv(MAX_PACKET_BYTES)
        except TimeoutError:
            packet = b""
        message = json.loads(packet) if packet else {}
        if "hello" not in message:
            self.stop()
            if "refused" in message:
                raise PodRefused(message["refused"])
            raise PodError(f"the pod server gave no sign within {_START_SECONDS:.0f} seconds: {self.why_dead}")
        self.control.setblocking(False)
        return message["hello"]

    def attach(self) -> None:
        """Listen on the running event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            loop.add_reader(self.control, self._take_messages)
            self._loop = loop

    def _take_messages(self) -> None:
        while True:
            try:
                packet = self.control.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self.stop()
                return
            message = json.loads(packet)
            number = message["gone"]
            pod = self.pods.pop(number, None)
            if pod is not None:
                pod.forget(message["reason"])
            self._reasons[number] = message["reason"]
            event = self._waiting.pop(number, None)
            if event is not None:
                event.set()

    def send_create(self, number: int, limits: PodLimits) -> LocalPod:
        """Ask for a pod; it answers its first request when it is ready."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        pod = LocalPod(self, number, ours)
        request = json.dumps({"create": number, "limits": asdict(limits)}).encode()
        with theirs:
            self._send(request, [theirs.fileno()])
        self.pods[number] = pod
        return pod

    def _send(self, packet: bytes, fds: Sequence[int] = ()) -> None:
        self.control.settimeout(_START_SECONDS)  # the server's queue is full for a moment at most
        try:
            socket.send_fds(self.control, [packet], list(fds))
        finally:
            self.control.setblocking(False)

    def send_kill(self, number: int) -> None:
        if number in self.pods and not self.why_dead:
            with contextlib.suppress(OSError):
                self._send(json.dumps({"kill": number}).encode())

    async def kill(self, number: int) -> None:
        """End a pod and wait until the kernel has reaped it."""
        if number not in self.pods or self.why_dead:
            return
        self.attach()
        event = self._waiting.setdefault(number, asyncio.Event())
        self.send_kill(number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DESTROY_SECONDS):
                await event.wait()

    async def why_gone(self, number: int) -> str:
        """The server's word on a pod whose stream ended; it comes a moment later."""
        for _ in range(50):
            reason = self.why_dead or self._reasons.get(number)
            if reason:
                return reason
            await asyncio.sleep(0.01)
        return "its stream ended"

    def stop(self) -> None:
        """End the server and with it all pods. Idempotent."""
        if self.why_dead:
            return
        self.why_dead = "the pod server ended"
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.control)
        self.control.close()
        try:
            self.process.wait(_DESTROY_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)
        text = (self.process.stderr.read() or b"").decode(errors="replace").strip()
        self.process.stderr.close()
        if text:
            self.why_dead += f": {text.splitlines()[-1]}"
        for pod in self.pods.values():
            pod.forget(self.why_dead)
        self.pods.clear()
        for event in self._waiting.values():
            event.set()


class ServedPods:
    """What the backends with a pod server share (see `types.PodBackend`)."""

    name = ""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._server: _Server | None = None

    def start(self) -> None:
        """Start the server if none is alive. PodError with the machine's reason when it cannot."""
        if self._server is not None and self._server.process.poll() is not None:
            self._server.stop()
        if self._server is None or self._server.why_dead:
            self._server = _Server(self.name)

    async def create(self, files: Mapping[str, str], limits: PodLimits | None = None) -> LocalPod:
        """A fresh pod whose `/repo` holds `files`."""
        for path in files:
            _check_text("a path of files", path)
        self.start()
        assert self._server is not None
        self._server.attach()
        try:
            pod = self._server.send_create(next(self._numbers), limits or PodLimits())
        except OSError as error:
            raise PodError(f"no pod: {error}") from error
        try:
            await pod.write_files({path: text.encode() for path, text in files.items()})
        except (OSError, ValueError) as error:
            await pod.destroy()
            raise PodError(f"the files do not fit into the pod: {error}") from error
        return pod

    async def close(self) -> None:
        """Destroy every pod and end the server; the backend may be used again."""
        if self._server is not None:
            self._server.stop()
            self._server = None


class LocalPods(ServedPods):
    """Pods isolated by the kernel: namespaces, a private root, an unprivileged user, limits."""

    name = "local"

    def guarantees(self) -> dict[str, bool | str]:
        """What is in force, as the kernel told the server's first pod; see `describe`."""
        self.start()
        assert self._server is not None
        return describe(self._server.hello)


def describe(hello: Mapping[str, Any]) -> dict[str, bool | str]:
    """Guarantee -> True, False, or a text that says how far it holds."""
    seen, refused = hello["seen"], hello["cgroups"]
    return {
        "own_processes": seen["pid"] == 1,
        "own_network": "loopback only" if seen["interfaces"] == ["lo"] else False,
        "private_root": " ".join(seen["root"]),
        "unprivileged_user": "own user namespace" if hello["user_namespace"] else "a user id of its own",
        "no_capabilities": set(seen["capabilities"]) == {"0"},
        "no_new_privs": seen["no_new_privs"] == "1",
        "denied_syscalls": f"{hello['num_denied_syscalls']}" if seen["seccomp"] == "2" else False,
        "process_limits": "address space, processes, file size, open files",
        "disk_limit": "sized tmpfs at /repo and /tmp",
        "pod_memory_limit": refused.get("memory", True),
        "pod_process_limit": refused.get("pids", True),
    }
