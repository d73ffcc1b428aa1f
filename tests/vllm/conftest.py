"""Engines that a whole session of tests shares: a start costs half a minute."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.bad_snapshots import bad_snapshots
from tests.engines import Answer, Engine, running_fleet
from tests.models import make_model


class Fresh(NamedTuple):
    """What an engine answered before it was ever pinned."""

    state: dict[str, object]
    health: Answer
    models: Answer
    completion: Answer
    probe: Answer


class Lone(NamedTuple):
    """One engine, its two snapshots, and what it said when it was new. The boot model's directory is gone."""

    engine: Engine
    a: Path
    b: Path
    bad: dict[str, tuple[Path, str]]
    fresh: Fresh


@pytest.fixture(scope="session")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lone]:
    """For tests that pin by speaking to the agent themselves."""
    root = tmp_path_factory.mktemp("lone")
    boot = make_model(root / "boot", 1)
    a, b = make_model(root / "step_10", 2), make_model(root / "step_20", 3, shards=3)
    bad = bad_snapshots(a, root / "bad")
    with running_fleet(root / "run", boot) as engine:
        shutil.rmtree(boot)
        fresh = Fresh(
            engine.state(),
            engine.call("/health"),
            engine.call("/v1/models"),
            engine.complete("Hello"),
            engine.call("/evalkit/probe", {}),
        )
        yield Lone(engine, a, b, bad, fresh)
