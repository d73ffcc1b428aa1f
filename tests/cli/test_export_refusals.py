"""What `evalkit export` refuses, each with one line that names the culprit, and nothing left."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pytest_console_scripts import ScriptRunner

from evalkit.adapters import space
from evalkit.ground.errors import StorageError
from evalkit.ground.tensors import INDEX_NAME, digest_of, encode_header, read_header
from evalkit.state.snapshot import hash_directory
from tests.exports import Exports
from tests.fakes import tiny_snapshot
from tests.models import make_model

pytestmark = pytest.mark.script_launch_mode("inprocess")

FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("good") / "checkpoint", shards=2)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tied") / "checkpoint", tie=True)


@pytest.fixture
def exports(tmp_path: Path, script_runner: ScriptRunner) -> Exports:
    return Exports(tmp_path, script_runner)


def rewrite(file: Path, change: Callable[[dict[str, tuple[str, tuple[int, ...], bytes]]], None]) -> None:
    """Change the tensors of a safetensors file; index and other files stay."""
    data = file.read_bytes()
    tensors = {name: (h.dtype, h.shape, data[h.start : h.end]) for name, h in read_header(file).items()}
    change(tensors)
    head = encode_header({name: (dtype, shape, len(raw)) for name, (dtype, shape, raw) in tensors.items()})
    file.write_bytes(head + b"".join(raw for _, _, raw in tensors.values()))


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def weight_map(path: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((path / INDEX_NAME).read_text())["weight_map"]
    return found


def truncated(path: Path) -> None:
    os.truncate(path / FIRST, (path / FIRST).stat().st_size - 10)


def lengthened(path: Path) -> None:
    with (path / FIRST).open("ab") as file:
        file.write(b"x" * 10)


def header_torn(path: Path) -> None:
    data = (path / FIRST).read_bytes()
    (path / FIRST).write_bytes(data[:9] + b"?" + data[10:])


def header_too_long(path: Path) -> None:
    (path / FIRST).write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


def shard_gone(path: Path) -> None:
    (path / FIRST).unlink()


def stray_shard(path: Path) -> None:
    shutil.copy(path / FIRST, path / "model-00001-of-00003.safetensors")


def index_leads_out(path: Path) -> None:
    edit(path / INDEX_NAME, weight_map={**weight_map(path), "model.norm.weight": "../checkpoint/x.safetensors"})


def index_disagrees(path: Path) -> None:
    edit(path / INDEX_NAME, weight_map={**weight_map(path), "model.norm.weight": FIRST})


def index_no_json(path: Path) -> None:
    (path / INDEX_NAME).write_text("{")


def index_without_tensor(path: Path) -> None:
    edit(path / INDEX_NAME, weight_map={k: v for k, v in weight_map(path).items() if k != "model.norm.weight"})


def tensor_twice(path: Path) -> None:
    (path / INDEX_NAME).unlink()
    shutil.copy(path / FIRST, path / "old.safetensors")


def tensor_missing(path: Path) -> None:
    (path / INDEX_NAME).unlink()
    rewrite(path / FIRST, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"))


def layers_missing(path: Path) -> None:
    edit(path / "config.json", num_hidden_layers=3)


def head_missing(path: Path) -> None:
    (path / INDEX_NAME).unlink()
    rewrite(path / "model-00002-of-00002.safetensors", lambda tensors: tensors.pop("lm_head.weight"))


def head_empty(path: Path) -> None:
    empty = {"lm_head.weight": ("F32", (0,), b"")}
    rewrite(path / "model-00002-of-00002.safetensors", lambda tensors: tensors.update(empty))


def other_hidden_size(path: Path) -> None:
    edit(path / "config.json", hidden_size=96)


def wrapped_names(path: Path) -> None:
    (path / INDEX_NAME).unlink()
    for file in path.glob("*.safetensors"):
        rewrite(file, lambda t: [t.update({f"module.{name}": t.pop(name)}) for name in list(t)])


def no_tensor(path: Path) -> None:
    (path / INDEX_NAME).unlink()
    for file in path.glob("*.safetensors"):
        rewrite(file, dict.clear)


def no_weights(path: Path) -> None:
    (path / INDEX_NAME).unlink()
    for file in path.glob("*.safetensors"):
        file.unlink()


def no_config(path: Path) -> None:
    (path / "config.json").unlink()


def config_no_json(path: Path) -> None:
    (path / "config.json").write_text("{'architectures'}")


def adapter(path: Path) -> None:
    (path / "adapter_config.json").write_text("{}")


DAMAGES = [
    (truncated, rf"{FIRST} is cut in tensor \S+"),
    (lengthened, rf"{FIRST} is 10 bytes longer"),
    (header_torn, rf"{FIRST} has a damaged header"),
    (header_too_long, rf"{FIRST} is cut or no safetensors file"),
    (shard_gone, rf"names {FIRST}, which is not there"),
    (stray_shard, r"model-00001-of-00003\.safetensors, which \S+ does not name; remove shards of older exports"),
    (index_leads_out, r"names a file outside its directory: '\.\./checkpoint/x\.safetensors'"),
    (index_disagrees, rf"places tensor model\.norm\.weight in {FIRST}, which does not hold it"),
    (index_no_json, r"model\.safetensors\.index\.json is not a valid index"),
    (index_without_tensor, r"does not name tensor model\.norm\.weight"),
    (tensor_twice, r"tensor \S+ stands in model-00001-of-00002\.safetensors and in old\.safetensors"),
    (tensor_missing, r"lacks model\.layers\.0\.mlp\.up_proj\.weight of Qwen3ForCausalLM's tensors"),
    (layers_missing, r"lacks model\.layers\.2\.\S+ and 10 more"),
    (head_missing, r"lacks lm_head\.weight"),
    (head_empty, r"tensor lm_head\.weight is empty, its shape is \[0\]"),
    (other_hidden_size, r"\S+ has the shape \[\S+ \S+\], by config\.json it is"),
    (wrapped_names, r"it has module\.\S+, which the architecture has not"),
    (no_tensor, r"without any tensor"),
    (no_weights, r"holds no weights in a form that is known"),
    (no_config, r"has no config\.json; give --base"),
    (config_no_json, r"config\.json is not valid JSON"),
    (adapter, r"is an adapter, not a whole model"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_damaged_directory_is_refused(
    exports: Exports, good: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    source = Path(shutil.copytree(good, tmp_path / "source"))
    damage(source)
    assert re.search(message, exports.refused(source))


def test_refusals_do_not_depend_on_assertions(exports: Exports, good: Path, tmp_path: Path) -> None:
    for number, damage in enumerate((truncated, stray_shard, tensor_missing)):
        source = Path(shutil.copytree(good, tmp_path / f"source-{number}"))
        damage(source)
        process = exports.start(source, argv=[sys.executable, "-O", "-m", "evalkit", "export"])
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, len(err.splitlines())) == (65, "", 1)
        assert exports.leftovers() == []


def test_what_is_not_there_and_what_is_no_weights(exports: Exports, good: Path, tmp_path: Path) -> None:
    assert "there is no" in exports.refused(tmp_path / "nothing", code=66)
    assert "is no form of weights" in exports.refused(good / "config.json")
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "is no form of weights" in exports.refused(tmp_path / "pipe.safetensors", "--base", good)
    (tmp_path / "none").mkdir()
    file = tmp_path / "bare.safetensors"
    file.write_bytes(encode_header({}))
    assert "holds no tensor" in exports.refused(file, "--base", good)
    assert f"bare.safetensors has no config.json and neither has {tmp_path}/none" in exports.refused(
        file, "--base", tmp_path / "none"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda state: {"model": state, "step": 3}, "holds a dict under 'model', not only tensors"),
        (lambda state: [*state.values()], "holds a list, not a state dict"),
        (lambda state: {**state, "lr": 0.1}, "holds a float under 'lr'"),
        (lambda state: {"f": print}, "holds other objects than tensors"),
        (lambda state: {}, "holds no tensor"),
        (lambda state: {n: t for n, t in state.items() if "norm" not in n}, "lacks model.norm.weight and 8 more"),
    ],
)
def test_only_a_state_dict_is_taken_from_torch_files(
    exports: Exports, good: Path, tmp_path: Path, make: Callable[[dict[str, Any]], Any], message: str
) -> None:
    import torch
    from safetensors.torch import load_file

    state = {name: tensor for file in good.glob("*.safetensors") for name, tensor in load_file(file).items()}
    torch.save(make(state), tmp_path / "state.pt")
    line = exports.refused(tmp_path / "state.pt", "--base", good)
    assert f"{tmp_path}/state.pt" in line
    assert message in line


def test_a_cut_torch_file_is_named(exports: Exports, good: Path, tmp_path: Path) -> None:
    import torch

    torch.save({"w": torch.zeros(1000)}, tmp_path / "state.pt")
    os.truncate(tmp_path / "state.pt", 2000)
    assert "state.pt is cut or no torch file" in exports.refused(tmp_path / "state.pt", "--base", good)


def doubled(tied: Path, path: Path, change: Callable[[bytes], bytes] = bytes) -> Path:
    """The tied model with its head written out as well."""
    shutil.copytree(tied, path)

    def add(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
        dtype, shape, raw = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = (dtype, shape, change(raw))

    rewrite(path / "model.safetensors", add)
    return path


@pytest.mark.parametrize("mode", ["hardlink", "reflink"])
@pytest.mark.parametrize("form", ["torch", "cast"])
def test_what_has_to_be_converted_cannot_be_shared(
    exports: Exports, good: Path, tmp_path: Path, mode: str, form: str
) -> None:
    words: list[object] = ["--copy", mode]
    if form == "torch":
        import torch

        source = tmp_path / "state.pt"
        torch.save({"model.norm.weight": torch.ones(2)}, source)
        words += ["--base", good]
    else:
        source = good
        words += ["--dtype", "bfloat16"]
    assert f"--copy {mode} shares whole safetensors files" in exports.refused(source, *words, code=2)


def test_a_config_with_no_heads_is_refused(exports: Exports, good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "source")
    edit(tmp_path / "source" / "config.json", num_attention_heads=0)
    assert "config.json: num_attention_heads is 0, which is no size" in exports.refused(tmp_path / "source")


@pytest.mark.parametrize("form", ["files", "torch", "cast"])
def test_a_tied_head_is_not_doubled(exports: Exports, tied: Path, tmp_path: Path, form: str) -> None:
    source, words = doubled(tied, tmp_path / "source"), []
    if form == "torch":
        import torch
        from safetensors.torch import load_file

        torch.save(load_file(source / "model.safetensors"), tmp_path / "state.pt")
        source, words = tmp_path / "state.pt", ["--base", tied]
    if form == "cast":
        words = ["--dtype", "bfloat16"]
        exports.call(tied, *words, step=1)
    exports.call(source, *words)
    assert "lm_head.weight" not in exports.manifest().tensors
    expected = exports.manifest(1).digest if form == "cast" else digest_of(hash_directory(tied))
    assert exports.manifest().digest == expected
    assert exports.json(source, *words)["unchanged"]


def test_a_tied_head_of_its_own_is_refused(exports: Exports, tied: Path, tmp_path: Path) -> None:
    source = doubled(tied, tmp_path / "source", lambda raw: bytes(len(raw)))
    line = exports.refused(source)
    assert "config.json ties lm_head.weight to the embedding, but its values differ" in line
    assert "model.embed_tokens.weight" in line
    assert line == exports.refused(source, "--shard-size", "50KB")


def test_a_tied_head_without_the_embedding_is_refused(exports: Exports, tied: Path, tmp_path: Path) -> None:
    source = doubled(tied, tmp_path / "source")
    rewrite(source / "model.safetensors", lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert "lacks model.embed_tokens.weight" in exports.refused(source)


def sparse_source(path: Path, size: int) -> Path:
    """A directory whose one tensor claims `size` bytes and takes none on the disk."""
    tiny_snapshot(path)
    head = encode_header({"w": ("U8", (size,), size)})
    (path / "model.safetensors").write_bytes(head)
    os.truncate(path / "model.safetensors", len(head) + size)
    return path


def test_room_on_the_disk_is_checked_before_the_first_byte(exports: Exports, tmp_path: Path) -> None:
    source = sparse_source(tmp_path / "source", shutil.disk_usage(tmp_path).free + (1 << 30))
    line = exports.refused(source, code=74)
    assert "MiB free, the snapshot needs" in line


def test_room_in_memory_is_checked_on_tmpfs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert space.available_memory() > 0
    shm = Path("/dev/shm")
    assert space.filesystem_of(shm) == "tmpfs"
    space.require_room(shm, 1000)
    monkeypatch.setattr(space, "available_memory", lambda: space.MEMORY_RESERVE + 999)
    with pytest.raises(StorageError, match="is in memory") as caught:
        space.require_room(shm, 1000)
    assert caught.value.skip_reason == "no_space"


def test_a_cgroups_limit_is_heeded(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 100\n")
    assert space.room_in(tmp_path, "memory.max", "memory.current") == [400]
    (tmp_path / "memory.max").write_text("max\n")
    assert space.room_in(tmp_path, "memory.max", "memory.current") == []
    assert space.room_in(tmp_path / "none", "memory.max", "memory.current") == []


@pytest.mark.parametrize("words", [[], ["--dtype", "bfloat16"]])
def test_a_disk_that_fills_half_way_leaves_nothing(exports: Exports, good: Path, words: list[str]) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    process = exports.start(good, *words, preexec_fn=small_files)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (74, "")
    assert "File too large" in err
    assert len(err.splitlines()) == 1
    assert (exports.leftovers(), exports.names()) == ([], [])


def test_a_directory_that_cannot_be_written_is_an_io_error(exports: Exports, good: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshots").write_text("a file")
    done = exports.call(good, code=2)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shard-size", "big"], "is no size"),
        (["--copy", "teleport"], "is not one of"),
        (["--dtype", "float8"], "is not one of"),
        (["--step", "-1"], "-1"),
    ],
)
def test_usage_errors(exports: Exports, good: Path, words: list[str], said: str) -> None:
    assert said in exports.call(good, *words, code=2).stderr
