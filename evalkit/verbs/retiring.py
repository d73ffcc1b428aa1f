"""Giving snapshots back: gather the facts, plan, apply. Used by `gc` and at the end of every attempt."""

from __future__ import annotations

from pathlib import Path

from evalkit.decisions.retention import SnapshotFacts, Verdict, plan
from evalkit.ground.errors import DataError
from evalkit.ground.files import read_struct
from evalkit.ground.layout import AttemptPaths, RunPaths, SnapshotPaths
from evalkit.ground.locks import locked
from evalkit.ground.schema import FleetRecord
from evalkit.state import attempts, points
from evalkit.state.retirement import empty_trash, move_to_trash
from evalkit.state.run import LOCK_TIMEOUT, open_run
from evalkit.state.snapshot import Snapshot, list_snapshots


def retire_settled(
    run: RunPaths, snapshot_dir: Path, keep: int, *, finishing: AttemptPaths | None = None
) -> list[Verdict]:
    """Take away every settled snapshot beyond the newest `keep`; returns what was taken away.

    Args:
        finishing: a settled attempt whose own claim on its snapshot no longer counts.
    """
    snapshots = SnapshotPaths(snapshot_dir)
    if not snapshot_dir.is_dir():
        return []
    with locked(run.ledger_lock, LOCK_TIMEOUT, what="the ledger"):
        verdicts = plan_retirement(run, snapshot_dir, keep, finishing=finishing)
        retired = [verdict for verdict in verdicts if _apply(snapshots, verdict)]
    empty_trash(snapshots)
    return retired


def _apply(snapshots: SnapshotPaths, verdict: Verdict) -> bool:
    snapshot = verdict.snapshot
    if verdict.action != "retire" or snapshot.export_id is None:
        return False
    return move_to_trash(snapshots, snapshots.root / snapshot.name, snapshot.export_id)


def plan_retirement(
    run: RunPaths, snapshot_dir: Path, keep: int, *, finishing: AttemptPaths | None = None
) -> list[Verdict]:
    """What would be taken away and what stays, with the reasons, from what the disk says now."""
    run_id = open_run(run.root, create=False).run_id
    named = _named_by_attempts(run, finishing)
    loaded = _loaded_by_fleets(run)
    facts = [
        _facts(run, run_id, snapshot, snapshot.path in named, str(snapshot.path) in loaded)
        for snapshot in list_snapshots(snapshot_dir)
        if snapshot.step is not None
    ]
    return plan(facts, keep)


def _named_by_attempts(run: RunPaths, finishing: AttemptPaths | None) -> set[Path]:
    """The directories that attempts in flight name. A damaged record still names its step's directory."""
    named = set()
    for paths in attempts.list_attempts(run):
        if paths == finishing:
            continue
        record = attempts.read_record(paths)
        if record is not None:
            named.add(Path(record.snapshot))
        elif (snapshot_dir := open_run(run.root, create=False).snapshot_dir) is not None:
            named.add(SnapshotPaths(Path(snapshot_dir)).snapshot(paths.step))
    return named


def _loaded_by_fleets(run: RunPaths) -> set[str]:
    """The directories that the run's fleets have pinned or booted from."""
    shared = open_run(run.root, create=False).fleet
    files = {*run.fleets.glob("*.json"), *([run.fleet(shared).record] if shared else [])}
    records = [record for record in map(_read_fleet, files) if record and record.state != "down"]
    return {path for record in records for path in (record.model, record.pinned) if path}


def _read_fleet(path: Path) -> FleetRecord | None:
    try:
        return read_struct(path, FleetRecord, "fleet record")
    except (FileNotFoundError, DataError):
        return None


def _facts(run: RunPaths, run_id: str, snapshot: Snapshot, active: bool, loaded: bool) -> SnapshotFacts:
    return SnapshotFacts(
        name=snapshot.path.name,
        step=snapshot.step or 0,
        incarnation=snapshot.incarnation,
        export_id=snapshot.export_id,
        complete=snapshot.complete,
        ours=snapshot.export_id is not None and snapshot.run_id in (run_id, None),
        settled=is_settled(run, snapshot),
        active=active,
        loaded=loaded,
    )


def is_settled(run: RunPaths, snapshot: Snapshot) -> bool:
    """Whether an outcome is of this very snapshot: of its export, or of the same weights."""
    if snapshot.step is None:
        return False
    outcomes = points.outcomes_at(run, snapshot.step)
    return any(
        (snapshot.export_id is not None and outcome.export_id == snapshot.export_id)
        or (snapshot.digest is not None and outcome.digest == snapshot.digest)
        or (snapshot.export_id is None and outcome.snapshot == str(snapshot.path))
        for outcome in outcomes
    )
