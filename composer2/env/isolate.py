"""The kernel calls that make a pod. In: limits and ids. Out: the calling process inside its namespaces, without any
privilege.

Source: report §6.2 (isolated pods); rows E1 E7.
Order of things: the pod server builds one small read-only root, once, and moves into it (`enter_private_root`), so
that the host's files are gone before the first pod exists. A pod is then a fork that unshares its namespaces and adds
two sized tmpfs and its own /proc (`enter_pod`), about a millisecond of work, and gives up every privilege
(`drop_privileges`).
Choice: as root every pod gets a user id of its own that nothing else uses, so that process limits and files can't
cross pods; otherwise every pod gets a user namespace of its own. Standard library only, through ctypes: `os` has no
mount.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import platform
import socket
import struct

from composer2.env import seccomp

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442
_CAPSET = {"x86_64": 126, "aarch64": 91}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_LAST_CAPABILITY = 63
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1

_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_ETC = {
    "passwd": "root:x:0:0::/:/bin/false\npod:x:1000:1000::/tmp:/bin/sh\n",
    "group": "root:x:0:\npod:x:1000:\n",
    "hosts": "127.0.0.1 localhost pod\n::1 localhost pod\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


@functools.cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def unshare(flags: int) -> None:
    _check(libc().unshare(flags), f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    _check(libc().setns(fd, kind), "setns")


def die_with_parent(signal_number: int) -> None:
    _check(libc().prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def adopt_orphans() -> None:
    """Orphaned descendants become children of this process instead of init's."""
    _check(libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(PR_SET_CHILD_SUBREAPER)")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    result = libc().mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(result, f"mount {kind or source or 'flags'} on {target}")


def _set_read_only(path: str, *, recursive: bool) -> None:
    attributes = struct.pack("=QQQQ", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    result = libc().syscall(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), flags, attributes, len(attributes))
    _check(result, f"mount_setattr {path} (needs Linux 5.12)")


def map_user(inside: int, outside_uid: int, outside_gid: int) -> None:
    """Give the user namespace just unshared its one id: `inside` there is `outside` here."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {outside_uid} 1"),
        ("gid_map", f"{inside} {outside_gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def enter_private_root(*, prefixes: tuple[str, ...], hidden: str, keep_proc: bool) -> None:
    """Replace the file tree of this process: system folders and `prefixes` read-only, nothing else of the host.

    `hidden` is masked where a visible folder would contain it. `keep_proc` leaves the current /proc in place, without
    which a kernel refuses a new one in a user namespace; every pod covers it with its own. OSError names the step
    that failed.
    """
    unshare(CLONE_NEWNS)
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    extra = tuple(p for p in prefixes if not any(_is_below(p, system) for system in _SYSTEM_FOLDERS))
    taken = (*extra, hidden)
    candidates = [p for p in ("/mnt", "/media", "/srv", "/opt", "/tmp") if os.path.isdir(p)]
    new_root = next(p for p in candidates if not any(_is_below(path, p) for path in taken))
    _mount("pod-root", new_root, "tmpfs", _MS_NOSUID, "size=4m,nr_inodes=4k,mode=755")
    for folder in _SYSTEM_FOLDERS:
        if os.path.islink(folder):
            os.symlink(os.readlink(folder), new_root + folder)
        elif os.path.isdir(folder):
            _bind_read_only(folder, new_root + folder)
    for prefix in extra:
        _bind_read_only(prefix, new_root + prefix)
    if os.path.isdir(new_root + hidden):
        _mount("hidden", new_root + hidden, "tmpfs", _MS_NOSUID, "size=4k,mode=000")
    _make_etc_and_dev(new_root)
    for folder in ("repo", "tmp", "proc"):
        os.mkdir(f"{new_root}/{folder}")
    if keep_proc:
        _mount("/proc", f"{new_root}/proc", None, _MS_BIND | _MS_REC)
    os.chdir(new_root)
    _check(libc().syscall(_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    _check(libc().umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")
    _set_read_only("/", recursive=False)


def _bind_read_only(source: str, target: str) -> None:
    os.makedirs(target, mode=0o755, exist_ok=True)
    _mount(source, target, None, _MS_BIND | _MS_REC)
    _set_read_only(target, recursive=True)


def _make_etc_and_dev(new_root: str) -> None:
    os.mkdir(f"{new_root}/etc")
    for name, text in _ETC.items():
        with open(f"{new_root}/etc/{name}", "w", encoding="ascii") as file:
            file.write(text)
    if os.path.exists("/etc/ld.so.cache"):
        with open("/etc/ld.so.cache", "rb") as source, open(f"{new_root}/etc/ld.so.cache", "wb") as target:
            target.write(source.read())
    if os.path.isdir("/etc/alternatives"):
        os.mkdir(f"{new_root}/etc/alternatives")
        for name in os.listdir("/etc/alternatives"):
            if os.path.islink(f"/etc/alternatives/{name}"):
                os.symlink(os.readlink(f"/etc/alternatives/{name}"), f"{new_root}/etc/alternatives/{name}")
    os.mkdir(f"{new_root}/dev")
    for name in _DEVICES:
        with open(f"{new_root}/dev/{name}", "wb"):
            pass
        _mount(f"/dev/{name}", f"{new_root}/dev/{name}", None, _MS_BIND)
    links = {"shm": "/tmp", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    for name, to in links.items():
        os.symlink(to, f"{new_root}/dev/{name}")


def enter_pod(*, disk_bytes: int, uid: int) -> None:
    """As pid 1 of a fresh pid namespace: own mounts, network, IPC, host name. `uid` owns the folders."""
    unshare(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)
    size = f"size={disk_bytes},nr_inodes={disk_bytes // 4096 + 1024}"
    _mount("repo", "/repo", "tmpfs", _MS_NOSUID | _MS_NODEV, f"{size},mode=755,uid={uid},gid={uid}")
    _mount("tmp", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"{size},mode=1777")
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    socket.sethostname("pod")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
    os.chdir("/repo")


def drop_privileges(*, uid: int, with_user_namespace: bool, seccomp_filter: bytes) -> None:
    """The last step: an unprivileged user, no capability nor a way to get one, the system-call filter."""
    if with_user_namespace:
        outside = os.geteuid(), os.getegid()  # read before the new namespace, in which they have no name yet
        unshare(CLONE_NEWUSER)
        map_user(1000, *outside)
        drop_bounding_set()
    else:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header, empty = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _check(libc().syscall(_CAPSET[platform.machine()], header, empty), "capset")
    _check(libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    _check(libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")
    if seccomp_filter:
        seccomp.install_filter(libc(), seccomp_filter)


def drop_bounding_set() -> None:
    """No program started from here can gain a capability. The capabilities of this process itself stay."""
    for capability in range(_LAST_CAPABILITY + 1):
        if libc().prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            error = ctypes.get_errno()
            if error == errno.EINVAL:  # past the kernel's last capability
                return
            raise OSError(error, f"prctl(PR_CAPBSET_DROP, {capability})")
