"""Who still needs a snapshot: attempts in flight that name it, and whether it has had its point."""

from __future__ import annotations

import os
from pathlib import Path

from evalkit.ground.errors import DataError
from evalkit.ground.layout import AttemptPaths, RunPaths, SnapshotPaths
from evalkit.ground.schema import Outcome
from evalkit.state import attempts, points
from evalkit.state.snapshot import Snapshot, is_rewritten


def named_by_attempts(run: RunPaths, snapshot_dir: Path, besides: AttemptPaths | None = None) -> dict[str, str]:
    """Real paths of the directories that attempts in flight name, with the attempt's name.

    An attempt whose record is damaged still names its step's directory of `snapshot_dir`.
    """
    named = {}
    for paths in attempts.list_attempts(run):
        if paths != besides:
            record = attempts.read_record(paths)
            path = Path(record.snapshot) if record else SnapshotPaths(snapshot_dir).snapshot(paths.step)
            named[os.path.realpath(path)] = paths.name
    return named


def used_by_attempt(run: RunPaths, snapshot: Snapshot, besides: AttemptPaths | None = None) -> str | None:
    """Which attempt in flight names the snapshot's directory, in words; None when none but `besides` does."""
    name = named_by_attempts(run, snapshot.path.parent, besides).get(os.path.realpath(snapshot.path))
    return f"the attempt in flight {name}" if name else None


def is_settled(run: RunPaths, snapshot: Snapshot) -> bool:
    """Whether an outcome is of this very snapshot: of its export, or of the same weights.

    With a damaged outcome of the step that is not known, and the snapshot counts as one that is still needed.
    """
    if snapshot.step is None:
        return False
    try:
        outcomes = points.outcomes_at(run, snapshot.step)
    except DataError:
        return False
    return any(_is_of(run, outcome, snapshot) for outcome in outcomes)


def _is_of(run: RunPaths, outcome: Outcome, snapshot: Snapshot) -> bool:
    if snapshot.export_id is None:
        # A trainer that starts again may have rewritten its directory under the same name.
        return outcome.snapshot == str(snapshot.path) and not is_rewritten(run, snapshot, outcome.digest)
    return outcome.export_id == snapshot.export_id or outcome.digest == snapshot.digest
