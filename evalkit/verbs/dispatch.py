"""`evalkit dispatch`: export, admit, hand to a detached worker, return."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from evalkit.adapters.workers import hand_over
from evalkit.decisions import reasons
from evalkit.ground.errors import BusyError, EvalkitError, UsageError
from evalkit.ground.layout import AttemptPaths, ResultPaths, RunPaths
from evalkit.ground.result import Result
from evalkit.ground.schema import ActiveRecord, Outcome
from evalkit.state import attempts, points
from evalkit.state.run import find_run, fleet_name, remember, snapshot_dir_of
from evalkit.state.snapshot import claim_snapshot_dir
from evalkit.verbs.admitting import Admission, Bid, admit
from evalkit.verbs.due import Due, find_due
from evalkit.verbs.exporting import digest_of_due, export_due
from evalkit.verbs.settling import Ended, no_outcome, settle_skip, try_finish

REPLACED_LETS_GO = 20.0  # seconds that a superseded worker gets to stop using its snapshot

Say = Callable[[str], object]
Details = dict[str, Any]  # what an export found out: digest, export_seconds


@dataclass(frozen=True, kw_only=True)
class DispatchRequest:
    """What one call of dispatch asks for; see `evalkit dispatch --help`.

    Attributes:
        wait: seconds that backpressure waits for room.
        timeout: seconds from admission after which anybody may settle the attempt as `timeout`.
        export: options of the export, as `evalkit.verbs.export.ExportRequest` names them.
        settings: for the worker: concurrency, load_timeout.
    """

    run_dir: Path
    step: int | None = None
    source: Path | None = None
    baseline: Path | None = None
    snapshot_dir: Path | None = None
    suite: Path | None = None
    fleet: str | None = None
    incarnation: str | None = None
    every: int = 1
    max_in_flight: int = 2
    policy: Literal["backpressure", "skip"] = "backpressure"
    keep: int = 2
    final: bool = False
    fail_on_skip: bool = False
    wait: float = 3600.0
    timeout: float = 4 * 3600.0
    export: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def dispatch(request: DispatchRequest, say: Say = lambda text: None) -> Result:
    """Bring a step into flight, or record why not.

    Args:
        say: told what is waited for.

    Raises:
        UsageError: settings that contradict each other or are missing.
    """
    _validate(request)
    if request.step is not None and _is_no_point(request, request.step):
        return _not_due(request, request.step)
    bid = _bid(request, say)
    if bid is None:
        return _answer(request, "nothing", detail="no complete snapshot is without a point")
    if _is_no_point(request, bid.due.step):
        return _not_due(request, bid.due.step)
    admission = admit(bid)
    if admission.prepared is not None:
        return _carry_out(request, bid, admission.prepared, admission.replaced)
    return _report(request, bid.due, admission)


def _validate(request: DispatchRequest) -> None:
    if request.keep < request.max_in_flight:
        raise UsageError(
            f"--keep {request.keep} is less than --max-in-flight {request.max_in_flight}",
            "keep at least as many snapshots as may be in flight",
        )
    if request.baseline is not None and request.source is not None:
        raise UsageError("--baseline and --from exclude each other", "a baseline is evaluated where it is")


def _is_no_point(request: DispatchRequest, step: int) -> bool:
    return bool(step % request.every) and not request.final


def _not_due(request: DispatchRequest, step: int) -> Result:
    return _answer(request, "not_due", step, detail=f"{step} is no multiple of {request.every}")


def _bid(request: DispatchRequest, say: Say) -> Bid | None:
    """The request with everything that the run's record and the disk add to it; None when nothing is due."""
    run, record = RunPaths(request.run_dir), find_run(request.run_dir)
    suite = os.path.abspath(request.suite) if request.suite else record.suite if record else None
    if suite is None:
        raise UsageError("no suite is known", "give --suite or set EVALKIT_SUITE")
    fleet = fleet_name(record, request.fleet)
    run.fleet(fleet)
    snapshot_dir, every = snapshot_dir_of(record, request.snapshot_dir), 1 if request.final else request.every
    due = find_due(run, snapshot_dir, request.step, request.source, request.baseline, every)
    if due is None:
        return None
    if record is None or record.suite != suite:
        _check_new_suite(Path(suite))
    record = remember(request.run_dir, snapshot_dir=request.snapshot_dir, suite=request.suite, fleet=request.fleet)
    if due.source is not None and due.snapshot_dir is not None:
        claim_snapshot_dir(due.snapshot_dir, record.run_id, request.run_dir)
    return Bid(
        run=run,
        due=due,
        digest=_digest_if_seen(run, due, request),
        life=request.incarnation,
        policy=request.policy,
        max_in_flight=request.max_in_flight,
        must=request.final,
        wait=request.wait,
        timeout=request.timeout,
        keep=request.keep,
        suite=suite,
        fleet=fleet,
        settings=request.settings,
        say=say,
    )


def _check_new_suite(suite: Path) -> None:
    """Look through a suite that the run has not recorded, so that its mistakes are told at once, not by a worker."""
    from evalkit.adapters.suite import load_suite
    from evalkit.verbs.evaluate import check_suite

    check_suite(load_suite(suite))


def _digest_if_seen(run: RunPaths, due: Due, request: DispatchRequest) -> str | None:
    """The source's digest where the step has been seen before: only then somebody asks whether it is the same."""
    seen = points.attempts_at(run, due.step) or any(p.step == due.step for p in attempts.list_attempts(run))
    return digest_of_due(run, due, request.export) if seen and due.trouble is None else None


def _carry_out(
    request: DispatchRequest, bid: Bid, prepared: attempts.Prepared, replaced: Sequence[AttemptPaths]
) -> Result:
    """Export and hand over, with the attempt's lock held; whatever fails becomes the attempt's outcome."""
    record = prepared.record
    paths = bid.run.attempt(record.step, record.attempt)
    try:
        details = _export(request, bid, record, replaced)
        if not paths.outcome.exists() and _hand_over(paths, prepared, details):
            return _answer(request, "dispatched", record.step, record.attempt, snapshot=record.snapshot)
    except (KeyboardInterrupt, SystemExit):
        settle_skip(paths, record, "cancelled", "the dispatching command was interrupted")
        _finish_own(paths, prepared)
        raise
    return _outcome_answer(request, _finish_own(paths, prepared))


def _export(request: DispatchRequest, bid: Bid, record: ActiveRecord, replaced: Sequence[AttemptPaths]) -> Details:
    """Make the attempt's snapshot, or settle the attempt; what the worker should know of it."""
    paths = bid.run.attempt(record.step, record.attempt)
    try:
        _wait_for_release(replaced)
        return export_due(bid.run, bid.due, request.export, record) if bid.due.source else {}
    except (EvalkitError, OSError) as error:
        settle_skip(paths, record, reasons.of_export(error), str(error))
    except Exception as error:  # noqa: BLE001  (a bug: the trainer goes on, and the traceback stands with the results)
        log = ResultPaths(paths.results).log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(traceback.format_exc())
        settle_skip(paths, record, "export_failed", f"{type(error).__name__}: {error}; see {log}")
    return {}


def _hand_over(paths: AttemptPaths, prepared: attempts.Prepared, details: Details) -> bool:
    """Give the attempt to a worker, or settle it; whether the worker has it."""
    try:
        if hand_over(paths, prepared.lock_fd, details):
            os.close(prepared.lock_fd)
            return True
        settle_skip(paths, prepared.record, "crashed", f"its worker did not start; see {paths.results / 'log'}")
    except OSError as error:
        reason = reasons.of_storage(error, "crashed")
        settle_skip(paths, prepared.record, reason, f"its worker could not be started: {error}")
    return False


def _finish_own(paths: AttemptPaths, prepared: attempts.Prepared) -> Outcome:
    outcome = points.read_outcome(paths.outcome)
    if outcome is None:
        raise no_outcome(paths)
    # Otherwise deleting is left to workers and gc; but where there was no room, the next export needs it.
    try_finish(Ended(paths, outcome, prepared.lock_fd, prepared.record), delete=outcome.reason == "no_space")
    return outcome


def _wait_for_release(replaced: Sequence[AttemptPaths]) -> None:
    """Wait until the owners of superseded attempts have let go of them, and with them of their snapshot.

    Raises:
        BusyError: they have not in time.
    """
    deadline = time.monotonic() + REPLACED_LETS_GO
    for paths in replaced:
        while attempts.is_held(paths):
            if time.monotonic() >= deadline:
                raise BusyError(f"the superseded attempt {paths.name} still uses its snapshot")
            time.sleep(0.05)


def _report(request: DispatchRequest, due: Due, admission: Admission) -> Result:
    if admission.outcome is not None:
        return _outcome_answer(request, admission.outcome)
    return _answer(request, admission.action, due.step, admission.attempt)


def _outcome_answer(request: DispatchRequest, outcome: Outcome) -> Result:
    state = "skipped" if outcome.outcome == "skipped" else "landed"
    return _answer(request, state, outcome.step, outcome.attempt, reason=outcome.reason, detail=outcome.detail)


def _answer(
    request: DispatchRequest,
    state: str,
    step: int | None = None,
    attempt: int | None = None,
    *,
    reason: str | None = None,
    detail: str = "",
    snapshot: str | None = None,
) -> Result:
    name = "" if step is None else f"step_{step} "
    line = f"{name}{state.replace('_', ' ')}" + (f" {reason}" if reason else "") + (f": {detail}" if detail else "")
    data = {"state": state, "step": step, "attempt": attempt, "reason": reason, "detail": detail, "snapshot": snapshot}
    return Result(data, [line], code=1 if state == "skipped" and request.fail_on_skip else 0)
