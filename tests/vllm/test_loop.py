"""The loop on real engines: dispatch, land, give back; and its shell dies."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evalkit.ground.layout import RunPaths
from tests.ledgers import is_alive, wait_for
from tests.models import make_model
from tests.real_fleet import RealFleet

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {seed: make_model(root / f"seed-{seed}", seed) for seed in (5, 6, 7)}


@pytest.fixture(scope="module")
def evals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_suite(tmp_path_factory.mktemp("suite"), rows=8, length=16)


def make_suite(root: Path, rows: int, length: int) -> Path:
    prompts = [{"input": f"Tell me of {i}.", "label": "?"} for i in range(rows)]
    (root / "tales.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (root / "evals.yaml").write_text(
        f"eval:\n  defaults: {{rm_type: exact, temperature: 0, max_response_len: {length}, min_new_tokens: {length}}}\n"
        "  datasets:\n    tales: {path: tales.jsonl}\n"
    )
    return root / "evals.yaml"


@pytest.fixture(autouse=True)
def settled(real_fleet: RealFleet) -> Iterator[None]:
    yield
    real_fleet.call("drain", "--timeout", "120s", code=None)


STEPS = itertools.count(1000, 10)  # rising, whatever the order of the tests: the newest snapshots are the last made


def outcome(fleet: RealFleet, step: int, attempt: int = 1) -> dict[str, Any]:
    return json.loads(RunPaths(fleet.run_dir).attempt(step, attempt).outcome.read_text())


def responses(fleet: RealFleet, step: int) -> list[str]:
    path = RunPaths(fleet.run_dir).attempt(step, 1).results / "samples" / "tales.jsonl"
    lines = sorted(map(json.loads, path.read_text().splitlines()), key=lambda line: line["index"])
    return [line["response"] for line in lines]


def test_points_land_at_their_steps_and_give_their_snapshots_back(
    real_fleet: RealFleet, checkpoints: dict[int, Path], evals: Path
) -> None:
    steps = [next(STEPS) for _ in range(4)]
    for step, seed in zip(steps, (5, 6, 7, 5), strict=True):
        words = ("--step", str(step), "--from", checkpoints[seed], "--suite", evals)
        assert real_fleet.json("dispatch", *words)["state"] == "dispatched"
    real_fleet.call("drain", "--timeout", "200s", "--fail-on-skip")
    for step in steps:
        found = outcome(real_fleet, step)
        assert (found["outcome"], found["weight_version"]) == ("landed", str(step)), found
        assert found["metrics"]["eval/tales/weight_version/mean"] == step
        assert found["metrics"]["eval/tales/weight_version/mixed_version_ratio"] == 0
        assert len(found["proof"]["engines"]) == 2
    assert responses(real_fleet, steps[0]) == responses(real_fleet, steps[3])
    assert len({tuple(responses(real_fleet, step)) for step in steps[:3]}) == 3
    left = [step for step in steps if (real_fleet.snapshot_dir / f"step_{step}").exists()]
    assert left == steps[2:]
    assert list(RunPaths(real_fleet.run_dir).active.iterdir()) == []


def test_the_trainers_shell_dies_and_the_result_lands(
    real_fleet: RealFleet, checkpoints: dict[int, Path], tmp_path: Path
) -> None:
    evals, step = make_suite(tmp_path, rows=24, length=96), next(STEPS)
    script = f'"{sys.executable}" -m evalkit dispatch --step {step} --from "$1" --suite "$2"; echo done; sleep 600'
    shell = subprocess.Popen(
        ["bash", "-c", script, "trainer", checkpoints[6], evals],
        env=real_fleet.environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert shell.stdout is not None
    assert shell.stdout.readline() == f"step_{step} dispatched\n"
    assert shell.stdout.readline() == "done\n"
    os.killpg(shell.pid, signal.SIGKILL)
    shell.wait(10)
    real_fleet.call("drain", "--timeout", "200s", "--fail-on-skip")
    assert outcome(real_fleet, step)["outcome"] == "landed"
    real_fleet.call("probe")


def test_a_stopped_worker_loses_the_engines_and_gets_nothing_back(
    real_fleet: RealFleet, checkpoints: dict[int, Path], evals: Path, tmp_path: Path
) -> None:
    long, first, second = make_suite(tmp_path, rows=64, length=200), next(STEPS), next(STEPS)
    real_fleet.json("dispatch", "--step", str(first), "--from", checkpoints[5], "--suite", long, "--timeout", "20s")
    attempt = RunPaths(real_fleet.run_dir).attempt(first, 1)
    wait_for((attempt.results / "progress.json").exists, "the evaluation", 60)
    identity = json.loads((attempt.results / "worker.json").read_text())
    os.kill(identity["pid"], signal.SIGSTOP)
    (attempt.results / "worker.json").write_text(json.dumps({**identity, "boot_id": "another"}))
    try:
        deadline = json.loads(attempt.record.read_text())["deadline"]
        wait_for(lambda: time.time() > deadline + 5.1, "the deadline")
        real_fleet.json("dispatch", "--step", str(second), "--from", checkpoints[6], "--suite", evals)
        real_fleet.call("drain", "--timeout", "200s")
        assert outcome(real_fleet, first)["reason"] == "timeout"
        assert outcome(real_fleet, second)["outcome"] == "landed"
        epoch = outcome(real_fleet, second)["proof"]["epoch"]
        order = {
            "fleet": "eval",
            "epoch": epoch - 1,
            "path": str(checkpoints[5]),
            "version": str(first),
            "digest": "0" * 64,
        }
        assert [engine.call("/evalkit/pin", order).status for engine in real_fleet.engines] == [409, 409]
        before = (outcome(real_fleet, first), RunPaths(real_fleet.run_dir).metrics.read_text())
        os.kill(identity["pid"], signal.SIGCONT)
        wait_for(lambda: not is_alive(identity["pid"]), "its end")
    finally:
        if is_alive(identity["pid"]):
            os.kill(identity["pid"], signal.SIGKILL)
    assert (outcome(real_fleet, first), RunPaths(real_fleet.run_dir).metrics.read_text()) == before
    assert {engine.state()["pin"]["version"] for engine in real_fleet.engines} == {str(second)}
