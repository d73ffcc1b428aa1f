"""Asking engines for answers: spread over all of them, retried, and counted only when made under the pin."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from types import TracebackType

import aiohttp

from evalkit.adapters.completions import Answer, AskAgain, Request, WrongPin, read_answer
from evalkit.ground.errors import PinViolationError, UnavailableError
from evalkit.ground.schema import PinnedEngine, PinProof


@dataclass(frozen=True)
class Limits:
    """How long to hope.

    Attributes:
        attempts: requests for one sample that may fail before the sample does.
        timeouts: so many times the sample's timeout may pass before the sample fails.
        wrong: answers in turn under another pin before the engine counts as lost to it.
        pause, longest_pause: seconds after the first failure, doubled each time up to the longest.
        engine_lost: seconds that an engine may go on failing, without one answer, before it counts as lost.
    """

    attempts: int = 6
    timeouts: int = 2
    wrong: int = 3
    pause: float = 0.1
    longest_pause: float = 5.0
    engine_lost: float = 30.0

    def pause_after(self, failures: int) -> float:
        longest = min(self.pause * 2.0 ** min(failures - 1, 30), self.longest_pause)
        return longest * random.uniform(0.75, 1.0)


LIMITS = Limits()
HEALTH_TIMEOUT = 5.0  # seconds


@dataclass
class _Engine:
    """One engine, and how it has done since its last good answer."""

    pinned: PinnedEngine
    stamp: str
    in_flight: int = 0
    asked: int = 0
    failures: int = 0
    wrong: int = 0
    failing_since: float = 0.0
    failed_at: float = 0.0
    closed_until: float = 0.0
    on_trial: bool = False
    why: AskAgain | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return f"engine {self.pinned.index} ({self.pinned.url})"

    @property
    def failing_for(self) -> float:
        """Seconds from its first to its last failure without an answer between; long answers don't count as failing."""
        return self.failed_at - self.failing_since if self.failures else 0.0

    def is_open(self, now: float) -> bool:
        """Whether it may be asked: one that failed gets one request at a time, after a pause, until it answers."""
        return not self.failures or (now >= self.closed_until and not self.on_trial)

    def failed(self, why: AskAgain, started: float, now: float, limits: Limits) -> None:
        """Count a failure, once for all requests that were in flight together."""
        if not self.failures:
            self.failing_since = now
        elif started <= self.failed_at:
            return
        self.failures += 1
        self.wrong += isinstance(why, WrongPin)
        self.why, self.failed_at = why, now
        self.closed_until = now + limits.pause_after(self.failures)


class Engines:
    """The engines of a proof, as one thing to ask. An async context manager.

    Args:
        sample_timeout: seconds for one answer.
    """

    def __init__(self, proof: PinProof, *, sample_timeout: float, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.sample_timeout = sample_timeout
        self._engines = [_Engine(engine, f"{engine.nonce}/{proof.epoch}/{proof.digest}") for engine in proof.engines]
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Engines:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=self.sample_timeout),
            headers={"content-type": "application/json"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def ask(self, request: Request) -> Answer:
        """One answer made wholly under the pin, or one with the error that no further asking would mend.

        Raises:
            UnavailableError: no engine has answered for `engine_lost` seconds.
            PinViolationError: an engine keeps answering under another pin.
        """
        asked = failed = wrong = 0
        loop = asyncio.get_running_loop()
        end = loop.time() + self.limits.timeouts * self.sample_timeout
        engine: _Engine | None = None
        while True:
            engine = await self._free_engine(engine)
            asked += 1
            try:
                return await self._ask_engine(engine, request, asked)
            except WrongPin as error:
                wrong += 1
                if wrong >= self.limits.attempts:
                    raise self._violation(engine, error) from None
            except AskAgain as error:
                failed += 1
                given_up = failed >= self.limits.attempts or loop.time() >= end
                # While the engine itself is down the sample is not to blame, and waits for it or for another one.
                if given_up and await self._is_healthy(engine):
                    return Answer(engine=engine.pinned.index, asked=asked, error=str(error))
            if not self._others(engine):
                await asyncio.sleep(self.limits.pause_after(asked))

    async def _is_healthy(self, engine: _Engine) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT)
            async with self._session.get(f"{engine.pinned.url}/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            return False

    def _others(self, engine: _Engine) -> bool:
        now = asyncio.get_running_loop().time()
        return any(other.is_open(now) for other in self._engines if other is not engine)

    async def _free_engine(self, failed: _Engine | None) -> _Engine:
        """The open engine with the least in flight; that which has just failed the request only for want of another."""
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            self._check_lost()
            free = [engine for engine in self._engines if engine.is_open(now)]
            if free:
                return min(free, key=lambda engine: (engine is failed, engine.in_flight, engine.asked))
            opens = min(engine.closed_until for engine in self._engines)
            await asyncio.sleep(min(max(opens - now, 0.01), 0.5))

    def _check_lost(self) -> None:
        if all(engine.failing_for > self.limits.engine_lost for engine in self._engines):
            found = "; ".join(f"{engine.name}: {engine.why}" for engine in self._engines)
            raise UnavailableError(
                f"no engine answered for {self.limits.engine_lost:g} s: {found}", "see evalkit fleet status"
            )

    def _violation(self, engine: _Engine, error: AskAgain) -> PinViolationError:
        return PinViolationError(f"{engine.name} {error}", "somebody else has pinned it, or it was restarted")

    async def _ask_engine(self, engine: _Engine, request: Request, asked: int) -> Answer:
        loop = asyncio.get_running_loop()
        started = loop.time()
        engine.in_flight += 1
        engine.asked += 1
        trial = engine.on_trial = engine.failures > 0
        try:
            answer = await self._post(engine, request, asked)
        except AskAgain as error:
            engine.failed(error, started, loop.time(), self.limits)
            if engine.wrong >= self.limits.wrong:
                raise self._violation(engine, error) from None
            raise
        finally:
            engine.in_flight -= 1
            if trial:
                engine.on_trial = False
        engine.failures = engine.wrong = 0
        return answer

    async def _post(self, engine: _Engine, request: Request, asked: int) -> Answer:
        try:
            async with self._session.post(engine.pinned.url + request.path, data=request.body) as response:
                body = await response.read()
        except TimeoutError:
            raise AskAgain(f"no answer within {self.sample_timeout:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise AskAgain(f"{type(error).__name__}: {error}") from None
        return read_answer(response.status, response.headers, body, engine.stamp, engine.pinned.index, asked)
