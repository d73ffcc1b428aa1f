"""A dispatch's export: the same as `evalkit export`, under the attempt's own export id."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.ground.errors import EvalkitError
from evalkit.ground.layout import RunPaths
from evalkit.ground.schema import ActiveRecord
from evalkit.state.run import open_run
from evalkit.state.snapshot import known_digest, open_snapshot
from evalkit.verbs.due import Due
from evalkit.verbs.snapshot_users import is_settled, used_by_attempt

if TYPE_CHECKING:
    from evalkit.verbs.export import ExportRequest


def digest_of_due(run: RunPaths, due: Due, options: Mapping[str, Any]) -> str | None:
    """The digest of the weights that a dispatch is about; None when they cannot be read.

    What is wrong with them is found again, and recorded, when they are exported or pinned.
    """
    try:
        if due.source is None:
            return known_digest(run, open_snapshot(due.snapshot, need_marker=False))
        from evalkit.verbs.export import source_digest

        return source_digest(_request(due, options))
    except Exception:  # noqa: BLE001  (whatever it is, a bug too: the export or the pin meets it again, and records it)
        return None


def export_due(run: RunPaths, due: Due, options: Mapping[str, Any], record: ActiveRecord) -> dict[str, Any]:
    """Make the snapshot of an attempt, replacing a settled one of the same step; what the worker should know of it.

    Raises:
        EvalkitError: the export failed; nothing of it is left.
    """
    from evalkit.verbs.export import export_source

    run_id = open_run(run.root, create=False).run_id
    request = _request(
        due,
        options,
        run_id=run_id,
        run_dir=run.root,
        incarnation=record.incarnation,
        export_id=record.export_id,
        force=_is_replaceable(run, due.snapshot),
        in_use=lambda snapshot: used_by_attempt(run, snapshot, run.attempt(record.step, record.attempt)),
    )
    result = export_source(request)
    return {"digest": result.digest, "export_seconds": result.seconds}


def _request(due: Due, options: Mapping[str, Any], **more: Any) -> ExportRequest:
    from evalkit.verbs.export import ExportRequest

    if due.source is None or due.snapshot_dir is None:
        raise ValueError("nothing to export")
    return ExportRequest(source=due.source, step=due.step, snapshot_dir=due.snapshot_dir, **options, **more)


def _is_replaceable(run: RunPaths, snapshot: Path) -> bool:
    """Whether another snapshot of this step has had its point, so that new weights may take its place."""
    try:
        return is_settled(run, open_snapshot(snapshot, need_marker=False))
    except EvalkitError:
        return False
