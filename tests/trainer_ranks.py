"""One rank of a trainer that exports through gloo: `python -m tests.trainer_ranks ROOT RANK SCENARIO…`.

Every scenario is one export. Each rank prints a JSON line a scenario: what came out, and the seconds from the moment
in which something was made to go wrong on any rank.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import evalkit
from evalkit.ground.layout import SnapshotPaths

BREAK_AT = 5  # chunk; embedding and head have been written by then


def main(root: Path, rank: int, scenarios: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    state = load_file(root / "model" / "model.safetensors")
    for scenario in scenarios:
        if rank == 0 and scenario == "disk fills":
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        answer = export(root, rank, scenario, state)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        incoming = SnapshotPaths(root / scenario).incoming
        left = os.listdir(incoming) if incoming.exists() else []
        sys.stdout.write(json.dumps({"scenario": scenario, "left": left, **answer}) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


def export(root: Path, rank: int, scenario: str, state: dict[str, torch.Tensor]) -> dict[str, Any]:
    base = "no/base" if scenario == "no base" else str(root / "model")
    try:
        result = evalkit.export_snapshot(
            tensors(root, rank, scenario, state),
            step=7,
            base=base,
            snapshot_dir=root / scenario,
            shard_size="100KB",
        )
    except Exception as error:  # noqa: BLE001  (the test looks at it)
        broke = root / f"{scenario}.broke"
        since = time.time() - broke.stat().st_mtime if broke.exists() else None
        return {"error": type(error).__name__, "message": str(error), "since": since}
    return {"path": str(result.path), "digest": result.digest, "export_id": result.export_id}


def tensors(root: Path, rank: int, scenario: str, state: dict[str, torch.Tensor]) -> Iterator[Any]:
    """Each rank has half of every tensor's sum; only together they make it."""
    buffer = torch.empty(0)
    for number, (name, tensor) in enumerate(state.items()):
        if number == BREAK_AT:
            (root / f"{scenario}.broke").touch()
            if scenario == f"leaves {rank}":
                raise ValueError("no more")
            if scenario == f"dies {rank}":
                os._exit(3)
            if scenario == "name twice":
                name = "model.norm.weight"
        # The buffer is used again for the next tensor, as a trainer's bucket would be.
        buffer = buffer.resize_(tensor.shape)
        buffer.copy_(tensor if rank == 0 else torch.zeros_like(tensor))
        dist.all_reduce(buffer)
        if number == BREAK_AT and scenario == f"iterator {rank}":
            raise ValueError("no more")
        yield name, buffer


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
