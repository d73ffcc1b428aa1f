"""What a logger shows of the samples of one evaluation. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

Status = Literal["scored", "unscored", "failed"]
Metrics = dict[str, float | int | None]


class Sample(NamedTuple):
    """What is kept in memory of one sample.

    Attributes:
        prompt: position of its prompt in the dataset.
        status: `failed` never got an answer; `unscored` has an answer that its scorer gave no number for.
        tokens: length of the response; None where there is none.
        versions: weight version as the request came in and as the answer went out; None where there is no answer.
    """

    prompt: int
    status: Status
    score: float | None
    tokens: int | None = None
    truncated: bool = False
    versions: tuple[str, str] | None = None


class Counts(NamedTuple):
    n_samples: int
    n_scored: int
    n_unscored: int
    n_failed: int


def count(samples: Sequence[Sample]) -> Counts:
    by_status = Counter(sample.status for sample in samples)
    return Counts(len(samples), by_status["scored"], by_status["unscored"], by_status["failed"])


def too_many_failed(counts: Counts) -> bool:
    """Whether so many samples got no answer that the rest says nothing of the model."""
    return counts.n_failed * 2 > counts.n_samples


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that k of n answers, drawn without putting back, hold a correct one."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def ks_of(n: int) -> list[int]:
    """The k worth showing for n answers a prompt: the powers of two, and n."""
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})


def dataset_metrics(name: str, samples: Sequence[Sample], per_prompt: int) -> Metrics:
    """The metrics of one dataset; a mean over nothing is None.

    `eval/<name>` counts samples that failed, or that have no score, as 0; `eval/<name>-scored` leaves them out.
    """
    counts = count(samples)
    scores = [sample.score for sample in samples if sample.score is not None]
    n = counts.n_samples
    metrics: Metrics = {
        f"eval/{name}": _ratio(math.fsum(scores), n),
        f"eval/{name}-scored": _ratio(math.fsum(scores), len(scores)),
        f"eval/{name}-truncated_ratio": _ratio(sum(sample.truncated for sample in samples), n),
        f"eval/{name}-none_reward_ratio": _ratio(n - counts.n_scored, n),
    }
    if per_prompt > 1:
        metrics |= _pass_rates(name, samples, per_prompt)
    metrics |= {f"eval/{name}/{field}": value for field, value in counts._asdict().items()}
    return metrics | _lengths(name, samples) | _versions(name, samples)


def overall_metrics(version: str, seconds: float) -> Metrics:
    step: Metrics = {"eval/step": int(version)} if is_step(version) else {}
    return {**step, "eval/duration_seconds": seconds}


def is_step(version: str) -> bool:
    return version.isascii() and version.isdigit()


def _ratio(part: float, whole: int) -> float | None:
    return part / whole if whole else None


def _pass_rates(name: str, samples: Sequence[Sample], per_prompt: int) -> Metrics:
    # An answer is correct from a score of 1 on; one that failed is not.
    correct = Counter({sample.prompt: 0 for sample in samples})
    correct.update(sample.prompt for sample in samples if sample.score is not None and sample.score >= 1)
    return {
        f"eval/{name}-pass@{k}": statistics.fmean(pass_at_k(per_prompt, c, k) for c in correct.values())
        for k in ks_of(per_prompt)
        if correct
    }


def _lengths(name: str, samples: Sequence[Sample]) -> Metrics:
    tokens = [sample.tokens for sample in samples if sample.tokens is not None]
    key = f"eval/{name}/response_len"
    if not tokens:
        return {f"{key}/{shape}": None for shape in ("mean", "median", "max", "min")}
    return {
        f"{key}/mean": statistics.fmean(tokens),
        f"{key}/median": statistics.median(tokens),
        f"{key}/max": max(tokens),
        f"{key}/min": min(tokens),
    }


def _versions(name: str, samples: Sequence[Sample]) -> Metrics:
    pairs = Counter(sample.versions for sample in samples if sample.versions is not None)
    answered = pairs.total()
    mixed = sum(n for (before, after), n in pairs.items() if before != after)
    metrics: Metrics = {f"eval/{name}/weight_version/mixed_version_ratio": _ratio(mixed, answered)}
    if all(is_step(after) for _, after in pairs):
        total = sum(int(after) * n for (_, after), n in pairs.items())
        metrics[f"eval/{name}/weight_version/mean"] = _ratio(total, answered)
    return metrics
