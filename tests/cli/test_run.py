"""`evalkit run` as its users call it, against fake engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pytest_console_scripts import RunResult, ScriptRunner

from evalkit.ground.layout import MARKER
from evalkit.ground.locks import is_held
from evalkit.state.fleet import change_fleet, load_fleet
from evalkit.state.fleet_queue import hold_fleet
from evalkit.state.run import find_run, remember
from tests.fakes import FakeFleet, fake_fleet, tiny_snapshot

pytestmark = pytest.mark.script_launch_mode("inprocess")


class Place:
    """A run directory with a fleet, two snapshots, a suite; and `evalkit run` called in it."""

    def __init__(self, root: Path, fleet: FakeFleet, runner: ScriptRunner) -> None:
        self.root, self.fleet, self.runner = root, fleet, runner
        self.run_dir = fleet.paths.directory.parent
        self.snapshots = root / "snapshots"
        for step in (40, 50):
            (tiny_snapshot(self.snapshots / f"step_{step}", value=step) / MARKER).touch()
        rows = [json.dumps({"input": f"{i}+{i}=", "label": 2 * i}) + "\n" for i in range(10)]
        (root / "sums.jsonl").write_text("".join(rows))
        self.suite = root / "evals.yaml"
        self.suite.write_text("eval: {datasets: [{name: sums, path: sums.jsonl, rm_type: exact, temperature: 0}]}")

    def words(self, *words: object) -> list[str]:
        own = ["--run-dir", str(self.run_dir), "--eval-hf-dir", str(self.snapshots)]
        return ["run", *own, *map(str, words)]

    def run(self, *words: object, code: int = 0, suite: bool = True) -> RunResult:
        given = ["--suite", str(self.suite)] if suite else []
        done = self.runner.run(["evalkit", *self.words(*words, *given)], print_result=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def json(self, *words: object) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.run(*words, "--json").stdout)["result"]
        return result

    @property
    def epoch(self) -> int:
        return load_fleet(self.fleet.paths).epoch

    def served(self) -> int:
        return sum(engine.log()["served"] for engine in self.fleet.engines)

    def start(self, *words: object) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "evalkit", *self.words(*words, "--suite", self.suite)]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeFleet]:
    with fake_fleet(tmp_path_factory.mktemp("run"), 2) as fleet:
        yield fleet


@pytest.fixture
def place(tmp_path: Path, shared: FakeFleet, script_runner: ScriptRunner) -> Iterator[Place]:
    shared.faults(clear=True)
    before = set(shared.paths.directory.parent.iterdir())
    yield Place(tmp_path, shared, script_runner)
    assert not is_held(shared.paths.lock)
    assert not list(shared.paths.queue.glob("*"))
    for path in set(shared.paths.directory.parent.iterdir()) - before:
        if path.is_file():
            path.unlink()


@pytest.fixture
def mortal(tmp_path: Path, script_runner: ScriptRunner) -> Iterator[Place]:
    """A place with a fleet of its own, not pinned yet, whose engines may die."""
    with fake_fleet(tmp_path / "run", 2) as fleet:
        yield Place(tmp_path, fleet, script_runner)


def test_it_pins_evaluates_and_prints_the_metrics(place: Place) -> None:
    done = place.run("step_40")
    shown = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert (shown["eval/sums"], shown["eval/step"], shown["eval/sums/n_samples"]) == ("1", "40", "10")
    assert shown["eval/sums/weight_version/mean"] == "40"
    results = Path(shown["results"])
    assert results.parent == place.run_dir / "results" / "manual"
    assert results.name.startswith("40-20")
    assert len((results / "samples" / "sums.jsonl").read_text().splitlines()) == 10
    assert done.stderr == ""


def test_it_pins_only_what_is_not_pinned_already(place: Place) -> None:
    first = place.json("step_40")
    epoch = place.epoch
    again = place.json("--dir", "step_40")
    assert place.epoch == epoch
    assert again["digest"] == first["digest"]
    assert again["results"] != first["results"]
    other = place.json(f"{place.snapshots}/step_50")
    assert (place.epoch, other["version"]) == (epoch + 1, "50")
    assert other["digest"] != first["digest"]
    assert other["metrics"]["eval/step"] == 50


def test_one_engine_on_another_epoch_is_pinned_again(place: Place) -> None:
    place.run("step_40")
    record = change_fleet(place.fleet.paths, lambda r: msgspec.structs.replace(r, epoch=r.epoch + 1))
    path = str(place.snapshots / "step_40")
    body = {"epoch": record.epoch, "path": path, "version": "40", "fleet": "eval"}
    place.fleet.engines[1].call("/evalkit/pin", body)
    place.run(code=69)
    place.run("step_40")
    assert place.epoch == record.epoch + 1


def test_without_a_snapshot_it_evaluates_what_is_pinned(place: Place) -> None:
    place.run("step_50")
    epoch = place.epoch
    answer = place.json()
    assert (answer["version"], place.epoch) == ("50", epoch)
    record = json.loads((Path(answer["results"]) / "metrics.json").read_text())
    assert (record["proof"]["epoch"], record["proof"]["version"]) == (epoch, "50")


def test_without_a_snapshot_unpinned_engines_are_refused(mortal: Place) -> None:
    done = mortal.run(code=69)
    assert done.stderr.startswith("evalkit run: engine 0 (http://")
    assert done.stderr.endswith("it is not pinned; pin the fleet with evalkit pin\n")
    assert not (mortal.run_dir / "results").exists()


def test_without_a_snapshot_a_dead_engine_is_told(mortal: Place) -> None:
    mortal.run("step_40")
    mortal.fleet.engines[1].kill()
    assert "engine 1 (http://" in mortal.run(code=69).stderr


def test_a_dead_engine_is_restarted_by_the_pin(mortal: Place) -> None:
    mortal.run("step_40")
    mortal.fleet.engines[1].kill()
    answer = mortal.json("step_40")
    assert answer["n_scored"] == 10
    assert mortal.epoch == 2


def test_the_suite_may_come_from_the_environment_or_the_run(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no suite is given" in place.run("step_40", suite=False, code=2).stderr
    monkeypatch.setenv("EVALKIT_SUITE", str(place.suite))
    place.run("step_40", suite=False)
    monkeypatch.delenv("EVALKIT_SUITE")
    remember(place.run_dir, suite=place.suite)
    place.run("step_40", suite=False)


@pytest.mark.parametrize(
    ("suite", "row", "code", "message"),
    [
        ("eval: {datasets: [{name: sums, path: sums.jsonl, rm_type: exact, top_q: 1}]}", "", 65, "evals.yaml:1: "),
        (
            "eval: {datasets: [{name: sums, path: sums.jsonl, rm_type: numeric}]}",
            '{"input": "x"}',
            65,
            "sums.jsonl:11: ",
        ),
        ("eval: {datasets: [{name: sums, path: sums.jsonl, rm_type: 'no_such_module:f'}]}", "", 65, "no_such_module:f"),
        (None, "", 2, "there is no suite"),
    ],
)
def test_a_bad_suite_is_refused_before_anything_is_touched(
    place: Place, suite: str | None, row: str, code: int, message: str
) -> None:
    epoch, served, held = place.epoch, place.served(), load_fleet(place.fleet.paths).holder
    results = sorted((place.run_dir / "results").rglob("*"))
    place.suite.write_text(suite) if suite else place.suite.unlink()
    with (place.root / "sums.jsonl").open("a") as file:
        file.write(row)
    done = place.run("step_40", code=code)
    assert message in done.stderr
    assert done.stdout == ""
    assert (place.epoch, place.served(), load_fleet(place.fleet.paths).holder) == (epoch, served, held)
    assert sorted((place.run_dir / "results").rglob("*")) == results


def test_snapshots_that_are_not_there_or_not_complete_are_refused(place: Place) -> None:
    assert "there is no snapshot" in place.run("step_60", code=66).stderr
    (place.snapshots / "step_40" / MARKER).unlink()
    assert "it is not complete" in place.run("step_40", code=66).stderr
    assert "given twice" in place.run("step_40", "--dir", "step_50", code=2).stderr
    assert "there is no fleet other" in place.run("step_50", "--fleet", "other", code=69).stderr


def test_results_go_where_they_are_told_and_replace_nothing(place: Place) -> None:
    output = place.root / "out" / "here"
    answer = place.json("step_40", "--output", output)
    assert answer["results"] == str(output)
    assert sorted(path.name for path in output.iterdir()) == ["metrics.json", "progress.json", "samples"]
    before = (output / "metrics.json").read_bytes()
    assert "already holds results" in place.run("step_40", "--output", output, code=2).stderr
    assert (output / "metrics.json").read_bytes() == before


def test_a_fleet_in_use_is_waited_for_until_the_time_is_up(place: Place) -> None:
    with hold_fleet(place.fleet.paths, timeout=5):
        assert "was in use for 0.3 s" in place.run("step_40", "--timeout", "0.3s", code=75).stderr


def test_an_evaluation_that_takes_too_long_is_75(place: Place) -> None:
    place.run("step_40")
    place.fleet.faults(hang=True)
    assert "did not end within 1 s" in place.run("step_40", "--timeout", "1s", code=75).stderr


def test_a_scorer_may_end_it(place: Place) -> None:
    place.suite.write_text("eval: {datasets: [{name: sums, path: sums.jsonl, rm_type: run_judge:score}]}")
    (place.root / "run_judge.py").write_text(
        "from evalkit import EvalSkip\n\ndef score(response, label, sample):\n    raise EvalSkip('no_judge', 'gone')\n"
    )
    assert "a scorer ended the evaluation: no_judge: gone" in place.run("step_40", code=1).stderr


def test_what_the_first_run_is_given_is_remembered(mortal: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = f"./{mortal.fleet.paths.directory.name}/{mortal.fleet.paths.name}"
    monkeypatch.chdir(mortal.run_dir)
    mortal.run("step_60", "--fleet", fleet, code=66)
    assert find_run(mortal.run_dir) is None
    mortal.run("step_40", "--fleet", fleet)
    record = find_run(mortal.run_dir)
    assert record is not None
    recorded = (record.suite, record.snapshot_dir, record.fleet)
    assert recorded == (str(mortal.suite), str(mortal.snapshots), str(mortal.fleet.paths.record.with_suffix("")))
    monkeypatch.chdir(mortal.root)
    mortal.run("step_50", suite=False)


def test_a_fleet_that_was_taken_over_is_left_alone(place: Place) -> None:
    place.run("step_40")
    place.fleet.faults(hang=True)
    process = place.start("step_40")
    place.fleet.engines[1].wait("in_flight", 5)
    change_fleet(place.fleet.paths, lambda record: msgspec.structs.replace(record, holder="another"))
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 75, errors
    assert "was taken over" in errors


def test_mostly_failed_samples_are_a_failure_that_names_the_first(place: Place) -> None:
    place.fleet.faults(status=400)
    done = place.run("step_40", "--json", code=1)
    error = json.loads(done.stdout)["error"]
    assert (error["kind"], error["code"]) == ("incomplete", 1)
    assert "10 of 10 samples of sums got no answer, the first error: HTTP 400: fault 400" in error["message"]


def test_an_engine_that_answers_under_another_pin_is_a_violation(place: Place) -> None:
    place.run("step_40")
    place.fleet.faults(stamp="other")
    error = json.loads(place.run("step_40", "--json", code=1).stdout)["error"]
    assert error["kind"] == "pin_violation"


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_frees_the_fleet(place: Place, signum: int, code: int) -> None:
    place.run("step_40")
    place.fleet.faults(hang=True)
    output = place.root / "out"
    process = place.start("step_40", "--output", output, "--json")
    place.fleet.engines[1].wait("in_flight", 5)
    os.kill(process.pid, signum)
    answer, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    assert json.loads(answer)["error"]["code"] == code
    assert "Traceback" not in errors
    assert not (output / "metrics.json").exists()
    place.fleet.faults(clear=True)
    place.run("step_40", "--output", output)


def test_bad_options_are_usage_errors(place: Place) -> None:
    for words in (["--concurrency", "0"], ["--timeout", "soon"], ["--nonsense"], ["a", "b"]):
        place.run(*words, code=2)
