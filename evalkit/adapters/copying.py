"""Weight files in their place: shared by reflink or hard link, or new ones to copy into."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Literal

from evalkit.ground.errors import UsageError

CopyMode = Literal["auto", "reflink", "copy", "hardlink"]

_FICLONE = 0x40049409  # linux/fs.h: share the source's blocks, copied when either side is written
_CANNOT_CLONE = {errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.EPERM, errno.ENOSYS}


def link_file(source: Path, target: Path, mode: CopyMode) -> bool:
    """Give `target` the content of `source` without moving bytes, if `mode` allows and the file system can.

    Returns whether it did; if not, there is no `target`.

    Raises:
        UsageError: the mode asks for what the file system cannot do.
    """
    if mode == "copy":
        return False
    if mode == "hardlink":
        _hardlink(source, target)
        return True
    if _reflink(source, target):
        return True
    if mode == "reflink":
        raise UsageError(
            f"--copy reflink: SNAPSHOT_DIR's file system cannot share blocks with {source}",
            "use --copy auto",
            "export_failed",
        )
    return False


def _hardlink(source: Path, target: Path) -> None:
    try:
        os.link(os.path.realpath(source), target)  # a symlink's own second name would be no copy at all
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
            raise
        raise UsageError(
            f"--copy hardlink: SNAPSHOT_DIR cannot hold a link to {source}: {error.strerror}",
            "use --copy auto",
            "export_failed",
        ) from error


def _reflink(source: Path, target: Path) -> bool:
    with source.open("rb") as original, target.open("xb") as clone:
        try:
            fcntl.ioctl(clone.fileno(), _FICLONE, original.fileno())
        except OSError as error:
            if error.errno not in _CANNOT_CLONE:
                raise
            target.unlink()
            return False
    return True


def create_file(path: Path, head: bytes) -> None:
    """A new file that begins with `head`, its mode by the umask (safetensors' own writer leaves 0600)."""
    with path.open("xb") as file:
        file.write(head)


def fsync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
