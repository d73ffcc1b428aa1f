"""`evalkit fleet up|down|status|logs`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from evalkit.cli.common import DURATION, command, epilog, fleet_option, progress, run_dir_option
from evalkit.ground.errors import UsageError
from evalkit.ground.layout import FleetPaths
from evalkit.ground.result import Result


@click.group()
def fleet() -> None:
    """Start, stop and show engines."""


def _paths(run_dir: Path, fleet_name: str | None, *, create: bool = False) -> FleetPaths:
    from evalkit.verbs.fleet import fleet_paths

    return fleet_paths(run_dir, fleet_name, create=create)


@fleet.command(epilog=epilog("evalkit fleet up --model base --engines 2 -- --max-model-len 4096", 66, 69, 75))
@click.option("--model", type=click.Path(path_type=Path), required=True, help="Directory of the boot model.")
@click.option("--num-gpus", type=click.IntRange(1), help="GPUs in all.")
@click.option(
    "--num-gpus-per-engine",
    "per_engine",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="GPUs (on the CPU: ranks) an engine: its tensor parallelism.",
)
@click.option(
    "--engines", type=click.IntRange(1), help="Engines in all, instead of --num-gpus; on the CPU they share its cores."
)
@click.option("--gpus", help="Ids of the GPUs to use, as 6,7; within CUDA_VISIBLE_DEVICES. [default: free ones]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--timeout", type=DURATION, default="15m", show_default=True, help="Until each engine is up.")
@fleet_option
@run_dir_option
@click.argument("vllm_args", nargs=-1, type=click.UNPROCESSED)
@command("fleet up")
def up(
    model: Path,
    num_gpus: int | None,
    per_engine: int,
    engines: int | None,
    gpus: str | None,
    host: str,
    timeout: float,
    fleet_name: str | None,
    run_dir: Path,
    vllm_args: tuple[str, ...],
) -> Result:
    """Start engines and wait until each is up.

    Arguments behind -- go to vLLM. Engines outlive this command and its terminal. Run again, it starts only what is
    not running.
    """
    from evalkit.verbs.fleet import fleet_up, launch_request

    request = launch_request(
        model, num_gpus=num_gpus, per_engine=per_engine, engines=engines, gpus=gpus, host=host, vllm_args=vllm_args
    )
    paths = _paths(run_dir, fleet_name, create=True)
    if not sys.stderr.isatty():
        click.echo(f"evalkit fleet up: starting takes minutes; the engines' logs are in {paths.logs}", err=True)
    with progress() as say:
        return fleet_up(paths, request, timeout=timeout, progress=say)


@fleet.command(epilog=epilog("evalkit fleet down", 69, 75))
@click.option("--timeout", type=DURATION, default="60s", show_default=True, help="To wait for a start under way.")
@fleet_option
@run_dir_option
@command("fleet down")
def down(timeout: float, fleet_name: str | None, run_dir: Path) -> Result:
    """End every process of the fleet, whoever uses it."""
    from evalkit.verbs.fleet import fleet_down

    return fleet_down(_paths(run_dir, fleet_name), timeout=timeout)


@fleet.command(epilog=epilog("evalkit fleet status", 69))
@fleet_option
@run_dir_option
@command("fleet status")
def status(fleet_name: str | None, run_dir: Path) -> Result:
    """Show each engine: state, pin, epoch, requests in flight, place, pid."""
    from evalkit.verbs.fleet_status import show_fleet

    return show_fleet(_paths(run_dir, fleet_name))


@fleet.command(epilog=epilog("evalkit fleet logs --engine 0 --follow"))
@click.option("--engine", type=click.IntRange(0), help="Only this engine's.")
@click.option("--lines", type=click.IntRange(0), default=50, show_default=True, help="Last lines to show.")
@click.option("--follow", is_flag=True, help="Go on with what is written, until interrupted.")
@fleet_option
@run_dir_option
@command("fleet logs")
def logs(engine: int | None, lines: int, follow: bool, fleet_name: str | None, run_dir: Path) -> Result:
    """Show the engines' logs; they stay after the fleet is down."""
    from evalkit.verbs.fleet_status import fleet_logs, follow_logs

    paths = _paths(run_dir, fleet_name)
    if follow and click.get_current_context().params["as_json"]:
        raise UsageError("--follow and --json exclude each other", "one object has an end")
    if follow:
        for line in follow_logs(paths, engine=engine, lines=lines):
            click.echo(line)
    return fleet_logs(paths, engine=engine, lines=lines)
