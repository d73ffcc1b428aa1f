"""From tensors to a published snapshot: what every kind of export has in common."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from evalkit import __version__
from evalkit.adapters.sidecars import Sidecars
from evalkit.decisions.shards import Written, byte_size
from evalkit.ground.errors import FULL, ExportError, StorageError
from evalkit.ground.files import write_atomic
from evalkit.ground.ids import new_id
from evalkit.ground.layout import SnapshotPaths
from evalkit.ground.schema import Manifest
from evalkit.ground.tensors import INDEX_NAME, digest_of, encode_index, read_headers
from evalkit.state.snapshot import Snapshot, claim_snapshot_dir, hash_directory, open_snapshot
from evalkit.state.staging import InUse, check_replaceable, staging


def nobody(snapshot: Snapshot) -> str | None:
    """For callers that know of no users but the holders of the snapshot's lock."""
    return None


class Destination(msgspec.Struct, frozen=True, kw_only=True):
    """Which snapshot an export makes.

    Attributes:
        force: replace a snapshot of other content, unless it is in use or not evalkit's.
        run_id: of the run that must own SNAPSHOT_DIR; its directory is `run_dir`.
        export_id: None for a new one.
        in_use: tells of users that hold no lock.
    """

    step: int
    snapshot_dir: Path
    force: bool = False
    run_id: str | None = None
    run_dir: Path | None = None
    incarnation: int = 0
    export_id: str | None = None
    in_use: InUse = nobody

    @property
    def path(self) -> Path:
        return SnapshotPaths(self.snapshot_dir.absolute()).snapshot(self.step)


class ExportResult(msgspec.Struct, frozen=True):
    """A snapshot that is there now.

    Attributes:
        export_id: None when the directory was there already and evalkit did not make it.
        total_bytes: of the weights.
        seconds: how long the export took.
        unchanged: the same content was there already; nothing was written.
        missing: what a chat evaluation may need and the source has not.
        unchecked: why the tensors were not compared with the architecture; empty when they were.
    """

    path: Path
    export_id: str | None
    digest: str
    total_bytes: int
    seconds: float
    unchanged: bool = False
    missing: list[str] = []
    unchecked: str = ""


def claim(to: Destination) -> None:
    """Raises UsageError when SNAPSHOT_DIR belongs to another run."""
    if to.run_id is not None and to.run_dir is not None:
        claim_snapshot_dir(to.snapshot_dir, to.run_id, to.run_dir)


class Existing(NamedTuple):
    """A snapshot of the very content that was to be exported."""

    path: Path
    export_id: str | None
    digest: str


def find_unchanged(to: Destination, sidecars: Sidecars, digest: Callable[[], str]) -> Existing | None:
    """The step's snapshot, when it is complete and of the same content; None when it is to be made.

    Of a directory that evalkit did not make only the weights are compared: its other files are its writer's.

    Args:
        digest: of the source's weights; called only when there is something to compare with.

    Raises:
        DataError: it is there with other content and may not be replaced.
        BusyError: it would be replaced but is in use.
    """
    if not os.path.lexists(to.path):
        return None
    snapshot = open_snapshot(to.path, need_marker=False)
    if snapshot.complete and (snapshot.export_id is None or snapshot.hashes == sidecars.hashes()):
        there = snapshot.digest or digest_of(hash_directory(snapshot.path))
        if digest() == there:
            return Existing(snapshot.path, snapshot.export_id, there)
    check_replaceable(SnapshotPaths(to.snapshot_dir.absolute()), to.path, force=to.force, in_use=to.in_use)
    return None


def make_snapshot(
    to: Destination, sidecars: Sidecars, origin: dict[str, Any], write: Callable[[Path], Written]
) -> ExportResult:
    """Stage, write, publish; the snapshot, or the one of the same content that somebody else published meanwhile.

    Args:
        origin: what the manifest says about the source.
        write: puts the weight files into a directory.
    """
    began = time.monotonic()
    export_id = to.export_id or new_id()
    with staging(to.snapshot_dir, export_id) as stage:
        written = write(stage.path)
        total = sum(byte_size(dtype, shape) for dtype, shape, _ in written.tensors.values())
        if len(set(written.files.values())) > 1:
            write_atomic(stage.path / INDEX_NAME, encode_index(written.files, total))
        _check_written(stage.path, written)
        hashes = sidecars.write(stage.path)
        manifest = Manifest(
            export_id=export_id,
            step=to.step,
            run_id=to.run_id,
            incarnation=to.incarnation,
            source=origin,
            created_at=time.time(),
            evalkit=__version__,
            digest=digest_of(written.tensors),
            total_bytes=total,
            files=_sizes(stage.path),
            hashes=hashes,
            tensors=written.tensors,
            missing=sidecars.missing,
        )
        there = stage.publish(manifest, force=to.force, in_use=to.in_use)
    seconds = time.monotonic() - began
    return ExportResult(to.path, there, manifest.digest, total, seconds, there != export_id, sidecars.missing)


def _check_written(directory: Path, written: Written) -> None:
    """Read the files as an engine will: whatever went wrong in writing them must not be published."""
    found = {name: (header.dtype, header.shape) for name, header in read_headers(directory).items()}
    if found != {name: (dtype, shape) for name, (dtype, shape, _) in written.tensors.items()}:
        raise ExportError(f"the files in {directory} do not hold what was written", "export again")


def _sizes(directory: Path) -> dict[str, int]:
    return {
        str(path.relative_to(directory)): path.stat().st_size for path in sorted(directory.rglob("*")) if path.is_file()
    }


@contextmanager
def storage_errors(directory: Path) -> Iterator[None]:
    """What the system says about files, as a `StorageError` with the right skip reason."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else f" ({directory})"
        text = f"{error.strerror or error}{where}"
        if error.errno in FULL:
            raise StorageError(text, "free some space, or keep fewer snapshots", "no_space") from error
        raise StorageError(text, reason="export_failed") from error
