"""Show the engines of a fleet: how each is, and its log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from evalkit.adapters.engine import EngineClient, EngineFailedError, EngineState, connect
from evalkit.adapters.launcher import log_tail
from evalkit.ground.errors import UsageError
from evalkit.ground.layout import FleetPaths
from evalkit.ground.processes import is_alive, is_here
from evalkit.ground.result import Result
from evalkit.ground.schema import EngineRecord
from evalkit.state.fleet import load_fleet

STATUS_TIMEOUT = 5.0  # seconds until an engine that lives counts as hung
FOLLOW_POLL = 0.25  # seconds


@dataclass(frozen=True)
class EngineStatus:
    """One engine, as `evalkit fleet status` shows it.

    Attributes:
        state: `starting`, `unpinned`, `pinning`, `pinned`, `broken`, `hung` or `dead`.
        detail: why, where it is broken, hung or dead.
    """

    index: int
    url: str
    state: str
    version: str | None
    digest: str | None
    epoch: int | None
    in_flight: int | None
    gpus: list[str]
    cores: list[int]
    pid: int | None
    detail: str = ""

    def line(self) -> str:
        place = f"gpus {','.join(self.gpus)}" if self.gpus else f"cores {','.join(map(str, self.cores))}"
        state = f"pinned {self.version}" if self.state == "pinned" else self.state
        numbers = f"epoch {_or_dash(self.epoch)}  in flight {_or_dash(self.in_flight)}"
        return "  ".join(
            [str(self.index), self.url, state, numbers, place, f"pid {_or_dash(self.pid)}", self.detail]
        ).rstrip()


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def show_fleet(paths: FleetPaths) -> Result:
    """How each engine is. Raises UnavailableError when there is no such fleet."""
    record = load_fleet(paths)
    engines = asyncio.run(_ask_all(paths, record.engines)) if record.engines else []
    data = {
        "fleet": record.name,
        "state": record.state,
        "epoch": record.epoch,
        "model": record.model,
        "pinned": record.pinned,
        "engines": [asdict(engine) for engine in engines],
    }
    return Result(data, [engine.line() for engine in engines] or [f"fleet {record.name} is down"])


async def _ask_all(paths: FleetPaths, engines: list[EngineRecord]) -> list[EngineStatus]:
    async with connect(paths, engines) as clients:
        return list(await asyncio.gather(*(_ask(client) for client in clients)))


async def _ask(client: EngineClient) -> EngineStatus:
    engine = client.engine
    if engine.process and is_here(engine.process) and not is_alive(engine.process):
        return _status(engine, "dead", detail=f"see {engine.log}")
    try:
        return _told(engine, await client.state(STATUS_TIMEOUT))
    except EngineFailedError as error:
        if error.refused_connection:
            return _status(engine, "starting")
        return _status(engine, "hung", detail=error.message)


def _told(engine: EngineRecord, told: EngineState) -> EngineStatus:
    if told.engine_id != engine.engine_id:
        return _status(engine, "dead", detail=f"another engine answers at {engine.url}")
    if told.broken:
        return _status(engine, "broken", told, told.broken)
    if told.pinning:
        return _status(engine, "pinning", told)
    return _status(engine, "pinned" if told.pin else "unpinned", told)


def _status(engine: EngineRecord, state: str, told: EngineState | None = None, detail: str = "") -> EngineStatus:
    pin = told.pin if told else None
    return EngineStatus(
        index=engine.index,
        url=engine.url,
        state=state,
        version=pin.version if pin else None,
        digest=pin.digest if pin else None,
        epoch=told.epoch if told else None,
        in_flight=told.in_flight if told else None,
        gpus=engine.gpus,
        cores=engine.cores,
        pid=engine.process.pid if engine.process else None,
        detail=detail,
    )


def fleet_logs(paths: FleetPaths, *, engine: int | None, lines: int) -> Result:
    """The last lines of the engines' logs. Raises UsageError when there is no such engine."""
    logs = _logs(paths, engine)
    tails = {name: log_tail(path, lines=lines) for name, path in logs.items()}
    shown = [f"[{name}] {line}" if len(logs) > 1 else line for name, tail in tails.items() for line in tail]
    return Result({"logs": tails, "paths": {name: str(path) for name, path in logs.items()}}, shown)


def follow_logs(paths: FleetPaths, *, engine: int | None, lines: int) -> Iterator[str]:
    """The last lines, and then whatever is written, until the caller stops asking."""
    logs = _logs(paths, engine)
    positions = {name: path.stat().st_size for name, path in logs.items()}
    yield from fleet_logs(paths, engine=engine, lines=lines).lines
    while True:
        for name, path in logs.items():
            with path.open("rb") as log:
                log.seek(positions[name])
                new = log.read()
            whole = new[: new.rfind(b"\n") + 1]
            positions[name] += len(whole)
            prefix = f"[{name}] " if len(logs) > 1 else ""
            yield from (prefix + line for line in whole.decode(errors="replace").splitlines())
        time.sleep(FOLLOW_POLL)


def _logs(paths: FleetPaths, engine: int | None) -> dict[str, Path]:
    found = sorted(paths.logs.glob("engine-*.log"))
    logs = {path.stem.removeprefix("engine-"): path for path in found}
    if engine is not None:
        logs = {name: path for name, path in logs.items() if name == str(engine)}
    if not logs:
        which = f"engine {engine} of fleet {paths.name}" if engine is not None else f"fleet {paths.name}"
        raise UsageError(f"there is no log of {which} in {paths.logs}")
    return logs
