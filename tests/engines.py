"""Real vLLM engines for tests, started by `evalkit fleet up` and spoken to directly."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from evalkit.ground.layout import RunPaths
from evalkit.ground.tensors import digest_of, read_headers
from evalkit.state.fleet import load_fleet

VLLM_ARGS = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "32", "--enforce-eager")
REQUEST_TIMEOUT = 300.0  # seconds
START_TIMEOUT = 300.0  # seconds; two cores may be busy with other engines


class Answer(NamedTuple):
    """An HTTP answer; `stamps` are the two of x-evalkit-pin, where it has them."""

    status: int
    body: Any
    stamps: tuple[str, ...]

    @property
    def tokens(self) -> list[int]:
        tokens: list[int] = self.body["choices"][0]["token_ids"]
        return tokens


class Engine(NamedTuple):
    """A running engine and its secret."""

    url: str
    key: str

    def call(self, path: str, body: Any = None, *, method: str | None = None, key: str | None = "") -> Answer:
        """One request; `body` is sent as it is when it is bytes, else as JSON; `key` None sends no secret."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | ({} if key is None else {"x-evalkit-key": key or self.key})
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT) as response:
                return _answer(response)
        except urllib.error.HTTPError as error:
            return _answer(error)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.call("/evalkit/state").body
        return state

    def pin_request(self, path: Path, **fields: Any) -> dict[str, Any]:
        """A pin of `path` under the next epoch."""
        digest = {} if "digest" in fields else {"digest": weights_digest(path)}
        epoch = {} if "epoch" in fields else {"epoch": self.state()["epoch"] + 1}
        named = {"fleet": "test", "path": str(path), "version": path.name, "drain_timeout": REQUEST_TIMEOUT}
        return named | digest | epoch | fields

    def pin(self, path: Path, **fields: Any) -> Answer:
        return self.call("/evalkit/pin", self.pin_request(path, **fields))

    def complete(self, prompt: str, tokens: int = 16, **fields: Any) -> Answer:
        """A greedy completion of exactly `tokens` tokens."""
        body = {"model": "policy", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return self.call("/v1/completions", body | {"return_token_ids": True} | fields)

    def wait_for(self, **fields: Any) -> dict[str, Any]:
        """Wait until the state has these fields."""
        deadline = time.monotonic() + REQUEST_TIMEOUT
        while time.monotonic() < deadline:
            state = self.state()
            if all(state[name] == value for name, value in fields.items()):
                return state
            time.sleep(0.01)
        raise AssertionError(f"the engine did not come to {fields}: {state}")


def _answer(response: Any) -> Answer:
    raw = response.read()
    try:
        body = json.loads(raw)
    except ValueError:
        body = raw
    return Answer(response.status, body, tuple((response.headers.get("x-evalkit-pin") or "").split()))


@functools.cache
def weights_digest(path: Path) -> str:
    """The digest of a directory's weights, computed without the code under test's reader."""
    import blake3

    return digest_of(
        {
            name: (t.dtype, t.shape, blake3.blake3((path / t.file).read_bytes()[t.start : t.end]).hexdigest())
            for name, t in read_headers(path).items()
        }
    )


@functools.cache
def reference(path: Path) -> Any:
    """The model as transformers has it, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype="float32")


@functools.cache
def greedy(path: Path, prompt: str, tokens: int) -> list[int]:
    """What transformers generates greedily, end-of-sequence tokens ignored; `prompt` must be ASCII."""
    import torch

    alphabet = {chr(n): i for i, n in enumerate(range(33, 127))}  # the tokenizer's ids of the printable bytes
    ids = [alphabet[char] for char in prompt]
    model = reference(path)
    with torch.inference_mode():
        for _ in range(tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@contextmanager
def running_fleet(
    run_dir: Path, model: Path, *, ranks: int = 1, vllm_args: Sequence[str] = VLLM_ARGS
) -> Iterator[Engine]:
    """A fleet of one engine, ended whole afterwards."""
    try:
        _evalkit("fleet", "up", "--model", str(model), "--engines", "1", "--num-gpus-per-engine", str(ranks),
                 "--timeout", str(START_TIMEOUT), "--run-dir", str(run_dir), "--", *vllm_args)  # fmt: skip
        paths = RunPaths(run_dir).fleet("eval")
        yield Engine(load_fleet(paths).engines[0].url, paths.key.read_text().strip())
    finally:
        _evalkit("fleet", "down", "--run-dir", str(run_dir))


def _evalkit(*args: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "evalkit", *args], capture_output=True, text=True, timeout=START_TIMEOUT + 60
    )
    assert done.returncode == 0, done.stderr
