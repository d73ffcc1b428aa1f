"""Exports that are ended, overtaken or disturbed in the middle, as real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_console_scripts import ScriptRunner

from evalkit.ground.tensors import digest_of
from evalkit.state.snapshot import hash_directory
from tests.exports import Exports
from tests.fakes import FakeFleet, tiny_snapshot
from tests.ledgers import Run, fault, wait_for

WRITING = "evalkit.ground.transfer:_write_at"
PUBLISHING = "evalkit.state.staging:Staging.publish"


@pytest.fixture
def exports(tmp_path: Path, script_runner: ScriptRunner) -> Exports:
    return Exports(tmp_path, script_runner)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_snapshot(tmp_path / "source", value=1.0, tensors=40)


class Held:
    """An export that waits at one place until it is let go."""

    def __init__(self, exports: Exports, source: Path, place: str, *words: object, skip: int = 0) -> None:
        self.note = exports.root / f"note-{len(list(exports.root.glob('note-*')))}"
        spec = fault("command", place, "before", self.note, "hold", skip=skip)
        self.process = exports.start(source, *words, fault=spec)
        wait_for(self.note.exists, "the place")

    def end(self, signum: int | None = None) -> tuple[int, str]:
        """Signal it or let it go on; its exit code and what it said."""
        if signum is not None:
            self.process.send_signal(signum)
        Path(f"{self.note}.go").touch()
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


@pytest.fixture
def held(exports: Exports, source: Path) -> Iterator[Any]:
    made: list[Held] = []

    def hold(place: str, *words: object, skip: int = 0, weights: Path = source) -> Held:
        made.append(Held(exports, weights, place, *words, skip=skip))
        return made[-1]

    yield hold
    for export in made:
        export.process.kill()
        export.process.wait()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize(("place", "skip"), [(WRITING, 20), (PUBLISHING, 0)])
def test_a_signal_in_the_middle_leaves_nothing(
    exports: Exports, held: Any, signum: int, code: int, place: str, skip: int
) -> None:
    export = held(place, skip=skip)
    assert len(os.listdir(exports.paths.incoming)) == 1
    returncode, err = export.end(signum)
    assert returncode == code
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 1
    assert (exports.leftovers(), exports.names()) == ([], [])


@pytest.mark.parametrize("place", [WRITING, PUBLISHING, "evalkit.state.staging:sweep_incoming"])
def test_what_a_killed_export_leaves_goes_with_the_next_one(
    exports: Exports, source: Path, held: Any, place: str
) -> None:
    export = held(place)
    assert export.end(signal.SIGKILL)[0] == -signal.SIGKILL
    assert exports.names() == []
    exports.call(source, step=41)
    assert (exports.leftovers(), exports.names()) == ([], ["step_41"])


def test_a_living_export_is_not_swept(exports: Exports, source: Path, held: Any) -> None:
    export = held(WRITING)
    exports.call(source, step=41)
    assert export.end() == (0, exports.call(source, step=42).stderr)
    assert exports.names() == ["step_40", "step_41", "step_42"]
    assert exports.leftovers() == []


def test_two_exports_of_the_same_weights_agree(exports: Exports, source: Path, held: Any) -> None:
    export = held(PUBLISHING, "--json")
    first = exports.json(source)
    Path(f"{export.note}.go").touch()
    out, _ = export.process.communicate(timeout=60)
    answer = json.loads(out)["result"]
    assert (answer["unchanged"], answer["digest"], answer["export_id"]) == (True, first["digest"], first["export_id"])
    assert exports.leftovers() == []


def test_of_two_exports_of_other_weights_the_second_is_refused(exports: Exports, source: Path, held: Any) -> None:
    export = held(PUBLISHING)
    other = tiny_snapshot(exports.root / "other", value=2.0)
    exports.call(other)
    returncode, err = export.end()
    assert returncode == 65
    assert "step_40 is there already with other content" in err
    assert exports.manifest().digest == digest_of(hash_directory(other))
    assert exports.leftovers() == []


def test_a_source_that_changes_meanwhile_is_refused(exports: Exports, source: Path, held: Any) -> None:
    export = held(WRITING)
    tiny_snapshot(source, value=3.0, tensors=40)
    returncode, err = export.end()
    assert returncode == 65
    assert f"{source}/model.safetensors changed while it was exported" in err
    assert (exports.leftovers(), exports.names()) == ([], [])


def test_a_source_that_shrinks_meanwhile_is_refused(exports: Exports, source: Path, held: Any) -> None:
    export = held(WRITING)
    os.truncate(source / "model.safetensors", 2000)
    returncode, err = export.end()
    assert returncode == 65
    assert "model.safetensors" in err
    assert (exports.leftovers(), exports.names()) == ([], [])


def test_a_trainer_that_makes_the_directory_meanwhile_keeps_it(exports: Exports, held: Any) -> None:
    export = held(PUBLISHING)
    (exports.snapshot_dir / "step_40").mkdir()
    assert export.end()[0] == 65
    assert os.listdir(exports.snapshot_dir / "step_40") == []
    assert exports.leftovers() == []


def test_the_snapshot_of_an_attempt_in_flight_is_not_replaced(run: Run, fleet: FakeFleet) -> None:
    fleet.faults(hold=True)
    run.dispatch("--step", 40, "--from", run.checkpoint(1.0))
    fleet.engines[0].wait("in_flight")
    done = run.call("export", run.checkpoint(2.0), "--step", 40, "--force", code=75)
    assert "step_40 is in use by the attempt in flight 40.1" in done.stderr
    fleet.faults(hold=None, release=True)
    run.call("drain", "--timeout", "60s")
    run.call("export", run.checkpoint(2.0), "--step", 40, "--force")
    assert run.leftovers() == []


def test_an_export_runs_without_torch_in_the_process(exports: Exports, source: Path) -> None:
    script = "import sys; from evalkit.cli.main import main; main()"
    check = f"""
import sys
try:
    {script}
finally:
    heavy = {{"torch", "transformers", "vllm", "asyncio", "concurrent", "numpy"}} & set(sys.modules)
    print(sorted(heavy), file=sys.stderr)
"""
    words = ["-c", check, "export", *exports.words(source, 40, [])]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
    shutil.rmtree(exports.snapshot_dir)
