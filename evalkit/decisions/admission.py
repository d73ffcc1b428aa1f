"""Whether a step may become an attempt in flight now: a pure decision over what the ledger shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Action = Literal["admit", "busy", "wait", "in_flight", "unchanged"]


@dataclass(frozen=True)
class LiveAttempt:
    """An attempt in flight.

    Attributes:
        incarnation: the trainer's life that it belongs to; None when its record is damaged.
        digest: of its weights, where known.
    """

    step: int
    attempt: int
    incarnation: int | None
    digest: str | None = None


@dataclass(frozen=True)
class Asked:
    """What a dispatch asks for.

    Attributes:
        digest: of the source; None where it was not needed or is not known.
        must: the final point: waits whatever the policy.
    """

    step: int
    incarnation: int
    digest: str | None
    policy: Literal["backpressure", "skip"]
    max_in_flight: int
    must: bool = False


@dataclass(frozen=True)
class Decision:
    """What to do; `superseded` are the attempts to settle as such before anything else."""

    action: Action
    superseded: tuple[LiveAttempt, ...] = ()
    attempt: int | None = None


def decide(asked: Asked, live: Sequence[LiveAttempt], landed: Sequence[tuple[int, str | None]]) -> Decision:
    """Admit, wait, skip, or leave alone.

    Args:
        live: every attempt in flight.
        landed: (attempt, digest) of the landed outcomes of the asked step, in order.
    """
    same_step = [attempt for attempt in live if attempt.step == asked.step]
    mine = [attempt for attempt in same_step if attempt.incarnation == asked.incarnation]
    if mine:
        return Decision("in_flight", attempt=mine[-1].attempt)
    if landed and asked.digest is not None and landed[-1][1] == asked.digest:
        return Decision("unchanged", attempt=landed[-1][0])
    superseded = tuple(same_step)
    if len(live) - len(superseded) < asked.max_in_flight:
        return Decision("admit", superseded)
    waits = asked.must or asked.policy == "backpressure"
    return Decision("wait" if waits else "busy", superseded)
