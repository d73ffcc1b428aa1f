"""Which snapshots to take away: one plan, printed by a dry run or applied."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SnapshotFacts:
    """What retention must know of one snapshot.

    Attributes:
        ours: made by this run's evalkit; nothing else is ever taken away.
        settled: an outcome names its export.
        active: an attempt in flight names it.
        loaded: a fleet has it pinned, or booted from it; None when that is not known.
    """

    name: str
    step: int
    incarnation: int
    export_id: str | None
    complete: bool
    ours: bool
    settled: bool
    active: bool
    loaded: bool | None

    @property
    def rank(self) -> tuple[int, int]:
        return self.incarnation, self.step


@dataclass(frozen=True)
class Verdict:
    snapshot: SnapshotFacts
    action: Literal["keep", "retire"]
    why: str


def plan(snapshots: Iterable[SnapshotFacts], keep: int) -> list[Verdict]:
    """A verdict on every snapshot, the newest (by incarnation, then step) first.

    Args:
        keep: how many settled snapshots stay.
    """
    ranked = sorted(snapshots, key=lambda snapshot: snapshot.rank, reverse=True)
    newest = next((snapshot for snapshot in ranked if snapshot.complete), None)
    kept = {snapshot.name for snapshot in [s for s in ranked if s.settled and s.ours][:keep]}
    return [_verdict(snapshot, snapshot is newest, snapshot.name in kept, keep) for snapshot in ranked]


def _verdict(snapshot: SnapshotFacts, newest: bool, kept: bool, keep: int) -> Verdict:
    reasons = (
        (not snapshot.ours, "not made by this run"),
        (snapshot.active, "named by an attempt in flight"),
        (newest, "the newest complete one"),
        (snapshot.loaded is None, "a fleet's record is damaged: what it has loaded is not known"),
        (bool(snapshot.loaded), "loaded by a fleet"),
        (not snapshot.settled, "not evaluated yet"),
        (kept, f"among the newest {keep}"),
    )
    for holds, why in reasons:
        if holds:
            return Verdict(snapshot, "keep", why)
    return Verdict(snapshot, "retire", f"settled, beyond the newest {keep}")
