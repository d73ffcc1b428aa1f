"""Which GPUs or cores an engine gets."""

from __future__ import annotations

import pytest

from evalkit.decisions.placement import choose_gpus, parse_visible, split_cores
from evalkit.ground.devices import Gpu
from evalkit.ground.errors import UnavailableError, UsageError


def gpu(index: int, used: int = 4, *pids: int) -> Gpu:
    return Gpu(str(index), f"GPU-{index}{index}{index}-abc", used, 80_000, pids)


FOUR = [gpu(i) for i in range(4)]


def choose(gpus: list[Gpu], count: int, **options: object) -> list[str]:
    defaults: dict[str, object] = {"visible": None, "claimed": {}, "wanted": None}
    return choose_gpus(gpus, count=count, **{**defaults, **options})


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (None, None),
        ("", []),
        ("0,1", ["0", "1"]),
        (" 6 , 7 ", ["6", "7"]),
        ("GPU-abc,2", ["GPU-abc", "2"]),
        ("0,-1,2", ["0"]),
        ("-1", []),
        ("0,1,0", ["0", "1"]),
    ],
)
def test_visible_devices_are_read_as_cuda_does(text: str | None, ids: list[str] | None) -> None:
    assert parse_visible(text) == ids


@pytest.mark.parametrize(
    ("count", "options", "chosen"),
    [
        (2, {}, ["0", "1"]),
        (2, {"visible": ["3", "1", "2"]}, ["3", "1"]),
        (2, {"wanted": ["3", "0"]}, ["3", "0"]),
        (1, {"visible": ["GPU-222-abc", "3"]}, ["GPU-222-abc"]),
        (1, {"visible": ["GPU-222"]}, ["GPU-222"]),
        (1, {"claimed": {"0": 7}}, ["1"]),
        (1, {"claimed": {"GPU-000-abc": 7}}, ["1"]),
        (1, {"visible": ["GPU-000", "1"], "claimed": {"0": 7}}, ["1"]),
        (1, {"claimed": {"17": 7}}, ["0"]),
        (1, {"visible": ["MIG-1", "0"]}, ["MIG-1"]),
        (1, {"visible": ["MIG-1", "0"], "claimed": {"MIG-1": 7}}, ["0"]),
    ],
)
def test_free_ones_are_taken_in_order(count: int, options: dict[str, object], chosen: list[str]) -> None:
    assert choose(FOUR, count, **options) == chosen


def test_occupied_ones_are_passed_over() -> None:
    assert choose([gpu(0, 9_000), gpu(1, 700, 12), gpu(2, 700)], 1) == ["2"]


@pytest.mark.parametrize(
    ("count", "options", "error", "message"),
    [
        (1, {"wanted": ["9"]}, UsageError, "this machine has the GPUs 0, 1, 2, 3"),
        (1, {"wanted": ["0"], "visible": ["1"]}, UsageError, "--gpus 0 is outside CUDA_VISIBLE_DEVICES=1"),
        (2, {"wanted": ["1", "1"]}, UsageError, "twice"),
        (1, {"wanted": ["1", "2"]}, UsageError, "names 2 GPUs, but the engines need 1"),
        (1, {"visible": ["9"]}, UsageError, "CUDA_VISIBLE_DEVICES names GPU 9"),
        (1, {"visible": []}, UnavailableError, "0 of 0 visible GPUs are free, 1 are needed"),
        (5, {}, UnavailableError, "4 of 4 visible GPUs are free, 5 are needed"),
        (1, {"wanted": ["1"], "claimed": {"1": 77}}, UnavailableError, r"GPU 1 is taken by an engine .*pid 77"),
    ],
)
def test_what_cannot_be_had(count: int, options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        choose(FOUR, count, **options)


def test_an_occupied_one_is_named_with_its_processes() -> None:
    with pytest.raises(UnavailableError, match=r"GPU 0 is occupied by pid 12, 13 \(9000 MiB\)"):
        choose([gpu(0, 9_000, 12, 13)], 1, wanted=["0"])


@pytest.mark.parametrize(
    ("cores", "engines", "ranks", "groups"),
    [
        ([0, 1], 1, 1, [[0, 1]]),
        ([0, 1], 2, 1, [[0], [1]]),
        ([0, 1], 1, 2, [[0, 1]]),
        ([0, 1], 3, 1, [[0], [1], [0]]),
        ([4], 1, 2, [[4, 4]]),
        ([0, 1, 2, 3, 4], 2, 1, [[0, 1], [2, 3]]),
        ([2, 3, 6, 7, 8, 9, 10, 11], 2, 2, [[2, 3, 6, 7], [8, 9, 10, 11]]),
    ],
)
def test_cores_are_split_over_engines_and_ranks(
    cores: list[int], engines: int, ranks: int, groups: list[list[int]]
) -> None:
    assert split_cores(cores, engines, ranks) == groups
