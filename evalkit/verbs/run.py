"""`evalkit run`: evaluate a snapshot by hand, on a fleet that is taken for it and pinned if need be."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path

from evalkit.adapters.engine import EngineState, connect, each
from evalkit.adapters.fleet_launch import Progress
from evalkit.adapters.suite import Suite, load_suite
from evalkit.ground.errors import BusyError, EvalkitError, EvalSkip, UnavailableError, UsageError
from evalkit.ground.layout import ResultPaths, RunPaths
from evalkit.ground.result import Result
from evalkit.ground.schema import FleetRecord, PinnedEngine, PinProof, RunRecord
from evalkit.state.fleet import load_fleet
from evalkit.state.fleet_queue import FleetHold, hold_fleet
from evalkit.state.run import find_run, fleet_name, remember
from evalkit.verbs.evaluate import Evaluation, check_suite, evaluate
from evalkit.verbs.pin import PinTarget, pin_engines, pin_target


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


def run(request: RunRequest, progress: Progress = lambda text: None) -> Result:
    """Take the fleet, pin it unless it is, evaluate.

    Raises:
        UsageError, DataError: the suite or the request is not usable; nothing was touched.
        NoSnapshotError: no such snapshot.
        UnavailableError: the fleet or all its engines do not answer, or, without a snapshot, are not pinned alike.
        PinViolationError: the engines hold other weights.
        IncompleteError: most samples of a dataset got no answer.
        BusyError: the fleet was not free in time, or the evaluation did not end in time.
        EvalkitError: a scorer raised EvalSkip.
    """
    end = time.monotonic() + request.timeout
    record = find_run(request.run_dir)
    suite = _suite(request, record)
    results = _given_output(request)
    fleet = RunPaths(request.run_dir.absolute()).fleet(fleet_name(record, request.fleet))
    load_fleet(fleet)
    with contextlib.ExitStack() as stack:
        target = None
        if request.snapshot is not None:
            target = stack.enter_context(pin_target(request.run_dir, request.snapshot, request.snapshot_dir))
        hold = stack.enter_context(hold_fleet(fleet, timeout=request.timeout))
        return asyncio.run(_in_time(_pin_and_evaluate(hold, target, suite, results, request, progress), end, request))


def _suite(request: RunRequest, record: RunRecord | None) -> Suite:
    path = request.suite or (Path(record.suite) if record and record.suite else None)
    if path is None:
        raise UsageError("no suite is given", "give --suite FILE or set EVALKIT_SUITE")
    suite = load_suite(path)
    check_suite(suite)
    return suite


def _given_output(request: RunRequest) -> ResultPaths | None:
    if request.output is None:
        return None
    results = ResultPaths(Path(os.path.abspath(request.output)))
    if results.metrics.exists():
        raise UsageError(f"--output {results.root} already holds results", "give another directory")
    return results


def _new_results(run: RunPaths, version: str) -> ResultPaths:
    """A new directory among the results by hand, named after version and time."""
    version = re.sub(r"[^\w.-]", "_", version)
    stem = f"{version}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    for number in itertools.count():
        directory = run.manual / (f"{stem}.{number}" if number else stem)
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        break
    return ResultPaths(directory)


async def _in_time(work: Awaitable[Result], end: float, request: RunRequest) -> Result:
    try:
        async with asyncio.timeout(end - time.monotonic()) as scope:
            return await work
    except TimeoutError:
        if not scope.expired():
            raise
        raise BusyError(
            f"pin and evaluation did not end within {request.timeout:g} s", "give a longer --timeout"
        ) from None
    except EvalSkip as skip:
        raise EvalkitError(f"a scorer ended the evaluation: {skip}", reason=skip.reason) from skip


async def _pin_and_evaluate(
    hold: FleetHold,
    target: PinTarget | None,
    suite: Suite,
    results: ResultPaths | None,
    request: RunRequest,
    progress: Progress,
) -> Result:
    proof = await _proof(hold, target, request.load_timeout, progress)
    remember(request.run_dir, snapshot_dir=request.snapshot_dir, suite=request.suite, fleet=request.fleet)
    results = results or _new_results(RunPaths(request.run_dir.absolute()), proof.version)
    evaluation = await evaluate(
        suite,
        proof,
        results,
        concurrency=request.concurrency,
        sample_timeout=request.sample_timeout,
        check=hold.check,
        progress=lambda done, total: progress(f"{done} of {total} samples"),
    )
    return _result(proof, evaluation, results)


async def _proof(hold: FleetHold, target: PinTarget | None, load_timeout: float, progress: Progress) -> PinProof:
    fleet = load_fleet(hold.paths)
    async with connect(hold.paths, fleet.engines) as clients:
        states: list[EngineState | BaseException] = await each(clients, lambda client: client.state())
    if target is None:
        return _pinned_proof(fleet, states)
    try:
        proof = _pinned_proof(fleet, states)
    except UnavailableError:
        pass  # not pinned alike, or not answering: pinning mends both
    else:
        if (proof.version, proof.digest) == (target.version, target.digest):
            return proof
    return await pin_engines(hold, target, load_timeout=load_timeout, progress=progress)


def _pinned_proof(fleet: FleetRecord, states: list[EngineState | BaseException]) -> PinProof:
    """What the engines say that they are pinned on, if all say the same.

    Raises:
        UnavailableError: one is not pinned, or on something else than the others.
    """
    if fleet.state != "up" or not fleet.engines:
        raise UnavailableError(f"fleet {fleet.name} is {fleet.state}", "start it with evalkit fleet up")
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
