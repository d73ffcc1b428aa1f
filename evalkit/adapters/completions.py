"""What goes over an engine's /v1: the request for a sample, its answer, and what makes an answer count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from evalkit.adapters.datasets import Row
from evalkit.adapters.suite import Dataset

PIN_HEADER = "x-evalkit-pin"
_RETRIED = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request; with an `error` there is no text.

    Attributes:
        tokens: length of the response.
        engine: index of the engine that answered last.
        stamps: the pin header's two parts: as the request came in, as the answer went out.
        asked: how many requests it took.
    """

    text: str | None = None
    finish_reason: str | None = None
    tokens: int | None = None
    engine: int | None = None
    stamps: tuple[str, str] | None = None
    asked: int = 1
    error: str | None = None


def request_of(dataset: Dataset, row: Row, sample: int, model: str) -> Request:
    """The request for a row's sample number `sample`.

    Every sampling parameter is sent, those at their neutral value too: a server takes what is missing from the model's
    generation_config.json.
    """
    body: dict[str, Any] = {
        "model": model,
        "n": 1,
        "stream": False,
        "temperature": dataset.temperature,
        "top_p": dataset.top_p,
        "top_k": dataset.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": dataset.max_response_len,
        "min_tokens": dataset.min_new_tokens,
        "stop": list(dataset.stop),
        "seed": dataset.seed + sample,
    }
    if isinstance(row.prompt, str):
        return Request("/v1/completions", msgspec.json.encode({**body, "prompt": row.prompt}))
    tools = {"tools": row.tools} if row.tools else {}
    return Request("/v1/chat/completions", msgspec.json.encode({**body, "messages": row.prompt, **tools}))


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    text: str | None = None
    message: _Message | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


_DECODER = msgspec.json.Decoder(_Reply)


class AskAgain(Exception):  # noqa: N818  (not a failure yet)
    """A request that brought nothing, but may the next time."""


class WrongPin(AskAgain):
    """An answer that was not made under the pin."""


def read_answer(status: int, headers: Mapping[str, str], body: bytes, stamp: str, engine: int, asked: int) -> Answer:
    """The answer in an HTTP response, if it was made wholly under the pin with this stamp; an error where the server
    will never answer this request.

    Raises:
        WrongPin: it was not.
        AskAgain: there is no answer, but may be one the next time.
    """
    if status in _RETRIED:
        raise AskAgain(_message(status, body))
    if status != 200:
        return Answer(engine=engine, asked=asked, error=_message(status, body))
    return _answer(body, _stamps(headers.get(PIN_HEADER), stamp), engine, asked)


def _stamps(header: str | None, wanted: str) -> tuple[str, str]:
    before, _, after = (header or "").partition(" ")
    if before != wanted or after != wanted:
        raise WrongPin(f"answers under the pin {header or '(none)'}, not {wanted}")
    return before, after


def _answer(body: bytes, stamps: tuple[str, str], engine: int, asked: int) -> Answer:
    try:
        reply = _DECODER.decode(body)
        choice = reply.choices[0]
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
        raise AskAgain(f"the answer is no completion: {error or 'it has no choice'}") from None
    if choice.finish_reason == "abort":
        raise AskAgain("the engine aborted the request")
    message = choice.message or _Message(choice.text)
    text = message.content or ""
    if not text and message.tool_calls:
        text = msgspec.json.encode(message.tool_calls).decode()
    return Answer(text, choice.finish_reason, reply.usage.completion_tokens, engine, stamps, asked)


def _message(status: int, body: bytes) -> str:
    """What an HTTP error says, in one line."""
    text = body.decode(errors="replace")
    try:
        value = msgspec.json.decode(body)
        error = value.get("error", value)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError):
        pass
    return f"HTTP {status}: {' '.join(text.split())[:500]}"
