"""Running evalkit's commands as real processes against a run in a temporary directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evalkit.ground.layout import RunPaths, SnapshotPaths
from evalkit.ground.processes import start_time
from tests.fakes import tiny_snapshot

FAULTPOINTS = Path(__file__).parent / "faultpoints"


@dataclass
class Run:
    """A run with its snapshot directory, a suite, and checkpoints to export from."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.root / "run"

    @property
    def snapshot_dir(self) -> Path:
        return self.root / "snapshots"

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.run_dir)

    @property
    def snapshots(self) -> SnapshotPaths:
        return SnapshotPaths(self.snapshot_dir)

    def checkpoint(self, value: float, name: str = "checkpoint") -> Path:
        return tiny_snapshot(self.root / f"{name}-{value}", value=value)

    def environment(self, **more: str) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("EVALKIT_", "SLURM_"))},
            "EVALKIT_RUN_DIR": str(self.run_dir),
            "EVALKIT_EVAL_HF_DIR": str(self.snapshot_dir),
            "EVALKIT_SUITE": str(self.root / "evals.yaml"),
            **self.env,
            **more,
        }

    def start(self, *words: str | Path | int, fault: dict[str, Any] | None = None, **env: str) -> subprocess.Popen[str]:
        if fault is not None:
            env = {**env, "EVALKIT_FAULT": json.dumps(fault), "PYTHONPATH": str(FAULTPOINTS)}
        return subprocess.Popen(
            [sys.executable, "-m", "evalkit", *map(str, words)],
            env=self.environment(**env),
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(
        self, *words: str | Path | int, code: int | None = 0, fault: dict[str, Any] | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, fault=fault, **env)
        out, err = process.communicate(timeout=90)
        done = subprocess.CompletedProcess(list(map(str, words)), process.returncode, out, err)
        assert code is None or done.returncode == code, f"{words}: {done.returncode}\n{out}\n{err}"
        return done

    def json(self, *words: str | Path | int, code: int | None = 0, **env: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.call(*words, "--json", code=code, **env).stdout)
        return answer.get("result") or answer["error"]

    def dispatch(self, *words: str | Path | int, **kwargs: Any) -> dict[str, Any]:
        return self.json("dispatch", *words, **kwargs)

    def outcome(self, step: int, attempt: int = 1) -> dict[str, Any]:
        return json.loads(self.paths.attempt(step, attempt).outcome.read_text())

    def outcomes(self) -> dict[str, str]:
        """Every outcome by step.attempt: `landed`, or the reason of the skip."""
        found = {}
        for path in self.paths.points.glob("*/[0-9]*.json"):
            outcome = json.loads(path.read_text())
            found[f"{path.parent.name}.{path.stem}"] = outcome["reason"] or "landed"
        return found

    def rows(self) -> list[dict[str, Any]]:
        text = self.paths.metrics.read_text() if self.paths.metrics.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def names(self) -> list[str]:
        """The snapshots that are there."""
        return sorted(path.name for path in self.snapshot_dir.glob("step_*"))

    def leftovers(self) -> list[str]:
        """Everything that must not outlive an attempt."""
        places = [self.paths.active, self.snapshots.incoming, self.snapshots.trash]
        found = [str(path) for place in places if place.is_dir() for path in place.iterdir()]
        return found + [str(path) for path in self.paths.points.glob("*/.*")]

    def log(self, step: int, attempt: int = 1) -> str:
        path = self.paths.attempt(step, attempt).results / "log"
        return path.read_text() if path.exists() else ""


def wait_for(condition: Callable[[], object], what: str, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} not within {timeout:g} s")
        time.sleep(0.01)


def fault(role: str, place: str, when: str, note: Path, action: str | int = "kill", **more: Any) -> dict[str, Any]:
    module, _, function = place.partition(":")
    return {
        "role": role,
        "module": module,
        "function": function,
        "when": when,
        "action": action,
        "note": str(note),
        **more,
    }


def wait_for_death(note: Path) -> None:
    wait_for(lambda: note.exists() and note.read_text(), "the fault")
    wait_for(lambda: not is_alive(int(note.read_text())), "the death")


def is_alive(pid: int) -> bool:
    return start_time(pid) is not None


def kill_worker(run: Run, step: int) -> None:
    pid = json.loads((run.paths.attempt(step, 1).results / "worker.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(pid), "the death")


def make_run(root: Path, rows: int = 4) -> Run:
    prompts = [{"prompt": f"{i}+{i}=", "label": str(2 * i)} for i in range(rows)]
    (root / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (root / "evals.yaml").write_text(
        "eval:\n  datasets:\n    - name: sums\n      path: sums.jsonl\n      rm_type: exact\n"
        "      input_key: prompt\n      label_key: label\n      temperature: 0.0\n      max_response_len: 8\n"
    )
    return Run(root)
