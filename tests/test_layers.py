"""The layers: an import only ever points down, and a command's help loads nothing heavy."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from evalkit.cli.main import cli

PACKAGE = Path(__file__).parent.parent / "evalkit"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A layer, and the layers that it may import, its own included.
ALLOWED = {
    "cli": {"cli", "verbs", "decisions", "ground"},
    "verbs": {"verbs", "decisions", "adapters", "state", "ground"},
    "adapters": {"adapters", "state", "decisions", "ground"},
    "state": {"state", "ground"},
    "decisions": {"decisions", "ground"},
    "agent": {"agent", "ground"},
    "ground": {"ground"},
}
DOES_IO = {
    "aiohttp", "asyncio", "fcntl", "filelock", "http", "io", "multiprocessing", "os", "psutil", "shutil", "signal",
    "socket", "subprocess", "tempfile", "threading", "time", "urllib",
}  # fmt: skip
HEAVY = {
    "aiohttp",
    "asyncio",
    "huggingface_hub",
    "numpy",
    "rich",
    "safetensors",
    "torch",
    "transformers",
    "vllm",
    "yaml",
}


def imports(path: Path) -> set[str]:
    """Dotted names of all that a module imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "evalkit" and len(parts) > 1 and parts[1] in ALLOWED else None


def commands(path: list[str], command: click.Command) -> list[list[str]]:
    if not isinstance(command, click.Group):
        return [path]
    context = click.Context(command)
    children = [(name, command.get_command(context, name)) for name in command.list_commands(context)]
    return [found for name, child in children if child is not None for found in commands([*path, name], child)]


COMMANDS = commands([], cli)


@pytest.mark.parametrize("layer", ALLOWED)
def test_a_layer_imports_only_what_lies_below_it(layer: str) -> None:
    modules = [path for path in MODULES if path.relative_to(PACKAGE).parts[0] == layer]
    assert modules
    upward = {
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in modules
        for name in imports(path)
        if layer_of(name) not in {None, *ALLOWED[layer]}
    }
    assert not upward


def test_every_module_belongs_to_a_layer() -> None:
    homeless = {
        str(path.relative_to(PACKAGE))
        for path in MODULES
        if path.relative_to(PACKAGE).parts[0] not in {*ALLOWED, "__init__.py", "__main__.py"}
    }
    assert not homeless


def test_decisions_do_no_io() -> None:
    for path in (PACKAGE / "decisions").glob("*.py"):
        names = imports(path)
        assert not {name.split(".")[0] for name in names} & DOES_IO, path.name
        # Of the ground they know types and constants, which begin with a capital: no function that reads or waits.
        ground = {name.rpartition(".")[2] for name in names if name.startswith("evalkit.ground.")}
        assert not {name for name in ground if not name[0].isupper()}, path.name
        calls = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert not calls & {"open", "print", "input"}, path.name


def test_only_the_command_line_prints_or_exits() -> None:
    guilty = set()
    for path in MODULES:
        text = path.read_text()
        # A worker is a process of its own, and ends with its own code.
        if path.relative_to(PACKAGE).parts[0] in {"cli", "__main__.py"} or 'if __name__ == "__main__"' in text:
            continue
        assert "click" not in {name.split(".")[0] for name in imports(path)}, path
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        guilty |= {f"{path}:{call.lineno}" for call in calls if ast.unparse(call.func) in {"print", "exit", "sys.exit"}}
    assert not guilty


@pytest.mark.parametrize("words", [[], ["fleet"], *COMMANDS], ids=lambda words: " ".join(words) or "evalkit")
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    code = f"""
import sys
from evalkit.cli.main import main
try:
    main({[*words, "--help"]!r})
except SystemExit as done:
    sys.stderr.write(" ".join(sorted({HEAVY!r} & set(sys.modules))))
    raise
"""
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: evalkit{''.join(' ' + word for word in words)}")
    assert done.stderr == ""


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_ends_with_an_example_and_the_exit_codes(words: list[str]) -> None:
    command: click.Command = cli
    context = click.Context(cli)
    for word in words:
        assert isinstance(command, click.Group)
        child = command.get_command(context, word)
        assert child is not None
        command, context = child, click.Context(child, info_name=word, parent=context)
    text = command.get_help(context)
    assert f"Example:\n    evalkit {' '.join(words)}" in text
    assert "Exit codes:\n      0  done" in text
    assert "      2  usage" in text
