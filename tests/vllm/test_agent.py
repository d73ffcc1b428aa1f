"""The agent inside a real engine, spoken to over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.bad_snapshots import DAMAGES
from tests.engines import Answer, Engine, greedy, weights_digest
from tests.models import make_model
from tests.vllm.conftest import Lone

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(600)]

LONG_PROMPT = "A-prompt-that-fills-more-than-two-blocks-of-the-cache." * 6  # 324 tokens; a block has 128
LONG = 500  # tokens; a second of work or more


def stamp(pinned: dict[str, Any], nonce: str) -> str:
    return f"{nonce}/{pinned['epoch']}/{pinned['digest']}"


def pinned(engine: Engine, path: Path, **fields: Any) -> str:
    """Pin the engine on `path`; the stamp of that pin."""
    answer = engine.pin(path, **fields)
    assert answer.status == 200, answer
    return stamp(answer.body["pin"], answer.body["nonce"])


def test_a_new_engine_takes_no_requests_on_its_boot_weights(lone: Lone) -> None:
    state, health, models, completion, probe = lone.fresh
    assert (state["pin"], state["open"], state["broken"], state["in_flight"]) == (None, False, None, 0)
    assert (health.status, health.body["error"]["type"]) == (503, "unpinned")
    assert (completion.status, completion.body["error"]["type"]) == (503, "unpinned")
    assert completion.stamps == ("-", "-")
    assert (models.status, models.body["data"][0]["id"]) == (200, "policy")
    assert (probe.status, probe.body["pin"]) == (200, None)


def test_the_control_routes_need_the_key(lone: Lone) -> None:
    pinned(lone.engine, lone.a)
    before = lone.engine.state()
    request = lone.engine.pin_request(lone.b)
    for key in (None, "wrong", "x" * 10_000):
        for path, body in (("state", None), ("pin", request), ("probe", {}), ("nothing", None)):
            answer = lone.engine.call(f"/evalkit/{path}", body, key=key)
            assert (answer.status, answer.body["error"]) == (401, "unauthorized")
    assert lone.engine.state() == before


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "fragment"),
    [
        ("GET", "/evalkit", None, 404, ""),
        ("GET", "/evalkit/", None, 404, ""),
        ("POST", "/evalkit/unpin", {}, 404, "/evalkit/unpin"),
        ("GET", "/evalkit/pin", None, 405, "POST"),
        ("POST", "/evalkit/state", {}, 405, "GET"),
        ("DELETE", "/evalkit/probe", None, 405, "POST"),
        ("POST", "/evalkit/pin", b"{", 400, ""),
        ("POST", "/evalkit/pin", b"[]", 400, "object"),
        ("POST", "/evalkit/pin", b'{"fleet": "\xff"}', 400, "UTF-8"),
        ("POST", "/evalkit/pin", {}, 400, "fleet"),
        ("POST", "/evalkit/pin", {"epoch": None}, 400, "epoch"),
        ("POST", "/evalkit/pin", {"epoch": True}, 400, "epoch"),
        ("POST", "/evalkit/pin", {"epoch": 0}, 400, "epoch"),
        ("POST", "/evalkit/pin", {"epoch": 2**70}, 400, "epoch"),
        ("POST", "/evalkit/pin", {"path": "step_10"}, 400, "path"),
        ("POST", "/evalkit/pin", {"path": "/a\0b"}, 400, "path"),
        ("POST", "/evalkit/pin", {"digest": "0" * 63}, 400, "digest"),
        ("POST", "/evalkit/pin", {"digest": "0" * 64 + "\n"}, 400, "digest"),
        ("POST", "/evalkit/pin", {"version": 10}, 400, "version"),
        ("POST", "/evalkit/pin", {"drain_timeout": -1}, 400, "drain_timeout"),
        ("POST", "/evalkit/pin", b" " * 100_000, 413, ""),
        ("POST", "/evalkit/probe", {"timeout": "soon"}, 400, "timeout"),
    ],
)
def test_a_malformed_control_request_changes_nothing(
    lone: Lone, method: str, path: str, body: Any, status: int, fragment: str
) -> None:
    before = lone.engine.state()
    if isinstance(body, dict) and body and path == "/evalkit/pin":
        body = lone.engine.pin_request(lone.a) | body
    answer = lone.engine.call(path, body, method=method)
    assert answer.status == status
    assert fragment in json.dumps(answer.body)
    assert lone.engine.state() == before


@pytest.mark.parametrize(
    "path",
    [
        "/collective_rpc", "/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/update_weight_version",
        "/update_weights", "/init_weight_transfer_engine", "/weight_checker", "/abort_requests", "/server_info",
        "/scale_elastic_ep", "/invocations", "/inference/v1/generate", "/inference/v1/abort_requests",
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/responses", "/v1/messages", "/v1/systemone",
        "/v1/chat/completions/batch", "/generative_scoring", "/start_profile", "/docs", "/openapi.json",
        "/health/", "//pause", "/v1/../pause", "/v1/%2e%2e/pause", "/%76%31/completions/../../pause",
    ],
)  # fmt: skip
def test_nothing_else_of_the_server_is_reachable(lone: Lone, path: str) -> None:
    pinned(lone.engine, lone.a)
    for method in ("GET", "POST"):
        answer = lone.engine.call(path, {} if method == "POST" else None, method=method)
        assert answer.status == 404
        assert answer.body["error"]["type"] == "not_found"


def test_what_clients_and_routers_need_is_reachable(lone: Lone) -> None:
    pinned(lone.engine, lone.a)
    for path in ("/health", "/ping", "/v1/models", "/version", "/metrics", "/load"):
        assert lone.engine.call(path).status == 200, path
    tokens = lone.engine.call("/tokenize", {"model": "policy", "prompt": "Hello"}).body["tokens"]
    assert tokens == [39, 68, 75, 75, 78]


def test_each_pin_makes_the_engine_answer_as_transformers_does(lone: Lone) -> None:
    outputs = []
    for path in (lone.a, lone.b, lone.a):
        own = pinned(lone.engine, path)
        answer = lone.engine.complete("What-is-12+30=")
        assert answer.tokens == greedy(path, "What-is-12+30=", 16)
        assert answer.stamps == (own, own)
        outputs.append(answer.tokens)
    assert outputs[0] == outputs[2] != outputs[1]


def test_a_pin_proves_digest_and_version_of_every_rank(lone: Lone) -> None:
    answer = lone.engine.pin(lone.b, version="20")
    digest = weights_digest(lone.b)
    assert answer.body["ranks"] == [{"rank": 0, "version": "20", "digest": digest, "tensors": 25, "bytes": 528128}]
    assert answer.body["pin"] == lone.engine.state()["pin"]
    assert answer.body["pin"] == {
        "version": "20", "digest": digest, "epoch": answer.body["epoch"], "path": str(lone.b), "fleet": "test",
    }  # fmt: skip


def test_no_cached_prefix_outlives_a_pin(lone: Lone) -> None:
    pinned(lone.engine, lone.a)
    first, cached = (lone.engine.complete(LONG_PROMPT) for _ in range(2))
    assert first.tokens == cached.tokens == greedy(lone.a, LONG_PROMPT, 16)
    pinned(lone.engine, lone.b)
    assert lone.engine.complete(LONG_PROMPT).tokens == greedy(lone.b, LONG_PROMPT, 16)


def test_weights_of_another_float_type_are_cast_as_at_a_start(lone: Lone, tmp_path: Path) -> None:
    half = make_model(tmp_path / "step_30", 4, dtype="bfloat16")
    pinned(lone.engine, half)
    assert lone.engine.complete("What-is-12+30=").tokens == greedy(half, "What-is-12+30=", 16)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_bad_snapshot_is_refused_before_a_weight_is_touched(lone: Lone, kind: str) -> None:
    own = pinned(lone.engine, lone.a)
    before = lone.engine.state()
    path, fragment = lone.bad[kind]
    refused = lone.engine.pin(path, digest=weights_digest(lone.a))
    assert (refused.status, refused.body["error"]) == (422, "refused")
    assert fragment in refused.body["detail"]
    after = lone.engine.state()
    assert after == before | {"epoch": before["epoch"] + 1}
    answer = lone.engine.complete(LONG_PROMPT)
    assert answer.tokens == greedy(lone.a, LONG_PROMPT, 16)
    assert answer.stamps == (own, own)


@pytest.mark.parametrize("back", [0, 1])
def test_an_epoch_that_is_not_higher_is_stale(lone: Lone, back: int) -> None:
    own = pinned(lone.engine, lone.a)
    epoch = lone.engine.state()["epoch"]
    answer = lone.engine.pin(lone.b, epoch=epoch - back)
    assert (answer.status, answer.body["error"], answer.body["epoch"]) == (409, "stale_epoch", epoch)
    assert lone.engine.complete("Hello").stamps == (own, own)


def test_a_pin_goes_on_when_its_caller_is_killed(lone: Lone) -> None:
    pinned(lone.engine, lone.a)
    request = lone.engine.pin_request(lone.b)
    with ThreadPoolExecutor() as threads:
        argv = [sys.executable, "-c", _CALL, lone.engine.url, lone.engine.key, json.dumps(request)]
        caller = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        caller.stdout.readline()
        busy = threads.submit(lone.engine.complete, "Hello", LONG)
        lone.engine.wait_for(in_flight=1)
        caller.stdin.close()
        lone.engine.wait_for(pinning=True, open=False)
        caller.kill()
        caller.wait()
        assert lone.engine.state()["pin"]["digest"] == weights_digest(lone.a)
        assert len(busy.result().tokens) == LONG
    caller.stdout.close()
    state = lone.engine.wait_for(pinning=False)
    assert (state["pin"]["epoch"], state["pin"]["digest"]) == (request["epoch"], weights_digest(lone.b))
    assert lone.engine.complete("Hello").tokens == greedy(lone.b, "Hello", 16)


_CALL = """
import sys, urllib.request
url, key, body = sys.argv[1:]
print("ready", flush=True)
sys.stdin.read()
urllib.request.urlopen(urllib.request.Request(url + "/evalkit/pin", body.encode(), {"x-evalkit-key": key}))
"""


def seen_in_flight(threads: ThreadPoolExecutor, lone: Lone) -> Future[Answer]:
    """A long request that is in flight for certain: one that was answered before anybody looked is sent again."""
    for _ in range(20):
        flight = threads.submit(lone.engine.complete, "Hello", LONG)
        while not flight.done():
            if lone.engine.state()["in_flight"]:
                return flight
    raise AssertionError("every request was answered before it was seen")


def test_a_request_in_flight_ends_on_the_old_weights(lone: Lone) -> None:
    old = pinned(lone.engine, lone.a)
    undisturbed = lone.engine.complete("Hello", LONG)
    with ThreadPoolExecutor() as threads:
        flight = seen_in_flight(threads, lone)
        pin = threads.submit(lone.engine.pin, lone.b)
        lone.engine.wait_for(pinning=True, open=False)
        refused, health = lone.engine.complete("Hello"), lone.engine.call("/health")
        assert (refused.status, refused.body["error"]["type"]) == (503, "pinning")
        assert (health.status, lone.engine.call("/evalkit/probe", {}).status) == (503, 503)
        assert flight.result().tokens == undisturbed.tokens
        assert flight.result().stamps == (old, old)
        assert pin.result().status == 200
    new = lone.engine.complete("Hello").stamps
    assert new[0] == new[1] != old


def test_a_request_aborted_by_the_drain_deadline_is_known_by_its_stamp(lone: Lone) -> None:
    old = pinned(lone.engine, lone.a)
    with ThreadPoolExecutor() as threads:
        flight = threads.submit(lone.engine.complete, "Hello", LONG)
        stream = threads.submit(lone.engine.complete, "Hello", LONG, stream=True)
        lone.engine.wait_for(in_flight=2)
        answer = lone.engine.pin(lone.b, drain_timeout=0.1)
        assert answer.status == 200
        assert flight.result().body["choices"][0]["finish_reason"] == "abort"
        assert flight.result().stamps == (old, "-")
        assert stream.result().stamps == (old, "-")
        assert stream.result().body.endswith(f"\n\n: x-evalkit-pin {old} -\n\n".encode())
    assert lone.engine.complete("Hello").tokens == greedy(lone.b, "Hello", 16)


def test_a_stream_ends_with_its_closing_stamp(lone: Lone) -> None:
    own = pinned(lone.engine, lone.a)
    answer = lone.engine.complete("Hello", stream=True)
    assert answer.stamps == (own, "-")
    assert answer.body.endswith(f"data: [DONE]\n\n: x-evalkit-pin {own} {own}\n\n".encode())


def test_a_chat_request_is_stamped_as_well(lone: Lone) -> None:
    own = pinned(lone.engine, lone.a)
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    answer = lone.engine.call("/v1/chat/completions", body)
    assert (answer.status, answer.stamps) == (200, (own, own))
    refused = lone.engine.call("/v1/chat/completions", {})
    assert (refused.status, refused.stamps) == (400, (own, own))


def test_a_higher_epoch_overtakes_a_pin_that_still_drains(lone: Lone) -> None:
    pinned(lone.engine, lone.b)
    with ThreadPoolExecutor() as threads:
        flight = threads.submit(lone.engine.complete, "Hello", LONG)
        lone.engine.wait_for(in_flight=1)
        older = threads.submit(lone.engine.pin, lone.a)
        state = lone.engine.wait_for(pinning=True, open=False)
        newer = lone.engine.pin(lone.a, epoch=state["epoch"] + 1, version="newer", drain_timeout=0)
        assert (older.result().status, older.result().body["error"]) == (409, "stale_epoch")
        assert (newer.status, newer.body["pin"]["version"]) == (200, "newer")
        assert flight.result().stamps[1] == "-"
    assert lone.engine.state()["pin"]["version"] == "newer"


def test_a_probe_is_one_real_token(lone: Lone) -> None:
    pinned(lone.engine, lone.a)
    answer = lone.engine.call("/evalkit/probe", {"timeout": 20})
    assert answer.body["token"] == greedy(lone.a, "!", 1)[0]
    assert answer.body["pin"]["digest"] == weights_digest(lone.a)
    late = lone.engine.call("/evalkit/probe", {"timeout": 0})
    assert (late.status, late.body["error"]) == (503, "timeout")
    assert lone.engine.wait_for(in_flight=0)["open"]
