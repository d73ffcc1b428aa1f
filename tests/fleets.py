"""Running evalkit's fleet commands as real processes, with engines that `tests/fake_vllm` stands in for."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evalkit.adapters.engine_processes import processes_of
from evalkit.ground.layout import FleetPaths, RunPaths
from evalkit.ground.processes import ProcessId
from evalkit.ground.schema import EngineRecord, FleetRecord
from evalkit.state.fleet import load_fleet

TESTS = Path(__file__).parent
FAKE_VLLM = TESTS / "fake_vllm"
FAKE_GPU_BUILD = TESTS / "fake_vllm_gpu"


def wait_until(what: str, condition: Callable[[], Any], timeout: float = 30.0) -> Any:
    """Wait until `condition` is true, and return what it gave."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:g} s: {what}")
        time.sleep(0.02)
    return value


class FleetCommands:
    """`evalkit fleet …` on one RUN_DIR; remembers every engine that it saw, to check that they are gone."""

    def __init__(self, root: Path, environment: dict[str, str] | None = None) -> None:
        self.root = root
        self.run = RunPaths(root / "run")
        self.model = root / "model"
        self.model.mkdir(exist_ok=True)
        (self.model / "config.json").write_text("{}")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("EVALKIT_")},
            "PYTHONPATH": str(FAKE_VLLM),
            "EVALKIT_RUN_DIR": str(self.run.root),
            **(environment or {}),
        }
        self.seen: dict[str, EngineRecord] = {}

    def paths(self, name: str = "eval") -> FleetPaths:
        return self.run.fleet(name)

    def record(self, name: str = "eval") -> FleetRecord:
        record = load_fleet(self.paths(name))
        self.seen |= {engine.engine_id: engine for engine in record.engines}
        return record

    def engines(self, name: str = "eval") -> list[EngineRecord]:
        return self.record(name).engines

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "evalkit", *words],
            env=self.environment,
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=90)
        assert process.returncode == code, f"{words}: {process.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(list(words), process.returncode, out, err)

    def json(self, *words: str, code: int = 0) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.call(*words, "--json", code=code).stdout)
        return answer["result"]

    def up_words(self, *vllm_args: str, engines: int = 1, options: Sequence[str] = ()) -> list[str]:
        base = ["fleet", "up", "--model", str(self.model), "--engines", str(engines)]
        return [*base, *options, "--", *vllm_args]

    def up(
        self, *vllm_args: str, engines: int = 1, code: int = 0, options: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        done = self.call(*self.up_words(*vllm_args, engines=engines, options=options), code=code)
        for path in self.run.fleets.glob("*.json"):
            self.record(path.stem)
        return done

    def speak(self, engine: EngineRecord, path: str, body: Any = None) -> dict[str, Any]:
        """One request to an engine, with the fleet's key."""
        key = self.paths().key.read_text().strip()
        data = None if body is None else json.dumps(body).encode()
        headers = {"x-evalkit-key": key, "content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(engine.url + path, data, headers), timeout=30) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def state(self, engine: EngineRecord) -> dict[str, Any]:
        return self.speak(engine, "/evalkit/state")

    def faults(self, engine: EngineRecord, **faults: Any) -> None:
        """Set faults of a running engine, as tests/fake_engine.py lists them; a restart clears them."""
        self.speak(engine, "/fake/faults", faults)

    def processes(self) -> set[ProcessId]:
        """The live processes of all engines seen so far."""
        return processes_of(self.seen.values())

    def shared_memory(self) -> list[Path]:
        return [path for engine_id in self.seen if (path := Path(f"/dev/shm/vllm_fake_{engine_id}")).exists()]

    def assert_nothing_left(self) -> None:
        assert self.seen
        assert self.processes() == set()
        assert self.shared_memory() == []
        assert not [engine.tmp for engine in self.seen.values() if Path(engine.tmp).exists()]

    def down_all(self) -> None:
        for path in self.run.fleets.glob("*.json"):
            self.call("fleet", "down", "--fleet", path.stem)


def kill_server(engine: EngineRecord, signum: signal.Signals = signal.SIGKILL) -> None:
    assert engine.process is not None
    os.kill(engine.process.pid, signum)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def fake_nvidia_smi(directory: Path, gpus: Sequence[tuple[str, int]], apps: Sequence[tuple[str, int]] = ()) -> Path:
    """A program `nvidia-smi` in the new `directory`, which is returned.

    Args:
        gpus: index and MiB used of each.
        apps: index and pid of processes on them.
    """
    directory.mkdir()
    rows = "\n".join(f"{index}, GPU-uuid-{index}, {used}, 81559" for index, used in gpus)
    pids = "\n".join(f"GPU-uuid-{index}, {pid}" for index, pid in apps)
    script = directory / "nvidia-smi"
    script.write_text(f'#!/bin/sh\ncase "$1" in\n*query-gpu*) echo "{rows}";;\n*) echo "{pids}";;\nesac\n')
    script.chmod(0o755)
    return directory
