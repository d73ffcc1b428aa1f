"""Snapshots on disk, told apart and owned."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evalkit.ground.errors import BusyError, DataError, NoSnapshotError, UsageError
from evalkit.ground.files import read_struct, write_struct
from evalkit.ground.layout import MANIFEST, MARKER, RunPaths, SnapshotPaths
from evalkit.ground.locks import open_locked
from evalkit.ground.schema import SnapshotId, SnapshotOwner
from evalkit.ground.tensors import digest_of
from evalkit.state.retirement import empty_trash, sweep_locks
from evalkit.state.snapshot import (
    claim_snapshot_dir,
    hash_directory,
    is_rewritten,
    known_digest,
    list_snapshots,
    open_snapshot,
    resolve_snapshot,
    use_snapshot,
)
from evalkit.state.staging import staging, sweep_incoming
from tests.fakes import tiny_snapshot


def snapshot(root: Path, step: int, *, manifest: bool = True, marker: bool = True) -> Path:
    path = tiny_snapshot(root / f"step_{step}")
    if manifest:
        write_struct(path / MANIFEST, SnapshotId(export_id=f"e{step}", step=step, digest="d", incarnation=2))
    if marker:
        (path / MARKER).touch()
    return path


def test_a_name_is_in_the_snapshot_dir_and_a_path_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_snapshot("step_40", Path("staging")) == tmp_path / "staging" / "step_40"
    assert resolve_snapshot("./step_40", Path("staging")) == tmp_path / "step_40"
    with pytest.raises(UsageError, match="SNAPSHOT_DIR"):
        resolve_snapshot("step_40", None)


def test_a_manifest_and_a_marker_are_read(tmp_path: Path) -> None:
    found = open_snapshot(snapshot(tmp_path, 40))
    assert (found.step, found.export_id, found.digest, found.incarnation) == (40, "e40", "d", 2)
    assert found.complete


def test_a_trainers_own_directory_is_a_snapshot_without_an_export(tmp_path: Path) -> None:
    found = open_snapshot(snapshot(tmp_path, 40, manifest=False))
    assert (found.step, found.export_id, found.digest, found.complete) == (40, None, None, True)


def test_without_its_marker_it_is_not_complete(tmp_path: Path) -> None:
    path = snapshot(tmp_path, 40, marker=False)
    with pytest.raises(NoSnapshotError, match=r"no \.complete"):
        open_snapshot(path)
    assert not open_snapshot(path, need_marker=False).complete


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NoSnapshotError, match="there is no snapshot"):
        open_snapshot(tmp_path / "step_1", need_marker=False)


@pytest.mark.parametrize("content", [b"{", b"{}", b'{"format":2,"export_id":"a","step":40,"digest":"d"}'])
def test_a_damaged_manifest_is_named(tmp_path: Path, content: bytes) -> None:
    path = snapshot(tmp_path, 40)
    (path / MANIFEST).write_bytes(content)
    with pytest.raises(DataError, match=r"step_40/evalkit\.json is not a valid manifest"):
        open_snapshot(path)
    assert [(s.step, s.complete) for s in list_snapshots(tmp_path)] == [(40, False)]


def test_a_copied_directory_does_not_pass_for_another_step(tmp_path: Path) -> None:
    shutil.copytree(snapshot(tmp_path, 40), tmp_path / "step_50")
    with pytest.raises(DataError, match="holds step 40"):
        open_snapshot(tmp_path / "step_50")
    shutil.copytree(tmp_path / "step_40", tmp_path / "best")
    assert open_snapshot(tmp_path / "best").step == 40


def test_an_export_id_names_no_file_elsewhere(tmp_path: Path) -> None:
    path = snapshot(tmp_path, 40)
    write_struct(path / MANIFEST, SnapshotId(export_id="../../x", step=40, digest="d"))
    with pytest.raises(DataError, match=r"not a valid manifest: .* at `\$\.export_id`"):
        open_snapshot(path)


def test_snapshots_are_listed_by_number(tmp_path: Path) -> None:
    for step in (10000, 9000, 2):
        snapshot(tmp_path, step, marker=step != 2)
    for other in (".incoming", "step_x", "checkpoint-3", "step_007"):
        (tmp_path / other).mkdir()
    (tmp_path / "step_4").touch()
    assert [(s.step, s.complete) for s in list_snapshots(tmp_path)] == [(2, False), (9000, True), (10000, True)]
    assert list_snapshots(tmp_path / "nowhere") == []


def test_one_run_owns_a_snapshot_dir(tmp_path: Path) -> None:
    staging_dir = tmp_path / "new" / "staging"
    claim_snapshot_dir(staging_dir, "run-a", tmp_path / "a")
    claim_snapshot_dir(staging_dir, "run-a", tmp_path / "a")
    with pytest.raises(UsageError, match=rf"belongs to run run-a \({tmp_path}/a\)"):
        claim_snapshot_dir(staging_dir, "run-b", tmp_path / "b")
    assert read_struct(SnapshotPaths(staging_dir).owner, SnapshotOwner, "owner").run_id == "run-a"
    assert os.listdir(staging_dir) == [".owner.json"]


def test_a_used_snapshot_cannot_be_locked_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = SnapshotPaths(tmp_path)
    first, second = use_snapshot(tmp_path, "e1"), use_snapshot(tmp_path, "e1")
    assert open_locked(paths.lock("e1")) is None
    os.close(first)
    assert open_locked(paths.lock("e1")) is None
    os.close(second)
    retiring = open_locked(paths.lock("e1"))
    assert retiring is not None
    monkeypatch.setattr("evalkit.state.snapshot.USE_TIMEOUT", 0.0)
    with pytest.raises(BusyError, match="being made or retired"):
        use_snapshot(tmp_path, "e1")
    os.close(retiring)


def test_a_user_waits_for_one_who_looks_at_the_lock_for_a_moment(tmp_path: Path) -> None:
    paths = SnapshotPaths(tmp_path)
    paths.locks.mkdir()
    swept = open_locked(paths.lock("e1"))
    assert swept is not None
    with ThreadPoolExecutor(1) as pool:
        use = pool.submit(use_snapshot, tmp_path, "e1")
        with pytest.raises(TimeoutError):
            use.result(0.05)
        os.close(swept)
        os.close(use.result(10))


def test_a_digest_is_kept_until_a_weight_file_changes(tmp_path: Path) -> None:
    run, path = RunPaths(tmp_path / "run"), snapshot(tmp_path, 40, manifest=False)
    first = known_digest(run, open_snapshot(path))
    assert first == digest_of(hash_directory(path))
    tiny_snapshot(path, value=1.0)
    assert known_digest(run, open_snapshot(path)) == digest_of(hash_directory(path)) != first


def test_a_kept_digest_is_used_again(tmp_path: Path) -> None:
    run, path = RunPaths(tmp_path / "run"), snapshot(tmp_path, 40, manifest=False)
    digest = known_digest(run, open_snapshot(path))
    (kept,) = run.digests.iterdir()
    kept.write_bytes(kept.read_bytes().replace(digest.encode(), b"what-was-kept"))
    assert known_digest(run, open_snapshot(path)) == "what-was-kept"
    kept.write_bytes(b"torn")
    assert known_digest(run, open_snapshot(path)) == digest


def test_the_manifests_digest_needs_no_reading(tmp_path: Path) -> None:
    path = snapshot(tmp_path, 40)
    (path / "model.safetensors").unlink()
    assert known_digest(RunPaths(tmp_path / "run"), open_snapshot(path)) == "d"


def test_only_dead_exports_are_swept(tmp_path: Path) -> None:
    paths = SnapshotPaths(tmp_path)
    dead = dead_export(paths)
    with staging(tmp_path, "alive") as stage:
        assert not dead.exists()
        assert os.listdir(paths.trash) == []
        dead_export(paths)
        assert sweep_incoming(tmp_path) == ["dead"]
        assert os.listdir(paths.trash) == ["dead"]
        assert stage.path.is_dir()
    assert os.listdir(paths.incoming) == []
    assert os.listdir(paths.locks) == []


def dead_export(paths: SnapshotPaths) -> Path:
    dead = paths.incoming / "dead"
    for directory in (dead, paths.locks):
        directory.mkdir(parents=True, exist_ok=True)
    (dead / "model.safetensors").touch()
    paths.lock("dead").touch()
    return dead


def test_an_export_that_is_published_meanwhile_keeps_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = SnapshotPaths(tmp_path)
    dead = dead_export(paths)

    def publish_first(path: Path) -> int | None:
        dead.rename(tmp_path / "step_40")
        return open_locked(path)

    monkeypatch.setattr("evalkit.state.staging.open_locked", publish_first)
    assert sweep_incoming(tmp_path) == []
    assert paths.lock("dead").exists()


def test_only_what_evalkit_made_is_swept(tmp_path: Path) -> None:
    paths = SnapshotPaths(tmp_path)
    for precious in (paths.incoming / "precious", paths.trash / "precious"):
        precious.mkdir(parents=True)
    assert (sweep_incoming(tmp_path), empty_trash(paths)) == ([], [])
    assert sorted(os.listdir(tmp_path)) == [".incoming", ".trash"]
    assert os.listdir(paths.incoming) == os.listdir(paths.trash) == ["precious"]


def test_locks_of_nothing_are_swept(tmp_path: Path) -> None:
    paths = SnapshotPaths(tmp_path)
    snapshot(tmp_path, 40)
    dead_export(paths)
    for export_id in ("e40", "held", "orphan"):
        paths.lock(export_id).touch()
    held = open_locked(paths.lock("held"), shared=True)
    assert held is not None
    assert sweep_locks(paths) == ["orphan"]
    os.close(held)
    assert sweep_locks(paths) == ["held"]
    assert sorted(os.listdir(paths.locks)) == ["dead.lock", "e40.lock"]


def test_a_lock_that_gets_its_snapshot_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = SnapshotPaths(tmp_path)
    paths.locks.mkdir()
    paths.lock("e40").touch()

    def appear_first(path: Path) -> int | None:
        snapshot(tmp_path, 40)
        return open_locked(path)

    monkeypatch.setattr("evalkit.state.retirement.open_locked", appear_first)
    assert sweep_locks(paths) == []
    assert paths.lock("e40").exists()


def test_a_rewritten_directory_is_told_without_hashing(tmp_path: Path) -> None:
    run, path = RunPaths(tmp_path / "run"), snapshot(tmp_path, 40, manifest=False)
    found = open_snapshot(path)
    assert not is_rewritten(run, found, "d")  # nothing is known of it
    digest = known_digest(run, found)
    assert (is_rewritten(run, found, digest), is_rewritten(run, found, "other")) == (False, True)
    tiny_snapshot(path, value=1.0)
    assert (is_rewritten(run, found, digest), is_rewritten(run, found, None)) == (True, False)
    known_digest(run, found)
    assert is_rewritten(run, found, digest)
    (path / "model.safetensors").unlink()
    assert is_rewritten(run, found, digest)


def test_an_export_id_is_used_by_one_export_at_a_time(tmp_path: Path) -> None:
    with staging(tmp_path, "one"), pytest.raises(BusyError, match="under way"), staging(tmp_path, "one"):
        pass
