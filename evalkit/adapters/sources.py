"""What an export starts from: which files hold the weights, and where the files beside them lie."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from evalkit.ground.errors import DataError, NoSnapshotError
from evalkit.ground.tensors import TensorHeader, read_header, read_headers

TORCH_SUFFIXES = (".pt", ".bin", ".pth")
TORCH_INDEX = "pytorch_model.bin.index.json"
FORMS = "give a Hugging Face directory, *.safetensors files, or a torch state dict (.pt, .bin)"


class Source(msgspec.Struct, frozen=True):
    """Weights, found but not read yet.

    Attributes:
        path: as it was given, absolute.
        directory: where files such as config.json are looked for; None for a bare weight file.
        files: the torch files; empty for safetensors.
    """

    path: Path
    kind: Literal["safetensors", "torch"]
    directory: Path | None = None
    files: tuple[Path, ...] = ()

    def file(self, name: str) -> Path:
        """The path of a weight file that a header names."""
        return self.path / name if self.directory else self.path

    def headers(self) -> dict[str, TensorHeader]:
        """Every tensor of a safetensors source.

        Raises:
            DataError: headers, sizes and index disagree, or there is no tensor.
        """
        headers = read_headers(self.path) if self.directory else read_header(self.path)
        if not headers:
            raise DataError(f"{self.path} holds no tensor")
        return headers


def find_source(path: Path) -> Source:
    """Which form of weights `path` is.

    Raises:
        NoSnapshotError: it is not there.
        DataError: it is no form that is known.
    """
    path = path.absolute()
    if path.is_dir():
        return _find_in(path)
    if not path.exists():
        raise NoSnapshotError(f"there is no {path}")
    if path.is_file() and path.suffix == ".safetensors":
        return Source(path, "safetensors")
    if path.is_file() and path.suffix in TORCH_SUFFIXES:
        return Source(path, "torch", None, (path,))
    raise DataError(f"{path} is no form of weights that is known", FORMS)


def _find_in(path: Path) -> Source:
    if (path / "adapter_config.json").exists():
        raise DataError(f"{path} is an adapter, not a whole model", "merge it into its base model first")
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists():
        return Source(path, "safetensors", path)
    if (path / TORCH_INDEX).exists():
        return Source(path, "torch", path, _indexed(path))
    if (path / "pytorch_model.bin").is_file():
        return Source(path, "torch", path, (path / "pytorch_model.bin",))
    raise DataError(f"{path} holds no weights in a form that is known", FORMS)


def _indexed(path: Path) -> tuple[Path, ...]:
    index = path / TORCH_INDEX
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        files = [path / name for name in names if Path(name).name == name]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{index} is not a valid index: {error}") from error
    if len(files) != len(names):
        raise DataError(f"{index} names a file outside its directory")
    for file in files:
        if not file.is_file():
            raise DataError(f"{index} names {file.name}, which is not there")
    stray = [p.name for p in sorted(path.glob("pytorch_model-*.bin")) if p not in files]
    if stray:
        raise DataError(f"{path} has {stray[0]}, which {TORCH_INDEX} does not name", "remove shards of older exports")
    return tuple(files)


class Unchanged:
    """Files as they were, so that one which is rewritten while it is read does not become half a snapshot."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._stamps = {path: _stamp(path) for path in files}

    def check(self) -> None:
        """Raises DataError when one of them is no longer what it was."""
        for path, stamp in self._stamps.items():
            if _stamp(path) != stamp:
                raise DataError(f"{path} changed while it was exported", "export when its writer is done")


def _stamp(path: Path) -> tuple[int, int, int]:
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns, stat.st_ino
