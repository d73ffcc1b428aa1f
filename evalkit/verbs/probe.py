"""Ask every engine of a fleet for one real token."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass

from evalkit.adapters.engine import EngineClient, EngineFailedError, connect
from evalkit.ground.errors import UnavailableError
from evalkit.ground.layout import FleetPaths
from evalkit.ground.result import Result
from evalkit.state.fleet import load_fleet


@dataclass(frozen=True)
class Probed:
    """One engine's answer; `ms` is None where it is not ready, and `detail` says why."""

    index: int
    url: str
    ready: bool
    ms: float | None = None
    detail: str = ""

    def line(self) -> str:
        answer = f"ready  {self.ms:.0f} ms" if self.ms is not None else f"not ready  {self.detail}"
        return f"{self.index}  {self.url}  {answer}"


def probe_verb(paths: FleetPaths, *, timeout: float) -> Result:
    """One token from each engine at once; the code is UnavailableError's if any is not ready.

    Args:
        timeout: seconds for a token.

    Raises:
        UnavailableError: there is no such fleet, or it is down.
    """
    record = load_fleet(paths)
    if not record.engines:
        raise UnavailableError(f"fleet {record.name} is {record.state}", "start it with evalkit fleet up")

    async def ask_all() -> list[Probed]:
        async with connect(paths, record.engines) as clients:
            return list(await asyncio.gather(*(_ask(client, timeout) for client in clients)))

    answers = asyncio.run(ask_all())
    ready = all(answer.ready for answer in answers)
    data = {"fleet": record.name, "ready": ready, "engines": [asdict(answer) for answer in answers]}
    return Result(data, [answer.line() for answer in answers], 0 if ready else UnavailableError.code)


async def _ask(client: EngineClient, timeout: float) -> Probed:
    engine = client.engine
    try:
        reply = await client.probe(timeout)
    except EngineFailedError as error:
        return Probed(engine.index, engine.url, ready=False, detail=error.message)
    return Probed(engine.index, engine.url, ready=True, ms=reply.ms)
