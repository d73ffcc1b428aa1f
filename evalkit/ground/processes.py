"""Which process on which boot of which host: identity that survives the reuse of pids."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path

import msgspec


class ProcessId(msgspec.Struct, frozen=True):
    """A process, told apart from any later one with the same pid.

    Attributes:
        host: host name.
        boot_id: the kernel's random id of this boot.
        pid: process id in its namespace.
        start_time: clock ticks from boot to its start, from /proc/PID/stat.
    """

    host: str
    boot_id: str
    pid: int
    start_time: int


@functools.cache
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int | None:
    """When `pid` started, in clock ticks since boot; None when there is no such process (a zombie counts as none)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def this_process() -> ProcessId:
    return identify(os.getpid())


def identify(pid: int) -> ProcessId:
    """Raises ProcessLookupError when `pid` is gone."""
    started = start_time(pid)
    if started is None:
        raise ProcessLookupError(f"no process {pid}")
    return ProcessId(os.uname().nodename, boot_id(), pid, started)


def is_here(process: ProcessId) -> bool:
    """Whether `process` could be looked up and signalled from here: same host and boot."""
    return process.host == os.uname().nodename and process.boot_id == boot_id()


def is_alive(process: ProcessId) -> bool:
    """Whether `process` still runs on this host and boot; False for processes of other hosts."""
    return is_here(process) and start_time(process.pid) == process.start_time


def kill(process: ProcessId, signum: int = signal.SIGKILL) -> bool:
    """Signal `process` if it is certain that it is still the same one; whether a signal was sent."""
    if not is_alive(process):
        return False
    try:
        os.kill(process.pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True
