"""The ledger's commands as their users call them, against fake engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from evalkit.ground.locks import locked
from evalkit.state.fleet import change_fleet
from tests.fakes import FakeFleet, tiny_snapshot
from tests.ledgers import Run, fault, is_alive, wait_for


def drain(run: Run, code: int = 0, *words: str) -> dict[str, object]:
    return run.json("drain", "--timeout", "60s", *words, code=code)


def test_a_point_lands_and_gives_back_its_snapshot(run: Run, fleet: FakeFleet) -> None:
    answer = run.dispatch("--step", 40, "--from", run.checkpoint(1.0))
    assert (answer["state"], answer["attempt"]) == ("dispatched", 1)
    assert drain(run)["in_flight"] == []
    outcome = run.outcome(40)
    assert outcome["outcome"] == "landed"
    assert outcome["weight_version"] == "40"
    assert outcome["metrics"]["eval/sums"] == 1.0
    assert outcome["metrics"]["eval/step"] == 40
    assert outcome["metrics"]["eval/sums/weight_version/mean"] == 40
    assert outcome["metrics"]["eval/lag_steps"] == 0
    assert outcome["metrics"]["eval/export_time_seconds"] > 0
    assert json.loads((run.paths.attempt(40, 1).results / "metrics.json").read_text())["metrics"] == outcome["metrics"]
    assert run.leftovers() == []
    assert run.names() == ["step_40"]
    for step in (50, 60, 70):
        run.dispatch("--step", step, "--from", run.checkpoint(float(step)))
        drain(run)
    assert run.names() == ["step_60", "step_70"]
    assert [row["step"] for row in run.rows()] == [40, 50, 60, 70]


def test_stdout_is_free_once_dispatch_returns(run: Run, fleet: FakeFleet) -> None:
    """`$(evalkit dispatch …)` must not wait for the worker."""
    fleet.faults(hold=True)
    command = 'out=$(python -m evalkit dispatch --step 1 --from "$0"); echo "got: $out"'
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command, run.checkpoint(1.0)],
        env=run.environment(PATH=path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "got: step_1 dispatched\n", done.stderr
    fleet.faults(hold=None, release=True)
    drain(run)


def test_full_under_skip_is_busy_and_exports_nothing(run: Run, fleet: FakeFleet) -> None:
    fleet.faults(hold=True)
    for step in (1, 2):
        run.dispatch("--step", step, "--from", run.checkpoint(float(step)))
    answer = run.dispatch("--step", 3, "--from", run.checkpoint(3.0), "--policy", "skip")
    assert (answer["state"], answer["reason"]) == ("skipped", "busy")
    assert "1.1" in answer["detail"]
    assert run.names() == ["step_1", "step_2"]
    run.dispatch("--step", 4, "--from", run.checkpoint(4.0), "--policy", "skip", "--fail-on-skip", code=1)
    fleet.faults(hold=None, release=True)
    drain(run)
    assert run.outcomes() == {"1.1": "landed", "2.1": "landed", "3.1": "busy", "4.1": "busy"}
    assert [row["metrics"].get("eval/skipped_busy") for row in run.rows()] == [1, 1, None, None]


@pytest.mark.parametrize("words", [("--policy", "backpressure"), ("--policy", "skip", "--final")])
def test_backpressure_and_final_wait_for_room(run: Run, fleet: FakeFleet, words: tuple[str, ...]) -> None:
    fleet.faults(hold=True)
    run.dispatch("--step", 1, "--from", run.checkpoint(1.0))
    waiting = run.start("dispatch", "--step", 2, "--from", run.checkpoint(2.0), "--max-in-flight", 1, *words)
    fleet.engines[0].wait("in_flight")
    assert waiting.poll() is None
    fleet.faults(hold=None, release=True)
    out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, out) == (0, "step_2 dispatched\n"), err
    drain(run)
    assert run.outcomes() == {"1.1": "landed", "2.1": "landed"}


def test_backpressure_past_its_deadline_is_busy(run: Run, fleet: FakeFleet) -> None:
    fleet.faults(hold=True)
    run.dispatch("--step", 1, "--from", run.checkpoint(1.0))
    words = ("--step", 2, "--from", run.checkpoint(2.0), "--max-in-flight", 1, "--wait", "0.2s")
    assert run.dispatch(*words)["reason"] == "busy"
    assert run.dispatch(*words, "--final")["reason"] == "busy"
    fleet.faults(hold=None, release=True)
    drain(run)


def test_a_step_in_flight_or_landed_unchanged_is_left_alone(run: Run, fleet: FakeFleet) -> None:
    fleet.faults(hold=True)
    words = ("--step", 40, "--from", run.checkpoint(1.0))
    run.dispatch(*words)
    assert run.dispatch(*words)["state"] == "in_flight"
    fleet.faults(hold=None, release=True)
    drain(run)
    assert run.dispatch(*words)["state"] == "unchanged"
    assert run.outcomes() == {"40.1": "landed"}


def test_a_landed_step_with_other_weights_begins_another_life(run: Run, fleet: FakeFleet) -> None:
    run.dispatch("--step", 40, "--from", run.checkpoint(1.0))
    drain(run)
    run.dispatch("--step", 40, "--from", run.checkpoint(2.0))
    drain(run)
    assert run.outcomes() == {"40.1": "landed", "40.2": "landed"}
    first, second = run.outcome(40, 1), run.outcome(40, 2)
    assert (first["incarnation"], second["incarnation"]) == (1, 2)
    assert first["digest"] != second["digest"]
    assert run.leftovers() == []


def test_a_restarted_trainer_supersedes_and_both_are_kept(run: Run, fleet: FakeFleet) -> None:
    fleet.faults(hold=True)
    run.dispatch("--step", 40, "--from", run.checkpoint(1.0))
    fleet.engines[0].wait("in_flight")
    fleet.faults(hold=None)
    answer = run.dispatch("--step", 40, "--from", run.checkpoint(2.0))
    assert (answer["state"], answer["attempt"]) == ("dispatched", 2)
    drain(run)
    assert run.outcomes() == {"40.1": "superseded", "40.2": "landed"}
    assert run.leftovers() == []
    assert run.names() == ["step_40"]
    assert run.outcome(40, 2)["digest"] != run.outcome(40, 1)["digest"]
    fleet.faults(release=True)


def test_named_lives_supersede_even_with_the_same_weights(run: Run, fleet: FakeFleet) -> None:
    fleet.faults(hold=True)
    run.dispatch("--step", 40, "--from", run.checkpoint(1.0), SLURM_JOB_ID="7")
    fleet.engines[0].wait("in_flight")
    fleet.faults(hold=None)
    run.dispatch("--step", 40, "--from", run.checkpoint(1.0), SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1")
    drain(run)
    assert run.outcomes() == {"40.1": "superseded", "40.2": "landed"}
    fleet.faults(release=True)


def test_every_and_newest_and_nothing(run: Run, fleet: FakeFleet) -> None:
    assert run.dispatch("--step", 41, "--every", 10, "--from", run.checkpoint(1.0))["state"] == "not_due"
    run.call("export", run.checkpoint(1.0), "--step", 9000)
    run.call("export", run.checkpoint(2.0), "--step", 10000)
    assert [run.dispatch()["step"], run.dispatch()["step"]] == [10000, 9000]
    assert run.dispatch()["state"] == "nothing"
    drain(run)
    assert run.outcomes() == {"9000.1": "landed", "10000.1": "landed"}


def test_a_trainers_own_directory_is_read_and_never_deleted(run: Run, fleet: FakeFleet) -> None:
    for step in (1, 2, 3, 4):
        tiny_snapshot(run.snapshot_dir / f"step_{step}", value=float(step))
        (run.snapshot_dir / f"step_{step}" / ".complete").touch()
        run.dispatch("--step", step)
        drain(run)
    assert set(run.outcomes().values()) == {"landed"}
    run.call("gc", "--keep", 0)
    assert run.names() == ["step_1", "step_2", "step_3", "step_4"]


def test_a_baseline_needs_no_marker_and_is_never_deleted(run: Run, fleet: FakeFleet) -> None:
    base = tiny_snapshot(run.root / "base", value=7.0)
    run.dispatch("--baseline", base)
    drain(run)
    assert run.outcomes() == {"0.1": "landed"}
    run.call("gc", "--keep", 0)
    assert (base / "model.safetensors").exists()
    assert not (base / ".complete").exists()


@pytest.mark.parametrize("case", ["absent", "no marker", "no source"])
def test_a_missing_checkpoint_is_a_recorded_skip(run: Run, fleet: FakeFleet, case: str) -> None:
    tiny_snapshot(run.snapshot_dir / "step_41")
    words = {
        "absent": ("--step", 40),
        "no marker": ("--step", 41),
        "no source": ("--step", 42, "--from", run.root / "gone"),
    }[case]
    answer = run.dispatch(*words)
    assert (answer["state"], answer["reason"]) == ("skipped", "ckpt_missing")
    assert answer["detail"]
    assert run.leftovers() == []
    assert run.dispatch(*words, "--ci-test", code=1)["reason"] == "ckpt_missing"


def test_a_damaged_source_is_a_failed_export(run: Run, fleet: FakeFleet) -> None:
    (run.root / "bad").mkdir()
    (run.root / "bad" / "config.json").write_text("{}")
    answer = run.dispatch("--step", 43, "--from", run.root / "bad")
    assert (answer["state"], answer["reason"]) == ("skipped", "export_failed")


def test_weights_without_a_point_are_not_replaced(run: Run, fleet: FakeFleet) -> None:
    run.call("export", run.checkpoint(1.0), "--step", 40)
    assert run.dispatch("--step", 40, "--from", run.checkpoint(2.0))["reason"] == "export_failed"
    assert run.names() == ["step_40"]


def test_a_bug_in_the_export_is_the_points_and_not_the_trainers(run: Run, fleet: FakeFleet) -> None:
    spec = fault("command", "evalkit.state.staging:Staging.publish", "before", run.root / "note", "bug")
    done = run.call("dispatch", "--step", 40, "--from", run.checkpoint(1.0), fault=spec)
    assert done.stdout.startswith("step_40 skipped export_failed: ZeroDivisionError")
    assert "Traceback" in run.log(40)
    assert run.leftovers() == []


def test_a_damaged_fleet_record_is_unhealthy(run: Run, fleet: FakeFleet) -> None:
    whole = fleet.paths.record.read_bytes()
    fleet.paths.record.write_bytes(whole[:40])
    assert run.dispatch("--step", 40, "--from", run.checkpoint(1.0))["reason"] == "unhealthy"
    fleet.paths.record.write_bytes(whole)


def test_a_fleet_of_no_name_is_refused_and_not_recorded(run: Run, fleet: FakeFleet) -> None:
    words = ("dispatch", "--step", 40, "--from", run.checkpoint(1.0))
    assert "my fleet" in run.call(*words, code=2, EVALKIT_FLEET="my fleet").stderr
    run.call(*words)
    drain(run)
    assert run.outcomes() == {"40.1": "landed"}


def test_a_damaged_outcome_stops_nobody(run: Run, fleet: FakeFleet) -> None:
    run.dispatch("--step", 1, "--from", run.checkpoint(1.0))
    drain(run)
    run.paths.attempt(1, 1).outcome.write_text("{")
    run.dispatch("--step", 2, "--from", run.checkpoint(2.0))
    drain(run)
    run.call("status")
    assert run.outcome(2)["outcome"] == "landed"


def test_other_steps_than_every_are_no_points_however_they_are_named(run: Run, fleet: FakeFleet) -> None:
    checkpoint = run.checkpoint(1.0)
    checkpoint.rename(run.root / "checkpoint-40")
    assert run.dispatch("--from", run.root / "checkpoint-40", "--every", 50)["state"] == "not_due"
    run.call("export", run.checkpoint(1.0), "--step", 40)
    run.call("export", run.checkpoint(2.0), "--step", 50)
    run.call("export", run.checkpoint(3.0), "--step", 60)
    assert run.dispatch("--every", 50)["step"] == 50
    drain(run)


def test_a_step_whose_worker_is_still_finishing_waits_for_it(run: Run, fleet: FakeFleet) -> None:
    note = run.root / "note"
    spec = fault("worker", "evalkit.verbs.retiring:retire_settled", "before", note, "hold")
    run.call("dispatch", "--step", 40, "--from", run.checkpoint(1.0), fault=spec)
    wait_for(note.exists, "the end of the worker")
    again = run.start("dispatch", "--step", 40, "--from", run.checkpoint(2.0))
    wait_for(lambda: len(list(run.paths.active.glob("*.lock"))) == 2, "the second attempt")
    (run.root / "note.go").touch()
    out, err = again.communicate(timeout=60)
    assert out == "step_40 dispatched\n", err
    drain(run)
    assert run.outcomes() == {"40.1": "landed", "40.2": "landed"}


def test_a_terminated_worker_is_cancelled(run: Run, fleet: FakeFleet) -> None:
    for step in (1, 2, 3):
        fleet.faults(hold=True)
        run.dispatch("--step", step, "--from", run.checkpoint(float(step)))
        fleet.engines[0].wait("in_flight")
        os.kill(json.loads((run.paths.attempt(step, 1).results / "worker.json").read_text())["pid"], signal.SIGTERM)
        drain(run)
        fleet.faults(hold=None, release=True)
    assert set(run.outcomes().values()) == {"cancelled"}
    assert run.leftovers() == []


def test_the_snapshot_directory_of_another_run_is_refused(run: Run, fleet: FakeFleet) -> None:
    run.call("export", run.checkpoint(1.0), "--step", 1, EVALKIT_RUN_DIR=str(run.root / "another"))
    done = run.call("dispatch", "--step", 2, "--from", run.checkpoint(2.0), code=2)
    assert str(run.root / "another") in done.stderr
    assert run.outcomes() == {}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_dispatch_interrupted_while_it_waits_for_room_is_cancelled(run: Run, fleet: FakeFleet, signum: int) -> None:
    fleet.faults(hold=True)
    run.dispatch("--step", 1, "--from", run.checkpoint(1.0))
    spec = fault("command", "evalkit.verbs.admitting:_full", "after", run.root / "note", 0)
    waiting = run.start("dispatch", "--step", 2, "--from", run.checkpoint(2.0), "--max-in-flight", 1, fault=spec)
    wait_for((run.root / "note").exists, "its first look")
    waiting.send_signal(signum)
    assert waiting.wait(30) == 128 + signum
    fleet.faults(hold=None, release=True)
    drain(run)
    assert run.outcomes() == {"1.1": "landed", "2.1": "cancelled"}


def test_a_fleet_that_is_starting_is_waited_for(run: Run, fleet: FakeFleet) -> None:
    change_fleet(fleet.paths, lambda record: msgspec.structs.replace(record, state="starting"))
    with locked(fleet.paths.launch_lock, 1):
        run.dispatch("--step", 40, "--from", run.checkpoint(1.0))
        wait_for((run.paths.attempt(40, 1).results / "worker.json").exists, "the worker")
        assert run.json("drain", "--timeout", "2s", code=75)["in_flight"] == ["40.1"]
        change_fleet(fleet.paths, lambda record: msgspec.structs.replace(record, state="up"))
    drain(run)
    assert run.outcomes() == {"40.1": "landed"}


@pytest.mark.parametrize(("state", "words"), [("down", "is down"), ("starting", "half started")])
def test_a_fleet_that_will_not_come_up_is_told_at_once(run: Run, fleet: FakeFleet, state: str, words: str) -> None:
    change_fleet(fleet.paths, lambda record: msgspec.structs.replace(record, state=state))
    answer = run.dispatch("--step", 40, "--from", run.checkpoint(1.0))
    assert (answer["state"], answer["reason"]) == ("skipped", "unhealthy")
    assert words in answer["detail"]
    assert words in run.call("run", run.checkpoint(1.0), code=69).stderr


def test_cancel_leaves_the_trainers_own_command_alone(run: Run, fleet: FakeFleet) -> None:
    note = run.root / "note"
    spec = fault("command", "evalkit.state.staging:Staging.publish", "before", note, "hold")
    exporting = run.start("dispatch", "--step", 40, "--from", run.checkpoint(1.0), fault=spec)
    wait_for(note.exists, "the export")
    assert run.json("cancel", 40)["cancelled"] == ["40.1"]
    assert exporting.poll() is None
    (run.root / "note.go").touch()
    out, err = exporting.communicate(timeout=60)
    assert (exporting.returncode, out.split(":")[0]) == (0, "step_40 skipped cancelled"), err
    assert run.leftovers() == []


def test_without_a_fleet_the_point_is_unhealthy(run: Run) -> None:
    answer = run.dispatch("--step", 40, "--from", run.checkpoint(1.0))
    assert (answer["state"], answer["reason"]) == ("skipped", "unhealthy")
    assert "fleet up" in answer["detail"]
    assert run.names() == []


def test_usage_errors(run: Run, fleet: FakeFleet) -> None:
    words = ("--step", 1, "--from", run.checkpoint(1.0))
    assert "--keep 1" in run.call("dispatch", *words, "--keep", 1, code=2).stderr
    assert "exclude" in run.call("dispatch", *words, "--baseline", run.root, code=2).stderr
    assert "--step" in run.call("dispatch", "--from", run.root / "weights", code=2).stderr
    assert "--suite" in run.call("dispatch", *words, code=2, EVALKIT_SUITE="").stderr
    assert "--eval-hf-dir" in run.call("dispatch", *words, code=2, EVALKIT_EVAL_HF_DIR="").stderr
    assert run.outcomes() == {}


def test_first_use_records_suite_and_directories(run: Run, fleet: FakeFleet) -> None:
    run.dispatch("--step", 1, "--from", run.checkpoint(1.0))
    drain(run)
    run.env = {"EVALKIT_SUITE": "", "EVALKIT_EVAL_HF_DIR": ""}
    run.dispatch("--step", 2, "--from", run.checkpoint(2.0))
    drain(run)
    assert run.outcomes() == {"1.1": "landed", "2.1": "landed"}


def test_cancel(run: Run, fleet: FakeFleet) -> None:
    fleet.faults(hold=True)
    run.dispatch("--step", 40, "--from", run.checkpoint(1.0))
    fleet.engines[0].wait("in_flight")
    worker = json.loads((run.paths.attempt(40, 1).results / "worker.json").read_text())["pid"]
    assert run.json("cancel", 40)["cancelled"] == ["40.1"]
    wait_for(lambda: not is_alive(worker), "the worker's end")
    assert run.outcomes() == {"40.1": "cancelled"}
    assert run.leftovers() == []
    assert run.json("cancel", 40)["cancelled"] == []
    fleet.faults(hold=None, release=True)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_dispatch_is_cancelled(run: Run, fleet: FakeFleet, signum: int, code: int) -> None:
    spec = fault("command", "evalkit.state.staging:Staging.publish", "before", run.root / "note", "hold")
    process = run.start("dispatch", "--step", 40, "--from", run.checkpoint(1.0), fault=spec)
    wait_for((run.root / "note").exists, "the export")
    process.send_signal(signum)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert run.outcomes() == {"40.1": "cancelled"}
    assert run.leftovers() == []


def test_drain_gives_up_at_its_deadline(run: Run, fleet: FakeFleet) -> None:
    fleet.faults(hold=True)
    run.dispatch("--step", 40, "--from", run.checkpoint(1.0))
    assert run.json("drain", "--timeout", "0.3s", code=75)["in_flight"] == ["40.1"]
    fleet.faults(hold=None, release=True)
    landed = {"step": 40, "attempt": 1, "outcome": "landed", "reason": None, "detail": ""}
    assert drain(run)["outcomes"] == [landed]


def test_drain_fails_on_skips_since_the_last_one(run: Run, fleet: FakeFleet) -> None:
    run.dispatch("--step", 40)
    said = run.call("drain", "--ci-test", code=1).stdout
    assert said.startswith("step_40 attempt 1 skipped ckpt_missing: there is no snapshot ")
    run.call("drain", "--fail-on-skip")


def test_an_engine_that_fails_is_unhealthy(run: Run, fleet: FakeFleet) -> None:
    fleet.faults(pin_error={"status": 422, "error": "refused", "detail": "tensor layer.0.weight has another shape"})
    run.dispatch("--step", 40, "--from", run.checkpoint(1.0))
    drain(run)
    assert run.outcomes() == {"40.1": "ckpt_missing"}
    assert "layer.0.weight" in run.outcome(40)["detail"]


def test_the_wrong_digest_twice_is_a_pin_violation(run: Run, fleet: FakeFleet) -> None:
    wrong = {"pin_digest": "f" * 64}
    fleet.faults(**wrong)
    run.env = {"FAKE_ENGINE_FAULTS": json.dumps(wrong)}  # for the engine that is started in its place
    run.dispatch("--step", 40, "--from", run.checkpoint(1.0))
    drain(run)
    assert run.outcomes() == {"40.1": "pin_violation"}


def test_status_shows_points_fleet_and_disk(run: Run, fleet: FakeFleet) -> None:
    run.dispatch("--step", 40, "--from", run.checkpoint(1.0))
    drain(run)
    shown = run.call("status").stdout
    assert "sums=1" in shown
    assert "fleet eval: up, 1 engines, pinned on step_40" in shown
    assert run.json("status")["snapshots"]["names"] == ["step_40"]


def test_gc_explains_and_a_dry_run_changes_nothing(run: Run, fleet: FakeFleet) -> None:
    for step in (1, 2, 3):
        run.dispatch("--step", step, "--from", run.checkpoint(float(step)), "--keep", 3)
        drain(run)
    run.call("export", run.checkpoint(9.0), "--step", 2000)
    run.call("export", run.checkpoint(8.0), "--step", 1000)
    dry = run.call("gc", "--keep", "0", "--dry-run").stdout
    assert run.names() == ["step_1", "step_1000", "step_2", "step_2000", "step_3"]
    assert run.call("gc", "--keep", "0").stdout.splitlines().sort() == dry.splitlines().sort()
    assert run.names() == ["step_1000", "step_2000", "step_3"]  # step_3 is what the fleet is pinned on
    assert "keep   step_1000: not evaluated yet" in dry


def test_an_export_id_that_is_a_path_goes_nowhere(run: Run, fleet: FakeFleet) -> None:
    """Names read from JSON never leave their directory."""
    victim = run.root / "victim.lock"
    victim.touch()
    for step in (1, 2, 3, 4):
        run.dispatch("--step", step, "--from", run.checkpoint(float(step)), "--keep", 9)
        drain(run)
    for path in run.snapshot_dir.glob("step_[12]/evalkit.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "export_id": "../../victim"}))
    run.call("gc", "--keep", 0)
    assert victim.exists()
    assert run.names() == ["step_1", "step_2", "step_4"]


@pytest.mark.parametrize("option", ["--from", "--run-dir", "--eval-hf-dir"])
def test_a_path_that_is_not_utf8_is_refused(run: Run, fleet: FakeFleet, option: str) -> None:
    command = [os.fsencode(word) for word in (sys.executable, "-m", "evalkit", "dispatch", "--step", "1", option)]
    done = subprocess.run([*command, b"/tmp/\xff"], env=run.environment(), capture_output=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert b"is not UTF-8" in done.stderr


def test_dispatch_without_standard_descriptors(run: Run, fleet: FakeFleet) -> None:
    """A daemon may start it with its descriptors closed."""
    command = 'exec "$0" -m evalkit dispatch --step 1 --from "$1" <&- >&- 2>&-'
    words = ["bash", "-c", command, sys.executable, run.checkpoint(1.0)]
    assert subprocess.run(words, env=run.environment(), timeout=60).returncode == 0
    drain(run)
    assert run.outcomes() == {"1.1": "landed"}
