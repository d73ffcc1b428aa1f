"""`evalkit.export_snapshot`: a trainer in Python hands its tensors over."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from evalkit.adapters.architectures import check_architecture
from evalkit.adapters.ranks import Ranks, join_ranks
from evalkit.adapters.shard_writer import ShardWriter, header_dtype
from evalkit.adapters.sidecars import Sidecars, find_base, gather_sidecars
from evalkit.adapters.space import require_room
from evalkit.decisions.architectures import known_shapes
from evalkit.decisions.shards import DTYPE_NAMES, Written, byte_size, cast_to, parse_size
from evalkit.ground.errors import ExportError, UsageError
from evalkit.ground.layout import RunPaths
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

if TYPE_CHECKING:
    from torch import Tensor

    Pair = tuple[str, Tensor]
    Chunk = Pair | Mapping[str, Tensor] | Iterable[Pair]

SOURCE = "the trainer's tensors"


def export_snapshot(
    tensors: Mapping[str, Tensor] | Iterable[Chunk],
    *,
    step: int,
    base: str | Path,
    snapshot_dir: str | Path | None = None,
    run_dir: str | Path | None = None,
    dtype: str | None = None,
    shard_size: int | str | None = None,
    force: bool = False,
) -> ExportResult:
    """Make the snapshot of a step from tensors in memory, as they come.

    With torch.distributed initialised every rank calls this. Rank 0 writes what its own `tensors` yield; the others
    only run theirs through, in step with it, since gathering a tensor is usually a collective. A failure on any rank is
    raised on all of them. At most two shards are in memory.

    Args:
        tensors: by name as in the model's files; or an iterable of (name, tensor), of lists of such pairs, or of
            mappings. Sharded DTensors are gathered. Tensors of an iterable may be reused once the next is asked for.
        base: model directory, or Hub id in the local cache, for config, tokenizer, chat template, generation config.
        snapshot_dir: SNAPSHOT_DIR; by default the run's.
        run_dir: the run that the snapshot is for; it then owns SNAPSHOT_DIR.
        dtype: cast float tensors to `bfloat16`, `float16` or `float32`.
        shard_size: the most bytes of a weight file, as a number or like `5GB`, which is the default.
        force: replace a snapshot of other content, unless it is in use.

    Returns the snapshot, the same on every rank.

    Raises:
        EvalkitError: the export failed; nothing of it is left.
    """
    began = time.monotonic()
    with join_ranks() as ranks:

        def make() -> ExportResult | None:
            if ranks.is_writer:
                to = _destination(step, snapshot_dir, run_dir, force)
                size = parse_size(shard_size) if isinstance(shard_size, str) else shard_size
                with storage_errors(to.snapshot_dir):
                    return _export(ranks, tensors, to, str(base), dtype, size)
            for chunk in ranks.together(_chunks(tensors)):
                for _ in _gathered(chunk):
                    pass
            return None

        result = ranks.share(make)
    if result is None:
        raise RuntimeError("no rank was the writer")
    if ranks.is_writer and result.missing:
        logging.getLogger("evalkit").warning("%s has no %s", result.path, ", ".join(result.missing))
    return replace(result, seconds=time.monotonic() - began)


def _export(
    ranks: Ranks,
    tensors: Mapping[str, Tensor] | Iterable[Chunk],
    to: Destination,
    base: str,
    dtype: str | None,
    shard_size: int | None,
) -> ExportResult:
    claim(to)
    sidecars = gather_sidecars(None, find_base(base), dtype, SOURCE)
    unchecked = ""

    def write(directory: Path | None) -> Written:
        nonlocal unchecked
        if directory is not None:
            require_room(directory, _expected_bytes(tensors, sidecars.config, dtype))
        with ShardWriter(
            directory, dtype=dtype, shard_size=shard_size, config=sidecars.config, source=SOURCE
        ) as writer:
            for chunk in ranks.together(_chunks(tensors)):
                for name, tensor in _gathered(chunk):
                    writer.add(name, tensor, own=isinstance(tensors, Mapping))
            written = writer.finish()
        outline = {name: (kind, shape) for name, (kind, shape, _) in written.tensors.items()}
        unchecked = check_architecture(to.snapshot_dir, sidecars.config, outline, SOURCE)
        return written

    if not to.force and os.path.lexists(to.path):
        return _compare(to, sidecars, write)
    result = make_snapshot(to, sidecars, {"kind": "tensors", "base": base, "dtype": dtype}, write)
    return replace(result, unchecked=unchecked)


def _compare(to: Destination, sidecars: Sidecars, write: Callable[[None], Written]) -> ExportResult:
    """The step is there: the tensors, which come only once, are hashed and not written."""
    total = 0

    def digest() -> str:
        nonlocal total
        written = write(None)
        total = sum(byte_size(kind, shape) for kind, shape, _ in written.tensors.values())
        return digest_of(written.tensors)

    there = find_unchanged(to, sidecars, digest)
    if there is None:
        raise ExportError(f"{to.path} was taken away while it was compared", "export again")
    return ExportResult(there.path, there.export_id, there.digest, total, 0.0, True, sidecars.missing)


def _expected_bytes(
    tensors: Mapping[str, Tensor] | Iterable[Chunk], config: Mapping[str, Any], dtype: str | None
) -> int:
    """What the weights will take; 0 when nothing tells, and each shard is then checked on its own."""
    if isinstance(tensors, Mapping):
        return sum(
            byte_size(cast_to(header_dtype(name, tensor), dtype), tuple(tensor.shape))
            for name, tensor in tensors.items()
        )
    kind = DTYPE_NAMES.get(str(dtype or config.get("dtype") or config.get("torch_dtype")))
    shapes = known_shapes(config) if kind else None
    return sum(byte_size(str(kind), shape) for shape in (shapes or {}).values())


def _chunks(tensors: Mapping[str, Tensor] | Iterable[Chunk]) -> Iterable[Chunk]:
    return tensors.items() if isinstance(tensors, Mapping) else tensors


def _gathered(chunk: Chunk) -> Iterator[Pair]:
    """The tensors of one chunk, whole: gathering a sharded one is a collective."""
    if isinstance(chunk, Mapping):
        pairs: Iterable[Pair] = chunk.items()
    elif isinstance(chunk, tuple) and len(chunk) == 2 and isinstance(chunk[0], str):
        pairs = [chunk]
    else:
        pairs = cast("Iterable[Pair]", chunk)
    for name, tensor in pairs:
        yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _destination(step: int, snapshot_dir: str | Path | None, run_dir: str | Path | None, force: bool) -> Destination:
    given = Path(snapshot_dir) if snapshot_dir is not None else None
    if run_dir is None:
        if given is None:
            raise UsageError("export_snapshot needs snapshot_dir, or run_dir of a run that knows one")
        return Destination(step=step, snapshot_dir=given, force=force)
    run = RunPaths(Path(run_dir).absolute())
    record = remember(run.root, snapshot_dir=given)
    staged = snapshot_dir_of(record, given)
    if staged is None:
        raise UsageError(f"{run.root} knows no SNAPSHOT_DIR", "give snapshot_dir")
    return Destination(
        step=step,
        snapshot_dir=staged,
        force=force,
        run_id=record.run_id,
        run_dir=run.root,
        incarnation=len(known_incarnations(run)),
        in_use=lambda snapshot: used_by_attempt(run, snapshot),
    )
