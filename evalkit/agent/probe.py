"""One real token from the engine."""

from __future__ import annotations

import asyncio
import time

from evalkit.agent.engine import Engine
from evalkit.agent.messages import Reply
from evalkit.ground.ids import new_id


async def probe(engine: Engine, timeout: float) -> Reply:
    """Generate one token, pinned or not; 503 while a pin is under way, when broken, or when none comes in time."""
    if engine.closed in ("broken", "pinning"):
        return Reply(503, {"error": engine.closed, "detail": engine.broken or "a pin is under way"})
    begin = time.monotonic()
    try:
        with engine.flight():
            token = await asyncio.wait_for(_one_token(engine), timeout)
    except TimeoutError:
        return Reply(503, {"error": "timeout", "detail": f"no token within {timeout:g} s"})
    except Exception as error:  # noqa: BLE001  whatever keeps vLLM from answering is what a probe is there to tell
        return Reply(503, {"error": "failed", "detail": f"{type(error).__name__}: {error}"})
    if token is None:
        return Reply(503, {"error": "pinning", "detail": "a pin aborted the probe"})
    milliseconds = round((time.monotonic() - begin) * 1000)
    return Reply(200, {"format": 1, "token": token, "ms": milliseconds, "nonce": engine.nonce, "pin": engine.pin_now})


async def _one_token(engine: Engine) -> int | None:
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    token = None
    request_id = f"evalkit-probe-{new_id()}"
    async for output in engine.client.generate({"prompt_token_ids": [0]}, parameters, request_id):
        token = next(iter(output.outputs[0].token_ids), token)
    return token
