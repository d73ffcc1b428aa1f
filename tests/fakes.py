"""Fleets of fake engines, and snapshots small enough to write by hand."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from evalkit.adapters.engine_processes import processes_of
from evalkit.ground.layout import FleetPaths, RunPaths
from evalkit.ground.processes import identify, kill
from evalkit.ground.schema import EngineRecord, PinnedEngine, PinProof
from evalkit.state.fleet import change_fleet, load_fleet

START_TIMEOUT = 30.0  # seconds
_SCRIPT = Path(__file__).parent / "fake_engine.py"


@dataclass
class FakeEngineProcess:
    """One fake engine that runs as a process of its own."""

    index: int
    engine_id: str
    url: str
    key: str
    process: subprocess.Popen[bytes]

    def call(self, path: str, body: Any = None, timeout: float = 30.0) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"x-evalkit-key": self.key, "content-type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.load(response)

    def faults(self, **faults: Any) -> None:
        """Set faults, as tests/fake_engine.py lists them; None takes one away."""
        self.call("/fake/faults", faults)

    def release(self) -> None:
        """Let everything that hangs go on."""
        self.faults(release=True)

    def log(self) -> dict[str, Any]:
        log: dict[str, Any] = self.call("/fake/log")
        return log

    def wait(self, what: str, at_least: int = 1, timeout: float = 30.0) -> None:
        """Wait until the log's number (or list) `what` has reached `at_least`."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            value = self.log()[what]
            if (value if isinstance(value, int) else len(value)) >= at_least:
                return
            time.sleep(0.01)
        raise TimeoutError(f"{self.url}: {what} did not reach {at_least} in {timeout:g} s")

    def kill(self) -> None:
        """End it as kill -9 does."""
        self.process.kill()
        self.process.wait(10)


@dataclass
class FakeFleet:
    paths: FleetPaths
    engines: list[FakeEngineProcess]

    def faults(self, **faults: Any) -> None:
        for engine in self.engines:
            engine.faults(**faults)

    def pin(self, path: Path, version: str, digest: str | None = None, *, drain_timeout: float = 5.0) -> PinProof:
        """Pin every engine under the next epoch, without any verb."""
        record = change_fleet(self.paths, lambda r: msgspec.structs.replace(r, epoch=r.epoch + 1, pinned=str(path)))
        pinned = []
        for engine in self.engines:
            body = {"epoch": record.epoch, "path": str(path), "version": version, "fleet": self.paths.name}
            body["drain_timeout"] = drain_timeout
            answer = engine.call("/evalkit/pin", {**body, "digest": digest} if digest else body)
            digest = answer["ranks"][0]["digest"]
            pinned.append(PinnedEngine(index=engine.index, url=engine.url, nonce=answer["nonce"], ranks=1, vllm="fake"))
        assert digest is not None
        return PinProof(
            epoch=record.epoch, version=version, digest=digest, served_model=record.served_model, engines=pinned
        )


def tiny_snapshot(directory: Path, *, value: float = 0.0, tensors: int = 2) -> Path:
    """A directory with one safetensors file of a few numbers and a config, and no manifest or marker."""
    directory.mkdir(parents=True, exist_ok=True)
    data = struct.pack("<4f", *[value] * 4)
    header = {
        f"layer.{i}.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [16 * i, 16 * (i + 1)]}
        for i in range(tensors)
    }
    raw = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data * tensors)
    (directory / "config.json").write_text('{"model_type": "fake"}')
    return directory


@contextlib.contextmanager
def fake_fleet(
    run_dir: Path, n: int = 1, *, name: str = "eval", fault: dict[str, Any] | None = None
) -> Iterator[FakeFleet]:
    """Start `n` fake engines and write the record of a fleet that is up, at epoch 0 and unpinned."""
    paths = RunPaths(run_dir).fleet(name)
    paths.logs.mkdir(parents=True, exist_ok=True)
    key = secrets.token_hex(16)
    paths.key.touch(mode=0o600)
    paths.key.write_text(key)
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(_engine(paths, i, key, fault or {})) for i in range(n)]
        for engine in engines:
            engine.url = f"http://127.0.0.1:{_wait_port(paths, engine)}"
        change_fleet(paths, lambda record: msgspec.structs.replace(
            record, state="up", epoch=0, model="/nonexistent/boot", created_at=time.time(),
            engines=[_record(paths, engine) for engine in engines]))  # fmt: skip
        stack.callback(_end_restarted, paths)
        yield FakeFleet(paths, engines)


@contextlib.contextmanager
def _engine(paths: FleetPaths, index: int, key: str, fault: dict[str, Any]) -> Iterator[FakeEngineProcess]:
    engine_id = secrets.token_hex(8)
    with paths.log(index).open("wb") as log:
        process = subprocess.Popen(
            [*_argv(paths, index), "--fault", json.dumps(fault)],
            env={**os.environ, "EVALKIT_ENGINE_ID": engine_id},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield FakeEngineProcess(index, engine_id, "", key, process)
    finally:
        process.kill()
        process.wait(10)
        _port_file(paths, index).unlink(missing_ok=True)


def _port_file(paths: FleetPaths, index: int) -> Path:
    return paths.logs / f"port-{index}"


def _wait_port(paths: FleetPaths, engine: FakeEngineProcess) -> int:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            return int(_port_file(paths, engine.index).read_text())
        if engine.process.poll() is not None:
            raise RuntimeError(f"the fake engine ended: {paths.log(engine.index).read_text()}")
        time.sleep(0.01)
    raise TimeoutError("the fake engine did not start")


def _argv(paths: FleetPaths, index: int, port: int = 0) -> list[str]:
    files = ["--port-file", str(_port_file(paths, index)), "--key-file", str(paths.key)]
    return [sys.executable, str(_SCRIPT), "--port", str(port), *files]


def _record(paths: FleetPaths, engine: FakeEngineProcess) -> EngineRecord:
    return EngineRecord(
        index=engine.index,
        engine_id=engine.engine_id,
        url=engine.url,
        process=identify(engine.process.pid),
        argv=_argv(paths, engine.index, int(engine.url.rpartition(":")[2])),
        log=str(paths.log(engine.index)),
    )


def _end_restarted(paths: FleetPaths) -> None:
    """Kill engines that somebody else has started in the place of ours."""
    for process in processes_of(load_fleet(paths).engines):
        kill(process)
