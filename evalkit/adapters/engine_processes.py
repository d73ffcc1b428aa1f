"""The processes of engines: found by the engine's id in their environment, ended whole, and cleaned up after.

Killing the API server alone leaves its EngineCore and workers; they are in the same session and carry the same
EVALKIT_ENGINE_ID. A pid alone proves nothing, and is never signalled.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from evalkit.ground.errors import UnavailableError
from evalkit.ground.processes import ProcessId, identify, is_alive, kill
from evalkit.ground.schema import EngineRecord

TERM_GRACE = 10.0  # seconds from SIGTERM to SIGKILL
TRACKER_GRACE = 3.0  # seconds that Python's resource trackers get to remove shared memory after the others are gone
KILL_TIMEOUT = 30.0  # seconds from SIGKILL until a process must be gone
SHM = Path("/dev/shm")
# What Python, PyTorch, vLLM and NCCL call their shared memory. Engines map snapshots too, and these may lie in SHM.
_SHM_NAMES = re.compile(r"(psm_|sem\.|torch_|vllm_|nccl-)[^/]+")


def environment_of(pid: int) -> dict[bytes, bytes]:
    """The environment that `pid` was started with; empty when it is gone or another user's."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0"))
    return {name: value for name, _, value in pairs}


def processes_of(engines: Iterable[EngineRecord]) -> set[ProcessId]:
    """Every live process of these engines on this host."""
    engines = list(engines)
    ids = {engine.engine_id.encode() for engine in engines}
    sessions = {engine.process.pid for engine in engines if engine.process and is_alive(engine.process)}
    found = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        pid = int(name)
        with contextlib.suppress(ProcessLookupError):
            if environment_of(pid).get(b"EVALKIT_ENGINE_ID") in ids or os.getsid(pid) in sessions:
                found.add(identify(pid))
    return found


def stop_engines(engines: Sequence[EngineRecord], *, grace: float | None = None) -> None:
    """End every process of these engines and remove what they leave in /dev/shm and in their own directories.

    Raises:
        UnavailableError: a process did not end.
    """
    shared = _shared_memory_of_all(processes_of(engines)) | _shared_memory_named(engines)
    # A server that is told to end ends its children; children without one have nothing left to finish.
    served = [engine for engine in engines if engine.process and kill(engine.process, signal.SIGTERM)]
    _kill_workers([engine for engine in engines if engine not in served])
    _wait(lambda: not processes_of(served), TERM_GRACE if grace is None else grace)
    shared |= _shared_memory_of_all(processes_of(engines)) | _shared_memory_named(engines)  # as they started or ended
    _kill_workers(served)
    _wait(lambda: not processes_of(engines), TRACKER_GRACE)
    if not _wait(lambda: not _kill_all(engines), KILL_TIMEOUT):
        pids = ", ".join(str(process.pid) for process in processes_of(engines))
        raise UnavailableError(f"processes that do not end, though killed: {pids}")
    _remove_shared_memory(shared)
    for engine in engines:
        _remove_tmp(engine)


def _kill_workers(engines: Sequence[EngineRecord]) -> None:
    """Kill all but Python's resource trackers: these end by themselves when nobody else is left, and remove the shared
    memory that was registered with them."""
    for process in processes_of(engines):
        if not _is_tracker(process):
            kill(process)


def _kill_all(engines: Sequence[EngineRecord]) -> set[ProcessId]:
    found = processes_of(engines)
    for process in found:
        kill(process)
    return found


def _wait(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _is_tracker(process: ProcessId) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    except OSError:
        return False


def _shared_memory_of_all(processes: Iterable[ProcessId]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped."""
    return {path for process in processes for path in shared_memory_of(process.pid)}


def shared_memory_of(pid: int) -> set[Path]:
    """The shared memory that `pid` has mapped, as far as it still has a name."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    names = (line.partition(f" {SHM}/")[2] for line in lines)
    return {SHM / name for name in names if _SHM_NAMES.fullmatch(name) and not name.endswith(" (deleted)")}


def _shared_memory_named(engines: Iterable[EngineRecord]) -> set[Path]:
    """The shared memory that vLLM names after a random file in its temporary directory, the engine's own here."""
    names = [path.name for engine in engines if engine.tmp for path in Path(engine.tmp).glob("vllm_dist_*")]
    return {path for name in names for path in SHM.glob(f"{name}*")}


def _remove_shared_memory(paths: set[Path]) -> None:
    """Remove those that nobody has mapped any more."""
    if not paths:
        return
    used = {path for name in os.listdir("/proc") if name.isdigit() for path in shared_memory_of(int(name))}
    for path in paths - used:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            path.unlink()


def _remove_tmp(engine: EngineRecord) -> None:
    """Remove the engine's own temporary directory; its name must hold the engine's id, whatever the record says."""
    path = Path(engine.tmp)
    if engine.tmp and path.name == tmp_name(engine.engine_id) and path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)


def tmp_name(engine_id: str) -> str:
    return f"evalkit-{engine_id}"
