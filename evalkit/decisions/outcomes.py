"""Outcomes as values: how an attempt ended, made from its record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evalkit.ground.processes import ProcessId
from evalkit.ground.schema import ActiveRecord, Outcome


def skipped(
    record: ActiveRecord,
    reason: str,
    detail: str,
    now: float,
    *,
    by: ProcessId | None = None,
    digest: str | None = None,
    export_id: str | None = None,
) -> Outcome:
    """A skip of the attempt, with its reason and one line for a person."""
    return Outcome(
        step=record.step,
        attempt=record.attempt,
        incarnation=record.incarnation,
        outcome="skipped",
        reason=reason,
        detail=detail,
        digest=digest or record.source_digest,
        export_id=export_id or record.export_id,
        snapshot=record.snapshot,
        admitted_at=record.admitted_at,
        settled_at=now,
        settled_by=by,
    )


def landed(
    record: ActiveRecord,
    metrics: Mapping[str, float | int | None],
    proof: Mapping[str, Any],
    now: float,
    *,
    by: ProcessId,
    export_id: str | None,
) -> Outcome:
    """A result, with what was proved of the weights that it was made with."""
    return Outcome(
        step=record.step,
        attempt=record.attempt,
        incarnation=record.incarnation,
        outcome="landed",
        weight_version=proof["version"],
        digest=proof["digest"],
        export_id=export_id,
        snapshot=record.snapshot,
        admitted_at=record.admitted_at,
        settled_at=now,
        settled_by=by,
        proof=dict(proof),
        metrics=dict(metrics),
    )


def unreadable(step: int, attempt: int, reason: str, now: float) -> Outcome:
    """A skip of an attempt whose record cannot be read."""
    return Outcome(
        step=step,
        attempt=attempt,
        incarnation=0,
        outcome="skipped",
        reason=reason,
        detail="the record of the attempt is damaged",
        admitted_at=now,
        settled_at=now,
    )
