"""The agent in an engine of two tensor-parallel ranks, with a head tied to the embedding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines import greedy, running_fleet, weights_digest
from tests.models import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(600)]

PROMPT = "What-is-12+30="


def with_head_in_file(path: Path, seed: int, *, same: bool) -> Path:
    """A tied model whose file has a head as well: the embedding again, or something else."""
    from safetensors.torch import load_file, save_file

    file = make_model(path, seed, tie=True) / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": head.clone() if same else head.flip(0)}, file, metadata={"format": "pt"})
    return path


def test_both_ranks_prove_each_pin_and_a_wrong_digest_breaks_the_engine(tmp_path: Path) -> None:
    boot = make_model(tmp_path / "boot", 1, tie=True)
    snapshots = [
        make_model(tmp_path / "step_10", 2, tie=True, shards=2),
        with_head_in_file(tmp_path / "step_20", 3, same=True),
        make_model(tmp_path / "step_30", 4, tie=True),
    ]
    with running_fleet(tmp_path / "run", boot, ranks=2) as engine:
        assert engine.state()["ranks"] == 2
        for path in snapshots:
            answer = engine.pin(path)
            assert answer.status == 200, answer
            proofs = [(rank["rank"], rank["version"], rank["digest"]) for rank in answer.body["ranks"]]
            assert proofs == [(rank, path.name, weights_digest(path)) for rank in (0, 1)]
            assert engine.complete(PROMPT).tokens == greedy(path, PROMPT, 16), path

        untied = make_model(tmp_path / "step_40", 5)
        half_tied = with_head_in_file(tmp_path / "step_50", 6, same=False)
        for path, fragment in (
            (untied, "tie_word_embeddings is False"),
            (half_tied, "lm_head.weight is not the embed"),
        ):
            refused = engine.pin(path)
            assert (refused.status, refused.body["error"]) == (422, "refused")
            assert fragment in refused.body["detail"]
        assert engine.complete(PROMPT).tokens == greedy(snapshots[-1], PROMPT, 16)

        wrong = engine.pin(snapshots[0], digest=weights_digest(snapshots[1]))
        assert (wrong.status, wrong.body["error"]) == (422, "digest_mismatch")
        assert weights_digest(snapshots[0]) in wrong.body["detail"]
        state, again, completion = engine.state(), engine.pin(snapshots[0]), engine.complete(PROMPT)
        assert (state["pin"], state["open"]) == (None, False)
        assert weights_digest(snapshots[0]) in state["broken"]
        assert (again.status, again.body["error"]) == (503, "broken")
        assert (completion.status, completion.body["error"]["type"]) == (503, "broken")
        assert completion.stamps == ("-", "-")
        assert (engine.call("/health").status, engine.call("/evalkit/probe", {}).status) == (503, 503)
