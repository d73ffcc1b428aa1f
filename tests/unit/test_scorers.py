from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import pytest

from evalkit.adapters import scorers, scoring
from evalkit.adapters.scorers import SCORERS, Scorer, as_score, find_scorer
from evalkit.adapters.scoring import score_answer, score_in_thread
from evalkit.ground.errors import DataError, EvalSkip

CASES = [
    ("exact", "42", "42", 1),
    ("exact", " 42\n", 42, 1),
    ("exact", "42.", "42", 0),
    ("exact", "Yes", "yes", 0),
    ("numeric", "so it is 1,000.50.", 1000.5, 1),
    ("numeric", "1e3", "1,000", 1),
    ("numeric", "first 12, then 13", 12, 0),
    ("numeric", "5-3", 3, 1),
    ("numeric", "x=-5", -5, 1),
    ("numeric", "10.0", "10", 1),
    ("numeric", ".5", "0.50", 1),
    ("numeric", "v1.2.3", 3, 1),
    ("numeric", "12345678901234567891", "12345678901234567890", 0),
    ("numeric", "1e99999999999999999999", 1, 0),
    ("numeric", "none at all", 0, 0),
    ("numeric", "", 0, 0),
    ("regex", "The answer is B.", r"\bB\b", 1),
    ("regex", "Bob", r"\bB\b", 0),
]


@pytest.mark.parametrize(("name", "response", "label", "score"), CASES)
def test_built_in_scorers(name: str, response: str, label: object, score: int) -> None:
    assert score_answer(SCORERS[name], response, label, {}) == (score, None)


@pytest.mark.parametrize(
    ("value", "score"), [(None, None), (True, 1.0), (False, 0.0), (3, 3.0), (0.25, 0.25), ("2", 2.0)]
)
def test_a_score_is_a_number_or_none(value: object, score: float | None) -> None:
    assert as_score(value) == score


@pytest.mark.parametrize("value", ["x", [], float("nan"), float("inf"), object])
def test_anything_else_is_no_score(value: object) -> None:
    scorer = Scorer("own", lambda response, label, sample: value, aside=True)
    score, error = score_answer(scorer, "", None, {})
    assert score is None
    assert error is not None
    assert "the scorer returned" in error


def test_a_scorer_that_raises_gives_no_score_but_its_error() -> None:
    def fail(response: str, label: object, sample: dict[str, object]) -> float:
        return {"a": 1.0}[response]

    assert score_answer(Scorer("own", fail, aside=True), "b", None, {}) == (None, "KeyError: 'b'")


@pytest.fixture
def forget_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


@pytest.mark.usefixtures("forget_modules")
def test_own_scorers_are_found_beside_the_suite_then_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite, cwd = tmp_path / "suite", tmp_path / "cwd"
    for place in (suite, cwd):
        place.mkdir()
        (place / "own_both.py").write_text(f"def score(response, label, sample): return {place.name!r} == 'suite'\n")
    (cwd / "own_cwd.py").write_text("def score(response, label, sample): return len(response) + sample['x']\n")
    monkeypatch.chdir(cwd)
    assert find_scorer("own_both:score", suite).score("", None, {}) is True
    assert find_scorer("own_cwd:score", suite).score("abc", None, {"x": 1}) == 4


@pytest.mark.usefixtures("forget_modules")
def test_an_own_scorer_that_cannot_be_had_is_told(tmp_path: Path) -> None:
    (tmp_path / "own_broken.py").write_text("1 / 0\n")
    (tmp_path / "own_script.py").write_text("import sys; sys.exit(0)\n")
    for name, problem in [
        ("own_missing:score", "cannot be imported: ModuleNotFoundError: No module named 'own_missing'"),
        ("own_broken:score", "cannot be imported: ZeroDivisionError"),
        ("own_script:score", "cannot be imported: SystemExit"),
        ("json:nothing", "json has no function nothing"),
        ("json:__name__", "json has no function __name__"),
    ]:
        with pytest.raises(DataError) as caught:
            find_scorer(name, tmp_path)
        assert problem in str(caught.value)


def test_a_scorer_that_never_returns_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "SCORER_TIMEOUT", 0.05)
    release = threading.Event()

    def stuck() -> scoring.Scored:
        release.wait(30)
        return 1.0, None

    try:
        assert asyncio.run(score_in_thread(stuck)) == (None, "the scorer did not return within 0.05 s")
    finally:
        release.set()


def test_a_search_that_would_take_years_is_given_up_and_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorers, "REGEX_TIMEOUT", 0.2)

    async def score_and_look() -> tuple[scoring.Scored, int]:
        scoring_it = asyncio.create_task(
            score_in_thread(lambda: score_answer(SCORERS["regex"], "a" * 60 + "b", "(a|aa)+$", {}))
        )
        looks = 0
        while not scoring_it.done():
            await asyncio.sleep(0.01)
            looks += 1
        return await scoring_it, looks

    assert SCORERS["regex"].aside
    (score, error), looks = asyncio.run(score_and_look())
    assert (score, error) == (None, "TimeoutError: the search for '(a|aa)+$' took more than 0.2 s")
    assert looks > 3


def skipping(response: str, label: object, sample: dict[str, object]) -> float:
    raise EvalSkip("No judge", "it does not answer")


def test_a_scorer_may_end_the_evaluation() -> None:
    with pytest.raises(EvalSkip, match="it does not answer"):
        asyncio.run(score_in_thread(lambda: score_answer(Scorer("own", skipping, aside=True), "", None, {})))


def test_a_scorer_that_exits_gives_no_score() -> None:
    def leave() -> scoring.Scored:
        sys.exit(3)

    assert asyncio.run(score_in_thread(leave)) == (None, "SystemExit: 3")


def test_a_scorer_in_a_thread_gives_its_score() -> None:
    assert asyncio.run(score_in_thread(lambda: (0.5, None))) == (0.5, None)
