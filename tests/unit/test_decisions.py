"""Admission, incarnations and retention: decisions over values."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.decisions import incarnations
from evalkit.decisions.admission import Asked, LiveAttempt, decide
from evalkit.decisions.retention import SnapshotFacts, plan


def asked(
    step: int = 40,
    incarnation: int = 1,
    digest: str | None = "new",
    policy: Literal["backpressure", "skip"] = "skip",
    bound: int = 2,
    must: bool = False,
) -> Asked:
    return Asked(step, incarnation, digest, policy, bound, must)


def live(step: int, incarnation: int | None = 1, attempt: int = 1) -> LiveAttempt:
    return LiveAttempt(step, attempt, incarnation)


def test_room_admits() -> None:
    assert decide(asked(), [live(10)], []).action == "admit"


@pytest.mark.parametrize(
    ("policy", "must", "action"),
    [("skip", False, "busy"), ("backpressure", False, "wait"), ("skip", True, "wait"), ("backpressure", True, "wait")],
)
def test_full(policy: Literal["backpressure", "skip"], must: bool, action: str) -> None:
    assert decide(asked(policy=policy, must=must), [live(10), live(20)], []).action == action


def test_a_damaged_record_counts() -> None:
    assert decide(asked(bound=1), [live(10, None)], []).action == "busy"


def test_the_same_step_of_the_same_life_is_in_flight() -> None:
    decision = decide(asked(), [live(40, attempt=3)], [])
    assert (decision.action, decision.attempt) == ("in_flight", 3)


def test_the_same_step_of_another_life_is_superseded_and_makes_room() -> None:
    decision = decide(asked(incarnation=2, bound=1), [live(40)], [])
    assert decision.action == "admit"
    assert [old.step for old in decision.superseded] == [40]


def test_a_superseded_attempt_is_settled_even_when_there_is_no_room() -> None:
    decision = decide(asked(incarnation=2, bound=1), [live(40), live(50, 2)], [])
    assert decision.action == "busy"
    assert len(decision.superseded) == 1


def test_landed_with_the_same_weights_is_unchanged() -> None:
    assert decide(asked(digest="a"), [], [(1, "b"), (2, "a")]).action == "unchanged"
    assert decide(asked(digest="b"), [], [(1, "b"), (2, "a")]).action == "admit"


@given(
    bound=st.integers(1, 5),
    steps=st.lists(st.integers(0, 8), max_size=8, unique=True),
    policy=st.sampled_from(["skip", "backpressure"]),
    must=st.booleans(),
)
def test_never_more_than_the_bound(
    bound: int, steps: list[int], policy: Literal["backpressure", "skip"], must: bool
) -> None:
    decision = decide(asked(step=9, policy=policy, bound=bound, must=must), [live(step) for step in steps], [])
    assert (decision.action == "admit") == (len(steps) < bound)


@pytest.mark.parametrize(
    ("name", "known", "earlier", "digest", "ordinal"),
    [
        (None, [], [], None, 1),
        (None, ["a"], [], "x", 1),
        (None, ["a"], ["x"], "x", 1),
        (None, ["a"], ["x"], "y", 2),
        (None, ["a"], ["x"], None, 1),
        ("a", ["a", "b"], ["x"], "y", 1),
        ("c", ["a", "b"], [], None, 3),
        ("a", [], [], None, 1),
    ],
)
def test_incarnations(name: str | None, known: list[str], earlier: list[str], digest: str | None, ordinal: int) -> None:
    assert incarnations.choose(name, known, earlier, digest) == ordinal


def test_slurm_names_the_life() -> None:
    assert incarnations.name_from_environment({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}) == "7.2"
    assert incarnations.name_from_environment({"SLURM_JOB_ID": "7"}) == "7.0"
    assert incarnations.name_from_environment({}) is None


def facts(step: int, incarnation: int = 1, **other: bool | None) -> SnapshotFacts:
    values = {"complete": True, "ours": True, "settled": True, "active": False, "loaded": False, **other}
    return SnapshotFacts(f"step_{step}", step, incarnation, f"id{step}", **values)


def retired(snapshots: list[SnapshotFacts], keep: int) -> list[str]:
    return [verdict.snapshot.name for verdict in plan(snapshots, keep) if verdict.action == "retire"]


def test_the_newest_settled_stay() -> None:
    assert retired([facts(9000), facts(10000), facts(8000)], 2) == ["step_8000"]


def test_the_newest_life_comes_first() -> None:
    assert retired([facts(500, 1), facts(100, 2), facts(200, 2)], 2) == ["step_500"]


@pytest.mark.parametrize(
    "other",
    [{"ours": False}, {"active": True}, {"loaded": True}, {"loaded": None}, {"settled": False}],
    ids=str,
)
def test_what_is_never_retired(other: dict[str, bool | None]) -> None:
    assert retired([facts(1, **other), facts(2), facts(3)], 0) == ["step_2"]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.booleans()), max_size=8, unique_by=lambda item: item[0]),
    st.integers(0, 4),
)
def test_retention_keeps_enough(items: list[tuple[int, bool, bool]], keep: int) -> None:
    snapshots = [facts(step, settled=settled, active=active) for step, settled, active in items]
    gone = set(retired(snapshots, keep))
    assert all(s.settled and not s.active for s in snapshots if s.name in gone)
    left = [s for s in snapshots if s.name not in gone]
    assert len([s for s in left if s.settled]) >= min(keep, len([s for s in snapshots if s.settled]))
    if snapshots:
        assert max(snapshots, key=lambda s: s.rank) in left
