"""`evalkit run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from evalkit.cli.common import DURATION, command, epilog, fleet_option, progress, run_dir_option, snapshot_dir_option
from evalkit.ground.errors import UsageError
from evalkit.ground.result import Result

_PATH = click.Path(path_type=Path)


@click.command(epilog=epilog("evalkit run step_40 --suite evals.yaml", 1, 66, 69, 75))
@click.argument("snapshot", required=False)
@click.option("--dir", "directory", metavar="SNAPSHOT", help="The same as the argument.")
@click.option("--suite", type=_PATH, envvar="EVALKIT_SUITE", help="The eval suite. [env: EVALKIT_SUITE]")
@click.option(
    "--concurrency", type=click.IntRange(1), default=64, show_default=True, help="Requests in flight over all engines."
)
@click.option("--output", type=_PATH, help="Where the results go; default: a new directory in RUN_DIR/results/manual.")
@click.option("--timeout", type=DURATION, default="4h", show_default=True, help="Deadline of it all.")
@click.option("--load-timeout", type=DURATION, default="600s", show_default=True, help="Deadline of one load.")
@click.option("--sample-timeout", type=DURATION, default="600s", show_default=True, help="Deadline of one answer.")
@fleet_option
@snapshot_dir_option
@run_dir_option
@command("run")
def run(snapshot: str | None, directory: str | None, fleet_name: str | None, **options: Any) -> Result:
    """Evaluate SNAPSHOT on the fleet: a directory, or a name in SNAPSHOT_DIR.

    Takes the fleet, pins it unless it holds these weights already, asks the suite's prompts and prints the metrics.
    Without SNAPSHOT it evaluates what is pinned.
    """
    from evalkit.verbs.run import RunRequest
    from evalkit.verbs.run import run as verb

    if snapshot and directory:
        raise UsageError("the snapshot is given twice, as argument and with --dir", "give one of them")
    request = RunRequest(snapshot=snapshot or directory, fleet=fleet_name, **options)
    with progress() as say:
        return verb(request, say)
