"""metrics.jsonl: the outcomes as rows in order of landing, a projection of `points/` that can be rebuilt."""

from __future__ import annotations

import mmap
import os

import msgspec

from evalkit.ground.layout import RunPaths
from evalkit.ground.locks import locked
from evalkit.ground.schema import MetricsRow, Outcome

LOCK_TIMEOUT = 60.0  # seconds; held for one look through the file and one append


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
    """The whole rows from byte `offset` on, and the offset behind the last of them."""
    try:
        with run.metrics.open("rb") as file:
            file.seek(min(offset, os.fstat(file.fileno()).st_size))
            start, data = file.tell(), file.read()
    except FileNotFoundError:
        return [], 0
    whole = data[: data.rfind(b"\n") + 1]
    return [msgspec.json.decode(line, type=MetricsRow) for line in whole.splitlines()], start + len(whole)
