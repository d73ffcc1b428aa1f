"""Safetensors headers and the digest."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.ground.errors import DataError
from evalkit.ground.tensors import digest_of, read_header, read_headers

INDEX = "model.safetensors.index.json"
Tensor = tuple[str, tuple[int, ...], bytes]


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file, written from the format's description."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(content)]}
        position += len(content)
    write_raw(path, json.dumps(header).encode(), b"".join(content for _, _, content in tensors.values()))


def write_raw(path: Path, header: bytes, content: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + content)


def write_sharded(directory: Path, shards: list[dict[str, Tensor]]) -> None:
    files = [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        write_file(directory / file, shard)
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def digest(directory: Path) -> str:
    def content(file: str, start: int, end: int) -> str:
        return blake3.blake3((directory / file).read_bytes()[start:end]).hexdigest()

    return digest_of({n: (t.dtype, t.shape, content(*t[2:])) for n, t in read_headers(directory).items()})


def f32(*shape: int, fill: int = 1) -> Tensor:
    count = 1
    for n in shape:
        count *= n
    return "F32", shape, bytes([fill]) * (4 * count)


TWO = {"a.weight": f32(2, 3), "b.weight": f32(4, fill=2)}


def test_a_file_written_by_safetensors_is_read_alike(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I64": torch.int64, "BOOL": torch.bool}
    tensors = {kind: torch.zeros(3, 5, dtype=dtype) for kind, dtype in kinds.items()}
    save_file({**tensors, "empty": torch.zeros(0, 4), "scalar": torch.tensor(1.5)}, tmp_path / "model.safetensors")
    headers = read_headers(tmp_path)
    assert {name: headers[name].dtype for name in kinds} == {kind: kind for kind in kinds}
    assert headers["empty"].shape == (0, 4)
    assert (headers["scalar"].shape, headers["scalar"].end - headers["scalar"].start) == ((), 4)


tensors = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1).filter(lambda n: n != "__metadata__"),
    st.binary(max_size=20).map(lambda content: ("U8", (len(content),), content)),
    min_size=1,
    max_size=8,
)


@given(tensors, st.randoms(use_true_random=False), st.integers(2, 4))
def test_the_digest_does_not_depend_on_files_or_order(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor], random: Any, count: int
) -> None:
    whole, sharded = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("sharded")
    write_file(whole / "model.safetensors", tensors)
    shards: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name in random.sample(sorted(tensors), len(tensors)):
        random.choice(shards)[name] = tensors[name]
    write_sharded(sharded, [shard for shard in shards if shard])
    assert digest(sharded) == digest(whole)


@given(tensors, st.data())
def test_the_digest_depends_on_names_dtypes_shapes_and_bytes(tensors: dict[str, Tensor], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(tensors)))
    dtype, shape, content = tensors.pop(name)
    other = data.draw(
        st.sampled_from([(name, ("I8", shape, content)), (name, (dtype, (*shape, 1), content)),
                         (name, (dtype, shape, content + b"x")), (name + "x", (dtype, shape, content))])
    )  # fmt: skip
    hypothesis_name, changed = other
    before, after = {**tensors, name: (dtype, shape, content)}, {**tensors, hypothesis_name: changed}
    assert (before == after) == (_digest(before) == _digest(after))


def _digest(tensors: dict[str, Tensor]) -> str:
    return digest_of({n: (d, s, blake3.blake3(c).hexdigest()) for n, (d, s, c) in tensors.items()})


def test_the_digest_of_known_tensors_never_changes() -> None:
    a, b = (blake3.blake3(content).hexdigest() for _, _, content in TWO.values())
    lines = f'["a.weight","F32",[2,3],"{a}"]\n["b.weight","F32",[4],"{b}"]\n'
    assert _digest(TWO) == blake3.blake3(lines.encode()).hexdigest()
    assert _digest(TWO) == "b0372660726e3809616ba2b43c5e8c494152ec8b5a458ff221f80cdc59c4c353"


def test_every_cut_of_a_file_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_file(file, TWO)
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"model\.safetensors"):
            read_header(file)


def test_a_cut_names_the_tensor(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_file(file, TWO)
    file.write_bytes(file.read_bytes()[:-17])
    with pytest.raises(DataError, match=r"is cut in tensor a\.weight"):
        read_header(file)


def test_bytes_behind_the_last_tensor_are_noticed(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_file(file, TWO)
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(DataError, match="1 bytes longer than its header says"):
        read_header(file)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        None,
        [],
    ],
)
def test_a_wrong_entry_is_bad_data(tmp_path: Path, entry: object) -> None:
    file = tmp_path / "model.safetensors"
    write_raw(file, json.dumps({"t": entry}).encode(), b"1234")
    with pytest.raises(DataError, match=r"model\.safetensors"):
        read_header(file)


@pytest.mark.parametrize(
    "header",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"t": ' * 50_000,
        b'{"t": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}',
        b'{"t": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}',
    ],
    ids=range(9),
)  # fmt: skip
def test_a_header_of_another_form_is_bad_data(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    write_raw(file, header, b"1234")
    with pytest.raises(DataError, match=r"model\.safetensors has a damaged header"):
        read_header(file)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 8, struct.pack("<Q", 2**62) + b"{}"])
def test_a_file_that_is_no_safetensors_file_is_bad_data(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(DataError, match="safetensors file"):
        read_header(tmp_path / "model.safetensors")


def test_a_pipe_does_not_hold_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="not a regular file"):
        read_headers(tmp_path)


def test_a_directory_without_weights_is_bad_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \*\.safetensors file"):
        read_headers(tmp_path)
    write_file(tmp_path / "model.safetensors", {})
    with pytest.raises(DataError, match="without any tensor"):
        read_headers(tmp_path)


def _spoil_index(directory: Path, name: str, file: str | None) -> None:
    index = json.loads((directory / INDEX).read_text())
    if file is None:
        del index["weight_map"][name]
    else:
        index["weight_map"][name] = file
    (directory / INDEX).write_text(json.dumps(index))


FIRST = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    ("name", "file", "fragment"),
    [
        ("b.bias", FIRST, "does not hold it"),
        ("c.weight", FIRST, "tensor c.weight"),
        ("c.weight", "model-00003-of-00003.safetensors", "which is not there"),
        ("c.weight", "../model.safetensors", "outside its directory"),
        ("b.bias", None, "does not name tensor b.bias"),
    ],
)
def test_an_index_that_disagrees_is_bad_data(tmp_path: Path, name: str, file: str | None, fragment: str) -> None:
    write_sharded(tmp_path, [{"a.weight": f32(2)}, {"b.weight": f32(3), "b.bias": f32(1)}])
    assert set(read_headers(tmp_path)) == {"a.weight", "b.weight", "b.bias"}
    _spoil_index(tmp_path, name, file)
    with pytest.raises(DataError) as error:
        read_headers(tmp_path)
    assert fragment in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_an_index_of_another_form_is_bad_data(tmp_path: Path, content: str) -> None:
    write_sharded(tmp_path, [TWO])
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(DataError, match="is not a valid index"):
        read_headers(tmp_path)


def test_a_shard_of_an_older_export_is_bad_data(tmp_path: Path) -> None:
    write_sharded(tmp_path, [{"a.weight": f32(2)}, {"b.weight": f32(3)}])
    write_file(tmp_path / "model-00003-of-00003.safetensors", {"c.weight": f32(1)})
    with pytest.raises(DataError, match=r"model-00003-of-00003\.safetensors, which .* does not name"):
        read_headers(tmp_path)


@pytest.mark.parametrize("shards", [1, 2])
def test_the_same_weights_in_another_form_are_left_alone(tmp_path: Path, shards: int) -> None:
    write_sharded(tmp_path, [{"a.weight": f32(2)}, {"b.weight": f32(3)}][:shards])
    write_file(tmp_path / "consolidated.safetensors", {"layers.a": f32(2)})
    assert set(read_headers(tmp_path)) == {"a.weight", "b.weight"} - ({"b.weight"} if shards == 1 else set())


def test_a_tensor_in_two_files_is_bad_data(tmp_path: Path) -> None:
    write_file(tmp_path / "one.safetensors", {"a.weight": f32(2)})
    write_file(tmp_path / "two.safetensors", {"a.weight": f32(2)})
    with pytest.raises(DataError, match=r"tensor a\.weight stands in one\.safetensors and in two\.safetensors"):
        read_headers(tmp_path)
