"""The JSON files, as types. docs/format.md gives the meaning of each; format 1 throughout.

Unknown fields are ignored, so that a newer minor release can add some; another format number is refused.
Times are seconds since the epoch, durations are seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from evalkit.ground.processes import ProcessId

Format = Literal[1]

# It becomes a file name, so nothing else may be read from a file.
ExportId = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z_-]{1,64}\Z")]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`evalkit.json` inside a snapshot that evalkit made.

    Attributes:
        export_id: unique to this export; names the snapshot's lock.
        tensors: by name: dtype and shape as in the safetensors header, and the blake3 of the bytes.
        digest: see `evalkit.ground.tensors.digest_of`.
        files: every other file of the snapshot and its size in bytes.
        hashes: blake3 of the files beside weights and index: config, tokenizer, chat template and the like.
        missing: tokenizer, chat template or generation files that the source did not have.
    """

    format: Format = 1
    export_id: ExportId
    step: int
    run_id: str | None = None
    incarnation: int = 0
    source: dict[str, Any]
    created_at: float
    evalkit: str
    digest: str
    total_bytes: int
    files: dict[str, int]
    hashes: dict[str, str]
    tensors: dict[str, tuple[str, tuple[int, ...], str]]
    missing: list[str] = []


class SnapshotId(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a manifest that tells one snapshot from another; cheap to read for a model of any size."""

    format: Format = 1
    export_id: ExportId
    step: int
    run_id: str | None = None
    incarnation: int = 0
    digest: str
    hashes: dict[str, str] = {}


class SnapshotOwner(msgspec.Struct, frozen=True, kw_only=True):
    """`.owner.json` of a SNAPSHOT_DIR."""

    format: Format = 1
    run_id: str
    run_dir: str


class DigestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`digests/<hash of the path>.json` of a RUN_DIR: the digest of a directory that has no manifest.

    Attributes:
        path: real path of the directory.
        files: weight files and index by name: size, modification time in ns, inode; a change makes the digest void.
    """

    format: Format = 1
    path: str
    files: dict[str, tuple[int, int, int]]
    digest: str


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`evalkit.json` of a RUN_DIR."""

    format: Format = 1
    run_id: str
    lock_mode: Literal["flock"] = "flock"
    snapshot_dir: str | None = None
    suite: str | None = None
    fleet: str | None = None
    created_at: float


class Incarnation(msgspec.Struct, frozen=True, kw_only=True):
    """`incarnations/<ordinal>.json`: one life of the trainer."""

    format: Format = 1
    ordinal: int
    name: str
    began_at: float


class ActiveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`active/<step>.<attempt>.json`: an attempt in flight. Written once, at admission.

    Attributes:
        snapshot: absolute path of the directory to evaluate.
        export_id: of the snapshot that this attempt makes or uses, when it is evalkit's own to retire.
        deadline: when anybody may settle the attempt as `timeout`.
        keep: how many settled snapshots stay.
        source_digest: digest of the source, where it was known at admission.
    """

    format: Format = 1
    step: int
    attempt: int
    incarnation: int
    snapshot: str
    snapshot_dir: str | None = None
    export_id: ExportId | None = None
    source_digest: str | None = None
    suite: str
    fleet: str
    keep: int
    settings: dict[str, Any] = {}
    admitted_by: ProcessId
    admitted_at: float
    deadline: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`points/<step>/<attempt>.json`: how an attempt ended. Never changed.

    Attributes:
        outcome: `landed` or `skipped`.
        reason: of a skip; one word of `evalkit.ground.errors.REASONS` or an evaluator's own.
        detail: one line for a person.
        weight_version: what the engines reported, the step as text.
        metrics: what a logger shows, `eval/step` included.
    """

    format: Format = 1
    step: int
    attempt: int
    incarnation: int
    outcome: Literal["landed", "skipped"]
    reason: str | None = None
    detail: str = ""
    weight_version: str | None = None
    digest: str | None = None
    export_id: ExportId | None = None
    snapshot: str | None = None
    admitted_at: float
    settled_at: float
    settled_by: ProcessId | None = None
    proof: dict[str, Any] = {}
    metrics: dict[str, float | int | None] = {}


class MetricsRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of metrics.jsonl. `step` and `attempt` come first, in this order: a row is found by its first bytes."""

    step: int
    attempt: int
    outcome: Literal["landed", "skipped"]
    reason: str | None = None
    detail: str = ""
    time: float
    metrics: dict[str, float | int | None]


class Progress(msgspec.Struct, frozen=True):
    """`progress.json` of an evaluation under way: samples done, of how many."""

    done: int
    total: int


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """`drained.json`: bytes of metrics.jsonl that a drain has reported on."""

    format: Format = 1
    offset: int


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of a fleet.

    Attributes:
        engine_id: random, in the environment of every process of the engine as EVALKIT_ENGINE_ID; how they are found.
        url: `http://host:port`.
        process: the API server, leader of the engine's own session; None before it was started.
        gpus: device ids as in CUDA_VISIBLE_DEVICES; empty on the CPU.
        cores: CPU cores of an engine on the CPU, those of its first rank first.
        tmp: the engine's own directory for temporary files; goes with the engine.
    """

    index: int
    engine_id: str
    url: str
    process: ProcessId | None = None
    gpus: list[str] = []
    cores: list[int] = []
    tensor_parallel: int = 1
    argv: list[str] = []
    log: str
    tmp: str = ""


class FleetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`fleets/<name>.json`.

    Attributes:
        epoch: raised, on disk, before it is claimed at an engine; only ever rises.
        holder: token of the last taker of the fleet lock; one that no longer reads its own here has lost the fleet.
        holder_outcome: path of the outcome file whose existence ends the holder's right.
        model: absolute path of the boot model.
        served_model: the model name in requests to /v1.
        engine_args: arguments for vLLM that the user gave.
        cwd: directory in which those arguments are meant.
    """

    format: Format = 1
    name: str
    epoch: int = 0
    state: Literal["down", "starting", "up"] = "down"
    holder: str | None = None
    holder_outcome: str | None = None
    holder_process: ProcessId | None = None
    model: str = ""
    pinned: str | None = None
    pinned_export_id: str | None = None
    served_model: str = "policy"
    engine_args: list[str] = []
    cwd: str = "/"
    engines: list[EngineRecord] = []
    created_at: float = 0.0


class PinnedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine proved.

    Attributes:
        nonce: random, of this boot of the engine.
        ranks: how many ranks read the weights and agreed.
        vllm: version of vLLM.
    """

    index: int
    url: str
    nonce: str
    ranks: int
    vllm: str


class PinProof(msgspec.Struct, frozen=True, kw_only=True):
    """What a pin proved: every engine, every rank, holds the weights with this digest under this epoch."""

    epoch: int
    version: str
    digest: str
    served_model: str
    engines: list[PinnedEngine]


class MetricsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`metrics.json` of an evaluation's results.

    Attributes:
        suite: absolute path of the suite.
        proof: the pin that every sample was answered under.
        metrics: what a logger shows; a mean over nothing is null.
    """

    format: Format = 1
    suite: str
    proof: PinProof
    metrics: dict[str, float | int | None]
