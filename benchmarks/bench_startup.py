"""How long a command keeps the trainer waiting, against `python -c pass`, each round side by side.

Times are medians over the rounds, ratios medians of each round's ratio, so that a busy machine disturbs both alike.
Ends with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save_file

from evalkit.ground.layout import MARKER, RunPaths, SnapshotPaths
from evalkit.ground.schema import Outcome
from evalkit.state.metrics_log import row_of

EVALKIT = str(Path(sys.executable).parent / "evalkit")
HELP_TARGET, DISPATCH_TARGET, LEDGER_TARGET = 6.0, 15.0, 1.5
SIZES = (10, 10_000)


class Ledger:
    """A run whose points are all settled, and snapshots of it to dispatch that need no export."""

    def __init__(self, root: Path, points: int) -> None:
        self.run = RunPaths(root / "run")
        self.snapshots = SnapshotPaths(root / "snapshots")
        self.next_step = points
        self.snapshots.root.mkdir(parents=True)
        suite = root / "evals.yaml"
        suite.write_text("eval: {datasets: [{name: one, path: one.jsonl, rm_type: exact}]}\n")
        (root / "one.jsonl").write_text('{"input": "1", "label": "1"}\n')
        self.environment = {
            **os.environ,
            "EVALKIT_RUN_DIR": str(self.run.root),
            "EVALKIT_EVAL_HF_DIR": str(self.snapshots.root),
            "EVALKIT_SUITE": str(suite),
        }
        self.settled(points)

    def settled(self, points: int) -> None:
        self.call("dispatch")  # makes the run
        rows = []
        for step in range(points):
            outcome = Outcome(
                step=step,
                attempt=1,
                incarnation=1,
                outcome="landed",
                weight_version=str(step),
                admitted_at=1e9 + step,
                settled_at=1e9 + step + 1,
                metrics={"eval/one": 0.5, "eval/step": step},
            )
            path = self.run.attempt(step, 1).outcome
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(outcome))
            rows.append(msgspec.json.encode(row_of(outcome)))
        self.run.metrics.write_bytes(b"".join(row + b"\n" for row in rows))

    def new_snapshot(self) -> None:
        path = self.snapshots.snapshot(self.next_step)
        self.next_step += 1
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"architectures": ["None"], "model_type": "none"}))
        save_file({"weight": np.zeros(8, np.float32)}, path / "model.safetensors")
        (path / MARKER).touch()

    def call(self, *words: str) -> None:
        command = [EVALKIT, *words]
        subprocess.run(command, env=self.environment, stdout=subprocess.DEVNULL, check=True, timeout=120)

    def dispatch(self) -> float:
        """Seconds of the call that finds the newest snapshot, admits it and hands it to a worker."""
        self.new_snapshot()
        seconds = timed(lambda: self.call("dispatch"))
        # There is no fleet: the worker soon gives up, and must not disturb the next measurement.
        self.call("drain", "--timeout", "60s")
        return seconds


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def process(*command: str) -> Callable[[], float]:
    return lambda: timed(lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=120))


def measure(cases: dict[str, Callable[[], float]], rounds: int) -> list[dict[str, float]]:
    for case in cases.values():
        case()  # byte code and caches
    result = []
    for _ in range(rounds):
        names = random.sample(list(cases), len(cases))
        result.append({name: cases[name]() for name in names})
    return result


def ratio(rounds: list[dict[str, float]], one: str, other: str) -> float:
    return statistics.median(row[one] / row[other] for row in rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds_wanted = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as temporary:
        small, large = (Ledger(Path(temporary) / str(size), size) for size in SIZES)
        idle = lambda ledger: lambda: timed(lambda: ledger.call("dispatch"))  # noqa: E731
        cases = {
            "python -c pass": process(sys.executable, "-c", "pass"),
            "evalkit --help": process(EVALKIT, "--help"),
            f"dispatch, nothing due, {SIZES[0]} points": idle(small),
            f"dispatch, nothing due, {SIZES[1]} points": idle(large),
            f"dispatch, {SIZES[0]} points": small.dispatch,
            f"dispatch, {SIZES[1]} points": large.dispatch,
        }
        rounds = measure(cases, rounds_wanted)
    for name in cases:
        median = statistics.median(row[name] for row in rounds)
        print(f"{name:<40} {median * 1e3:8.1f} ms {ratio(rounds, name, 'python -c pass'):6.1f} x")
    bare, small_name, large_name = "python -c pass", f"dispatch, {SIZES[0]} points", f"dispatch, {SIZES[1]} points"
    targets = [
        ("evalkit --help", bare, HELP_TARGET),
        (small_name, bare, DISPATCH_TARGET),
        (large_name, bare, DISPATCH_TARGET),
        (large_name, small_name, LEDGER_TARGET),
    ]
    missed = [f"{a} / {b} is over {most:g}" for a, b, most in targets if ratio(rounds, a, b) > most]
    print("\n".join(missed) or "all targets met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
