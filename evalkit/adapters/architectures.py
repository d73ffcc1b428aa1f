"""Whether the tensors are those of config.json's architecture, as transformers builds it without memory.

What was found to fit is kept in SNAPSHOT_DIR, so that of a run's exports at most the first one pays for the import.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evalkit.decisions.architectures import architecture_of, check_complete, known_shapes
from evalkit.decisions.shards import Outline
from evalkit.ground.layout import SnapshotPaths


def check_architecture(snapshot_dir: Path, config: Mapping[str, Any], outline: Outline, source: str) -> str:
    """Compare names and shapes with the architecture's.

    Returns why that was not possible; empty when it was.

    Raises:
        DataError: a tensor is missing or has another shape.
    """
    architecture = architecture_of(config)
    if architecture is None:
        return "config.json names no architecture"
    known = known_shapes(config)
    if known is not None and outline.keys() <= known.keys():
        check_complete(known, outline, architecture, source)
        return ""
    from importlib.util import find_spec

    kept = SnapshotPaths(snapshot_dir).architectures / _fingerprint(config, outline)
    if kept.exists():
        return ""
    if any(find_spec(name) is None for name in ("torch", "transformers")):
        if known is None:
            return "transformers is not installed"
        check_complete(known, outline, architecture, source)
        return ""
    unchecked = _check_with_transformers(architecture, config, outline, source)
    if not unchecked:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.touch()
    return unchecked


def _fingerprint(config: Mapping[str, Any], outline: Outline) -> str:
    import blake3

    shapes = sorted((name, list(shape)) for name, (_, shape) in outline.items())
    return blake3.blake3(json.dumps([config, shapes], sort_keys=True).encode()).hexdigest()


def _check_with_transformers(architecture: str, config: Mapping[str, Any], outline: Outline, source: str) -> str:
    import torch

    kind = None if "auto_map" in config else _class_of(architecture)
    if kind is None:
        return f"transformers has no class {architecture}"
    if "quantization_config" in config:
        return "the weights are quantised"
    try:
        with torch.device("meta"):
            model = kind(kind.config_class.from_dict(dict(config)))
    except Exception as error:  # noqa: BLE001  (its config classes raise errors of many libraries' own)
        return f"transformers cannot build {architecture} from config.json: {error}"
    expected = _saved_shapes(model)
    if expected.keys() - outline.keys() and outline.keys() - expected.keys() and _is_loadable(model, outline):
        expected = {name: shape for name, shape in expected.items() if name in outline}
    check_complete(expected, outline, architecture, source)
    return ""


def _class_of(architecture: str) -> Any:
    try:
        import transformers

        return getattr(transformers, architecture, None)
    except (ImportError, RuntimeError):  # it imports the class only now, with all that the class needs
        return None


def _saved_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes as `save_pretrained` would write them: tied tensors once, merged ones taken apart."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or [])
    state = {name: tensor for name, tensor in _untied(model).items() if name not in ignored}
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        pass  # before version 5, a model's names were those of its files
    else:
        state = revert_weight_conversion(model, state)
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _untied(model: Any) -> dict[str, Any]:
    names: dict[int, str] = {}
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        names.setdefault(id(tensor), name)
    return {name: state[name] for name in names.values()}


def _is_loadable(model: Any, outline: Outline) -> bool:
    """Whether every tensor is there under names that transformers accepts, older or merged ones."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return False
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    state = model.state_dict()
    found = {rename_source_key(name, renamings, converters, model.base_model_prefix, state)[0] for name in outline}
    return _untied(model).keys() <= found
