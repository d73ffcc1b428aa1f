"""The detached worker of one attempt: queue for the fleet, pin, evaluate, settle.

`python -m evalkit.verbs.worker ORDER` is started by dispatch, which waits for the acknowledgement: so the modules that
cost time are imported only after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from evalkit.ground.layout import AttemptPaths, ResultPaths, RunPaths
from evalkit.ground.locks import is_current


def main(order: dict[str, Any]) -> None:
    """Take the attempt over and see it to its end.

    Args:
        order: run_dir, step, attempt, the descriptors lock_fd and ack_fd, and what dispatch found out: digest and
            export_seconds, both only after an export.
    """
    paths = RunPaths(Path(order["run_dir"])).attempt(order["step"], order["attempt"])
    lock_fd, ack_fd = order["lock_fd"], order["ack_fd"]
    for fd in (lock_fd, ack_fd):
        os.set_inheritable(fd, False)
    if not is_current(lock_fd, paths.lock):
        sys.exit(f"the lock of {paths.name} is not the one that was handed down")
    _sign(paths)
    with contextlib.suppress(
        BrokenPipeError
    ):  # dispatch may be dead by now; the attempt is this process's all the same
        os.write(ack_fd, b"1")
    os.close(ack_fd)

    from evalkit.verbs.working import work

    work(paths, lock_fd, order)


def _sign(paths: AttemptPaths) -> None:
    """Leave this process's identity, so that others can end it when it is past its deadline."""
    from evalkit.ground.files import write_struct
    from evalkit.ground.processes import this_process

    write_struct(ResultPaths(paths.results).worker, this_process())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
