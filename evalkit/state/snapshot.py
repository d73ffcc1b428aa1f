"""Snapshots on disk: found, read, told apart, used. evalkit's own and those that a trainer writes in place."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from evalkit.ground.errors import DataError, NoSnapshotError, UsageError
from evalkit.ground.files import publish_by_link, read_struct, write_struct, write_temporary
from evalkit.ground.layout import MANIFEST, MARKER, RunPaths, SnapshotPaths, step_of
from evalkit.ground.locks import wait_locked
from evalkit.ground.schema import DigestRecord, SnapshotId, SnapshotOwner
from evalkit.ground.tensors import INDEX_NAME, digest_of, read_headers, shard_names
from evalkit.ground.transfer import Span, transfer
from evalkit.state.run import open_run

USE_TIMEOUT = 10.0  # seconds; whoever clears up holds a snapshot's lock for a moment


class Snapshot(msgspec.Struct, frozen=True):
    """One snapshot.

    Attributes:
        path: absolute.
        step: from the manifest, else from the directory's name.
        export_id: None when evalkit did not make it; then it is never evalkit's to delete.
        digest: the manifest's; None without one (see `known_digest`).
        incarnation: of the trainer; 0 without a manifest.
        complete: whether the marker is there.
        hashes: the manifest's, of the files beside the weights.
    """

    path: Path
    step: int | None
    export_id: str | None = None
    digest: str | None = None
    incarnation: int = 0
    run_id: str | None = None
    complete: bool = True
    hashes: dict[str, str] = {}


def resolve_snapshot(name: str, snapshot_dir: Path | None) -> Path:
    """Where `name` is: with a slash in it a path, else a directory of SNAPSHOT_DIR.

    Raises:
        UsageError: it is a name, and no SNAPSHOT_DIR is known.
    """
    if "/" in name:
        return Path(name).absolute()
    if snapshot_dir is None:
        raise UsageError(
            f"{name} is a name in SNAPSHOT_DIR, which is not known",
            f"give --eval-hf-dir, or a path with a slash (./{name})",
        )
    return snapshot_dir.absolute() / name


def open_snapshot(path: Path, *, need_marker: bool = True) -> Snapshot:
    """What the directory `path` is, from its marker and the head of its manifest.

    Raises:
        NoSnapshotError: it is not there, or has no marker where one is needed.
        DataError: the manifest is damaged, or is that of another step's directory.
    """
    path = path.absolute()
    if not path.is_dir():
        raise NoSnapshotError(f"there is no snapshot {path}")
    complete = (path / MARKER).exists()
    if need_marker and not complete:
        raise NoSnapshotError(
            f"{path} has no {MARKER}: it is not complete", "wait for its writer, or write the marker last"
        )
    named = step_of(path.name)
    try:
        head = read_struct(path / MANIFEST, SnapshotId, "manifest")
    except FileNotFoundError:
        return Snapshot(path, named, complete=complete)
    if path.name.startswith("step_") and named not in (None, head.step):
        raise DataError(f"{path} holds step {head.step} by its {MANIFEST}", "give the directory its own name back")
    return Snapshot(path, head.step, head.export_id, head.digest, head.incarnation, head.run_id, complete, head.hashes)


def list_snapshots(snapshot_dir: Path) -> list[Snapshot]:
    """Every `step_<N>` of SNAPSHOT_DIR by rising step; one with a damaged manifest counts as not complete."""
    found = []
    try:
        entries = [e for e in os.scandir(snapshot_dir) if e.name.startswith("step_") and e.is_dir()]
    except FileNotFoundError:
        return []
    for entry in entries:
        path = Path(entry.path).absolute()
        step = step_of(entry.name)
        if step is None or entry.name != f"step_{step}":
            continue
        try:
            found.append(open_snapshot(path, need_marker=False))
        except DataError:
            found.append(Snapshot(path, step, complete=False))
        except NoSnapshotError:
            continue  # retired since it was listed
    return sorted(found, key=lambda snapshot: snapshot.step or 0)


def use_snapshot(snapshot_dir: Path, export_id: str) -> int:
    """Keep the snapshot of that export from being retired as long as the returned descriptor is open.

    Raises:
        BusyError: it is being made or retired, and was so for `USE_TIMEOUT` seconds.
    """
    paths = SnapshotPaths(snapshot_dir)
    paths.locks.mkdir(parents=True, exist_ok=True)
    what = f"snapshot {export_id} in {snapshot_dir}, which is being made or retired,"
    return wait_locked(paths.lock(export_id), USE_TIMEOUT, shared=True, what=what)


def claim_snapshot_dir(snapshot_dir: Path, run_id: str, run_dir: Path) -> None:
    """Make the run the owner of SNAPSHOT_DIR, which it may be already; the directory is made if missing.

    Raises:
        UsageError: another run owns it.
    """
    paths = SnapshotPaths(snapshot_dir)
    try:
        owner = read_struct(paths.owner, SnapshotOwner, "owner record")
    except FileNotFoundError:
        snapshot_dir.mkdir(parents=True, exist_ok=True)
        record = msgspec.json.encode(SnapshotOwner(run_id=run_id, run_dir=str(run_dir.absolute())))
        temporary = write_temporary(snapshot_dir, record + b"\n")
        try:
            publish_by_link(temporary, paths.owner)
        finally:
            temporary.unlink()
        owner = read_struct(paths.owner, SnapshotOwner, "owner record")
    if owner.run_id != run_id:
        raise UsageError(
            f"{snapshot_dir} belongs to run {owner.run_id} ({owner.run_dir}), not to run {run_id}",
            f"give another --eval-hf-dir, or remove {paths.owner} if that run is over",
        )


def is_owned(run: RunPaths, snapshot_dir: Path) -> bool:
    """Whether SNAPSHOT_DIR is this run's, which alone may take anything away there."""
    try:
        owner = read_struct(SnapshotPaths(snapshot_dir).owner, SnapshotOwner, "owner record")
    except (FileNotFoundError, DataError):
        return False
    return owner.run_id == open_run(run.root, create=False).run_id


def hash_directory(path: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Dtype, shape and blake3 of every tensor of a Hugging Face directory, after checking headers and index.

    Raises:
        DataError: index, headers and files do not agree.
    """
    headers = read_headers(path)
    hashes = transfer([Span(name, path / h.file, h.start, h.end - h.start) for name, h in headers.items()])
    return {name: (h.dtype, h.shape, hashes[name]) for name, h in headers.items()}


def known_digest(run: RunPaths, snapshot: Snapshot) -> str:
    """The snapshot's digest: the manifest's, else computed once and kept in RUN_DIR until a weight file changes.

    Raises:
        DataError: index, headers and files do not agree.
    """
    if snapshot.digest is not None:
        return snapshot.digest
    real = os.path.realpath(snapshot.path)
    kept = _kept_digest(run, real)
    files = _weight_files(Path(real))
    try:
        record = read_struct(kept, DigestRecord, "kept digest")
        if (record.path, record.files) == (real, files):
            return record.digest
    except (FileNotFoundError, DataError):
        pass  # not kept yet, or not readable: either way it is computed
    digest = digest_of(hash_directory(Path(real)))
    if _weight_files(Path(real)) != files:
        raise DataError(f"{snapshot.path} changed while it was read", "evaluate a directory that is not written to")
    run.digests.mkdir(parents=True, exist_ok=True)
    write_struct(kept, DigestRecord(path=real, files=files, digest=digest))
    return digest


def is_rewritten(run: RunPaths, snapshot: Snapshot, digest: str | None) -> bool:
    """Whether a directory without a manifest holds other weight files than when it had this digest.

    Nothing is hashed: the kept digest and the files' sizes and times tell. Without them it counts as the same.
    """
    real = os.path.realpath(snapshot.path)
    try:
        record = read_struct(_kept_digest(run, real), DigestRecord, "kept digest")
    except (FileNotFoundError, DataError):
        return False
    try:
        return digest is not None and (record.digest != digest or record.files != _weight_files(Path(real)))
    except (OSError, DataError):
        return True  # it is being written


def _kept_digest(run: RunPaths, real: str) -> Path:
    import blake3

    return run.digests / f"{blake3.blake3(real.encode()).hexdigest()[:32]}.json"


def _weight_files(path: Path) -> dict[str, tuple[int, int, int]]:
    """Size, modification time in ns, and inode of everything that a digest depends on."""
    names = [*shard_names(path), *([INDEX_NAME] if (path / INDEX_NAME).exists() else [])]
    stats = {name: os.stat(path / name) for name in names}
    return {name: (s.st_size, s.st_mtime_ns, s.st_ino) for name, s in stats.items()}
