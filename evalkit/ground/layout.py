"""Every file and directory name that evalkit uses, and nothing else. docs/format.md says what is in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from evalkit.ground.errors import UsageError

MANIFEST = "evalkit.json"
MARKER = ".complete"
INCOMING = ".incoming"
TRASH = ".trash"
LOCKS = ".locks"

_STEP = re.compile(r"(?:^|[^0-9])([0-9]+)$")


def step_of(name: str) -> int | None:
    """The step at the end of a directory's name (`step_40`, `checkpoint-40`), or None."""
    match = _STEP.search(name)
    return int(match.group(1)) if match else None


@dataclass(frozen=True)
class SnapshotPaths:
    """SNAPSHOT_DIR and what is in it."""

    root: Path

    def snapshot(self, step: int) -> Path:
        return self.root / f"step_{step}"

    @property
    def incoming(self) -> Path:
        return self.root / INCOMING

    @property
    def trash(self) -> Path:
        return self.root / TRASH

    @property
    def locks(self) -> Path:
        return self.root / LOCKS

    @property
    def owner(self) -> Path:
        """Names the run that owns this SNAPSHOT_DIR."""
        return self.root / ".owner.json"

    @property
    def publish_lock(self) -> Path:
        """Held for the moment in which a snapshot gets its place, and an older one loses it."""
        return self.locks / "publish"

    @property
    def architectures(self) -> Path:
        """Empty files, each named by the hash of a config and of names and shapes of tensors that fit it."""
        return self.root / ".architectures"

    def lock(self, export_id: str) -> Path:
        return self.locks / f"{export_id}.lock"


@dataclass(frozen=True)
class RunPaths:
    """RUN_DIR and what is in it."""

    root: Path

    @property
    def record(self) -> Path:
        return self.root / "evalkit.json"

    @property
    def active(self) -> Path:
        return self.root / "active"

    @property
    def points(self) -> Path:
        return self.root / "points"

    @property
    def results(self) -> Path:
        return self.root / "results"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def metrics_lock(self) -> Path:
        return self.root / "metrics.lock"

    @property
    def ledger_lock(self) -> Path:
        return self.root / "ledger.lock"

    @property
    def drained(self) -> Path:
        """How far into metrics.jsonl the last drain looked."""
        return self.root / "drained.json"

    @property
    def incarnations(self) -> Path:
        return self.root / "incarnations"

    @property
    def digests(self) -> Path:
        """Digests of directories that have no manifest of their own."""
        return self.root / "digests"

    @property
    def fleets(self) -> Path:
        return self.root / "fleets"

    @property
    def manual(self) -> Path:
        """Results of `evalkit run` by hand."""
        return self.results / "manual"

    def attempt(self, step: int, attempt: int) -> AttemptPaths:
        return AttemptPaths(self, step, attempt)

    def fleet(self, name: str) -> FleetPaths:
        """The fleet `name` of this run, or, with a slash in it, the record at that path."""
        if "/" in name:
            path = Path(name).absolute()
            return FleetPaths(path.parent, path.name.removesuffix(".json"))
        if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or name.startswith("."):
            raise UsageError(f"--fleet {name!r} is neither a name nor a path", "use letters, digits, '.', '_' and '-'")
        return FleetPaths(self.fleets, name)


@dataclass(frozen=True)
class AttemptPaths:
    """The files of one attempt at one step."""

    run: RunPaths
    step: int
    attempt: int

    @property
    def name(self) -> str:
        return f"{self.step}.{self.attempt}"

    @property
    def record(self) -> Path:
        return self.run.active / f"{self.name}.json"

    @property
    def lock(self) -> Path:
        return self.run.active / f"{self.name}.lock"

    @property
    def reserve(self) -> Path:
        return self.run.active / f"{self.name}.reserve"

    @property
    def outcome(self) -> Path:
        return self.run.points / str(self.step) / f"{self.attempt}.json"

    @property
    def results(self) -> Path:
        return self.run.results / str(self.step) / str(self.attempt)


@dataclass(frozen=True)
class ResultPaths:
    """What an evaluation writes into its directory."""

    root: Path

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.json"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def worker(self) -> Path:
        """Identity of the process that works on the attempt."""
        return self.root / "worker.json"

    @property
    def progress(self) -> Path:
        return self.root / "progress.json"

    @property
    def samples(self) -> Path:
        return self.root / "samples"

    def dataset(self, name: str) -> Path:
        return self.samples / f"{name}.jsonl"


@dataclass(frozen=True)
class FleetPaths:
    """The files of one fleet; a fleet shared by several runs has them outside of RUN_DIR."""

    directory: Path
    name: str

    @property
    def record(self) -> Path:
        return self.directory / f"{self.name}.json"

    @property
    def record_lock(self) -> Path:
        """Held for the moment of one change of the record."""
        return self.directory / f"{self.name}.record.lock"

    @property
    def lock(self) -> Path:
        """Held by whoever uses the engines, as long as it uses them."""
        return self.directory / f"{self.name}.lock"

    @property
    def launch_lock(self) -> Path:
        """Held by whoever starts or stops engines, as long as that takes."""
        return self.directory / f"{self.name}.launch.lock"

    @property
    def queue(self) -> Path:
        return self.directory / f"{self.name}.queue"

    @property
    def key(self) -> Path:
        return self.directory / f"{self.name}.key"

    @property
    def logs(self) -> Path:
        return self.directory / f"{self.name}.logs"

    def log(self, index: int) -> Path:
        return self.logs / f"engine-{index}.log"
