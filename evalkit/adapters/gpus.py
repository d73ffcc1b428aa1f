"""The GPUs of this machine, as nvidia-smi and the processes of running engines show them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator

from evalkit.adapters.engine_processes import environment_of
from evalkit.ground.devices import Gpu
from evalkit.ground.errors import BusyError, UnavailableError

SMI_TIMEOUT = 60.0  # seconds; the first call after a boot may start the driver
_GPU_FIELDS = "index,uuid,memory.used,memory.total"


def list_gpus() -> list[Gpu]:
    """Every GPU of this machine, with the processes on it.

    Raises:
        UnavailableError: there is none, or nvidia-smi fails.
    """
    rows = _query(f"--query-gpu={_GPU_FIELDS}")
    users = _query("--query-compute-apps=gpu_uuid,pid") if rows else []
    try:
        gpus = [
            Gpu(index, uuid, _number(used), _number(total), tuple(_number(pid) for on, pid in users if on == uuid))
            for index, uuid, used, total in rows
        ]
    except ValueError as error:
        raise UnavailableError(f"nvidia-smi gave rows that can't be read: {error}") from error
    if not gpus:
        raise UnavailableError("nvidia-smi shows no GPU", "use --engines K to start engines on the CPU")
    return gpus


def _number(cell: str) -> int:
    """0 for a cell like `[N/A]`: some GPUs have no memory of their own, and some processes are hidden."""
    return int(cell) if cell.isdigit() else 0


def _query(what: str) -> list[list[str]]:
    argv = ["nvidia-smi", what, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=SMI_TIMEOUT, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise UnavailableError(
            "this machine has no GPU (no nvidia-smi)", "use --engines K to start engines on the CPU"
        ) from None
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"nvidia-smi did not answer within {SMI_TIMEOUT:g} s") from None
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise UnavailableError(f"nvidia-smi failed with code {done.returncode}: {said}")
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def claimed_gpus() -> dict[str, int]:
    """GPU ids that live engines of any fleet were started with, and a process of each; also before they use them."""
    claims: dict[str, int] = {}
    for name in os.listdir("/proc"):
        environment = environment_of(int(name)) if name.isdigit() else {}
        if b"EVALKIT_ENGINE_ID" in environment:
            for gpu in environment.get(b"CUDA_VISIBLE_DEVICES", b"").decode().split(","):
                claims.setdefault(gpu, int(name))
    claims.pop("", None)
    return claims


@contextlib.contextmanager
def choosing(timeout: float = 120.0) -> Iterator[None]:
    """Held while GPUs are chosen and engines started on them, by one process of this machine at a time.

    An abstract socket name is the lock: the kernel frees it with its holder, and it leaves no file behind.

    Raises:
        BusyError: others were choosing for `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX) as lock:
        while True:
            try:
                lock.bind("\0evalkit-gpus")
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise BusyError(f"another fleet was choosing GPUs for {timeout:g} s", "try again later") from error
            time.sleep(0.05)
        yield
