"""What every command shares: its common options, rendering a result, and turning errors into one line and a code."""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import msgspec

from evalkit.ground.errors import FULL, EvalkitError, StorageError, UsageError
from evalkit.ground.result import Result

F = TypeVar("F", bound=Callable[..., Any])

EXIT_CODES = {
    0: "done, a recorded skip included",
    1: "failed",
    2: "usage",
    65: "bad data",
    66: "no such snapshot",
    69: "engine or fleet unavailable",
    74: "I/O error, disk or memory full",
    75: "busy, or the time is up: try again",
    130: "interrupted",
    143: "terminated",
}


# Each reads a record of the run or the fleet, which may be damaged or on a disk that fails, and may be ended.
_OF_EVERY_COMMAND = (0, 2, 65, 74, 130, 143)


def run_dir_option(function: F) -> F:
    return click.option(
        "--run-dir",
        envvar="EVALKIT_RUN_DIR",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path("evalkit-run"),
        show_default=True,
        help="Ledger, results and fleet records. [env: EVALKIT_RUN_DIR]",
    )(function)


def snapshot_dir_option(function: F) -> F:
    return click.option(
        "--eval-hf-dir",
        "snapshot_dir",
        envvar="EVALKIT_EVAL_HF_DIR",
        type=click.Path(path_type=Path, file_okay=False),
        help="SNAPSHOT_DIR, where snapshots are staged; tmpfs recommended. [env: EVALKIT_EVAL_HF_DIR]",
    )(function)


def fleet_option(function: F) -> F:
    return click.option(
        "--fleet",
        "fleet_name",
        envvar="EVALKIT_FLEET",
        help="Name of the fleet, or the path of its record. [env: EVALKIT_FLEET; default: eval]",
    )(function)


class Duration(click.ParamType[float]):
    """Seconds, or a number with s, m or h behind it; given to the command as float seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        text, factor = (
            (value[:-1], {"s": 1, "m": 60, "h": 3600}[value[-1]]) if value[-1:] in "smh" and value else (value, 1)
        )
        try:
            seconds = float(text) * factor
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < float("inf"):
            self.fail(f"{value!r} is no duration; write 90, 90s, 15m or 2h", param, ctx)
        return seconds


DURATION = Duration()


def epilog(example: str, *codes: int) -> str:
    """The end of a command's help: an example, and the exit codes it can give, those of every command included."""
    rows = "\n".join(f"  {code:>3}  {EXIT_CODES[code]}" for code in sorted({*_OF_EVERY_COMMAND, *codes}))
    return f"\b\nExample:\n  {example}\n\n\b\nExit codes:\n{rows}"


def command(verb: str) -> Callable[[Callable[..., Result]], Callable[..., None]]:
    """Make a click callback of a function that returns a `Result`: adds `--json`, renders, and exits with its code."""

    def wrap(function: Callable[..., Result]) -> Callable[..., None]:
        @click.option("--json", "as_json", is_flag=True, help="Print one JSON object, errors included.")
        @functools.wraps(function)
        def call(*args: Any, as_json: bool, **kwargs: Any) -> None:
            previous = signal.signal(signal.SIGTERM, _terminated)
            try:
                _require_utf8(kwargs)
                result = function(*args, **kwargs)
                _show_result(verb, result, as_json)
            except EvalkitError as error:
                _fail(verb, error, as_json)
            except OSError as error:
                if error.errno == errno.EPIPE:
                    _broken_pipe()
                _fail(verb, _io_failure(error), as_json)
            except KeyboardInterrupt:
                _fail(verb, _InterruptedError("interrupted"), as_json)
            except _Sigterm:
                _fail(verb, _TerminatedError("terminated"), as_json)
            finally:
                signal.signal(signal.SIGTERM, previous)
            sys.exit(result.code)

        return call

    return wrap


def _require_utf8(options: Mapping[str, Any]) -> None:
    """Every path is written into JSON somewhere, so one that is not UTF-8 is refused before anything is done."""
    for name, value in options.items():
        try:
            str(value).encode()
        except UnicodeEncodeError:
            raise UsageError(f"--{name.replace('_', '-')} is not UTF-8: {os.fsencode(str(value))!r}") from None


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Gives a function that shows how far a command is, on a terminal; elsewhere it shows nothing."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update


class _Sigterm(SystemExit):
    """SIGTERM came. A SystemExit, since that ends an event loop too, and what dispatch has under way."""


class _InterruptedError(EvalkitError):
    code = 130
    kind = "interrupted"


class _TerminatedError(EvalkitError):
    code = 143
    kind = "terminated"


def _terminated(signum: int, frame: object) -> NoReturn:
    raise _Sigterm(128 + signum)


def _broken_pipe() -> NoReturn:
    # The reader is gone: nothing can be said, and flushing at exit would only fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(1)


def _io_failure(error: OSError) -> EvalkitError:
    where = f" ({error.filename})" if error.filename else ""
    remedy = "free some space" if error.errno in FULL else ""
    return StorageError(f"{error.strerror or error}{where}", remedy)


def _show_result(verb: str, result: Result, as_json: bool) -> None:
    if as_json:
        _print_json({"format": 1, "verb": verb, "ok": result.code == 0, "result": result.data})
    else:
        for line in result.lines:
            click.echo(line)
    for note in result.notes:
        _note(f"evalkit {verb}: {note}")


def _fail(verb: str, error: EvalkitError, as_json: bool) -> NoReturn:
    if as_json:
        _print_error(verb, error)
    for note in _notes(error):
        click.echo(note, err=True)
    _note(f"evalkit {verb}: {error}")
    sys.exit(error.code)


def fail_usage(error: click.ClickException, *, as_json: bool) -> NoReturn:
    """Say in click's own words what click refuses, and with `as_json` as every other error."""
    context = getattr(error, "ctx", None)
    if as_json:
        _print_error(context.command_path.partition(" ")[2] if context else "", UsageError(error.format_message()))
    error.show()
    sys.exit(error.exit_code)


def _print_error(verb: str, error: EvalkitError) -> None:
    body: dict[str, Any] = {"kind": error.kind, "code": error.code, "message": error.message, "remedy": error.remedy}
    body |= {"notes": _notes(error)} if _notes(error) else {}
    _print_json({"format": 1, "verb": verb, "ok": False, "error": body})


def _notes(error: EvalkitError) -> list[str]:
    """More lines for a person: the end of an engine's log, for example."""
    return getattr(error, "__notes__", [])


def _print_json(value: dict[str, Any]) -> None:
    click.echo(msgspec.json.encode(value, enc_hook=str).decode())


def _note(text: str) -> None:
    click.echo(" ".join(text.split("\n")), err=True)
