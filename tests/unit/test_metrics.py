from __future__ import annotations

from itertools import combinations

import pytest

from evalkit.decisions.metrics import (
    Counts,
    Sample,
    count,
    dataset_metrics,
    ks_of,
    overall_metrics,
    pass_at_k,
    too_many_failed,
)


def scored(score: float, *, prompt: int = 0, tokens: int = 3, version: str = "40", truncated: bool = False) -> Sample:
    return Sample(prompt, "scored", score, tokens, truncated, (version, version))


FAILED = Sample(0, "failed", None)
UNSCORED = Sample(0, "unscored", None, 5, False, ("40", "40"))


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_answer(n: int) -> None:
    for correct in range(n + 1):
        for k in range(1, n + 1):
            draws = list(combinations([True] * correct + [False] * (n - correct), k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("n", "ks"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_pass_rates_are_shown_for_powers_of_two_and_n(n: int, ks: list[int]) -> None:
    assert ks_of(n) == ks


def test_failed_and_unscored_samples_count_0_and_the_scored_mean_leaves_them_out() -> None:
    metrics = dataset_metrics("d", [scored(1.0), scored(0.5), FAILED, UNSCORED], 1)
    assert metrics["eval/d"] == pytest.approx(1.5 / 4)
    assert metrics["eval/d-scored"] == pytest.approx(0.75)
    assert metrics["eval/d-none_reward_ratio"] == pytest.approx(0.5)
    counts = {name: metrics[f"eval/d/{name}"] for name in Counts._fields}
    assert counts == {"n_samples": 4, "n_scored": 2, "n_unscored": 1, "n_failed": 1}
    assert "eval/d-pass@1" not in metrics


def test_lengths_are_of_the_answers_alone() -> None:
    samples = [scored(1, tokens=2), scored(1, tokens=4), scored(0, tokens=9, truncated=True), FAILED]
    metrics = dataset_metrics("d", samples, 1)
    shapes = {shape: metrics[f"eval/d/response_len/{shape}"] for shape in ("mean", "median", "max", "min")}
    assert shapes == {"mean": 5, "median": 4, "max": 9, "min": 2}
    assert metrics["eval/d-truncated_ratio"] == pytest.approx(0.25)


def test_means_over_nothing_are_none() -> None:
    metrics = dataset_metrics("d", [FAILED], 1)
    assert metrics["eval/d"] == 0.0
    assert metrics["eval/d-scored"] is None
    assert metrics["eval/d/response_len/mean"] is None
    assert metrics["eval/d/weight_version/mean"] is None
    assert metrics["eval/d/weight_version/mixed_version_ratio"] is None


def test_pass_rates_average_over_prompts_and_a_failed_answer_is_not_correct() -> None:
    first = [scored(1.0), scored(0.0), FAILED, scored(0.9)]
    second = [scored(1.0, prompt=1) for _ in range(4)]
    metrics = dataset_metrics("d", first + second, 4)
    assert metrics["eval/d-pass@1"] == pytest.approx((0.25 + 1) / 2)
    assert metrics["eval/d-pass@2"] == pytest.approx((0.5 + 1) / 2)
    assert metrics["eval/d-pass@4"] == pytest.approx(1)


def test_weight_version_is_the_step_that_the_answers_came_from() -> None:
    mixed = Sample(0, "scored", 1.0, 3, False, ("40", "42"))
    metrics = dataset_metrics("d", [scored(1.0), mixed], 1)
    assert metrics["eval/d/weight_version/mean"] == 41
    assert metrics["eval/d/weight_version/mixed_version_ratio"] == 0.5
    assert "eval/d/weight_version/mean" not in dataset_metrics("d", [scored(1.0, version="base")], 1)


def test_only_a_whole_number_is_a_step() -> None:
    assert overall_metrics("40", 1.5) == {"eval/step": 40, "eval/duration_seconds": 1.5}
    assert overall_metrics("base", 1.5) == {"eval/duration_seconds": 1.5}


def test_more_failed_than_answered_is_too_many() -> None:
    assert too_many_failed(count([FAILED]))
    assert too_many_failed(count([FAILED, FAILED, scored(1.0)]))
    assert not too_many_failed(count([FAILED, scored(0.0)]))
