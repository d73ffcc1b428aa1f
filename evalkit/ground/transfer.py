"""Bytes from file to file, hashed on the way, on all cores: what export, digest and checks are made of.

One span is one tensor. A span is read in chunks that stay in the core's cache, so that hashing a chunk that was just
copied costs no second trip to memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from evalkit.ground.errors import DataError

CHUNK = 512 << 10  # bytes
MAX_THREADS = 8


class Cancelled(Exception):  # noqa: N818  (an answer to whoever cancelled)
    """The transfer was ended before it was done."""


class Span(msgspec.Struct, frozen=True):
    """`length` bytes of `source` from `start`, to be hashed under `name`, and copied to `target` if there is one."""

    name: str
    source: Path | memoryview
    start: int
    length: int
    target: Path | None = None
    target_start: int = 0


def transfer(spans: Sequence[Span], cancelled: threading.Event | None = None) -> dict[str, str]:
    """Copy and hash every span; the blake3 of each by name, in hexadecimal.

    Targets must exist. On an error, or a signal in the calling thread, the other threads are stopped before it is
    passed on.

    Args:
        cancelled: set by another thread when the result is no longer wanted.

    Raises:
        DataError: a source ends before a span does.
        Cancelled: `cancelled` was set before the end.
        OSError: reading or writing failed.
    """
    job = _Job(spans, cancelled or threading.Event())
    with _descriptors(spans) as job.fds:
        threads = [threading.Thread(target=job.work, daemon=True) for _ in range(_thread_count(spans))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            job.stop.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
    if job.error is not None:
        raise job.error
    if len(job.hashes) != len(spans):
        raise Cancelled
    return job.hashes


def _thread_count(spans: Sequence[Span]) -> int:
    return min(len(os.sched_getaffinity(0)), MAX_THREADS, 1 + sum(span.length for span in spans) // (16 * CHUNK))


class _Job:
    """What the threads of one transfer share."""

    def __init__(self, spans: Sequence[Span], cancelled: threading.Event) -> None:
        # The largest first: whoever comes last should find only small ones left. A list iterator's next() is atomic.
        self.spans = iter(sorted(spans, key=lambda span: -span.length))
        self.fds: dict[Path, int] = {}
        self.hashes: dict[str, str] = {}
        self.stop = threading.Event()
        self.cancelled = cancelled
        self.error: BaseException | None = None

    def work(self) -> None:
        buffer = memoryview(bytearray(CHUNK))
        try:
            for span in self.spans:
                digest = self.move(span, buffer)
                if self.ended():
                    return
                self.hashes[span.name] = digest
        except BaseException as error:  # noqa: BLE001  (raised again in the calling thread)
            self.error = error
            self.stop.set()

    def move(self, span: Span, buffer: memoryview) -> str:
        import blake3

        content = blake3.blake3()
        target = self.fds[span.target] if span.target else None
        done = 0
        while done < span.length and not self.ended():
            chunk = self.read(span, done, buffer)
            if target is not None:
                _write_at(target, chunk, span.target_start + done)
            content.update(chunk)
            done += len(chunk)
        return content.hexdigest()

    def ended(self) -> bool:
        return self.stop.is_set() or self.cancelled.is_set()

    def read(self, span: Span, done: int, buffer: memoryview) -> memoryview:
        position = span.start + done
        if isinstance(span.source, memoryview):
            return span.source[position : position + min(CHUNK, span.length - done)]
        count = os.preadv(self.fds[span.source], [buffer[: span.length - done]], position)
        if count == 0:
            raise DataError(f"{span.source} is cut in tensor {span.name}: it became shorter while it was read")
        return buffer[:count]


def _write_at(fd: int, data: memoryview, position: int) -> None:
    while data:
        count = os.pwrite(fd, data, position)
        data, position = data[count:], position + count


@contextmanager
def _descriptors(spans: Sequence[Span]) -> Iterator[dict[Path, int]]:
    with ExitStack() as stack:
        fds: dict[Path, int] = {}
        for path in {s.source for s in spans if isinstance(s.source, Path)}:
            fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fds[path])
        for path in {s.target for s in spans if s.target}:
            fds[path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            stack.callback(os.close, fds[path])
        yield fds
