"""Test calls of a pod, as its pid 1 runs them. In: a module, expressions, a CPU limit. Out: one outcome for each
expression.

Source: rows E1 E7 V1 (a process that ran model-edited code is never reused).
One forked child imports the module and evaluates the calls; it reports each outcome on a private pipe, as (index,
status, line, length) and text. A child that dies leaves its current call without outcome: the reason of death decides
it, and a new child goes on with the next call, at most `MAX_DEATHS` times. What a child could forge on the pipe is what
its functions could return as well: the expected values never enter a pod.
Choice: CPU time is limited by a profiling timer whose signal kills, because an exception could be caught by the code
that is being timed; wall time by a deadline after which everything in the pod is killed. Standard library only.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from composer2.env.guest_processes import ProcessTree, reap_any

RECORD = struct.Struct("!iBII")
IMPORTED, RETURNED, RAISED, CRASHED = 0, 1, 2, 3
STATUS_NAMES = {RETURNED: "returned", RAISED: "raised", CRASHED: "crashed"}
MAX_VALUE_CHARS = 4096
MAX_VALUE_BYTES = 4 * MAX_VALUE_CHARS
MAX_DEPTH = 40
MAX_DEATHS = 2
IMPORT_CPU_SECONDS = 0.5
"""On top of `timeout`: the module may import others that are not warm."""
_WALL_FACTOR, _WALL_EXTRA = 10.0, 1.0

Outcome = tuple[str, str, int]
"""Status, value, and the line of the module at which its function ended; 0 where none was reached."""
Evaluate = Callable[[str, Sequence[str], int, int, float], None]
"""(module, calls, index of the first call to run, pipe, timeout): what the child does. It never returns."""


class NotPlain(ValueError):
    """A result that cannot be reported as text without running code of its type."""


def plain_repr(value: object) -> str:
    """`repr` of a plain value; sets are written in sorted order, since their own order depends on their history.

    Plain: exactly None, bool, int, float, str, bytes, list, tuple, dict, set, frozenset, in any nesting. NotPlain
    otherwise, or when the text would exceed `MAX_VALUE_CHARS` or the nesting `MAX_DEPTH`.
    """
    parts: list[str] = []
    _write_plain(value, parts, [MAX_VALUE_CHARS], MAX_DEPTH)
    return "".join(parts)


def _write_plain(value: object, parts: list[str], room: list[int], depth: int) -> None:
    kind = type(value)
    if kind is int or kind is str or kind is bytes:
        size = value.bit_length() // 4 if isinstance(value, int) else len(value)  # type: ignore[arg-type]
        if size > room[0]:
            raise NotPlain("value is too long")
    if value is None or kind is bool or kind is int or kind is float or kind is str or kind is bytes:
        _append(repr(value), parts, room)
        return
    if depth == 0:
        raise NotPlain("value is nested too deeply")
    if kind is dict:
        _append("{", parts, room)
        for index, (key, item) in enumerate(value.items()):  # type: ignore[attr-defined]
            _append(", " if index else "", parts, room)
            _write_plain(key, parts, room, depth - 1)
            _append(": ", parts, room)
            _write_plain(item, parts, room, depth - 1)
        _append("}", parts, room)
    elif kind is list or kind is tuple:
        _append("[" if kind is list else "(", parts, room)
        for index, item in enumerate(value):  # type: ignore[arg-type, var-annotated]
            _append(", " if index else "", parts, room)
            _write_plain(item, parts, room, depth - 1)
        closing = ",)" if kind is tuple and len(value) == 1 else ")"  # type: ignore[arg-type]
        _append("]" if kind is list else closing, parts, room)
    elif kind is set or kind is frozenset:
        texts = []
        for item in value:  # type: ignore[attr-defined]
            inner: list[str] = []
            _write_plain(item, inner, room, depth - 1)
            texts.append((type(item).__name__, item if type(item) in (int, float, str) else 0, "".join(inner)))
        body = "{" + ", ".join(text for _, _, text in sorted(texts)) + "}" if texts else ""
        parts.append(body if kind is set and texts else f"{kind.__name__}({body})")
    else:
        raise NotPlain(f"value of type {kind.__name__[:80]} is not plain")


def _append(text: str, parts: list[str], room: list[int]) -> None:
    room[0] -= len(text)
    if room[0] < 0:
        raise NotPlain("value is too long")
    parts.append(text)


@dataclass(kw_only=True)
class _Child:
    """One forked child and what it has reported so far."""

    pid: int
    pipe: int
    next_index: int
    imported: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    buffer: bytearray = field(default_factory=bytearray)
    misreported: bool = False

    def drain(self, num_calls: int) -> bool:
        """Read what is there; True when a record was complete. A malformed report is not believed from there on."""
        try:
            chunk = os.read(self.pipe, 1 << 16)
        except BlockingIOError:
            return False
        self.buffer += chunk
        progress = False
        while not self.misreported and len(self.buffer) >= RECORD.size:
            index, status, line, length = RECORD.unpack_from(self.buffer)
            expected = (status == IMPORTED) != self.imported and index == self.next_index and index < num_calls
            if not expected or status > CRASHED or length > MAX_VALUE_BYTES:
                self.misreported = True
                break
            if len(self.buffer) < RECORD.size + length:
                break
            text = self.buffer[RECORD.size : RECORD.size + length].decode("utf-8", errors="replace")
            del self.buffer[: RECORD.size + length]
            progress = True
            if status == IMPORTED:
                self.imported = True
            else:
                self.outcomes.append((STATUS_NAMES[status], text, line))
                self.next_index += 1
        return progress


def run_calls(
    tree: ProcessTree, evaluate: Evaluate, module: str, calls: Sequence[str], *, timeout: float
) -> list[Outcome]:
    """Outcomes as (status, value, line), one for each call, whatever the module does."""
    outcomes: list[Outcome] = []
    deaths = 0
    deadline = time.monotonic() + _WALL_FACTOR * timeout * (len(calls) + 2) + 2 * _WALL_EXTRA
    while len(outcomes) < len(calls):
        child, ending = _run_child(tree, evaluate, module, calls, first=len(outcomes), timeout=timeout, until=deadline)
        outcomes += child.outcomes
        if len(outcomes) == len(calls):
            break
        deaths += 1
        alone = child.imported and deaths < MAX_DEATHS and time.monotonic() < deadline
        outcomes += [ending] * (1 if alone else len(calls) - len(outcomes))
    return outcomes


def _run_child(
    tree: ProcessTree,
    evaluate: Evaluate,
    module: str,
    calls: Sequence[str],
    *,
    first: int,
    timeout: float,
    until: float,
) -> tuple[_Child, Outcome]:
    """Fork a child for the calls from `first` on; the outcome of the call at which it ended, had it not finished."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            tree.enter()
            evaluate(module, calls, first, write_end, timeout)
        finally:
            os._exit(70)
    os.close(write_end)
    os.set_blocking(read_end, False)
    child = _Child(pid=pid, pipe=read_end, next_index=first)
    poll = select.poll()
    pidfd = os.pidfd_open(pid)
    poll.register(pidfd, select.POLLIN)
    poll.register(read_end, select.POLLIN)
    call_wall = _WALL_FACTOR * timeout + _WALL_EXTRA
    deadline = time.monotonic() + call_wall + _WALL_FACTOR * IMPORT_CPU_SECONDS
    statuses: dict[int, int] = {}
    try:
        while pid not in statuses and child.next_index < len(calls) and not child.misreported:
            seconds = min(deadline, until) - time.monotonic()
            if seconds <= 0:
                break
            ready = dict(poll.poll(seconds * 1000 + 1))
            if read_end in ready:
                if child.drain(len(calls)):
                    deadline = time.monotonic() + call_wall
                elif ready[read_end] & select.POLLHUP:
                    poll.unregister(read_end)
            if pidfd in ready:
                while child.drain(len(calls)):
                    pass
                reap_any(statuses)
        tree.kill_all()
        return child, _ending(statuses.get(pid), misreported=child.misreported)
    finally:
        os.close(pidfd)
        os.close(read_end)


def _ending(status: int | None, *, misreported: bool) -> Outcome:
    if misreported:
        return "crashed", "malformed report", 0
    if status is None:
        return "timeout", "", 0
    code = os.waitstatus_to_exitcode(status)
    if -code in (signal.SIGPROF, signal.SIGXCPU):
        return "timeout", "", 0
    return "crashed", f"exit code {code}" if code >= 0 else f"signal {-code}", 0
