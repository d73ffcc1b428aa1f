"""What a GPU is to those who choose one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU, as the driver shows it.

    Attributes:
        index: its number, in PCI bus order.
        uuid: `GPU-…`.
        memory_used: MiB.
        memory_total: MiB.
        pids: processes that compute on it, as far as they can be seen from here.
    """

    index: str
    uuid: str
    memory_used: int
    memory_total: int
    pids: tuple[int, ...] = ()
