"""Making a snapshot appear whole: written aside under its own lock, then renamed into place.

What a crash can leave: a lock file and a directory in `.incoming/`, with no holder of the lock, so that
`sweep_incoming` tells them from exports under way; after that, with `force`, the replaced snapshot in `.trash/`.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from evalkit.ground.errors import BusyError, DataError, NoSnapshotError
from evalkit.ground.files import fsync_dir, write_atomic, write_struct
from evalkit.ground.layout import MANIFEST, MARKER, SnapshotPaths
from evalkit.ground.locks import is_held, locked, open_locked, wait_locked
from evalkit.ground.schema import Manifest
from evalkit.state.snapshot import Snapshot, open_snapshot

PUBLISH_TIMEOUT = 60.0  # seconds; held for a few renames
NEW_TIMEOUT = 1.0  # seconds; a lock that was made just now, whoever clears up may look at

InUse = Callable[[Snapshot], str | None]
"""Who else names this snapshot, in words; None when nobody does."""


class Staging:
    """One export under way: `path` is where its files go; they are published or gone afterwards."""

    def __init__(self, paths: SnapshotPaths, export_id: str) -> None:
        self.paths = paths
        self.export_id = export_id
        self.path = paths.incoming / export_id
        self.published = False

    def publish(self, manifest: Manifest, *, force: bool, in_use: InUse) -> str:
        """Write manifest and marker, and rename to `step_<N>`, unless the same content is there already.

        Returns the export id of the snapshot that is there then.

        Raises:
            DataError: the step is there with others and `force` is false, or it is not evalkit's to replace.
            BusyError: the one that is there is in use.
        """
        write_struct(self.path / MANIFEST, manifest)
        write_atomic(self.path / MARKER, b"")
        target = self.paths.snapshot(manifest.step)
        trashed = None
        with locked(self.paths.publish_lock, PUBLISH_TIMEOUT, what=f"publishing in {self.paths.root}"):
            if os.path.lexists(target):
                same = _export_of_same(target, manifest)
                if same is not None:
                    return same
                trashed = set_aside(self.paths, target, force=force, in_use=in_use)
            os.rename(self.path, target)
            self.published = True
            fsync_dir(self.paths.root)
        if trashed is not None:
            shutil.rmtree(trashed, ignore_errors=True)  # what is left, gc takes
        return self.export_id


@contextmanager
def staging(snapshot_dir: Path, export_id: str) -> Iterator[Staging]:
    """A new directory in `.incoming/`, its export's lock held; unless it is published, nothing of it is left.

    Raises:
        BusyError: that export id is under way elsewhere.
    """
    paths = SnapshotPaths(snapshot_dir.absolute())
    for directory in (paths.incoming, paths.locks, paths.trash):
        directory.mkdir(parents=True, exist_ok=True)
    for name in sweep_incoming(paths.root):
        shutil.rmtree(paths.trash / name, ignore_errors=True)  # this export may need the room
    lock = _lock_new(paths, export_id)
    stage = Staging(paths, export_id)
    try:
        stage.path.mkdir()
        yield stage
    finally:
        if not stage.published:
            with _undisturbed():
                shutil.rmtree(stage.path, ignore_errors=True)
                paths.lock(export_id).unlink(missing_ok=True)
        os.close(lock)


def _lock_new(paths: SnapshotPaths, export_id: str) -> int:
    what = f"export {export_id}, which is under way in {paths.root},"
    return wait_locked(paths.lock(export_id), NEW_TIMEOUT, what=what)


def _export_of_same(target: Path, manifest: Manifest) -> str | None:
    """The export id of `target`, if it is a complete snapshot of evalkit's with the same weights and files."""
    try:
        found = open_snapshot(target)
    except (DataError, NoSnapshotError):
        return None
    return found.export_id if (found.digest, found.hashes) == (manifest.digest, manifest.hashes) else None


def check_replaceable(paths: SnapshotPaths, target: Path, *, force: bool, in_use: InUse) -> str:
    """The export id of the snapshot at `target`, which may make room for another.

    Raises:
        DataError: `force` is false, or evalkit did not make it.
        BusyError: it is in use.
    """
    if not force:
        raise DataError(f"{target} is there already with other content", "give --force to replace it")
    old = open_snapshot(target, need_marker=False)
    if old.export_id is None:
        raise DataError(f"{target} was not made by evalkit", "remove it yourself if it may go")
    user = in_use(old) or ("another process" if is_held(paths.lock(old.export_id)) else None)
    if user:
        raise BusyError(f"{target} is in use by {user}", "wait until it is settled")
    return old.export_id


def set_aside(paths: SnapshotPaths, target: Path, *, force: bool, in_use: InUse) -> Path:
    """Move the snapshot at `target` to `.trash/`, if that is allowed (see `check_replaceable`); where it went."""
    export_id = check_replaceable(paths, target, force=force, in_use=in_use)
    lock = open_locked(paths.lock(export_id))
    if lock is None:
        raise BusyError(f"{target} is in use by another process", "wait until it is settled")
    try:
        trashed = paths.trash / export_id
        os.rename(target, trashed)
        paths.lock(export_id).unlink(missing_ok=True)
    finally:
        os.close(lock)
    return trashed


def sweep_incoming(snapshot_dir: Path) -> list[str]:
    """Move what exports that died have left in `.incoming/` to `.trash/`; their export ids.

    An export has a lock from its first moment: what has none is not evalkit's, and stays.
    """
    paths = SnapshotPaths(snapshot_dir.absolute())
    try:
        names = sorted(os.listdir(paths.incoming))
    except FileNotFoundError:
        return []
    return [name for name in names if paths.lock(name).exists() and _trash_if_dead(paths, name)]


def _trash_if_dead(paths: SnapshotPaths, name: str) -> bool:
    lock = open_locked(paths.lock(name))
    if lock is None:
        return False  # its exporter lives
    try:
        if not (paths.incoming / name).exists():
            return False  # published since, and the lock is the snapshot's
        paths.trash.mkdir(exist_ok=True)
        os.rename(paths.incoming / name, paths.trash / name)
        paths.lock(name).unlink(missing_ok=True)
    finally:
        os.close(lock)
    return True


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Cleaning up is short and must not be cut by a second Ctrl-C; the signal is raised again afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        arrived.append(signum)

    previous = {int(signum): signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        for signum in arrived:
            signal.raise_signal(signum)
