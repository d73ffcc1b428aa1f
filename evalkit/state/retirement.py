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
from evalkit.state.snapshot import list_snapshots


def move_to_trash(snapshots: SnapshotPaths, snapshot: Path, export_id: str) -> bool:
    """Under the ledger lock: rename the snapshot away, unless somebody uses it or it is another export by now."""
    snapshots.locks.mkdir(exist_ok=True)
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


def sweep_locks(snapshots: SnapshotPaths) -> list[str]:
    """Remove locks that nobody holds of exports that are neither there nor under way; returns their export ids.

    One who died between renaming a snapshot away and removing its lock left it, or one who used the snapshot then.
    """
    ids = {path.stem for path in snapshots.locks.glob("*.lock")} - _exports(snapshots)
    return [export_id for export_id in sorted(ids) if _remove_lock(snapshots, export_id)]


def _remove_lock(snapshots: SnapshotPaths, export_id: str) -> bool:
    fd = open_locked(snapshots.lock(export_id))
    if fd is None:
        return False
    try:
        if export_id in _exports(snapshots):
            return False  # it came since
        snapshots.lock(export_id).unlink(missing_ok=True)
    finally:
        os.close(fd)
    return True


def _exports(snapshots: SnapshotPaths) -> set[str]:
    """The exports that are there or under way. Those under way are looked at first: they may appear meanwhile."""
    incoming = set(os.listdir(snapshots.incoming)) if snapshots.incoming.is_dir() else set()
    return incoming | {snapshot.export_id for snapshot in list_snapshots(snapshots.root) if snapshot.export_id}


def read_export_id(snapshot: Path) -> str | None:
    """The export that made the directory; None when evalkit did not make it, or it is not there."""
    try:
        return read_struct(snapshot / MANIFEST, SnapshotId, "manifest").export_id
    except (FileNotFoundError, NotADirectoryError, DataError):
        return None


def empty_trash(snapshots: SnapshotPaths) -> list[str]:
    """Delete what is in the trash of a SNAPSHOT_DIR that a run owns; returns the names. Two at once help each other."""
    if not snapshots.owner.exists() or not snapshots.trash.is_dir():
        return []
    names = sorted(os.listdir(snapshots.trash))
    for name in names:
        shutil.rmtree(snapshots.trash / name, ignore_errors=True)
    return names
