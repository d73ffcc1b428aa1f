"""The run: RUN_DIR/evalkit.json, made at first use, and the settings that first use records in it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from evalkit.ground.errors import UsageError
from evalkit.ground.files import publish_by_link, read_struct, write_struct, write_temporary
from evalkit.ground.ids import new_id
from evalkit.ground.layout import RunPaths
from evalkit.ground.locks import locked
from evalkit.ground.schema import RunRecord

LOCK_TIMEOUT = 60.0  # seconds; nobody holds the ledger lock longer than a few renames take


def open_run(root: Path, *, create: bool) -> RunRecord:
    """The run at `root`; with `create` it is made if missing (by two at once, one wins and both read it).

    Raises:
        UsageError: it is not there and `create` is false.
        DataError: its record is damaged or of another format.
    """
    paths = RunPaths(root)
    try:
        return read_struct(paths.record, RunRecord, "run record")
    except FileNotFoundError:
        if not create:
            raise UsageError(f"{root} is no run directory", "give --run-dir or set EVALKIT_RUN_DIR") from None
    _make_run(paths)
    return read_struct(paths.record, RunRecord, "run record")


def find_run(root: Path) -> RunRecord | None:
    """The run at `root`, or None when there is none yet.

    Raises:
        DataError: its record is damaged or of another format.
    """
    return open_run(root, create=False) if RunPaths(root).record.exists() else None


def _make_run(paths: RunPaths) -> None:
    for directory in (paths.active, paths.points, paths.results, paths.fleets, paths.incarnations):
        directory.mkdir(parents=True, exist_ok=True)
    record = RunRecord(run_id=new_id(), created_at=time.time())
    temporary = write_temporary(paths.root, msgspec.json.encode(record))
    try:
        publish_by_link(temporary, paths.record)
    finally:
        temporary.unlink()


def remember(
    root: Path, *, snapshot_dir: Path | None = None, suite: Path | None = None, fleet: str | None = None
) -> RunRecord:
    """Record settings that the run does not have yet; what it has already stays."""
    offered = {"snapshot_dir": _absolute(snapshot_dir), "suite": _absolute(suite), "fleet": _absolute_fleet(fleet)}
    record = open_run(root, create=True)
    if not _news(record, offered):
        return record
    paths = RunPaths(root)
    with locked(paths.ledger_lock, LOCK_TIMEOUT, what="the ledger"):
        record = open_run(root, create=False)
        news = _news(record, offered)
        if news:
            record = msgspec.structs.replace(record, **news)
            write_struct(paths.record, record)
    return record


def _news(record: RunRecord, offered: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in offered.items() if value is not None and getattr(record, name) is None}


def _absolute(path: Path | None) -> str | None:
    return None if path is None else os.path.abspath(path)


def fleet_name(record: RunRecord | None, given: str | None) -> str:
    """The fleet to use: the flag's, else the run's, else `eval`. With a slash it is an absolute path."""
    return _absolute_fleet(given) or (record.fleet if record else None) or "eval"


def _absolute_fleet(name: str | None) -> str | None:
    return os.path.abspath(name) if name and "/" in name else name


def snapshot_dir_of(record: RunRecord | None, given: Path | None) -> Path | None:
    """SNAPSHOT_DIR: the flag's, else the run's."""
    if given is not None:
        return Path(os.path.abspath(given))
    return Path(record.snapshot_dir) if record and record.snapshot_dir else None
