"""metrics.jsonl: the outcomes as rows in order of landing, a projection of `points/` that can be rebuilt."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator

import msgspec

from evalkit.ground.errors import DataError
from evalkit.ground.files import read_struct, write_atomic, write_struct
from evalkit.ground.layout import RunPaths
from evalkit.ground.locks import locked
from evalkit.ground.schema import Drained, MetricsRow, Outcome
from evalkit.state.points import attempts_at, known_steps, read_outcome

LOCK_TIMEOUT = 60.0  # seconds; held for one look through the file and one append

_DAMAGED = (msgspec.DecodeError, UnicodeDecodeError)


def row_of(outcome: Outcome) -> MetricsRow:
    """What a logger shows of an outcome; a skip shows as `eval/skipped_<reason>` = 1."""
    metrics = dict(outcome.metrics)
    if outcome.outcome == "skipped":
        metrics[f"eval/skipped_{outcome.reason}"] = 1
    metrics["eval/step"] = outcome.step
    return MetricsRow(
        step=outcome.step,
        attempt=outcome.attempt,
        outcome=outcome.outcome,
        reason=outcome.reason,
        detail=outcome.detail,
        time=outcome.settled_at,
        metrics=metrics,
    )


def append_row(run: RunPaths, outcome: Outcome) -> None:
    """Add the outcome's row unless it is there, mending a last line that a crash has torn."""
    row = msgspec.json.encode(row_of(outcome)) + b"\n"
    with locked(run.metrics_lock, LOCK_TIMEOUT, what="metrics.jsonl"), run.metrics.open("a+b", buffering=0) as file:
        size = _mend(file.fileno())
        if not _has_row(file.fileno(), size, outcome.step, outcome.attempt):
            _append_whole(file.fileno(), row, size)
            os.fsync(file.fileno())


def _append_whole(fd: int, row: bytes, size: int) -> None:
    try:
        written = os.write(fd, row)
        while written < len(row):
            written += os.write(fd, row[written:])
    except OSError:
        os.ftruncate(fd, size)
        raise


def _mend(fd: int) -> int:
    """Cut a last line without its end; returns the size in bytes."""
    size = os.fstat(fd).st_size
    if size == 0 or os.pread(fd, 1, size - 1) == b"\n":
        return size
    with mmap.mmap(fd, size, access=mmap.ACCESS_READ) as data:
        whole = data.rfind(b"\n") + 1
    os.ftruncate(fd, whole)
    return whole


def _has_row(fd: int, size: int, step: int, attempt: int) -> bool:
    if size == 0:
        return False
    start = f'{{"step":{step},"attempt":{attempt},'.encode()
    with mmap.mmap(fd, size, access=mmap.ACCESS_READ) as data:
        return data[: len(start)] == start or data.find(b"\n" + start) != -1


def read_rows(run: RunPaths, offset: int = 0) -> tuple[list[MetricsRow], int]:
    """The whole rows from byte `offset` on, and the offset behind the last of them.

    A file with a damaged row is made anew first; then `offset`, unless it is 0, is the one that the last drain would
    have left in the new file.
    """
    try:
        return _read(run, offset)
    except _DAMAGED:
        _rebuild(run)
        return _read(run, _drained_offset(run) if offset else 0)


def _read(run: RunPaths, offset: int) -> tuple[list[MetricsRow], int]:
    try:
        with run.metrics.open("rb") as file:
            file.seek(min(offset, os.fstat(file.fileno()).st_size))
            start, data = file.tell(), file.read()
    except FileNotFoundError:
        return [], 0
    whole = data[: data.rfind(b"\n") + 1]
    return [_decode(line) for line in whole.splitlines()], start + len(whole)


def _decode(line: bytes) -> MetricsRow:
    return msgspec.json.decode(line, type=MetricsRow)


def _rebuild(run: RunPaths) -> None:
    """Make the file anew of the outcomes: those that a drain has reported, then the others, in order of landing."""
    with locked(run.metrics_lock, LOCK_TIMEOUT, what="metrics.jsonl"):
        reported = _names(run.metrics.read_bytes()[: _drained_offset(run)])
        rows = sorted((row_of(outcome) for outcome in _readable_outcomes(run)), key=lambda row: row.time)
        before = [row for row in rows if (row.step, row.attempt) in reported]
        after = [row for row in rows if (row.step, row.attempt) not in reported]
        head, tail = (b"".join(msgspec.json.encode(row) + b"\n" for row in part) for part in (before, after))
        # Of two files the one that says less goes first: a crash between them repeats outcomes, and loses none.
        if run.drained.exists():
            write_struct(run.drained, Drained(offset=len(head)))
        write_atomic(run.metrics, head + tail)


def _names(data: bytes) -> set[tuple[int, int]]:
    """Step and attempt of every row that can be read."""
    found = set()
    for line in data.splitlines():
        with contextlib.suppress(*_DAMAGED):
            row = _decode(line)
            found.add((row.step, row.attempt))
    return found


def _readable_outcomes(run: RunPaths) -> Iterator[Outcome]:
    for step in known_steps(run):
        for attempt in attempts_at(run, step):
            with contextlib.suppress(DataError):  # whoever needs that outcome says so
                outcome = read_outcome(run.attempt(step, attempt).outcome)
                if outcome is not None:
                    yield outcome


def _drained_offset(run: RunPaths) -> int:
    try:
        return read_struct(run.drained, Drained, "drain record").offset
    except (FileNotFoundError, DataError):
        return 0
