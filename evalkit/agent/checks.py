"""Whether an engine can load a snapshot, decided from headers and config alone, before any weight is touched.

vLLM's own load takes a snapshot that lacks a tensor, or one of another architecture with like shapes, without an error,
and leaves old and new weights mixed. So a snapshot must have exactly the tensors that the engine was started with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalkit.ground.errors import DataError
from evalkit.ground.tensors import TensorHeader, read_headers

TORCH_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F16": "float16",
    "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip

# An engine computes in the dtype that it was started with and casts these on every load, the first included.
CAST = {"F16", "BF16", "F32"}

# Fields of config.json that change neither the weights' meaning nor their shapes. An engine keeps the end-of-sequence
# tokens that it was started with.
VOLATILE = {
    "_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id", "initializer_range",
}  # fmt: skip

COMPARE_CHUNK = 1 << 24  # bytes

ReadConfig = Callable[[Path], dict[str, Any]]


@dataclass(frozen=True)
class BootTensors:
    """The tensors of the directory that an engine was started from.

    Attributes:
        tensors: dtype and shape by name, from the safetensors headers.
        tied: whether the output head is the embedding; a copy of it in a file is then never read.
    """

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    tied: bool

    @classmethod
    def read(cls, directory: Path, *, tied: bool) -> BootTensors:
        """Raises DataError when the directory has no valid weights."""
        return cls({name: (h.dtype, h.shape) for name, h in _headers(directory).items()}, tied)

    def check(self, directory: Path) -> dict[str, TensorHeader]:
        """The headers of a snapshot that has exactly these tensors.

        Raises:
            DataError: a file is damaged, or a tensor is missing, unknown, or of another shape or dtype.
        """
        headers = _headers(directory)
        for name in sorted(self.tensors.keys() - headers.keys()):
            if not self.is_spare(name):
                raise DataError(f"{directory} lacks tensor {name}")
        for name, header in headers.items():
            if name in self.tensors:
                _check_like(directory, name, header, *self.tensors[name])
            elif not self.is_spare(name):
                raise DataError(f"{directory / header.file} has tensor {name}, which the engine's model does not have")
        return headers

    def is_spare(self, name: str) -> bool:
        """Whether the model reads the embedding instead of this tensor."""
        return self.tied and (name == "lm_head.weight" or name.endswith(".lm_head.weight"))


@dataclass(frozen=True)
class BootModel:
    """What an engine was started with, read at its start: the directory itself may be gone later.

    Attributes:
        config: config.json as the engine understands it.
        read_config: reads another directory's config the same way; raises DataError.
    """

    tensors: BootTensors
    config: dict[str, Any]
    read_config: ReadConfig

    def check(self, directory: Path) -> None:
        """Check a whole snapshot.

        Raises:
            DataError: the engine cannot load it; names the file, and the field or the tensor.
        """
        if not directory.is_dir():
            raise DataError(f"{directory} is not a directory")
        path = directory / "config.json"
        if not path.is_file():
            raise DataError(f"{path} is missing")
        difference = first_difference(self.read_config(directory), self.config)
        if difference:
            name, theirs, ours = difference
            raise DataError(f"{path}: {name} is {theirs!r}, but the engine was started with {ours!r}")
        headers = self.tensors.check(directory)
        for name in filter(self.tensors.is_spare, headers):
            check_tied(directory, name, headers)


def check_tied(directory: Path, head: str, headers: Mapping[str, TensorHeader]) -> None:
    """Raises DataError unless `head` holds the bytes of another tensor, which must then be the embedding.

    Transformers unties a model whose file has a head of its own; an engine that was started tied cannot.
    """
    mine = headers[head]
    like = [t for name, t in headers.items() if name != head and (t.dtype, t.shape) == (mine.dtype, mine.shape)]
    if not any(_same_bytes(directory, mine, other) for other in like):
        raise DataError(
            f"{directory / mine.file}: tensor {head} is not the embedding, to which config.json ties it",
            "leave it out, or set tie_word_embeddings to false and start the engines on such a model",
        )


def _same_bytes(directory: Path, one: TensorHeader, other: TensorHeader) -> bool:
    with (directory / one.file).open("rb") as left, (directory / other.file).open("rb") as right:
        left.seek(one.start)
        right.seek(other.start)
        remaining = one.end - one.start
        while remaining:
            size = min(remaining, COMPARE_CHUNK)
            content = left.read(size)
            if len(content) < size or content != right.read(size):
                return False
            remaining -= size
    return True


def _check_like(directory: Path, name: str, header: TensorHeader, dtype: str, shape: tuple[int, ...]) -> None:
    where = f"{directory / header.file}: tensor {name}"
    if header.shape != shape:
        raise DataError(f"{where} has shape {list(header.shape)}, but the engine's has {list(shape)}")
    if header.dtype != dtype and not {header.dtype, dtype} <= CAST:
        raise DataError(f"{where} has dtype {header.dtype}, but the engine's has {dtype}")


def _headers(directory: Path) -> dict[str, TensorHeader]:
    try:
        headers = read_headers(directory)
    except OSError as error:
        raise DataError(f"{error.filename or directory} cannot be read: {error.strerror}") from error
    for name, header in headers.items():
        if header.dtype not in TORCH_DTYPES:
            raise DataError(
                f"{directory / header.file}: tensor {name} has dtype {header.dtype}, which is not supported"
            )
    return headers


def first_difference(theirs: Any, ours: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The most telling field that differs and matters: (dotted name, its value there, its value here)."""
    if not (isinstance(theirs, Mapping) and isinstance(ours, Mapping)):
        return None if theirs == ours else (name, theirs, ours)

    def telling(key: str) -> tuple[bool, bool, str]:
        return key != "model_type", isinstance(ours.get(key), list | Mapping), key

    for key in sorted((theirs.keys() | ours.keys()) - VOLATILE, key=telling):
        inner = f"{name}.{key}" if name else key
        difference = first_difference(theirs.get(key), ours.get(key), inner)
        if difference:
            return difference
    return None
