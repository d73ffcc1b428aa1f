"""Which step a dispatch is about, and where its weights come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evalkit.ground.errors import EvalkitError, UsageError
from evalkit.ground.layout import RunPaths, SnapshotPaths, step_of
from evalkit.state import attempts
from evalkit.state.snapshot import Snapshot, list_snapshots, open_snapshot
from evalkit.verbs.snapshot_users import is_settled


@dataclass(frozen=True)
class Due:
    """A step to evaluate.

    Attributes:
        snapshot: the directory that the engines will load.
        source: what to export to `snapshot` first; None when it is there.
        snapshot_dir: where evalkit may retire snapshots of this point; None for a caller's directory.
        trouble: why the snapshot cannot be used, as the error to record; None when nothing is known against it.
    """

    step: int
    snapshot: Path
    source: Path | None = None
    snapshot_dir: Path | None = None
    trouble: EvalkitError | None = None


def find_due(
    run: RunPaths, snapshot_dir: Path | None, step: int | None, source: Path | None, baseline: Path | None, every: int
) -> Due | None:
    """What to dispatch; None when nothing was named and no complete snapshot is without a point.

    Args:
        every: where nothing was named, only multiples of it are points.

    Raises:
        UsageError: no SNAPSHOT_DIR where one is needed, or a source whose step cannot be told.
    """
    if baseline is not None:
        return _checked(Due(0 if step is None else step, baseline.absolute()), need_marker=False)
    if snapshot_dir is None:
        raise UsageError("no snapshot directory is known", "give --eval-hf-dir or set EVALKIT_EVAL_HF_DIR")
    if source is not None:
        return _from_source(snapshot_dir, step, source.absolute())
    if step is not None:
        return _checked(Due(step, SnapshotPaths(snapshot_dir).snapshot(step), snapshot_dir=snapshot_dir))
    return _newest_without_point(run, snapshot_dir, every)


def _checked(due: Due, *, need_marker: bool = True) -> Due:
    try:
        open_snapshot(due.snapshot, need_marker=need_marker)
    except EvalkitError as error:
        return Due(due.step, due.snapshot, snapshot_dir=due.snapshot_dir, trouble=error)
    return due


def _from_source(snapshot_dir: Path, step: int | None, source: Path) -> Due:
    if step is None:
        step = step_of(source.name)
    if step is None:
        raise UsageError(f"the step of {source} cannot be told from its name", "give --step")
    snapshot = SnapshotPaths(snapshot_dir).snapshot(step)
    if source == snapshot:
        return _checked(Due(step, snapshot, snapshot_dir=snapshot_dir))
    return Due(step, snapshot, source=source, snapshot_dir=snapshot_dir)


def _newest_without_point(run: RunPaths, snapshot_dir: Path, every: int) -> Due | None:
    named = {paths.step for paths in attempts.list_attempts(run)}
    due = [s for s in list_snapshots(snapshot_dir) if s.complete and s.step is not None and s.step % every == 0]
    waiting = [s for s in due if s.step not in named and not is_settled(run, s)]
    if not waiting:
        return None
    newest = max(waiting, key=_rank)
    return Due(newest.step or 0, newest.path, snapshot_dir=snapshot_dir)


def _rank(snapshot: Snapshot) -> tuple[int, int]:
    return snapshot.incarnation, snapshot.step or 0
