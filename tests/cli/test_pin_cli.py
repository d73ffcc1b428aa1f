"""`evalkit pin` and `evalkit probe` when engines fail; the engines are stand-ins that fail as they are told."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from evalkit.ground.errors import BusyError, DataError, NoSnapshotError
from evalkit.state.fleet import change_fleet
from evalkit.state.fleet_queue import hold_fleet
from evalkit.verbs.pin import PinTarget, pin_engines
from tests.engines import weights_digest
from tests.fakes import tiny_snapshot
from tests.fleets import FleetCommands, kill_server, wait_until

pytestmark = pytest.mark.timeout(120)

OTHER_DIGEST = "0" * 64
REFUSAL = {"status": 422, "error": "refused", "detail": "tensor x is not there"}


@pytest.fixture
def fleets(tmp_path: Path) -> Iterator[FleetCommands]:
    fleets = FleetCommands(tmp_path)
    yield fleets
    fleets.down_all()


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    return tiny_snapshot(tmp_path / "step_40", value=4.0)


def target(snapshot: Path) -> PinTarget:
    return PinTarget(path=snapshot, version="40", digest=weights_digest(snapshot))


def test_pin_prints_version_digest_and_engines(fleets: FleetCommands, snapshot: Path) -> None:
    fleets.up(engines=2)
    epoch = fleets.record().epoch
    out = fleets.call("pin", str(snapshot)).stdout.splitlines()
    assert out[0] == f"version 40  digest {weights_digest(snapshot)}  epoch {epoch + 1}"
    assert out[1:] == [f"{e.index}  {e.url}  pinned 40  ranks 1" for e in fleets.engines()]
    record = fleets.record()
    assert (record.epoch, record.pinned, record.pinned_export_id) == (epoch + 1, str(snapshot), None)
    assert list(fleets.run.digests.iterdir())
    again = fleets.json("pin", "--dir", str(snapshot))
    assert (again["epoch"], again["digest"], len(again["engines"])) == (epoch + 2, weights_digest(snapshot), 2)


def test_a_directory_without_a_step_is_labelled_with_its_name(fleets: FleetCommands) -> None:
    fleets.up()
    assert fleets.json("pin", str(tiny_snapshot(fleets.root / "final")))["version"] == "final"


def test_an_engine_that_loads_other_weights_once_is_restarted(fleets: FleetCommands, snapshot: Path) -> None:
    fleets.up(engines=2)
    wrong, right = fleets.engines()
    fleets.faults(wrong, pin_digest=OTHER_DIGEST)
    fleets.call("pin", str(snapshot))
    restarted, same = fleets.engines()
    assert (restarted.engine_id == wrong.engine_id, same) == (False, right)
    assert [fleets.state(e)["pin"]["digest"] for e in fleets.engines()] == [weights_digest(snapshot)] * 2
    assert {fleets.state(e)["epoch"] for e in fleets.engines()} == {fleets.record().epoch}


def test_an_engine_that_loads_other_weights_twice_is_a_violation(fleets: FleetCommands, snapshot: Path) -> None:
    fleets.up("--fault", json.dumps({"pin_digest": OTHER_DIGEST}))
    done = fleets.call("pin", str(snapshot), "--json", code=1)
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "pin_violation"
    assert OTHER_DIGEST in error["message"]
    assert fleets.engines()[0].url in error["message"]


def test_a_refusal_is_passed_on_and_restarts_nothing(fleets: FleetCommands, snapshot: Path) -> None:
    fleets.up(engines=2)
    before = fleets.engines()
    for engine in before:
        fleets.faults(engine, pin_error=REFUSAL)
    assert "refused the snapshot: tensor x is not there" in fleets.call("pin", str(snapshot), code=65).stderr
    assert fleets.engines() == before


def test_an_engine_that_refuses_what_another_took_is_restarted(fleets: FleetCommands, snapshot: Path) -> None:
    fleets.up(engines=2)
    took, refused = fleets.engines()
    fleets.faults(refused, pin_error=REFUSAL)
    fleets.call("pin", str(snapshot))
    same, restarted = fleets.engines()
    assert (same, restarted.engine_id == refused.engine_id) == (took, False)
    assert {fleets.state(e)["pin"]["digest"] for e in fleets.engines()} == {weights_digest(snapshot)}
    assert fleets.record().pinned == str(snapshot)


def test_a_load_that_breaks_is_tried_again_on_a_new_engine(fleets: FleetCommands, snapshot: Path) -> None:
    fleets.up()
    (engine,) = fleets.engines()
    fleets.faults(engine, pin_break=True)
    fleets.call("pin", str(snapshot))
    assert fleets.engines()[0].engine_id != engine.engine_id


def test_a_load_that_always_breaks_makes_the_fleet_unavailable(fleets: FleetCommands, snapshot: Path) -> None:
    fleets.up("--fault", '{"pin_break": true}')
    change_fleet(fleets.paths(), lambda record: msgspec.structs.replace(record, pinned="another"))
    assert "the load failed after its first weight" in fleets.call("pin", str(snapshot), code=69).stderr
    assert fleets.record().pinned is None


def test_a_load_that_hangs_is_given_up_and_the_engine_restarted(
    fleets: FleetCommands, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalkit.verbs.pin.ANSWER_SLACK", 0.5)
    for name in ("PYTHONPATH", "EVALKIT_RUN_DIR"):
        monkeypatch.setenv(name, fleets.environment[name])
    fleets.up()
    (engine,) = fleets.engines()
    fleets.faults(engine, pin_hang=True)
    with hold_fleet(fleets.paths(), timeout=5) as hold:
        # The restart may take as long as it takes: only the hanging load has these deadlines.
        proof = asyncio.run(pin_engines(hold, target(snapshot), load_timeout=2.0, drain_timeout=0.0))
    assert fleets.engines()[0].engine_id != engine.engine_id
    assert proof.epoch == fleets.record().epoch == fleets.state(fleets.engines()[0])["pin"]["epoch"]


def test_a_stopped_engine_is_replaced(fleets: FleetCommands, snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalkit.adapters.engine_processes.TERM_GRACE", 0.5)
    monkeypatch.setenv("PYTHONPATH", fleets.environment["PYTHONPATH"])
    fleets.up()
    (engine,) = fleets.engines()
    kill_server(engine, signal.SIGSTOP)
    with hold_fleet(fleets.paths(), timeout=5) as hold:
        asyncio.run(pin_engines(hold, target(snapshot), state_timeout=1.0))
    assert fleets.engines()[0].engine_id != engine.engine_id


def test_a_dead_engine_is_restarted(fleets: FleetCommands, snapshot: Path) -> None:
    fleets.up(engines=2)
    dead, alive = fleets.engines()
    kill_server(dead)
    assert [e["ready"] for e in json.loads(fleets.call("probe", "--json", code=69).stdout)["result"]["engines"]] == [
        False,
        True,
    ]
    fleets.call("pin", str(snapshot))
    assert fleets.engines()[1] == alive
    assert fleets.call("probe").stdout.count("  ready  ") == 2


def test_an_engine_that_cannot_be_restarted_makes_the_fleet_unavailable(fleets: FleetCommands, snapshot: Path) -> None:
    die = fleets.root / "die"
    fleets.up("--die-always-if", str(die))
    die.touch()
    kill_server(fleets.engines()[0])
    done = fleets.call("pin", str(snapshot), code=69)
    assert "told to end" in done.stderr
    die.unlink()
    fleets.call("pin", str(snapshot))


def test_an_engine_without_a_token_fails_the_pin(fleets: FleetCommands, snapshot: Path) -> None:
    fleets.up("--fault", '{"probe_error": {"status": 503, "error": "timeout"}}')
    assert "answered 503 (timeout)" in fleets.call("pin", str(snapshot), code=69).stderr


def test_an_engine_claimed_by_somebody_else_is_left_alone(fleets: FleetCommands, snapshot: Path) -> None:
    fleets.up()
    (engine,) = fleets.engines()
    later = {"epoch": 1000, "path": str(snapshot), "version": "9", "digest": weights_digest(snapshot), "fleet": "x"}
    fleets.speak(engine, "/evalkit/pin", later)
    assert "under a later epoch" in fleets.call("pin", str(snapshot), code=75).stderr
    assert fleets.engines() == [engine]
    assert fleets.state(engine)["pin"]["version"] == "9"


def test_a_fleet_in_use_is_waited_for_until_the_time_is_up(fleets: FleetCommands, snapshot: Path) -> None:
    fleets.up()
    with hold_fleet(fleets.paths(), timeout=5):
        assert "in use" in fleets.call("pin", str(snapshot), "--timeout", "0.3", code=75).stderr
    fleets.call("pin", str(snapshot), "--timeout", "0.3")


def test_who_lost_the_fleet_pins_and_restarts_nothing(fleets: FleetCommands, snapshot: Path) -> None:
    fleets.up(engines=2)
    kill_server(fleets.engines()[0])
    before = fleets.engines()
    with hold_fleet(fleets.paths(), timeout=5) as hold:
        change_fleet(fleets.paths(), lambda record: msgspec.structs.replace(record, holder="somebody else"))
        with pytest.raises(BusyError, match="taken over"):
            asyncio.run(pin_engines(hold, target(snapshot)))
    assert fleets.engines() == before
    assert fleets.state(before[1])["pin"] is None


def test_down_ends_a_restart_under_way(fleets: FleetCommands, snapshot: Path) -> None:
    go = fleets.root / "go"
    go.touch()
    fleets.up("--wait-for", str(go))
    (engine,) = fleets.engines()
    go.unlink()
    kill_server(engine)
    pin = fleets.start("pin", str(snapshot))
    wait_until("a new engine runs", lambda: fleets.engines()[0].engine_id != engine.engine_id)
    fleets.call("fleet", "down")
    pin.communicate(timeout=60)
    assert pin.returncode in (69, 75)
    fleets.assert_nothing_left()


def test_a_fleet_that_is_down(fleets: FleetCommands, snapshot: Path) -> None:
    fleets.up()
    fleets.call("fleet", "down")
    assert "is down" in fleets.call("pin", str(snapshot), code=69).stderr
    assert "is down" in fleets.call("probe", code=69).stderr


def test_the_snapshot_is_checked_before_the_epoch_is_claimed(fleets: FleetCommands, snapshot: Path) -> None:
    fleets.up()
    pinned = target(snapshot)
    epoch = fleets.record().epoch
    with hold_fleet(fleets.paths(), timeout=5) as hold:
        (snapshot / "model.safetensors").write_bytes(b"short")
        with pytest.raises(DataError, match=r"model\.safetensors"):
            asyncio.run(pin_engines(hold, pinned))
        gone = PinTarget(path=snapshot / "gone", version="1", digest=OTHER_DIGEST)
        with pytest.raises(NoSnapshotError, match="gone"):
            asyncio.run(pin_engines(hold, gone))
    assert fleets.record().epoch == epoch


def test_pin_refuses_what_cannot_be_meant(fleets: FleetCommands) -> None:
    fleets.up()
    for words, code, message in [
        ([], 2, "give one snapshot"),
        (["./a", "--dir", "./b"], 2, "give one snapshot"),
        (["step_1"], 2, "SNAPSHOT_DIR"),
        (["./step_1"], 66, "step_1"),
        (["--dir", "./step_1", "--load-timeout", "-1"], 2, "no duration"),
        (["./model"], 65, "safetensors"),
    ]:
        done = fleets.call("pin", *words, code=code)
        assert message in done.stderr
        assert done.stdout == ""


def test_probe_has_a_deadline(fleets: FleetCommands) -> None:
    fleets.up(engines=2)
    fleets.faults(fleets.engines()[1], hang=True)
    done = fleets.call("probe", "--timeout", "0.5", code=69)
    ready, late = done.stdout.splitlines()
    assert ready.split()[2] == "ready"
    assert "no token within 0.5 s" in late
