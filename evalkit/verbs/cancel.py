"""`evalkit cancel STEP`: end a step's attempts in flight."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from evalkit.ground.errors import BusyError
from evalkit.ground.layout import AttemptPaths, RunPaths
from evalkit.ground.result import Result
from evalkit.state import attempts
from evalkit.state.run import open_run
from evalkit.verbs.settling import LET_GO, end_owner, ledger, mend, settle_for_owner


def cancel(run_dir: Path, step: int) -> Result:
    """Settle the step's attempts in flight as `cancelled`, end their workers, and wait until these are gone.

    An attempt that is still being exported belongs to the trainer's own command, which is left alone: it stops when
    the export is done.

    Raises:
        BusyError: a worker has not let go in time; the attempt is settled all the same.
    """
    open_run(run_dir, create=False)
    run = RunPaths(run_dir)
    with ledger(run) as look:
        cancelled = [run.attempt(live.step, live.attempt) for live in look.live if live.step == step]
        for paths in cancelled:
            settle_for_owner(look, paths, "cancelled", "by evalkit cancel")
        signalled = [paths for paths in cancelled if end_owner(paths, signal.SIGTERM)]
    _wait_for_workers(signalled)
    mend(run)
    names = [paths.name for paths in cancelled]
    lines = [f"step_{paths.step} attempt {paths.attempt} cancelled" for paths in cancelled]
    return Result({"step": step, "cancelled": names}, lines or [f"nothing in flight at step {step}"])


def _wait_for_workers(cancelled: list[AttemptPaths]) -> None:
    deadline = time.monotonic() + LET_GO
    for paths in cancelled:
        while attempts.is_held(paths):
            if time.monotonic() >= deadline:
                raise BusyError(f"{paths.name} is cancelled, but its worker still runs", "see evalkit status")
            time.sleep(0.05)
