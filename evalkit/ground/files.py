"""Files that are either whole or absent: temporary file, fsync, then rename or link."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from evalkit.ground.errors import DataError
from evalkit.ground.ids import new_id

T = TypeVar("T", bound=msgspec.Struct)


def write_atomic(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Put `data` at `path`, replacing what was there, whole or not at all (fsynced)."""
    temporary = write_temporary(path.parent, data, mode=mode)
    try:
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def write_temporary(directory: Path, data: bytes, *, mode: int = 0o666) -> Path:
    """Write `data` to a new hidden file in `directory`, fsynced; the umask applies to `mode`."""
    path = directory / f".tmp-{new_id()}"
    try:
        write_durable(path, data, mode=mode)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def write_durable(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write `data` to `path`, which must not exist yet, and fsync it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def publish_by_link(source: Path, target: Path) -> bool:
    """Give `source` the second name `target`; False when something is there already (nothing is replaced)."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    fsync_dir(target.parent)
    return True


def fsync_dir(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_struct(path: Path, kind: type[T], what: str) -> T:
    """Read one of evalkit's JSON files.

    Raises:
        FileNotFoundError: it is not there.
        DataError: it is not valid JSON of format 1, naming the file and the field.
    """
    data = path.read_bytes()
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise DataError(f"{path} is not a valid {what}: {error}") from error


def write_struct(path: Path, value: msgspec.Struct, *, mode: int = 0o666) -> None:
    write_atomic(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n", mode=mode)
