"""Put every engine of a fleet on one snapshot, and prove it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from evalkit.adapters.engine import (
    ANSWER_SLACK,
    STATE_TIMEOUT,
    EngineClient,
    EngineFailedError,
    EngineState,
    PinReply,
    connect,
    each,
)
from evalkit.adapters.fleet_launch import Progress, restart_engines
from evalkit.ground.errors import (
    BusyError,
    DataError,
    EvalkitError,
    NoSnapshotError,
    PinViolationError,
    UnavailableError,
)
from evalkit.ground.layout import RunPaths
from evalkit.ground.result import Result
from evalkit.ground.schema import EngineRecord, FleetRecord, PinnedEngine, PinProof
from evalkit.ground.tensors import read_headers
from evalkit.state.fleet import load_fleet
from evalkit.state.fleet_queue import FleetHold, hold_fleet
from evalkit.state.run import find_run, fleet_name, snapshot_dir_of
from evalkit.state.snapshot import known_digest, open_snapshot, resolve_snapshot, use_snapshot

PROBE_TIMEOUT = 60.0  # seconds; the first token of an engine takes longest
START_TIMEOUT = 900.0  # seconds for an engine that is restarted

A = TypeVar("A")


@dataclass(frozen=True, kw_only=True)
class PinTarget:
    """What to pin.

    Attributes:
        path: the snapshot's directory, absolute.
        version: the label to serve: the step as text.
        digest: what the weights must hash to.
        export_id: of a snapshot that evalkit made.
    """

    path: Path
    version: str
    digest: str
    export_id: str | None = None


async def pin_engines(
    hold: FleetHold,
    target: PinTarget,
    *,
    load_timeout: float = 600.0,
    drain_timeout: float = 60.0,
    attempts: int = 2,
    start_timeout: float = START_TIMEOUT,
    state_timeout: float = STATE_TIMEOUT,
    progress: Progress = lambda text: None,
) -> PinProof:
    """Pin every engine of the held fleet under a new epoch, read back every rank, and probe.

    It always loads, also what is pinned already: only a load proves what an engine holds. Engines that are dead,
    hung or broken are restarted before an attempt, as are those that failed in the one before, or refused there what
    others took.

    Args:
        load_timeout: seconds for one attempt's load.
        drain_timeout: seconds that requests in flight get before they are aborted.
        start_timeout: seconds for engines that are restarted.
        state_timeout: seconds for an engine to say how it is, before it counts as hung.

    Raises:
        NoSnapshotError: the directory is not there.
        DataError: the snapshot was refused, here or by every engine, which then keep their old weights, or by some of
            them, restarted ones too.
        BusyError: the fleet was taken over by somebody else.
        UnavailableError: an engine did not do it in any of the attempts.
        PinViolationError: an engine loaded other weights than it was told, in the last attempt too.
    """
    _check(target)
    failed = _Failed([])
    for attempt in range(1, attempts + 1):
        try:
            progress("looking at the engines")
            await _heal(hold, failed.engines, start_timeout, state_timeout)
            progress(f"loading {target.path.name}, attempt {attempt} of {attempts}")
            return await _attempt(hold, target, load_timeout, drain_timeout)
        except _Failed as error:
            failed = error
    # Some may have loaded it, others not: of the fleet as a whole nothing is proved any more.
    hold.change(lambda record: msgspec.structs.replace(record, pinned=None, pinned_export_id=None))
    raise failed.final()


def _check(target: PinTarget) -> None:
    if not target.path.is_dir():
        raise NoSnapshotError(f"there is no snapshot {target.path}")
    read_headers(target.path)


class _Failed(Exception):  # noqa: N818  (of an attempt; never leaves this module)
    """An attempt failed.

    Attributes:
        engines: that need a restart.
        error: what the first of them said.
    """

    def __init__(self, engines: Sequence[EngineRecord], error: EvalkitError | None = None) -> None:
        self.engines = list(engines)
        self.error = error or UnavailableError("no attempt was made")

    def final(self) -> EvalkitError:
        if isinstance(self.error, EngineFailedError) and self.error.wrong_weights:
            return PinViolationError(self.error.message, self.error.remedy)
        return self.error


async def _heal(hold: FleetHold, suspects: Sequence[EngineRecord], timeout: float, state_timeout: float) -> None:
    """Restart the suspects, and every engine that does not answer as it must."""
    hold.check()
    record = _fleet_up(hold)
    async with connect(hold.paths, record.engines) as clients:
        states = await each(clients, lambda client: client.state(state_timeout))
    ailing = [*suspects]
    for client, state in zip(clients, states, strict=True):
        if client.engine not in ailing and _ails(client, state):
            ailing.append(client.engine)
    if not ailing:
        return
    try:
        await restart_engines(hold.paths, ailing, check=hold.check, timeout=timeout)
    except UnavailableError as error:
        raise _Failed(ailing, error) from error


def _fleet_up(hold: FleetHold) -> FleetRecord:
    record = load_fleet(hold.paths)
    if record.state != "up" or not record.engines:
        raise UnavailableError(f"fleet {record.name} is {record.state}", "start it with evalkit fleet up")
    return record


def _ails(client: EngineClient, state: EngineState | BaseException) -> bool:
    if isinstance(state, EngineFailedError):
        return True
    if isinstance(state, BaseException):
        raise state
    return state.engine_id != client.engine.engine_id or state.broken is not None


async def _attempt(hold: FleetHold, target: PinTarget, load_timeout: float, drain_timeout: float) -> PinProof:
    epoch = hold.next_epoch()
    record = _fleet_up(hold)
    request = {
        "fleet": record.name,
        "epoch": epoch,
        "path": str(target.path),
        "version": target.version,
        "digest": target.digest,
        "drain_timeout": drain_timeout,
        "load_timeout": load_timeout,
    }
    timeout = load_timeout + drain_timeout + ANSWER_SLACK
    async with connect(hold.paths, record.engines) as clients:
        pinned = _all(clients, await each(clients, lambda client: _pin_one(client, request, target, timeout)))
        _all(clients, await each(clients, lambda client: client.probe(PROBE_TIMEOUT)))
    hold.change(
        lambda record: msgspec.structs.replace(record, pinned=str(target.path), pinned_export_id=target.export_id)
    )
    return PinProof(
        epoch=epoch, version=target.version, digest=target.digest, served_model=record.served_model, engines=pinned
    )


def _all(clients: Sequence[EngineClient], answers: Sequence[A | BaseException]) -> list[A]:
    """The answers, when all are; else what the errors among them mean for the attempt."""
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    done = [answer for answer in answers if not isinstance(answer, BaseException)]
    # When others have loaded what one refuses, the snapshot is not what is wrong, and the fleet is of two minds.
    mended = (EngineFailedError, DataError) if done else (EngineFailedError,)
    for kind in (BusyError, DataError, BaseException):
        for error in errors:
            if isinstance(error, kind) and not isinstance(error, mended):
                raise error
    failed = [(c.engine, a) for c, a in zip(clients, answers, strict=True) if isinstance(a, mended)]
    if failed:
        raise _Failed([engine for engine, _ in failed], failed[0][1])
    return done


async def _pin_one(client: EngineClient, request: dict[str, object], target: PinTarget, timeout: float) -> PinnedEngine:
    """Pin one engine, and compare what each rank and then the engine itself says with the target."""
    reply = await client.pin(request, timeout)
    state = await client.state()
    wrong = _difference(client.engine, reply, state, request["epoch"], target)
    if wrong:
        raise EngineFailedError(f"{client.name} is not on version {target.version}: {wrong}", wrong_weights=True)
    return PinnedEngine(
        index=client.engine.index, url=client.engine.url, nonce=reply.nonce, ranks=len(reply.ranks), vllm=state.vllm
    )


def _difference(engine: EngineRecord, reply: PinReply, state: EngineState, epoch: object, target: PinTarget) -> str:
    if len(reply.ranks) != engine.tensor_parallel:
        return f"{len(reply.ranks)} of {engine.tensor_parallel} ranks answered"
    for rank in reply.ranks:
        if (rank.version, rank.digest) != (target.version, target.digest):
            return f"rank {rank.rank} holds version {rank.version} with digest {rank.digest}, not {target.digest}"
    if state.pin is None or (state.pin.version, state.pin.digest) != (target.version, target.digest):
        return f"it says that it is on {state.pin}"
    if (state.nonce, state.pin.epoch, state.engine_id) != (reply.nonce, epoch, engine.engine_id):
        return "another boot of it answered, or another pin came between"
    return ""


@contextlib.contextmanager
def pin_target(run_dir: Path, name: str, snapshot_dir: Path | None) -> Iterator[PinTarget]:
    """What `name` means as something to pin; kept from being retired as long as the context lasts.

    Args:
        name: a name in SNAPSHOT_DIR or a path.
        snapshot_dir: None for the run's.

    Raises:
        UsageError: it is a name, and no SNAPSHOT_DIR is known.
        NoSnapshotError: it is not there, or lies in SNAPSHOT_DIR and is not complete.
        DataError: its weights can't be read.
    """
    run = RunPaths(run_dir.absolute())
    record = find_run(run.root)
    directory = snapshot_dir_of(record, snapshot_dir)
    path = resolve_snapshot(name, directory)
    inside = directory is not None and path.parent.resolve() == directory.resolve()
    snapshot = open_snapshot(path, need_marker=inside)
    with contextlib.ExitStack() as used:
        if inside and snapshot.export_id is not None:
            used.callback(os.close, use_snapshot(path.parent, snapshot.export_id))
        yield PinTarget(
            path=snapshot.path,
            version=str(snapshot.step) if snapshot.step is not None else snapshot.path.name,
            digest=known_digest(run, snapshot),
            export_id=snapshot.export_id,
        )


def pin_verb(
    run_dir: Path,
    snapshot: str,
    *,
    snapshot_dir: Path | None,
    fleet: str | None,
    timeout: float,
    load_timeout: float,
    progress: Progress = lambda text: None,
) -> Result:
    """Take the fleet, waiting at most `timeout` seconds for it, and pin `snapshot` on it; see `pin_engines`."""
    run = RunPaths(run_dir.absolute())
    record = find_run(run.root)
    paths = run.fleet(fleet_name(record, fleet))
    load_fleet(paths)
    with pin_target(run_dir, snapshot, snapshot_dir) as target, hold_fleet(paths, timeout=timeout) as hold:
        proof = asyncio.run(pin_engines(hold, target, load_timeout=load_timeout, progress=progress))
    head = f"version {proof.version}  digest {proof.digest}  epoch {proof.epoch}"
    engines = [f"{e.index}  {e.url}  pinned {proof.version}  ranks {e.ranks}" for e in proof.engines]
    data = {"snapshot": str(target.path), "fleet": paths.name, **msgspec.to_builtins(proof)}
    return Result(data, [head, *engines])
