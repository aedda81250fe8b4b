"""System calls denied inside a pod. In: the machine's architecture. Out: a filter on the calling process and all its
children.

Source: report §6.2 (untrusted code in pods); rows E1 E7.
Choice: a deny list written as raw BPF, so that no library is needed and ordinary programs run. Denied is what reaches
outside of the pod's namespaces, what touches other processes of the pod (its pid 1 above all), and kernel interfaces
with a record of escapes. Sockets are kept to local, IPv4, IPv6 and netlink families, since a network namespace does
not hold back others (vsock reaches the hypervisor). `clone3` answers ENOSYS: its flags lie in memory, where a filter
can't read them. The aarch64 numbers have not been run.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

DENIED_SYSCALLS: dict[str, tuple[int, int]] = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "syslog": (103, 116),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "vmsplice": (278, 75),
}
"""Name -> number on (x86_64, aarch64)."""

_CLONE = (56, 220)
_CLONE3 = (435, 435)
_PRLIMIT64 = (302, 261)
_SOCKET = (41, 198)
_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
_NAMESPACE_FLAGS = 0x7E020080  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET,TIME}
_ALLOWED_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK

_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_OFFSET_NR, _OFFSET_ARCH, _OFFSET_ARG0 = 0, 4, 16

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def architecture() -> int | None:
    """Column of the tables above for this machine, None when there is none."""
    return {"x86_64": 0, "aarch64": 1}.get(platform.machine())


def build_filter(column: int) -> bytes:
    """The BPF program, 8 bytes an instruction: (code, jump if true, jump if false, operand)."""

    def op(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, operand)

    allow, deny = op(_RETURN, _ALLOW), op(_RETURN, _ERRNO | errno.EPERM)
    program = [
        op(_LOAD, _OFFSET_ARCH),
        op(_JUMP_EQ, _AUDIT_ARCH[column], 1, 0),
        op(_RETURN, _KILL_PROCESS),
        op(_LOAD, _OFFSET_NR),
    ]
    if column == 0:  # the x32 numbers would bypass every comparison below
        program += [op(_JUMP_GE, 0x40000000, 0, 1), deny]
    for numbers in DENIED_SYSCALLS.values():
        program += [op(_JUMP_EQ, numbers[column], 0, 1), deny]
    program += [op(_JUMP_EQ, _CLONE3[column], 0, 1), op(_RETURN, _ERRNO | errno.ENOSYS)]
    program += [
        op(_JUMP_EQ, _CLONE[column], 0, 4),
        op(_LOAD, _OFFSET_ARG0),
        op(_JUMP_SET, _NAMESPACE_FLAGS, 0, 1),
        deny,
        allow,
    ]
    program += [  # limits of another process, pid 1 for one, are out of reach
        op(_JUMP_EQ, _PRLIMIT64[column], 0, 4),
        op(_LOAD, _OFFSET_ARG0),
        op(_JUMP_EQ, 0, 1, 0),
        deny,
        allow,
    ]
    families = len(_ALLOWED_FAMILIES)
    program += [op(_JUMP_EQ, _SOCKET[column], 0, families + 2), op(_LOAD, _OFFSET_ARG0)]
    program += [op(_JUMP_EQ, family, families - index, 0) for index, family in enumerate(_ALLOWED_FAMILIES)]
    program += [op(_RETURN, _ERRNO | errno.EAFNOSUPPORT), allow]
    return b"".join(program)


def install_filter(libc: ctypes.CDLL, program: bytes) -> None:
    """Put `program` on this process for good; needs no_new_privs or CAP_SYS_ADMIN. OSError when the kernel refuses."""
    descriptor = _Program(len(program) // 8, program)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(descriptor), 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, "prctl(PR_SET_SECCOMP)")
