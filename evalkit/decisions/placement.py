"""Which GPUs or CPU cores an engine gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evalkit.ground.devices import Gpu
from evalkit.ground.errors import UnavailableError, UsageError

FREE_SHARE = 0.05  # of a GPU's memory: the driver's own share, with nobody on it, is below
_OUTSIDE = "--gpus {} is outside CUDA_VISIBLE_DEVICES={}"


def parse_visible(text: str | None) -> list[str] | None:
    """The ids in CUDA_VISIBLE_DEVICES; None when it is not set. As in CUDA, an invalid one ends the list."""
    if text is None:
        return None
    ids: list[str] = []
    for item in (part.strip() for part in text.split(",")):
        if not item or item.startswith("-") or item in ids:
            break
        ids.append(item)
    return ids


def choose_gpus(
    gpus: Sequence[Gpu],
    *,
    visible: Sequence[str] | None,
    claimed: Mapping[str, int],
    wanted: Sequence[str] | None,
    count: int,
) -> list[str]:
    """The ids, as in CUDA_VISIBLE_DEVICES, of `count` free GPUs.

    Args:
        gpus: all GPUs of this machine.
        visible: ids that the caller may use; None for all.
        claimed: ids that live engines were started with, and the process of each.
        wanted: ids that the user asked for; None to take the first free ones.

    Raises:
        UsageError: an id that is unknown, given twice or outside `visible`, or another number of ids than `count`.
        UnavailableError: one that was asked for is occupied, or too few are free.
    """
    allowed = [gpu.index for gpu in gpus] if visible is None else list(visible)
    candidates = allowed if wanted is None else _check_wanted(wanted, allowed, visible, count)
    taken = {name: why for name in candidates if (why := _occupied(_find(gpus, name), name, gpus, claimed))}
    free = [name for name in candidates if name not in taken]
    if wanted is not None and taken:
        raise UnavailableError("; ".join(taken.values()), "choose others with --gpus")
    if len(free) < count:
        why = "; ".join(
            [f"{len(free)} of {len(candidates)} visible GPUs are free, {count} are needed", *taken.values()]
        )
        raise UnavailableError(why, "free some, or start fewer engines")
    return free[:count]


def _check_wanted(
    wanted: Sequence[str], allowed: Sequence[str], visible: Sequence[str] | None, count: int
) -> Sequence[str]:
    if len(set(wanted)) != len(wanted):
        raise UsageError(f"--gpus {','.join(wanted)} names a GPU twice")
    if len(wanted) != count:
        raise UsageError(f"--gpus names {len(wanted)} GPUs, but the engines need {count}")
    for name in wanted:
        if name not in allowed and visible is not None:
            raise UsageError(_OUTSIDE.format(name, ",".join(visible)))
        if name not in allowed:
            raise UsageError(f"--gpus {name}: this machine has the GPUs {', '.join(allowed)}")
    return wanted


def _find(gpus: Sequence[Gpu], name: str) -> Gpu | None:
    """The GPU that `name` means; None for a MIG slice, whose use the driver does not list with the GPUs'."""
    for gpu in gpus:
        if name == gpu.index or (name.startswith("GPU-") and gpu.uuid.startswith(name)):
            return gpu
    if name.startswith("MIG-"):
        return None
    raise UsageError(f"CUDA_VISIBLE_DEVICES names GPU {name}, which this machine does not have")


def _occupied(gpu: Gpu | None, name: str, gpus: Sequence[Gpu], claimed: Mapping[str, int]) -> str:
    for other, pid in claimed.items():
        if other == name or (gpu is not None and _find_or_none(gpus, other) == gpu):
            return f"GPU {name} is taken by an engine of a fleet (pid {pid})"
    if gpu is None:
        return ""
    if gpu.pids:
        return f"GPU {name} is occupied by pid {', '.join(map(str, gpu.pids))} ({gpu.memory_used} MiB)"
    if gpu.memory_used > FREE_SHARE * gpu.memory_total:
        return f"GPU {name} is occupied: {gpu.memory_used} MiB by a process that can't be seen from here"
    return ""


def _find_or_none(gpus: Sequence[Gpu], name: str) -> Gpu | None:
    try:
        return _find(gpus, name)
    except UsageError:
        return None


def split_cores(cores: Sequence[int], engines: int, ranks: int) -> list[list[int]]:
    """CPU cores for each engine: `ranks` equal groups after each other; cores are shared when there are too few.

    Args:
        cores: the cores that this process may use.
        engines: number of engines.
        ranks: of each engine.
    """
    total = engines * ranks
    each = max(1, len(cores) // total)
    groups = [[cores[(i * each + k) % len(cores)] for k in range(each)] for i in range(total)]
    return [[core for group in groups[e * ranks : (e + 1) * ranks] for core in group] for e in range(engines)]
