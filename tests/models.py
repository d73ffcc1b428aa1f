"""Tiny models for tests: real Qwen3-architecture Hugging Face directories with random weights.

Importing this module costs nothing; torch, safetensors and tokenizers are imported when a model is made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HEAD_DIM = 32  # the smallest that vLLM's attention on the CPU takes
BOS, EOS, IM_START, IM_END = "<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (EOS, BOS, IM_START, IM_END)
VOCAB_SIZE = 256 + len(SPECIALS)
EOS_ID = 256
IM_END_ID = 259
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(
    path: Path,
    seed: int = 0,
    *,
    shards: int = 1,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 128,
    vocab: int = VOCAB_SIZE,
    tie: bool = False,
    dtype: str = "float32",
    max_positions: int = 2048,
) -> Path:
    """Write a model that vLLM and transformers serve into the new directory `path`, and return it.

    Weights depend on `seed` and the shape arguments only; other seeds give other greedy outputs. The tokenizer is
    one token a byte and four special tokens; `vocab` may be larger than that.

    Args:
        shards: weight files; more than one comes with an index.
        tie: tied word embeddings; then there is no lm_head tensor.
        dtype: "float32" or "bfloat16", of the tensors and in config.json.
    """
    from safetensors.torch import save_file

    path.mkdir(parents=True)
    config = _config(hidden, layers, heads, kv_heads, intermediate, vocab, tie, dtype, max_positions)
    tensors = random_tensors(config, seed)
    names = list(tensors)
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map = {}
        for number in range(shards):
            file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
            part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
            save_file({name: tensors[name] for name in part}, path / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        _write_json(
            path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
    _write_json(path / "config.json", config)
    _write_json(
        path / "generation_config.json", {"bos_token_id": 257, "eos_token_id": [EOS_ID, IM_END_ID], "pad_token_id": 256}
    )
    write_tokenizer(path)
    return path


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, Any]:
    """The model's tensors as torch tensors, by their names in the file, from config.json's content."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, config["dtype"])

    def normal(*shape: int) -> torch.Tensor:
        # A gain above 1 keeps the residual stream of a random model lively: outputs neither repeat nor coincide.
        return (torch.randn(*shape, generator=generator) * 2.0 / shape[-1] ** 0.5).to(kind)

    def norm(size: int) -> torch.Tensor:
        return (1.0 + 0.1 * torch.randn(size, generator=generator)).to(kind)

    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    tensors = {"model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=generator).to(kind)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": norm(hidden),
            f"{prefix}.self_attn.q_proj.weight": normal(query, hidden),
            f"{prefix}.self_attn.k_proj.weight": normal(key, hidden),
            f"{prefix}.self_attn.v_proj.weight": normal(key, hidden),
            f"{prefix}.self_attn.o_proj.weight": normal(hidden, query),
            f"{prefix}.self_attn.q_norm.weight": norm(dim),
            f"{prefix}.self_attn.k_norm.weight": norm(dim),
            f"{prefix}.post_attention_layernorm.weight": norm(hidden),
            f"{prefix}.mlp.gate_proj.weight": normal(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": normal(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": normal(hidden, inner),
        }
    tensors["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(config["vocab_size"], hidden)
    return tensors


def write_tokenizer(path: Path) -> None:
    """Write a tokenizer of one token a byte, with a chat template, into the directory `path`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": EOS,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 2048,
        },
    )


def _config(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocab: int,
    tie: bool,
    dtype: str,
    max_positions: int,
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 257,
        "dtype": dtype,
        "eos_token_id": EOS_ID,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": max_positions,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tie,
        "use_cache": True,
        "vocab_size": vocab,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
