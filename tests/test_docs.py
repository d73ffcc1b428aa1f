"""What the documents say is what the commands have."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from evalkit.cli.main import cli

ROOT = Path(__file__).parent.parent
WRITTEN = ["README.md", "CONTRIBUTING.md", "docs/flags.md", "docs/format.md", "scripts/demo.sh"]
_CALL = re.compile(r"(?<![\w./-])evalkit ((?:[a-z]+ ?)+)")


def walk(path: list[str], command: click.Command) -> dict[str, click.Command]:
    found = {" ".join(path): command}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            found |= walk([*path, name], child)
    return found


COMMANDS = walk([], cli)
FLAGS = {
    flag for command in COMMANDS.values() for param in command.params for flag in [*param.opts, *param.secondary_opts]
}


def code_of(name: str) -> str:
    """What a document shows as code; all of a script."""
    text = (ROOT / name).read_text()
    if not name.endswith(".md"):
        return text
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", text), *re.findall(r"^    (.*)", text, flags=re.MULTILINE)])


def test_the_reference_is_up_to_date() -> None:
    script = ROOT / "scripts" / "make_reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", WRITTEN)
def test_commands_in_the_documents_exist(name: str) -> None:
    for words in _CALL.findall(code_of(name)):
        first, *rest = words.split()
        known = f"{first} {rest[0]}" if first == "fleet" and rest else first
        assert known in COMMANDS, f"{name}: evalkit {words}"


def test_the_readme_has_the_loop_of_commands() -> None:
    called = {words.split()[0] for words in _CALL.findall(code_of("README.md"))}
    assert {"fleet", "dispatch", "drain", "status"} <= called


@pytest.mark.parametrize("name", WRITTEN)
def test_flags_behind_an_evalkit_command_exist(name: str) -> None:
    for line in code_of(name).splitlines():
        for call in re.split(r"[;&|]", line):
            if _CALL.search(call):
                ours = call.split("evalkit", 1)[1].split(" -- ")[0].split("#")[0]
                assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", ours)) <= {*FLAGS, "--help", "--version"}, line


def test_the_table_of_flags_names_flags_that_exist() -> None:
    rows = [line.split("|") for line in (ROOT / "docs/flags.md").read_text().splitlines() if line.startswith("| `--")]
    assert len(rows) > 10
    ours = {flag for row in rows for flag in re.findall(r"--[a-z][a-z-]*", row[2])}
    assert ours <= FLAGS


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/flags.md", "docs/format.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target.split("#")[0]).exists() or target.startswith("#"), target


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for name in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"\bmake ([a-z]+)", code_of(name)))
        assert named, name
        assert named <= targets, name
