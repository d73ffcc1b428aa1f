"""A copy export of 1 GB in memory against `cp -r` of the same bytes, in pairs, one after the other.

    python benchmarks/bench_export.py [--gigabytes 1] [--rounds 7]

Both read from and write to tmpfs. The export is the whole command: start, checks, digest, copy, publish. The ratio is
the median of the pairs' ratios, so that a busy machine slows both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from evalkit.decisions.architectures import known_shapes
from evalkit.decisions.shards import byte_size, shard_file, split_by_size
from evalkit.ground.tensors import INDEX_NAME, encode_header, encode_index


def make_model(path: Path, size: int) -> None:
    """A Qwen3 directory of about `size` bytes in two shards, of random bits."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "eos_token_id": 1,
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    }  # fmt: skip
    layers = max(1, round((size - 2 * 151936 * 1024) / (2 * 15.73e6)))
    config["num_hidden_layers"] = layers
    shapes = known_shapes(config)
    assert shapes is not None
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    sizes = [(name, byte_size("BF16", shape)) for name, shape in shapes.items()]
    groups = split_by_size(sizes, sum(length for _, length in sizes) * 6 // 10)
    block = os.urandom(1 << 20)
    for index, names in enumerate(groups):
        with (path / shard_file(index, len(groups))).open("wb") as file:
            file.write(encode_header({name: ("BF16", shapes[name], byte_size("BF16", shapes[name])) for name in names}))
            left = sum(byte_size("BF16", shapes[name]) for name in names)
            for number in range(0, left, len(block)):
                file.write(block[: left - number])
    files = {name: shard_file(index, len(groups)) for index, names in enumerate(groups) for name in names}
    (path / INDEX_NAME).write_bytes(encode_index(files, sum(length for _, length in sizes)))


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        pairs = measure(Path(name), int(arguments.gigabytes * 1e9), arguments.rounds)
    copies, exports = zip(*pairs, strict=True)
    ratio = statistics.median(export / copy for copy, export in pairs)
    print(f"cp -r           {statistics.median(copies):.3f} s  (least {min(copies):.3f})")
    print(f"evalkit export  {statistics.median(exports):.3f} s  (least {min(exports):.3f})")
    print(f"export / cp     {ratio:.2f}  (least by least {min(exports) / min(copies):.2f}; at most 1.0 is wanted)")


def measure(root: Path, size: int, rounds: int) -> list[tuple[float, float]]:
    """Seconds of cp and of export, a pair a round."""
    source = root / "model"
    make_model(source, size)
    command = [sys.executable, "-m", "evalkit", "export", str(source), "--step", "1", "--copy", "copy"]
    command += ["--run-dir", str(root / "run"), "--eval-hf-dir", str(root / "snapshots")]
    pairs = []
    for number in range(rounds + 1):
        seconds = {}
        for side in ("cp", "export") if number % 2 else ("export", "cp"):
            words = ["cp", "-r", str(source), str(root / "copy")] if side == "cp" else command
            seconds[side] = timed(lambda words=words: subprocess.run(words, check=True, stdout=subprocess.DEVNULL))
            shutil.rmtree(root / "copy", ignore_errors=True)
            shutil.rmtree(root / "snapshots", ignore_errors=True)
        if number:  # the first round only warms up
            pairs.append((seconds["cp"], seconds["export"]))
    return pairs


if __name__ == "__main__":
    main()
