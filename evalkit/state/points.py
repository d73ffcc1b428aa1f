"""Outcomes: one file an attempt under `points/`, published by link and never changed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from evalkit.ground.errors import FULL, DataError
from evalkit.ground.files import fsync_dir, publish_by_link, read_struct, write_durable
from evalkit.ground.ids import new_id
from evalkit.ground.layout import AttemptPaths, RunPaths
from evalkit.ground.schema import Outcome

_OUTCOME = re.compile(r"([0-9]+)\.json")


def outcomes_at(run: RunPaths, step: int) -> list[Outcome]:
    """The outcomes of every attempt at `step`, in order; a damaged one raises DataError."""
    directory = run.points / str(step)
    found = (read_outcome(directory / f"{attempt}.json") for attempt in attempts_at(run, step))
    return [outcome for outcome in found if outcome]


def attempts_at(run: RunPaths, step: int) -> list[int]:
    """The numbers of the attempts at `step` that have an outcome."""
    try:
        names = os.listdir(run.points / str(step))
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _OUTCOME.fullmatch(name)))


def known_steps(run: RunPaths) -> list[int]:
    """Every step with an outcome, in order."""
    return sorted(int(name) for name in os.listdir(run.points) if name.isdecimal())


def read_outcome(path: Path) -> Outcome | None:
    """None when it is not there."""
    try:
        return read_struct(path, Outcome, "outcome")
    except FileNotFoundError:
        return None


def settle(paths: AttemptPaths, outcome: Outcome) -> bool:
    """Publish the attempt's outcome; whether it was this one that won.

    On a full disk the reserve made at admission, which says `no_space`, is published in its place.
    """
    directory = paths.outcome.parent
    temporary = directory / f".{paths.attempt}.{new_id()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write(temporary, outcome)
        return publish_by_link(temporary, paths.outcome)
    except FileNotFoundError:
        # Somebody swept the temporary file away: only after an outcome was there.
        return False
    except OSError as error:
        if error.errno not in FULL:
            raise
        return _settle_by_reserve(paths)
    finally:
        temporary.unlink(missing_ok=True)


def _write(path: Path, outcome: Outcome) -> None:
    write_durable(path, msgspec.json.format(msgspec.json.encode(outcome), indent=1) + b"\n")


def _settle_by_reserve(paths: AttemptPaths) -> bool:
    try:
        read_struct(paths.reserve, Outcome, "reserve")
        return publish_by_link(paths.reserve, paths.outcome)
    except (FileNotFoundError, DataError):
        return False


def sweep_temporaries(paths: AttemptPaths) -> None:
    """Once the outcome is there: clear what a dead process left of its own try to publish one."""
    for leftover in paths.outcome.parent.glob(f".{paths.attempt}.*"):
        leftover.unlink(missing_ok=True)
    fsync_dir(paths.outcome.parent)
