"""Who may use a fleet's engines, and in which order.

Everyone who wants the engines puts a ticket, a file that it holds locked, into the fleet's queue; the least name is
the head, and only the head takes the fleet lock. A ticket whose lock is free belongs to a dead process, one whose point
has an outcome to a process that is stopped or ending: both are passed over. A fleet lock held by such a process is
replaced, and its holder finds out at its next step: its token is no longer in the record, and its epoch is no longer
the engines'.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from evalkit.ground.errors import BusyError, UnavailableError
from evalkit.ground.ids import new_id
from evalkit.ground.layout import FleetPaths
from evalkit.ground.locks import is_current, is_held, open_locked, try_lock
from evalkit.ground.processes import this_process
from evalkit.ground.schema import FleetRecord
from evalkit.state.fleet import change_fleet, load_fleet

POLL = 0.1  # seconds between looks at the queue
BREAK_AFTER = 5.0  # seconds that a holder whose point is settled gets to let go by itself
LEFT_BEHIND = 600.0  # seconds after which a file that takes a moment to write has no writer any more


@dataclass(frozen=True)
class FleetHold:
    """The right to steer a fleet's engines, until it is given back or taken away."""

    paths: FleetPaths
    token: str

    def check(self) -> None:
        """Raises BusyError when another has replaced this holder, UnavailableError when the fleet was taken down."""
        self._require(load_fleet(self.paths))

    def next_epoch(self) -> int:
        """Raise the fleet's epoch, durably, and return it.

        Raises:
            BusyError: another holder has replaced this one.
            UnavailableError: the fleet was taken down.
        """
        return self.change(lambda record: msgspec.structs.replace(record, epoch=record.epoch + 1)).epoch

    def change(self, change: Callable[[FleetRecord], FleetRecord]) -> FleetRecord:
        """Change the fleet record, as its holder.

        Raises:
            BusyError: another holder has replaced this one.
            UnavailableError: the fleet was taken down.
        """

        def guarded(record: FleetRecord) -> FleetRecord:
            self._require(record)
            return change(record)

        return change_fleet(self.paths, guarded)

    def _require(self, record: FleetRecord) -> None:
        if record.holder == self.token:
            return
        if record.holder is None or record.state == "down":
            raise UnavailableError(f"fleet {self.paths.name} was taken down", "start it with evalkit fleet up")
        raise BusyError(f"fleet {self.paths.name} was taken over by another process", "run the command again")


def place_of(incarnation: int, step: int, attempt: int) -> str:
    """An eval point's place in the queue: names sort as (incarnation, step, attempt) do."""
    return f"{incarnation:06d}.{step:012d}.{attempt:06d}"


@contextmanager
def hold_fleet(
    paths: FleetPaths,
    *,
    timeout: float,
    place: str = "",
    outcome: Path | None = None,
    check: Callable[[], None] | None = None,
) -> Iterator[FleetHold]:
    """Wait for the fleet's engines in the queue, and hold them.

    Args:
        timeout: seconds to wait.
        place: see `place_of`; without one the caller is a person and comes before all points, in order of arrival.
        outcome: the file whose existence ends the caller's right to the engines.
        check: called while waiting; what it raises ends the wait.

    Raises:
        UnavailableError: there is no such fleet, or it is down.
        BusyError: the fleet was not up and free in time.
    """
    deadline = time.monotonic() + timeout
    _wait_until_up(paths, deadline, timeout, check)
    ticket = _Ticket.publish(paths, place or f"{0:06d}.{time.time_ns():020d}", outcome)
    try:
        lock, hold = _wait_for_turn(ticket, deadline, timeout, check)
        try:
            yield hold
        finally:
            os.close(lock)
    finally:
        ticket.withdraw()


def require_fleet(paths: FleetPaths) -> FleetRecord:
    """The record of a fleet that is up, or on its way there.

    Raises:
        UnavailableError: there is no such fleet, or it is down, or whoever started it died.
    """
    record = load_fleet(paths)
    if record.state == "starting" and not is_held(paths.launch_lock):
        record = load_fleet(paths)  # the start may have ended between the two looks
        if record.state == "starting":
            raise UnavailableError(f"fleet {paths.name} was left half started", "start it with evalkit fleet up")
    if record.state == "down":
        raise UnavailableError(f"fleet {paths.name} is down", "start it with evalkit fleet up")
    return record


def _wait_until_up(paths: FleetPaths, deadline: float, timeout: float, check: Callable[[], None] | None) -> None:
    while require_fleet(paths).state != "up":
        if check:
            check()
        if time.monotonic() >= deadline:
            raise BusyError(f"fleet {paths.name} was still starting after {timeout:g} s", "try again later")
        time.sleep(POLL)


@dataclass(frozen=True)
class _Ticket:
    paths: FleetPaths
    path: Path
    fd: int
    outcome: Path | None

    @classmethod
    def publish(cls, paths: FleetPaths, place: str, outcome: Path | None) -> _Ticket:
        paths.queue.mkdir(parents=True, exist_ok=True)
        name = new_id()[:12]
        temporary, path = paths.queue / f".tmp-{name}", paths.queue / f"{place}~{name}"
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.ExitStack() as unless_published:
            unless_published.callback(os.close, fd)
            unless_published.callback(temporary.unlink, missing_ok=True)
            try_lock(fd)
            os.write(fd, str(outcome or "").encode())
            temporary.rename(path)
            unless_published.pop_all()
        return cls(paths, path, fd, outcome)

    def withdraw(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self.fd)

    def is_head(self) -> bool:
        names = sorted(name for name in os.listdir(self.paths.queue) if not name.startswith("."))
        earlier = names[: names.index(self.path.name)] if self.path.name in names else names
        return not any(_stands(self.paths.queue / name) for name in earlier)


def _stands(ticket: Path) -> bool:
    """Whether a ticket belongs to a live process with a right to the engines; a dead one's is cleared away."""
    try:
        outcome = ticket.read_text()
    except FileNotFoundError:
        return False
    if not is_held(ticket):
        ticket.unlink(missing_ok=True)
        return False
    return not (outcome and Path(outcome).exists())


def _wait_for_turn(
    ticket: _Ticket, deadline: float, timeout: float, check: Callable[[], None] | None
) -> tuple[int, FleetHold]:
    settled_since: float | None = None
    while True:
        if check:
            check()
        if ticket.is_head():
            taken = _try_take(ticket)
            if taken:
                return taken
            settled_since = _holder_settled_since(ticket.paths, settled_since)
            if settled_since is not None and time.monotonic() - settled_since > BREAK_AFTER:
                taken = _break_lock(ticket)
                if taken:
                    return taken
        if time.monotonic() >= deadline:
            raise BusyError(f"fleet {ticket.paths.name} was in use for {timeout:g} s", "try again later")
        time.sleep(POLL)


def _try_take(ticket: _Ticket) -> tuple[int, FleetHold] | None:
    fd = open_locked(ticket.paths.lock)
    if fd is None:
        return None
    with contextlib.ExitStack() as unless_taken:
        unless_taken.callback(os.close, fd)
        hold = _enter(ticket, fd) if ticket.is_head() else None
        if hold is None:
            return None
        unless_taken.pop_all()
        return fd, hold


def _enter(ticket: _Ticket, fd: int) -> FleetHold | None:
    """Write the new holder into the record, unless the lock file was replaced meanwhile."""
    hold = FleetHold(ticket.paths, new_id())

    def enter(record: FleetRecord) -> FleetRecord:
        return _held_by(record, hold, ticket) if is_current(fd, ticket.paths.lock) else record

    return hold if change_fleet(ticket.paths, enter).holder == hold.token else None


def _held_by(record: FleetRecord, hold: FleetHold, ticket: _Ticket) -> FleetRecord:
    return msgspec.structs.replace(
        record,
        holder=hold.token,
        holder_outcome=str(ticket.outcome) if ticket.outcome else None,
        holder_process=this_process(),
    )


def _holder_settled_since(paths: FleetPaths, since: float | None) -> float | None:
    outcome = load_fleet(paths).holder_outcome
    if outcome is None or not Path(outcome).exists():
        return None
    return time.monotonic() if since is None else since


def _break_lock(ticket: _Ticket) -> tuple[int, FleetHold] | None:
    """Put a new, already locked file in the place of a lock whose holder has lost its right.

    Under the record lock, so that of two that try only the first finds the old holder there. One that took the
    old file at this very moment sees in `_enter` that the path names another.
    """
    hold = FleetHold(ticket.paths, new_id())
    temporary = ticket.paths.queue / f".tmp-{hold.token}"
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def replace(record: FleetRecord) -> FleetRecord:
        if record.holder_outcome is None or not Path(record.holder_outcome).exists():
            return record
        temporary.rename(ticket.paths.lock)
        return _held_by(record, hold, ticket)

    with contextlib.ExitStack() as unless_taken:
        unless_taken.callback(os.close, fd)
        unless_taken.callback(temporary.unlink, missing_ok=True)
        try_lock(fd)
        if change_fleet(ticket.paths, replace).holder != hold.token:
            return None
        unless_taken.pop_all()
        return fd, hold


def sweep(paths: FleetPaths) -> None:
    """Clear what processes that are dead have left half done beside the fleet record and in its queue."""
    long_ago = time.time() - LEFT_BEHIND
    for leftover in (*paths.directory.glob(".tmp-*"), *paths.queue.glob(".tmp-*")):
        with contextlib.suppress(FileNotFoundError):  # it was finished, or swept by another
            if leftover.stat().st_mtime < long_ago:
                leftover.unlink()
