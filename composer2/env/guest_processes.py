"""Commands of a pod, as its pid 1 runs them. In: an argument list and limits. Out: exit code, cut streams, no process
left behind.

Source: rows E1 E7 (timeouts kill the whole tree, output floods, daemonised and zombie children).
Choice: `exec` ends when its command ends, not when its pipes close, because a background child may hold them; what
such a child does later goes on until the next timeout, `run_calls` or destroy. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_CHUNK = 1 << 16
_REAP_SECONDS = 0.25
_KILL_SECONDS = 5.0
_NUM_FILES = 256


class PodBroken(Exception):
    """Something in the pod cannot be killed: its pid 1 ends, and with it the pod."""


@dataclass(frozen=True, kw_only=True)
class ProcessTree:
    """Everything below pid 1, and the limits its processes get."""

    has_pid_namespace: bool
    memory_bytes: int
    num_processes: int
    disk_bytes: int
    cgroup_fds: tuple[int, ...] = ()
    """Descriptors that take "0" to move the writing process into a control group."""

    def enter(self) -> None:
        """Called in a new child before it runs anything of the model."""
        for fd in self.cgroup_fds:
            os.write(fd, b"0")
        limits = [
            (resource.RLIMIT_AS, self.memory_bytes),
            (resource.RLIMIT_FSIZE, self.disk_bytes),
            (resource.RLIMIT_NOFILE, _NUM_FILES),
            (resource.RLIMIT_CORE, 0),
        ]
        if self.has_pid_namespace:  # elsewhere the count would include every process of this user
            limits.append((resource.RLIMIT_NPROC, self.num_processes))
        for kind, value in limits:
            resource.setrlimit(kind, (value, value))

    def kill_all(self) -> None:
        """Kill and reap every process of the pod but pid 1. PodBroken when some survive."""
        deadline = time.monotonic() + _KILL_SECONDS
        while True:
            if not reap_any():
                return
            if self.has_pid_namespace:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            else:
                kill_each(descendants(os.getpid()))
            if time.monotonic() > deadline:
                raise PodBroken("processes of the pod survive SIGKILL")
            time.sleep(0.0005)


def kill_each(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def reap_any(statuses: dict[int, int] | None = None) -> bool:
    """Collect dead children, into `statuses` when given. False when no child is left, dead or alive."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        if statuses is not None:
            statuses[pid] = status


def descendants(ancestor: int) -> list[int]:
    """Process ids of all descendants of `ancestor`, read from /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    pending = [ancestor]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


@dataclass(kw_only=True)
class Stream:
    """One output stream: the first `limit` bytes are kept, the rest is read and thrown away."""

    fd: int
    limit: int
    data: bytearray
    truncated: bool = False
    ended: bool = False

    def drain(self) -> None:
        """Read what is there now."""
        while not self.ended:
            try:
                chunk = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                return
            if not chunk:
                self.ended = True
                return
            room = self.limit - len(self.data)
            self.data += chunk[:room]
            self.truncated = self.truncated or len(chunk) > room
            if self.truncated:
                return


def run_command(
    tree: ProcessTree,
    argv: Sequence[str],
    *,
    cwd: str,
    environment: Mapping[str, str],
    timeout: float,
    stdin: bytes,
    output_bytes: int,
) -> tuple[dict[str, object], bytes]:
    """Head and body of the answer: exit code, flags, stdout then stderr."""
    try:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            preexec_fn=tree.enter,
            start_new_session=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        code = 126 if getattr(error, "errno", 0) == errno.EACCES else 127
        text = f"{error}\n".encode(errors="backslashreplace")[:output_bytes]
        return {"exit_code": code, "timed_out": False, "truncated": False, "stdout_bytes": 0}, text
    assert process.stdout is not None
    assert process.stderr is not None
    streams = [
        Stream(fd=pipe.fileno(), limit=output_bytes, data=bytearray()) for pipe in (process.stdout, process.stderr)
    ]
    status = _watch(process, streams, stdin=stdin, deadline=time.monotonic() + timeout)
    timed_out = status is None
    if timed_out:
        tree.kill_all()
    for stream in streams:
        stream.drain()
    process.returncode = 0  # reaped here: Popen must not wait for it again
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    code = 128 + signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    head: dict[str, object] = {
        "exit_code": 128 - code if code < 0 else code,
        "timed_out": timed_out,
        "truncated": any(stream.truncated for stream in streams),
        "stdout_bytes": len(streams[0].data),
    }
    return head, bytes(streams[0].data + streams[1].data)


def _watch(process: subprocess.Popen[bytes], streams: list[Stream], *, stdin: bytes, deadline: float) -> int | None:
    """Feed and drain `process` until it ends; its wait status, or None at the deadline. Reaps orphans."""
    poll = select.poll()
    pidfd = os.pidfd_open(process.pid)
    poll.register(pidfd, select.POLLIN)
    for stream in streams:
        os.set_blocking(stream.fd, False)
        poll.register(stream.fd, select.POLLIN)
    pending = memoryview(stdin)
    stdin_fd = -1
    if process.stdin is not None:
        stdin_fd = os.dup(process.stdin.fileno())
        process.stdin.close()
        os.set_blocking(stdin_fd, False)
        poll.register(stdin_fd, select.POLLOUT)
    statuses: dict[int, int] = {}
    try:
        while process.pid not in statuses:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                return None
            ready = [fd for fd, _ in poll.poll(max(1.0, min(seconds, _REAP_SECONDS) * 1000))]
            for stream in streams:
                if stream.fd in ready:
                    stream.drain()
                    if stream.ended:
                        poll.unregister(stream.fd)
            if stdin_fd in ready:
                try:
                    pending = pending[os.write(stdin_fd, pending[:_CHUNK]) :]
                except BrokenPipeError:
                    pending = memoryview(b"")
                if not pending:
                    poll.unregister(stdin_fd)
                    os.close(stdin_fd)
                    stdin_fd = -1
            reap_any(statuses)
        return statuses[process.pid]
    finally:
        os.close(pidfd)
        if stdin_fd >= 0:
            os.close(stdin_fd)
