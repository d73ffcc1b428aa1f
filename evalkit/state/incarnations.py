"""The trainer's lives, one file each, numbered from 1 in the order in which they began."""

from __future__ import annotations

import os
import time
from pathlib import Path

from evalkit.ground.files import read_struct, write_struct
from evalkit.ground.layout import RunPaths
from evalkit.ground.schema import Incarnation


def known_incarnations(run: RunPaths) -> list[str]:
    """The names, by ordinal."""
    count = sum(name.endswith(".json") for name in os.listdir(run.incarnations))
    return [_read(run, ordinal).name for ordinal in range(1, count + 1)]


def begin_incarnation(run: RunPaths, ordinal: int, name: str | None) -> None:
    """Under the ledger lock: record that a new life of the trainer has begun."""
    write_struct(
        _path(run, ordinal), Incarnation(ordinal=ordinal, name=name or f"auto-{ordinal}", began_at=time.time())
    )


def _read(run: RunPaths, ordinal: int) -> Incarnation:
    return read_struct(_path(run, ordinal), Incarnation, "incarnation")


def _path(run: RunPaths, ordinal: int) -> Path:
    return run.incarnations / f"{ordinal}.json"
