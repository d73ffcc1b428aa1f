"""Many dispatchers at once, and an owner that lives and never ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import urllib.error
from collections.abc import Iterator

import pytest

from tests.fakes import FakeFleet
from tests.ledgers import Run, fault, is_alive, wait_for

DISPATCHERS = 64


def test_sixty_four_at_once(run: Run, fleet: FakeFleet) -> None:
    fleet.faults(hold=True)
    go = run.root / "go"
    checkpoint = run.checkpoint(1.0)
    run.call("status", code=None)
    processes = []
    for step in range(DISPATCHERS):
        note = run.root / f"note-{step}"
        spec = fault("command", "evalkit.verbs.admitting:admit", "before", note, "hold", go=str(go))
        words = ("dispatch", "--step", step, "--from", checkpoint, "--policy", "skip", "--max-in-flight", 2)
        processes.append(run.start(*words, fault=spec))
    wait_for(lambda: len(list(run.root.glob("note-*"))) == DISPATCHERS, "the barrier", 120)
    go.touch()
    most = 0
    while any(process.poll() is None for process in processes):
        most = max(most, len(list(run.paths.active.glob("*.lock"))))
    assert most == 2
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert len(list(run.paths.active.glob("*.lock"))) == 2
    assert len(run.names()) == 2
    fleet.faults(hold=None, release=True)
    run.call("drain", "--timeout", "60s")
    reasons = list(run.outcomes().values())
    assert (len(reasons), reasons.count("busy"), reasons.count("landed")) == (64, 62, 2)
    assert sorted(row["step"] for row in run.rows()) == list(range(DISPATCHERS))
    assert run.leftovers() == []


def test_a_stopped_worker_is_timed_out_and_changes_nothing_when_it_wakes(run: Run, fleet: FakeFleet) -> None:
    fleet.faults(hold=True)
    run.dispatch("--step", 40, "--from", run.checkpoint(1.0), "--timeout", "4s")
    fleet.engines[0].wait("in_flight")
    with stopped_worker_out_of_reach(run, 40) as stopped:
        wait_for(lambda: time.time() > deadline_of(run, 40) + 5.1, "the deadline")
        fleet.faults(hold=None, release=True)
        run.dispatch("--step", 50, "--from", run.checkpoint(2.0), "--max-in-flight", 1)
        run.call("drain", "--timeout", "60s")
        assert run.outcomes() == {"40.1": "timeout", "50.1": "landed"}
        before, rows, state = run.outcome(40), run.rows(), fleet.engines[0].call("/evalkit/state")
        os.kill(stopped, signal.SIGCONT)
        wait_for(lambda: not is_alive(stopped), "its end")
    run.call("status")
    assert (run.outcome(40), run.rows()) == (before, rows)
    assert fleet.engines[0].call("/evalkit/state")["pin"] == state["pin"]
    assert run.leftovers() == []


def test_a_worker_that_wakes_with_an_old_epoch_pins_nothing(run: Run, fleet: FakeFleet) -> None:
    """Stopped between making its epoch durable and claiming it: by then the engines have a newer one."""
    note = run.root / "note"
    spec = fault("worker", "evalkit.state.fleet_queue:FleetHold.next_epoch", "after", note, "hold")
    run.call("dispatch", "--step", 40, "--from", run.checkpoint(1.0), "--timeout", "2s", fault=spec)
    wait_for(note.exists, "the first epoch")
    with stopped_worker_out_of_reach(run, 40) as stopped:
        wait_for(lambda: time.time() > deadline_of(run, 40) + 5.1, "the deadline")
        run.dispatch("--step", 50, "--from", run.checkpoint(2.0), "--max-in-flight", 1)
        run.call("drain", "--timeout", "60s")
        (run.root / "note.go").touch()
        os.kill(stopped, signal.SIGCONT)
        wait_for(lambda: not is_alive(stopped), "its end")
    assert run.outcomes() == {"40.1": "timeout", "50.1": "landed"}
    assert [pin["epoch"] for pin in fleet.engines[0].log()["pins"]] == [2]
    with pytest.raises(urllib.error.HTTPError, match="409"):
        fleet.engines[0].call("/evalkit/pin", {"epoch": 1, "path": str(run.root), "version": "40", "fleet": "eval"})
    assert fleet.engines[0].call("/evalkit/state")["pin"]["version"] == "50"


@contextlib.contextmanager
def stopped_worker_out_of_reach(run: Run, step: int) -> Iterator[int]:
    """SIGSTOP it, and let it look like a process of another boot, which nobody here may kill."""
    path = run.paths.attempt(step, 1).results / "worker.json"
    identity = json.loads(path.read_text())
    os.kill(identity["pid"], signal.SIGSTOP)
    path.write_text(json.dumps({**identity, "boot_id": "another"}))
    try:
        yield identity["pid"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(identity["pid"], signal.SIGKILL)


def deadline_of(run: Run, step: int) -> float:
    return float(json.loads(run.paths.attempt(step, 1).record.read_text())["deadline"])


def test_a_stopped_worker_within_reach_is_killed(run: Run, fleet: FakeFleet) -> None:
    fleet.faults(hold=True)
    run.dispatch("--step", 40, "--from", run.checkpoint(1.0), "--timeout", "3s")
    fleet.engines[0].wait("in_flight")
    pid = json.loads((run.paths.attempt(40, 1).results / "worker.json").read_text())["pid"]
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: time.time() > deadline_of(run, 40) + 5.1, "the deadline")
    run.call("status")
    wait_for(lambda: not is_alive(pid), "its end")
    run.call("status")
    assert run.outcomes() == {"40.1": "timeout"}
    assert run.leftovers() == []
    fleet.faults(hold=None, release=True)


def test_a_worker_past_its_deadline_settles_itself(run: Run, fleet: FakeFleet) -> None:
    fleet.faults(hold=True)
    run.dispatch("--step", 40, "--from", run.checkpoint(1.0), "--timeout", "2s")
    run.call("drain", "--timeout", "30s")
    assert run.outcomes() == {"40.1": "timeout"}
    fleet.faults(hold=None, release=True)
