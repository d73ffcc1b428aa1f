"""Torch tensors into safetensors files: cast, gathered to a shard, written and hashed while the next one gathers."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from evalkit.adapters.copying import create_file, fsync_file
from evalkit.adapters.space import require_room
from evalkit.decisions.shards import TensorInfo, Written, aligned, cast_to, check_doubled_head, shard_file, tied_head
from evalkit.ground.errors import DataError, UsageError
from evalkit.ground.tensors import encode_header
from evalkit.ground.transfer import Span, transfer

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_SHARD = 5 * 10**9  # bytes
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64",
}  # fmt: skip
_BY_TORCH = {f"torch.{name}": dtype for dtype, name in DTYPES.items()}


class _Content(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class ShardWriter:
    """Writes tensors in the order in which they come, holding at most two shards: one gathers, one is written.

    Use as a context manager: leaving it ends the writing thread, so that nothing is written any more.

    Args:
        directory: where the files go; None hashes only.
        dtype: cast float tensors to it; None leaves them.
        shard_size: bytes; a larger tensor has a shard of its own.
        config: config.json's content, which says whether the head is tied.
        source: how messages call where the tensors come from.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        dtype: str | None,
        shard_size: int | None,
        config: Mapping[str, Any],
        source: str,
    ) -> None:
        self._directory = directory
        self._dtype = dtype
        self._limit = shard_size or DEFAULT_SHARD
        self._config = config
        self._source = source
        self._gathered: dict[str, _Content] = {}
        self._room = self._limit
        self._shards: list[list[str]] = []
        self._tensors: dict[str, TensorInfo] = {}
        self._names: set[str] = set()
        self._head: tuple[str, TensorInfo] | None = None
        self._cancelled = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._writing: Future[dict[str, TensorInfo]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cancelled.set()
        self._pool.shutdown(wait=True)

    def add(self, name: str, tensor: Tensor, *, own: bool = True) -> None:
        """Take one tensor.

        Args:
            own: the caller will not change its memory before `finish`; otherwise it is copied.

        Raises:
            DataError: its name came before, it is empty, or not a plain tensor.
            StorageError, OSError: an earlier shard could not be written.
        """
        self.check()
        if name in self._names:
            raise DataError(f"{self._source}: tensor {name} comes twice")
        self._names.add(name)
        content = _content(name, tensor, self._dtype, own)
        if 0 in content.shape and content.dtype.startswith(("F", "BF")):
            raise DataError(f"{self._source}: tensor {name} is empty", "gather it before exporting")
        if tied_head(self._config, [name]) is not None:
            # A tied head is not written: it is compared with the embedding, whichever of them comes first.
            self._head = name, _hash({name: content}, self._cancelled)[name]
            return
        if len(content.data) > self._room:
            self._flush()
        self._gathered[name] = content
        self._room -= len(content.data)

    def check(self) -> None:
        """Raises what the writing thread met, if it met anything."""
        if self._writing is not None and self._writing.done():
            self._collect()

    def finish(self) -> Written:
        """Write what is gathered, and give the files their names."""
        self._flush()
        self._collect()
        if self._head is not None:
            check_doubled_head(*self._head, self._tensors, self._source)
        if not self._tensors:
            raise DataError(f"{self._source} holds no tensor")
        files = {}
        for index, names in enumerate(self._shards):
            file = shard_file(index, len(self._shards))
            if self._directory is not None:
                os.rename(self._directory / _unnamed(index), self._directory / file)
            files.update(dict.fromkeys(names, file))
        return Written(self._tensors, files)

    def _flush(self) -> None:
        self._collect()
        self._room = self._limit
        if not self._gathered:
            return
        batch, self._gathered = self._gathered, {}
        self._shards.append(list(batch))
        self._writing = self._pool.submit(self._write, batch, len(self._shards) - 1)

    def _collect(self) -> None:
        """Wait for the shard that is being written."""
        if self._writing is not None:
            self._tensors |= self._writing.result()
            self._writing = None

    def _write(self, batch: dict[str, _Content], index: int) -> dict[str, TensorInfo]:
        if self._directory is None:
            return _hash(batch, self._cancelled)
        path = self._directory / _unnamed(index)
        batch = {name: batch[name] for name in aligned(batch, batch)}
        head = encode_header({name: (c.dtype, c.shape, len(c.data)) for name, c in batch.items()})
        require_room(self._directory, len(head) + sum(len(c.data) for c in batch.values()))
        create_file(path, head)
        infos = _hash(batch, self._cancelled, path, len(head))
        fsync_file(path)
        return infos


def _unnamed(index: int) -> str:
    """A shard's file until it is known how many there are."""
    return f".shard-{index}"


def _hash(
    batch: Mapping[str, _Content], cancelled: threading.Event, target: Path | None = None, position: int = 0
) -> dict[str, TensorInfo]:
    spans = []
    for name, content in batch.items():
        spans.append(Span(name, content.data, 0, len(content.data), target, position))
        position += len(content.data)
    hashes = transfer(spans, cancelled)
    return {name: (c.dtype, c.shape, hashes[name]) for name, c in batch.items()}


def _content(name: str, tensor: Tensor, dtype: str | None, own: bool) -> _Content:
    torch = import_torch()
    kept = cast_to(header_dtype(name, tensor), dtype)
    plain = tensor.detach().to(device="cpu", dtype=getattr(torch, DTYPES[kept])).contiguous()
    if not own and plain.data_ptr() == tensor.data_ptr():
        plain = plain.clone()
    return _Content(kept, tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy().data)


def header_dtype(name: str, tensor: Tensor) -> str:
    """The tensor's dtype as safetensors names it.

    Raises:
        DataError: it is no dense tensor with values, or of a dtype that the format has not.
    """
    torch = import_torch()
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise DataError(f"tensor {name} is not a dense tensor with values ({tensor.layout}, on {tensor.device})")
    try:
        return _BY_TORCH[str(tensor.dtype)]
    except KeyError:
        raise DataError(f"tensor {name} has the dtype {tensor.dtype}, which safetensors files cannot hold") from None


def import_torch() -> Any:
    """The module torch.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import torch
    except ImportError:
        raise UsageError(
            "torch is needed to read state dicts and to cast, and is not installed", "pip install 'evalkit[torch]'"
        ) from None
    return torch
