"""`evalkit status`: points, fleet, disk."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from evalkit.ground.errors import DataError, UnavailableError
from evalkit.ground.files import read_struct
from evalkit.ground.layout import AttemptPaths, ResultPaths, RunPaths
from evalkit.ground.result import Result
from evalkit.ground.schema import MetricsRow, Progress
from evalkit.state import attempts
from evalkit.state.fleet import load_fleet
from evalkit.state.metrics_log import read_rows
from evalkit.state.run import fleet_name, open_run, snapshot_dir_of
from evalkit.state.snapshot import list_snapshots
from evalkit.verbs.settling import mend

SHOWN = 20  # rows of the table without --all


def status(run_dir: Path, *, show_all: bool = False) -> Result:
    """What is known of the run, after mending what is dead."""
    record = open_run(run_dir, create=False)
    run = RunPaths(run_dir)
    unfinished = mend(run).unfinished
    rows, _ = read_rows(run)
    in_flight = [_flight(paths) for paths in attempts.list_attempts(run)]
    data = {
        "run_id": record.run_id,
        "points": [_point(row) for row in sorted(rows, key=lambda row: (row.step, row.attempt))],
        "in_flight": in_flight,
        "fleet": _fleet(run, fleet_name(record, None)),
        "snapshots": _disk(snapshot_dir_of(record, None)),
    }
    return Result(data, _lines(data, None if show_all else SHOWN), notes=unfinished)


def _point(row: MetricsRow) -> dict[str, Any]:
    scores = {name.removeprefix("eval/"): value for name, value in row.metrics.items() if name.count("/") == 1}
    scores = {name: value for name, value in scores.items() if not _is_about_the_point(name)}
    names = ("step", "attempt", "outcome", "reason", "detail")
    return {**{name: getattr(row, name) for name in names}, "metrics": scores}


def _is_about_the_point(name: str) -> bool:
    return "-" in name or name.startswith("skipped_") or name in ("step", "duration_seconds", "export_time_seconds")


def _flight(paths: AttemptPaths) -> dict[str, Any]:
    record, progress = attempts.read_record(paths), _progress(ResultPaths(paths.results))
    age = round(time.time() - record.admitted_at, 1) if record else None
    stage = "running" if progress else "waiting" if attempts.read_worker(paths) else "exporting"
    if paths.outcome.exists():
        stage = "ending"
    done, total = (progress.done, progress.total) if progress else (None, None)
    return {"step": paths.step, "attempt": paths.attempt, "stage": stage, "seconds": age, "done": done, "total": total}


def _progress(results: ResultPaths) -> Progress | None:
    try:
        return read_struct(results.progress, Progress, "progress")
    except (FileNotFoundError, DataError):
        return None


def _fleet(run: RunPaths, name: str) -> dict[str, Any] | None:
    try:
        record = load_fleet(run.fleet(name))
    except (UnavailableError, DataError):
        return None
    return {
        "name": name,
        "state": record.state,
        "epoch": record.epoch,
        "pinned": record.pinned,
        "engines": [engine.url for engine in record.engines],
    }


def _disk(snapshot_dir: Path | None) -> dict[str, Any] | None:
    if snapshot_dir is None or not snapshot_dir.is_dir():
        return None
    usage = shutil.disk_usage(snapshot_dir)
    names = [snapshot.path.name for snapshot in list_snapshots(snapshot_dir)]
    return {"dir": str(snapshot_dir), "names": names, "free_bytes": usage.free, "total_bytes": usage.total}


def _lines(data: dict[str, Any], shown: int | None) -> list[str]:
    points = data["points"] if shown is None else data["points"][-shown:]
    lines = [f"{'step':>10} {'attempt':>7}  {'outcome':<24} result"]
    lines += [_point_line(point) for point in points]
    lines += [_flight_line(flight) for flight in data["in_flight"]]
    if fleet := data["fleet"]:
        where = Path(fleet["pinned"]).name if fleet["pinned"] else "nothing"
        lines.append(f"fleet {fleet['name']}: {fleet['state']}, {len(fleet['engines'])} engines, pinned on {where}")
    if disk := data["snapshots"]:
        free = disk["free_bytes"] / 1e9
        lines.append(f"snapshots in {disk['dir']}: {' '.join(disk['names']) or 'none'} ({free:.1f} GB free)")
    return lines


def _point_line(point: dict[str, Any]) -> str:
    outcome = point["outcome"] + (f" {point['reason']}" if point["reason"] else "")
    scores = " ".join(f"{name}={value:.4g}" for name, value in point["metrics"].items() if value is not None)
    if point["reason"]:
        scores = point["detail"]
    return f"{point['step']:>10} {point['attempt']:>7}  {outcome:<24} {scores}".rstrip()


def _flight_line(flight: dict[str, Any]) -> str:
    done = f" {flight['done']}/{flight['total']}" if flight["total"] is not None else ""
    return f"{flight['step']:>10} {flight['attempt']:>7}  {'in flight':<24} {flight['stage']}{done}"
