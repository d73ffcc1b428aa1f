"""`evalkit dispatch`: export, admit, hand to a detached worker, return."""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from evalkit.adapters.workers import hand_over
from evalkit.decisions import incarnations, outcomes
from evalkit.decisions.admission import Asked, Decision, decide
from evalkit.ground.errors import BusyError, EvalkitError, StorageError, UsageError
from evalkit.ground.layout import AttemptPaths, RunPaths
from evalkit.ground.processes import this_process
from evalkit.ground.result import Result
from evalkit.ground.schema import ActiveRecord, Outcome
from evalkit.state import attempts, points
from evalkit.state.incarnations import begin_incarnation, known_incarnations
from evalkit.state.retirement import read_export_id
from evalkit.state.run import fleet_name, open_run, remember, snapshot_dir_of
from evalkit.verbs.due import Due, find_due
from evalkit.verbs.exporting import digest_of_due, export_due
from evalkit.verbs.settling import Ended, Look, end_owner, finish, ledger, settle_for_owner, settle_skip

POLL = 0.5  # seconds between looks while backpressure holds
REPLACED_LETS_GO = 20.0  # seconds that a superseded worker gets to stop using its snapshot


@dataclass(frozen=True, kw_only=True)
class DispatchRequest:
    """What one call of dispatch asks for; see `evalkit dispatch --help`.

    Attributes:
        wait: seconds that backpressure waits for room.
        timeout: seconds from admission after which anybody may settle the attempt as `timeout`.
        export: options of the export, as `evalkit.verbs.exporting` takes them.
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


@dataclass(frozen=True)
class _Plan:
    """The request with everything that the run's record and the disk add to it."""

    request: DispatchRequest
    run: RunPaths
    due: Due
    suite: str
    fleet: str
    digest: str | None


def dispatch(request: DispatchRequest) -> Result:
    """Bring a step into flight, or record why not.

    Raises:
        UsageError: settings that contradict each other or are missing.
    """
    _validate(request)
    if request.step is not None and not request.final and request.step % request.every:
        return _answer(request, "not_due", request.step, detail=f"{request.step} is no multiple of {request.every}")
    record = open_run(request.run_dir, create=True)
    run = RunPaths(request.run_dir)
    due = find_due(run, snapshot_dir_of(record, request.snapshot_dir), request.step, request.source, request.baseline)
    if due is None:
        return _answer(request, "nothing", detail="no complete snapshot is without a point")
    suite = str(request.suite.absolute()) if request.suite else record.suite
    if suite is None:
        raise UsageError("no suite is known", "give --suite or set EVALKIT_SUITE")
    remember(request.run_dir, snapshot_dir=request.snapshot_dir, suite=request.suite, fleet=request.fleet)
    fleet = fleet_name(record, request.fleet)
    return _bring_into_flight(_Plan(request, run, due, suite, fleet, _digest_if_seen(run, due, request)))


def _validate(request: DispatchRequest) -> None:
    if request.keep < request.max_in_flight:
        raise UsageError(
            f"--keep {request.keep} is less than --max-in-flight {request.max_in_flight}",
            "keep at least as many snapshots as may be in flight",
        )
    if request.baseline is not None and request.source is not None:
        raise UsageError("--baseline and --from exclude each other", "a baseline is evaluated where it is")


def _digest_if_seen(run: RunPaths, due: Due, request: DispatchRequest) -> str | None:
    """The source's digest where the step has been seen before: only then somebody asks whether it is the same."""
    seen = points.attempts_at(run, due.step) or any(p.step == due.step for p in attempts.list_attempts(run))
    return digest_of_due(run, due, request.export) if seen and due.trouble is None else None


def _bring_into_flight(plan: _Plan) -> Result:
    deadline = time.monotonic() + plan.request.wait
    while True:
        with ledger(plan.run) as look:
            incarnation = _incarnation(plan)
            decision = _decide(plan, incarnation, look, out_of_time=time.monotonic() >= deadline)
            replaced = [_supersede(plan.run, old.step, old.attempt, look) for old in decision.superseded]
            prepared = _act(plan, decision, incarnation, look)
        if decision.action != "wait":
            break
        time.sleep(POLL)
    if prepared is not None:
        return _carry_out(plan, prepared, replaced)
    return _report(plan, decision, look)


def _decide(plan: _Plan, incarnation: int, look: Look, *, out_of_time: bool) -> Decision:
    request = plan.request
    policy: Literal["backpressure", "skip"] = "skip" if out_of_time else request.policy
    asked = Asked(
        plan.due.step, incarnation, plan.digest, policy, request.max_in_flight, request.final and not out_of_time
    )
    landed = [(o.attempt, o.digest) for o in points.outcomes_at(plan.run, plan.due.step) if o.outcome == "landed"]
    return decide(asked, look.live, landed)


def _incarnation(plan: _Plan) -> int:
    """The ordinal of the trainer's life, recorded if it begins with this step."""
    known = known_incarnations(plan.run)
    name = plan.request.incarnation or incarnations.name_from_environment(os.environ)
    earlier = _digests_at(plan.run, plan.due.step, max(len(known), 1))
    ordinal = incarnations.choose(name, known, earlier, plan.digest)
    if ordinal > len(known):
        begin_incarnation(plan.run, ordinal, name)
    return ordinal


def _digests_at(run: RunPaths, step: int, incarnation: int) -> list[str]:
    """What is known of the weights of the step's attempts in one incarnation, settled or in flight."""
    found = [o.digest for o in points.outcomes_at(run, step) if o.incarnation == incarnation]
    records = [attempts.read_record(paths) for paths in attempts.list_attempts(run) if paths.step == step]
    for record in records:
        if record is not None and record.incarnation == incarnation:
            found.append(record.source_digest or exported_digest(record))
    return [digest for digest in found if digest is not None]


def exported_digest(record: ActiveRecord) -> str | None:
    """The digest in the manifest of the snapshot that an attempt in flight names; None while it is not there."""
    from evalkit.state.snapshot import open_snapshot

    try:
        return open_snapshot(Path(record.snapshot)).digest
    except EvalkitError:
        return None


def _supersede(run: RunPaths, step: int, attempt: int, look: Look) -> AttemptPaths:
    paths = run.attempt(step, attempt)
    record = attempts.read_record(paths)
    if record is not None:
        detail = "the trainer came to this step again"
        settle_for_owner(look, paths, record, "superseded", detail)
        end_owner(paths, record, 15)
    look.live = [live for live in look.live if (live.step, live.attempt) != (step, attempt)]
    return paths


def _act(plan: _Plan, decision: Decision, incarnation: int, look: Look) -> attempts.Prepared | None:
    """Under the ledger lock: the attempt, or its outcome at once; None unless it came into flight."""
    if decision.action not in ("admit", "busy"):
        return None
    record = _record(plan, incarnation)
    trouble = _trouble(plan) if decision.action == "admit" else BusyError(_full(plan, look))
    if trouble is not None:
        _settle_at_once(plan.run, record, trouble, look)
        return None
    reserve = outcomes.skipped(record, "no_space", "the disk of the run directory was full", record.admitted_at)
    prepared = attempts.prepare(plan.run, record, reserve)
    prepared.publish(plan.run)
    return prepared


def _full(plan: _Plan, look: Look) -> str:
    names = ", ".join(f"{live.step}.{live.attempt}" for live in look.live)
    return f"{len(look.live)} of {plan.request.max_in_flight} in flight ({names})"


def _trouble(plan: _Plan) -> EvalkitError | None:
    from evalkit.state.fleet import load_fleet

    if plan.due.trouble is not None:
        return plan.due.trouble
    try:
        load_fleet(plan.run.fleet(plan.fleet))
    except EvalkitError as error:
        return error
    return None


def _record(plan: _Plan, incarnation: int) -> ActiveRecord:
    step, now = plan.due.step, time.time()
    numbers = [*points.attempts_at(plan.run, step)]
    numbers += [paths.attempt for paths in attempts.list_attempts(plan.run) if paths.step == step]
    return ActiveRecord(
        step=step,
        attempt=max(numbers, default=0) + 1,
        incarnation=incarnation,
        snapshot=str(plan.due.snapshot),
        snapshot_dir=str(plan.due.snapshot_dir) if plan.due.snapshot_dir else None,
        export_id=uuid.uuid4().hex if plan.due.source else read_export_id(plan.due.snapshot),
        source_digest=plan.digest,
        suite=plan.suite,
        fleet=plan.fleet,
        keep=plan.request.keep,
        settings=plan.request.settings,
        admitted_by=this_process(),
        admitted_at=now,
        deadline=now + plan.request.timeout,
    )


def _settle_at_once(run: RunPaths, record: ActiveRecord, trouble: EvalkitError, look: Look) -> None:
    """An attempt that ends where it begins. Its record stands without a lock until its row is written."""
    paths = run.attempt(record.step, record.attempt)
    attempts.note(paths, record)
    settle_skip(paths, record, trouble.skip_reason, str(trouble))
    outcome = points.read_outcome(paths.outcome)
    if outcome is not None:
        look.ended.append(Ended(paths, outcome, None, record))


def _carry_out(plan: _Plan, prepared: attempts.Prepared, replaced: list[AttemptPaths]) -> Result:
    """Export and hand over, with the attempt's lock held; whatever fails becomes the attempt's outcome."""
    record = prepared.record
    paths = plan.run.attempt(record.step, record.attempt)
    try:
        _wait_for_release(replaced)
        details = export_due(plan.run, plan.due, plan.request.export, record) if plan.due.source else {}
        if not paths.outcome.exists():
            if hand_over(paths, prepared.lock_fd, details):
                os.close(prepared.lock_fd)
                return _dispatched(plan, record)
            settle_skip(paths, record, "crashed", f"its worker did not start; see {paths.results / 'log'}")
    except EvalkitError as error:
        settle_skip(paths, record, error.skip_reason, str(error))
    except OSError as error:
        settle_skip(paths, record, "export_failed", str(error))
    except (KeyboardInterrupt, SystemExit):
        settle_skip(paths, record, "cancelled", "the dispatching command was interrupted")
        _finish_own(paths, prepared)
        raise
    return _outcome_answer(plan.request, _finish_own(paths, prepared))


def _finish_own(paths: AttemptPaths, prepared: attempts.Prepared) -> Outcome:
    outcome = points.read_outcome(paths.outcome)
    if outcome is None:
        raise StorageError(f"the outcome of {paths.name} could not be written to {paths.outcome}", "free some space")
    finish(Ended(paths, outcome, prepared.lock_fd, prepared.record))
    return outcome


def _wait_for_release(replaced: list[AttemptPaths]) -> None:
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


def _report(plan: _Plan, decision: Decision, look: Look) -> Result:
    if decision.action in ("in_flight", "unchanged"):
        return _answer(plan.request, decision.action, plan.due.step, decision.attempt)
    outcome = next(e.outcome for e in look.ended if e.lock_fd is None and e.paths.step == plan.due.step)
    return _outcome_answer(plan.request, outcome)


def _dispatched(plan: _Plan, record: ActiveRecord) -> Result:
    return _answer(plan.request, "dispatched", record.step, record.attempt, snapshot=record.snapshot)


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
