"""Starting a detached worker that takes over an attempt: the descriptor of its lock is handed down, not released.

`posix_spawn` starts it: nothing of this process is forked, and nothing has to be imported for it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evalkit.ground.layout import AttemptPaths, ResultPaths

ACKNOWLEDGE = 60.0  # seconds for the worker to say that it has the attempt


def hand_over(paths: AttemptPaths, lock_fd: int, details: Mapping[str, Any]) -> bool:
    """Start the attempt's worker and wait until it has the lock; whether it has.

    The worker runs in its own session with its three standard descriptors on its log, so that neither a hang-up nor a
    shell that reads this command's output concerns it. The caller closes `lock_fd` afterwards, without unlocking it.

    Args:
        details: JSON-ready facts that the record does not have (digest, seconds of the export).
    """
    log = ResultPaths(paths.results).log
    log.parent.mkdir(parents=True, exist_ok=True)
    read_fd, write_fd = os.pipe()
    try:
        pid = _spawn(paths, lock_fd, write_fd, details, log)
    finally:
        os.close(write_fd)
    acknowledged = False
    try:
        acknowledged = _acknowledged(read_fd, time.monotonic() + ACKNOWLEDGE)
    finally:
        os.close(read_fd)
        if not acknowledged:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return acknowledged


def _spawn(paths: AttemptPaths, lock_fd: int, ack_fd: int, details: Mapping[str, Any], log: Path) -> int:
    order = {
        "run_dir": str(paths.run.root.absolute()),
        "step": paths.step,
        "attempt": paths.attempt,
        "lock_fd": lock_fd,
        "ack_fd": ack_fd,
        **details,
    }
    argv = [sys.executable, "-P", "-m", "evalkit.verbs.worker", json.dumps(order)]
    for fd in (lock_fd, ack_fd):
        os.set_inheritable(fd, True)
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(sys.executable, argv, os.environ, file_actions=actions, setsid=True)


def _acknowledged(fd: int, deadline: float) -> bool:
    """Whether a byte comes; the end of the pipe without one means that the worker died."""
    while (left := deadline - time.monotonic()) > 0:
        if select.select([fd], [], [], left)[0]:
            return os.read(fd, 1) == b"1"
    return False
