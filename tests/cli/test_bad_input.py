"""Mistakes of users: one clear line, the documented code, nothing written; with Python's -O too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import tiny_snapshot

FILE = ["good/model.safetensors", "--step", "1"]
UNEVEN = ["--model", "good", "--num-gpus", "3", "--num-gpus-per-engine", "2"]

# words, exit code, what the message must name
MISTAKES: dict[str, tuple[list[str], int, str]] = {
    "no command of that name": (["expert"], 2, "expert"),
    "export without a step": (["export", "good"], 2, "--step"),
    "export to a step below zero": (["export", "good", "--step", "-1"], 2, "--step"),
    "export of nothing": (["export", "gone", "--step", "1"], 66, "gone"),
    "export of a directory without weights": (["export", "empty", "--step", "1"], 65, "empty"),
    "export of a cut file": (["export", "cut", "--step", "1"], 65, "model.safetensors"),
    "export with a base that is not there": (["export", *FILE, "--base", "no/base"], 66, "no/base"),
    "export without a base": (["export", *FILE], 65, "--base"),
    "export of a pickle": (["export", "evil.pt", "--step", "1", "--base", "good"], 65, "evil.pt"),
    "export of an empty torch file": (["export", "empty.pt", "--step", "1", "--base", "good"], 65, "empty.pt"),
    "export to an unknown dtype": (["export", "good", "--step", "1", "--dtype", "int3"], 2, "int3"),
    "export with a shard size that is none": (["export", "good", "--step", "1", "--shard-size", "big"], 2, "big"),
    "fleet up without a model": (["fleet", "up", "--engines", "1"], 2, "--model"),
    "fleet up with a model that is not there": (["fleet", "up", "--model", "gone", "--engines", "1"], 66, "gone"),
    "fleet up with no engines": (["fleet", "up", "--model", "good", "--engines", "0"], 2, "--engines"),
    "fleet up with GPUs that do not divide": (["fleet", "up", *UNEVEN], 2, "3"),
    "a fleet of no name": (["fleet", "up", "--model", "good", "--engines", "1", "--fleet", "a b"], 2, "a b"),
    "fleet status without a fleet": (["fleet", "status"], 69, "fleet up"),
    "probe without a fleet": (["probe"], 69, "fleet up"),
    "pin without a snapshot": (["pin"], 2, "snapshot"),
    "pin twice named": (["pin", "step_1", "--dir", "step_2"], 2, "--dir"),
    "run without a suite": (["run", "good"], 2, "--suite"),
    "run with a suite that is not there": (["run", "good", "--suite", "no.yaml"], 2, "no.yaml"),
    "run with a suite that is no YAML": (["run", "good", "--suite", "broken.yaml"], 65, "broken.yaml"),
    "run with a suite of unknown keys": (["run", "good", "--suite", "unknown.yaml"], 65, "temprature"),
    "dispatch without a suite": (["dispatch", "--step", "1", "--eval-hf-dir", "s"], 2, "--suite"),
    "dispatch without a snapshot directory": (["dispatch", "--step", "1", "--suite", "ok.yaml"], 2, "--eval-hf-dir"),
    "dispatch keeping too few": (["dispatch", "--step", "1", "--keep", "1"], 2, "--keep"),
    "dispatch of two things": (["dispatch", "--from", "good", "--baseline", "good"], 2, "--baseline"),
    "dispatch with a policy of no name": (["dispatch", "--policy", "drop"], 2, "drop"),
    "dispatch with a wait that is none": (["dispatch", "--wait", "soon"], 2, "soon"),
    "drain without a run": (["drain"], 2, "--run-dir"),
    "status without a run": (["status"], 2, "--run-dir"),
    "gc without a run": (["gc"], 2, "--run-dir"),
    "gc keeping less than none": (["gc", "--keep", "-1"], 2, "--keep"),
    "cancel without a run": (["cancel", "1"], 2, "--run-dir"),
    "cancel of no step": (["cancel", "step_1"], 2, "step_1"),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mistakes")
    tiny_snapshot(root / "good")
    tiny_snapshot(root / "cut")
    (root / "cut" / "model.safetensors").write_bytes((root / "good" / "model.safetensors").read_bytes()[:-7])
    (root / "empty").mkdir()
    (root / "empty" / "config.json").write_text("{}")
    (root / "evil.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    (root / "empty.pt").touch()
    (root / "d.jsonl").write_text('{"input": "a", "label": "b"}\n')
    (root / "broken.yaml").write_text("eval: [")
    (root / "ok.yaml").write_text("eval:\n  datasets:\n    d: {path: d.jsonl, rm_type: exact}\n")
    (root / "unknown.yaml").write_text("eval:\n  datasets:\n    d: {path: d.jsonl, rm_type: exact, temprature: 1}\n")
    return root


def call(place: Path, run_dir: Path, words: list[str], *flags: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("EVALKIT_", "SLURM_"))}
    env["EVALKIT_RUN_DIR"] = str(run_dir)
    if words[0] == "export":
        env["EVALKIT_EVAL_HF_DIR"] = str(run_dir.parent / "snapshots")
    command = [sys.executable, *flags, "-m", "evalkit", *words]
    return subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("flags", [(), ("-O",)], ids=["plain", "optimized"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_clear_line(place: Path, tmp_path: Path, mistake: str, flags: tuple[str, ...]) -> None:
    words, code, fragment = MISTAKES[mistake]
    done = call(place, tmp_path / "run", words, *flags)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert fragment in done.stderr
    said = [line for line in done.stderr.splitlines() if line and not line.startswith(("Usage:", "Try "))]
    assert len(said) == 1, done.stderr
    if code == 2:
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "verb", "fragment"),
    [
        (["status", "--nonsense", "--json"], "status", "--nonsense"),
        (["export", "--json"], "export", "SOURCE"),
        (["fleet", "up", "--json", "--model", "x", "--engines", "none"], "fleet up", "--engines"),
        (["nothing", "--json"], "", "nothing"),
    ],
)
def test_json_has_what_the_parser_refuses(
    place: Path, tmp_path: Path, words: list[str], verb: str, fragment: str
) -> None:
    done = call(place, tmp_path / "run", words)
    answer = json.loads(done.stdout)
    assert (answer["format"], answer["verb"], answer["ok"]) == (1, verb, False)
    assert (answer["error"]["kind"], answer["error"]["code"], done.returncode) == ("usage", 2, 2)
    assert fragment in answer["error"]["message"]
    assert fragment in done.stderr


def test_json_for_vllm_is_no_flag_of_evalkit(place: Path, tmp_path: Path) -> None:
    done = call(place, tmp_path / "run", ["fleet", "up", "--engines", "none", "--", "--json"])
    assert (done.returncode, done.stdout) == (2, "")


def test_json_has_the_error_too(place: Path, tmp_path: Path) -> None:
    done = call(place, tmp_path / "run", ["export", "gone", "--step", "1", "--json"])
    answer = json.loads(done.stdout)
    assert (answer["format"], answer["verb"], answer["ok"]) == (1, "export", False)
    assert answer["error"]["code"] == done.returncode == 66
    assert "gone" in answer["error"]["message"]
