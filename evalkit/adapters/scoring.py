"""Calling scorers, anybody's own among them, which may fail in any way or never return."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from evalkit.adapters.scorers import Scorer, as_score
from evalkit.ground.errors import EvalSkip

SCORER_TIMEOUT = 60.0  # seconds for one call of a scorer in a thread

# The score, None for "no score", and why there is none.
Scored = tuple[float | None, str | None]


def score_answer(scorer: Scorer, response: str, label: Any, sample: dict[str, Any]) -> Scored:
    """What an answer is worth; a scorer that raises gives no score.

    Raises:
        EvalSkip: the scorer ends the evaluation.
    """
    try:
        return as_score(scorer.score(response, label, sample)), None
    except EvalSkip:
        raise
    except Exception as error:  # noqa: BLE001  (somebody's function may fail in any way: its sample has no score)
        return None, f"{type(error).__name__}: {error}"


async def score_in_thread(score: Callable[[], Scored]) -> Scored:
    """Run `score` in a thread of its own, which is left behind when it takes too long, and not awaited at exit.

    Raises:
        EvalSkip: as `score` does.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Scored] = loop.create_future()

    def deliver(scored: Scored | EvalSkip) -> None:
        if future.done():
            return
        if isinstance(scored, EvalSkip):
            future.set_exception(scored)
        else:
            future.set_result(scored)

    def call() -> None:
        scored: Scored | EvalSkip
        try:
            scored = score()
        except EvalSkip as skip:
            scored = skip
        except BaseException as error:  # noqa: BLE001  (no signal comes to this thread: the scorer ends itself, as sys.exit does)
            scored = None, f"{type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, scored)

    threading.Thread(target=call, daemon=True, name="evalkit-scorer").start()
    try:
        return await asyncio.wait_for(future, SCORER_TIMEOUT)
    except TimeoutError:
        return None, f"the scorer did not return within {SCORER_TIMEOUT:g} s"
