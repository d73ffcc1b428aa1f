"""The rank's side of a pin: check, load while hashing, and tell what was loaded.

vLLM mixes `Loader` into the class of its workers; the agent in the API server calls its methods on every rank. All
names begin with evalkit_, so that none can meet one of vLLM's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import blake3

from evalkit.agent.checks import TORCH_DTYPES, BootTensors
from evalkit.ground.errors import DataError
from evalkit.ground.tensors import TensorHeader, digest_of

READERS = 2  # threads; reading and hashing release the GIL
READ_AHEAD = 256 << 20  # bytes that may be read before the model takes them; one tensor always may


class Loader:
    """Methods for every rank; see the module."""

    rank: int
    model_config: Any
    model_runner: Any
    reload_weights: Callable[..., None]
    evalkit_expected: BootTensors
    evalkit_loaded: dict[str, Any] | None

    def evalkit_boot(self) -> dict[str, Any]:
        """Remember what the model was started with, while its directory is certainly there."""
        tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        try:
            self.evalkit_expected = BootTensors.read(Path(self.model_config.model), tied=tied)
        except DataError as error:
            return {"rank": self.rank, "refused": str(error)}
        self.evalkit_loaded = None
        return {"rank": self.rank}

    def evalkit_load(self, path: str, version: str) -> dict[str, Any]:
        """Load the snapshot at `path`, hashing the very bytes that the model gets.

        Returns:
            `{"rank", "refused": why}` when the checks found something: then no weight was touched. Else
            `{"rank", "ms"}`; `evalkit_stamp` tells what is loaded.

        Raises:
            Exception: the load failed half-way; the weights are unusable.
        """
        begin = time.monotonic()
        try:
            headers = self.evalkit_expected.check(Path(path))
        except DataError as error:
            return {"rank": self.rank, "refused": str(error)}
        self.evalkit_loaded = None
        hashes: dict[str, str] = {}
        self.reload_weights(weights_iterator=stream_tensors(Path(path), headers, hashes))
        if hashes.keys() != headers.keys():
            raise RuntimeError(f"vLLM took only {len(hashes)} of {len(headers)} tensors")
        renew_tied_heads(self.model_runner.get_model())
        self.evalkit_loaded = {
            "version": version,
            "digest": digest_of({name: (h.dtype, h.shape, hashes[name]) for name, h in headers.items()}),
            "tensors": len(headers),
            "bytes": sum(h.end - h.start for h in headers.values()),
        }
        return {"rank": self.rank, "ms": round((time.monotonic() - begin) * 1000)}

    def evalkit_stamp(self) -> dict[str, Any]:
        """`{"rank", "version", "digest", "tensors", "bytes"}` of the last whole load; without one, only the rank."""
        return {"rank": self.rank, **(self.evalkit_loaded or {})}


def renew_tied_heads(model: Any) -> None:
    """Make output heads that are tied to an embedding follow it.

    A reload writes the shared parameter through the embedding alone. On the CPU, though, a head multiplies with a
    packed copy of it, which only its own step after loading renews: without this the engine would keep the old head.
    """
    import torch
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    layers = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    embeddings = {id(layer.weight) for layer in layers if not isinstance(layer, ParallelLMHead)}
    with torch.no_grad():
        for layer in layers:
            if isinstance(layer, ParallelLMHead) and id(layer.weight) in embeddings:
                layer.quant_method.process_weights_after_loading(layer)


def stream_tensors(
    directory: Path, headers: dict[str, TensorHeader], hashes: dict[str, str]
) -> Iterator[tuple[str, Any]]:
    """Yield every tensor in the order of the files, as (name, torch tensor); its bytes' blake3 goes into `hashes`.

    The bytes are private memory, never a map of the file: somebody who rewrites the file meanwhile cannot make the
    tensor differ from its hash, and a file that is cut raises instead of killing the process.

    Raises:
        DataError: a file ends before its header says.
    """
    ahead: deque[tuple[str, int, Future[tuple[Any, str]]]] = deque()
    waiting = 0
    with ThreadPoolExecutor(READERS, "evalkit-read") as readers:
        try:
            for name, header in sorted(headers.items(), key=lambda item: (item[1].file, item[1].start)):
                size = header.end - header.start
                while ahead and waiting + size > READ_AHEAD:
                    done, freed, future = ahead.popleft()
                    waiting -= freed
                    yield _take(done, future, hashes)
                ahead.append((name, size, readers.submit(_read, directory, name, header)))
                waiting += size
            while ahead:
                done, _, future = ahead.popleft()
                yield _take(done, future, hashes)
        finally:
            readers.shutdown(wait=False, cancel_futures=True)


def _take(name: str, future: Future[tuple[Any, str]], hashes: dict[str, str]) -> tuple[str, Any]:
    tensor, hashes[name] = future.result()
    return name, tensor


def _read(directory: Path, name: str, header: TensorHeader) -> tuple[Any, str]:
    import torch

    raw = torch.empty(header.end - header.start, dtype=torch.uint8, device="cpu")
    memory: memoryview = raw.numpy().data
    with (directory / header.file).open("rb", buffering=0) as file:
        file.seek(header.start)
        position = 0
        while position < len(memory):
            count = file.readinto(memory[position:])
            if not count:
                raise DataError(f"{directory / header.file} was cut in tensor {name} while it was read")
            position += count
    tensor = raw.view(getattr(torch, TORCH_DTYPES[header.dtype])).reshape(header.shape)
    return tensor, blake3.blake3(memory).hexdigest()
