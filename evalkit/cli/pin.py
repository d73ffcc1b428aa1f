"""`evalkit pin` and `evalkit probe`."""

from __future__ import annotations

from pathlib import Path

import click

from evalkit.cli.common import (
    DURATION,
    command,
    epilog,
    fleet_option,
    progress,
    run_dir_option,
    snapshot_dir_option,
)
from evalkit.ground.errors import UsageError
from evalkit.ground.result import Result


@click.command(epilog=epilog("evalkit pin step_40", 1, 66, 69, 75))
@click.argument("snapshot", required=False)
@click.option("--dir", "directory", metavar="SNAPSHOT", help="The same as the argument.")
@click.option("--load-timeout", type=DURATION, default="600", show_default=True, help="For one attempt's load, of two.")
@click.option("--timeout", type=DURATION, default="30m", show_default=True, help="To wait for the fleet.")
@fleet_option
@snapshot_dir_option
@run_dir_option
@command("pin")
def pin(
    snapshot: str | None,
    directory: str | None,
    load_timeout: float,
    timeout: float,
    fleet_name: str | None,
    snapshot_dir: Path | None,
    run_dir: Path,
) -> Result:
    """Put every engine on SNAPSHOT, and prove it.

    SNAPSHOT is a path with a slash in it, or a name like step_40 in SNAPSHOT_DIR. Engines that are dead or broken are
    restarted. A snapshot that every engine refuses leaves them as they were.
    """
    from evalkit.verbs.pin import pin_verb

    name = snapshot or directory
    if name is None or (snapshot and directory):
        raise UsageError("give one snapshot", "as the argument or with --dir")
    with progress() as say:
        return pin_verb(
            run_dir,
            name,
            snapshot_dir=snapshot_dir,
            fleet=fleet_name,
            timeout=timeout,
            load_timeout=load_timeout,
            progress=say,
        )


@click.command(epilog=epilog("evalkit probe --timeout 10s", 69))
@click.option("--timeout", type=DURATION, default="30s", show_default=True, help="For one token.")
@fleet_option
@run_dir_option
@command("probe")
def probe(timeout: float, fleet_name: str | None, run_dir: Path) -> Result:
    """Ask every engine for one real token; 69 if any is not ready."""
    from evalkit.verbs.fleet import fleet_paths
    from evalkit.verbs.probe import probe_verb

    return probe_verb(fleet_paths(run_dir, fleet_name), timeout=timeout)
