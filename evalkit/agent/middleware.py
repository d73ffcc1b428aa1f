"""The agent's HTTP side, outermost in vLLM's API server: who may talk to the engine, when, and what its answers prove.

Control routes need the header `x-evalkit-key`:

    GET  /evalkit/state   who the engine is and what it is pinned to
    POST /evalkit/pin     see `evalkit.agent.messages.PinRequest` and `Engine.pin`
    POST /evalkit/probe   one real token

Of vLLM's own routes only those listed here are reachable; everything that could change the engine is not. While the
engine is unpinned, pinning or broken, generation and health answer 503.

Every answer under /v1 carries `x-evalkit-pin: ARRIVAL CLOSING`: the engine's stamp when the request came in and when
the answer went out, each `nonce/epoch/digest`, or `-` where no pin vouches: closed, or aborted by a pin. The answer was
made from one pin's weights alone if both are that pin's. A streamed answer sends its headers before it is made, so its
header says `ARRIVAL -`, and the stream ends in a comment `: x-evalkit-pin ARRIVAL CLOSING`.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import msgspec

from evalkit.agent.checks import BootModel, BootTensors
from evalkit.agent.engine import CLOSED, Engine, Flight, log
from evalkit.agent.messages import PinRequest, ProbeRequest, Reply
from evalkit.agent.probe import probe
from evalkit.agent.settings import read_settings
from evalkit.ground.errors import DataError, EvalkitError, UsageError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

GENERATION = {"/v1/completions", "/v1/chat/completions"}
HEALTH = {"/health", "/ping"}
ALWAYS = {"/v1/models", "/tokenize", "/detokenize", "/metrics", "/version", "/load"}

METHODS = {"/evalkit/state": "GET", "/evalkit/pin": "POST", "/evalkit/probe": "POST"}

KEY_HEADER = b"x-evalkit-key"
STAMP_HEADER = b"x-evalkit-pin"
BODY_LIMIT = 65536  # bytes of a control request
START_TIMEOUT = 120.0  # seconds for the ranks to read the headers of the boot model


class Agent:
    """The middleware, for vLLM's `--middleware`."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.engine: Engine | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._start(scope, receive, send)
        elif scope["type"] == "http" and self.engine:
            await self._http(self.engine, scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(send, Reply(503, {"error": "starting"}))

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take over the engine before the server accepts a connection, or keep the server from starting."""
        startup = [await receive()]
        try:
            self.engine = await attach(scope["app"].state.engine_client)
        # Raised from here, anything would be taken for a missing lifespan protocol, and the server would start.
        except Exception as error:  # noqa: BLE001
            if not isinstance(error, EvalkitError):
                log.exception("evalkit: the ranks did not answer")
            detail = str(error) or type(error).__name__
            await send({"type": "lifespan.startup.failed", "message": f"evalkit: the engine cannot start: {detail}"})
            return

        async def replay() -> Message:
            return startup.pop() if startup else await receive()

        await self.app(scope, replay, send)

    async def _http(self, engine: Engine, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/evalkit" or path.startswith("/evalkit/"):
            await _control(engine, scope, receive, send)
        elif path.startswith("/v1/"):
            await self._v1(engine, scope, receive, send)
        elif path in HEALTH and engine.closed:
            await _answer(send, _closed(engine))
        elif path in HEALTH or path in ALWAYS:
            await self.app(scope, receive, send)
        else:
            await _answer(send, _not_found(path))

    async def _v1(self, engine: Engine, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in GENERATION and not engine.closed:
            with engine.flight() as flight:
                await self.app(scope, receive, Stamping(send, flight))
            return
        stamped = Stamping(send, Flight(engine))
        if path in ALWAYS:
            await self.app(scope, receive, stamped)
        else:
            await _answer(stamped, _closed(engine) if path in GENERATION else _not_found(path))


class Stamping:
    """A `send` that puts the stamps on an answer."""

    def __init__(self, send: Send, flight: Flight) -> None:
        self._send = send
        self._flight = flight
        self._streams = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", []))
            self._streams = dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")
            stamps = self._stamps(CLOSED if self._streams else self._flight.closing)
            await self._send({**message, "headers": [*headers, (STAMP_HEADER, stamps)]})
        elif message["type"] == "http.response.body" and self._streams and not message.get("more_body"):
            await self._send({**message, "more_body": True})
            comment = b": " + STAMP_HEADER + b" " + self._stamps(self._flight.closing) + b"\n\n"
            await self._send({"type": "http.response.body", "body": comment})
        else:
            await self._send(message)

    def _stamps(self, closing: str) -> bytes:
        return f"{self._flight.arrival} {closing}".encode()


async def attach(client: Any) -> Engine:
    """Make the engine's agent of vLLM's engine client, at the start of its server.

    Raises:
        EvalkitError: the settings or the boot model are wrong, or the server has a shape that cannot be fenced.
    """
    settings = read_settings()
    parallel = client.vllm_config.parallel_config
    if parallel._api_process_count > 1:
        raise UsageError("more than one API server process cannot be fenced", "use --api-server-count 1")
    if parallel.data_parallel_size > 1:
        raise UsageError("data parallel ranks cannot be fenced as one engine", "start one engine a replica")
    boots = await asyncio.wait_for(client.collective_rpc("evalkit_boot"), START_TIMEOUT)
    for boot in boots:
        if "refused" in boot:
            raise DataError(f"rank {boot['rank']}: {boot['refused']}")
    return Engine(client, _boot_model(client.vllm_config.model_config), len(boots), settings)


def _boot_model(model_config: Any) -> BootModel:
    def read_config(directory: Path) -> dict[str, Any]:
        from vllm.transformers_utils.config import get_config

        try:
            config: dict[str, Any] = get_config(
                str(directory), model_config.trust_remote_code, config_format=model_config.config_format
            ).to_dict()
        except Exception as error:  # the parsers of model configs raise anything at all
            detail = " ".join(str(error).split())
            raise DataError(f"{directory / 'config.json'} cannot be read: {detail}") from error
        return config

    directory = Path(model_config.model)
    tied = bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))
    return BootModel(BootTensors.read(directory, tied=tied), read_config(directory), read_config)


async def _control(engine: Engine, scope: Scope, receive: Receive, send: Send) -> None:
    given = dict(scope["headers"]).get(KEY_HEADER, b"")
    if not hmac.compare_digest(given, engine.settings.key):
        await _answer(send, Reply(401, {"error": "unauthorized", "detail": "the header x-evalkit-key is not the key"}))
        return
    route = (scope["method"], scope["path"])
    if route == ("GET", "/evalkit/state"):
        await _answer(send, Reply(200, engine.state()))
    elif route == ("POST", "/evalkit/pin"):
        await _with_body(receive, send, PinRequest, lambda request: engine.run_to_end(engine.pin(request)))
    elif route == ("POST", "/evalkit/probe"):
        await _with_body(receive, send, ProbeRequest, lambda request: probe(engine, request.timeout))
    elif scope["path"] in METHODS:
        await _answer(send, Reply(405, {"error": "method_not_allowed", "detail": f"use {METHODS[scope['path']]}"}))
    else:
        await _answer(send, _not_found(scope["path"]))


async def _with_body(receive: Receive, send: Send, kind: type[Any], act: Callable[[Any], Awaitable[Reply]]) -> None:
    body = b""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > BODY_LIMIT:
            await _answer(send, Reply(413, {"error": "too_large", "detail": f"more than {BODY_LIMIT} bytes"}))
            return
    try:
        request = msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        await _answer(send, Reply(400, {"error": "bad_request", "detail": str(error)}))
        return
    await _answer(send, await act(request))


def _closed(engine: Engine) -> Reply:
    why = engine.closed or "closed"
    detail = engine.broken or {"unpinned": "the engine is not pinned", "pinning": "the engine is being pinned"}.get(why)
    return Reply(503, {"error": {"message": detail, "type": why, "param": None, "code": 503}})


def _not_found(path: str) -> Reply:
    return Reply(404, {"error": {"message": f"{path} does not exist", "type": "not_found", "param": None, "code": 404}})


async def _answer(send: Send, reply: Reply) -> None:
    body = msgspec.json.encode(reply.body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
