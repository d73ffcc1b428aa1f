"""`evalkit gc`: retire settled snapshots, clear what dead exports left, empty the trash."""

from __future__ import annotations

from pathlib import Path

from evalkit.decisions.retention import Verdict
from evalkit.ground.layout import RunPaths, SnapshotPaths
from evalkit.ground.locks import locked
from evalkit.ground.result import Result
from evalkit.state.retirement import empty_trash
from evalkit.state.run import LOCK_TIMEOUT, open_run, snapshot_dir_of
from evalkit.state.staging import sweep_incoming
from evalkit.verbs.retiring import plan_retirement, retire_settled
from evalkit.verbs.settling import mend


def gc(run_dir: Path, snapshot_dir: Path | None, keep: int, *, dry_run: bool) -> Result:
    """Take away what nobody needs; with `dry_run` only say what that would be."""
    record = open_run(run_dir, create=False)
    run, directory = RunPaths(run_dir), snapshot_dir_of(record, snapshot_dir)
    if directory is None:
        mend(run)
        return Result({"snapshots": [], "swept": []}, ["no snapshot directory is known"])
    if dry_run:
        with locked(run.ledger_lock, LOCK_TIMEOUT, what="the ledger"):
            return _report(plan_retirement(run, directory, keep), [])
    mend(run)
    with locked(run.ledger_lock, LOCK_TIMEOUT, what="the ledger"):
        kept = [verdict for verdict in plan_retirement(run, directory, keep) if verdict.action == "keep"]
    retired = retire_settled(run, directory, keep)
    swept = sweep_incoming(directory) + empty_trash(SnapshotPaths(directory))
    return _report([*kept, *retired], swept)


def _report(verdicts: list[Verdict], swept: list[str]) -> Result:
    rows = [{"name": v.snapshot.name, "action": v.action, "why": v.why} for v in verdicts]
    lines = [f"{row['action']:<6} {row['name']}: {row['why']}" for row in rows]
    return Result({"snapshots": rows, "swept": swept}, lines + [f"swept  {name}" for name in swept])
