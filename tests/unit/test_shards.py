"""Which tensor goes into which file, and what a tied head may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.decisions.shards import (
    cast_to,
    check_doubled_head,
    check_outline,
    parse_size,
    plan_shards,
    split_by_size,
    tied_head,
)
from evalkit.ground.errors import DataError, UsageError
from evalkit.ground.tensors import TensorHeader


def header(file: str, start: int, length: int, dtype: str = "U8") -> TensorHeader:
    return TensorHeader(dtype, (length,), file, start, start + length)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("200MB", 200 * 10**6), ("1.5 GiB", 3 << 29), ("1024", 1024), ("7b", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5 parsecs", "0", "0.1B", "1e9"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is no size"):
        parse_size(text)


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(1, 60))
def test_groups_hold_everything_in_order_within_the_limit(sizes: list[int], limit: int) -> None:
    named = [(str(i), size) for i, size in enumerate(sizes)]
    groups = split_by_size(named, limit)
    assert [name for group in groups for name in group] == [name for name, _ in named]
    sums = [sum(sizes[int(name)] for name in group) for group in groups]
    assert all(total <= limit or len(group) == 1 for total, group in zip(sums, groups, strict=True))
    # No group could have taken the first tensor of the next one.
    assert all(total + sizes[int(after[0])] > limit for total, after in zip(sums, groups[1:], strict=False))


def test_files_of_the_source_stay_as_they_are() -> None:
    headers = {"b": header("y.safetensors", 8, 5), "a": header("x.safetensors", 8, 9)}
    shards = plan_shards(headers, None, None)
    assert [tuple(shard) for shard in shards] == [
        ("model-00001-of-00002.safetensors", ["a"], "x.safetensors"),
        ("model-00002-of-00002.safetensors", ["b"], "y.safetensors"),
    ]
    assert plan_shards(headers, 9, None) == shards


def test_a_file_over_the_limit_is_split_with_wide_dtypes_first() -> None:
    headers = {"a": header("x", 0, 3), "b": header("x", 3, 8, "F64"), "c": header("x", 11, 4)}
    assert [(s.tensors, s.copy_of) for s in plan_shards(headers, 11, None)] == [(["b", "a"], None), (["c"], None)]


def test_a_file_without_its_tied_head_is_no_copy_of_the_source_file() -> None:
    headers = {"a": header("x", 0, 3), "lm_head.weight": header("x", 3, 3), "b": header("y", 0, 3)}
    shards = plan_shards(headers, None, "lm_head.weight")
    assert [(s.tensors, s.copy_of) for s in shards] == [(["a"], None), (["b"], "y")]


def test_a_file_that_held_only_the_tied_head_is_gone() -> None:
    headers = {"a": header("x", 0, 3), "lm_head.weight": header("y", 0, 3)}
    assert [tuple(s) for s in plan_shards(headers, None, "lm_head.weight")] == [("model.safetensors", ["a"], "x")]


@pytest.mark.parametrize(
    ("config", "head"),
    [
        ({"tie_word_embeddings": True}, "lm_head.weight"),
        ({"text_config": {"tie_word_embeddings": True}}, "lm_head.weight"),
        ({"tie_word_embeddings": False}, None),
        ({}, None),
    ],
)
def test_the_head_is_tied_if_the_config_says_so(config: dict[str, object], head: str | None) -> None:
    assert tied_head(config, ["model.embed_tokens.weight", "lm_head.weight"]) == head
    assert tied_head(config, ["model.embed_tokens.weight"]) is None


def test_a_tied_head_must_be_the_embedding() -> None:
    copy = ("F32", (4, 2), "aa")
    check_doubled_head("lm_head.weight", copy, {"embed": copy}, "m")
    with pytest.raises(DataError, match=r"lm_head\.weight .* differ from those of embed"):
        check_doubled_head("lm_head.weight", copy, {"embed": ("F32", (4, 2), "bb")}, "m")
    with pytest.raises(DataError, match="which is not there"):
        check_doubled_head("lm_head.weight", copy, {"norm": ("F32", (2,), "cc")}, "m")


def test_casting_leaves_integers_and_quantised_floats() -> None:
    assert [cast_to(dtype, "bfloat16") for dtype in ("F32", "F16", "I64", "F8_E4M3", "BOOL")] == [
        "BF16",
        "BF16",
        "I64",
        "F8_E4M3",
        "BOOL",
    ]
    assert cast_to("F32", None) == "F32"


def test_an_empty_weight_was_not_gathered() -> None:
    check_outline({"w": ("F32", (1, 2)), "layer.g_idx": ("I32", (0,))}, "m")
    with pytest.raises(DataError, match=r"m: tensor w is empty, its shape is \[0\]"):
        check_outline({"w": ("BF16", (0,))}, "m")
    with pytest.raises(DataError, match="no tensor"):
        check_outline({}, "m")
