"""What a worker does once the attempt is its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from evalkit.adapters.suite import Suite, load_suite
from evalkit.decisions import outcomes, reasons
from evalkit.ground.errors import DataError, EvalkitError, EvalSkip
from evalkit.ground.layout import AttemptPaths, ResultPaths
from evalkit.ground.processes import this_process
from evalkit.ground.schema import ActiveRecord, Outcome, PinProof
from evalkit.state import attempts, points
from evalkit.state.fleet_queue import FleetHold, hold_fleet, place_of
from evalkit.state.retirement import read_export_id
from evalkit.state.snapshot import known_digest, open_snapshot, use_snapshot
from evalkit.verbs.evaluate import More, evaluate
from evalkit.verbs.pin import PinTarget, pin_engines
from evalkit.verbs.settling import Ended, finish, settle_skip

LOOK_EVERY = 2.0  # seconds between looks whether somebody else has settled the attempt
T = TypeVar("T")
log = logging.getLogger("evalkit.worker")


class Terminated(BaseException):
    """SIGTERM."""


class SettledByOthersError(Exception):
    """The attempt has an outcome already: superseded, cancelled or timed out. There is nothing left to do."""


def work(paths: AttemptPaths, lock_fd: int, order: Mapping[str, Any]) -> None:
    """Evaluate, settle, finish. Every failure becomes the attempt's outcome; a bug is logged and becomes `crashed`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    signal.signal(signal.SIGTERM, _terminated)
    record = attempts.read_record(paths)
    if record is None:
        raise SystemExit(f"the record of {paths.name} is gone or damaged")
    try:
        _settle(paths, record, order)
    except SettledByOthersError:
        log.info("settled by others: stopping")
    except Terminated:
        settle_skip(paths, record, "cancelled", "its worker was terminated")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    outcome = points.read_outcome(paths.outcome)
    if outcome is not None:
        log.info("%s %s %s", outcome.outcome, outcome.reason or "", outcome.detail)
        finish(Ended(paths, outcome, lock_fd, record), delete=True)


def _terminated(signum: int, frame: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def _settle(paths: AttemptPaths, record: ActiveRecord, order: Mapping[str, Any]) -> None:
    try:
        with _snapshot_in_use(record):
            outcome = _evaluate_point(paths, record, order)
        points.settle(paths, outcome)
    except EvalkitError as error:
        reason = "timeout" if time.time() >= record.deadline else error.skip_reason
        settle_skip(paths, record, reason, str(error))
    except EvalSkip as skip:
        settle_skip(paths, record, skip.reason, skip.detail)
    except TimeoutError:
        settle_skip(paths, record, "timeout", f"not done {time.time() - record.admitted_at:.0f} s after its admission")
    except SettledByOthersError:
        raise
    except OSError as error:
        log.exception("the file system or the network failed")
        settle_skip(paths, record, reasons.of_storage(error, "crashed"), str(error))
    except Exception as error:
        # A bug, here or in a plug-in: the point still gets its outcome, and the traceback is in the log.
        log.exception("unexpected")
        settle_skip(paths, record, "crashed", f"{type(error).__name__}: {error}; see {paths.results / 'log'}")


@contextlib.contextmanager
def _snapshot_in_use(record: ActiveRecord) -> Any:
    """Keep the snapshot from being retired; a caller's directory needs no such thing."""
    export_id = read_export_id(Path(record.snapshot)) if record.snapshot_dir else None
    if record.snapshot_dir is None or export_id is None:
        yield
        return
    fd = use_snapshot(Path(record.snapshot_dir), export_id)
    try:
        yield
    finally:
        os.close(fd)


def _evaluate_point(paths: AttemptPaths, record: ActiveRecord, order: Mapping[str, Any]) -> Outcome:
    def check() -> None:
        if paths.outcome.exists():
            raise SettledByOthersError

    def more() -> dict[str, float | int | None]:
        lag = _highest_step(paths) - record.step
        return {"eval/lag_steps": lag, "eval/export_time_seconds": order.get("export_seconds")}

    suite = _suite(record)
    target = _target(paths, record, order)
    with hold_fleet(
        paths.run.fleet(record.fleet),
        timeout=max(record.deadline - time.time(), 0.0),
        place=place_of(record.incarnation, record.step, record.attempt),
        outcome=paths.outcome,
        check=check,
    ) as hold:
        evaluating = _pin_and_evaluate(hold, target, suite, paths, record, more)
        proof, metrics = asyncio.run(_watched(evaluating, check, record))
    return outcomes.landed(
        record,
        metrics,
        msgspec.to_builtins(proof),
        time.time(),
        by=this_process(),
        export_id=read_export_id(Path(record.snapshot)),
    )


def _suite(record: ActiveRecord) -> Suite:
    try:
        return load_suite(Path(record.suite))
    except EvalkitError as error:
        raise EvalSkip("incomplete", str(error)) from error


def _target(paths: AttemptPaths, record: ActiveRecord, order: Mapping[str, Any]) -> PinTarget:
    """What to pin: the very weights that the attempt was admitted for."""
    snapshot = open_snapshot(Path(record.snapshot), need_marker=record.snapshot_dir is not None)
    digest = known_digest(paths.run, snapshot)
    if digest != (order.get("digest") or record.source_digest or digest):
        raise DataError(f"{snapshot.path} has other weights than when {paths.name} was admitted")
    return PinTarget(path=snapshot.path, version=str(record.step), digest=digest, export_id=snapshot.export_id)


async def _pin_and_evaluate(
    hold: FleetHold, target: PinTarget, suite: Suite, paths: AttemptPaths, record: ActiveRecord, more: More
) -> tuple[PinProof, dict[str, float | int | None]]:
    settings = record.settings
    proof = await pin_engines(hold, target, load_timeout=settings.get("load_timeout", 600.0))
    log.info("pinned %s (%s) on %d engines", proof.version, proof.digest[:12], len(proof.engines))
    evaluation = await evaluate(
        suite,
        proof,
        ResultPaths(paths.results),
        concurrency=settings.get("concurrency", 64),
        check=hold.check,
        more=more,
    )
    return proof, dict(evaluation.metrics)


async def _watched(work: Coroutine[Any, Any, T], check: Callable[[], None], record: ActiveRecord) -> T:
    """Run `work` until it ends, until `check` raises, until SIGTERM, or until the attempt's deadline.

    Raises:
        Terminated: SIGTERM came. A handler that raises would be lost in a callback of the event loop.
        TimeoutError: the deadline came first.
    """
    terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    working, signalled = asyncio.ensure_future(work), asyncio.ensure_future(terminated.wait())
    try:
        async with asyncio.timeout(max(record.deadline - time.time(), 0.0)):
            while not working.done():
                await asyncio.wait([working, signalled], timeout=LOOK_EVERY, return_when=asyncio.FIRST_COMPLETED)
                if terminated.is_set():
                    raise Terminated
                check()
            return working.result()
    finally:
        signalled.cancel()
        working.cancel()
        await asyncio.gather(working, signalled, return_exceptions=True)
        signal.signal(signal.SIGTERM, _terminated)


def _highest_step(paths: AttemptPaths) -> int:
    """The highest step that the ledger knows: settled or in flight."""
    in_flight = [other.step for other in attempts.list_attempts(paths.run)]
    return max([paths.step, *in_flight, *points.known_steps(paths.run)])
