"""Which tensor goes into which file of a snapshot, and what a tied head is."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from evalkit.ground.errors import DataError, UsageError
from evalkit.ground.tensors import BITS, TensorHeader

TensorInfo = tuple[str, tuple[int, ...], str]
"""Dtype as in the safetensors header, shape, blake3 of the bytes."""

Outline = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape by name: what is known of tensors before they are read."""


class Written(NamedTuple):
    """What each tensor of an export is, and the file that holds it."""

    tensors: dict[str, TensorInfo]
    files: dict[str, str]


HEAD = "lm_head.weight"

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}

DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # as config.json and --dtype call them


class Shard(NamedTuple):
    """One file of a snapshot.

    Attributes:
        file: its name.
        tensors: what it holds, in order.
        copy_of: the source's file with just this content, if there is one.
    """

    file: str
    tensors: list[str]
    copy_of: str | None = None


def parse_size(text: str) -> int:
    """Bytes from `5GB`, `200MB`, `1GiB` or a number.

    Raises:
        UsageError: it is no size, or less than one byte.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)", text.strip())
    size = int(float(match[1]) * _UNITS.get(match[2].upper(), 0)) if match else 0
    if size < 1:
        raise UsageError(f"{text!r} is no size", "write 5GB, 200MB or 1GiB")
    return size


def shard_file(index: int, count: int) -> str:
    """The name of shard `index` (from 0) of `count`."""
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def byte_size(dtype: str, shape: tuple[int, ...]) -> int:
    return math.ceil(math.prod(shape) * BITS[dtype] / 8)


def plan_shards(headers: Mapping[str, TensorHeader], limit: int | None, without: str | None) -> list[Shard]:
    """The files of a snapshot of these tensors: the source's own, unless one is larger than `limit` bytes.

    Args:
        without: a tensor that is left out.
    """
    files: dict[str, list[str]] = {}
    for name, header in sorted(headers.items(), key=lambda item: (item[1].file, item[1].start)):
        files.setdefault(header.file, []).append(name)
    sizes = {name: header.end - header.start for name, header in headers.items()}
    if limit is not None and any(sum(sizes[name] for name in names) > limit for names in files.values()):
        kept = ((name, sizes[name]) for names in files.values() for name in names if name != without)
        groups = [(None, aligned(group, headers)) for group in split_by_size(kept, limit)]
        return [Shard(shard_file(i, len(groups)), group, whole) for i, (whole, group) in enumerate(groups)]
    parts = [
        (None if without in names else file, [name for name in names if name != without])
        for file, names in files.items()
    ]
    parts = [(file, names) for file, names in parts if names]
    return [Shard(shard_file(i, len(parts)), names, file) for i, (file, names) in enumerate(parts)]


def split_by_size(sizes: Iterable[tuple[str, int]], limit: int) -> list[list[str]]:
    """Names in groups of at most `limit` bytes, in order; a larger tensor has a group of its own."""
    groups: list[list[str]] = []
    room = -1
    for name, size in sizes:
        if size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    return groups


def aligned(names: Iterable[str], headers: Mapping[str, Any]) -> list[str]:
    """Wide dtypes first, so that every tensor of a file starts at a multiple of its item's size."""
    return sorted(names, key=lambda name: -BITS[headers[name][0]])


def tied_head(config: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The output head among `names` that config.json calls tied to the embedding; None if there is none."""
    text = config.get("text_config")
    tied = [c.get("tie_word_embeddings") for c in (config, text) if isinstance(c, Mapping)]
    if True not in tied:
        return None
    return next((name for name in names if name == HEAD or name.endswith("." + HEAD)), None)


def check_doubled_head(head: str, copy: TensorInfo, tensors: Mapping[str, TensorInfo], source: str) -> None:
    """A head that is tied may only be a second copy of the embedding, which then stands for both.

    Raises:
        DataError: it differs from the embedding, or stands there alone.
    """
    if copy in tensors.values():
        return
    twins = [name for name, (_, shape, _) in tensors.items() if shape == copy[1]]
    if not twins:
        raise DataError(f"{source}: config.json ties {head} to the embedding, which is not there")
    raise DataError(
        f"{source}: config.json ties {head} to the embedding, but its values differ from those of {twins[0]}",
        "set tie_word_embeddings to false, or export the tied tensor once",
    )


def check_outline(outline: Outline, source: str) -> None:
    """Raises DataError when there is no tensor, or a weight without a single value."""
    if not outline:
        raise DataError(f"{source} holds no tensor")
    for name, (dtype, shape) in outline.items():
        # Quantised formats do have empty integer tensors; an empty weight is a shard that was not gathered.
        if 0 in shape and dtype.startswith(("F", "BF")):
            raise DataError(f"{source}: tensor {name} is empty, its shape is {list(shape)}", "gather it before saving")


def is_cast(headers: Mapping[str, TensorHeader], dtype: str | None) -> bool:
    """Whether casting float tensors to `dtype` changes any."""
    return any(cast_to(h.dtype, dtype) != h.dtype for h in headers.values())


def cast_to(dtype: str, wanted: str | None) -> str:
    """The dtype of a tensor after the cast; eight-bit floats are quantised and stay, as integers do."""
    return DTYPE_NAMES.get(wanted or "", dtype) if dtype in ("F16", "BF16", "F32", "F64") else dtype


def drop_head(config: Mapping[str, Any], outline: Outline) -> Outline:
    """The outline without a tied head."""
    head = tied_head(config, outline)
    return {name: info for name, info in outline.items() if name != head}
