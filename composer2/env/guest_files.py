"""Files of a pod, as its pid 1 handles them. In: paths relative to the repository. Out: bytes and names; OSError as
usual.

Source: rows E1 E7 (symbolic links, path escapes, huge and special files).
Choice: paths are resolved by the pod itself, whose root holds nothing of the host, so that a link cannot leave; a
path that names a place outside of the repository in words (`..`, absolute) is refused. Only regular files are read:
opening a pipe or a device could block. Writing goes through a rename: a full disk leaves the old file whole. Standard
library only.
"""

from __future__ import annotations

import errno
import os
import stat

MAX_FILE_BYTES = 16 << 20
MAX_LISTED = 100_000
_NEW_SUFFIX = ".composer2-new"


def resolve(root: str, path: str, *, links_may_leave: bool) -> str:
    """Absolute path of `path` below `root`. PermissionError when it names a place outside."""
    if path == "/repo" or path.startswith("/repo/"):
        path = "." + path[len("/repo") :]
    full = os.path.normpath(os.path.join(root, path))
    inside = full == root or full.startswith(root + "/")
    if inside and not links_may_leave:
        real = os.path.realpath(full)
        inside = real == root or real.startswith(root + "/")
    if not inside:
        raise PermissionError(errno.EACCES, "path leaves the repository")
    return full


def read_file(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise PermissionError(errno.EACCES, "not a regular file")
        chunks = []
        num_bytes = 0
        while chunk := os.read(fd, 1 << 20):
            chunks.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > MAX_FILE_BYTES:
                raise OSError(errno.EFBIG, f"file is larger than {MAX_FILE_BYTES} bytes")
        return b"".join(chunks)
    finally:
        os.close(fd)


def write_file(path: str, data: bytes) -> None:
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error
    mode = stat.S_IMODE(os.stat(path).st_mode) if os.path.isfile(path) else 0o644
    new_path = path + _NEW_SUFFIX
    if os.path.lexists(new_path):
        os.unlink(new_path)
    fd = os.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
        os.replace(new_path, path)
    except OSError:
        os.unlink(new_path)
        raise


def list_files(root: str, folder: str) -> list[str]:
    """Paths, relative to `root`, of all files and links below `folder`, sorted. Links are not followed."""
    found: list[str] = []
    pending = [folder]
    while pending:
        current = pending.pop()
        try:
            with os.scandir(current) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        found.append(os.path.relpath(entry.path, root))
        except OSError:
            if current == folder:
                raise
        if len(found) > MAX_LISTED:
            raise OSError(errno.E2BIG, f"more than {MAX_LISTED} files")
    return sorted(found)
