"""Start and stop the engines of a fleet."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from evalkit.adapters import launcher
from evalkit.adapters.engine_processes import stop_engines
from evalkit.adapters.fleet_launch import Progress, renewed, require_here, start_and_wait
from evalkit.adapters.gpus import choosing, claimed_gpus, list_gpus
from evalkit.decisions.placement import choose_gpus, parse_visible, split_cores
from evalkit.ground.errors import UnavailableError, UsageError
from evalkit.ground.files import write_atomic
from evalkit.ground.layout import FleetPaths, RunPaths
from evalkit.ground.locks import locked
from evalkit.ground.processes import is_alive, this_process
from evalkit.ground.result import Result
from evalkit.ground.schema import EngineRecord, FleetRecord
from evalkit.state.fleet import change_fleet, load_fleet
from evalkit.state.fleet_queue import sweep
from evalkit.state.run import find_run, fleet_name, remember
from evalkit.verbs.fleet_status import show_fleet


def fleet_paths(run_dir: Path, name: str | None, *, create: bool = False) -> FleetPaths:
    """The files of the fleet that `name`, the run's record or the default means.

    Args:
        create: make the run if need be; the first fleet is recorded as the run's.
    """
    run = run_dir.absolute()
    record = find_run(run)
    paths = RunPaths(run).fleet(fleet_name(record, name))
    if create:
        remember(run, fleet=fleet_name(record, name))
    return paths


@dataclass(frozen=True)
class LaunchRequest:
    """What `evalkit fleet up` was asked for.

    Attributes:
        model: the boot model's directory.
        engines: how many.
        ranks: GPUs (or groups of CPU cores) an engine: its tensor parallelism.
        on_gpu: whether GPUs were asked for; None lets the build of vLLM decide.
        gpus: ids to use; None takes free ones.
        vllm_args: arguments for vLLM.
    """

    model: Path
    engines: int
    ranks: int
    on_gpu: bool | None
    gpus: Sequence[str] | None
    host: str
    vllm_args: Sequence[str]


def launch_request(
    model: Path,
    *,
    num_gpus: int | None,
    per_engine: int,
    engines: int | None,
    gpus: str | None,
    host: str,
    vllm_args: Sequence[str],
) -> LaunchRequest:
    """Raises UsageError when the numbers of engines and GPUs don't go together."""
    if (num_gpus is None) == (engines is None):
        raise UsageError("give either --num-gpus N or --engines K")
    if num_gpus is not None and num_gpus % per_engine:
        raise UsageError(f"--num-gpus {num_gpus} is not divisible by --num-gpus-per-engine {per_engine}")
    wanted = [item.strip() for item in gpus.split(",")] if gpus is not None else None
    if wanted is not None and not all(wanted):
        raise UsageError(f"--gpus {gpus!r} is no list of GPU ids", "write --gpus 6,7")
    launcher.check_engine_args(vllm_args)
    return LaunchRequest(
        model=launcher.check_model(model),
        engines=engines if engines is not None else (num_gpus or 0) // per_engine,
        ranks=per_engine,
        on_gpu=True if num_gpus is not None or wanted is not None else None,
        gpus=wanted,
        host=host,
        vllm_args=list(vllm_args),
    )


def fleet_up(
    paths: FleetPaths, request: LaunchRequest, *, timeout: float, progress: Progress = lambda text: None
) -> Result:
    """Start the fleet and wait until each engine is up; what runs already as asked for stays.

    Raises:
        UsageError: the fleet is up with another launch line.
        UnavailableError: the fleet is up on another host, no vLLM, too few free GPUs, or an engine that died or was not
            up in time.
        BusyError: another start or stop of the fleet took longer than `timeout`.
    """
    launcher.check_vllm()
    paths.logs.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout
    with locked(paths.launch_lock, timeout, what=f"the start of fleet {paths.name}"):
        try:
            _start_missing(paths, request, timeout, deadline, progress)
        except BaseException:
            _clear_failed(paths)
            raise
        change_fleet(paths, _brought_up)
    return show_fleet(paths)


def _brought_up(record: FleetRecord) -> FleetRecord:
    if record.state == "down":
        raise UnavailableError(f"fleet {record.name} was brought down meanwhile")
    return msgspec.structs.replace(record, state="up")


def _start_missing(
    paths: FleetPaths, request: LaunchRequest, timeout: float, deadline: float, progress: Progress
) -> None:
    running = _running(paths, request)
    with contextlib.ExitStack() as placing:
        to_start = _revived(paths, running) if running else _plan(paths, request, _place(request, placing))
        starting = start_and_wait(
            paths, to_start, running, timeout=timeout, deadline=deadline, started=placing.close, progress=progress
        )
        asyncio.run(starting)


def _running(paths: FleetPaths, request: LaunchRequest) -> list[EngineRecord]:
    """The engines that run already as asked for; where there is none, remains of an earlier fleet are cleared away."""
    record = change_fleet(paths, lambda record: record)
    require_here(record.engines)
    if record.state != "down":
        running = [engine for engine in record.engines if engine.process and is_alive(engine.process)]
        if running and not _is_as_asked(record, request):
            remedy = f"evalkit fleet down --fleet {paths.name} first"
            raise UsageError(f"fleet {paths.name} is up with another launch line", remedy)
        if running:
            return running
    stop_engines(record.engines)
    return []


def _is_as_asked(record: FleetRecord, request: LaunchRequest) -> bool:
    asked = (str(request.model), list(request.vllm_args), request.engines)
    return (
        asked == (record.model, record.engine_args, len(record.engines))
        and all(engine.tensor_parallel == request.ranks for engine in record.engines)
        and all(urlsplit(engine.url).hostname == request.host for engine in record.engines)
        and (not request.on_gpu or all(engine.gpus for engine in record.engines))
        and (request.gpus is None or sorted(request.gpus) == sorted(g for e in record.engines for g in e.gpus))
    )


def _revived(paths: FleetPaths, running: Sequence[EngineRecord]) -> list[EngineRecord]:
    """The fleet's other engines, cleared away, to be started again."""
    dead = [engine for engine in load_fleet(paths).engines if engine not in running]
    stop_engines(dead)
    return [renewed(engine) for engine in dead]


@dataclass(frozen=True)
class _Place:
    gpus: list[str]
    cores: list[int]


def _place(request: LaunchRequest, placing: contextlib.ExitStack) -> list[_Place]:
    """GPUs or CPU cores for each engine; the choice of GPUs is exclusive until `placing` is closed."""
    if not (request.on_gpu or not launcher.built_for_cpu()):
        groups = split_cores(sorted(os.sched_getaffinity(0)), request.engines, request.ranks)
        return [_Place([], cores) for cores in groups]
    placing.enter_context(choosing())
    ids = choose_gpus(
        list_gpus(),
        visible=parse_visible(os.environ.get("CUDA_VISIBLE_DEVICES")),
        claimed=claimed_gpus(),
        wanted=request.gpus,
        count=request.engines * request.ranks,
    )
    if launcher.built_for_cpu():
        raise UnavailableError("this vLLM is built for the CPU", "use --engines K, or install vllm")
    return [_Place(ids[i * request.ranks : (i + 1) * request.ranks], []) for i in range(request.engines)]


def _plan(paths: FleetPaths, request: LaunchRequest, places: Sequence[_Place]) -> list[EngineRecord]:
    """A new launch of the fleet: its key, empty logs and the record that says what will run; nothing runs yet."""
    write_atomic(paths.key, secrets.token_hex(32).encode() + b"\n", mode=0o600)
    for log in paths.logs.glob("engine-*.log"):
        log.unlink()

    def launch(record: FleetRecord) -> FleetRecord:
        launched = msgspec.structs.replace(
            record,
            state="starting",
            model=str(request.model),
            pinned=None,
            pinned_export_id=None,
            engine_args=list(request.vllm_args),
            cwd=str(Path.cwd()),
            created_at=time.time(),
        )
        engines = [
            launcher.plan_engine(
                paths, launched, i, host=request.host, gpus=place.gpus, cores=place.cores, ranks=request.ranks
            )
            for i, place in enumerate(places)
        ]
        return msgspec.structs.replace(launched, engines=engines)

    return change_fleet(paths, launch).engines


def _clear_failed(paths: FleetPaths) -> None:
    """After a failed start: a fleet without a live engine is down."""

    def clear(record: FleetRecord) -> FleetRecord:
        return record if any(_may_run(engine) for engine in record.engines) else _as_down(record)

    if change_fleet(paths, clear).state == "down":
        paths.key.unlink(missing_ok=True)


def _may_run(engine: EngineRecord) -> bool:
    return engine.process is not None and (engine.process.host != this_process().host or is_alive(engine.process))


def _as_down(record: FleetRecord) -> FleetRecord:
    """The record of a fleet without engines: only its epoch stays, and rises, so that nobody's claim outlives them."""
    return FleetRecord(name=record.name, epoch=record.epoch + 1)


def fleet_down(paths: FleetPaths, *, timeout: float) -> Result:
    """End every process of the fleet; waits for nobody who uses it.

    Raises:
        UnavailableError: there is no such fleet, its engines run on another host, or a process does not end.
        BusyError: another start or stop of the fleet took longer than `timeout`.
    """
    require_here(load_fleet(paths).engines)
    # At once, so that a start under way gives up and a holder finds itself replaced.
    record = change_fleet(
        paths, lambda record: msgspec.structs.replace(record, state="down", epoch=record.epoch + 1, holder=None)
    )
    with locked(paths.launch_lock, timeout, what=f"the start of fleet {paths.name}"):
        stop_engines(load_fleet(paths).engines)
        change_fleet(paths, _as_down)
        paths.key.unlink(missing_ok=True)
        sweep(paths)
    ended = [engine.index for engine in record.engines]
    line = f"fleet {paths.name} is down" + (f", {len(ended)} engines ended" if ended else "")
    return Result({"fleet": paths.name, "engines_ended": ended}, [line])
