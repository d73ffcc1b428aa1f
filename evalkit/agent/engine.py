"""The engine as its agent sees it: what it is pinned to, whether it takes requests, and the pin itself.

Everything here runs on the API server's one event loop, so a step without `await` cannot be interrupted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from evalkit.agent.checks import BootModel
from evalkit.agent.messages import Pin, PinRequest, Reply
from evalkit.agent.settings import Settings
from evalkit.ground.errors import DataError

T = TypeVar("T")

# Below vLLM's own logger, so that pins appear in the engine's log.
log = logging.getLogger("vllm.evalkit")

CLOSED = "-"  # a stamp: no pin vouches for this moment


class BrokenError(Exception):
    """The weights are no longer known; only a restart helps."""


class Flight:
    """One request in flight.

    Attributes:
        arrival: the engine's stamp when the request came in.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lost = False
        self.arrival = engine.stamp

    @property
    def closing(self) -> str:
        """The stamp for an answer that goes out now; closed for ever once a load began while this was in flight."""
        return CLOSED if self._lost else self._engine.stamp

    def lose(self) -> None:
        self._lost = True


class Engine:
    """One vLLM engine, fenced by epochs.

    Args:
        client: vLLM's engine client.
        model: what the engine was started with.
        ranks: how many ranks it has.

    Attributes:
        nonce: random, of this boot.
        epoch: the highest epoch claimed here.
    """

    def __init__(self, client: Any, model: BootModel, ranks: int, settings: Settings) -> None:
        self.client = client
        self.model = model
        self.ranks = ranks
        self.settings = settings
        self.nonce = secrets.token_hex(8)
        self.epoch = settings.epoch
        self._pin: Pin | None = None
        self._phase: Literal["open", "draining", "loading"] = "open"
        self._broken: str | None = None
        self._pinning = False
        self._flights: set[Flight] = set()
        self._turn = asyncio.Lock()
        self._wake = asyncio.Event()  # the last flight landed, or a newer epoch was claimed
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def broken(self) -> str | None:
        """Why the engine needs a restart, or None."""
        return self._broken or ("vLLM's engine core has died" if self.client.errored else None)

    @property
    def closed(self) -> Literal["broken", "pinning", "unpinned"] | None:
        """Why the engine takes no requests, or None."""
        if self.broken:
            return "broken"
        if self._phase != "open":
            return "pinning"
        return "unpinned" if self._pin is None else None

    @property
    def pin_now(self) -> Pin | None:
        """The pin that vouches for the weights at this moment."""
        return None if self.broken or self._phase == "loading" else self._pin

    @property
    def stamp(self) -> str:
        """`nonce/epoch/digest` of the pin that vouches for this moment, or `-`."""
        pin = self.pin_now
        return f"{self.nonce}/{pin.epoch}/{pin.digest}" if pin else CLOSED

    def state(self) -> dict[str, Any]:
        from vllm import __version__

        return {
            "format": 1,
            "engine_id": self.settings.engine_id,
            "nonce": self.nonce,
            "epoch": self.epoch,
            "pin": self.pin_now,
            "open": self.closed is None,
            "pinning": self._pinning,
            "broken": self.broken,
            "in_flight": len(self._flights),
            "ranks": self.ranks,
            "vllm": __version__,
        }

    @contextmanager
    def flight(self) -> Iterator[Flight]:
        """Count a request as in flight."""
        flight = Flight(self)
        self._flights.add(flight)
        try:
            yield flight
        finally:
            self._flights.discard(flight)
            if not self._flights:
                self._wake.set()

    async def run_to_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` as a task of its own, which ends even when the caller goes away."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def pin(self, request: PinRequest) -> Reply:
        """Put the engine on a snapshot, as one piece.

        The epoch is claimed first and stays claimed whatever follows. A newer claim overtakes a pin that waits or
        drains; a pin that loads is let end. A refused snapshot leaves the old pin open, with its own epoch in its
        stamp. After the first weight any failure leaves the engine broken.
        """
        if request.epoch <= self.epoch:
            return self._stale(f"epoch {request.epoch} is not higher than {self.epoch}")
        self.epoch = request.epoch
        self._wake.set()
        async with self._turn:
            if self.broken:
                return Reply(503, {"error": "broken", "detail": self.broken})
            if self.epoch != request.epoch:
                return self._overtaken(request)
            self._pinning = True
            try:
                return await self._pin_in_turn(request)
            finally:
                self._pinning = False

    async def _pin_in_turn(self, request: PinRequest) -> Reply:
        clock = Stopwatch()
        try:
            await asyncio.wait_for(asyncio.to_thread(self.model.check, Path(request.path)), request.load_timeout)
        except TimeoutError:
            return self._refused(request, f"{request.path} could not be read within {request.load_timeout:g} s")
        except (DataError, OSError) as error:
            return self._refused(request, str(error))
        clock.lap("check")
        self._phase = "draining"
        await self._drain(request)
        clock.lap("drain")
        if self.epoch != request.epoch:
            self._phase = "open"
            return self._overtaken(request)
        return await self._swap_or_break(request, clock)

    async def _drain(self, request: PinRequest) -> None:
        end = time.monotonic() + request.drain_timeout
        while self._flights and self.epoch == request.epoch:
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), end - time.monotonic())
            except TimeoutError:
                return

    async def _swap_or_break(self, request: PinRequest, clock: Stopwatch) -> Reply:
        swap = self.run_to_end(self._swap(request, clock))
        try:
            return await asyncio.wait_for(swap, request.load_timeout)
        except TimeoutError:
            return self._break(f"loading {request.path} took longer than {request.load_timeout:g} s")
        except Exception as error:  # whatever failed in vLLM, the weights are unknown from here on
            log.exception("evalkit: the load of %s failed", request.path)
            return self._break(f"loading {request.path} failed: {error}")

    async def _swap(self, request: PinRequest, clock: Stopwatch) -> Reply:
        self._phase = "loading"
        for flight in self._flights:
            flight.lose()
        await self.client.pause_generation(mode="abort")
        clock.lap("pause")
        loads = await self._on_ranks("evalkit_load", path=request.path, version=request.version)
        refused = [load["refused"] for load in loads if "refused" in load]
        if len(refused) == len(loads):
            await self.client.resume_generation()
            self._phase = "open"
            return self._refused(request, refused[0])
        if refused:
            raise BrokenError(f"only some ranks refused it: {refused[0]}")
        clock.lap("load")
        stamps = await self._on_ranks("evalkit_stamp")
        wrong = [stamp for stamp in stamps if stamp.get("digest") != request.digest]
        if wrong:
            detail = (
                f"rank {wrong[0]['rank']} loaded {wrong[0].get('digest')} from {request.path}, not {request.digest}"
            )
            self._break(detail)
            return Reply(422, {"error": "digest_mismatch", "detail": detail, "ranks": stamps})
        if not await self.client.reset_prefix_cache(reset_connector=self._has_connector):
            raise BrokenError("vLLM did not drop its prefix cache")
        clock.lap("verify")
        return await self._reopen(request, stamps, clock)

    async def _reopen(self, request: PinRequest, stamps: list[dict[str, Any]], clock: Stopwatch) -> Reply:
        await self.client.resume_generation()
        if self._broken:  # the deadline passed meanwhile and said so to the caller
            raise BrokenError(self._broken)
        self._pin = Pin(request.version, request.digest, request.epoch, request.path, request.fleet)
        self._phase = "open"
        clock.lap("open")
        log.info("evalkit: pinned %s, took %s ms", self._pin, clock.laps)
        body = {"format": 1, "nonce": self.nonce, "epoch": request.epoch, "pin": self._pin, "ranks": stamps}
        return Reply(200, {**body, "ms": clock.laps})

    @property
    def _has_connector(self) -> bool:
        return self.client.vllm_config.kv_transfer_config is not None

    async def _on_ranks(self, method: str, **kwargs: Any) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = await self.client.collective_rpc(method, kwargs=kwargs)
        if len(results) != self.ranks:
            raise BrokenError(f"{len(results)} of {self.ranks} ranks answered {method}")
        return results

    def _break(self, detail: str) -> Reply:
        self._broken = self._broken or detail
        log.error("evalkit: this engine is broken and needs a restart: %s", detail)
        return Reply(503, {"error": "broken", "detail": detail})

    def _refused(self, request: PinRequest, detail: str) -> Reply:
        log.warning("evalkit: refused version %s: %s", request.version, detail)
        return Reply(422, {"error": "refused", "detail": detail})

    def _overtaken(self, request: PinRequest) -> Reply:
        return self._stale(f"epoch {self.epoch} was claimed while the pin of epoch {request.epoch} waited")

    def _stale(self, detail: str) -> Reply:
        return Reply(409, {"error": "stale_epoch", "epoch": self.epoch, "detail": detail})


class Stopwatch:
    """Milliseconds from one lap to the next, by name."""

    def __init__(self) -> None:
        self.laps: dict[str, int] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = round((now - self._last) * 1000)
        self._last = now
