"""What the agent decides before vLLM does anything, and what it does when vLLM fails (a stand-in fails on demand)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evalkit.agent.checks import BootModel, BootTensors, first_difference
from evalkit.agent.engine import Engine
from evalkit.agent.messages import PinRequest, Reply
from evalkit.agent.middleware import Agent
from evalkit.agent.settings import Settings, read_settings
from evalkit.ground.errors import DataError, UsageError
from tests.unit.test_tensors import f32, write_file

DIGEST = "0" * 64


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "key").write_text("secret\n")
    values = {"EVALKIT_ENGINE_KEY_FILE": str(tmp_path / "key"), "EVALKIT_ENGINE_ID": "e1", "EVALKIT_ENGINE_EPOCH": "7"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


def test_settings_come_from_the_environment_and_keep_the_key_to_themselves(environment: dict[str, str]) -> None:
    settings = read_settings()
    assert settings == Settings(b"secret", "e1", 7)
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("name", "value", "fragment"),
    [
        ("EVALKIT_ENGINE_KEY_FILE", None, "EVALKIT_ENGINE_KEY_FILE is not set"),
        ("EVALKIT_ENGINE_KEY_FILE", "/nowhere/key", "/nowhere/key .* cannot be read"),
        ("EVALKIT_ENGINE_KEY_FILE", "/dev/null", "/dev/null .* is empty"),
        ("EVALKIT_ENGINE_ID", "", "EVALKIT_ENGINE_ID is not set"),
        ("EVALKIT_ENGINE_EPOCH", "-1", "EVALKIT_ENGINE_EPOCH is '-1'"),
        ("EVALKIT_ENGINE_EPOCH", "x", "EVALKIT_ENGINE_EPOCH is 'x'"),
    ],
)
def test_wrong_settings_are_named(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, fragment: str
) -> None:
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=fragment):
        read_settings()


def _start(client: Any) -> list[dict[str, Any]]:
    """What the server's start sends when vLLM has this engine client."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "lifespan.startup.complete"})

    async def receive() -> dict[str, Any]:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "lifespan", "app": SimpleNamespace(state=SimpleNamespace(engine_client=client))}
    asyncio.run(Agent(app)(scope, receive, send))
    return sent


def _shape(**parallel: int) -> Any:
    counts = {"_api_process_count": 1, "data_parallel_size": 1} | parallel
    return SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(**counts)))


@pytest.mark.parametrize(
    ("parallel", "fragment"),
    [({"_api_process_count": 2}, "--api-server-count 1"), ({"data_parallel_size": 2}, "one engine a replica")],
)
def test_a_server_that_cannot_be_fenced_does_not_start(
    environment: dict[str, str], parallel: dict[str, int], fragment: str
) -> None:
    (message,) = _start(_shape(**parallel))
    assert message["type"] == "lifespan.startup.failed"
    assert fragment in message["message"]


async def _refuse() -> list[dict[str, Any]]:
    return [{"rank": 0}, {"rank": 1, "refused": "/boot has no *.safetensors file"}]


@pytest.mark.parametrize(
    ("how", "fragment"),
    [("_raise", "out of memory"), ("_refuse", "rank 1: /boot has no"), ("_time_out", "TimeoutError")],
)
def test_a_server_whose_ranks_fail_at_once_does_not_start(environment: dict[str, str], how: str, fragment: str) -> None:
    client = FailingClient("evalkit_boot", globals()[how])
    client.vllm_config = _shape().vllm_config
    (message,) = _start(client)
    assert message["type"] == "lifespan.startup.failed"
    assert fragment in message["message"]


def test_a_server_without_its_key_does_not_start(environment: dict[str, str]) -> None:
    Path(environment["EVALKIT_ENGINE_KEY_FILE"]).unlink()
    (message,) = _start(_shape())
    assert message["type"] == "lifespan.startup.failed"
    assert "EVALKIT_ENGINE_KEY_FILE" in message["message"]


@pytest.mark.parametrize(
    ("theirs", "difference"),
    [
        ({}, None),
        ({"transformers_version": "4", "dtype": "bfloat16", "eos_token_id": 3}, None),
        ({"hidden_size": 128}, ("hidden_size", 128, 64)),
        ({"model_type": "llama", "hidden_size": 128}, ("model_type", "llama", "qwen3")),
        ({"layer_types": ["full"] * 3, "num_hidden_layers": 3}, ("num_hidden_layers", 3, 2)),
        ({"layer_types": ["sliding"] * 2}, ("layer_types", ["sliding"] * 2, ["full"] * 2)),
        ({"rope": {"theta": 1e6}}, ("rope.theta", 1e6, 1e4)),
        ({"rope": None}, ("rope", None, {"theta": 1e4})),
        ({"quantization_config": {"bits": 4}}, ("quantization_config", {"bits": 4}, None)),
    ],
)
def test_the_most_telling_field_is_named(theirs: dict[str, Any], difference: Any) -> None:
    ours = {
        "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "layer_types": ["full"] * 2,
        "rope": {"theta": 1e4}, "dtype": "float32", "transformers_version": "5", "eos_token_id": 2,
    }  # fmt: skip
    assert first_difference(ours | theirs, ours) == difference


EMBEDDING = {"model.embed_tokens.weight": f32(8, 4)}
HEAD = {"lm_head.weight": f32(8, 4)}


@pytest.mark.parametrize("boot", [EMBEDDING, EMBEDDING | HEAD])
@pytest.mark.parametrize("snapshot", [EMBEDDING, EMBEDDING | HEAD])
def test_a_tied_head_may_stand_in_the_file_or_not(tmp_path: Path, boot: Any, snapshot: Any) -> None:
    tied = _boot_tensors(tmp_path, boot, tied=True)
    path = _model(tmp_path / "snapshot", snapshot)
    assert tied.check(path).keys() == snapshot.keys()


@pytest.mark.parametrize(
    ("head", "accepted"), [(f32(8, 4), True), (f32(8, 4, fill=3), False), (("BF16", (8, 4), bytes(64)), False)]
)
def test_a_tied_head_in_the_file_must_be_the_embedding(tmp_path: Path, head: Any, accepted: bool) -> None:
    model = BootModel(_boot_tensors(tmp_path, EMBEDDING, tied=True), {}, lambda directory: {})
    path = _model(tmp_path / "snapshot", EMBEDDING | {"lm_head.weight": head, "other": f32(8, 4, fill=4)})
    model.tensors.tensors["other"] = ("F32", (8, 4))
    if accepted:
        model.check(path)
    else:
        with pytest.raises(DataError, match=r"tensor lm_head\.weight is not the embedding"):
            model.check(path)


@pytest.mark.parametrize(("boot", "snapshot"), [(EMBEDDING, EMBEDDING | HEAD), (EMBEDDING | HEAD, EMBEDDING)])
def test_a_head_of_its_own_must_be_as_at_the_start(tmp_path: Path, boot: Any, snapshot: Any) -> None:
    untied = _boot_tensors(tmp_path, boot, tied=False)
    with pytest.raises(DataError, match=r"lm_head\.weight"):
        untied.check(_model(tmp_path / "snapshot", snapshot))


@pytest.mark.parametrize(
    ("tensor", "fragment"),
    [
        (("BF16", (8, 4), bytes(64)), None),
        (("F32", (4, 8), bytes(128)), r"tensor w has shape \[4, 8\], but the engine's has \[8, 4\]"),
        (("I32", (8, 4), bytes(128)), "tensor w has dtype I32, but the engine's has F32"),
        (("F8_E4M3", (8, 4), bytes(32)), "tensor w has dtype F8_E4M3, but the engine's has F32"),
        (("F4", (8, 4), bytes(16)), "tensor w has dtype F4, which is not supported"),
    ],
)
def test_shape_and_dtype_must_be_loadable(tmp_path: Path, tensor: Any, fragment: str | None) -> None:
    expected = _boot_tensors(tmp_path, {"w": f32(8, 4)}, tied=False)
    path = _model(tmp_path / "snapshot", {"w": tensor})
    if fragment is None:
        assert expected.check(path)["w"].dtype == "BF16"
    else:
        with pytest.raises(DataError, match=fragment):
            expected.check(path)


def _model(path: Path, tensors: Any) -> Path:
    path.mkdir()
    write_file(path / "model.safetensors", tensors)
    (path / "config.json").write_text("{}")
    return path


def _boot_tensors(tmp_path: Path, tensors: Any, *, tied: bool) -> BootTensors:
    return BootTensors.read(_model(tmp_path / "boot", tensors), tied=tied)


class FailingClient:
    """Answers as vLLM's engine client does, but for the call named `fails`."""

    def __init__(self, fails: str = "", how: Callable[[], Awaitable[Any]] | None = None, *, digest: str = DIGEST):
        self.fails, self.how, self.digest = fails, how, digest
        self.errored = False
        self.vllm_config = SimpleNamespace(kv_transfer_config=None)
        self.calls: list[str] = []

    async def _do(self, name: str, result: Any) -> Any:
        self.calls.append(name)
        if name == self.fails and self.how:
            return await self.how()
        return result

    async def pause_generation(self, mode: str) -> None:
        await self._do("pause", None)

    async def resume_generation(self) -> None:
        await self._do("resume", None)

    async def reset_prefix_cache(self, reset_connector: bool) -> bool:
        return bool(await self._do("reset", True))

    async def collective_rpc(self, method: str, kwargs: Any = None) -> Any:
        stamp = {"rank": 0, "version": "1", "digest": self.digest}
        return await self._do(method, [stamp | {"rank": rank} for rank in range(2)])


def _pin(tmp_path: Path, client: FailingClient, *, before: bool = True) -> tuple[Engine, list[Reply]]:
    """An engine of two ranks, pinned well once (when `before`), then pinned with `client`."""
    path = _model(tmp_path / "step_1", {"w": f32(2)})
    model = BootModel(BootTensors.read(path, tied=False), {}, lambda directory: {})

    async def run() -> tuple[Engine, list[Reply]]:
        engine = Engine(FailingClient() if before else client, model, 2, Settings(b"k", "e", 0))
        replies = [await engine.pin(PinRequest("f", 1, str(path), "1", DIGEST))] if before else []
        engine.client = client
        replies.append(await engine.pin(PinRequest("f", 2, str(path), "2", DIGEST, load_timeout=3)))
        replies.append(await engine.pin(PinRequest("f", 3, str(path), "3", DIGEST)))
        return engine, replies

    return asyncio.run(run())


async def _raise() -> None:
    raise RuntimeError("out of memory")


async def _time_out() -> None:
    raise TimeoutError


async def _hang() -> None:
    await asyncio.Event().wait()


async def _false() -> bool:
    return False


async def _one_rank() -> list[dict[str, Any]]:
    return [{"rank": 0, "digest": DIGEST}]


async def _some_refuse() -> list[dict[str, Any]]:
    return [{"rank": 0, "refused": "gone"}, {"rank": 1, "ms": 1}]


async def _no_stamp() -> list[dict[str, Any]]:
    return [{"rank": 0, "digest": DIGEST}, {"rank": 1}]


@pytest.mark.parametrize(
    ("fails", "how", "error", "fragment"),
    [
        ("pause", _raise, "broken", "out of memory"),
        ("pause", _hang, "broken", "took longer than 3 s"),
        ("evalkit_load", _raise, "broken", "out of memory"),
        ("evalkit_load", _hang, "broken", "took longer than 3 s"),
        ("evalkit_load", _one_rank, "broken", "1 of 2 ranks"),
        ("evalkit_load", _some_refuse, "broken", "only some ranks refused it: gone"),
        ("evalkit_stamp", _raise, "broken", "out of memory"),
        ("evalkit_stamp", _no_stamp, "digest_mismatch", "rank 1 loaded None"),
        ("reset", _false, "broken", "did not drop its prefix cache"),
        ("resume", _raise, "broken", "out of memory"),
    ],
)
def test_a_load_that_fails_half_way_closes_the_engine_for_good(
    tmp_path: Path, fails: str, how: Any, error: str, fragment: str
) -> None:
    engine, (good, bad, later) = _pin(tmp_path, FailingClient(fails, how))
    assert good.status == 200
    assert (bad.status, bad.body["error"]) == (422 if error == "digest_mismatch" else 503, error)
    assert fragment in bad.body["detail"]
    assert (later.status, later.body["error"]) == (503, "broken")
    assert (engine.closed, engine.stamp, engine.epoch) == ("broken", "-", 3)
    assert fragment in engine.state()["broken"]
    assert engine.state()["pin"] is None


def test_a_snapshot_that_all_ranks_refuse_leaves_the_old_pin(tmp_path: Path) -> None:
    async def refuse() -> list[dict[str, Any]]:
        return [{"rank": rank, "refused": "step_1 was taken away"} for rank in range(2)]

    client = FailingClient("evalkit_load", refuse)
    engine, (_, refused, _) = _pin(tmp_path, client)
    assert (refused.status, refused.body["error"]) == (422, "refused")
    assert client.calls[:3] == ["pause", "evalkit_load", "resume"]
    assert engine.closed is None
    assert engine.stamp == f"{engine.nonce}/1/{DIGEST}"


def test_an_engine_whose_core_died_is_broken(tmp_path: Path) -> None:
    client = FailingClient()
    client.errored = True
    engine, replies = _pin(tmp_path, client)
    assert [reply.status for reply in replies] == [200, 503, 503]
    assert engine.closed == "broken"
    assert "core has died" in engine.state()["broken"]


def test_one_of_two_waiting_pins_is_overtaken(tmp_path: Path) -> None:
    path = _model(tmp_path / "step_1", {"w": f32(2)})
    model = BootModel(BootTensors.read(path, tied=False), {}, lambda directory: {})

    async def run() -> list[Reply]:
        loading, go_on = asyncio.Event(), asyncio.Event()

        async def wait() -> list[dict[str, Any]]:
            loading.set()
            await go_on.wait()
            client.how = None
            return [{"rank": 0}, {"rank": 1}]

        client = FailingClient("evalkit_load", wait)
        engine = Engine(client, model, 2, Settings(b"k", "e", 0))
        tasks = [asyncio.create_task(engine.pin(PinRequest("f", 1, str(path), "1", DIGEST)))]
        await loading.wait()
        for epoch in (2, 3):
            tasks.append(asyncio.create_task(engine.pin(PinRequest("f", epoch, str(path), str(epoch), DIGEST))))
            await asyncio.sleep(0)
        go_on.set()
        return await asyncio.gather(*tasks)

    first, second, third = asyncio.run(run())
    assert (first.status, first.body["epoch"], first.body["pin"].epoch) == (200, 1, 1)
    assert (second.status, second.body["error"], second.body["epoch"]) == (409, "stale_epoch", 3)
    assert (third.status, third.body["pin"].epoch) == (200, 3)
