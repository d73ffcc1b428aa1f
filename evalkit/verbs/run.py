"""`evalkit run`: evaluate a snapshot by hand, on a fleet that is taken for it and pinned if need be."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evalkit.adapters.engine import EngineState, connect, each
from evalkit.adapters.suite import Suite, load_suite
from evalkit.ground.errors import BusyError, UnavailableError, UsageError
from evalkit.ground.layout import ResultPaths, RunPaths
from evalkit.ground.result import Result
from evalkit.ground.schema import FleetRecord, PinnedEngine, PinProof, RunRecord
from evalkit.state.fleet import load_fleet
from evalkit.state.fleet_queue import FleetHold, hold_fleet
from evalkit.state.run import fleet_name, open_run, snapshot_dir_of
from evalkit.state.snapshot import Snapshot, known_digest, open_snapshot, resolve_snapshot, use_snapshot
from evalkit.verbs.evaluate import Evaluation, Progress, check_suite
from evalkit.verbs.evaluate import evaluate as evaluate
from evalkit.verbs.pin import PinTarget, pin_engines


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What `evalkit run` was asked.

    Attributes:
        snapshot: a name in SNAPSHOT_DIR or a path; None: evaluate what is pinned.
        suite: None: the run's.
        output: directory for the results; None: a new one in RUN_DIR/results/manual.
        timeout: seconds for everything, the wait for the fleet included.
    """

    run_dir: Path
    snapshot: str | None = None
    snapshot_dir: Path | None = None
    fleet: str | None = None
    suite: Path | None = None
    output: Path | None = None
    concurrency: int = 64
    timeout: float = 14400.0
    load_timeout: float = 600.0
    sample_timeout: float = 600.0


def run(request: RunRequest, progress: Progress | None = None) -> Result:
    """Take the fleet, pin it unless it is, evaluate.

    Raises:
        UsageError, DataError: the suite or the request is not usable; nothing was touched.
        NoSnapshotError: no such snapshot.
        UnavailableError: the fleet or all its engines do not answer, or, without a snapshot, are not pinned alike.
        PinViolationError: the engines hold other weights.
        BusyError: the fleet was not free in time, or the evaluation did not end in time.
    """
    started = time.monotonic()
    record = _run_record(request.run_dir)
    suite = _suite(request, record)
    target = _target(request, record)
    fleet = RunPaths(request.run_dir).fleet(fleet_name(record, request.fleet))
    load_fleet(fleet)
    results = _results(request, target)
    with _in_use(target), hold_fleet(fleet, timeout=request.timeout) as hold:
        left = request.timeout - (time.monotonic() - started)
        proof, evaluation = asyncio.run(_pin_and_evaluate(hold, target, suite, results, request, left, progress))
    return _result(proof, evaluation, results)


def _run_record(run_dir: Path) -> RunRecord | None:
    return open_run(run_dir, create=False) if RunPaths(run_dir).record.exists() else None


def _suite(request: RunRequest, record: RunRecord | None) -> Suite:
    path = request.suite or (Path(record.suite) if record and record.suite else None)
    if path is None:
        raise UsageError("no suite is given", "give --suite FILE or set EVALKIT_SUITE")
    suite = load_suite(path)
    check_suite(suite)
    return suite


@dataclass(frozen=True)
class _Target:
    """The snapshot to evaluate, and the SNAPSHOT_DIR that it lies in."""

    snapshot: Snapshot
    pin: PinTarget
    snapshot_dir: Path | None


def _target(request: RunRequest, record: RunRecord | None) -> _Target | None:
    if request.snapshot is None:
        return None
    snapshot_dir = snapshot_dir_of(record, request.snapshot_dir)
    path = resolve_snapshot(request.snapshot, snapshot_dir)
    inside = snapshot_dir is not None and path.parent == snapshot_dir
    snapshot = open_snapshot(path, need_marker=inside)
    pin = PinTarget(
        path=snapshot.path,
        version=str(snapshot.step) if snapshot.step is not None else snapshot.path.name,
        digest=known_digest(RunPaths(request.run_dir), snapshot),
        export_id=snapshot.export_id,
    )
    return _Target(snapshot, pin, path.parent if inside else None)


def _results(request: RunRequest, target: _Target | None) -> ResultPaths:
    if request.output is not None:
        results = ResultPaths(Path(os.path.abspath(request.output)))
        if results.metrics.exists():
            raise UsageError(f"--output {results.root} already holds results", "give another directory")
        return results
    label = target.pin.version if target else "pinned"
    directory = RunPaths(request.run_dir).manual / f"{label}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    number = 0
    while directory.exists():
        number += 1
        directory = directory.with_name(f"{directory.name.partition('.')[0]}.{number}")
    return ResultPaths(directory.absolute())


@contextlib.contextmanager
def _in_use(target: _Target | None) -> Iterator[None]:
    """Keep evalkit's own snapshot from being retired meanwhile."""
    if target is None or target.snapshot_dir is None or target.snapshot.export_id is None:
        yield
        return
    fd = use_snapshot(target.snapshot_dir, target.snapshot.export_id)
    try:
        yield
    finally:
        os.close(fd)


async def _pin_and_evaluate(
    hold: FleetHold,
    target: _Target | None,
    suite: Suite,
    results: ResultPaths,
    request: RunRequest,
    seconds: float,
    progress: Progress | None,
) -> tuple[PinProof, Evaluation]:
    end = time.monotonic() + seconds
    try:
        async with asyncio.timeout(seconds) as scope:
            proof = await _proof(hold, target, request)
    except TimeoutError:
        if not scope.expired():
            raise
        raise BusyError(f"the fleet was not pinned within {request.timeout:g} s", "give a longer --timeout") from None
    evaluation = await evaluate(
        suite,
        proof,
        results,
        concurrency=request.concurrency,
        sample_timeout=request.sample_timeout,
        deadline=end - time.monotonic(),
        check=hold.check,
        progress=progress,
    )
    return proof, evaluation


async def _proof(hold: FleetHold, target: _Target | None, request: RunRequest) -> PinProof:
    fleet = load_fleet(hold.paths)
    if not fleet.engines:
        raise UnavailableError(f"fleet {fleet.name} has no engines", "start some with evalkit fleet up")
    async with connect(hold.paths, fleet.engines) as clients:
        states: list[EngineState | BaseException] = await each(clients, lambda client: client.state())
    if target is None:
        return _pinned_proof(fleet, states)
    try:
        proof = _pinned_proof(fleet, states)
    except UnavailableError:
        proof = None
    if proof is not None and (proof.version, proof.digest) == (target.pin.version, target.pin.digest):
        return proof
    return await pin_engines(hold, target.pin, load_timeout=request.load_timeout)


def _pinned_proof(fleet: FleetRecord, states: list[EngineState | BaseException]) -> PinProof:
    """What the engines say that they are pinned on, if all say the same.

    Raises:
        UnavailableError: one is not pinned, or on something else than the others.
    """
    engines, pins = [], []
    for record, state in zip(fleet.engines, states, strict=True):
        if isinstance(state, BaseException):
            raise state
        name = f"engine {record.index} ({record.url})"
        if state.broken or state.pin is None or state.pinning:
            why = state.broken or ("it is being pinned" if state.pinning else "it is not pinned")
            raise UnavailableError(f"{name}: {why}", "pin the fleet with evalkit pin")
        pins.append(state.pin)
        if (state.pin.version, state.pin.digest, state.pin.epoch) != (pins[0].version, pins[0].digest, pins[0].epoch):
            what = f"{name} is pinned on {state.pin.version} at epoch {state.pin.epoch}"
            raise UnavailableError(f"{what}, others on {pins[0].version} at {pins[0].epoch}", "use evalkit pin")
        ranks = record.tensor_parallel
        engines.append(
            PinnedEngine(index=record.index, url=record.url, nonce=state.nonce, ranks=ranks, vllm=state.vllm)
        )
    return PinProof(
        epoch=pins[0].epoch,
        version=pins[0].version,
        digest=pins[0].digest,
        served_model=fleet.served_model,
        engines=engines,
    )


def _result(proof: PinProof, evaluation: Evaluation, results: ResultPaths) -> Result:
    data = {
        "version": proof.version,
        "digest": proof.digest,
        "results": str(results.root),
        **evaluation.counts._asdict(),
        "metrics": evaluation.metrics,
    }
    width = max(map(len, evaluation.metrics))
    shown = [f"{name:<{width}}  {_show(value)}" for name, value in evaluation.metrics.items()]
    return Result(data, [*shown, f"{'results':<{width}}  {results.root}"])


def _show(value: float | int | None) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
