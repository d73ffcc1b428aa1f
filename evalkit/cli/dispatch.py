"""`evalkit dispatch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from evalkit.cli.common import DURATION, command, epilog, fleet_option, progress, run_dir_option, snapshot_dir_option
from evalkit.cli.export import export_options
from evalkit.ground.result import Result

_PATH = click.Path(path_type=Path)


@click.command(epilog=epilog("evalkit dispatch --step 40 --from checkpoint --max-in-flight 2 --policy skip", 1, 75))
@click.option(
    "--step", type=click.IntRange(0), help="The step; default: from the source's name, or the newest snapshot."
)
@click.option("--from", "source", type=_PATH, help="Weights to export first, in any form that `evalkit export` takes.")
@click.option(
    "--baseline",
    type=_PATH,
    help="Evaluate this directory where it is, as step 0 or --step; needs no marker, is never deleted.",
)
@click.option("--every", type=click.IntRange(1), default=1, show_default=True, help="Other steps are no points.")
@click.option(
    "--max-in-flight",
    type=click.IntRange(1),
    envvar="EVALKIT_MAX_IN_FLIGHT",
    default=2,
    show_default=True,
    help="The bound. [env: EVALKIT_MAX_IN_FLIGHT]",
)
@click.option(
    "--policy",
    type=click.Choice(["backpressure", "skip"]),
    envvar="EVALKIT_POLICY",
    default="backpressure",
    show_default=True,
    help="At the bound: wait, or skip the point. [env: EVALKIT_POLICY]",
)
@click.option(
    "--keep",
    type=click.IntRange(0),
    envvar="EVALKIT_KEEP",
    default=2,
    show_default=True,
    help="How many settled snapshots stay. [env: EVALKIT_KEEP]",
)
@click.option("--final", is_flag=True, help="Never skipped for --every or --policy: waits for room.")
@click.option("--wait", type=DURATION, default="1h", show_default=True, help="How long to wait for room.")
@click.option(
    "--timeout", type=DURATION, default="4h", show_default=True, help="When anybody may settle the point as timeout."
)
@click.option(
    "--incarnation",
    envvar="EVALKIT_INCARNATION",
    help="Name of this life of the trainer; default: Slurm's job and restart count. [env: EVALKIT_INCARNATION]",
)
@click.option("--suite", type=_PATH, envvar="EVALKIT_SUITE", help="The eval suite. [env: EVALKIT_SUITE]")
@click.option(
    "--concurrency", type=click.IntRange(1), default=64, show_default=True, help="Requests in flight over all engines."
)
@click.option("--load-timeout", type=DURATION, default="600s", show_default=True, help="Deadline of one load.")
@click.option("--fail-on-skip", "--ci-test", is_flag=True, help="Exit with 1 if this point is skipped.")
@export_options
@fleet_option
@snapshot_dir_option
@run_dir_option
@command("dispatch")
def dispatch(
    fleet_name: str | None,
    policy: Literal["backpressure", "skip"],
    concurrency: int,
    load_timeout: float,
    base: str | None,
    dtype: str | None,
    copy: str,
    shard_size: int | None,
    **options: Any,
) -> Result:
    """Export, admit, hand to a detached worker, return.

    A point that cannot be evaluated is recorded as a skip with its reason, and the exit code stays 0, so that a
    trainer under `set -e` goes on.
    """
    from evalkit.verbs.dispatch import DispatchRequest
    from evalkit.verbs.dispatch import dispatch as verb

    settings = {"concurrency": concurrency, "load_timeout": load_timeout}
    export = {"base": base, "dtype": dtype, "copy": copy, "shard_size": shard_size}
    request = DispatchRequest(fleet=fleet_name, policy=policy, settings=settings, export=export, **options)
    with progress() as say:
        return verb(request, say)
