"""Safetensors headers and the digest of a snapshot's weights, without torch: shared by the exporter, the checks
before a load, and the agent inside the engine.

The header layout is the safetensors format's: eight bytes little-endian length, then JSON naming each tensor's dtype,
shape and byte range behind the header.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from evalkit.ground.errors import DataError

INDEX_NAME = "model.safetensors.index.json"
OTHER_FORM = "consolidated"  # the same weights once more, under the names of the model's own library
HEADER_LIMIT = 100_000_000  # bytes; the safetensors format's own limit

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


# What JSON of an unexpected form can raise: infinite numbers overflow, deep nesting exhausts the stack.
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


class TensorHeader(NamedTuple):
    """One tensor of a safetensors file: where its bytes lie in the file, as absolute offsets."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int


def read_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file, in the order of their bytes.

    Raises:
        DataError: the file is cut, longer than its header says, or its header is not valid; names file and tensor.
    """
    if not path.is_file():  # a pipe would hold the reader for ever
        raise DataError(f"{path} is not a regular file")
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise DataError(f"{path} is not a safetensors file: it has only {size} bytes")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(size - 8, HEADER_LIMIT):
            raise DataError(f"{path} is cut or no safetensors file: its header claims {length} of {size} bytes")
        raw = file.read(length)
    try:
        entries = json.loads(raw)
        tensors = [
            _entry(path.name, name, value, 8 + length) for name, value in entries.items() if name != "__metadata__"
        ]
    except _MALFORMED as error:
        raise DataError(f"{path} has a damaged header: {type(error).__name__}: {error}") from error
    tensors.sort(key=lambda item: (item[1].start, item[1].end))
    _check_extent(path, size, 8 + length, tensors)
    return dict(tensors)


def _entry(file: str, name: str, value: Mapping[str, object], base: int) -> tuple[str, TensorHeader]:
    dtype = str(value["dtype"])
    shape = tuple(int(n) for n in value["shape"])  # type: ignore[attr-defined]
    start, end = (int(n) for n in value["data_offsets"])  # type: ignore[attr-defined]
    if dtype not in BITS:
        raise ValueError(f"tensor {name} has the unknown dtype {dtype}")
    if any(n < 0 for n in shape) or end - start != math.ceil(math.prod(shape) * BITS[dtype] / 8):
        raise ValueError(f"tensor {name}: {end - start} bytes do not fit {dtype} {list(shape)}")
    return name, TensorHeader(dtype, shape, file, base + start, base + end)


def _check_extent(path: Path, size: int, base: int, tensors: list[tuple[str, TensorHeader]]) -> None:
    position = base
    for name, tensor in tensors:
        if tensor.start != position:
            raise DataError(f"{path} has a hole or an overlap before tensor {name}")
        position = tensor.end
        if position > size:
            raise DataError(f"{path} is cut in tensor {name}: {size} of {position} bytes or more are there")
    if position != size:
        raise DataError(f"{path} is {size - position} bytes longer than its header says")


def shard_names(directory: Path) -> list[str]:
    """The weight files of a Hugging Face directory: those that its index names, else every `*.safetensors`.

    Raises:
        DataError: no weights, an index that is no index, a file named by the index that is missing or lies outside
            the directory, or a shard that the index does not name.
    """
    present = sorted(p.name for p in directory.glob("*.safetensors") if not p.name.startswith(OTHER_FORM))
    index = directory / INDEX_NAME
    if not index.exists():
        if not present:
            raise DataError(f"{directory} has no *.safetensors file")
        return present
    named = sorted(set(read_index(directory).values()))
    for name in named:
        if os.path.basename(name) != name:
            raise DataError(f"{index} names a file outside its directory: {name!r}")
        if name not in present:
            raise DataError(f"{index} names {name}, which is not there")
    stray = [name for name in present if name not in named]
    if stray:
        raise DataError(
            f"{directory} has {stray[0]}, which {INDEX_NAME} does not name", "remove shards of older exports"
        )
    return named


def read_index(directory: Path) -> dict[str, str]:
    """The index's map from tensor name to file name.

    Raises:
        DataError: it is not valid.
    """
    path = directory / INDEX_NAME
    if not path.is_file():
        raise DataError(f"{path} is no regular file")
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise TypeError("weight_map is not a mapping of names to file names")
    except _MALFORMED as error:
        raise DataError(f"{path} is not a valid index: {type(error).__name__}: {error}") from error
    return weight_map


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """Every tensor of a Hugging Face directory, with index, headers and file sizes checked against each other.

    Raises:
        DataError: they disagree, a tensor stands in two files, or there is none at all.
    """
    tensors: dict[str, TensorHeader] = {}
    for name in shard_names(directory):
        for tensor, header in read_header(directory / name).items():
            if tensor in tensors:
                raise DataError(f"{directory}: tensor {tensor} stands in {tensors[tensor].file} and in {name}")
            tensors[tensor] = header
    if not tensors:
        raise DataError(f"{directory} has weight files without any tensor")
    if (directory / INDEX_NAME).exists():
        _check_index(directory, tensors)
    return tensors


def _check_index(directory: Path, tensors: Mapping[str, TensorHeader]) -> None:
    weight_map = read_index(directory)
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file != file:
            raise DataError(f"{directory / INDEX_NAME} places tensor {name} in {file}, which does not hold it")
    for name in tensors:
        if name not in weight_map:
            raise DataError(f"{directory / INDEX_NAME} does not name tensor {name} of {tensors[name].file}")


def digest_of(tensors: Mapping[str, tuple[str, tuple[int, ...], str]]) -> str:
    """The digest: blake3 over one JSON line a tensor, `[name, dtype, shape, blake3 of its bytes]`, sorted by name.

    It depends on names, dtypes, shapes and bytes alone, not on files or order.
    """
    import blake3

    whole = blake3.blake3()
    for name in sorted(tensors):
        dtype, shape, content = tensors[name]
        whole.update(json.dumps([name, dtype, list(shape), content], separators=(",", ":")).encode() + b"\n")
    return whole.hexdigest()


def encode_header(entries: Mapping[str, tuple[str, tuple[int, ...], int]]) -> bytes:
    """The head of a safetensors file that holds these tensors in this order, without gaps.

    Args:
        entries: by name: dtype as in `BITS`, shape, length in bytes.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape, length) in entries.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + length]}
        position += length
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def encode_index(files: Mapping[str, str], total_bytes: int) -> bytes:
    """An index that maps each tensor's name to its file."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
    return json.dumps(index, indent=2).encode() + b"\n"
