"""Memory and process limits of a whole pod by control groups. In: this process's groups. Out: one group a pod slot,
reused.

Source: rows E1 E7.
Choice: a slot's group is made once and serves one pod after the other, since making and removing groups costs more
than a pod. Only the commands of a pod join it, never its pid 1: the kernel's out-of-memory killer then cannot hit the
pod's control. A command joins by writing "0" to a descriptor that was opened with privilege; on version 1 that is the
`tasks` file, which moves one thread without the global lock. Where groups are not writable, process limits (rlimits)
alone hold, and the reason is reported. Version 2 was not run: no test machine had it.
"""

from __future__ import annotations

import os

_ROOT = "/sys/fs/cgroup"


class Controller:
    """One hierarchy with the groups of this server: `<own group>/composer2-<pid>/<slot>`."""

    def __init__(self, *, folder: str, limit_files: tuple[str, ...], join_file: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self.limit_files = limit_files
        self.join_file = join_file
        self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._limits: dict[int, int] = {}

    def open_slot(self, slot: int, limit: int) -> int:
        """Descriptor whose write of "0" moves the writer into the slot's group, limited to `limit`."""
        if slot not in self._limits:
            os.mkdir(str(slot), dir_fd=self._folder_fd)
        if self._limits.get(slot) != limit:
            for name in self.limit_files:
                self._write(f"{slot}/{name}", str(limit))
            self._limits[slot] = limit
        return os.open(f"{slot}/{self.join_file}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._folder_fd)

    def _write(self, path: str, text: str) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._folder_fd)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def own_groups(text: str) -> dict[str, str]:
    """Controller name -> group path, from the text of /proc/self/cgroup; "" names the version 2 hierarchy."""
    groups = {}
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            groups[name] = path
    return groups


def open_controllers(*, server_pid: int) -> tuple[dict[str, Controller], dict[str, str]]:
    """The controllers `memory` and `pids` that can be used, and for each one that cannot, the reason."""
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        groups = own_groups(file.read())
    controllers: dict[str, Controller] = {}
    reasons: dict[str, str] = {}
    for name in ("memory", "pids"):
        try:
            if name in groups:
                controllers[name] = _open_v1(name, groups[name], server_pid)
            else:
                controllers[name] = _open_v2(name, groups.get("", "/"), server_pid)
        except OSError as error:
            reasons[name] = f"not in force: {error.strerror} ({error.filename})"
    return controllers, reasons


def _open_v1(name: str, group: str, server_pid: int) -> Controller:
    parent = f"{_ROOT}/{name}{group.rstrip('/')}"
    _sweep(parent)
    limit_files = ("memory.limit_in_bytes",) if name == "memory" else ("pids.max",)
    return Controller(folder=f"{parent}/composer2-{server_pid}", limit_files=limit_files, join_file="tasks")


def _open_v2(name: str, group: str, server_pid: int) -> Controller:
    parent = f"{_ROOT}{group.rstrip('/')}"
    with open(f"{parent}/cgroup.controllers", encoding="ascii") as file:
        if name not in file.read().split():
            raise OSError(0, f"no {name} controller is delegated", parent)
    _sweep(parent)
    folder = f"{parent}/composer2-{server_pid}"
    os.makedirs(folder, exist_ok=True)
    for path in (parent, folder):  # refused while processes live in `parent`: then the controller is not in force
        with open(f"{path}/cgroup.subtree_control", "w", encoding="ascii") as file:
            file.write(f"+{name}")
    return Controller(folder=folder, limit_files=(f"{name}.max",), join_file="cgroup.procs")


def remove_groups(server_pid: int) -> None:
    """Remove the groups of a server whose processes are gone. Groups still in use stay, for the next server's sweep."""
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        groups = own_groups(file.read())
    for name in ("memory", "pids"):
        parent = f"{_ROOT}/{name}{groups[name]}" if name in groups else f"{_ROOT}{groups.get('', '/')}"
        _remove_tree(f"{parent.rstrip('/')}/composer2-{server_pid}")


def _sweep(parent: str) -> None:
    for entry in os.listdir(parent):
        prefix, _, pid = entry.partition("-")
        if prefix == "composer2" and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            _remove_tree(f"{parent}/{entry}")


def _remove_tree(folder: str) -> None:
    try:
        for slot in os.listdir(folder):
            if slot.isdigit():
                os.rmdir(f"{folder}/{slot}")
        os.rmdir(folder)
    except OSError:  # not there, or still in use
        return
