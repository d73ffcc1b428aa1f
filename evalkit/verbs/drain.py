"""`evalkit drain`: wait, with a deadline, until what was in flight when it began is settled."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from evalkit.ground.errors import DataError
from evalkit.ground.files import read_struct, write_struct
from evalkit.ground.layout import AttemptPaths, RunPaths
from evalkit.ground.result import Result
from evalkit.ground.schema import Drained, MetricsRow
from evalkit.state import attempts, points
from evalkit.state.metrics_log import read_rows
from evalkit.state.run import open_run
from evalkit.verbs.settling import mend

POLL = 0.2  # seconds between looks
MEND = 1.0  # seconds that a look at the ledger may take at least, whatever the deadline
ENDING = 10.0  # seconds that a settled attempt's owner is waited for


def drain(
    run_dir: Path, timeout: float, *, fail_on_skip: bool = False, say: Callable[[str], object] = lambda text: None
) -> Result:
    """Wait until every attempt that is in flight now has ended; exit code 75 when the time is up first.

    Args:
        say: told what is still in flight.
        fail_on_skip: exit with 1 when one of them, or any since the last drain, was skipped.
    """
    open_run(run_dir, create=False)
    run = RunPaths(run_dir)
    deadline = time.monotonic() + timeout
    begun_with = {paths.name for paths in attempts.list_attempts(run)}
    left = _still_there(run, begun_with, deadline)
    while left and time.monotonic() < deadline:
        say(f"{len(left)} in flight: {', '.join(left)}")
        time.sleep(POLL)
        left = _still_there(run, begun_with, deadline)
    return _report(run, left, fail_on_skip=fail_on_skip)


def _still_there(run: RunPaths, names: set[str], deadline: float) -> list[str]:
    """Which of `names` are not settled, or have an owner that has not let go yet but may still do so."""
    mend(run, max(deadline - time.monotonic(), MEND))
    return sorted(paths.name for paths in attempts.list_attempts(run) if paths.name in names and not _is_over(paths))


def _is_over(paths: AttemptPaths) -> bool:
    outcome = points.read_outcome(paths.outcome)
    return outcome is not None and time.time() > outcome.settled_at + ENDING


def _report(run: RunPaths, left: list[str], *, fail_on_skip: bool) -> Result:
    rows, offset = read_rows(run, _last_offset(run))
    write_struct(run.drained, Drained(offset=offset))
    lines = [line_of(row) for row in rows] + [f"{name} still in flight" for name in left]
    data = {
        "outcomes": [_shown(row) for row in rows],
        "in_flight": left,
    }
    skipped = fail_on_skip and any(row.outcome == "skipped" for row in rows)
    return Result(data, lines, code=75 if left else 1 if skipped else 0)


def _shown(row: MetricsRow) -> dict[str, object]:
    return {
        "step": row.step,
        "attempt": row.attempt,
        "outcome": row.outcome,
        "reason": row.reason,
        "detail": row.detail,
    }


def line_of(row: MetricsRow) -> str:
    """A settled attempt in one line."""
    why = f" {row.reason}: {row.detail}" if row.reason else ""
    return f"step_{row.step} attempt {row.attempt} {row.outcome}{why}"


def _last_offset(run: RunPaths) -> int:
    try:
        return read_struct(run.drained, Drained, "drain record").offset
    except (FileNotFoundError, DataError):
        return 0
