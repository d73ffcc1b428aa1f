"""Giving snapshots back: gather the facts, plan, apply. Used by `gc` and at the end of every attempt."""

from __future__ import annotations

import os
from pathlib import Path

from evalkit.decisions.retention import SnapshotFacts, Verdict, plan
from evalkit.ground.errors import DataError, UsageError
from evalkit.ground.files import read_struct
from evalkit.ground.layout import AttemptPaths, RunPaths, SnapshotPaths
from evalkit.ground.locks import locked
from evalkit.ground.schema import FleetRecord
from evalkit.state import attempts
from evalkit.state.retirement import move_to_trash
from evalkit.state.run import LOCK_TIMEOUT, open_run
from evalkit.state.snapshot import Snapshot, is_owned, list_snapshots
from evalkit.verbs.snapshot_users import is_settled, named_by_attempts


def retire_settled(
    run: RunPaths, snapshot_dir: Path, keep: int, *, finishing: AttemptPaths | None = None
) -> list[Verdict]:
    """Move every settled snapshot beyond the newest `keep` to the trash; returns which. Deleting is left to others.

    Args:
        finishing: a settled attempt whose own claim on its snapshot no longer counts.
    """
    if not is_owned(run, snapshot_dir):
        return []
    with locked(run.ledger_lock, LOCK_TIMEOUT, what="the ledger"):
        verdicts = plan_retirement(run, snapshot_dir, keep, finishing=finishing)
        return [verdict for verdict in verdicts if _apply(SnapshotPaths(snapshot_dir), verdict)]


def _apply(snapshots: SnapshotPaths, verdict: Verdict) -> bool:
    snapshot = verdict.snapshot
    if verdict.action != "retire" or snapshot.export_id is None:
        return False
    return move_to_trash(snapshots, snapshots.root / snapshot.name, snapshot.export_id)


def plan_retirement(
    run: RunPaths, snapshot_dir: Path, keep: int, *, finishing: AttemptPaths | None = None
) -> list[Verdict]:
    """What would be taken away and what stays, with the reasons, from what the disk says now."""
    run_id = open_run(run.root, create=False).run_id if is_owned(run, snapshot_dir) else None
    named = named_by_attempts(run, snapshot_dir, finishing)
    loaded = _loaded_by_fleets(run)
    facts = []
    for snapshot in list_snapshots(snapshot_dir):
        real = os.path.realpath(snapshot.path)
        facts.append(_facts(run, run_id, snapshot, real in named, loaded if loaded is None else real in loaded))
    return plan(facts, keep)


def _loaded_by_fleets(run: RunPaths) -> set[str] | None:
    """Real paths of the directories that fleets have pinned or booted from; None when a fleet's record is damaged."""
    try:
        records = [_read_fleet(path) for path in _fleet_records(run)]
    except DataError:
        return None
    running = [record for record in records if record and record.state != "down"]
    return {os.path.realpath(path) for record in running for path in (record.model, record.pinned) if path}


def _fleet_records(run: RunPaths) -> set[Path]:
    """Of the run's own fleets, and of those elsewhere that the run or one of its attempts in flight uses."""
    named = {open_run(run.root, create=False).fleet}
    named |= {record.fleet for record in map(attempts.read_record, attempts.list_attempts(run)) if record}
    return {*run.fleets.glob("*.json"), *(path for name in named if name and (path := _record_of(run, name)))}


def _record_of(run: RunPaths, fleet: str) -> Path | None:
    try:
        return run.fleet(fleet).record
    except UsageError:
        return None  # no name that a fleet can have


def _read_fleet(path: Path) -> FleetRecord | None:
    try:
        return read_struct(path, FleetRecord, "fleet record")
    except FileNotFoundError:
        return None


def _facts(run: RunPaths, run_id: str | None, snapshot: Snapshot, active: bool, loaded: bool | None) -> SnapshotFacts:
    return SnapshotFacts(
        name=snapshot.path.name,
        step=snapshot.step or 0,
        incarnation=snapshot.incarnation,
        export_id=snapshot.export_id,
        complete=snapshot.complete,
        ours=run_id is not None and snapshot.export_id is not None and snapshot.run_id in (run_id, None),
        settled=is_settled(run, snapshot),
        active=active,
        loaded=loaded,
    )
