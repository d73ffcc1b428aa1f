"""Evaluations against fake engines with faults: nothing is lost, counted twice, or counted from other weights."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evalkit.adapters.inference import LIMITS
from evalkit.adapters.suite import load_suite
from evalkit.ground.errors import DataError, IncompleteError, PinViolationError, UnavailableError
from evalkit.ground.layout import ResultPaths
from evalkit.ground.schema import PinProof
from evalkit.verbs import evaluate as module
from evalkit.verbs.evaluate import Evaluation, evaluate
from tests.fakes import FakeFleet, fake_fleet, tiny_snapshot

HASTY = replace(LIMITS, pause=0.02, longest_pause=0.1, engine_lost=1.0)
WAIT = 20.0  # seconds


class Bench:
    """A fleet that is pinned, a place for a suite and its results."""

    def __init__(self, root: Path, fleet: FakeFleet, proof: PinProof) -> None:
        self.root, self.fleet, self.proof = root, fleet, proof
        self.results = ResultPaths(root / "results")

    def suite(self, rows: int, name: str = "sums", extra: str = "", chat: bool = False) -> Path:
        lines = []
        for i in range(rows):
            text = f"{i}+{i}="
            prompt = [{"role": "user", "content": text}] if chat else text
            lines.append(json.dumps({"input": prompt, "label": str(2 * i)}) + "\n")
        (self.root / f"{name}.jsonl").write_text("".join(lines))
        path = self.root / "evals.yaml"
        fields = f"name: {name}, path: {name}.jsonl, rm_type: exact, temperature: 0, max_response_len: 8{extra}"
        path.write_text(f"eval: {{datasets: [{{{fields}}}]}}")
        return path

    def run(self, suite: Path, **options: Any) -> Evaluation:
        options = {"limits": HASTY, "concurrency": 8, "sample_timeout": WAIT, **options}
        return asyncio.run(evaluate(load_suite(suite), self.proof, self.results, **options))

    def in_background(self, suite: Path, **options: Any) -> Callable[[], Evaluation]:
        """Start an evaluation; the returned function waits for its end."""
        outcome: list[Evaluation | BaseException] = []

        def work() -> None:
            try:
                outcome.append(self.run(suite, **options))
            except BaseException as error:  # noqa: BLE001  (raised again by `join`)
                outcome.append(error)

        thread = threading.Thread(target=work)
        thread.start()

        def join() -> Evaluation:
            thread.join(WAIT * 2)
            assert not thread.is_alive()
            if isinstance(outcome[0], BaseException):
                raise outcome[0]
            return outcome[0]

        return join

    def samples(self, name: str = "sums") -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.results.dataset(name).read_text().splitlines()]

    def logs(self) -> list[dict[str, Any]]:
        return [engine.log() for engine in self.fleet.engines]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeFleet]:
    with fake_fleet(tmp_path_factory.mktemp("fleet"), 2) as fleet:
        yield fleet


def bench(root: Path, fleet: FakeFleet, engines: int = 2) -> Bench:
    fleet.faults(clear=True)
    proof = fleet.pin(tiny_snapshot(root / "step_40"), "40")
    fleet = replace(fleet, engines=fleet.engines[:engines])
    return Bench(root, fleet, msgspec.structs.replace(proof, engines=proof.engines[:engines]))


@pytest.fixture
def one(tmp_path: Path, fleet: FakeFleet) -> Bench:
    """One engine."""
    return bench(tmp_path, fleet, 1)


@pytest.fixture
def two(tmp_path: Path, fleet: FakeFleet) -> Bench:
    return bench(tmp_path, fleet)


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Bench]:
    """Two engines that may die."""
    with fake_fleet(tmp_path / "run", 2) as fleet:
        yield bench(tmp_path, fleet)


def test_every_sample_is_asked_once_scored_and_written(two: Bench) -> None:
    evaluation = two.run(two.suite(30))
    assert evaluation.metrics["eval/sums"] == 1.0
    assert evaluation.counts == (30, 30, 0, 0)
    assert evaluation.metrics["eval/step"] == evaluation.metrics["eval/sums/weight_version/mean"] == 40
    samples = two.samples()
    assert sorted(sample["index"] for sample in samples) == list(range(30))
    assert sum(log["served"] for log in two.logs()) == 30
    sample = next(sample for sample in samples if sample["index"] == 7)
    engine = two.proof.engines[sample["engine"]]
    stamp = f"{engine.nonce}/{two.proof.epoch}/{two.proof.digest}"
    assert sample == {
        "index": 7, "sample": 0, "prompt": "7+7=", "response": "14", "label": "14", "score": 1.0, "status": "scored",
        "finish_reason": "stop", "response_len": 2, "engine": engine.index, "stamp": f"{stamp} {stamp}",
        "weight_version": "40", "asked": 1, "error": None,
    }  # fmt: skip
    record = json.loads(two.results.metrics.read_text())
    assert record["format"] == 1
    assert record["metrics"] == evaluation.metrics
    assert record["proof"]["digest"] == two.proof.digest
    assert json.loads(two.results.progress.read_text()) == {"done": 30, "total": 30}


def test_every_sampling_parameter_is_sent(one: Bench) -> None:
    extra = ", top_p: 0.9, top_k: 7, stop: ['x', 'y'], min_new_tokens: 1, seed: 5, n_samples_per_eval_prompt: 2"
    one.run(one.suite(1, extra=extra.replace("temperature: 0", "")), concurrency=1)
    first, second = (request["body"] for request in one.logs()[0]["requests"])
    assert first == {
        "model": "policy", "prompt": "0+0=", "n": 1, "stream": False, "temperature": 0.0, "top_p": 0.9, "top_k": 7,
        "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tokens": 8,
        "min_tokens": 1, "stop": ["x", "y"], "seed": 5,
    }  # fmt: skip
    assert second == {**first, "seed": 6}


def test_chat_prompts_go_to_the_chat_endpoint_with_their_tools(one: Bench) -> None:
    suite = one.suite(2, chat=True, extra=", tool_key: tools")
    rows = [json.loads(line) for line in (one.root / "sums.jsonl").read_text().splitlines()]
    tools = [{"type": "function", "function": {"name": "f"}}]
    (one.root / "sums.jsonl").write_text(json.dumps({**rows[0], "tools": tools}) + "\n" + json.dumps(rows[1]) + "\n")
    assert one.run(suite, concurrency=1).metrics["eval/sums"] == 1.0
    first, second = one.logs()[0]["requests"]
    assert first["path"] == second["path"] == "/v1/chat/completions"
    assert first["body"]["messages"] == rows[0]["input"]
    assert first["body"]["tools"] == tools
    assert "tools" not in second["body"]


def test_n_samples_differ_by_seed_and_give_pass_rates(one: Bench) -> None:
    # With a temperature the fake engine is wrong for odd seeds: half of the samples of each prompt.
    suite = one.suite(3, extra=", n_samples_per_eval_prompt: 4")
    suite.write_text(suite.read_text().replace("temperature: 0", "temperature: 1"))
    metrics = one.run(suite).metrics
    assert metrics["eval/sums"] == metrics["eval/sums-pass@1"] == 0.5
    assert metrics["eval/sums-pass@2"] == pytest.approx(1 - 1 / 6)
    assert metrics["eval/sums-pass@4"] == 1.0
    assert sorted((s["index"], s["sample"]) for s in one.samples()) == [(i, j) for i in range(3) for j in range(4)]


def test_answers_that_were_cut_are_counted_as_truncated(one: Bench) -> None:
    suite = one.suite(20)
    suite.write_text(suite.read_text().replace("max_response_len: 8", "max_response_len: 1"))
    metrics = one.run(suite).metrics
    assert metrics["eval/sums-truncated_ratio"] == 15 / 20
    assert metrics["eval/sums/response_len/max"] == 1


@pytest.mark.parametrize("concurrency", [1, 6])
def test_requests_in_flight_are_exactly_the_bound_spread_evenly(two: Bench, concurrency: int) -> None:
    two.fleet.faults(hang=True)
    join = two.in_background(two.suite(20), concurrency=concurrency)
    deadline = time.monotonic() + WAIT
    while sum(log["in_flight"] for log in two.logs()) < concurrency and time.monotonic() < deadline:
        time.sleep(0.01)
    held = [log["in_flight"] for log in two.logs()]
    assert sum(held) == concurrency
    assert max(held) - min(held) <= 1
    two.fleet.faults(release=True)
    assert join().counts.n_scored == 20
    assert sum(log["max_in_flight"] for log in two.logs()) <= concurrency + 1


def test_a_slow_engine_gets_no_more_than_its_share_of_what_is_in_flight(two: Bench) -> None:
    two.fleet.engines[1].faults(hang=True)
    join = two.in_background(two.suite(40), concurrency=4)
    two.fleet.engines[0].wait("served", 20, timeout=WAIT / 2)
    assert two.logs()[1]["in_flight"] <= 2
    two.fleet.faults(release=True)
    assert join().counts.n_scored == 40


def test_fewer_samples_than_the_bound_are_all_in_flight(one: Bench) -> None:
    one.fleet.faults(hang=True)
    join = one.in_background(one.suite(5), concurrency=64)
    one.fleet.engines[0].wait("in_flight", 5)
    one.fleet.faults(release=True)
    assert join().counts.n_scored == 5
    assert one.logs()[0]["max_in_flight"] == 5


@pytest.mark.parametrize("stamp", ["other", "none", "garbled"])
def test_an_answer_under_another_pin_is_asked_again(one: Bench, stamp: str) -> None:
    one.fleet.faults(stamp=stamp, stamp_count=2)
    evaluation = one.run(one.suite(10), concurrency=1)
    assert evaluation.metrics["eval/sums"] == 1.0
    assert evaluation.counts.n_scored == 10
    assert one.logs()[0]["served"] == 12
    assert sum(sample["asked"] for sample in one.samples()) == 12


@pytest.mark.parametrize("stamps", ["{} -", "- {}", "{}", "{} {} "])
def test_an_answer_that_a_pin_came_between_is_asked_again(two: Bench, stamps: str) -> None:
    """The stamp is right as the request came in or as the answer went out, not both."""
    engine = two.proof.engines[0]
    stamp = f"{engine.nonce}/{two.proof.epoch}/{two.proof.digest}"
    two.fleet.engines[0].faults(stamp=stamps.format(stamp, f"{stamp}x"), stamp_count=1)
    evaluation = two.run(two.suite(10))
    assert evaluation.counts.n_scored == 10
    assert sum(log["served"] for log in two.logs()) == 11
    assert evaluation.metrics["eval/sums/weight_version/mixed_version_ratio"] == 0.0


def test_answers_that_were_in_flight_together_under_another_pin_are_one_mishap(one: Bench) -> None:
    one.fleet.faults(stamp="other", stamp_count=8, delay=0.1)
    assert one.run(one.suite(10), concurrency=8).counts.n_scored == 10


@pytest.mark.parametrize("concurrency", [1, 8])
def test_an_engine_that_keeps_answering_under_another_pin_ends_it(two: Bench, concurrency: int) -> None:
    two.fleet.engines[1].faults(stamp="other")
    with pytest.raises(PinViolationError, match=r"engine 1 \(http://.*\) answers under the pin .*/0000"):
        two.run(two.suite(200), concurrency=concurrency, limits=replace(HASTY, pause=0.001, longest_pause=0.002))
    assert not two.results.metrics.exists()
    assert all(sample["engine"] == 0 for sample in two.samples())


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 503, "count": 3},
        {"status": 429, "count": 3},
        {"status": 500, "count": 3},
        {"reset": 3},
        {"finish": "abort"},
        {"garbage": True},
    ],
    ids=str,
)
def test_trouble_that_passes_is_retried(two: Bench, fault: dict[str, Any]) -> None:
    two.fleet.engines[0].faults(**fault)
    evaluation = two.run(two.suite(40))
    assert evaluation.counts == (40, 40, 0, 0)
    assert evaluation.metrics["eval/sums"] == 1.0
    assert sum(sample["asked"] for sample in two.samples()) == sum(log["served"] for log in two.logs()) > 40


def test_one_engine_in_trouble_for_a_while_costs_no_sample(one: Bench) -> None:
    one.fleet.faults(status=503, count=16, delay=0.05)
    evaluation = one.run(one.suite(40), limits=replace(HASTY, engine_lost=WAIT))
    assert evaluation.counts == (40, 40, 0, 0)
    in_flight = [request["in_flight"] for request in one.logs()[0]["requests"]]
    assert max(in_flight[:8]) == 8
    assert set(in_flight[8:16]) == {1}  # asked carefully until it answers again
    assert max(in_flight[17:]) > 1


def test_an_engine_that_dies_in_the_middle_costs_no_sample(mortal: Bench) -> None:
    mortal.fleet.engines[1].faults(die_after=20)
    evaluation = mortal.run(mortal.suite(200))
    assert mortal.fleet.engines[1].process.wait(WAIT) == 1
    assert evaluation.counts == (200, 200, 0, 0)
    assert sorted(sample["index"] for sample in mortal.samples()) == list(range(200))


def test_an_engine_that_stops_answering_loses_its_samples_to_the_other(two: Bench) -> None:
    two.fleet.engines[1].faults(hang_after=1)
    evaluation = two.run(two.suite(60), sample_timeout=1.0)
    assert evaluation.counts == (60, 60, 0, 0)
    assert {sample["engine"] for sample in two.samples()} == {0}


def test_an_evaluation_whose_engines_are_pinned_anew_by_others_ends(two: Bench) -> None:
    two.fleet.faults(hang_after=6)
    join = two.in_background(two.suite(100), concurrency=2)
    for engine in two.fleet.engines:
        engine.wait("in_flight")
    two.fleet.faults(hang_after=None)
    two.fleet.pin(tiny_snapshot(two.root / "step_50", value=1.0), "50", drain_timeout=0.1)
    with pytest.raises(PinViolationError, match="somebody else has pinned it"):
        join()
    assert {sample["stamp"] for sample in two.samples()} == {
        f"{engine.nonce}/{two.proof.epoch}/{two.proof.digest} {engine.nonce}/{two.proof.epoch}/{two.proof.digest}"
        for engine in two.proof.engines
    }


def test_a_dataset_that_changes_meanwhile_gives_no_result(one: Bench) -> None:
    one.fleet.faults(hang=True)
    join = one.in_background(one.suite(10), concurrency=1)
    one.fleet.engines[0].wait("in_flight")
    with (one.root / "sums.jsonl").open("a") as file:
        file.write(json.dumps({"input": "1+1=", "label": "2"}) + "\n")
    one.fleet.faults(release=True)
    with pytest.raises(DataError, match="a dataset changed while it was read: 11 samples instead of 10"):
        join()
    assert not one.results.metrics.exists()


def test_a_full_disk_ends_it(one: Bench) -> None:
    one.results.samples.mkdir(parents=True)
    one.results.dataset("sums").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        one.run(one.suite(10))
    assert not one.results.metrics.exists()


def test_all_engines_gone_ends_it_as_unavailable(mortal: Bench) -> None:
    mortal.fleet.faults(die_after=10)
    with pytest.raises(UnavailableError, match=r"no engine answered for 1 s: engine 0 .*: .*; engine 1 ") as caught:
        mortal.run(mortal.suite(5000))
    assert caught.value.skip_reason == "unhealthy"
    assert len(mortal.samples()) < 100
    assert all(sample["status"] == "scored" for sample in mortal.samples())


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("fault", [{"status": 503}, {"hang": True}], ids=str)
def test_engines_that_never_answer_end_it_as_unavailable(one: Bench, fault: dict[str, Any], concurrency: int) -> None:
    one.fleet.faults(**fault)
    with pytest.raises(UnavailableError, match="no engine answered for 1 s"):
        one.run(one.suite(500), sample_timeout=0.8, concurrency=concurrency)


def test_an_engine_that_takes_long_after_a_failure_is_not_lost(one: Bench) -> None:
    one.fleet.faults(reset=2, delay=0.6)
    assert one.run(one.suite(3), limits=replace(HASTY, engine_lost=0.2), concurrency=3).counts.n_scored == 3


def test_a_request_that_is_refused_fails_with_the_servers_words_and_counts_0(one: Bench) -> None:
    suite = one.suite(9)
    with (one.root / "sums.jsonl").open("a") as file:
        file.write(json.dumps({"input": "x" * 10_001, "label": "1"}) + "\n")
    evaluation = one.run(suite)
    assert evaluation.counts == (10, 9, 0, 1)
    assert evaluation.metrics["eval/sums"] == pytest.approx(0.9)
    assert evaluation.metrics["eval/sums-scored"] == 1.0
    (failed,) = (sample for sample in one.samples() if sample["index"] == 9)
    assert failed["status"] == "failed"
    assert failed["error"] == "HTTP 400: maximum context length is 10000 tokens"
    assert (failed["response"], failed["stamp"], failed["asked"]) == (None, None, 1)


def test_a_sample_that_always_fails_is_given_up_and_the_others_go_on(two: Bench) -> None:
    two.fleet.faults(poison="7+7=")
    evaluation = two.run(two.suite(30))
    assert evaluation.counts == (30, 29, 0, 1)
    (failed,) = (sample for sample in two.samples() if sample["status"] == "failed")
    assert (failed["prompt"], failed["error"], failed["asked"]) == ("7+7=", "HTTP 500: fault 500", HASTY.attempts)


def test_a_sample_that_takes_too_long_is_given_up_and_the_others_go_on(two: Bench) -> None:
    two.fleet.faults(slow="7+7=")
    evaluation = two.run(two.suite(30), sample_timeout=0.5, concurrency=2)
    assert evaluation.counts == (30, 29, 0, 1)
    (failed,) = (sample for sample in two.samples() if sample["status"] == "failed")
    assert (failed["prompt"], failed["error"], failed["asked"]) == ("7+7=", "no answer within 0.5 s", 2)


def test_answers_that_are_none_end_it(one: Bench) -> None:
    one.fleet.faults(garbage=True)
    with pytest.raises(UnavailableError, match="the answer is no completion"):
        one.run(one.suite(500), limits=replace(HASTY, attempts=3))


def test_an_evaluation_that_mostly_failed_is_incomplete_but_leaves_its_samples(one: Bench) -> None:
    one.fleet.faults(status=400)
    with pytest.raises(IncompleteError, match=r"20 of 20 samples of sums got no answer.*HTTP 400: fault 400") as caught:
        one.run(one.suite(20))
    assert caught.value.skip_reason == "incomplete"
    assert len(one.samples()) == 20
    assert json.loads(one.results.metrics.read_text())["metrics"]["eval/sums/n_failed"] == 20


def test_more_metrics_are_in_the_file_and_in_the_answer(one: Bench) -> None:
    found = one.run(one.suite(2), more=lambda: {"eval/lag_steps": 3, "eval/export_time_seconds": None})
    assert found.metrics["eval/lag_steps"] == 3
    assert json.loads(one.results.metrics.read_text())["metrics"] == found.metrics


class EndedError(BaseException):
    """As a signal's handler raises it."""


def test_what_a_signal_raises_ends_it_and_frees_everything(one: Bench) -> None:
    one.fleet.faults(hang=True)

    def end() -> None:
        if one.fleet.engines[0].log()["in_flight"]:
            raise EndedError

    with pytest.raises(EndedError):
        one.run(one.suite(10), check=end)
    one.fleet.engines[0].wait("in_flight", 0)
    assert not one.results.metrics.exists()


class SettledError(Exception):
    pass


def test_what_check_raises_ends_it_at_once_and_cancels_the_requests(
    one: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHECK_INTERVAL", 0.01)
    one.fleet.faults(hang=True)
    settled = threading.Event()

    def check() -> None:
        if settled.is_set():
            raise SettledError

    join = one.in_background(one.suite(10), check=check)
    one.fleet.engines[0].wait("in_flight", 8)
    settled.set()
    with pytest.raises(SettledError):
        join()
    deadline = time.monotonic() + WAIT
    while one.logs()[0]["in_flight"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [request["status"] for request in one.logs()[0]["requests"]] == ["cancelled"] * 8
    assert not one.results.metrics.exists()


def test_samples_are_written_as_they_come_and_progress_is_told(one: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_INTERVAL", 0.01)
    one.fleet.faults(hang_after=6)
    told: list[tuple[int, int]] = []
    join = one.in_background(one.suite(10), concurrency=1, progress=lambda done, total: told.append((done, total)))
    deadline = time.monotonic() + WAIT
    while (5, 10) not in told and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(one.samples()) == 5
    assert json.loads(one.results.progress.read_text()) == {"done": 5, "total": 10}
    one.fleet.faults(release=True)
    join()
    assert told[-1] == (10, 10)


def test_own_scorers_score_aside_and_failing_ones_leave_samples_unscored(
    one: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one.root / "own_evaluate.py").write_text(
        "def score(response, label, sample):\n"
        "    if label == '4': raise KeyError('four')\n"
        "    if label == '6': return None\n"
        "    return len(sample['input']) / 8\n"
    )
    monkeypatch.setattr("sys.path", list(sys.path))
    suite = one.suite(10)
    suite.write_text(suite.read_text().replace("exact", "'own_evaluate:score'"))
    evaluation = one.run(suite)
    assert evaluation.counts == (10, 8, 2, 0)
    assert evaluation.metrics["eval/sums"] == pytest.approx(0.4)
    assert evaluation.metrics["eval/sums-scored"] == pytest.approx(0.5)
    assert evaluation.metrics["eval/sums-none_reward_ratio"] == pytest.approx(0.2)
    by_index = {sample["index"]: sample for sample in one.samples()}
    assert (by_index[2]["status"], by_index[2]["error"]) == ("unscored", "KeyError: 'four'")
    assert (by_index[3]["status"], by_index[3]["error"]) == ("unscored", None)
    assert by_index[2]["response"] == "4"


def test_a_slow_scorer_does_not_keep_the_engines_waiting(one: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    go = one.root / "go"
    (one.root / "own_slow.py").write_text(
        "import pathlib, time\n"
        "def score(response, label, sample):\n"
        f"    while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n"
        "    return response == label\n"
    )
    monkeypatch.setattr("sys.path", list(sys.path))
    suite = one.suite(20)
    suite.write_text(suite.read_text().replace("exact", "'own_slow:score'"))
    join = one.in_background(suite, concurrency=2)
    try:
        one.fleet.engines[0].wait("served", 6)
        assert one.samples() == []
    finally:
        go.touch()
    assert join().metrics["eval/sums"] == 1.0


def test_memory_does_not_grow_with_answers(one: Bench) -> None:
    """What is kept of a sample is a few numbers."""

    def peak(samples: int) -> int:
        suite = one.suite(4, extra=f", n_samples_per_eval_prompt: {samples // 4}")
        text = json.dumps({"input": "y" * 8000, "label": "1"}) + "\n"
        (one.root / "sums.jsonl").write_text(text * 4)
        suite.write_text(suite.read_text().replace("max_response_len: 8", "max_response_len: 8000"))
        tracemalloc.start()
        try:
            assert one.run(suite).counts.n_samples == samples
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(20)
    small, large = peak(40), peak(240)
    assert large - small < 200 * 1000  # bytes; the answers alone are 8000 each
