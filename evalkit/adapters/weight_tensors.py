"""Weights that have to become torch tensors on their way: torch state dicts, and any cast to another dtype."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.adapters.shard_writer import DTYPES, ShardWriter, header_dtype, import_torch
from evalkit.adapters.sources import Source, Unchanged
from evalkit.adapters.space import require_room
from evalkit.decisions.shards import Outline, Written, byte_size, cast_to, drop_head
from evalkit.ground.errors import DataError
from evalkit.ground.tensors import TensorHeader

if TYPE_CHECKING:
    from torch import Tensor


class TensorWeights:
    """The tensors of a source, read one by one, cast, and written into new shards.

    Args:
        dtype: cast float tensors to it; None leaves them.
        shard_size: bytes.
        config: config.json's content, which says whether the head is tied.
    """

    def __init__(self, source: Source, *, dtype: str | None, shard_size: int | None, config: Mapping[str, Any]) -> None:
        import_torch()
        self.source = source
        self.dtype = dtype
        self.shard_size = shard_size
        self.config = config
        self.headers = source.headers() if source.kind == "safetensors" else {}
        self.states = [load_state_dict(path) for path in source.files]
        self.unchanged = Unchanged([*source.files, *(source.file(h.file) for h in self.headers.values())])

    @property
    def outline(self) -> Outline:
        whole = {name: (h.dtype, h.shape) for name, h in self.headers.items()}
        for path, state in zip(self.source.files, self.states, strict=True):
            for name, tensor in state.items():
                if name in whole:
                    raise DataError(f"{self.source.path}: tensor {name} stands in {path.name} and in a file before it")
                whole[name] = (header_dtype(name, tensor), tuple(tensor.shape))
        cast = {name: (cast_to(dtype, self.dtype), shape) for name, (dtype, shape) in whole.items()}
        return drop_head(self.config, cast)

    def write(self, directory: Path | None) -> Written:
        """As `FileWeights.write`."""
        if directory is not None:
            require_room(directory, sum(byte_size(*info) for info in self.outline.values()))
        with ShardWriter(
            directory, dtype=self.dtype, shard_size=self.shard_size, config=self.config, source=str(self.source.path)
        ) as writer:
            for name, tensor in self._tensors():
                writer.add(name, tensor)
            written = writer.finish()
        self.unchanged.check()
        return written

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, header in self.headers.items():
            yield name, _read_tensor(self.source.file(header.file), name, header)
        for state in self.states:
            yield from state.items()


def _read_tensor(path: Path, name: str, header: TensorHeader) -> Tensor:
    torch = import_torch()
    raw = bytearray(header.end - header.start)
    with path.open("rb") as file:
        file.seek(header.start)
        if file.readinto(raw) != len(raw):
            raise DataError(f"{path} is cut in tensor {name}: it became shorter while it was read")
    dtype = getattr(torch, DTYPES[header.dtype])
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    tensor: Tensor = flat.reshape(header.shape)
    return tensor


def load_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a torch file, mapped into memory where its format allows.

    Raises:
        DataError: it is damaged, or holds anything but tensors by name.
    """
    torch = import_torch()
    os.stat(path)  # torch's own message for a missing file names none
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))  # torch's text is a page about how to load it all the same
        what = found[1] if found else "something else"
        raise DataError(f"{path} holds other objects than tensors: {what}", "save model.state_dict() alone") from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(f"{path} is cut or no torch file: {why}") from error
    if not isinstance(state, dict):
        raise DataError(f"{path} holds a {type(state).__name__}, not a state dict", "save model.state_dict() alone")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise DataError(
                f"{path} holds a {type(value).__name__} under {name!r}, not only tensors",
                "save model.state_dict() alone",
            )
    return dict(state)
