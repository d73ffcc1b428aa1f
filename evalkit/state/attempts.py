"""Attempts in flight: the files of `active/`, and who holds them."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from evalkit.ground import locks
from evalkit.ground.errors import DataError
from evalkit.ground.files import read_struct, write_durable
from evalkit.ground.ids import new_id
from evalkit.ground.layout import AttemptPaths, ResultPaths, RunPaths
from evalkit.ground.locks import try_lock
from evalkit.ground.processes import ProcessId
from evalkit.ground.schema import ActiveRecord, Outcome

_NAME = re.compile(r"([0-9]+)\.([0-9]+)\.(?:json|lock|reserve)")
_PREPARING = ".new-"


@dataclass(frozen=True)
class Prepared:
    """An attempt's three files, written where nobody looks, the lock held; `publish` makes it an attempt in flight."""

    directory: Path
    lock_fd: int
    record: ActiveRecord

    def publish(self, run: RunPaths) -> AttemptPaths:
        """Under the ledger lock: rename the files into place, the lock last: a record without a lock is debris."""
        paths = run.attempt(self.record.step, self.record.attempt)
        (self.directory / "record").rename(paths.record)
        (self.directory / "reserve").rename(paths.reserve)
        (self.directory / "lock").rename(paths.lock)
        self.directory.rmdir()
        return paths

    def discard(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self.lock_fd)


def prepare(run: RunPaths, record: ActiveRecord, reserve: Outcome) -> Prepared:
    """Under the ledger lock: write an attempt's files into a directory of their own.

    Args:
        reserve: the outcome that will be linked when the disk has no room for another one.
    """
    run.attempt(record.step, record.attempt).outcome.parent.mkdir(exist_ok=True)
    directory = run.active / f"{_PREPARING}{new_id()}"
    directory.mkdir()
    lock_fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try_lock(lock_fd)
        write_durable(directory / "record", msgspec.json.encode(record))
        write_durable(directory / "reserve", msgspec.json.encode(reserve))
    except BaseException:
        Prepared(directory, lock_fd, record).discard()
        raise
    return Prepared(directory, lock_fd, record)


def note(paths: AttemptPaths, record: ActiveRecord) -> None:
    """Under the ledger lock: the record alone, of an attempt that is settled in the same breath."""
    temporary = paths.run.active / f"{_PREPARING}{new_id()}"
    write_durable(temporary, msgspec.json.encode(record))
    temporary.rename(paths.record)


def list_attempts(run: RunPaths) -> list[AttemptPaths]:
    """Every attempt that has a file in `active/`, by step and attempt; none where the run is not made yet."""
    try:
        matches = [_NAME.fullmatch(name) for name in os.listdir(run.active)]
    except FileNotFoundError:
        return []
    numbers = {(int(match[1]), int(match[2])) for match in matches if match}
    return [run.attempt(step, attempt) for step, attempt in sorted(numbers)]


def sweep_preparations(run: RunPaths) -> None:
    """Under the ledger lock: clear what a dispatcher was preparing when it died, for it held this lock too."""
    for path in run.active.glob(f"{_PREPARING}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def is_held(paths: AttemptPaths) -> bool:
    """Whether an owner of the attempt lives."""
    return locks.is_held(paths.lock)


def claim(lock: Path) -> int | None:
    """Take the lock of an attempt whose owner is dead; None when it is held, or there is no lock file."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    if try_lock(fd):
        return fd
    os.close(fd)
    return None


def read_record(paths: AttemptPaths) -> ActiveRecord | None:
    """The record of an attempt in flight; None when it is gone or damaged."""
    try:
        return read_struct(paths.record, ActiveRecord, "record of an attempt")
    except (FileNotFoundError, DataError):
        return None


def read_worker(paths: AttemptPaths) -> ProcessId | None:
    """The process that works on the attempt; None before hand-over."""
    try:
        return read_struct(ResultPaths(paths.results).worker, ProcessId, "worker identity")
    except (FileNotFoundError, DataError):
        return None


def remove(paths: AttemptPaths) -> None:
    """The last step of settling: the attempt is no longer in flight. The lock goes last."""
    for path in (paths.record, paths.reserve, paths.lock):
        path.unlink(missing_ok=True)
