"""metrics.jsonl is made anew from the outcomes when a row is damaged, and no drain misses what it had to report."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalkit.ground.files import write_struct
from evalkit.ground.layout import RunPaths
from evalkit.ground.schema import Drained, Outcome
from evalkit.state.metrics_log import append_row, read_rows
from evalkit.state.points import settle
from evalkit.state.run import open_run
from evalkit.verbs.drain import drain
from evalkit.verbs.status import status

STEPS = [30, 10, 20]  # in order of landing


@pytest.fixture
def run(run_dir: Path) -> RunPaths:
    """Three points that have landed, the first of them drained."""
    open_run(run_dir, create=True)
    run = RunPaths(run_dir)
    for time, step in enumerate(STEPS):
        outcome = Outcome(
            step=step,
            attempt=1,
            incarnation=0,
            outcome="skipped",
            reason="busy",
            admitted_at=0.0,
            settled_at=float(time),
        )
        settle(run.attempt(step, 1), outcome)
        append_row(run, outcome)
        if time == 0:
            write_struct(run.drained, Drained(offset=run.metrics.stat().st_size))
    return run


def damage(run: RunPaths, number: int, damaged: bytes) -> None:
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    lines[number] = damaged
    run.metrics.write_bytes(b"".join(lines))


def steps(run: RunPaths, offset: int = 0) -> list[int]:
    return [row.step for row in read_rows(run, offset)[0]]


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize(
    "damaged", [b"\0" * 20 + b"\n", b'{"step":1\n', b"\n", b'{"step":10,"attempt":1,"x":"\xff"}\n']
)
def test_a_damaged_row_is_made_anew(run: RunPaths, number: int, damaged: bytes) -> None:
    whole = run.metrics.read_bytes()
    damage(run, number, damaged)
    assert sorted(steps(run)) == sorted(STEPS)
    if number:
        assert run.metrics.read_bytes() == whole
    assert [path.name for path in run.root.glob(".tmp-*")] == []


def test_status_and_drain_go_on_and_nothing_is_reported_twice(run: RunPaths) -> None:
    damage(run, 1, b"x\n")
    assert [point["step"] for point in status(run.root).data["points"]] == sorted(STEPS)
    damage(run, 2, b"x" * 1000 + b"\n")
    assert [outcome["step"] for outcome in drain(run.root, 5).data["outcomes"]] == STEPS[1:]
    assert drain(run.root, 5).data["outcomes"] == []


def test_a_damaged_row_that_was_drained_moves_nothing_out_of_sight(run: RunPaths) -> None:
    damage(run, 0, b"x\n")
    status(run.root)
    assert [outcome["step"] for outcome in drain(run.root, 5).data["outcomes"]] == STEPS


def test_a_damaged_outcome_is_passed_over(run: RunPaths) -> None:
    damage(run, 1, b"x\n")
    run.attempt(20, 1).outcome.write_bytes(b"x")
    assert steps(run) == [30, 10]


def test_a_shorter_file_than_the_drained_part_is_drained_from_its_end(run: RunPaths) -> None:
    write_struct(run.drained, Drained(offset=10**6))
    assert drain(run.root, 5).data["outcomes"] == []
    assert drain(run.root, 5).data["outcomes"] == []
