"""The plugin that makes a skipped test with vLLM a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
MARKED = "import pytest\n\n@pytest.mark.vllm\ndef test_engine():\n    {}\n"


def outcome(directory: Path, source: str, *words: str, ci: bool = False) -> tuple[int, str]:
    """Exit code and output of a run over one test file with the plugin."""
    (directory / "pytest.ini").write_text("[pytest]\nmarkers = vllm: needs vLLM\n")
    (directory / "test_it.py").write_text(source)
    environment = {name: value for name, value in os.environ.items() if name not in {"CI", "PYTEST_ADDOPTS"}}
    if ci:
        environment["CI"] = "true"
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "pytest", "-p", "tests.vllm_required", "-p", "no:cacheprovider", *words]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("words", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_a_test_with_vllm_that_passes_is_fine(tmp_path: Path, words: list[str]) -> None:
    code, _ = outcome(tmp_path, MARKED.format("pass"), *words, ci=True)
    assert code == 0


@pytest.mark.parametrize("words", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_a_test_with_vllm_that_skips_has_failed(tmp_path: Path, words: list[str]) -> None:
    code, shown = outcome(tmp_path, MARKED.format("pytest.skip('no engine')"), *words)
    assert code == 1
    assert "needs vLLM, and was skipped" in shown


def test_a_module_that_skips_has_failed(tmp_path: Path) -> None:
    code, shown = outcome(tmp_path, "import pytest\npytest.importorskip('no_such_engine')\n")
    assert code == 2
    assert "a whole module was skipped" in shown


def test_another_test_may_skip(tmp_path: Path) -> None:
    code, _ = outcome(tmp_path, "import pytest\n\ndef test_other():\n    pytest.skip('not here')\n")
    assert code == 0


@pytest.mark.parametrize("ci", [False, True])
def test_with_ci_a_test_with_vllm_must_have_passed(tmp_path: Path, ci: bool) -> None:
    code, shown = outcome(tmp_path, "def test_other():\n    pass\n", ci=ci)
    assert code == int(ci)
    assert ("no test with real vLLM has passed" in shown) == ci


def test_tests_with_vllm_share_a_worker_and_so_their_engines(tmp_path: Path) -> None:
    source = """
import os, pytest

@pytest.mark.vllm
@pytest.mark.xdist_group("vllm")
@pytest.mark.parametrize("number", range(8))
def test_engine(number):
    open("workers", "a").write(os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""
    code, _ = outcome(tmp_path, source, "-n", "2", "--dist", "loadgroup")
    assert code == 0
    workers = (tmp_path / "workers").read_text().split()
    assert len(workers) == 8
    assert len(set(workers)) == 1
