"""kill -9 at every stage of an attempt: the next ordinary command settles it rightly and gives everything back."""

from __future__ import annotations

import json
import signal

import pytest

from tests.fakes import FakeFleet
from tests.ledgers import Run, fault, kill_worker, wait_for_death


def assert_all_given_back(run: Run, expected: dict[str, str]) -> None:
    """One ordinary command mends; then nothing of the dead attempt is left, and the next point lands."""
    run.call("status")
    assert run.outcomes() == expected
    assert run.leftovers() == []
    assert len(run.rows()) == len(expected)
    run.dispatch("--step", 1000, "--from", run.checkpoint(9.0))
    run.call("drain", "--timeout", "60s")
    assert run.outcomes() == {**expected, "1000.1": "landed"}
    assert run.leftovers() == []
    assert [row["step"] for row in run.rows()].count(1000) == 1


COMMAND_STAGES = {
    "copying": ("evalkit.ground.transfer:transfer", "before"),
    "before the snapshot appears": ("evalkit.state.staging:Staging.publish", "before"),
    "after the snapshot appeared": ("evalkit.state.staging:Staging.publish", "after"),
    "before hand-over": ("evalkit.adapters.workers:hand_over", "before"),
}


@pytest.mark.parametrize("stage", COMMAND_STAGES)
def test_dispatch_killed_after_admission(run: Run, fleet: FakeFleet, stage: str) -> None:
    place, when = COMMAND_STAGES[stage]
    spec = fault("command", place, when, run.root / "note")
    run.call("dispatch", "--step", 40, "--from", run.checkpoint(1.0), code=-signal.SIGKILL, fault=spec)
    assert_all_given_back(run, {"40.1": "crashed"})


@pytest.mark.parametrize(
    "place",
    [
        "evalkit.state.attempts:Prepared.publish",
        "evalkit.ground.locks:is_current",
    ],
)
def test_dispatch_killed_before_admission_leaves_no_point(run: Run, fleet: FakeFleet, place: str) -> None:
    spec = fault("command", place, "before", run.root / "note")
    run.call("dispatch", "--step", 40, "--from", run.checkpoint(1.0), code=-signal.SIGKILL, fault=spec)
    assert_all_given_back(run, {})


def test_dispatch_killed_in_the_middle_of_its_hand_over(run: Run, fleet: FakeFleet) -> None:
    spec = fault("command", "evalkit.adapters.workers:_acknowledged", "before", run.root / "note")
    run.call("dispatch", "--step", 40, "--from", run.checkpoint(1.0), code=-signal.SIGKILL, fault=spec)
    run.call("drain", "--timeout", "60s")
    assert_all_given_back(run, {"40.1": "landed"})


WORKER_STAGES = {
    "queued": ("evalkit.state.fleet_queue:_Ticket.is_head", "before", "crashed"),
    "with the fleet": ("evalkit.state.fleet_queue:FleetHold.next_epoch", "after", "crashed"),
    "evaluated": ("evalkit.state.points:settle", "before", "crashed"),
    "outcome linked": ("evalkit.state.points:settle", "after", "landed"),
    "before its row": ("evalkit.state.metrics_log:append_row", "before", "landed"),
    "after its row": ("evalkit.state.metrics_log:append_row", "after", "landed"),
    "snapshot retired": ("evalkit.verbs.retiring:retire_settled", "after", "landed"),
    "before it leaves active": ("evalkit.state.attempts:remove", "before", "landed"),
    "after it left active": ("evalkit.state.attempts:remove", "after", "landed"),
}


@pytest.mark.parametrize("stage", WORKER_STAGES)
def test_worker_killed(run: Run, fleet: FakeFleet, stage: str) -> None:
    place, when, outcome = WORKER_STAGES[stage]
    note = run.root / "note"
    spec = fault("worker", place, when, note)
    answer = run.call("dispatch", "--step", 40, "--from", run.checkpoint(1.0), "--json", fault=spec)
    assert json.loads(answer.stdout)["result"]["state"] == "dispatched"
    wait_for_death(note)
    assert_all_given_back(run, {"40.1": outcome})


@pytest.mark.parametrize("removed", ["json", "reserve"])
def test_worker_killed_while_it_removes_its_files(run: Run, fleet: FakeFleet, removed: str) -> None:
    note = run.root / "note"
    spec = fault("worker", "evalkit.state.attempts:remove", "before", note)
    run.call("dispatch", "--step", 40, "--from", run.checkpoint(1.0), fault=spec)
    wait_for_death(note)
    (run.paths.active / "40.1.json").unlink()
    if removed == "reserve":
        (run.paths.active / "40.1.reserve").unlink()
    assert_all_given_back(run, {"40.1": "landed"})


def test_worker_killed_while_pinning(run: Run, fleet: FakeFleet) -> None:
    fleet.faults(pin_hang=True)
    run.dispatch("--step", 40, "--from", run.checkpoint(1.0))
    fleet.engines[0].wait("pins")
    kill_worker(run, 40)
    fleet.faults(pin_hang=None, release=True)
    assert_all_given_back(run, {"40.1": "crashed"})


def test_worker_killed_while_running(run: Run, fleet: FakeFleet) -> None:
    fleet.faults(hold=True)
    run.dispatch("--step", 40, "--from", run.checkpoint(1.0))
    fleet.engines[0].wait("in_flight")
    kill_worker(run, 40)
    fleet.faults(hold=None, release=True)
    assert_all_given_back(run, {"40.1": "crashed"})


def test_torn_last_row_is_mended(run: Run, fleet: FakeFleet) -> None:
    note = run.root / "note"
    spec = fault("worker", "evalkit.state.metrics_log:append_row", "before", note)
    run.call("dispatch", "--step", 40, "--from", run.checkpoint(1.0), fault=spec)
    wait_for_death(note)
    run.paths.metrics.write_text('{"step":40,"attempt":1,"outc')
    assert_all_given_back(run, {"40.1": "landed"})


def test_killed_dispatcher_of_a_skip_keeps_its_row(run: Run, fleet: FakeFleet) -> None:
    """A point that is settled at once has no lock; its record stands until the row is written."""
    fleet.faults(hold=True)
    run.dispatch("--step", 1, "--from", run.checkpoint(1.0))
    spec = fault("command", "evalkit.state.metrics_log:append_row", "before", run.root / "note")
    words = ("dispatch", "--step", 2, "--from", run.checkpoint(2.0), "--max-in-flight", 1, "--policy", "skip")
    run.call(*words, code=-signal.SIGKILL, fault=spec)
    fleet.faults(hold=None, release=True)
    run.call("drain", "--timeout", "60s")
    assert_all_given_back(run, {"1.1": "landed", "2.1": "busy"})
