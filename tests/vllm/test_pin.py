"""`evalkit pin` on real engines: what they answer afterwards is the snapshot's."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalkit.state.fleet import load_fleet
from tests.bad_snapshots import bad_snapshots
from tests.engines import greedy, weights_digest
from tests.fleets import kill_server
from tests.real_fleet import RealFleet

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(600)]

PROMPT = "What-is-12+30="
LONG_PROMPT = "A-prompt-that-fills-two-blocks-of-the-prefix-cache." * 6


def answers(fleet: RealFleet, prompt: str = PROMPT) -> list[list[int]]:
    """Each engine's greedy tokens."""
    return [engine.complete(prompt).tokens for engine in fleet.engines]


def test_after_each_pin_every_engine_answers_as_transformers_does(real_fleet: RealFleet) -> None:
    a, b = real_fleet.models["a"], real_fleet.models["b"]
    assert greedy(a, PROMPT, 16) != greedy(b, PROMPT, 16)
    for name, path in (("step_10", a), ("step_20", b), ("step_10", a)):
        real_fleet.call("pin", name)
        for prompt in (PROMPT, LONG_PROMPT):
            assert answers(real_fleet, prompt) == [greedy(path, prompt, 16)] * 2, (name, prompt)


def test_the_proof_says_what_each_engine_holds(real_fleet: RealFleet) -> None:
    before = load_fleet(real_fleet.paths).epoch
    proof = real_fleet.json("pin", "--dir", "step_20")
    states = [engine.state() for engine in real_fleet.engines]
    assert (proof["version"], proof["digest"]) == ("20", weights_digest(real_fleet.models["b"]))
    assert proof["epoch"] == before + 1
    assert [engine["nonce"] for engine in proof["engines"]] == [state["nonce"] for state in states]
    assert [(engine["ranks"], engine["vllm"]) for engine in proof["engines"]] == [(1, states[0]["vllm"])] * 2
    assert [state["pin"]["epoch"] for state in states] == [proof["epoch"]] * 2
    record = load_fleet(real_fleet.paths)
    assert (record.epoch, record.pinned) == (proof["epoch"], str(real_fleet.models["b"]))


def test_a_bad_snapshot_is_refused_and_changes_nothing(real_fleet: RealFleet, tmp_path: Path) -> None:
    real_fleet.call("pin", "step_10")
    before = answers(real_fleet)
    pins = [engine.state()["pin"] for engine in real_fleet.engines]
    for kind, (path, fragment) in bad_snapshots(real_fleet.models["a"], tmp_path / "bad").items():
        done = real_fleet.call("pin", path, code=66 if kind == "no_such_dir" else 65)
        assert fragment in done.stderr or kind == "no_such_dir", (kind, done.stderr)
        assert len(done.stderr.splitlines()) == 1, (kind, done.stderr)
        assert done.stdout == ""
        assert answers(real_fleet) == before, kind
    assert [engine.state()["pin"] for engine in real_fleet.engines] == pins
    assert load_fleet(real_fleet.paths).pinned == str(real_fleet.models["a"])


def test_an_unfinished_snapshot_of_the_snapshot_directory_is_refused(real_fleet: RealFleet) -> None:
    unfinished = real_fleet.snapshot_dir / "step_30"
    unfinished.mkdir()
    try:
        assert "step_30" in real_fleet.call("pin", "step_30", code=66).stderr
    finally:
        unfinished.rmdir()


def test_a_killed_server_is_replaced_by_the_next_pin(real_fleet: RealFleet) -> None:
    real_fleet.call("pin", "step_10")
    killed, kept = real_fleet.records
    kill_server(killed)
    assert "not ready" in real_fleet.call("probe", code=69).stdout.splitlines()[0]
    real_fleet.call("pin", "step_20")
    assert real_fleet.records[0].engine_id != killed.engine_id
    assert real_fleet.records[1] == kept
    assert answers(real_fleet) == [greedy(real_fleet.models["b"], PROMPT, 16)] * 2
