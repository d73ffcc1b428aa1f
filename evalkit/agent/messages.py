"""What goes over the agent's control routes."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(ge=0, le=86400)]


class PinRequest(msgspec.Struct, frozen=True):
    """Body of `POST /evalkit/pin`.

    Attributes:
        fleet: who asks; only for logs and the state.
        path: absolute path of the snapshot.
        version: the label to serve, the step as text.
        digest: what the weights must hash to, 64 hex digits.
        drain_timeout: how long requests in flight may take before they are aborted.
        load_timeout: how long everything behind the drain may take before the engine counts as broken.
    """

    fleet: Annotated[str, Meta(max_length=200)]
    epoch: Annotated[int, Meta(ge=1, le=2**62)]
    path: Annotated[str, Meta(pattern=r"\A/[^\x00]*\Z", max_length=4096)]
    version: Annotated[str, Meta(max_length=200)]
    digest: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    drain_timeout: Seconds = 30.0
    load_timeout: Seconds = 600.0


class ProbeRequest(msgspec.Struct, frozen=True):
    """Body of `POST /evalkit/probe`."""

    timeout: Seconds = 30.0


class Pin(msgspec.Struct, frozen=True):
    """What the engine was pinned to."""

    version: str
    digest: str
    epoch: int
    path: str
    fleet: str


class Reply(NamedTuple):
    """Status and JSON body of an answer."""

    status: int
    body: dict[str, Any]
