"""A fleet of real vLLM engines for tests, through evalkit's commands only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalkit.adapters.engine_processes import processes_of, shared_memory_of
from evalkit.ground.layout import MARKER, FleetPaths, RunPaths
from evalkit.ground.schema import EngineRecord
from evalkit.state.fleet import load_fleet
from tests.engines import START_TIMEOUT, VLLM_ARGS, Engine
from tests.models import make_model

# Modules that the engine imports; they must not be found in the directory that `fleet up` was called from.
POISON = ("json", "random", "torch", "agent", "loader")


@dataclass(frozen=True)
class RealFleet:
    """A fleet that is up.

    Attributes:
        models: complete snapshots in `snapshot_dir` by a short name: `a` is step_10, `b` is step_20.
        name: the fleet's.
    """

    root: Path
    models: dict[str, Path]
    name: str = "eval"

    @property
    def run_dir(self) -> Path:
        return self.root / "run"

    @property
    def snapshot_dir(self) -> Path:
        return self.root / "snapshots"

    @property
    def paths(self) -> FleetPaths:
        return RunPaths(self.run_dir).fleet(self.name)

    @property
    def records(self) -> list[EngineRecord]:
        """As the fleet record has them now: a restart changes them."""
        return load_fleet(self.paths).engines

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.records]

    @property
    def key(self) -> str:
        return self.paths.key.read_text().strip()

    @property
    def engines(self) -> list[Engine]:
        return [Engine(url, self.key) for url in self.urls]

    def environment(self) -> dict[str, str]:
        own = {
            "EVALKIT_RUN_DIR": str(self.run_dir),
            "EVALKIT_EVAL_HF_DIR": str(self.snapshot_dir),
            "EVALKIT_FLEET": self.name,
        }
        return {**os.environ, **own}

    def call(self, *words: str | Path, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run `evalkit WORDS` as a process; its exit code must be `code`."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "evalkit", *map(str, words)],
            env=self.environment(),
            cwd=self.root / "cwd",
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT + 60,
        )
        assert code is None or done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *words: str | Path, code: int = 0) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.call(*words, "--json", code=code).stdout)
        return answer["result"]

    def up(self, *, engines: int, ranks: int = 1, code: int = 0) -> subprocess.CompletedProcess[str]:
        options = {"--model": self.root / "boot", "--engines": engines, "--num-gpus-per-engine": ranks}
        words = [str(word) for option in options.items() for word in option]
        return self.call("fleet", "up", *words, "--timeout", str(START_TIMEOUT), "--", *VLLM_ARGS, code=code)

    def shared_memory(self) -> set[Path]:
        """Files in /dev/shm that the engines have mapped now."""
        return {path for process in processes_of(self.records) for path in shared_memory_of(process.pid)}

    def down(self) -> None:
        """End the fleet, and check that nothing of it is left."""
        engines, shared = self.records, self.shared_memory()
        self.call("fleet", "down")
        assert processes_of(engines) == set()
        assert [path for path in shared if path.exists()] == []
        assert [engine.tmp for engine in engines if Path(engine.tmp).exists()] == []
        assert not self.paths.key.exists()


@contextmanager
def real_fleet_in(root: Path, *, engines: int, ranks: int = 1) -> Iterator[RealFleet]:
    """A fleet with its models in the new directory `root`, ended and checked for remains afterwards."""
    fleet = make_fleet(root)
    try:
        fleet.up(engines=engines, ranks=ranks)
        yield fleet
    finally:
        fleet.down()


def make_fleet(root: Path) -> RealFleet:
    """The directories of a fleet, with a boot model and two snapshots; nothing is started."""
    (root / "cwd").mkdir()
    for name in POISON:
        (root / "cwd" / f"{name}.py").write_text("raise RuntimeError('imported from the current directory')\n")
    make_model(root / "boot", 1)
    models = {
        "a": make_model(root / "snapshots" / "step_10", 2),
        "b": make_model(root / "snapshots" / "step_20", 3, shards=2),
    }
    for path in models.values():
        (path / MARKER).touch()
    return RealFleet(root, models)
