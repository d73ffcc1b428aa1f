"""`evalkit gc`: what is taken away, and what must not be."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from pytest_console_scripts import ScriptRunner

import evalkit
from evalkit.ground.errors import BusyError
from evalkit.ground.files import write_struct
from evalkit.ground.layout import MANIFEST, MARKER, RunPaths, SnapshotPaths
from evalkit.ground.locks import locked
from evalkit.ground.processes import this_process
from evalkit.ground.schema import ActiveRecord, FleetRecord, Outcome, SnapshotId
from evalkit.state import attempts
from evalkit.state.run import remember
from evalkit.state.snapshot import claim_snapshot_dir, known_digest, open_snapshot
from evalkit.verbs.retiring import retire_settled
from evalkit.verbs.snapshot_making import ExportResult
from evalkit.verbs.snapshot_users import is_settled
from tests.fakes import tiny_snapshot


@dataclass
class Place:
    """A run whose SNAPSHOT_DIR has settled snapshots of the steps 1 to 4."""

    run: RunPaths
    snapshots: SnapshotPaths
    runner: ScriptRunner

    def gc(self, *words: str, snapshot_dir: Path | None = None, code: int = 0) -> str:
        own = ["--run-dir", str(self.run.root), "--eval-hf-dir", str(snapshot_dir or self.snapshots.root)]
        done = self.runner.run(["evalkit", "gc", "--keep", "0", *own, *words], print_result=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def names(self) -> list[str]:
        return sorted(path.name for path in self.snapshots.root.glob("step_*"))

    def fleet(self, path: Path, **more: str) -> None:
        path.parent.mkdir(exist_ok=True)
        write_struct(path, FleetRecord(name=path.stem, state="up", **more))


def settled(run: RunPaths, step: int, **more: str | None) -> None:
    path = run.attempt(step, 1).outcome
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {"step": step, "attempt": 1, "incarnation": 0, "outcome": "landed", "admitted_at": 0.0, "settled_at": 0.0}
    write_struct(path, Outcome(**{**values, **more}))


@pytest.fixture
def place(tmp_path: Path, script_runner: ScriptRunner) -> Place:
    run, snapshots = RunPaths(tmp_path / "run"), SnapshotPaths(tmp_path / "snapshots")
    record = remember(run.root, snapshot_dir=snapshots.root)
    claim_snapshot_dir(snapshots.root, record.run_id, run.root)
    for step in (1, 2, 3, 4):
        path = tiny_snapshot(snapshots.snapshot(step), value=float(step))
        head = SnapshotId(export_id=f"e{step}", step=step, digest=f"d{step}", run_id=record.run_id)
        write_struct(path / MANIFEST, head)
        (path / MARKER).touch()
        settled(run, step, export_id=f"e{step}", digest=f"d{step}")
    return Place(run, snapshots, script_runner)


@contextmanager
def in_flight(place: Place, snapshot: Path, fleet: str = "eval") -> Iterator[None]:
    """An attempt at step 1, held by this process."""
    now, paths = time.time(), place.run.attempt(1, 2)
    record = ActiveRecord(
        step=1, attempt=2, incarnation=0, snapshot=str(snapshot), suite="", fleet=fleet, keep=2,
        admitted_by=this_process(), admitted_at=now, deadline=now + 3600,
    )  # fmt: skip
    write_struct(paths.record, record)
    with locked(paths.lock, 0):
        yield
    attempts.remove(paths)


def test_all_but_the_newest_goes(place: Place) -> None:
    dry = place.gc("--dry-run")
    assert place.names() == ["step_1", "step_2", "step_3", "step_4"]
    assert sorted(place.gc().splitlines()) == sorted([*dry.splitlines(), *(f"swept  e{step}" for step in (1, 2, 3))])
    assert place.names() == ["step_4"]
    assert os.listdir(place.snapshots.trash) == os.listdir(place.snapshots.locks) == []


@pytest.mark.parametrize("owner", ["nobody", "another run"])
def test_nothing_is_deleted_in_a_directory_that_is_not_the_runs(place: Place, tmp_path: Path, owner: str) -> None:
    theirs = SnapshotPaths(tmp_path / "theirs")
    place.snapshots.root.rename(theirs.root)
    theirs.owner.unlink()
    if owner == "another run":
        claim_snapshot_dir(theirs.root, "another", tmp_path / "another")
    for directory in (theirs.trash, theirs.incoming):
        (directory / "precious").mkdir(parents=True)
        (directory / "precious" / "f").touch()
    before = sorted(theirs.root.rglob("*"))
    for words in ([], ["--dry-run"]):
        assert "theirs is not this run's" in place.gc(*words, snapshot_dir=theirs.root)
    assert retire_settled(place.run, theirs.root, 0) == []
    assert sorted(theirs.root.rglob("*")) == before


@pytest.fixture
def link(place: Place, tmp_path: Path) -> Path:
    """SNAPSHOT_DIR under another path."""
    path = tmp_path / "link"
    path.symlink_to(place.snapshots.root)
    return path


@pytest.mark.parametrize("field", ["model", "pinned"])
def test_what_a_fleet_has_loaded_by_another_path_stays(place: Place, link: Path, field: str) -> None:
    place.fleet(place.run.fleet("eval").record, **{field: str(link / "step_1")})
    assert "keep   step_1: loaded by a fleet" in place.gc()
    assert place.names() == ["step_1", "step_4"]


def test_what_an_attempt_names_by_another_path_stays(place: Place, link: Path) -> None:
    with in_flight(place, link / "step_1"):
        assert "keep   step_1: named by an attempt in flight" in place.gc()
    assert place.names() == ["step_1", "step_4"]


def test_what_a_fleet_elsewhere_has_loaded_stays_while_an_attempt_uses_the_fleet(place: Place, tmp_path: Path) -> None:
    elsewhere = tmp_path / "fleets" / "shared.json"
    place.fleet(elsewhere, model=str(place.snapshots.snapshot(2)))
    with in_flight(place, tmp_path, str(elsewhere)):
        assert "keep   step_2: loaded by a fleet" in place.gc()
    assert place.names() == ["step_2", "step_4"]


def test_nothing_goes_while_a_fleets_record_is_damaged(place: Place) -> None:
    place.run.fleet("eval").record.write_text("{")
    assert "keep   step_1: a fleet's record is damaged" in place.gc()
    assert place.names() == ["step_1", "step_2", "step_3", "step_4"]


def test_a_damaged_outcome_keeps_its_snapshot(place: Place) -> None:
    place.run.attempt(2, 1).outcome.write_text("{")
    assert "keep   step_2: not evaluated yet" in place.gc()
    assert place.names() == ["step_2", "step_4"]


def test_a_lock_of_nothing_goes(place: Place) -> None:
    place.snapshots.locks.mkdir()
    for export_id in ("e4", "gone"):
        place.snapshots.lock(export_id).touch()
    assert "swept  gone" in place.gc()
    assert os.listdir(place.snapshots.locks) == ["e4.lock"]


def test_a_dead_export_goes(place: Place) -> None:
    place.snapshots.locks.mkdir()
    place.snapshots.lock("dead").touch()
    (place.snapshots.incoming / "dead").mkdir(parents=True)
    assert "swept  dead" in place.gc()
    left = [os.listdir(path) for path in (place.snapshots.incoming, place.snapshots.trash, place.snapshots.locks)]
    assert left == [[], [], []]


def test_a_directory_that_was_written_anew_is_due_again(place: Place) -> None:
    path = tiny_snapshot(place.snapshots.snapshot(9), value=9.0)
    (path / MARKER).touch()
    settled(place.run, 9, snapshot=str(path), digest=known_digest(place.run, open_snapshot(path)))
    assert is_settled(place.run, open_snapshot(path))
    tiny_snapshot(path, value=10.0)
    assert not is_settled(place.run, open_snapshot(path))


def test_a_trainers_tensors_do_not_replace_what_an_attempt_names(place: Place, tmp_path: Path) -> None:
    import torch

    def export(value: float) -> ExportResult:
        tensors = {"layer.weight": torch.full((2, 2), value)}
        return evalkit.export_snapshot(tensors, step=40, base=base, force=True, run_dir=place.run.root)

    base = tiny_snapshot(tmp_path / "base")
    first = export(1.0)
    with in_flight(place, first.path), pytest.raises(BusyError, match=r"in use by the attempt in flight 1\.2"):
        export(2.0)
    assert open_snapshot(first.path).digest == first.digest
    assert export(2.0).digest != first.digest
