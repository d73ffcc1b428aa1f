"""`evalkit gc`: retire settled snapshots, clear what dead exports left, empty the trash."""

from __future__ import annotations

from pathlib import Path

from evalkit.decisions.retention import Verdict
from evalkit.ground.layout import RunPaths, SnapshotPaths
from evalkit.ground.locks import locked
from evalkit.ground.result import Result
from evalkit.state.retirement import empty_trash, sweep_locks
from evalkit.state.run import LOCK_TIMEOUT, open_run, snapshot_dir_of
from evalkit.state.snapshot import is_owned
from evalkit.state.staging import sweep_incoming
from evalkit.verbs.retiring import plan_retirement, retire_settled
from evalkit.verbs.settling import mend


def gc(run_dir: Path, snapshot_dir: Path | None, keep: int, *, dry_run: bool) -> Result:
    """Take away what nobody needs; with `dry_run` only say what that would be."""
    record = open_run(run_dir, create=False)
    run, directory = RunPaths(run_dir), snapshot_dir_of(record, snapshot_dir)
    why_not = _why_not(run, directory)
    if directory is None or why_not:
        if not dry_run:
            mend(run)
        return Result({"snapshots": [], "swept": []}, [why_not])
    if dry_run:
        with locked(run.ledger_lock, LOCK_TIMEOUT, what="the ledger"):
            return _report(plan_retirement(run, directory, keep), [])
    mend(run)
    with locked(run.ledger_lock, LOCK_TIMEOUT, what="the ledger"):
        kept = [verdict for verdict in plan_retirement(run, directory, keep) if verdict.action == "keep"]
    retired = retire_settled(run, directory, keep)
    return _report([*kept, *retired], _sweep(run, directory))


def _why_not(run: RunPaths, directory: Path | None) -> str:
    if directory is None:
        return "no snapshot directory is known"
    return "" if is_owned(run, directory) else f"{directory} is not this run's: nothing is taken away there"


def _sweep(run: RunPaths, directory: Path) -> list[str]:
    snapshots = SnapshotPaths(directory)
    swept = sweep_incoming(directory)
    with locked(run.ledger_lock, LOCK_TIMEOUT, what="the ledger"):
        locks = sweep_locks(snapshots)
    return sorted({*swept, *locks, *empty_trash(snapshots)})


def _report(verdicts: list[Verdict], swept: list[str]) -> Result:
    rows = [{"name": v.snapshot.name, "action": v.action, "why": v.why} for v in verdicts]
    lines = [f"{row['action']:<6} {row['name']}: {row['why']}" for row in rows]
    return Result({"snapshots": rows, "swept": swept}, lines + [f"swept  {name}" for name in swept])
