"""How a rank reads, hashes and loads a snapshot; vLLM's part is a stand-in that takes the tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import blake3
import pytest

from evalkit.agent import loader
from evalkit.agent.loader import Loader, stream_tensors
from evalkit.ground.errors import DataError
from evalkit.ground.tensors import read_headers
from tests.engines import weights_digest
from tests.unit.test_tensors import f32, write_file, write_sharded

torch = pytest.importorskip("torch")

KINDS = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
         "float8_e4m3fn", "float8_e5m2")  # fmt: skip


def test_every_tensor_is_what_safetensors_reads_and_hashed_from_its_bytes(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {kind: torch.arange(12).reshape(3, 4).to(getattr(torch, kind)) for kind in KINDS}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    headers, content = read_headers(tmp_path), (tmp_path / "model.safetensors").read_bytes()
    hashes: dict[str, str] = {}
    loaded = dict(stream_tensors(tmp_path, headers, hashes))
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].float(), tensor.float())
        assert hashes[name] == blake3.blake3(content[headers[name].start : headers[name].end]).hexdigest()


def test_what_is_read_ahead_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "model.safetensors", {f"t{n:02}": f32(25) for n in range(20)})
    begun: list[str] = []
    read = loader._read

    def counting(directory: Path, name: str, header: Any) -> Any:
        begun.append(name)
        return read(directory, name, header)

    monkeypatch.setattr(loader, "READ_AHEAD", 300)
    monkeypatch.setattr(loader, "_read", counting)
    for taken, _ in enumerate(stream_tensors(tmp_path, read_headers(tmp_path), {}), start=1):
        assert len(begun) <= taken + 3
    assert taken == len(begun) == 20


def test_a_tensor_larger_than_the_bound_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "READ_AHEAD", 10)
    write_file(tmp_path / "model.safetensors", {"a": f32(25), "b": f32(25)})
    assert [name for name, _ in stream_tensors(tmp_path, read_headers(tmp_path), {})] == ["a", "b"]


def test_a_file_cut_meanwhile_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_file(file, {"a": f32(25), "b": f32(25)})
    headers = read_headers(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match="was cut in tensor b"):
        list(stream_tensors(tmp_path, headers, {}))


Reload = Callable[[Iterator[tuple[str, Any]]], object]


class Rank(Loader):
    """A worker whose vLLM does `reload` with the tensors."""

    def __init__(self, boot: Path, reload: Reload) -> None:
        self.rank = 3
        self.model_config = SimpleNamespace(model=str(boot), hf_text_config=SimpleNamespace(tie_word_embeddings=False))
        self.model_runner = SimpleNamespace(get_model=lambda: torch.nn.Module())
        self.reload_weights = lambda weights_iterator: reload(weights_iterator)


@pytest.fixture
def snapshots(tmp_path: Path) -> tuple[Path, Path]:
    """A boot model and a snapshot like it, otherwise sharded."""
    boot, snapshot = tmp_path / "boot", tmp_path / "snapshot"
    for path in (boot, snapshot):
        path.mkdir()
    write_file(boot / "model.safetensors", {"a": f32(2), "b": f32(3)})
    write_sharded(snapshot, [{"b": f32(3, fill=5)}, {"a": f32(2, fill=6)}])
    return boot, snapshot


def test_a_rank_tells_what_it_has_loaded(snapshots: tuple[Path, Path]) -> None:
    pytest.importorskip("vllm")
    boot, snapshot = snapshots
    taken: dict[str, Any] = {}
    rank = Rank(boot, lambda tensors: taken.update(tensors))
    assert rank.evalkit_boot() == rank.evalkit_stamp() == {"rank": 3}
    assert rank.evalkit_load(str(snapshot), "40").keys() == {"rank", "ms"}
    proof = {"version": "40", "digest": weights_digest(snapshot), "tensors": 2, "bytes": 20}
    assert rank.evalkit_stamp() == {"rank": 3, **proof}
    assert taken.keys() == {"a", "b"}


def test_a_rank_that_refuses_keeps_its_stamp_and_touches_nothing(snapshots: tuple[Path, Path]) -> None:
    pytest.importorskip("vllm")
    boot, snapshot = snapshots
    loads: list[int] = []
    rank = Rank(boot, lambda tensors: loads.append(len(list(tensors))))
    rank.evalkit_boot()
    rank.evalkit_load(str(snapshot), "40")
    before = rank.evalkit_stamp()
    write_file(snapshot / "stray.safetensors", {"c": f32(1)})
    assert "stray.safetensors" in rank.evalkit_load(str(snapshot), "41")["refused"]
    assert rank.evalkit_stamp() == before
    assert loads == [2]


def _fail(tensors: Iterator[tuple[str, Any]]) -> None:
    next(tensors)
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("reload", [_fail, lambda tensors: list(itertools.islice(tensors, 1))])
def test_a_load_that_does_not_take_every_tensor_leaves_no_stamp(snapshots: tuple[Path, Path], reload: Reload) -> None:
    pytest.importorskip("vllm")
    boot, snapshot = snapshots
    rank = Rank(boot, reload)
    rank.evalkit_boot()
    with pytest.raises(RuntimeError, match=r"out of memory|took only 1 of 2 tensors"):
        rank.evalkit_load(str(snapshot), "40")
    assert rank.evalkit_stamp() == {"rank": 3}


def test_a_rank_whose_boot_model_is_gone_says_so(tmp_path: Path) -> None:
    assert "no *.safetensors file" in Rank(tmp_path / "gone", list).evalkit_boot()["refused"]
