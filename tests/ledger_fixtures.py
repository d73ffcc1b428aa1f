"""Fixtures of the tests that run the ledger's commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import FakeFleet, fake_fleet
from tests.ledgers import Run, make_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path)


@pytest.fixture
def fleet(run: Run) -> Iterator[FakeFleet]:
    with fake_fleet(run.run_dir) as fleet:
        yield fleet
