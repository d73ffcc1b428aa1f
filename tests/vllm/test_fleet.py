"""A fleet of real engines: how it starts and ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evalkit.adapters.engine_processes import processes_of
from tests.engines import greedy
from tests.fleets import kill_server, mode_of
from tests.real_fleet import RealFleet, make_fleet

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(600)]

PROMPT = "What-is-12+30="


def test_each_engine_is_a_session_of_marked_processes(real_fleet: RealFleet) -> None:
    for engine in real_fleet.records:
        assert engine.process is not None
        processes = processes_of([engine])
        assert len(processes) >= 3  # API server, EngineCore, worker
        assert {os.getsid(process.pid) for process in processes} == {engine.process.pid}
        # The titles that vLLM gives its processes have left the environment, by which they are found, in place.
        marks = [f"EVALKIT_ENGINE_ID={engine.engine_id}".encode()]
        environments = [Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0") for process in processes]
        assert [[item for item in env if b"ENGINE_ID" in item] for env in environments] == [marks] * len(processes)


def test_the_key_is_nowhere_but_in_its_file(real_fleet: RealFleet) -> None:
    key = real_fleet.key.encode()
    assert mode_of(real_fleet.paths.key) == 0o600
    places = [path for path in real_fleet.run_dir.rglob("*") if path.is_file() and path != real_fleet.paths.key]
    for process in processes_of(real_fleet.records):
        places += [Path(f"/proc/{process.pid}/{name}") for name in ("environ", "cmdline")]
    assert [place for place in places if key in place.read_bytes()] == []


def test_up_again_keeps_the_engines(real_fleet: RealFleet) -> None:
    before = real_fleet.records
    assert len(real_fleet.up(engines=2).stdout.splitlines()) == 2
    assert real_fleet.records == before
    assert "another launch line" in real_fleet.up(engines=1, code=2).stderr


def test_probe_and_status_tell_one_line_an_engine(real_fleet: RealFleet) -> None:
    real_fleet.call("pin", "step_10")
    probed = real_fleet.call("probe").stdout.splitlines()
    assert [line.split()[:3] for line in probed] == [[str(i), url, "ready"] for i, url in enumerate(real_fleet.urls)]
    status = real_fleet.call("fleet", "status").stdout.splitlines()
    assert [line.split()[1:4] for line in status] == [[url, "pinned", "10"] for url in real_fleet.urls]
    assert (
        "Application startup complete." in real_fleet.call("fleet", "logs", "--engine", "1", "--lines", "100000").stdout
    )


def test_a_second_fleet_with_two_ranks_ends_whole_after_its_server_was_killed(
    real_fleet: RealFleet, tmp_path: Path
) -> None:
    """EngineCore and both workers outlive their server; the other fleet is not touched."""
    real_fleet.call("pin", "step_20")
    before = real_fleet.records, processes_of(real_fleet.records)
    fleet = make_fleet(tmp_path)
    try:
        fleet.up(engines=1, ranks=2)
        proof = fleet.json("pin", "step_10")
        assert [engine["ranks"] for engine in proof["engines"]] == [2]
        assert fleet.engines[0].complete(PROMPT).tokens == greedy(fleet.models["a"], PROMPT, 16)
        kill_server(fleet.records[0])
        assert len(processes_of(fleet.records)) >= 3
    finally:
        fleet.down()
    assert (real_fleet.records, processes_of(real_fleet.records)) == before
    for engine in real_fleet.engines:
        assert engine.complete(PROMPT).tokens == greedy(real_fleet.models["b"], PROMPT, 16)
