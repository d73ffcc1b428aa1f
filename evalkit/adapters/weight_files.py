"""Weights that lie in safetensors files already: whole files are shared or copied, hashed on the way, without torch."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from evalkit.adapters.copying import CopyMode, create_file, fsync_file, link_file
from evalkit.adapters.sources import Source, Unchanged
from evalkit.adapters.space import require_room
from evalkit.decisions.shards import Outline, Shard, Written, check_doubled_head, plan_shards
from evalkit.ground.tensors import encode_header
from evalkit.ground.transfer import Span, transfer


class FileWeights:
    """The tensors of a safetensors source, to be written into a snapshot or only hashed.

    Args:
        head: a tied head, which is left out after it was compared with the embedding.
    """

    def __init__(self, source: Source, *, copy: CopyMode, shard_size: int | None, head: str | None) -> None:
        self.source = source
        self.copy = copy
        self.head = head
        self.headers = source.headers()
        self.unchanged = Unchanged(source.file(name) for name in {h.file for h in self.headers.values()})
        self.shards = plan_shards(self.headers, shard_size, head)

    @property
    def outline(self) -> Outline:
        return {name: (h.dtype, h.shape) for name, h in self.headers.items() if name != self.head}

    def write(self, directory: Path | None) -> Written:
        """Write the shards into `directory`, if there is one, and hash them.

        Raises:
            DataError: the source changed meanwhile, or its tied head is not the embedding.
            StorageError: they don't fit.
            OSError: reading or writing failed.
        """
        spans = [self._span(name) for name in self.headers] if directory is None else self._place(directory)
        if self.head is not None and directory is not None:
            spans.append(self._span(self.head))
        hashes = transfer(spans)
        self.unchanged.check()
        if directory is not None:
            for shard in self.shards:
                fsync_file(directory / shard.file)
        tensors = {name: (h.dtype, h.shape, hashes[name]) for name, h in self.headers.items()}
        if self.head is not None:
            check_doubled_head(self.head, tensors.pop(self.head), tensors, str(self.source.path))
        return Written(tensors, {name: shard.file for shard in self.shards for name in shard.tensors})

    def _place(self, directory: Path) -> list[Span]:
        """Share what can be shared, make room for the rest; what is to be hashed or copied."""
        linked = {s.file for s in self.shards if s.copy_of and self._link(s.copy_of, directory / s.file)}
        to_copy = [shard for shard in self.shards if shard.file not in linked]
        heads = {shard.file: self._head(shard) for shard in to_copy}
        require_room(directory, sum(self._length(name) for s in to_copy for name in s.tensors))
        for file, head in heads.items():
            create_file(directory / file, head)
        return [
            Span(name, directory / s.file, self.headers[name].start, self._length(name))
            for s in self.shards
            if s.file in linked
            for name in s.tensors
        ] + [span for s in to_copy for span in self._copies(s, directory / s.file, len(heads[s.file]))]

    def _link(self, file: str, target: Path) -> bool:
        return link_file(self.source.file(file), target, self.copy)

    def _head(self, shard: Shard) -> bytes:
        """The head of the shard's file: the source's own, where the content is the source's."""
        if shard.copy_of is None:
            return encode_header({name: (*self.headers[name][:2], self._length(name)) for name in shard.tensors})
        with self.source.file(shard.copy_of).open("rb") as file:
            return file.read(min(self.headers[name].start for name in shard.tensors))

    def _copies(self, shard: Shard, target: Path, position: int) -> list[Span]:
        spans = []
        for name in shard.tensors:
            spans.append(replace(self._span(name), target=target, target_start=position))
            position += self._length(name)
        return spans

    def _length(self, name: str) -> int:
        return self.headers[name].end - self.headers[name].start

    def _span(self, name: str) -> Span:
        h = self.headers[name]
        return Span(name, self.source.file(h.file), h.start, h.end - h.start)
