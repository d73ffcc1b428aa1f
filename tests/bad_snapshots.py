"""Snapshots that no engine may load, each damaged in its own way, made from one good directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.models import make_model

INDEX = "model.safetensors.index.json"


def bad_snapshots(good: Path, into: Path) -> dict[str, tuple[Path, str]]:
    """Make one damaged directory a kind of damage, under the new directory `into`.

    Args:
        good: a model of two layers made by `make_model` with its default sizes; it is read, never changed.

    Returns:
        By kind: the directory, and a fragment of the message that refuses it.
    """
    into.mkdir(parents=True)
    made = {}
    for kind, (damage, fragment) in DAMAGES.items():
        path = into / kind
        damage(good, path)
        made[kind] = (path, fragment)
    return made


def _no_such_dir(good: Path, path: Path) -> None:
    """Nothing is made."""


def _no_safetensors(good: Path, path: Path) -> None:
    _copy(good, path)
    for file in [*path.glob("*.safetensors"), *path.glob(INDEX)]:
        file.unlink()


def _truncated_shard(good: Path, path: Path) -> None:
    _rewrite(good, path, shards=2)
    shard = path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])


def _cut_in_layer(good: Path, path: Path) -> None:
    tensors = _tensors(good)
    names = sorted(tensors)
    middle = names.index("model.layers.1.mlp.up_proj.weight")
    _rewrite(good, path, tensors={name: tensors[name] for name in names[:middle]})


def _other_hidden_size(good: Path, path: Path) -> None:
    make_model(path, hidden=2 * _config(good)["hidden_size"])


def _extra_layer(good: Path, path: Path) -> None:
    tensors = _tensors(good)
    count = _config(good)["num_hidden_layers"]
    last, extra = f"model.layers.{count - 1}.", f"model.layers.{count}."
    tensors |= {n.replace(last, extra): t.clone() for n, t in tensors.items() if n.startswith(last)}
    _rewrite(good, path, tensors=tensors, config={"num_hidden_layers": count + 1})


def _tensor_missing(good: Path, path: Path) -> None:
    tensors = _tensors(good)
    del tensors["model.layers.1.self_attn.k_norm.weight"]
    _rewrite(good, path, tensors=tensors)


def _fewer_layers(good: Path, path: Path) -> None:
    count = _config(good)["num_hidden_layers"]
    last = f"model.layers.{count - 1}."
    tensors = {n: t for n, t in _tensors(good).items() if not n.startswith(last)}
    _rewrite(good, path, tensors=tensors, config={"num_hidden_layers": count - 1})


def _other_architecture(good: Path, path: Path) -> None:
    tensors = {n: t for n, t in _tensors(good).items() if "q_norm" not in n and "k_norm" not in n}
    _rewrite(good, path, tensors=tensors, config={"architectures": ["LlamaForCausalLM"], "model_type": "llama"})


def _index_disagrees(good: Path, path: Path) -> None:
    _rewrite(good, path, shards=2)
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    (path / INDEX).write_text(json.dumps(index))


def _stray_shard(good: Path, path: Path) -> None:
    _rewrite(good, path, shards=2)
    shutil.copy(path / "model-00002-of-00002.safetensors", path / "model-00003-of-00003.safetensors")


def _shard_missing(good: Path, path: Path) -> None:
    _rewrite(good, path, shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()


def _garbage_header(good: Path, path: Path) -> None:
    _rewrite(good, path)
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:40] = b"\xff" * 32
    file.write_bytes(content)


def _no_weights_in_file(good: Path, path: Path) -> None:
    _rewrite(good, path)
    (path / "model.safetensors").write_bytes(b"")


def _other_kind_of_dtype(good: Path, path: Path) -> None:
    import torch

    tensors = _tensors(good)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    _rewrite(good, path, tensors=tensors)


def _no_config(good: Path, path: Path) -> None:
    _copy(good, path)
    (path / "config.json").unlink()


def _broken_config(good: Path, path: Path) -> None:
    _copy(good, path)
    (path / "config.json").write_text('{"model_type": "qwen3", ')


Damage = Callable[[Path, Path], None]

# The first ten are those that a bare reload in vLLM answers with broken or silently mixed weights.
DAMAGES: dict[str, tuple[Damage, str]] = {
    "no_such_dir": (_no_such_dir, "no_such_dir is not a directory"),
    "no_safetensors": (_no_safetensors, "no *.safetensors file"),
    "truncated_shard": (_truncated_shard, "model-00002-of-00002.safetensors is cut in tensor"),
    "cut_in_layer": (_cut_in_layer, "lacks tensor model.layers.1.mlp.up_proj.weight"),
    "other_hidden_size": (_other_hidden_size, "hidden_size is 128"),
    "extra_layer": (_extra_layer, "num_hidden_layers is 3"),
    "tensor_missing": (_tensor_missing, "lacks tensor model.layers.1.self_attn.k_norm.weight"),
    "fewer_layers": (_fewer_layers, "num_hidden_layers is 1"),
    "other_architecture": (_other_architecture, "model_type is 'llama'"),
    "index_disagrees": (_index_disagrees, "model.norm.weight"),
    "stray_shard": (_stray_shard, "model-00003-of-00003.safetensors"),
    "shard_missing": (_shard_missing, "model-00002-of-00003.safetensors"),
    "garbage_header": (_garbage_header, "damaged header"),
    "no_weights_in_file": (_no_weights_in_file, "model.safetensors is not a safetensors file"),
    "other_kind_of_dtype": (_other_kind_of_dtype, "tensor model.norm.weight has dtype I8"),
    "no_config": (_no_config, "config.json is missing"),
    "broken_config": (_broken_config, "config.json"),
}


def _copy(good: Path, path: Path) -> None:
    """Copy without evalkit's own marker and manifest, which would speak of other bytes."""
    shutil.copytree(good, path, ignore=shutil.ignore_patterns(".complete", "evalkit.json"))


def _tensors(good: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(good.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def _config(good: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((good / "config.json").read_text())
    return config


def _rewrite(
    good: Path,
    path: Path,
    *,
    tensors: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    shards: int = 1,
) -> None:
    """Copy `good`, with other tensors, with some fields of the config changed, or in other shards."""
    from safetensors.torch import save_file

    tensors = _tensors(good) if tensors is None else tensors
    _no_safetensors(good, path)
    (path / "config.json").write_text(json.dumps(_config(good) | (config or {})))
    names = sorted(tensors)
    weight_map = {}
    for number in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
