"""`evalkit export` as its users call it: what it takes, what it makes, what it leaves."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import blake3
import pytest
from pytest_console_scripts import ScriptRunner

from evalkit.ground.layout import MANIFEST, MARKER
from evalkit.ground.schema import Manifest
from evalkit.ground.tensors import INDEX_NAME, digest_of, read_headers
from evalkit.state.snapshot import hash_directory, use_snapshot
from tests.exports import Exports, tensors_in
from tests.models import make_model

pytestmark = pytest.mark.script_launch_mode("inprocess")

TOKENIZER = ["tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "checkpoint", shards=2)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("other") / "checkpoint", seed=1)


@pytest.fixture
def exports(tmp_path: Path, script_runner: ScriptRunner) -> Exports:
    return Exports(tmp_path, script_runner)


def state_dict(model: Path) -> dict[str, object]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def bare(model: Path, path: Path) -> Path:
    """Only the weights of a model."""
    path.mkdir()
    for file in [*model.glob("*.safetensors"), *model.glob(INDEX_NAME)]:
        shutil.copy(file, path)
    return path


def test_a_hugging_face_directory_becomes_a_snapshot(exports: Exports, model: Path) -> None:
    done = exports.call(model)
    snapshot = exports.snapshot_dir / "step_40"
    assert (done.stdout, done.stderr) == (f"{snapshot}\n", "")
    assert tensors_in(snapshot) == tensors_in(model)
    for name in ("config.json", "generation_config.json", *TOKENIZER):
        assert (snapshot / name).read_bytes() == (model / name).read_bytes()
    assert (snapshot / MARKER).exists()
    assert exports.leftovers() == []


def test_the_manifest_says_what_is_there(exports: Exports, model: Path) -> None:
    exports.call(model)
    snapshot = exports.snapshot_dir / "step_40"
    manifest: Manifest = exports.manifest()
    assert manifest.tensors == hash_directory(snapshot)
    assert manifest.digest == digest_of(manifest.tensors)
    assert manifest.total_bytes == sum(map(len, tensors_in(snapshot).values()))
    files = {path.name: path.stat().st_size for path in snapshot.iterdir() if path.name not in (MANIFEST, MARKER)}
    assert manifest.files == files
    sidecars = [name for name in files if not name.endswith(".safetensors") and name != INDEX_NAME]
    assert manifest.hashes == {name: blake3.blake3((snapshot / name).read_bytes()).hexdigest() for name in sidecars}
    assert manifest.missing == []
    assert (manifest.step, manifest.source["path"]) == (40, str(model))


def test_the_answer_in_json(exports: Exports, model: Path) -> None:
    answer = exports.json(model)
    manifest = exports.manifest()
    assert answer.pop("seconds") > 0
    assert answer == {
        "path": str(exports.snapshot_dir / "step_40"), "step": 40, "export_id": manifest.export_id,
        "digest": manifest.digest, "total_bytes": manifest.total_bytes, "unchanged": False, "missing": [],
        "unchecked": "",
    }  # fmt: skip
    failed = json.loads(exports.call(model / "no", "--json", code=66).stdout)
    assert (failed["ok"], failed["error"]["code"], failed["error"]["kind"]) == (False, 66, "no_snapshot")


def test_transformers_loads_it(exports: Exports, model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exports.call(model, "--shard-size", "100KB")
    snapshot = exports.snapshot_dir / "step_40"
    loaded, original = (AutoModelForCausalLM.from_pretrained(path) for path in (snapshot, model))
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), original.parameters(), strict=True))
    assert loaded.generation_config.eos_token_id == [256, 259]
    tokenizer = AutoTokenizer.from_pretrained(snapshot)
    assert "hello" in tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)


@pytest.mark.parametrize("form", ["one file", "files", "pt", "bin", "pytorch_model.bin", "pytorch_model.bin.index"])
def test_every_form_gives_the_same_weights(exports: Exports, model: Path, tmp_path: Path, form: str) -> None:
    import torch
    from safetensors.torch import save_file

    state = state_dict(model)
    source, base = tmp_path / "source", ["--base", str(model)]
    if form == "files":
        bare(model, source)
    elif form == "one file":
        source = tmp_path / "weights.safetensors"
        save_file(state, source)
    elif form in ("pt", "bin"):
        source = tmp_path / f"state.{form}"
        torch.save(state, source)
    else:
        shutil.copytree(model, source, ignore=shutil.ignore_patterns("*.safetensors", INDEX_NAME))
        base = []
        halves = [dict(list(state.items())[i::2]) for i in range(2)] if "index" in form else [state]
        files = ["pytorch_model.bin"] if len(halves) == 1 else [f"pytorch_model-0000{i}-of-2.bin" for i in (1, 2)]
        for file, half in zip(files, halves, strict=True):
            torch.save(half, source / file)
        if len(halves) > 1:
            weight_map = {name: file for file, half in zip(files, halves, strict=True) for name in half}
            (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    exports.call(source, *base)
    assert exports.manifest().digest == digest_of(hash_directory(model))
    assert tensors_in(exports.snapshot_dir / "step_40") == tensors_in(model)
    assert {"config.json", "generation_config.json", *TOKENIZER} <= exports.manifest().files.keys()
    assert not list((exports.snapshot_dir / "step_40").glob("pytorch_model*"))


def test_a_hub_id_is_found_in_the_local_cache_as_files(exports: Exports, model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--base"
    commit = repository / "snapshots" / ("a" * 40)
    shutil.copytree(model, repository / "blobs")
    commit.mkdir(parents=True)
    for file in (repository / "blobs").iterdir():
        (commit / file.name).symlink_to(f"../../blobs/{file.name}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    env = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    source = bare(model, tmp_path / "source")
    for step, base, code in ((40, "org/base", 0), (41, "org/other", 66), (42, "no hub id at all", 66)):
        process = exports.start(source, "--base", base, step=step, env=env)
        assert process.communicate(timeout=60)[1] == "" or code == 66
        assert process.returncode == code
    exports.call(commit, step=43)
    for step in (40, 43):
        snapshot = exports.snapshot_dir / f"step_{step}"
        assert (snapshot / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
        assert tensors_in(snapshot) == tensors_in(model)
        assert not [path for path in snapshot.iterdir() if path.is_symlink()]


def test_a_base_gives_files_but_never_weights(exports: Exports, model: Path, other: Path, tmp_path: Path) -> None:
    source = bare(other, tmp_path / "source")
    exports.call(source, "--base", model)
    snapshot = exports.snapshot_dir / "step_40"
    assert tensors_in(snapshot) == tensors_in(other)
    assert sorted(path.name for path in snapshot.glob("*.safetensors*")) == ["model.safetensors"]


def test_the_sources_own_files_come_before_the_bases(exports: Exports, model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(model, source, ignore=shutil.ignore_patterns("tokenizer*"))
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 2, 3]}')
    (source / "optimizer.pt").write_bytes(b"not for the engine")
    (source / "trainer_state.json").write_text("{}")
    exports.call(source, "--base", model)
    snapshot = exports.snapshot_dir / "step_40"
    assert (snapshot / "generation_config.json").read_text() == '{"eos_token_id": [1, 2, 3]}'
    assert (snapshot / "tokenizer.json").exists()
    assert not (snapshot / "optimizer.pt").exists()
    assert not (snapshot / "trainer_state.json").exists()


def test_end_of_text_ids_outlive_a_missing_generation_config(exports: Exports, model: Path, tmp_path: Path) -> None:
    source = shutil.copytree(model, tmp_path / "source")
    (source / "generation_config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "eos_token_id": [256, 259]}))
    assert exports.call(source).stderr == ""
    written = json.loads((exports.snapshot_dir / "step_40" / "generation_config.json").read_text())
    assert written == {"bos_token_id": 257, "eos_token_id": [256, 259]}


def test_what_a_chat_needs_is_named_when_missing(exports: Exports, model: Path, tmp_path: Path) -> None:
    source = shutil.copytree(model, tmp_path / "source")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    template = settings.pop("chat_template")
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    assert exports.call(source).stderr == "evalkit export: the snapshot has no chat_template\n"
    assert exports.manifest().missing == ["chat_template"]
    (source / "chat_template.jinja").write_text(template)
    assert exports.call(source, step=41).stderr == ""
    for name in TOKENIZER:
        (source / name).unlink()
    assert exports.call(source, step=42).stderr == "evalkit export: the snapshot has no tokenizer\n"


def test_an_unknown_architecture_is_said_not_to_be_checked(exports: Exports, model: Path, tmp_path: Path) -> None:
    source = shutil.copytree(model, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["NovelForCausalLM"]}))
    said = exports.call(source).stderr
    assert "tensors were not compared with the architecture: transformers has no class NovelForCausalLM" in said


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_modes_follow_the_umask(exports: Exports, model: Path, tmp_path: Path, mask: int) -> None:
    source = shutil.copytree(model, tmp_path / "source")
    for file in source.iterdir():
        file.chmod(0o600)
    before = os.umask(mask)
    try:
        exports.call(source)
        exports.call(source, "--shard-size", "100KB", step=41)
        exports.call(source, "--dtype", "bfloat16", step=42)
    finally:
        os.umask(before)
    files = [path for name in exports.names() for path in (exports.snapshot_dir / name).iterdir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~mask}
    assert {stat.S_IMODE(path.parent.stat().st_mode) for path in files} == {0o777 & ~mask}


def test_casting_changes_floats_and_the_configs_word_for_it(exports: Exports, model: Path) -> None:
    import torch

    exports.call(model, "--dtype", "bfloat16")
    snapshot = exports.snapshot_dir / "step_40"
    assert {header.dtype for header in read_headers(snapshot).values()} == {"BF16"}
    assert json.loads((snapshot / "config.json").read_text())["dtype"] == "bfloat16"
    cast, original = state_dict(snapshot), state_dict(model)
    assert all(torch.equal(cast[name], original[name].bfloat16()) for name in original)
    assert exports.manifest().digest == digest_of(hash_directory(snapshot))


def test_a_cast_to_what_it_is_already_is_a_copy(exports: Exports, model: Path) -> None:
    exports.call(model, "--dtype", "float32")
    assert exports.manifest().digest == digest_of(hash_directory(model))


@pytest.mark.parametrize("words", [[], ["--dtype", "bfloat16"]])
def test_no_shard_is_larger_than_asked_for(exports: Exports, model: Path, words: list[str]) -> None:
    exports.call(model, "--shard-size", "100KB", *words)
    snapshot = exports.snapshot_dir / "step_40"
    index = json.loads((snapshot / INDEX_NAME).read_text())
    headers = read_headers(snapshot)
    assert index["metadata"]["total_size"] == sum(h.end - h.start for h in headers.values())
    sizes: dict[str, int] = {}
    for header in headers.values():
        sizes[header.file] = sizes.get(header.file, 0) + header.end - header.start
    assert max(sizes.values()) <= 100_000
    assert sorted(sizes) == [f"model-{i + 1:05}-of-{len(sizes):05}.safetensors" for i in range(len(sizes))]


def test_copies_share_nothing_and_hard_links_do(exports: Exports, model: Path) -> None:
    inodes = {path.stat().st_ino for path in model.glob("*.safetensors")}
    for step, mode in enumerate(("copy", "auto", "hardlink")):
        exports.call(model, "--copy", mode, step=step)
        made = {path.stat().st_ino for path in (exports.snapshot_dir / f"step_{step}").glob("*.safetensors")}
        assert made & inodes == (inodes if mode == "hardlink" else set())
    assert {exports.manifest(step).digest for step in range(3)} == {digest_of(hash_directory(model))}


def test_reflinks_are_made_where_cp_makes_them_and_refused_elsewhere(
    exports: Exports, model: Path, tmp_path: Path
) -> None:
    file = next(model.glob("*.safetensors"))
    possible = subprocess.run(["cp", "--reflink=always", file, tmp_path / "x"], capture_output=True).returncode == 0
    if possible:
        exports.call(model, "--copy", "reflink")
        assert tensors_in(exports.snapshot_dir / "step_40") == tensors_in(model)
    else:
        assert "cannot share blocks" in exports.refused(model, "--copy", "reflink", code=2)


def test_the_same_weights_again_change_nothing(exports: Exports, model: Path, tmp_path: Path) -> None:
    first = exports.json(model)
    marker = (exports.snapshot_dir / "step_40" / MARKER).stat()
    again = exports.json(model)
    resharded = exports.json(model, "--shard-size", "100KB")
    for answer in (again, resharded):
        assert (answer["unchanged"], answer["export_id"], answer["digest"]) == (
            True, first["export_id"], first["digest"],
        )  # fmt: skip
    assert (exports.snapshot_dir / "step_40" / MARKER).stat() == marker
    assert exports.leftovers() == []


def test_other_weights_under_a_step_need_force(exports: Exports, model: Path, other: Path) -> None:
    exports.call(model)
    assert "step_40 is there already with other content; give --force" in exports.refused(other)
    assert exports.manifest().digest == digest_of(hash_directory(model))
    exports.call(other, "--force")
    assert exports.manifest().digest == digest_of(hash_directory(other))
    assert exports.leftovers() == []


@pytest.mark.parametrize("change", ["template", "config", "one less"])
def test_the_same_weights_with_other_files_need_force(
    exports: Exports, model: Path, tmp_path: Path, change: str
) -> None:
    exports.call(model)
    source = tmp_path / "source"
    shutil.copytree(model, source)
    if change == "template":
        (source / "chat_template.jinja").write_text("{{ messages }}")
    elif change == "config":
        edited = {**json.loads((source / "config.json").read_text()), "rope_theta": 1.0}
        (source / "config.json").write_text(json.dumps(edited))
    else:
        (source / "generation_config.json").unlink()
    before = exports.manifest()
    assert "step_40 is there already with other content; give --force" in exports.refused(source)
    assert exports.manifest() == before
    exports.call(source, "--force")
    assert (exports.manifest().digest, exports.manifest().export_id != before.export_id) == (before.digest, True)
    assert exports.manifest().hashes != before.hashes
    assert exports.json(source)["unchanged"]
    assert exports.leftovers() == []


def test_a_snapshot_in_use_is_never_replaced(exports: Exports, model: Path, other: Path) -> None:
    export_id = exports.json(model)["export_id"]
    use = use_snapshot(exports.snapshot_dir, export_id)
    try:
        assert "step_40 is in use" in exports.refused(other, "--force", code=75)
        assert exports.json(model)["unchanged"]
    finally:
        os.close(use)
    exports.call(other, "--force")


@pytest.mark.parametrize("complete", [True, False])
def test_a_directory_of_somebody_else_is_never_replaced(
    exports: Exports, model: Path, other: Path, complete: bool
) -> None:
    target = exports.snapshot_dir / "step_40"
    shutil.copytree(model, target)
    if complete:
        (target / MARKER).touch()
    assert "there already" in exports.refused(other)
    assert "was not made by evalkit" in exports.refused(other, "--force")
    if complete:
        answer = exports.json(model)
        assert (answer["unchanged"], answer["export_id"]) == (True, None)
    assert tensors_in(target) == tensors_in(model)


def test_an_empty_directory_in_the_place_is_not_taken_for_nothing(exports: Exports, model: Path) -> None:
    (exports.snapshot_dir / "step_40").mkdir(parents=True)
    assert "there already" in exports.refused(model)


def test_a_second_run_is_refused(exports: Exports, model: Path, tmp_path: Path) -> None:
    exports.call(model)
    done = exports.call(model, "--run-dir", tmp_path / "second", step=41, code=2)
    assert f"belongs to run {exports.manifest().run_id} ({exports.run.root})" in done.stderr
    assert exports.names() == ["step_40"]


def test_the_snapshot_dir_is_remembered_and_needed(exports: Exports, model: Path, script_runner: ScriptRunner) -> None:
    words = ["evalkit", "export", str(model), "--run-dir", str(exports.run.root), "--step"]
    done = script_runner.run([*words, "1"], print_result=False)
    assert (done.returncode, "--eval-hf-dir" in done.stderr) == (2, True)
    exports.call(model)
    done = script_runner.run([*words, "41"], print_result=False)
    assert done.stdout == f"{exports.snapshot_dir / 'step_41'}\n"


def test_debris_of_a_killed_export_is_swept_by_the_next(exports: Exports, model: Path) -> None:
    debris = exports.paths.incoming / "dead"
    debris.mkdir(parents=True)
    (debris / "model.safetensors").write_bytes(b"half")
    exports.paths.locks.mkdir()
    exports.paths.lock("dead").touch()
    exports.call(model)
    assert exports.leftovers() == []
