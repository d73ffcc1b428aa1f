"""Taking snapshots away: a rename into the trash under the locks, the deleting outside of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from evalkit.ground.errors import DataError
from evalkit.ground.files import read_struct
from evalkit.ground.layout import MANIFEST, SnapshotPaths
from evalkit.ground.locks import open_locked
from evalkit.ground.schema import SnapshotId


def move_to_trash(snapshots: SnapshotPaths, snapshot: Path, export_id: str) -> bool:
    """Under the ledger lock: rename the snapshot away, unless somebody uses it or it is another export by now."""
    fd = open_locked(snapshots.lock(export_id))
    if fd is None:
        return False
    try:
        if read_export_id(snapshot) != export_id:
            return False
        snapshots.trash.mkdir(exist_ok=True)
        snapshot.rename(snapshots.trash / export_id)
        snapshots.lock(export_id).unlink(missing_ok=True)
    finally:
        os.close(fd)
    return True


def read_export_id(snapshot: Path) -> str | None:
    """The export that made the directory; None when evalkit did not make it, or it is not there."""
    try:
        return read_struct(snapshot / MANIFEST, SnapshotId, "manifest").export_id
    except (FileNotFoundError, NotADirectoryError, DataError):
        return None


def empty_trash(snapshots: SnapshotPaths) -> list[str]:
    """Delete what is in the trash; returns the names. Two at once help each other."""
    if not snapshots.trash.is_dir():
        return []
    names = sorted(os.listdir(snapshots.trash))
    for name in names:
        shutil.rmtree(snapshots.trash / name, ignore_errors=True)
    return names
