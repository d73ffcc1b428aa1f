"""`evalkit export`: weights of any usual form become a snapshot, whole or not at all."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from msgspec.structs import asdict, replace

from evalkit.adapters.architectures import check_architecture
from evalkit.adapters.copying import CopyMode
from evalkit.adapters.sidecars import Sidecars, find_base, gather_sidecars
from evalkit.adapters.sources import Source, find_source
from evalkit.adapters.weight_files import FileWeights
from evalkit.decisions.shards import Outline, Written, byte_size, check_outline, is_cast, tied_head
from evalkit.ground.errors import UsageError
from evalkit.ground.layout import RunPaths
from evalkit.ground.result import Result
from evalkit.ground.tensors import digest_of
from evalkit.state.incarnations import known_incarnations
from evalkit.state.run import remember, snapshot_dir_of
from evalkit.verbs.snapshot_making import (
    Destination,
    ExportResult,
    claim,
    find_unchanged,
    make_snapshot,
    storage_errors,
)
from evalkit.verbs.snapshot_users import used_by_attempt

__all__ = ["ExportRequest", "ExportResult", "export_source", "export_verb", "source_digest"]


class ExportRequest(Destination, frozen=True, kw_only=True):
    """One export of a source on disk.

    Attributes:
        base: a directory or a Hub id in the local cache, for the files that the source lacks.
        copy: how whole weight files get to the snapshot.
        dtype: cast float tensors to it; None leaves them.
        shard_size: the most bytes of a weight file; None leaves the source's files as they are.
    """

    source: Path
    base: str | None = None
    copy: CopyMode = "auto"
    dtype: str | None = None
    shard_size: int | None = None


class Weights(Protocol):
    """Tensors on their way into a snapshot."""

    @property
    def outline(self) -> Outline: ...

    def write(self, directory: Path | None) -> Written: ...


def export_source(request: ExportRequest) -> ExportResult:
    """Make `step_<N>` in SNAPSHOT_DIR of the source's weights.

    Raises:
        NoSnapshotError: the source or the base is not there.
        DataError: the source is damaged or incomplete, or the step is there with other content.
        BusyError: the snapshot to replace is in use.
        StorageError: no room, or reading or writing failed.
        UsageError: SNAPSHOT_DIR is another run's, or `copy` asks for what cannot be done.
    """
    began = time.monotonic()
    with storage_errors(request.snapshot_dir):
        source, sidecars, weights = _read(request)
        claim(request)
        there = find_unchanged(request, sidecars, lambda: digest_of(weights.write(None).tensors))
        if there is not None:
            total = sum(byte_size(*info) for info in weights.outline.values())
            result = ExportResult(there.path, there.export_id, there.digest, total, 0.0, True, sidecars.missing)
        else:
            check_outline(weights.outline, str(source.path))
            unchecked = check_architecture(request.snapshot_dir, sidecars.config, weights.outline, str(source.path))
            origin = {"kind": source.kind, "path": str(source.path), "base": request.base, "dtype": request.dtype}
            result = replace(make_snapshot(request, sidecars, origin, weights.write), unchecked=unchecked)
    return replace(result, seconds=time.monotonic() - began)


def source_digest(request: ExportRequest) -> str:
    """The digest that the snapshot would have, without writing anything; raises as `export_source`."""
    with storage_errors(request.snapshot_dir):
        return digest_of(_read(request)[2].write(None).tensors)


def _read(request: ExportRequest) -> tuple[Source, Sidecars, Weights]:
    source = find_source(request.source)
    base = find_base(request.base) if request.base is not None else None
    sidecars = gather_sidecars(source.directory, base, request.dtype, str(source.path))
    if source.kind == "safetensors":
        headers = source.headers()
        if not is_cast(headers, request.dtype):
            head = tied_head(sidecars.config, headers)
            weights: Weights = FileWeights(source, copy=request.copy, shard_size=request.shard_size, head=head)
            return source, sidecars, weights
    if request.copy in ("hardlink", "reflink"):
        raise UsageError(
            f"--copy {request.copy} shares whole safetensors files, but {source.path} has to be converted",
            "use --copy auto",
            "export_failed",
        )
    from evalkit.adapters.weight_tensors import TensorWeights

    weights = TensorWeights(source, dtype=request.dtype, shard_size=request.shard_size, config=sidecars.config)
    return source, sidecars, weights


def export_verb(
    run_dir: Path, snapshot_dir: Path | None, *, source: Path, step: int, force: bool, **options: object
) -> tuple[Result, ExportResult]:
    """`evalkit export`: the run's next snapshot, by hand; its answer and what a person should be told."""
    record = remember(run_dir, snapshot_dir=snapshot_dir)
    staged = snapshot_dir_of(record, snapshot_dir)
    if staged is None:
        raise UsageError("SNAPSHOT_DIR is not known", "give --eval-hf-dir or set EVALKIT_EVAL_HF_DIR")
    run = RunPaths(run_dir.absolute())
    result = export_source(
        ExportRequest(
            source=source,
            step=step,
            snapshot_dir=staged,
            force=force,
            run_id=record.run_id,
            run_dir=run.root,
            incarnation=len(known_incarnations(run)),
            in_use=lambda snapshot: used_by_attempt(run, snapshot),
            **options,  # type: ignore[arg-type]
        )
    )
    data = {**asdict(result), "path": str(result.path), "step": step}
    return Result(data, [str(result.path)]), result
