"""Bringing a step into flight under the ledger lock, or settling at once why it does not get there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from evalkit.decisions import incarnations, outcomes
from evalkit.decisions.admission import Action, Asked, Decision, LiveAttempt, decide
from evalkit.ground.errors import BusyError, EvalkitError
from evalkit.ground.ids import new_id
from evalkit.ground.layout import AttemptPaths, RunPaths
from evalkit.ground.processes import this_process
from evalkit.ground.schema import ActiveRecord, Outcome
from evalkit.state import attempts, points
from evalkit.state.fleet_queue import require_fleet
from evalkit.state.incarnations import begin_incarnation, known_incarnations
from evalkit.state.retirement import read_export_id
from evalkit.state.snapshot import open_snapshot
from evalkit.verbs.due import Due
from evalkit.verbs.settling import Ended, Look, end_owner, ledger, no_outcome, settle_for_owner, settle_skip

POLL = 0.5  # seconds between looks while backpressure holds


@dataclass(frozen=True, kw_only=True)
class Bid:
    """A step that wants to come into flight.

    Attributes:
        digest: of the weights; None where the step was never seen before, or they cannot be read.
        life: the trainer's incarnation as its caller names it.
        must: waits whatever the policy.
        wait: seconds to wait for room.
        timeout: seconds from admission after which anybody may settle the attempt as `timeout`.
        settings: for the worker.
        say: told what is waited for.
    """

    run: RunPaths
    due: Due
    digest: str | None
    life: str | None
    policy: Literal["backpressure", "skip"]
    max_in_flight: int
    must: bool
    wait: float
    timeout: float
    keep: int
    suite: str
    fleet: str
    settings: dict[str, Any] = field(default_factory=dict)
    say: Callable[[str], object] = lambda text: None


@dataclass(frozen=True)
class Admission:
    """How a bid ended.

    Attributes:
        prepared: the attempt, its lock held by this process; None unless it came into flight.
        outcome: of an attempt that was settled at once.
        attempt: the one that is in flight or landed already.
        replaced: settled attempts at the same step whose owners have not let go of its snapshot yet.
    """

    action: Action
    prepared: attempts.Prepared | None = None
    outcome: Outcome | None = None
    attempt: int | None = None
    replaced: tuple[AttemptPaths, ...] = ()


def admit(bid: Bid) -> Admission:
    """Wait for room as the policy says, and come into flight.

    Raises:
        BusyError: the ledger itself was not free in time.
    """
    deadline = time.monotonic() + bid.wait
    waits = False
    try:
        while True:
            with ledger(bid.run) as look:
                admission = _try_admit(bid, look, out_of_time=time.monotonic() >= deadline)
            if admission.action != "wait":
                return admission
            waits = True
            bid.say(f"waiting for room: {_full(bid, look)}")
            time.sleep(POLL)
    except (KeyboardInterrupt, SystemExit):
        if waits:
            _cancel(bid)
        raise


def _cancel(bid: Bid) -> None:
    """Record that a step which was due and waited for room was given up."""
    with ledger(bid.run) as look:
        if not any(live.step == bid.due.step for live in look.live):
            record = _record(bid, _incarnation(bid))
            _settle_at_once(bid.run, record, "cancelled", "the dispatching command was interrupted", look)


def _try_admit(bid: Bid, look: Look, *, out_of_time: bool) -> Admission:
    incarnation = _incarnation(bid)
    decision = _decide(bid, incarnation, look, out_of_time=out_of_time)
    for old in decision.superseded:
        _supersede(bid.run, old, look)
    replaced = tuple(paths for paths in look.ending if paths.step == bid.due.step)
    if decision.action == "admit":
        trouble = _trouble(bid)
    elif decision.action == "busy":
        trouble = BusyError(_full(bid, look))
    else:
        return Admission(decision.action, attempt=decision.attempt, replaced=replaced)
    record = _record(bid, incarnation)
    if trouble is not None:
        outcome = _settle_at_once(bid.run, record, trouble.skip_reason, str(trouble), look)
        return Admission(decision.action, outcome=outcome, replaced=replaced)
    reserve = outcomes.skipped(record, "no_space", "the disk of the run directory was full", record.admitted_at)
    prepared = attempts.prepare(bid.run, record, reserve)
    prepared.publish(bid.run)
    return Admission("admit", prepared, replaced=replaced)


def _decide(bid: Bid, incarnation: int, look: Look, *, out_of_time: bool) -> Decision:
    asked = Asked(
        step=bid.due.step,
        incarnation=incarnation,
        digest=bid.digest,
        policy="skip" if out_of_time else bid.policy,
        max_in_flight=bid.max_in_flight,
        must=bid.must and not out_of_time,
    )
    landed = [(o.attempt, o.digest) for o in points.outcomes_at(bid.run, bid.due.step) if o.outcome == "landed"]
    return decide(asked, look.live, landed)


def _incarnation(bid: Bid) -> int:
    """The ordinal of the trainer's life, recorded if it begins with this step."""
    known = known_incarnations(bid.run)
    name = bid.life or incarnations.name_from_environment(os.environ)
    earlier = _digests_at(bid.run, bid.due.step, max(len(known), 1))
    ordinal = incarnations.choose(name, known, earlier, bid.digest)
    if ordinal > len(known):
        begin_incarnation(bid.run, ordinal, name)
    return ordinal


def _digests_at(run: RunPaths, step: int, incarnation: int) -> list[str]:
    """What is known of the weights of the step's attempts in one incarnation, settled or in flight."""
    found = [o.digest for o in points.outcomes_at(run, step) if o.incarnation == incarnation]
    records = [attempts.read_record(paths) for paths in attempts.list_attempts(run) if paths.step == step]
    for record in records:
        if record is not None and record.incarnation == incarnation:
            found.append(record.source_digest or _exported_digest(record))
    return [digest for digest in found if digest is not None]


def _exported_digest(record: ActiveRecord) -> str | None:
    """The digest in the manifest of the snapshot that an attempt in flight names; None while it is not there."""
    try:
        return open_snapshot(Path(record.snapshot)).digest
    except EvalkitError:
        return None


def _supersede(run: RunPaths, old: LiveAttempt, look: Look) -> None:
    paths = run.attempt(old.step, old.attempt)
    settle_for_owner(look, paths, "superseded", "the trainer came to this step again")
    end_owner(paths, signal.SIGTERM)
    look.live.remove(old)
    look.ending.append(paths)


def _full(bid: Bid, look: Look) -> str:
    names = ", ".join(f"{live.step}.{live.attempt}" for live in look.live)
    return f"{len(look.live)} of {bid.max_in_flight} in flight ({names})"


def _trouble(bid: Bid) -> EvalkitError | None:
    """Why the point cannot be evaluated, as far as it can be told without doing anything."""
    if bid.due.trouble is not None:
        return bid.due.trouble
    try:
        require_fleet(bid.run.fleet(bid.fleet))
    except EvalkitError as error:
        return error
    return None


def _record(bid: Bid, incarnation: int) -> ActiveRecord:
    step, now = bid.due.step, time.time()
    numbers = [*points.attempts_at(bid.run, step)]
    numbers += [paths.attempt for paths in attempts.list_attempts(bid.run) if paths.step == step]
    return ActiveRecord(
        step=step,
        attempt=max(numbers, default=0) + 1,
        incarnation=incarnation,
        snapshot=str(bid.due.snapshot),
        snapshot_dir=str(bid.due.snapshot_dir) if bid.due.snapshot_dir else None,
        export_id=new_id() if bid.due.source else read_export_id(bid.due.snapshot),
        source_digest=bid.digest,
        suite=bid.suite,
        fleet=bid.fleet,
        keep=bid.keep,
        settings=bid.settings,
        admitted_by=this_process(),
        admitted_at=now,
        deadline=now + bid.timeout,
    )


def _settle_at_once(run: RunPaths, record: ActiveRecord, reason: str, detail: str, look: Look) -> Outcome:
    """An attempt that ends where it begins. Its record stands without a lock until its row is written.

    Raises:
        StorageError: the disk has no room for the outcome.
    """
    paths = run.attempt(record.step, record.attempt)
    attempts.note(paths, record)
    settle_skip(paths, record, reason, detail)
    outcome = points.read_outcome(paths.outcome)
    if outcome is None:
        raise no_outcome(paths)
    look.ended.append(Ended(paths, outcome, None, record))
    return outcome
