"""Ending attempts: what every command does with those whose owner is dead or past its deadline, and what their own
worker does last. Every step can be done again by whoever comes next.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from evalkit.decisions import outcomes
from evalkit.decisions.admission import LiveAttempt
from evalkit.ground.errors import EvalkitError, StorageError
from evalkit.ground.layout import AttemptPaths, RunPaths, SnapshotPaths
from evalkit.ground.locks import locked
from evalkit.ground.processes import kill, this_process
from evalkit.ground.schema import ActiveRecord, Outcome
from evalkit.state import attempts, points
from evalkit.state.metrics_log import append_row
from evalkit.state.retirement import empty_trash, read_export_id
from evalkit.state.run import LOCK_TIMEOUT
from evalkit.state.snapshot import is_owned
from evalkit.state.staging import sweep_incoming
from evalkit.verbs.retiring import retire_settled

GRACE = 5.0  # seconds past its deadline before others settle an attempt
LET_GO = 30.0  # seconds that a settled attempt's owner gets to end by itself


@dataclass(frozen=True)
class Ended:
    """A settled attempt whose last steps are to be done; its lock, where there was one, is held by `lock_fd`."""

    paths: AttemptPaths
    outcome: Outcome
    lock_fd: int | None
    record: ActiveRecord | None


@dataclass
class Look:
    """What one look through `active/` found.

    Attributes:
        live: held, without an outcome: these count as in flight.
        ending: held, with an outcome; their owners have not let go yet.
        ended: finished when the ledger lock is free again.
        settled: outcomes of attempts whose owners have not let go; their rows are written then.
        unfinished: what kept some of them from being finished.
    """

    live: list[LiveAttempt] = field(default_factory=list)
    ending: list[AttemptPaths] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    settled: list[Outcome] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)


@contextmanager
def ledger(run: RunPaths, timeout: float = LOCK_TIMEOUT, *, delete: bool = False) -> Iterator[Look]:
    """Hold the ledger lock and look; attempts that are found dead are finished once the lock is free again.

    Args:
        delete: see `finish`.

    Raises:
        BusyError: the ledger was not free in time.
    """
    look = Look()
    try:
        with locked(run.ledger_lock, timeout, what="the ledger"):
            attempts.sweep_preparations(run)
            for paths in attempts.list_attempts(run):
                _inspect_or_leave(paths, look)
            yield look
    finally:
        problems = [try_finish(ended, delete=delete) for ended in look.ended]
        problems += [_try_row(run, outcome) for outcome in look.settled]
        look.unfinished += [problem for problem in problems if problem]


def try_finish(ended: Ended, *, delete: bool = False) -> str | None:
    """Finish, or leave it for the next command: the outcome is safe, and a trainer must not fail of this.

    Returns what kept it from being finished.
    """
    try:
        finish(ended, delete=delete)
    except (OSError, EvalkitError) as error:
        return f"{ended.paths.name} is settled, but not finished: {error}"
    return None


def _try_row(run: RunPaths, outcome: Outcome) -> str | None:
    try:
        append_row(run, outcome)
    except (OSError, EvalkitError) as error:
        return f"{outcome.step}.{outcome.attempt} has no row yet: {error}"
    return None


def mend(run: RunPaths, timeout: float = LOCK_TIMEOUT) -> Look:
    """Settle and finish whatever is dead or past its deadline.

    Raises:
        BusyError: the ledger was not free in time.
    """
    with ledger(run, timeout, delete=True) as look:
        pass
    return look


def _inspect_or_leave(paths: AttemptPaths, look: Look) -> None:
    """Inspect; one attempt that cannot be read or settled now must not keep others from being admitted."""
    try:
        _inspect(paths, look)
    except (OSError, EvalkitError) as error:
        look.unfinished.append(f"{paths.name} is left as it is: {error}")


def _inspect(paths: AttemptPaths, look: Look) -> None:
    record = attempts.read_record(paths)
    if not paths.lock.exists():
        _inspect_debris(paths, record, look)
        return
    fd = attempts.claim(paths.lock)
    if fd is None:
        _inspect_held(paths, record, look)
        return
    try:
        look.ended.append(Ended(paths, _settle_dead(paths, record), fd, record))
    except BaseException:
        os.close(fd)
        raise


def _inspect_debris(paths: AttemptPaths, record: ActiveRecord | None, look: Look) -> None:
    outcome = points.read_outcome(paths.outcome)
    if outcome is None:
        attempts.remove(paths)
    else:
        look.ended.append(Ended(paths, outcome, None, record))


def _inspect_held(paths: AttemptPaths, record: ActiveRecord | None, look: Look) -> None:
    now = time.time()
    outcome = points.read_outcome(paths.outcome)
    if outcome is None and (record is None or now <= record.deadline + GRACE):
        incarnation = record.incarnation if record else None
        look.live.append(LiveAttempt(paths.step, paths.attempt, incarnation, record.source_digest if record else None))
        return
    look.ending.append(paths)
    if outcome is None and record is not None:
        detail = f"not settled {now - record.admitted_at:.0f} s after its admission"
        settle_for_owner(look, paths, "timeout", detail)
        end_owner(paths)
    elif outcome is not None:
        if now > outcome.settled_at + GRACE:
            look.settled.append(outcome)
        if now > outcome.settled_at + LET_GO:
            end_owner(paths)


def _settle_dead(paths: AttemptPaths, record: ActiveRecord | None) -> Outcome:
    outcome = points.read_outcome(paths.outcome)
    if outcome is None:
        if record is None:
            points.settle(paths, outcomes.unreadable(paths.step, paths.attempt, "crashed", time.time()))
        else:
            settle_skip(paths, record, "crashed", _last_words(paths))
        outcome = points.read_outcome(paths.outcome)
    if outcome is None:
        raise no_outcome(paths)
    return outcome


def no_outcome(paths: AttemptPaths) -> StorageError:
    """The error to raise when not even the reserve could be linked."""
    return StorageError(f"the outcome of {paths.name} could not be written to {paths.outcome}", "free some space")


def _last_words(paths: AttemptPaths) -> str:
    if attempts.read_worker(paths) is None:
        return "the dispatching command died before a worker had the attempt"
    return f"its worker died; see {paths.results / 'log'}"


def settle_skip(
    paths: AttemptPaths, record: ActiveRecord, reason: str, detail: str, *, digest: str | None = None
) -> bool:
    """Publish a skip for the attempt; whether it won against another outcome."""
    outcome = outcomes.skipped(
        record,
        reason,
        detail,
        time.time(),
        by=this_process(),
        digest=digest,
        export_id=read_export_id(Path(record.snapshot)),
    )
    return points.settle(paths, outcome)


def settle_for_owner(look: Look, paths: AttemptPaths, reason: str, detail: str) -> None:
    """Under the ledger lock: publish a skip for an attempt that another process still holds."""
    record = attempts.read_record(paths)
    if record is None:
        points.settle(paths, outcomes.unreadable(paths.step, paths.attempt, reason, time.time()))
    else:
        settle_skip(paths, record, reason, detail)
    outcome = points.read_outcome(paths.outcome)
    if outcome is not None:
        look.settled.append(outcome)


def end_owner(paths: AttemptPaths, signum: int = signal.SIGKILL) -> bool:
    """Signal the worker that still holds a settled attempt, if it is certain which process that is.

    Before hand-over the owner is the trainer's own command, or the trainer itself: it is never signalled, and finds
    the outcome when its export is done.
    """
    worker = attempts.read_worker(paths)
    return worker is not None and worker.pid != os.getpid() and kill(worker, signum)


def finish(ended: Ended, *, delete: bool = False) -> None:
    """After the outcome: the row, the snapshot given back, and the attempt no longer in flight.

    Args:
        delete: delete what was given back too, which takes as long as snapshots are large: not for a trainer.
    """
    run = ended.paths.run
    try:
        append_row(run, ended.outcome)
        points.sweep_temporaries(ended.paths)
        if ended.record is not None and ended.record.snapshot_dir is not None:
            _give_back(run, Path(ended.record.snapshot_dir), ended.record.keep, ended.paths, delete=delete)
        attempts.remove(ended.paths)
    finally:
        if ended.lock_fd is not None:
            os.close(ended.lock_fd)


def _give_back(run: RunPaths, snapshot_dir: Path, keep: int, finishing: AttemptPaths, *, delete: bool) -> None:
    if not is_owned(run, snapshot_dir):
        return
    sweep_incoming(snapshot_dir)
    retire_settled(run, snapshot_dir, keep, finishing=finishing)
    if delete:
        empty_trash(SnapshotPaths(snapshot_dir))
