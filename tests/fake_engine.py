"""An engine without a model, to inject faults: it speaks the HTTP of vLLM's server with evalkit's agent inside.

Run as a process: `python tests/fake_engine.py --port 0 --port-file F --key-file K [--fault JSON]`.

It answers a prompt that ends in "12+30=" with the sum, "version=" with the pinned version, and anything else with the
prompt itself; one character is one token. With a temperature above 0 an odd seed makes the sum wrong by one.

Faults, set by --fault, else by FAKE_ENGINE_FAULTS, later by `POST /fake/faults` (merged into those set before; null
takes one away, {"clear": true} all of them, lets go what hangs, and empties the log):
  hang true             /v1 requests and probes wait until {"release": true}
  hold true             /v1 requests alone wait so
  hang_after N          from the N-th /v1 request on they wait
  delay S               seconds before each /v1 answer
  status C, count N     the next N /v1 requests (all, without count) are answered with C
  reset N               the next N /v1 connections are cut before an answer
  die_after N           the process ends hard at the N-th /v1 request
  stamp TEXT            "other": another digest, "none": no stamp, else the stamp itself; the next `stamp_count` answers
  poison TEXT           requests with this prompt are answered with 500; slow TEXT: they wait as with hang
  garbage true          /v1 answers are no JSON
  finish TEXT           finish_reason of every answer
  pin_hang true         a pin waits for {"release": true}; pin_delay S: seconds before it
  pin_error {status, error, detail}   a pin is refused so; `pin_error_count`: the next N only
  pin_break true        a pin fails after its first weight: broken from then on
  pin_digest TEXT       the weights have this digest; `pin_digest_count`: for the next N pins only
  probe_error {status, error, detail}, state_error {status, error, detail}
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import itertools
import json
import os
import re
import secrets
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from evalkit.ground.errors import EvalkitError
from evalkit.ground.files import write_atomic
from evalkit.ground.tensors import digest_of, read_headers

PIN_HEADER = "x-evalkit-pin"
KEY_HEADER = "x-evalkit-key"
CLOSED = "-"


class FakeEngine:
    """One engine's state, faults and log of what it was asked."""

    def __init__(self, key: str, faults: dict[str, Any]) -> None:
        self.key = key
        self.engine_id = os.environ.get("EVALKIT_ENGINE_ID", "fake")
        self.nonce = secrets.token_hex(8)
        self.epoch = int(os.environ.get("EVALKIT_ENGINE_EPOCH", "0"))
        self.pin: dict[str, Any] | None = None
        self.phase = "open"
        self.broken: str | None = None
        self.pinning = False
        self.faults = faults
        self.release = asyncio.Event()
        self.turn = asyncio.Lock()
        self.flights: dict[int, bool] = {}  # id, and whether a load began while it was in flight
        self.max_in_flight = 0
        self.served = 0
        self.numbers = itertools.count()
        self.requests: list[dict[str, Any]] = []
        self.pins: list[dict[str, Any]] = []
        self.started = time.monotonic()

    @property
    def closed(self) -> str | None:
        if self.broken:
            return "broken"
        if self.phase != "open":
            return "pinning"
        return "unpinned" if self.pin is None else None

    @property
    def pin_now(self) -> dict[str, Any] | None:
        return None if self.broken or self.phase == "loading" else self.pin

    def stamp(self) -> str:
        return f"{self.nonce}/{self.pin_now['epoch']}/{self.pin_now['digest']}" if self.pin_now else CLOSED

    def take(self, fault: str, count: str) -> Any:
        """The value of `fault`, used up once where `count` says how often it holds."""
        value = self.faults.get(fault)
        if value is None or count not in self.faults:
            return value
        self.faults[count] -= 1
        if self.faults[count] <= 0:
            del self.faults[fault], self.faults[count]
        return value

    def state(self) -> dict[str, Any]:
        return {
            "format": 1,
            "engine_id": self.engine_id,
            "nonce": self.nonce,
            "epoch": self.epoch,
            "pin": self.pin_now,
            "open": self.closed is None,
            "pinning": self.pinning,
            "broken": self.broken,
            "in_flight": len(self.flights),
            "ranks": 1,
            "vllm": "fake",
        }

    async def wait_released(self) -> None:
        self.release.clear()
        await self.release.wait()


ENGINE: web.AppKey[FakeEngine] = web.AppKey("engine", FakeEngine)


def refuse(status: int, error: str, detail: str = "", **more: Any) -> web.Response:
    return web.json_response({"error": error, "detail": detail, **more}, status=status)


def openai_error(status: int, message: str, kind: str = "fault") -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status
    )


@web.middleware
async def gate(request: web.Request, handler: Any) -> web.StreamResponse:
    engine = request.app[ENGINE]
    if request.path.startswith("/evalkit/") and not hmac.compare_digest(
        request.headers.get(KEY_HEADER, ""), engine.key
    ):
        return refuse(401, "unauthorized", "the header x-evalkit-key is not the key")
    if request.path in ("/v1/completions", "/v1/chat/completions"):
        return await serve(engine, request, handler)
    if request.path == "/health" and engine.closed:
        return closed(engine)
    return await handler(request)


def closed(engine: FakeEngine) -> web.Response:
    return openai_error(503, engine.broken or f"the engine is {engine.closed}", str(engine.closed))


async def serve(engine: FakeEngine, request: web.Request, handler: Any) -> web.StreamResponse:
    """One /v1 request with the faults that befall it, stamped as it came in and as its answer went out."""
    entry = {"path": request.path, "body": await request.json(), "at": time.monotonic() - engine.started}
    engine.requests.append(entry)
    engine.served += 1
    before = engine.stamp()
    flight = next(engine.numbers)
    engine.flights[flight] = False
    entry["in_flight"] = len(engine.flights)
    engine.max_in_flight = max(engine.max_in_flight, len(engine.flights))
    try:
        response = closed(engine) if engine.closed else await befall(engine, request, handler)
        entry["status"] = response.status
        mark(engine, response, before, CLOSED if engine.flights[flight] else engine.stamp())
        return response
    except asyncio.CancelledError:
        entry["status"] = "cancelled"
        raise
    finally:
        del engine.flights[flight]


def mark(engine: FakeEngine, response: web.StreamResponse, before: str, after: str) -> None:
    stamp = engine.take("stamp", "stamp_count")
    if stamp == "none":
        return
    if stamp == "other":
        stamp = f"{engine.nonce}/{engine.epoch}/{'0' * 64} {engine.nonce}/{engine.epoch}/{'0' * 64}"
    response.headers[PIN_HEADER] = stamp or f"{before} {after}"


async def befall(engine: FakeEngine, request: web.Request, handler: Any) -> web.StreamResponse:
    faults = engine.faults
    if engine.served >= faults.get("die_after", float("inf")):
        os._exit(1)
    if faults.get("reset", 0) > 0:
        faults["reset"] -= 1
        assert request.transport is not None
        request.transport.abort()
        return refuse(500, "cut")
    if faults.get("hang") or faults.get("hold") or engine.served >= faults.get("hang_after", float("inf")):
        await engine.wait_released()
    prompt = (await request.json()).get("prompt")
    if prompt is not None and prompt == faults.get("slow"):
        await engine.wait_released()
    if prompt is not None and prompt == faults.get("poison"):
        return openai_error(500, "fault 500")
    if "delay" in faults:
        await asyncio.sleep(faults["delay"])
    status = engine.take("status", "count")
    if status is not None:
        return openai_error(status, f"fault {status}")
    if faults.get("garbage"):
        return web.Response(text="<html>bad gateway</html>", content_type="text/html")
    return await handler(request)


def answer(engine: FakeEngine, prompt: str, body: dict[str, Any]) -> tuple[str, str]:
    """The text and its finish_reason."""
    text = prompt
    if prompt.endswith("version="):
        text = str((engine.pin or {}).get("version"))
    elif match := re.search(r"(\d+)\+(\d+)=$", prompt):
        wrong = body.get("temperature", 1.0) > 0 and (body.get("seed") or 0) % 2
        text = str(int(match[1]) + int(match[2]) + (1 if wrong else 0))
    finish = "stop"
    for stop in [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []:
        text = text.partition(stop)[0]
    if len(text) > (body.get("max_tokens") or 16):
        text, finish = text[: body.get("max_tokens") or 16], "length"
    return text, engine.faults.get("finish", finish)


async def complete(request: web.Request) -> web.Response:
    engine, body = request.app[ENGINE], await request.json()
    chat = request.path.endswith("/chat/completions")
    prompt = body["messages"][-1]["content"] if chat else body["prompt"]
    if body.get("n", 1) > 1 and body.get("temperature", 1.0) == 0:
        return openai_error(400, "n must be 1 when using greedy sampling", "BadRequestError")
    if len(prompt) > 10_000:
        return openai_error(400, "maximum context length is 10000 tokens", "BadRequestError")
    text, finish = answer(engine, prompt, body)
    content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(text), "total_tokens": len(prompt) + len(text)}
    choice = {"index": 0, "finish_reason": finish, **content}
    return web.json_response({"id": "fake", "model": body["model"], "choices": [choice], "usage": usage})


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})


async def health(request: web.Request) -> web.Response:
    return web.Response()


async def state(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    if fault := engine.faults.get("state_error"):
        return refuse(fault["status"], fault.get("error", "fault"), fault.get("detail", ""))
    return web.json_response(engine.state())


async def pin(request: web.Request) -> web.Response:
    engine, body = request.app[ENGINE], await request.json()
    engine.pins.append(body)
    if body["epoch"] <= engine.epoch:
        return refuse(409, "stale_epoch", f"epoch {body['epoch']} is not higher", epoch=engine.epoch)
    engine.epoch = body["epoch"]
    # As in the real agent, a pin runs to its end even when its caller goes away.
    return await asyncio.shield(asyncio.ensure_future(pin_in_turn(engine, body)))


async def pin_in_turn(engine: FakeEngine, body: dict[str, Any]) -> web.Response:
    async with engine.turn:
        if engine.broken:
            return refuse(503, "broken", engine.broken)
        if engine.epoch != body["epoch"]:
            return refuse(409, "stale_epoch", "overtaken", epoch=engine.epoch)
        engine.pinning = True
        try:
            return await load(engine, body)
        finally:
            engine.pinning = False


async def load(engine: FakeEngine, body: dict[str, Any]) -> web.Response:
    faults = engine.faults
    if fault := engine.take("pin_error", "pin_error_count"):
        return refuse(fault["status"], fault.get("error", "fault"), fault.get("detail", ""))
    try:
        digest = engine.take("pin_digest", "pin_digest_count") or digest_of_directory(Path(body["path"]))
    except (EvalkitError, OSError) as error:
        return refuse(422, "refused", str(error))
    engine.phase = "draining"
    end = time.monotonic() + body.get("drain_timeout", 5)
    while engine.flights and time.monotonic() < end:
        await asyncio.sleep(0.005)
    engine.phase = "loading"
    engine.flights = dict.fromkeys(engine.flights, True)
    engine.release.set()  # aborted
    if faults.get("pin_hang"):
        await engine.wait_released()
    await asyncio.sleep(faults.get("pin_delay", 0))
    if faults.get("pin_break"):
        return broken(engine, "the load failed after its first weight")
    ranks = [{"rank": 0, "version": body["version"], "digest": digest}]
    if body.get("digest") not in (None, digest):
        broken(engine, f"rank 0 loaded {digest}, not {body['digest']}")
        return refuse(422, "digest_mismatch", engine.broken or "", ranks=ranks)
    engine.pin = {**{name: body.get(name, "") for name in ("version", "epoch", "path", "fleet")}, "digest": digest}
    engine.phase = "open"
    return web.json_response(
        {"format": 1, "nonce": engine.nonce, "epoch": engine.epoch, "pin": engine.pin, "ranks": ranks, "ms": {}}
    )


def broken(engine: FakeEngine, detail: str) -> web.Response:
    engine.broken = detail
    return refuse(503, "broken", detail)


def digest_of_directory(directory: Path) -> str:
    import blake3

    contents = {}
    for name, header in read_headers(directory).items():
        with (directory / header.file).open("rb") as file:
            file.seek(header.start)
            data = file.read(header.end - header.start)
        contents[name] = (header.dtype, header.shape, blake3.blake3(data).hexdigest())
    return digest_of(contents)


async def probe(request: web.Request) -> web.Response:
    engine, body = request.app[ENGINE], await request.json()
    if fault := engine.faults.get("probe_error"):
        return refuse(fault["status"], fault.get("error", "fault"), fault.get("detail", ""))
    if engine.closed in ("broken", "pinning"):
        return refuse(503, str(engine.closed), engine.broken or "a pin is under way")
    if engine.faults.get("hang"):
        try:
            await asyncio.wait_for(engine.wait_released(), body.get("timeout", 30))
        except TimeoutError:
            return refuse(503, "timeout", f"no token within {body.get('timeout', 30):g} s")
    return web.json_response({"format": 1, "token": 1, "ms": 0, "nonce": engine.nonce, "pin": engine.pin_now})


async def set_faults(request: web.Request) -> web.Response:
    engine, body = request.app[ENGINE], await request.json()
    if body.pop("clear", False):
        engine.faults.clear()
        engine.release.set()
        engine.requests, engine.pins, engine.served, engine.max_in_flight = [], [], 0, 0
    if body.pop("release", False):
        engine.faults.pop("hang", None)
        engine.faults.pop("hold", None)
        engine.faults.pop("hang_after", None)
        engine.faults.pop("pin_hang", None)
        engine.release.set()
    for name, value in body.items():
        if value is None:
            engine.faults.pop(name, None)
        else:
            engine.faults[name] = value
    return web.json_response(engine.faults)


async def log(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    counts = {"served": engine.served, "in_flight": len(engine.flights), "max_in_flight": engine.max_in_flight}
    return web.json_response({**counts, "requests": engine.requests, "pins": engine.pins, "stamp": engine.stamp()})


def application(key: str, faults: dict[str, Any]) -> web.Application:
    app = web.Application(middlewares=[gate])
    app[ENGINE] = FakeEngine(key, faults)
    app.add_routes(
        [
            web.post("/v1/completions", complete),
            web.post("/v1/chat/completions", complete),
            web.get("/v1/models", models),
            web.get("/health", health),
            web.get("/evalkit/state", state),
            web.post("/evalkit/pin", pin),
            web.post("/evalkit/probe", probe),
            web.post("/fake/faults", set_faults),
            web.get("/fake/log", log),
        ]
    )
    return app


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--key-file", type=Path, required=True)
    parser.add_argument("--fault", type=json.loads, default=os.environ.get("FAKE_ENGINE_FAULTS", "{}"))
    args = parser.parse_args()
    runner = web.AppRunner(application(args.key_file.read_text().strip(), args.fault), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, args.host, args.port, backlog=1024)
    await site.start()
    write_atomic(args.port_file, str(runner.addresses[0][1]).encode())
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
