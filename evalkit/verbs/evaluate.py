"""Evaluate a suite on pinned engines: keep them full, score, write every sample as it comes, end with the metrics."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from evalkit.adapters.completions import Answer, request_of
from evalkit.adapters.datasets import Row, count_rows, read_rows
from evalkit.adapters.inference import LIMITS, Engines, Limits
from evalkit.adapters.samples import SampleFile, SampleLine
from evalkit.adapters.scorers import Scorer, find_scorer
from evalkit.adapters.scoring import Scored, score_answer, score_in_thread
from evalkit.adapters.suite import Dataset, Suite
from evalkit.decisions.metrics import (
    Counts,
    Metrics,
    Sample,
    Status,
    count,
    dataset_metrics,
    overall_metrics,
    too_many_failed,
)
from evalkit.ground.errors import DataError, EvalkitError, EvalSkip, IncompleteError
from evalkit.ground.files import fsync_dir, write_struct
from evalkit.ground.layout import ResultPaths
from evalkit.ground.schema import MetricsRecord, PinProof

CHECK_INTERVAL = 1.0  # seconds
SCORERS_AT_ONCE = 4  # threads that call scorers

Check = Callable[[], object]
Progress = Callable[[int, int], object]
More = Callable[[], Mapping[str, float | int | None]]


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        metrics: what a logger shows; a mean over nothing is None.
        counts: over all datasets.
    """

    metrics: Metrics
    counts: Counts


@dataclass
class Asked:
    """A dataset of a suite that was looked through: its scorer is found and its rows are valid."""

    dataset: Dataset
    scorer: Scorer
    rows: int
    samples: list[Sample] = field(default_factory=list)
    first_error: str | None = None

    @property
    def total(self) -> int:
        return self.rows * self.dataset.n_samples_per_eval_prompt


def check_suite(suite: Suite) -> list[Asked]:
    """Find every scorer and look at every row.

    Raises:
        DataError: a scorer that cannot be imported, or a row that cannot be used; names file, line and field.
    """
    asked = []
    for dataset in suite.datasets:
        scorer = find_scorer(dataset.rm_type, suite.path.parent)
        asked.append(Asked(dataset, scorer, count_rows(dataset, scorer)))
    return asked


async def evaluate(
    suite: Suite,
    proof: PinProof,
    results: ResultPaths,
    *,
    concurrency: int = 64,
    sample_timeout: float = 600.0,
    check: Check | None = None,
    progress: Progress | None = None,
    more: More | None = None,
    limits: Limits = LIMITS,
) -> Evaluation:
    """Ask every sample of `suite` under the pin that `proof` describes; write samples and metrics into `results`.

    Requests in flight are min(left, concurrency), over all engines together. When it returns, samples and metrics are
    on the disk, directories included.

    Args:
        sample_timeout: seconds for one answer.
        check: called about every second; what it raises ends the evaluation, and is raised here.
        progress: called as often, with the samples done and their total.
        more: called at the end; gives metrics that are added to the evaluation's own.

    Raises:
        DataError: the suite's rows or scorers are not usable, or the rows change meanwhile.
        UnavailableError: no engine answers any more.
        PinViolationError: an engine keeps answering under another pin.
        IncompleteError: most samples of a dataset got no answer; samples and metrics are there all the same.
        EvalSkip: a scorer ended the evaluation.
    """
    started = time.monotonic()
    asked = check_suite(suite)
    results.samples.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(SampleFile(results.dataset(one.dataset.name))) for one in asked]
        async with Engines(proof, sample_timeout=sample_timeout, limits=limits) as engines:
            run = _Run(asked, files, engines, proof, results, check, progress)
            await _one_failure(run.run(concurrency))
    metrics = overall_metrics(proof.version, time.monotonic() - started)
    for one in asked:
        metrics |= dataset_metrics(one.dataset.name, one.samples, one.dataset.n_samples_per_eval_prompt)
    metrics |= more() if more is not None else {}
    _publish(results, MetricsRecord(suite=str(suite.path), proof=proof, metrics=metrics))
    for one in asked:
        if too_many_failed(count(one.samples)):
            raise IncompleteError(_failures(one, results))
    return Evaluation(metrics, count([sample for one in asked for sample in one.samples]))


def _failures(one: Asked, results: ResultPaths) -> str:
    failed = f"{count(one.samples).n_failed} of {one.total} samples of {one.dataset.name} got no answer"
    return f"{failed}, the first error: {one.first_error} (see {results.samples})"


def _publish(results: ResultPaths, record: MetricsRecord) -> None:
    fsync_dir(results.samples)
    write_struct(results.metrics, record)
    fsync_dir(results.root.parent)


async def _one_failure(work: Awaitable[None]) -> None:
    try:
        await work
    except BaseExceptionGroup as group:
        raise _first_failure(group) from None


def _first_failure(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure to report of several that came together: a signal's, else an expected one, not what these broke."""
    leaves = list(_leaves(group))
    signals = [leaf for leaf in leaves if not isinstance(leaf, Exception)]
    expected = [leaf for leaf in leaves if isinstance(leaf, EvalSkip | EvalkitError)]
    return [*signals, *expected, *leaves][0]


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


@dataclass(frozen=True, slots=True)
class _Job:
    """One sample to ask for."""

    asked: Asked
    file: SampleFile
    row: Row
    sample: int


@dataclass
class _Run:
    """An evaluation under way: so many askers share one stream of jobs, and all write from one thread."""

    asked: list[Asked]
    files: list[SampleFile]
    engines: Engines
    proof: PinProof
    results: ResultPaths
    check: Check | None
    progress: Progress | None
    done: int = 0

    @property
    def total(self) -> int:
        return sum(one.total for one in self.asked)

    async def run(self, concurrency: int) -> None:
        jobs = self.jobs()
        self.slots = asyncio.Semaphore(SCORERS_AT_ONCE)
        # Answers that wait for a slow scorer don't keep the engines waiting, until there are too many of them.
        self.backlog = asyncio.Semaphore(concurrency + SCORERS_AT_ONCE)
        async with asyncio.TaskGroup() as outer:
            watcher = outer.create_task(self.watch())
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, self.total)):
                    group.create_task(self.work(jobs, group))
            watcher.cancel()
        self.report()
        if self.done != self.total:
            found = f"{self.done} samples instead of {self.total}"
            raise DataError(f"a dataset changed while it was read: {found}", reason="incomplete")

    def jobs(self) -> Iterator[_Job]:
        for asked, file in zip(self.asked, self.files, strict=True):
            for row in read_rows(asked.dataset, asked.scorer):
                for sample in range(asked.dataset.n_samples_per_eval_prompt):
                    yield _Job(asked, file, row, sample)

    async def watch(self) -> None:
        while True:
            if self.check is not None:
                self.check()
            self.report()
            await asyncio.sleep(CHECK_INTERVAL)

    def report(self) -> None:
        for file in self.files:
            file.flush()
        # Replaced whole but not fsynced: nothing depends on it.
        temporary = self.results.root / ".progress"
        temporary.write_bytes(msgspec.json.encode({"done": self.done, "total": self.total}))
        os.replace(temporary, self.results.progress)
        if self.progress is not None:
            self.progress(self.done, self.total)

    async def work(self, jobs: Iterator[_Job], group: asyncio.TaskGroup) -> None:
        for job in jobs:
            answer = await self.engines.ask(request_of(job.asked.dataset, job.row, job.sample, self.proof.served_model))
            if job.asked.scorer.aside and answer.error is None:
                await self.backlog.acquire()
                group.create_task(self.score_aside(job, answer))
            else:
                self.finish(job, answer, *_scored(job, answer))

    async def score_aside(self, job: _Job, answer: Answer) -> None:
        try:
            async with self.slots:
                scored = await score_in_thread(lambda: _scored(job, answer))
        finally:
            self.backlog.release()
        self.finish(job, answer, *scored)

    def finish(self, job: _Job, answer: Answer, score: float | None, error: str | None) -> None:
        status: Status = "failed" if answer.error else "unscored" if score is None else "scored"
        # An answer counts only when both its stamps are the proof's, so both stand for the proof's version.
        version = self.proof.version if answer.stamps else None
        line = SampleLine(
            index=job.row.index,
            sample=job.sample,
            prompt=job.row.prompt,
            response=answer.text,
            label=job.row.label,
            score=score,
            status=status,
            finish_reason=answer.finish_reason,
            response_len=answer.tokens,
            engine=answer.engine,
            stamp=" ".join(answer.stamps) if answer.stamps else None,
            weight_version=version,
            asked=answer.asked,
            error=answer.error or error,
        )
        job.file.write(line)
        truncated = answer.finish_reason == "length"
        versions = (version, version) if version else None
        job.asked.samples.append(Sample(line.index, status, score, answer.tokens, truncated, versions))
        self.done += 1
        job.asked.first_error = job.asked.first_error or answer.error


def _scored(job: _Job, answer: Answer) -> Scored:
    if answer.text is None:
        return None, None
    return score_answer(job.asked.scorer, answer.text, job.row.label, job.row.sample)
