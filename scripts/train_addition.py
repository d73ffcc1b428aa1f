"""Teach a tiny Qwen3 model to add, a stretch of steps at a time; the trainer of the demo.

`train_addition.py DIR --until 25` trains on from where the last call ended (weights, optimizer, schedule and random
state are kept in DIR/state.pt) and writes the weights as a Hugging Face directory, DIR/checkpoint. The first call makes
the model from scratch (DIR/base), the held-out sums (DIR/sums.jsonl) and the suite that scores them (DIR/evals.yaml).

A sum reads `12+34=640`: its digits stand lowest first, so that the carry is known before it is needed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterator

PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
VOCABULARY = [PAD, END, UNKNOWN, *"0123456789+="]
PROMPT_LENGTH = 6  # 12+34=
ANSWER_LENGTH = 4  # three digits and the end

SUITE = """\
eval:
  defaults:
    input_key: prompt
    label_key: answer
    temperature: 0.0
    max_response_len: {max_tokens}
  datasets:
    addition:
      path: sums.jsonl
      rm_type: exact
"""


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    options.dir.mkdir(parents=True, exist_ok=True)
    if not (options.dir / "state.pt").exists():
        begin(options.dir, options)
    train(options.dir, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--until", type=int, required=True, help="train up to this step")
    parser.add_argument("--steps", type=int, default=200, help="length of the schedule, in steps")
    parser.add_argument("--batch", type=int, default=256, help="sums a step")
    parser.add_argument("--lr", type=float, default=6e-3, help="the schedule's peak")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", type=int, default=500, help="sums kept for the evals")
    # More threads wait for each other where the engines share the cores.
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def begin(directory: Path, options: argparse.Namespace) -> None:
    """The model from scratch, what it will be asked, and an optimizer that has seen nothing."""
    torch.manual_seed(options.seed)
    held_out: list[int] = torch.randperm(10_000)[: options.held_out].tolist()
    write_sums(directory / "sums.jsonl", held_out)
    (directory / "evals.yaml").write_text(SUITE.format(max_tokens=ANSWER_LENGTH))
    model = Qwen3ForCausalLM(configuration(options))
    write_model(directory / "base", model)
    optimizer, schedule = optimizer_of(model, options)
    save_state(directory, model, optimizer, schedule, step=0, held_out=held_out)


def train(directory: Path, options: argparse.Namespace) -> None:
    state = torch.load(directory / "state.pt", weights_only=True)
    model = Qwen3ForCausalLM(configuration(options))
    model.load_state_dict(state["model"])
    optimizer, schedule = optimizer_of(model, options)
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["random"])
    loss = None
    for batch in batches(options.until - state["step"], options.batch, state["held_out"]):
        loss = model(input_ids=batch, labels=only_answers(batch)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    save_state(directory, model, optimizer, schedule, step=options.until, held_out=state["held_out"])
    write_model(directory / "checkpoint", model)
    print(f"step {options.until}" + (f", loss {loss.item():.3f}" if loss is not None else ""))


def configuration(options: argparse.Namespace) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 4,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.1,  # about 1/sqrt(hidden_size): learns in half the steps that the default needs
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=VOCABULARY.index(END),
        pad_token_id=VOCABULARY.index(PAD),
    )


def optimizer_of(model: Qwen3ForCausalLM, options: argparse.Namespace) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.steps + 1, pct_start=0.2)
    return optimizer, schedule


def save_state(directory: Path, model: Any, optimizer: Any, schedule: Any, *, step: int, held_out: list[int]) -> None:
    state = {
        "step": step,
        "held_out": held_out,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "random": torch.get_rng_state(),
    }
    torch.save(state, directory / "state.pt.new")
    (directory / "state.pt.new").replace(directory / "state.pt")


def batches(count: int, size: int, held_out: list[int]) -> Iterator[torch.Tensor]:
    """`count` batches of `size` sums as tokens, (size, PROMPT_LENGTH + ANSWER_LENGTH), none of them held out."""
    sums = torch.tensor(sorted(set(range(10_000)) - set(held_out)))
    for _ in range(count):
        yield tokens_of(sums[torch.randint(len(sums), (size,))])


def tokens_of(sums: torch.Tensor) -> torch.Tensor:
    """Rows of tokens for sums numbered 100 * first + second."""
    first, second = sums // 100, sums % 100
    total = first + second
    zero, plus, equals, end = (VOCABULARY.index(symbol) for symbol in ("0", "+", "=", END))

    def digit(number: torch.Tensor, place: int) -> torch.Tensor:
        return zero + number // place % 10

    def constant(token: int) -> torch.Tensor:
        return torch.full_like(sums, token)

    prompt = [digit(first, 10), digit(first, 1), constant(plus), digit(second, 10), digit(second, 1), constant(equals)]
    answer = [digit(total, 1), digit(total, 10), digit(total, 100), constant(end)]
    return torch.stack(prompt + answer, dim=1)


def only_answers(batch: torch.Tensor) -> torch.Tensor:
    labels = batch.clone()
    labels[:, :PROMPT_LENGTH] = -100
    return labels


def write_sums(path: Path, sums: list[int]) -> None:
    rows = [
        {"prompt": f"{number // 100:02}+{number % 100:02}=", "answer": f"{number // 100 + number % 100:03}"[::-1]}
        for number in sums
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(directory: Path, model: Qwen3ForCausalLM) -> None:
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a symbol, and text back without spaces between them."""
    symbols = {symbol: index for index, symbol in enumerate(VOCABULARY)}
    made = Tokenizer(models.WordLevel(symbols, unk_token=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token=UNKNOWN, pad_token=PAD, eos_token=END)


if __name__ == "__main__":
    main()
