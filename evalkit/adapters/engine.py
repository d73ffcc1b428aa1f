"""The control client of one engine: the HTTP of the agent that runs inside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from evalkit.ground.errors import BusyError, DataError, UnavailableError
from evalkit.ground.layout import FleetPaths
from evalkit.ground.schema import EngineRecord

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T", bound=msgspec.Struct)
A = TypeVar("A")

KEY_HEADER = "x-evalkit-key"
STATE_TIMEOUT = 15.0  # seconds; a busy server may take a while, a stopped one never answers
ANSWER_SLACK = 30.0  # seconds that an answer may take beyond the deadlines given with the request


class EnginePin(msgspec.Struct, frozen=True):
    """What an engine says it is pinned on."""

    version: str
    digest: str
    epoch: int
    path: str = ""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """What `GET /evalkit/state` answers."""

    engine_id: str
    nonce: str
    epoch: int
    pin: EnginePin | None
    broken: str | None = None
    pinning: bool = False
    in_flight: int = 0
    vllm: str = ""


class RankProof(msgspec.Struct, frozen=True):
    """What one rank read back after a load."""

    rank: int
    version: str
    digest: str


class PinReply(msgspec.Struct, frozen=True, kw_only=True):
    """What `POST /evalkit/pin` answers when it has loaded."""

    nonce: str
    epoch: int
    pin: EnginePin
    ranks: list[RankProof]


class ProbeReply(msgspec.Struct, frozen=True):
    token: str | int
    ms: float


class EngineFailedError(UnavailableError):
    """An engine does not answer as it must, or holds no whole weights: it has to be restarted.

    Attributes:
        wrong_weights: it loaded other weights than it was told.
        refused_connection: nobody listens at its address.
    """

    def __init__(self, message: str, *, wrong_weights: bool = False, refused_connection: bool = False) -> None:
        super().__init__(message, "evalkit pin restarts it, evalkit fleet logs shows why")
        self.wrong_weights = wrong_weights
        self.refused_connection = refused_connection


class EngineClient:
    """Calls the agent of one engine. Every error names the engine."""

    def __init__(self, session: aiohttp.ClientSession, engine: EngineRecord, key: str) -> None:
        self._session = session
        self._key = key
        self.engine = engine
        self.name = f"engine {engine.index} ({engine.url})"

    async def state(self, timeout: float = STATE_TIMEOUT) -> EngineState:
        """Raises EngineFailedError."""
        status, body = await self._call("GET", "/evalkit/state", None, timeout)
        if status != 200:
            raise self._failed(status, body)
        return self._decode(body, EngineState)

    async def pin(self, request: dict[str, Any], timeout: float) -> PinReply:
        """Pin under the epoch in `request`.

        Raises:
            DataError: the engine refused the snapshot and keeps its old pin.
            BusyError: the engine knows a higher epoch.
            UnavailableError: the engine does not take such a request.
            EngineFailedError: anything else; the engine must be restarted.
        """
        status, body = await self._call("POST", "/evalkit/pin", request, timeout)
        if status == 200:
            return self._decode(body, PinReply)
        error, detail = _explain(body)
        if status == 409 and error == "stale_epoch":
            raise BusyError(f"{self.name} was claimed by somebody else under a later epoch", "run the command again")
        if status == 400:  # the request is wrong, not the engine
            raise UnavailableError(f"{self.name} can't be asked for this pin: {detail}")
        if status == 422 and error == "refused":
            raise DataError(f"{self.name} refused the snapshot: {detail}")
        raise self._failed(status, body, wrong_weights=error == "digest_mismatch")

    async def probe(self, timeout: float) -> ProbeReply:
        """One real token. Raises EngineFailedError."""
        status, body = await self._call("POST", "/evalkit/probe", {"timeout": timeout}, timeout + ANSWER_SLACK / 10)
        if status != 200:
            raise self._failed(status, body)
        return self._decode(body, ProbeReply)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> tuple[int, bytes]:
        import aiohttp

        try:
            async with self._session.request(
                method,
                self.engine.url + path,
                json=body,
                headers={KEY_HEADER: self._key},
                timeout=aiohttp.ClientTimeout(total=timeout),
                allow_redirects=False,
            ) as response:
                return response.status, await response.read()
        except TimeoutError:
            raise EngineFailedError(f"{self.name} did not answer {path} within {timeout:g} s") from None
        except aiohttp.ClientConnectorError as error:
            why = error.os_error.strerror or error
            raise EngineFailedError(f"{self.name} can't be reached: {why}", refused_connection=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineFailedError(f"{self.name} broke off: {error or type(error).__name__}") from error

    def _decode(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise EngineFailedError(f"{self.name} gave an answer that can't be read: {error}") from error

    def _failed(self, status: int, body: bytes, *, wrong_weights: bool = False) -> EngineFailedError:
        error, detail = _explain(body)
        why = ": ".join(part for part in (error, detail) if part)
        return EngineFailedError(f"{self.name} answered {status} ({why})", wrong_weights=wrong_weights)


def _explain(body: bytes) -> tuple[str, str]:
    """The fields `error` and `detail` of an answer; for one that has none, its beginning."""
    try:
        answer = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace"), ""
    return str(answer.get("error", "")), str(answer.get("detail") or "")


def read_key(paths: FleetPaths) -> str:
    """The fleet's secret.

    Raises:
        UnavailableError: it is not there, or not ours to read.
    """
    try:
        return paths.key.read_text().strip()
    except (FileNotFoundError, PermissionError) as error:
        raise UnavailableError(
            f"the key of fleet {paths.name} can't be read: {error.strerror} ({paths.key})"
        ) from error


@asynccontextmanager
async def connect(paths: FleetPaths, engines: Sequence[EngineRecord]) -> AsyncIterator[list[EngineClient]]:
    """A client for each of these engines of the fleet."""
    import aiohttp

    key = read_key(paths)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield [EngineClient(session, engine, key) for engine in engines]


async def each(clients: list[EngineClient], call: Callable[[EngineClient], Awaitable[A]]) -> list[A | BaseException]:
    """`call` of every client at once; what it raised stands in the place of an answer."""
    return await asyncio.gather(*(call(client) for client in clients), return_exceptions=True)
