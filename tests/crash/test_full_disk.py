"""A disk that is full when an outcome, a row or a snapshot is to be written."""

from __future__ import annotations

import errno

from tests.fakes import FakeFleet
from tests.ledgers import Run, fault, wait_for


def test_a_full_run_directory_links_the_reserve(run: Run, fleet: FakeFleet) -> None:
    spec = fault("worker", "evalkit.state.points:_write", "before", run.root / "note", errno.ENOSPC)
    run.call("dispatch", "--step", 40, "--from", run.checkpoint(1.0), fault=spec)
    run.call("drain", "--timeout", "60s")
    assert run.outcomes() == {"40.1": "no_space"}
    assert run.leftovers() == []
    assert run.rows()[0]["metrics"] == {"eval/skipped_no_space": 1, "eval/step": 40}


def test_a_row_that_finds_no_room_is_written_later(run: Run, fleet: FakeFleet) -> None:
    note = run.root / "note"
    spec = fault("worker", "evalkit.state.metrics_log:_append_whole", "before", note, errno.ENOSPC)
    run.call("dispatch", "--step", 40, "--from", run.checkpoint(1.0), fault=spec)
    wait_for(note.exists, "the full disk")
    run.call("drain", "--timeout", "60s")
    assert run.outcomes() == {"40.1": "landed"}
    assert [row["step"] for row in run.rows()] == [40]
    assert run.leftovers() == []


def test_a_skip_whose_row_finds_no_room_costs_the_trainer_nothing(run: Run, fleet: FakeFleet) -> None:
    spec = fault("command", "evalkit.state.metrics_log:_append_whole", "before", run.root / "note", errno.ENOSPC)
    done = run.call("dispatch", "--step", 40, fault=spec)
    assert done.stdout.startswith("step_40 skipped ckpt_missing")
    run.call("status")
    assert [row["step"] for row in run.rows()] == [40]
    assert run.leftovers() == []


def test_no_room_for_the_export_is_a_recorded_skip(run: Run, fleet: FakeFleet) -> None:
    spec = fault("command", "evalkit.ground.transfer:transfer", "before", run.root / "note", errno.ENOSPC)
    done = run.call("dispatch", "--step", 40, "--from", run.checkpoint(1.0), fault=spec)
    assert done.stdout.startswith("step_40 skipped no_space: ")
    assert run.outcomes() == {"40.1": "no_space"}
    assert run.leftovers() == []
    assert run.names() == []


def test_an_export_that_fails_otherwise_is_a_recorded_skip(run: Run, fleet: FakeFleet) -> None:
    spec = fault("command", "evalkit.state.staging:Staging.publish", "before", run.root / "note", errno.EIO)
    done = run.call("dispatch", "--step", 40, "--from", run.checkpoint(1.0), fault=spec)
    assert done.stdout.startswith("step_40 skipped export_failed: ")
    assert run.outcomes() == {"40.1": "export_failed"}
    assert run.leftovers() == []
