"""The process that forks pods. In: requests with a socket each, on one inherited socket. Out: pods serving those
sockets.

Source: report §6.2; rows E1 E7.
Three kinds of process: the *launcher* watches the host and ends the server when the host is gone, however it died;
the *server*, warm and small, forks pods and reaps them; a *pod* is pid 1 of its own namespaces and talks to the host
directly, so that a slow pod delays no other. With isolation the server is pid 1 of an outer pid namespace: its death
is the death of every pod, by the kernel. The host's packets: `{"create": n, "limits": {...}}` with a descriptor,
`{"kill": n}`. The server's: `{"hello": ...}` or `{"refused": reason}` once, `{"gone": n, "reason": ...}` for every
pod that ended.
Choice: started without site packages and with `PYTHONHASHSEED=0` in an otherwise fixed environment, so that pods are
deterministic. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from composer2.env import cgroups, frames, guest, isolate, seccomp
from composer2.env.guest_processes import ProcessTree, descendants, kill_each, reap_any

MAX_PACKET_BYTES = 1 << 16
_FIRST_UID = 200_000
_UIDS_A_SERVER = 1024
_STREAM_FD = 3


@dataclass(frozen=True, kw_only=True)
class _Pod:
    """What the server remembers of a live pod."""

    pid: int
    pidfd: int
    slot: int
    ends_at: float
    folder: str = ""

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


@dataclass(kw_only=True)
class Server:
    """The server's state. `uid_base` 0 stands for a user namespace a pod."""

    control: socket.socket
    isolated: bool
    uid_base: int
    own_pid_namespace: int = -1
    controllers: dict[str, cgroups.Controller] = field(default_factory=dict)
    seccomp_filter: bytes = b""
    pods: dict[int, _Pod] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    """pidfd -> pod number."""

    def serve(self) -> None:
        """Until the host closes its end."""
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        while True:
            wait = min((pod.ends_at for pod in self.pods.values()), default=None)
            timeout = None if wait is None else max(0.0, wait - time.monotonic()) * 1000 + 1
            ready = [fd for fd, _ in poll.poll(timeout)]
            for fd in ready:
                if fd in self.numbers:
                    poll.unregister(fd)
                    self._bury(fd)
                elif not self._take_request(poll):
                    return
            for pod in self.pods.values():
                if pod.ends_at <= time.monotonic():
                    pod.kill()

    def _take_request(self, poll: select.poll) -> bool:
        packet, fds, _, _ = socket.recv_fds(self.control, MAX_PACKET_BYTES, 1)
        if not packet:
            return False
        request = json.loads(packet)
        if "create" in request:
            if not fds:
                self._tell({"gone": request["create"], "reason": "no pod: the server has too many open files"})
                return True
            pidfd = self.create(request["create"], request["limits"], fds[0])
            if pidfd >= 0:
                poll.register(pidfd, select.POLLIN)
        elif request["kill"] in self.pods:
            self.pods[request["kill"]].kill()
        return True

    def create(self, number: int, limits: dict[str, Any], stream_fd: int) -> int:
        """Fork one pod; its pidfd, or -1 when the machine refuses, which the host is told."""
        taken = {pod.slot for pod in self.pods.values()}
        slot = next((slot for slot in range(_UIDS_A_SERVER) if slot not in taken), -1)
        cgroup_fds: list[int] = []
        folder = ""
        try:
            if slot < 0:
                raise OSError(0, f"{_UIDS_A_SERVER} pods live already")
            for name, limit in (("memory", limits["memory_bytes"]), ("pids", limits["num_processes"])):
                if name in self.controllers:
                    cgroup_fds.append(self.controllers[name].open_slot(slot, limit))
            if self.isolated:
                isolate.unshare(isolate.CLONE_NEWPID)
            else:
                folder = tempfile.mkdtemp(prefix="composer2-pod-")
            pid = os.fork()
            if pid == 0:
                try:
                    self._become_pod(slot, limits, stream_fd, cgroup_fds, folder)
                finally:
                    os._exit(70)
            if self.isolated:
                isolate.setns(self.own_pid_namespace, isolate.CLONE_NEWPID)
        except OSError as error:
            if number == 0:
                raise
            self._tell({"gone": number, "reason": f"no pod: {error.strerror}"})
            return -1
        finally:
            for fd in (*cgroup_fds, stream_fd):
                os.close(fd)
        pidfd = os.pidfd_open(pid)
        ends_at = time.monotonic() + limits["wall_seconds"]
        self.pods[number] = _Pod(pid=pid, pidfd=pidfd, slot=slot, ends_at=ends_at, folder=folder)
        self.numbers[pidfd] = number
        return pidfd

    def probe(self) -> dict[str, Any]:
        """Make a pod, let it report what the kernel says of it, and end it. OSError when this machine makes no pods."""
        ours, theirs = socket.socketpair()
        limits = {"memory_bytes": 1 << 29, "num_processes": 8, "disk_bytes": 1 << 20, "output_bytes": 0}
        pidfd = self.create(0, {**limits, "wall_seconds": 60}, theirs.detach())
        with ours:
            ours.sendall(frames.pack({"op": "probe"}))
            head, _ = frames.receive(ours) or ({"error": {"text": "the first pod ended at once"}}, b"")
        self._bury(pidfd)
        if "error" in head:
            raise OSError(0, head["error"]["text"])
        return head["seen"]

    def _become_pod(
        self, slot: int, limits: dict[str, Any], stream_fd: int, cgroup_fds: list[int], folder: str
    ) -> NoReturn:
        stream = socket.socket(fileno=_keep_only(stream_fd, cgroup_fds))
        kept = tuple(range(_STREAM_FD + 1, _STREAM_FD + 1 + len(cgroup_fds)))
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            if self.isolated:
                isolate.enter_pod(disk_bytes=limits["disk_bytes"], uid=self.uid_base + slot if self.uid_base else 0)
                isolate.drop_privileges(
                    uid=self.uid_base + slot,
                    with_user_namespace=not self.uid_base,
                    seccomp_filter=self.seccomp_filter,
                )
            else:
                isolate.die_with_parent(signal.SIGKILL)
                isolate.adopt_orphans()
                os.chdir(folder)
        except OSError as error:
            guest.fatal(stream, str(error))
        tree = ProcessTree(
            has_pid_namespace=self.isolated,
            memory_bytes=limits["memory_bytes"],
            num_processes=limits["num_processes"],
            disk_bytes=limits["disk_bytes"],
            cgroup_fds=kept,
        )
        guest.Guest(
            stream=stream,
            root=os.path.realpath(folder) if folder else "/repo",
            tree=tree,
            output_bytes=limits["output_bytes"],
            environment=_pod_environment("/tmp" if self.isolated else folder),
        ).serve()
        if not self.isolated:
            tree.kill_all()
        os._exit(0)

    def _bury(self, pidfd: int) -> None:
        number = self.numbers.pop(pidfd)
        pod = self.pods.pop(number)
        os.close(pidfd)
        with contextlib.suppress(ChildProcessError):  # a neighbour's burial may have reaped it
            os.waitpid(pod.pid, 0)
        if pod.folder:
            self._kill_orphans()
            shutil.rmtree(pod.folder, ignore_errors=True)
        expired = pod.ends_at <= time.monotonic()
        if number == 0:
            return
        self._tell({"gone": number, "reason": "its wall_seconds are over" if expired else "it ended"})

    def _kill_orphans(self) -> None:
        """Without pid namespaces: end what dead pods left, which is now below this process."""
        while reap_any():
            below = set(descendants(os.getpid()))  # before the next line: a pod's new process is then in both
            kept = {pid for pod in self.pods.values() for pid in (pod.pid, *descendants(pod.pid))}
            if not below - kept:
                return
            kill_each(below - kept)
            time.sleep(0.0005)

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self.control.send(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):  # the host is gone: the next receive ends the server
            return


def _keep_only(stream_fd: int, cgroup_fds: list[int]) -> int:
    """Close everything but these descriptors, moved to the first free numbers; the number of the stream."""
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in (stream_fd, *cgroup_fds)]
    for index, fd in enumerate(kept):
        os.dup2(fd, _STREAM_FD + index, inheritable=False)
    os.closerange(_STREAM_FD + len(kept), 1 << 20)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.close(null)
    return _STREAM_FD


def _pod_environment(home: str) -> dict[str, str]:
    prefix = os.path.dirname(os.path.realpath(sys.executable))
    return {
        "PATH": f"{prefix}:/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }


def _prefixes() -> tuple[str, ...]:
    """Folders the interpreter needs, outermost only."""
    wanted = {os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix)}
    wanted.add(os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))
    outermost = [p for p in wanted if not any(p != other and p.startswith(other + "/") for other in wanted)]
    if "/" in outermost:
        raise OSError(0, "the interpreter's prefix is /: a pod would show the whole machine")
    return tuple(sorted(outermost))


def main(mode: str, host_pid: int, control_fd: int) -> NoReturn:
    """The launcher. `mode` is `local` or `process`; `control_fd` the inherited socket, of whole packets."""
    os.chdir("/")
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    host = os.pidfd_open(host_pid)
    if os.getppid() != host_pid:
        os._exit(1)
    isolated = mode == "local"
    uid_base = 0
    try:
        if isolated:
            uid_base = _enter_outer_namespaces()
        else:
            isolate.adopt_orphans()
    except OSError as error:
        control.send(json.dumps({"refused": str(error)}).encode())
        os._exit(1)
    launcher_pid = os.getpid()
    pid = os.fork()
    if pid == 0:  # an error from here on ends the server with its traceback on the stream the host reads
        isolate.die_with_parent(signal.SIGKILL)
        os.close(host)
        _serve(control, isolated=isolated, uid_base=uid_base, launcher_pid=launcher_pid)
        os._exit(0)
    control.close()
    server = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(host, select.POLLIN)
    poll.register(server, select.POLLIN)
    poll.poll()
    if not isolated:
        kill_each(descendants(launcher_pid))
    signal.pidfd_send_signal(server, signal.SIGKILL)
    os.waitpid(pid, 0)
    if isolated:
        cgroups.remove_groups(launcher_pid)
    os._exit(0)


def _enter_outer_namespaces() -> int:
    """A pid namespace for the server to be pid 1 of. As root: the first user id of its pods; otherwise 0."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0 and _maps_high_ids():
        isolate.unshare(isolate.CLONE_NEWPID)
        return _FIRST_UID + os.getpid() % 65536 * _UIDS_A_SERVER
    isolate.unshare(isolate.CLONE_NEWUSER | isolate.CLONE_NEWNS | isolate.CLONE_NEWPID)
    isolate.map_user(0, uid, gid)
    return 0


def _maps_high_ids() -> bool:
    with open("/proc/self/uid_map", encoding="ascii") as file:
        rows = [[int(number) for number in line.split()] for line in file]
    return any(first == 0 and count > _FIRST_UID + 65536 * _UIDS_A_SERVER for first, _, count in rows)


def _serve(control: socket.socket, *, isolated: bool, uid_base: int, launcher_pid: int) -> None:
    server = Server(control=control, isolated=isolated, uid_base=uid_base)
    guest.warm_up()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if not isolated:
        isolate.adopt_orphans()
    hello: dict[str, Any] = {"user_namespace": isolated and not uid_base}
    if isolated:
        try:
            server.controllers, hello["cgroups"] = cgroups.open_controllers(server_pid=launcher_pid)
            server.own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
            package = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
            isolate.enter_private_root(prefixes=_prefixes(), hidden=package, keep_proc=not uid_base)
            isolate.drop_bounding_set()
        except OSError as error:
            control.send(json.dumps({"refused": str(error)}).encode())
            return
        column = seccomp.architecture()
        server.seccomp_filter = b"" if column is None else seccomp.build_filter(column)
        hello["num_denied_syscalls"] = len(seccomp.DENIED_SYSCALLS) if column is not None else 0
    try:
        hello["seen"] = server.probe()
    except OSError as error:
        control.send(json.dumps({"refused": str(error)}).encode())
        return
    control.send(json.dumps({"hello": hello}).encode())
    server.serve()
