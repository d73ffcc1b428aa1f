"""Calling `evalkit export` in a directory of its own, and looking at what it made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_console_scripts import RunResult, ScriptRunner

from evalkit.ground.files import read_struct
from evalkit.ground.layout import MANIFEST, RunPaths, SnapshotPaths
from evalkit.ground.schema import Manifest
from evalkit.ground.tensors import TensorHeader, encode_header, read_headers
from tests.ledgers import FAULTPOINTS

ARGV = [sys.executable, "-m", "evalkit", "export"]


@dataclass
class Exports:
    """A SNAPSHOT_DIR and a RUN_DIR, and `evalkit export` into them."""

    root: Path
    runner: ScriptRunner

    @property
    def snapshot_dir(self) -> Path:
        return self.root / "snapshots"

    @property
    def run(self) -> RunPaths:
        return RunPaths(self.root / "run")

    @property
    def paths(self) -> SnapshotPaths:
        return SnapshotPaths(self.snapshot_dir)

    def words(self, source: Path, step: int, words: Sequence[object]) -> list[str]:
        own = ["--step", str(step), "--eval-hf-dir", str(self.snapshot_dir), "--run-dir", str(self.run.root)]
        return [str(source), *own, *map(str, words)]

    def call(self, source: Path, *words: object, step: int = 40, code: int = 0) -> RunResult:
        """In this process; the exit code is checked."""
        argv = ["evalkit", "export", *self.words(source, step, words)]
        done = self.runner.run(argv, print_result=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def refused(self, source: Path, *words: object, step: int = 40, code: int = 65) -> str:
        """The one line of an export that must fail, and must leave nothing."""
        before = self.names()
        done = self.call(source, *words, step=step, code=code)
        assert done.stdout == ""
        assert (self.leftovers(), self.names()) == ([], before)
        (line,) = done.stderr.splitlines()
        return line

    def json(self, source: Path, *words: object, step: int = 40) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.call(source, "--json", *words, step=step).stdout)["result"]
        return answer

    def start(
        self, source: Path, *words: object, step: int = 40, fault: dict[str, Any] | None = None, argv: Any = ARGV,
        **more: Any,
    ) -> subprocess.Popen[str]:  # fmt: skip
        """A real process."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("EVALKIT_")}
        if fault is not None:
            env |= {"EVALKIT_FAULT": json.dumps(fault), "PYTHONPATH": str(FAULTPOINTS)}
        return subprocess.Popen(
            [*argv, *self.words(source, step, words)],
            env={**env, **more.pop("env", {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **more,
        )

    def manifest(self, step: int = 40) -> Manifest:
        return read_struct(self.paths.snapshot(step) / MANIFEST, Manifest, "manifest")

    def names(self) -> list[str]:
        """The snapshots that are there."""
        return sorted(path.name for path in self.snapshot_dir.glob("step_*"))

    def leftovers(self) -> list[str]:
        """What must not outlive an export: staged files, trash, locks of snapshots that are not there."""
        ids = {self.manifest(int(p.parent.name[5:])).export_id for p in self.snapshot_dir.glob("step_*/evalkit.json")}
        locks = {path.stem for path in self.paths.locks.glob("*.lock")} - ids
        places = [path for place in (self.paths.incoming, self.paths.trash) for path in place.glob("*")]
        return [*sorted(locks), *map(str, places)]


def write_weights(path: Path, headers: dict[str, TensorHeader], source: Path) -> None:
    """A safetensors file of some tensors of the file `source`."""
    data = source.read_bytes()
    sizes = {name: (h.dtype, h.shape, h.end - h.start) for name, h in headers.items()}
    path.write_bytes(encode_header(sizes) + b"".join(data[h.start : h.end] for h in headers.values()))


def tensors_in(directory: Path) -> dict[str, bytes]:
    """The bytes of every tensor."""
    return {name: (directory / h.file).read_bytes()[h.start : h.end] for name, h in read_headers(directory).items()}
