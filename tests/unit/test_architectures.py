"""The arithmetic of common architectures, against transformers' own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.adapters.architectures import check_architecture
from evalkit.decisions.architectures import known_shapes
from evalkit.decisions.shards import tied_head
from evalkit.ground.errors import DataError
from evalkit.ground.layout import SnapshotPaths

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
VARIANTS = [
    ("Qwen3ForCausalLM", {}),
    ("Qwen3ForCausalLM", {"head_dim": 16, "attention_bias": True}),
    ("Qwen2ForCausalLM", {}),
    ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    ("LlamaForCausalLM", {}),
    ("MistralForCausalLM", {"head_dim": None}),
]


def build(architecture: str, **settings: Any) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]:
    """A config, and the tensors of the model that transformers makes of it, as they would be saved."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    kind = getattr(transformers, architecture)
    config = kind.config_class(**{**SMALL, **settings})
    with torch.device("meta"):
        model = kind(config)
    state = revert_weight_conversion(model, model.state_dict())
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    content = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [architecture]}
    return content, {name: ("F32", tuple(tensor.shape)) for name, tensor in state.items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("architecture", "settings"), VARIANTS)
def test_known_shapes_are_those_of_transformers(architecture: str, settings: dict[str, Any], tied: bool) -> None:
    config, outline = build(architecture, **settings, tie_word_embeddings=tied)
    assert known_shapes(config) == {name: shape for name, (_, shape) in outline.items()}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_attention_heads", 0),
        ("hidden_size", "48"),
        ("num_hidden_layers", 10**12),
        ("vocab_size", -1),
        ("intermediate_size", 10**400),
        ("num_key_value_heads", True),
        ("head_dim", 1.5),
    ],
)
def test_a_field_that_is_no_size_is_named(field: str, value: Any) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **SMALL, "tie_word_embeddings": False, field: value}
    with pytest.raises(DataError, match=rf"config\.json: {field} is .*no size"):
        known_shapes(config)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
FIELDS = [*SMALL, "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias", "text_config", "dtype"]


@given(
    st.sampled_from([["LlamaForCausalLM"], ["Qwen2ForCausalLM"], ["Qwen3ForCausalLM"]]) | JSON,
    st.dictionaries(st.sampled_from(FIELDS), JSON),
)
def test_any_config_has_a_result_or_is_refused(architectures: Any, other: dict[str, Any]) -> None:
    config = {**SMALL, "tie_word_embeddings": False, **other, "architectures": architectures}
    tied_head(config, ["lm_head.weight"])
    try:
        shapes = known_shapes(config)
    except DataError:
        return
    assert shapes is None or all(size >= 0 for shape in shapes.values() for size in shape)


def test_other_architectures_are_not_guessed() -> None:
    assert known_shapes({"architectures": ["Qwen3MoeForCausalLM"], **SMALL}) is None
    assert known_shapes({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 3}) is None
    assert known_shapes({}) is None


def test_a_common_model_is_checked_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, outline = build("Qwen3ForCausalLM", tie_word_embeddings=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert check_architecture(tmp_path, config, outline, "m") == ""
    without = {name: info for name, info in outline.items() if "layers.1." not in name}
    with pytest.raises(DataError, match=r"m lacks model\.layers\.1\.\S+ and 10 more of Qwen3ForCausalLM's tensors"):
        check_architecture(tmp_path, config, without, "m")
    wrong = {**outline, "model.norm.weight": ("F32", (47,))}
    with pytest.raises(DataError, match=r"model\.norm\.weight has the shape \[47\], by config\.json it is \[48\]"):
        check_architecture(tmp_path, config, wrong, "m")


def mixture() -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]:
    return build("Qwen3MoeForCausalLM", num_experts=4, moe_intermediate_size=32, tie_word_embeddings=False)


def test_another_architecture_is_compared_with_transformers(tmp_path: Path) -> None:
    config, outline = mixture()
    assert check_architecture(tmp_path, config, outline, "m") == ""
    expert = "model.layers.0.mlp.experts.2.up_proj.weight"
    without = {name: info for name, info in outline.items() if name != expert}
    with pytest.raises(DataError, match=expert):
        check_architecture(tmp_path, config, without, "m")
    wrapped = {f"module.{name}": info for name, info in outline.items()}
    with pytest.raises(DataError, match=r"it has module\.\S+, which the architecture has not"):
        check_architecture(tmp_path, config, wrapped, "m")


def test_names_that_transformers_accepts_are_accepted(tmp_path: Path) -> None:
    config, outline = mixture()
    bare = {name.removeprefix("model."): info for name, info in outline.items()}
    assert check_architecture(tmp_path, config, bare, "m") == ""


def test_what_was_found_to_fit_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, outline = mixture()
    assert check_architecture(tmp_path, config, outline, "m") == ""
    assert len(list(SnapshotPaths(tmp_path).architectures.iterdir())) == 1
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert check_architecture(tmp_path, config, outline, "m") == ""
    fewer = dict(list(outline.items())[1:])
    assert check_architecture(tmp_path, config, fewer, "m") != ""  # not the same tensors: it would have to be built


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "names no architecture"),
        ({"architectures": ["NovelForCausalLM"]}, "no class NovelForCausalLM"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "auto_map": {}}, "no class Qwen3MoeForCausalLM"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "quantization_config": {}}, "quantised"),
    ],
)
def test_what_cannot_be_checked_says_why(tmp_path: Path, config: dict[str, Any], why: str) -> None:
    assert why in check_architecture(tmp_path, config, {"w": ("F32", (1,))}, "m")
