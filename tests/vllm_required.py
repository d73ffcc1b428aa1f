"""A pytest plugin (`-p tests.vllm_required`): a test that needs vLLM and was skipped has failed.

With CI set, a run in which no test with vLLM passed has failed too.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

_MARK = ("needs", "vllm")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.get_closest_marker("vllm"):
        report.user_properties.append(_MARK)
    if report.skipped and _MARK in report.user_properties and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"needs vLLM, and was skipped: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    # A module that skips itself shows no markers: it may have held tests with vLLM.
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"a whole module was skipped: {report.longrepr}"
    return report


class _Counter:
    """Counts in the process that sees all reports, whether the tests run here or in workers."""

    def __init__(self) -> None:
        self.passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed and _MARK in map(tuple, report.user_properties)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self.passed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.passed:
            terminalreporter.write_line("no test with real vLLM has passed", red=True)


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("CI") and not hasattr(config, "workerinput") and not config.option.collectonly:
        config.pluginmanager.register(_Counter())
