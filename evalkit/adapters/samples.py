"""The samples of a dataset, as they come: one JSON line each."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec


class SampleLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `samples/<dataset>.jsonl`.

    Attributes:
        index: the prompt's position in the dataset, from 0.
        sample: which of the prompt's samples, from 0; its seed is the dataset's plus this.
        status: `scored`; `unscored` has an answer without a score; `failed` never got an answer.
        response_len: tokens.
        engine: index of the engine that answered last.
        stamp: nonce/epoch/digest as the request came in and as the answer went out.
        asked: how many requests it took.
    """

    index: int
    sample: int
    prompt: Any
    response: str | None
    label: Any
    score: float | None
    status: str
    finish_reason: str | None
    response_len: int | None
    engine: int | None
    stamp: str | None
    weight_version: str | None
    asked: int
    error: str | None


BUFFER = 1 << 17  # bytes


class SampleFile:
    """Writes one dataset's samples. A context manager: what it wrote is on the disk when it ends well."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=BUFFER)
        self._encoder = msgspec.json.Encoder(enc_hook=str)

    def write(self, line: SampleLine) -> None:
        self._file.write(self._encoder.encode(line) + b"\n")

    def flush(self) -> None:
        """Let readers see what was written. Called about every second, since a system call a line costs speed."""
        self._file.flush()

    def __enter__(self) -> SampleFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
