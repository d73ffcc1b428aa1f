"""`evalkit drain`, `status`, `gc` and `cancel`."""

from __future__ import annotations

from pathlib import Path

import click

from evalkit.cli.common import DURATION, command, epilog, progress, run_dir_option, snapshot_dir_option
from evalkit.ground.result import Result


@click.command(epilog=epilog("evalkit drain --timeout 30m", 1, 75))
@click.option("--timeout", type=DURATION, default="1h", show_default=True, help="How long to wait.")
@click.option(
    "--fail-on-skip", "--ci-test", is_flag=True, help="Exit with 1 if any point since the last drain was skipped."
)
@run_dir_option
@command("drain")
def drain(run_dir: Path, timeout: float, fail_on_skip: bool) -> Result:
    """Wait until everything that is in flight now is settled; print the outcomes since the last drain."""
    from evalkit.verbs import drain as verb

    with progress() as say:
        return verb.drain(run_dir, timeout, fail_on_skip=fail_on_skip, say=say)


@click.command(epilog=epilog("evalkit status --json | jq .result.points", 75))
@click.option("--all", "show_all", is_flag=True, help="Show every point, not the newest alone.")
@run_dir_option
@command("status")
def status(run_dir: Path, show_all: bool) -> Result:
    """Show the points, what is in flight, the fleet and the snapshots."""
    from evalkit.verbs import status as verb

    return verb.status(run_dir, show_all=show_all)


@click.command(epilog=epilog("evalkit gc --keep 2 --dry-run", 75))
@click.option("--keep", type=click.IntRange(0), default=2, show_default=True, help="How many settled snapshots stay.")
@click.option("--dry-run", is_flag=True, help="Say what would be taken away, and why; change nothing.")
@snapshot_dir_option
@run_dir_option
@command("gc")
def gc(run_dir: Path, snapshot_dir: Path | None, keep: int, dry_run: bool) -> Result:
    """Retire settled snapshots beyond the newest, clear what dead exports left, empty the trash."""
    from evalkit.verbs import gc as verb

    return verb.gc(run_dir, snapshot_dir, keep, dry_run=dry_run)


@click.command(epilog=epilog("evalkit cancel 40", 75))
@click.argument("step", type=click.IntRange(0))
@run_dir_option
@command("cancel")
def cancel(run_dir: Path, step: int) -> Result:
    """End the attempts in flight at STEP: they are settled as cancelled, and their workers ended."""
    from evalkit.verbs import cancel as verb

    return verb.cancel(run_dir, step)
