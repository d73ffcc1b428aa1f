"""Whether tensors are those of an architecture: the comparison, and the commonest architectures written down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evalkit.decisions.shards import Outline
from evalkit.ground.errors import DataError

Shapes = Mapping[str, tuple[int, ...]]

_QK_NORMS = {"Qwen3ForCausalLM"}
_QKV_BIASES = {"Qwen2ForCausalLM"}
_DENSE = {"LlamaForCausalLM", "MistralForCausalLM", *_QK_NORMS, *_QKV_BIASES}

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
_MOST = 1 << 40
_MOST_LAYERS = 10_000  # a name is made for every layer's tensors: a mistake must not fill the memory


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """The class that config.json names first."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return first if isinstance(first, str) else None


def known_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Every tensor of a plain dense decoder, by the arithmetic of its config; None for any other architecture.

    Importing the library that knows all architectures takes seconds, which a trainer would wait for.

    Raises:
        DataError: a field is no size.
    """
    architecture = architecture_of(config)
    if architecture not in _DENSE or "quantization_config" in config:
        return None
    if any(config.get(name) is None for name in (*_SIZES, "tie_word_embeddings")):
        return None  # left to the class's default
    return _dense({**config, **_sizes(config)}, architecture)


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    sizes = {name: config[name] for name in _SIZES}
    sizes["head_dim"] = config.get("head_dim") or 0
    for name, size in sizes.items():
        least, most = int(name != "head_dim"), _MOST_LAYERS if name == "num_hidden_layers" else _MOST
        if type(size) is not int or not least <= size <= most:
            raise DataError(f"config.json: {name} is {size!r}, which is no size", "export with the model's own config")
    return sizes


def _dense(config: Mapping[str, Any], architecture: str) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config["head_dim"] or hidden // heads
    embedding = (config["vocab_size"], hidden)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": embedding, "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = embedding
    layer = _attention(config, architecture, hidden, heads * head, config["num_key_value_heads"] * head, head)
    layer |= _feed_forward(config, hidden, config["intermediate_size"])
    layer |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes


def _attention(
    config: Mapping[str, Any], architecture: str, hidden: int, queries: int, keys: int, head: int
) -> dict[str, tuple[int, ...]]:
    sizes = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{name}.weight": shape for name, shape in sizes.items()}
    biased = list(sizes) if config.get("attention_bias") else []
    if architecture in _QKV_BIASES:
        biased = ["q_proj", "k_proj", "v_proj"]
    layer |= {f"self_attn.{name}.bias": sizes[name][:1] for name in biased}
    if architecture in _QK_NORMS:
        layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    return layer


def _feed_forward(config: Mapping[str, Any], hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    sizes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    layer: dict[str, tuple[int, ...]] = {f"mlp.{name}.weight": shape for name, shape in sizes.items()}
    if config.get("mlp_bias"):
        layer |= {f"mlp.{name}.bias": shape[:1] for name, shape in sizes.items()}
    return layer


def check_complete(expected: Shapes, outline: Outline, architecture: str, source: str) -> None:
    """More tensors than expected are no error: some models carry heads that inference leaves out.

    Raises:
        DataError: one is missing or has another shape; names it.
    """
    missing = [name for name in expected if name not in outline]
    if missing:
        strange = [name for name in outline if name not in expected]
        hint = f"; it has {strange[0]}, which the architecture has not" if strange else ""
        raise DataError(
            f"{source} lacks {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + f" of {architecture}'s tensors{hint}",
            "export the whole model's state, under its own names",
        )
    for name, shape in expected.items():
        if outline[name][1] != shape:
            raise DataError(
                f"{source}: {name} has the shape {list(outline[name][1])}, by config.json it is {list(shape)}",
                "export the weights with the config that they were made with",
            )
