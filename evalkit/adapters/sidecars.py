"""Everything of a snapshot but its weights: config, tokenizer, chat template, generation config."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from evalkit.ground.errors import DataError, NoSnapshotError

CONFIG = "config.json"
GENERATION = "generation_config.json"


class _Family(NamedTuple):
    """Files that belong together, by their names."""

    names: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        return name in self.names or name.startswith(self.starts) or name.endswith(self.ends)


_TEMPLATE = _Family(starts=("chat_template.", "additional_chat_templates/"))
_VOCABULARY = _Family(("tokenizer.json", "tekken.json"), ("vocab.",), (".model", ".tiktoken"))
_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")

# A family comes from one place, whole: a tokenizer put together from two directories would be a third one.
_FAMILIES = (
    _Family((CONFIG, "quantize_config.json", "hf_quant_config.json")),
    _Family(ends=(".py",)),
    _Family((*_VOCABULARY.names, *_TOKENIZER_SETTINGS), (*_VOCABULARY.starts, "tokenizer."), _VOCABULARY.ends),
    _TEMPLATE,
    _Family((GENERATION,)),
    _Family(ends=("processor_config.json",)),
)
_GENERATION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


class Sidecars(msgspec.Struct):
    """The files beside the weights.

    Attributes:
        config: config.json's content.
        files: by name in the snapshot, the file to copy or the content to write.
        missing: what a chat evaluation may need and neither source nor base has.
    """

    config: dict[str, Any]
    files: dict[str, Path | bytes] = {}
    missing: list[str] = []

    def hashes(self) -> dict[str, str]:
        """The blake3 of every file."""
        return {name: _hash(_bytes(content)) for name, content in self.files.items()}

    def write(self, directory: Path) -> dict[str, str]:
        """Write them into `directory`; returns the blake3 of what was written."""
        hashes = {}
        for name, content in self.files.items():
            target, data = directory / name, _bytes(content)
            target.parent.mkdir(exist_ok=True)
            with target.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            hashes[name] = _hash(data)
        return hashes


def _bytes(content: Path | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def _hash(data: bytes) -> str:
    import blake3

    return blake3.blake3(data).hexdigest()


def gather_sidecars(directory: Path | None, base: Path | None, dtype: str | None, source: str) -> Sidecars:
    """Each family of files from the source's directory, else from the base.

    Args:
        directory: where the source keeps such files; None for bare weight files.
        dtype: what the weights are cast to; config.json then says so.

    Raises:
        DataError: there is no config.json, or it is not valid.
    """
    files: dict[str, Path | bytes] = {}
    for family in _FAMILIES:
        for place in (directory, base):
            found = _members(place, family) if place else {}
            if found:
                files |= found
                break
    if CONFIG not in files:
        where = f" and neither has {base}" if base else ""
        raise DataError(f"{source} has no {CONFIG}{where}", "give --base, a model directory that has one")
    config = _read_json(files[CONFIG])
    if "auto_map" not in config:
        files = {name: path for name, path in files.items() if not name.endswith(".py")}
    if dtype is not None:
        config = _with_dtype(config, dtype)
        files[CONFIG] = _encode(config)
    if GENERATION not in files:
        files |= _generation_from(config)
    return Sidecars(config, files, _missing(files))


def find_base(base: str) -> Path:
    """The directory of a base model: a path, or a Hub id in the local cache; nothing is downloaded.

    Raises:
        NoSnapshotError: it is neither.
    """
    if Path(base).is_dir():
        return Path(base).absolute()
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        raise NoSnapshotError(f"base {base} is no directory, and huggingface_hub is not installed") from None
    try:
        cached = try_to_load_from_cache(base, CONFIG)
    except HFValidationError:
        cached = None
    if not isinstance(cached, str):
        raise NoSnapshotError(
            f"base {base} is no directory, nor a Hub model in the local cache", f"run: hf download {base}"
        )
    return Path(cached).parent


def _members(directory: Path, family: _Family) -> dict[str, Path | bytes]:
    names = [entry.name for entry in os.scandir(directory) if entry.is_file()]
    names += [f"{path.parent.name}/{path.name}" for path in directory.glob("additional_chat_templates/*.jinja")]
    return {name: directory / name for name in sorted(names) if family.has(name)}


def _missing(files: dict[str, Path | bytes]) -> list[str]:
    has_tokenizer = any(_VOCABULARY.has(name) for name in files)
    has_template = any(_TEMPLATE.has(name) for name in files) or (
        "tokenizer_config.json" in files and bool(_read_json(files["tokenizer_config.json"]).get("chat_template"))
    )
    present = {"tokenizer": has_tokenizer, "chat_template": has_template, GENERATION: GENERATION in files}
    return [name for name, there in present.items() if not there]


def _generation_from(config: dict[str, Any]) -> dict[str, Path | bytes]:
    """Without a generation config the end-of-text ids would be known to config.json's readers only."""
    text = config.get("text_config")
    known = {**(text if isinstance(text, dict) else {}), **config}
    ids = {key: known[key] for key in _GENERATION_KEYS if known.get(key) is not None}
    return {GENERATION: _encode(ids)} if "eos_token_id" in ids else {}


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The config with every statement of the weights' dtype replaced, those of sub-models included."""
    changed = {key: _with_dtype(value, dtype) if isinstance(value, dict) else value for key, value in config.items()}
    for key in ("dtype", "torch_dtype"):
        if isinstance(changed.get(key), str):
            changed[key] = dtype
    return changed


def _encode(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"


def _read_json(content: Path | bytes) -> dict[str, Any]:
    try:
        value = json.loads(_bytes(content))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{content!s} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{content!s} is not a JSON object")
    return value
