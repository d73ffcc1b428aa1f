"""The entry point: a group that imports a command's module only when that command is called."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Sequence

import click

import evalkit

_COMMANDS = {
    "export": "evalkit.cli.export:export",
    "fleet": "evalkit.cli.fleet:fleet",
    "pin": "evalkit.cli.pin:pin",
    "probe": "evalkit.cli.pin:probe",
    "run": "evalkit.cli.run:run",
    "dispatch": "evalkit.cli.dispatch:dispatch",
    "drain": "evalkit.cli.ledger:drain",
    "status": "evalkit.cli.ledger:status",
    "gc": "evalkit.cli.ledger:gc",
    "cancel": "evalkit.cli.ledger:cancel",
}

_SUMMARIES = {
    "export": "Make a snapshot from weights of any usual form.",
    "fleet": "Start, stop and show engines.",
    "pin": "Put every engine on one snapshot, and prove it.",
    "probe": "Ask every engine for one real token.",
    "run": "Evaluate a snapshot on the fleet.",
    "dispatch": "Export, admit, hand to a worker, return.",
    "drain": "Wait until nothing is in flight.",
    "status": "Show points, fleet and disk.",
    "gc": "Retire settled snapshots and empty the trash.",
    "cancel": "End an attempt in flight.",
}


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_SUMMARIES.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(evalkit.__version__, prog_name="evalkit")
def cli() -> None:
    """Evaluate checkpoints while training goes on.

    Each command does one thing and leaves its result in directories and JSON files that the next one reads.
    """


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. A command exits by itself; what is left to do here is what never came to one."""
    _open_standard_descriptors()
    words = list(sys.argv[1:] if args is None else args)
    try:
        sys.exit(cli.main(words, prog_name="evalkit", standalone_mode=False))
    except click.ClickException as error:
        from evalkit.cli.common import fail_usage

        fail_usage(error, as_json="--json" in itertools.takewhile(lambda word: word != "--", words))
    except click.Abort:
        sys.exit(130)


def _open_standard_descriptors() -> None:
    """Where a caller has closed 0, 1 or 2, a lock file would get that number, and be taken for output later."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    # Python has set its own side of a closed descriptor to None.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115
