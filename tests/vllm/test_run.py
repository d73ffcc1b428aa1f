"""`evalkit run` on real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.real_fleet import RealFleet

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(400)]

PROMPTS = ["12+30=", "Name a colour.", "x" * 200]
CHATS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]


def suite(directory: Path, labels: dict[str, str] | None = None) -> Path:
    """Greedy plain prompts, greedy chats, and sampled plain prompts; labels by prompt."""
    directory.mkdir(exist_ok=True)
    rows = {
        "plain": [{"input": prompt, "label": (labels or {}).get(prompt, "?")} for prompt in PROMPTS],
        "chat": [{"input": chat, "label": "?"} for chat in CHATS],
    }
    for name, some in rows.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    path = directory / "evals.yaml"
    path.write_text(
        """
        eval:
          defaults: {rm_type: exact, temperature: 0, max_response_len: 8, min_new_tokens: 8}
          datasets:
            plain: {path: plain.jsonl}
            chat: {path: chat.jsonl}
            sampled: {path: plain.jsonl, temperature: 1.0, top_k: 50, seed: 7, n_samples_per_eval_prompt: 4}
        """
    )
    return path


def samples(answer: dict[str, Any], name: str) -> dict[tuple[int, int], str]:
    lines = (Path(answer["results"]) / "samples" / f"{name}.jsonl").read_text().splitlines()
    return {(line["index"], line["sample"]): line["response"] for line in map(json.loads, lines)}


def test_a_snapshot_is_pinned_evaluated_and_its_samples_are_its_own(real_fleet: RealFleet, tmp_path: Path) -> None:
    evals = suite(tmp_path)
    first = real_fleet.json("run", "step_10", "--suite", evals)
    assert first["metrics"]["eval/step"] == 10
    for name, count in (("plain", 3), ("chat", 3), ("sampled", 12)):
        assert first["metrics"][f"eval/{name}/n_scored"] == count
        assert first["metrics"][f"eval/{name}/n_samples"] == count
        assert first["metrics"][f"eval/{name}/weight_version/mean"] == 10
        assert first["metrics"][f"eval/{name}/weight_version/mixed_version_ratio"] == 0
        assert first["metrics"][f"eval/{name}/response_len/max"] == 8
    sampled = samples(first, "sampled")
    assert len({sampled[0, sample] for sample in range(4)}) > 1

    again = real_fleet.json("run", "--suite", evals)
    assert again["digest"] == first["digest"]
    for name in ("plain", "chat", "sampled"):
        assert samples(again, name) == samples(first, name)

    other = real_fleet.json("run", "step_20", "--suite", evals)
    assert other["metrics"]["eval/plain/weight_version/mean"] == 20
    assert samples(other, "plain") != samples(first, "plain")
    assert samples(other, "chat") != samples(first, "chat")


def test_the_score_is_that_of_the_snapshots_own_answers(real_fleet: RealFleet, tmp_path: Path) -> None:
    """With the answers of step_10 as labels, step_10 scores 1 and step_20 does not."""
    answers = samples(real_fleet.json("run", "step_10", "--suite", suite(tmp_path / "first")), "plain")
    labels = {prompt: answers[index, 0] for index, prompt in enumerate(PROMPTS)}
    evals = suite(tmp_path / "second", labels)
    assert real_fleet.json("run", "step_10", "--suite", evals)["metrics"]["eval/plain"] == 1.0
    assert real_fleet.json("run", "step_20", "--suite", evals)["metrics"]["eval/plain"] < 1.0


def test_a_prompt_that_is_too_long_fails_with_vllms_words(real_fleet: RealFleet, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(
        "".join(json.dumps({"input": prompt, "label": ""}) + "\n" for prompt in ["a", "b", "x" * 50_000])
    )
    evals = tmp_path / "evals.yaml"
    evals.write_text("eval: {datasets: [{name: d, path: d.jsonl, rm_type: exact, max_response_len: 4}]}")
    answer = real_fleet.json("run", "step_10", "--suite", evals)
    assert (answer["n_scored"], answer["n_failed"]) == (2, 1)
    lines = (Path(answer["results"]) / "samples" / "d.jsonl").read_text().splitlines()
    (failed,) = (line for line in map(json.loads, lines) if line["status"] == "failed")
    assert failed["error"].startswith("HTTP 400: ")
    assert "context length" in failed["error"]
