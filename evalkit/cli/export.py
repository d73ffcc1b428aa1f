"""`evalkit export`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from evalkit.cli.common import command, epilog, run_dir_option, snapshot_dir_option
from evalkit.ground.result import Result

F = TypeVar("F", bound=Callable[..., Any])


class Size(click.ParamType[int]):
    """Bytes, as 5GB, 200MB or 1GiB; given to the command as int."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from evalkit.decisions.shards import parse_size
        from evalkit.ground.errors import UsageError

        try:
            return value if isinstance(value, int) else parse_size(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


def export_options(function: F) -> F:
    """How weights become a snapshot: `--base`, `--dtype`, `--shard-size`, `--copy`."""
    for option in (
        click.option(
            "--copy",
            type=click.Choice(["auto", "reflink", "copy", "hardlink"]),
            default="auto",
            show_default=True,
            help="How whole weight files get there; auto shares blocks where the file system can. With hardlink, a "
            "trainer that rewrites its file in place changes the snapshot.",
        ),
        click.option("--shard-size", type=Size(), help="The most a weight file may hold, such as 5GB."),
        click.option(
            "--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), help="Cast float tensors to this."
        ),
        click.option(
            "--base",
            help="Model directory, or Hub id in the local cache, for config and tokenizer files that SOURCE lacks.",
        ),
    ):
        function = option(function)
    return function


@click.command(epilog=epilog("evalkit export checkpoint-40 --step 40 --eval-hf-dir /dev/shm/run", 1, 66, 75))
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(0), required=True, help="The trainer's step that the weights are of.")
@export_options
@click.option("--force", is_flag=True, help="Replace a snapshot of other content at this step, unless it is in use.")
@snapshot_dir_option
@run_dir_option
@command("export")
def export(run_dir: Path, snapshot_dir: Path | None, **options: Any) -> Result:
    """Make the snapshot step_<N> of SOURCE's weights, whole or not at all, and print its path.

    SOURCE is a Hugging Face directory, a directory of safetensors files, one such file, or a torch state dict
    (.pt, .bin). The same content again changes nothing.
    """
    from evalkit.verbs.export import export_verb

    result, exported = export_verb(run_dir, snapshot_dir, **options)
    if exported.missing:
        click.echo(f"evalkit export: the snapshot has no {', '.join(exported.missing)}", err=True)
    if exported.unchecked:
        click.echo(f"evalkit export: tensors were not compared with the architecture: {exported.unchecked}", err=True)
    return result
