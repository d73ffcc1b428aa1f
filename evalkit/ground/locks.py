"""Kernel locks (flock) on descriptors that their holder owns.

`fcntl.flock` is used directly: it is the primitive behind the usual lock library, whose import alone costs more
than a whole dispatch may. A lock lives as long as any process has the descriptor open, so it can be handed to a
child by inheritance: pass the descriptor, then close it here without unlocking.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evalkit.ground.errors import BusyError, StorageError

_UNSUPPORTED = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open descriptor without waiting; whether it is held now.

    Raises:
        StorageError: the mount has no flock.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            raise StorageError(
                f"the file system has no usable flock: {error.strerror}", "put the directory on a local disk or tmpfs"
            ) from error
        raise
    return True


def open_locked(path: Path, *, shared: bool = False) -> int | None:
    """Open the lock file at `path` (made if missing) and lock it without waiting.

    Returns the descriptor, or None when somebody else holds it. The file behind the path may be replaced between
    open and lock, so the inode is compared afterwards: only a lock on the file that the path names counts.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not try_lock(fd, shared=shared):
                os.close(fd)
                return None
            if is_current(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def is_current(fd: int, path: Path) -> bool:
    """Whether `path` still names the file that `fd` has open."""
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock file at `path`; a missing file is held by nobody."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(fd)
    finally:
        os.close(fd)


@contextmanager
def locked(path: Path, timeout: float, *, what: str = "") -> Iterator[int]:
    """Hold the lock file at `path`, waiting at most `timeout` seconds for it.

    Raises:
        BusyError: it was not free in time.
    """
    fd = wait_locked(path, timeout, what=what)
    try:
        yield fd
    finally:
        os.close(fd)


def wait_locked(path: Path, timeout: float, *, shared: bool = False, what: str = "") -> int:
    """As `locked`, but the caller owns (and closes) the descriptor."""
    deadline = time.monotonic() + timeout
    pause = 0.001
    while True:
        fd = open_locked(path, shared=shared)
        if fd is not None:
            return fd
        if time.monotonic() >= deadline:
            raise BusyError(f"{what or path} is locked by another process after {timeout:g} s", "try again later")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
