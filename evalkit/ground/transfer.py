"""Bytes from file to file, hashed on the way, on all cores: what export, digest and checks are made of.

One span is one tensor. A span is read in chunks that stay in the core's cache, so that hashing a chunk that was just
copied costs no second trip to memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from evalkit.ground.errors import DataError

CHUNK = 1 << 20  # bytes
MAX_THREADS = 8


@dataclass(frozen=True)
class Span:
    """`length` bytes of `source` from `start`, to be hashed under `name`, and copied to `target` if there is one."""

    name: str
    source: Path
    start: int
    length: int
    target: Path | None = None
    target_start: int = 0


def transfer(spans: Sequence[Span]) -> dict[str, str]:
    """Copy and hash every span; the blake3 of each by name, in hexadecimal.

    Targets must exist. On an error or a signal in the calling thread the other threads are stopped before it is
    passed on.

    Raises:
        DataError: a source ends before a span does.
        OSError: reading or writing failed.
    """
    job = _Job(spans)
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
    return job.hashes


def _thread_count(spans: Sequence[Span]) -> int:
    return min(len(os.sched_getaffinity(0)), MAX_THREADS, 1 + sum(span.length for span in spans) // (16 * CHUNK))


class _Job:
    """What the threads of one transfer share."""

    def __init__(self, spans: Sequence[Span]) -> None:
        # The largest first: whoever comes last should find only small ones left. A list iterator's next() is atomic.
        self.spans = iter(sorted(spans, key=lambda span: -span.length))
        self.fds: dict[Path, int] = {}
        self.hashes: dict[str, str] = {}
        self.stop = threading.Event()
        self.error: BaseException | None = None

    def work(self) -> None:
        buffer = memoryview(bytearray(CHUNK))
        try:
            for span in self.spans:
                self.hashes[span.name] = self.move(span, buffer)
                if self.stop.is_set():
                    return
        except BaseException as error:  # noqa: BLE001  (raised again in the calling thread)
            self.error = error
            self.stop.set()

    def move(self, span: Span, buffer: memoryview) -> str:
        import blake3

        content = blake3.blake3()
        source = self.fds[span.source]
        target = self.fds[span.target] if span.target else None
        done = 0
        while done < span.length and not self.stop.is_set():
            count = os.preadv(source, [buffer[: span.length - done]], span.start + done)
            if count == 0:
                raise DataError(f"{span.source} is cut in tensor {span.name}: it became shorter while it was read")
            if target is not None:
                _write_at(target, buffer[:count], span.target_start + done)
            content.update(buffer[:count])
            done += count
        return content.hexdigest()


def _write_at(fd: int, data: memoryview, position: int) -> None:
    while data:
        count = os.pwrite(fd, data, position)
        data, position = data[count:], position + count


@contextmanager
def _descriptors(spans: Sequence[Span]) -> Iterator[dict[Path, int]]:
    with ExitStack() as stack:
        fds: dict[Path, int] = {}
        for path, flags in {s.source: os.O_RDONLY for s in spans}.items():
            fds[path] = os.open(path, flags | os.O_CLOEXEC)
            stack.callback(os.close, fds[path])
        for path in {s.target for s in spans if s.target}:
            fds[path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            stack.callback(os.close, fds[path])
        yield fds
