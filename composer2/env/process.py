"""Pods without isolation. In: files, commands, test calls. Out: their results, with the work done as this user on
this machine.

Source: row E1.
The same server, guest and limits for each process as the local backend, but no namespaces: the code under test sees
the machine's files and network, and `/repo` is a folder under the temporary folder. For tests and machines without
namespaces, never for code nobody has read.
Choice: refused unless asked for by name, and nothing falls back to it silently.
"""

from __future__ import annotations

from composer2.env.local import ServedPods
from composer2.types import PodError

UNSAFE_FLAG = "--unsafe-process-pods"


class ProcessPods(ServedPods):
    """Pods that are plain processes."""

    name = "process"

    def __init__(self, *, allow_unsafe: bool = False) -> None:
        if not allow_unsafe:
            raise PodError(
                "process pods do not isolate: code written by a model would run as this user, with its files and its "
                f"network. {UNSAFE_FLAG} allows it."
            )
        super().__init__()

    def guarantees(self) -> dict[str, bool | str]:
        """What is in force: limits of single processes, nothing else."""
        return {
            "own_processes": False,
            "own_network": False,
            "private_root": False,
            "unprivileged_user": False,
            "no_capabilities": False,
            "no_new_privs": False,
            "denied_syscalls": False,
            "process_limits": "address space, file size, open files",
            "disk_limit": False,
            "pod_memory_limit": False,
            "pod_process_limit": False,
        }
