"""Fixtures of all tests: a run directory, real engines shared by the session, and a look at what is left behind."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalkit.adapters.engine_processes import environment_of
from tests.fleets import wait_until
from tests.real_fleet import RealFleet, real_fleet_in

SESSION_MARK = "TEST_SESSION_MARK"  # in the environment of everything that this process starts

for _name in [name for name in os.environ if name.startswith("EVALKIT_")]:
    del os.environ[_name]


@pytest.fixture(scope="session", autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Fails the session when a process that a test started, directly or not, is still there at the end."""
    mark = uuid.uuid4().hex
    os.environ[SESSION_MARK] = mark
    yield
    try:
        wait_until("no process of the tests is left", lambda: not _marked(mark), timeout=10)
    except TimeoutError:
        pytest.fail("still running: " + "; ".join(_command(pid) for pid in _marked(mark)))


def _marked(mark: str) -> list[int]:
    """Processes that were started by this one, except this one itself."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid())
    return [pid for pid in pids if environment_of(pid).get(SESSION_MARK.encode()) == mark.encode()]


def _command(pid: int) -> str:
    try:
        return f"{pid} " + Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return str(pid)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A RUN_DIR that does not exist yet."""
    return tmp_path / "run"


@pytest.fixture(scope="session")
def real_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    """Two real engines on the CPU, started and ended by `evalkit fleet`, with the snapshots `a` and `b`.

    Tests pin what they need; none may count on what another left pinned.
    """
    with real_fleet_in(tmp_path_factory.mktemp("fleet"), engines=2) as fleet:
        yield fleet
