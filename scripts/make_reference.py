"""Write docs/reference.md from the help of every command, or, with --check, say whether it is up to date."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from evalkit.cli.main import cli

REFERENCE = Path(__file__).parent.parent / "docs" / "reference.md"
INTRODUCTION = """\
# Reference

Generated from `--help` by `make docs`. A flag goes before its environment variable, and that before the default.
Answers go to stdout, everything else to stderr; `--json` prints one object, errors included.
"""


def main() -> int:
    text = reference()
    if "--check" in sys.argv[1:]:
        if REFERENCE.exists() and REFERENCE.read_text() == text:
            return 0
        print("docs/reference.md is not what --help says now; run make docs", file=sys.stderr)
        return 1
    REFERENCE.write_text(text)
    return 0


def reference() -> str:
    sections = [f"## {' '.join(path)}\n\n```\n{help_of(path, command)}\n```\n" for path, command in commands()]
    return "\n".join([INTRODUCTION, *sections])


def commands() -> Iterator[tuple[list[str], click.Command]]:
    """Every command, as the words that call it, in the order of the help."""
    yield from _below(["evalkit"], cli)


def _below(path: list[str], command: click.Command) -> Iterator[tuple[list[str], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None and not child.hidden:
                yield from _below([*path, name], child)


def help_of(path: list[str], command: click.Command) -> str:
    # A set width, so that the text does not depend on the terminal.
    context = click.Context(command, info_name=" ".join(path), terminal_width=100, max_content_width=100)
    context.help_option_names = ["-h", "--help"]
    return command.get_help(context).rstrip()


if __name__ == "__main__":
    sys.exit(main())
