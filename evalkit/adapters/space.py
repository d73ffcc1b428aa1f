"""Whether bytes will fit: on the disk and, where the directory is in memory, in what this process may still use."""

from __future__ import annotations

import os
from pathlib import Path

from evalkit.ground.errors import StorageError

DISK_RESERVE = 4 << 20  # bytes left free beside the export: manifest, index, directories
MEMORY_RESERVE = 64 << 20  # bytes left to the processes around

_IN_MEMORY = {"tmpfs", "ramfs"}
_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


def require_room(directory: Path, needed: int) -> None:
    """Check that `needed` bytes fit into `directory`, which exists.

    Raises:
        StorageError: they don't, with how much there is.
    """
    stat = os.statvfs(directory)
    free = stat.f_bavail * stat.f_frsize
    if needed + DISK_RESERVE > free:
        raise StorageError(
            f"{directory} has {_mib(free)} free, the snapshot needs {_mib(needed)}",
            "free some space, or keep fewer snapshots",
        )
    if filesystem_of(directory) in _IN_MEMORY:
        available = available_memory()
        if needed + MEMORY_RESERVE > available:
            raise StorageError(
                f"{directory} is in memory, which has {_mib(available)} available; the snapshot needs {_mib(needed)}",
                "keep fewer snapshots, or stage them on a disk",
            )


def filesystem_of(path: Path) -> str:
    """The type of the file system that holds `path`, as in /proc/self/mountinfo; empty when not found."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return ""


def available_memory() -> int:
    """Bytes that can be used without swapping: the kernel's estimate, and what each cgroup above us leaves."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return min([int(meminfo["MemAvailable"].split()[0]) * 1024, *_cgroup_rooms()])


def _cgroup_rooms() -> list[int]:
    rooms = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers == "":
            mount, limit, used = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount, limit, used = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # In a container the path may be the host's, not visible here: then only the mount itself has the files.
        for group in {mount, *(mount / own.lstrip("/")).parents, mount / own.lstrip("/")}:
            if group.is_relative_to(mount):
                rooms += room_in(group, limit, used)
    return rooms


def room_in(group: Path, limit: str, used: str) -> list[int]:
    try:
        maximum = (group / limit).read_text().strip()
        usage = int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    if maximum == "max" or int(maximum) > _UNLIMITED:
        return []
    # Cached files that nobody reads give way to new pages.
    reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))
    return [int(maximum) - usage + reclaimable]


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.0f} MiB"
