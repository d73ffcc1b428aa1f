"""Engines of a fleet from start to ready: recorded before they run, watched until they answer, ended if one fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from evalkit.adapters import launcher
from evalkit.adapters.engine import EngineClient, EngineFailedError, connect
from evalkit.adapters.engine_processes import stop_engines, tmp_name
from evalkit.adapters.launcher import Launched
from evalkit.ground.errors import BusyError, UnavailableError
from evalkit.ground.layout import FleetPaths
from evalkit.ground.locks import open_locked
from evalkit.ground.processes import is_alive, this_process
from evalkit.ground.schema import EngineRecord, FleetRecord
from evalkit.state.fleet import change_fleet, load_fleet

Progress = Callable[[str], None]

POLL = 0.25  # seconds between looks at an engine that starts
POLL_TIMEOUT = 3.0  # seconds for one answer; who listens without answering is looked at again
TAIL = 20  # lines of the log of an engine that failed
PORT_TRIES = 3
FAILED_GRACE = 3.0  # seconds from SIGTERM to SIGKILL for engines of a start that failed


@dataclass
class _Start:
    """One start of some engines of a fleet.

    Attributes:
        begun: every engine that may run because of this start, in whatever moment it was interrupted.
        launched: those that run, by index.
    """

    paths: FleetPaths
    deadline: float
    timeout: float
    begun: list[EngineRecord] = field(default_factory=list)
    launched: dict[int, Launched] = field(default_factory=dict)

    def launch(self, engine: EngineRecord) -> None:
        """Record `engine` with a port of its own, then start it, then record its process."""
        old = self.launched.pop(engine.index, None)
        port = _reserve(engine)
        if old:
            old.port.close()
        url = launcher.engine_url(_host(engine), port.getsockname()[1])
        argv = launcher.with_port(engine.argv, port.getsockname()[1])
        engine = msgspec.structs.replace(engine, url=url, argv=argv, process=None)
        record = put_engine(self.paths, engine)
        self.begun.append(engine)
        launched = launcher.start_engine(self.paths, engine, port, least_epoch=record.epoch, cwd=record.cwd)
        self.launched[engine.index] = launched
        launched.engine = launcher.child_process(launched)
        put_engine(self.paths, launched.engine)

    def stop(self) -> None:
        stop_engines(self.begun, grace=FAILED_GRACE)

    def close(self) -> None:
        for launched in self.launched.values():
            launched.port.close()


def _host(engine: EngineRecord) -> str:
    return urlsplit(engine.url).hostname or "127.0.0.1"


def _reserve(engine: EngineRecord) -> socket.socket:
    """The port that the engine had, if it is still free, else another."""
    before = urlsplit(engine.url).port
    if before:
        with contextlib.suppress(OSError):
            return launcher.reserve_port(_host(engine), before)
    try:
        return launcher.reserve_port(_host(engine))
    except OSError as error:
        raise UnavailableError(f"no port can be had on {_host(engine)}: {error.strerror or error}") from error


def put_engine(paths: FleetPaths, engine: EngineRecord) -> FleetRecord:
    """Write one engine of the fleet into its record.

    Raises:
        UnavailableError: the fleet was brought down meanwhile.
    """

    def put(record: FleetRecord) -> FleetRecord:
        _require_wanted(record)
        others = [other for other in record.engines if other.index != engine.index]
        return msgspec.structs.replace(record, engines=sorted([*others, engine], key=lambda e: e.index))

    return change_fleet(paths, put)


def _require_wanted(record: FleetRecord) -> None:
    if record.state == "down":
        raise UnavailableError(f"fleet {record.name} was brought down meanwhile")


async def start_and_wait(
    paths: FleetPaths,
    to_start: Sequence[EngineRecord],
    running: Sequence[EngineRecord] = (),
    *,
    timeout: float,
    deadline: float | None = None,
    started: Callable[[], object] = lambda: None,
    progress: Progress = lambda text: None,
) -> None:
    """Start engines, and wait until these and the ones in `running` answer as themselves.

    The caller holds the launch lock. Whatever goes wrong, a signal included, the engines that were started here are
    ended before the error is raised.

    Args:
        to_start: as in the fleet record or planned for it; nothing of them runs.
        timeout: seconds for all of them.
        deadline: on the monotonic clock, where the timeout began before this call.
        started: called when all processes run.

    Raises:
        UnavailableError: one died (the end of its log is in the error's notes), was not up in time, or the fleet was
            brought down meanwhile.
    """
    start = _Start(paths, time.monotonic() + timeout if deadline is None else deadline, timeout)
    try:
        for engine in to_start:
            start.launch(engine)
        started()
        indices = [engine.index for engine in (*running, *to_start)]
        await _wait_all(start, indices, progress)
    except BaseException:
        start.stop()
        raise
    finally:
        start.close()


async def _wait_all(start: _Start, indices: Sequence[int], progress: Progress) -> None:
    began = time.monotonic()
    tasks = [asyncio.ensure_future(_wait_one(start, index)) for index in indices]
    try:
        pending = set(tasks)
        while pending:
            up = len(tasks) - len(pending)
            progress(f"{up} of {len(tasks)} engines up, {time.monotonic() - began:.0f} s")
            done, pending = await asyncio.wait(pending, timeout=1.0, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            _require_wanted(load_fleet(start.paths))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_one(start: _Start, index: int) -> None:
    tries = 1
    while not await _wait_up(start, index):
        tries += 1
        if tries > PORT_TRIES:
            raise UnavailableError(f"engine {index} lost its port to another process {PORT_TRIES} times")
        start.launch(renewed(start.launched[index].engine, keep_port=False))


async def _wait_up(start: _Start, index: int) -> bool:
    """Wait until engine `index` is up; False when it ended because somebody else has its port."""
    engine = next(engine for engine in load_fleet(start.paths).engines if engine.index == index)
    async with connect(start.paths, [engine]) as (client,):
        while True:
            alive, answer = _runs(start, engine), await _answer(client)
            if answer == engine.engine_id:
                return True
            if not alive:
                if index in start.launched and await _somebody_listens(engine):
                    return False
                raise _noted(start, engine, _end_of(start, engine))
            if time.monotonic() > start.deadline:
                raise _noted(start, engine, f"engine {index} was not up within {start.timeout:g} s ({answer})")
            await asyncio.sleep(POLL)


async def _answer(client: EngineClient) -> str:
    """The id of the engine that answers, or why none does."""
    try:
        return (await client.state(POLL_TIMEOUT)).engine_id
    except EngineFailedError as error:
        return error.message


def _runs(start: _Start, engine: EngineRecord) -> bool:
    launched = start.launched.get(engine.index)
    if launched:
        return launched.child.poll() is None
    return engine.process is not None and is_alive(engine.process)


async def _somebody_listens(engine: EngineRecord) -> bool:
    address = urlsplit(engine.url)
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(address.hostname, address.port), POLL_TIMEOUT)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _end_of(start: _Start, engine: EngineRecord) -> str:
    launched = start.launched.get(engine.index)
    code = f" with code {launched.child.returncode}" if launched else ""
    return f"engine {engine.index} ended{code} while it started"


def _noted(start: _Start, engine: EngineRecord, message: str) -> UnavailableError:
    """The error, with the end of the engine's log as a note."""
    launched = start.launched.get(engine.index)
    error = UnavailableError(message, f"see {engine.log}")
    lines = launcher.log_tail(Path(engine.log), lines=TAIL, offset=launched.log_offset if launched else 0)
    if lines:
        error.add_note("\n".join(lines))
    return error


def renewed(engine: EngineRecord, *, keep_port: bool = True) -> EngineRecord:
    """The same engine with a new identity, to be started again."""
    engine_id = secrets.token_hex(8)
    tmp = str(Path(engine.tmp).with_name(tmp_name(engine_id))) if engine.tmp else ""
    url = engine.url if keep_port else launcher.engine_url(_host(engine), 0)
    return msgspec.structs.replace(engine, engine_id=engine_id, tmp=tmp, url=url, process=None)


async def restart_engines(
    paths: FleetPaths, engines: Sequence[EngineRecord], *, check: Callable[[], None], timeout: float
) -> None:
    """End engines whole and start them again on their boot model, under new ids; the others are left alone.

    Args:
        engines: as they were found ailing; one that somebody has restarted since stays as it is.
        check: raises when the caller has lost its right to the fleet; called under the launch lock.
        timeout: seconds to wait for others who start or stop engines, and again for these to be up.

    Raises:
        UnavailableError: one does not come up (the others of this call are ended too), or the fleet was brought down.
        BusyError: engines of this fleet were being started or stopped by others for `timeout` seconds.
    """
    lock = await _launch_lock(paths, timeout)
    try:
        check()
        record = load_fleet(paths)
        _require_wanted(record)
        ailing = {engine.engine_id for engine in engines}
        current = [engine for engine in record.engines if engine.engine_id in ailing]
        require_here(current)
        await asyncio.to_thread(stop_engines, current)
        await start_and_wait(paths, [renewed(engine) for engine in current], timeout=timeout)
    finally:
        os.close(lock)


def require_here(engines: Sequence[EngineRecord]) -> None:
    """Raises UnavailableError when one of these engines, to be started or stopped, runs on another host."""
    for engine in engines:
        if engine.process and engine.process.host != this_process().host:
            raise UnavailableError(
                f"engine {engine.index} runs on {engine.process.host}", "start and stop the fleet's engines there"
            )


async def _launch_lock(paths: FleetPaths, timeout: float) -> int:
    deadline = time.monotonic() + timeout
    while (lock := open_locked(paths.launch_lock)) is None:
        if time.monotonic() > deadline:
            raise BusyError(f"engines of fleet {paths.name} were being started or stopped for {timeout:g} s")
        await asyncio.sleep(POLL)
    return lock
