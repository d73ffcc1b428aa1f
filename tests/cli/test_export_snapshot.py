"""`evalkit.export_snapshot`: a trainer's tensors, by one process or by several ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import evalkit
from evalkit.ground.errors import DataError, NoSnapshotError, UsageError
from evalkit.ground.layout import SnapshotPaths
from evalkit.ground.tensors import digest_of, read_headers
from evalkit.state.run import open_run, remember
from evalkit.state.snapshot import hash_directory, open_snapshot
from tests.exports import tensors_in
from tests.models import make_model

State = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def state(model: Path) -> State:
    from safetensors.torch import load_file

    return dict(load_file(model / "model.safetensors"))


def one_buffer(state: State) -> Iterator[tuple[str, Any]]:
    import torch

    buffer = torch.empty(0)
    for name, tensor in state.items():
        yield name, buffer.resize_(tensor.shape).copy_(tensor)


def halves(state: State) -> Iterator[Any]:
    pairs = list(state.items())
    yield pairs[:5]
    yield dict(pairs[5:])


FORMS: dict[str, Callable[[State], Any]] = {
    "mapping": dict,
    "pairs": lambda state: iter(state.items()),
    "one buffer for all": one_buffer,
    "lists and mappings": halves,
    "not contiguous": lambda state: {name: t.t().contiguous().t() if t.dim() == 2 else t for name, t in state.items()},
    "parameters": lambda state: {name: t.clone().requires_grad_() for name, t in state.items()},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_tensors_becomes_the_same_snapshot(model: Path, state: State, tmp_path: Path, form: str) -> None:
    result = evalkit.export_snapshot(FORMS[form](state), step=7, base=model, snapshot_dir=tmp_path, shard_size="100KB")
    assert result.path == tmp_path / "step_7"
    assert tensors_in(result.path) == tensors_in(model)
    assert result.digest == digest_of(hash_directory(model)) == open_snapshot(result.path).digest
    assert (result.path / "tokenizer.json").exists()
    assert len(list(result.path.glob("*.safetensors"))) > 1
    assert os.listdir(SnapshotPaths(tmp_path).incoming) == []


def test_a_run_owns_what_is_exported_for_it(model: Path, state: State, tmp_path: Path) -> None:
    run = tmp_path / "run"
    remember(run, snapshot_dir=tmp_path / "snapshots")
    result = evalkit.export_snapshot(state, step=7, base=model, run_dir=run)
    assert open_snapshot(tmp_path / "snapshots" / "step_7").run_id == open_run(run, create=False).run_id
    assert result.path == tmp_path / "snapshots" / "step_7"
    with pytest.raises(UsageError, match="belongs to run"):
        evalkit.export_snapshot(state, step=8, base=model, run_dir=tmp_path / "b", snapshot_dir=tmp_path / "snapshots")
    with pytest.raises(UsageError, match="snapshot_dir"):
        evalkit.export_snapshot(state, step=8, base=model)


def test_tensors_are_cast_as_they_come(model: Path, state: State, tmp_path: Path) -> None:
    result = evalkit.export_snapshot(
        iter(state.items()), step=7, base=model, snapshot_dir=tmp_path, dtype="bfloat16", shard_size=100_000
    )
    assert {header.dtype for header in read_headers(result.path).values()} == {"BF16"}
    assert json.loads((result.path / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_step_that_is_there(model: Path, state: State, tmp_path: Path) -> None:
    first = evalkit.export_snapshot(state, step=7, base=model, snapshot_dir=tmp_path)
    again = evalkit.export_snapshot(iter(state.items()), step=7, base=model, snapshot_dir=tmp_path)
    assert (again.unchanged, again.export_id, again.total_bytes) == (True, first.export_id, first.total_bytes)
    other = {name: tensor + 1 for name, tensor in state.items()}
    with pytest.raises(DataError, match="give --force"):
        evalkit.export_snapshot(other, step=7, base=model, snapshot_dir=tmp_path)
    shutil.copytree(model, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(DataError, match="give --force"):
        evalkit.export_snapshot(state, step=7, base=tmp_path / "base", snapshot_dir=tmp_path)
    replaced = evalkit.export_snapshot(other, step=7, base=model, snapshot_dir=tmp_path, force=True)
    assert open_snapshot(tmp_path / "step_7").digest == replaced.digest != first.digest
    assert len(list(SnapshotPaths(tmp_path).locks.glob("*.lock"))) == 1


def sparse(state: State) -> State:
    return {**state, "model.norm.weight": state["model.norm.weight"].to_sparse()}


def empty(state: State) -> State:
    return {**state, "model.norm.weight": state["model.norm.weight"][:0]}


BROKEN: dict[str, tuple[Callable[[State], Any], str]] = {
    "a tensor missing": (lambda state: dict(list(state.items())[1:]), r"lacks lm_head\.weight"),
    "nothing": (lambda state: {}, "holds no tensor"),
    "a name twice": (lambda state: [*state.items(), *state.items()], r"lm_head\.weight comes twice"),
    "sparse": (sparse, r"model\.norm\.weight is not a dense tensor"),
    "not gathered": (empty, r"model\.norm\.weight is empty"),
    "on meta": (lambda state: {name: t.to("meta") for name, t in state.items()}, "on meta"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_tensors_leave_nothing(model: Path, state: State, tmp_path: Path, kind: str) -> None:
    make, message = BROKEN[kind]
    with pytest.raises(DataError, match=message):
        evalkit.export_snapshot(make(state), step=7, base=model, snapshot_dir=tmp_path, shard_size="50KB")
    paths = SnapshotPaths(tmp_path)
    assert [list(paths.incoming.glob("*")), list(paths.locks.glob("*.lock")), list(tmp_path.glob("step_*"))] == [[]] * 3


def test_an_error_of_the_trainer_comes_through_as_it_is(model: Path, state: State, tmp_path: Path) -> None:
    def failing() -> Iterator[Any]:
        yield from list(state.items())[:9]
        raise ZeroDivisionError("the trainer's own")

    with pytest.raises(ZeroDivisionError, match="the trainer's own"):
        evalkit.export_snapshot(failing(), step=7, base=model, snapshot_dir=tmp_path, shard_size="50KB")
    assert os.listdir(SnapshotPaths(tmp_path).incoming) == []


def test_a_base_that_is_not_there(state: State, tmp_path: Path) -> None:
    with pytest.raises(NoSnapshotError, match="base no/base"):
        evalkit.export_snapshot(state, step=7, base="no/base", snapshot_dir=tmp_path)


def test_at_most_two_shards_are_in_memory(model: Path, tmp_path: Path) -> None:
    """24 tensors of 16 MiB in shards of 64 MiB: the peak is two shards and the tensor on its way, not 384 MiB."""
    program = """
    import json, pathlib, sys
    import torch, evalkit

    base, out = map(pathlib.Path, sys.argv[1:])
    config = {"model_type": "fake"}
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))

    def peak():
        line = next(l for l in pathlib.Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))
        return int(line.split()[1]) // 1024

    def tensors():
        for i in range(24):
            yield f"w{i}", torch.full((4 << 20,), float(i))

    evalkit.export_snapshot({"w": torch.ones(9)}, step=1, base=base, snapshot_dir=out)
    before = peak()
    evalkit.export_snapshot(tensors(), step=2, base=base, snapshot_dir=out, shard_size=64 << 20)
    print(peak() - before)
    """
    argv = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "base"), str(tmp_path / "out")]
    # Freed blocks go back to the system at once, so that the peak is what was really held.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout)
    assert 64 <= grown < 3 * 64, grown


def start_ranks(root: Path, scenarios: list[str]) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.trainer_ranks", str(root), str(rank), *scenarios],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]


def answers(ranks: list[subprocess.Popen[str]]) -> list[list[dict[str, Any]]]:
    """What each rank printed, a scenario each."""
    try:
        outputs = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [[json.loads(line) for line in out.splitlines()] for out, _ in outputs]


FAILURES = {
    "no base": ("NoSnapshotError", "base no/base is no directory"),
    "name twice": ("DataError", "model.norm.weight comes twice"),
    "disk fills": ("StorageError", "File too large"),
    "iterator 0": ("ExportError", "rank 0 failed: ValueError('no more')"),
    "iterator 1": ("ExportError", "rank 1 failed: ValueError('no more')"),
}


def test_ranks_write_once_and_fail_together(model: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(model)
    first, second = answers(start_ranks(tmp_path, ["good", *FAILURES, "good again"]))
    assert len(first) == len(second) == len(FAILURES) + 2
    for mine, other in zip(first, second, strict=True):
        scenario = mine["scenario"]
        assert mine["left"] == other["left"] == []
        if scenario not in FAILURES:
            assert mine == other
            assert tensors_in(Path(mine["path"])) == tensors_in(model)
            continue
        kind, message = FAILURES[scenario]
        for rank, answer in enumerate((mine, other)):
            if scenario == f"iterator {rank}":
                assert (answer["error"], answer["message"]) == ("ValueError", "no more")  # its own comes as it is
            else:
                assert (answer["error"], message in answer["message"]) == (kind, True), answer
            assert answer["since"] is None or answer["since"] < 5
        assert not list((tmp_path / scenario).glob("step_*"))


@pytest.mark.parametrize(("how", "rank"), [("dies", 0), ("dies", 1), ("leaves", 1)])
def test_a_rank_that_is_lost_in_a_collective_is_noticed(model: Path, tmp_path: Path, how: str, rank: int) -> None:
    """It dies, or its own error makes it leave while the other waits for it inside the trainer's collective."""
    (tmp_path / "model").symlink_to(model)
    both = answers(start_ranks(tmp_path, [f"{how} {rank}"]))
    (answer,) = both[1 - rank]
    # The trainer's own collective may be the first to notice; then it is its error that comes through.
    assert answer["error"] in ("ExportError", "RuntimeError", "DistBackendError"), answer
    if how == "dies":
        assert both[rank] == []
        assert answer["since"] < 5
    else:
        assert both[rank][0]["message"] == "no more"
        assert both[rank][0]["since"] < 15
    if rank == 1:
        assert answer["left"] == []
