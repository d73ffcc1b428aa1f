"""The fleet record: read by everybody, changed only under its record lock, a moment each time."""

from __future__ import annotations

from collections.abc import Callable

from evalkit.ground.errors import DataError, UnavailableError
from evalkit.ground.files import read_struct, write_struct
from evalkit.ground.layout import FleetPaths
from evalkit.ground.locks import locked
from evalkit.ground.schema import FleetRecord

RECORD_TIMEOUT = 30.0  # seconds; the record lock is held for one read and one write


def load_fleet(paths: FleetPaths) -> FleetRecord:
    """Read the record.

    Raises:
        UnavailableError: there is no such fleet.
        DataError: its record is damaged.
    """
    try:
        return read_struct(paths.record, FleetRecord, "fleet record")
    except DataError as error:
        raise DataError(error.message, "end it with evalkit fleet down, and start it anew", "unhealthy") from error
    except FileNotFoundError:
        raise UnavailableError(
            f"there is no fleet {paths.name} ({paths.record})", "start one with evalkit fleet up"
        ) from None


def change_fleet(paths: FleetPaths, change: Callable[[FleetRecord], FleetRecord]) -> FleetRecord:
    """Replace the record by `change` of it, as one step; a missing record starts as an empty one."""
    paths.directory.mkdir(parents=True, exist_ok=True)
    with locked(paths.record_lock, RECORD_TIMEOUT, what=f"the record of fleet {paths.name}"):
        try:
            record = read_struct(paths.record, FleetRecord, "fleet record")
        except FileNotFoundError:
            record = FleetRecord(name=paths.name)
        changed = change(record)
        if changed != record or not paths.record.exists():
            write_struct(paths.record, changed)
        return changed
