"""`evalkit fleet`: how it starts, watches and ends processes; the engines are stand-ins that fail as they are told."""

from __future__ import annotations

import os
import pty
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from evalkit.ground.locks import locked
from evalkit.ground.processes import is_alive, start_time
from evalkit.state.fleet import change_fleet
from tests.fleets import FAKE_GPU_BUILD, FAKE_VLLM, FleetCommands, fake_nvidia_smi, kill_server, mode_of, wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def fleets(tmp_path: Path) -> Iterator[FleetCommands]:
    fleets = FleetCommands(tmp_path)
    yield fleets
    fleets.down_all()


# Starting


def test_up_starts_engines_and_says_where_they_are(fleets: FleetCommands) -> None:
    done = fleets.up(engines=2)
    engines = fleets.engines()
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["0", engines[0].url], ["1", engines[1].url]]
    record = fleets.record()
    assert (record.state, record.model, record.served_model) == ("up", str(fleets.model), "policy")
    for engine in engines:
        assert engine.process is not None
        assert os.getsid(engine.process.pid) == engine.process.pid
        assert os.readlink(f"/proc/{engine.process.pid}/fd/0") == os.devnull
        assert os.readlink(f"/proc/{engine.process.pid}/fd/2") == engine.log


def test_engines_share_the_cores_and_are_offline_and_without_dev_mode(tmp_path: Path) -> None:
    fleets = FleetCommands(tmp_path, {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": "secret"})
    fleets.up(engines=2, options=["--num-gpus-per-engine", "2"])
    cores = sorted(os.sched_getaffinity(0))
    for engine in fleets.engines():
        assert engine.process is not None
        raw = Path(f"/proc/{engine.process.pid}/environ").read_bytes()
        environment = dict(item.split(b"=", 1) for item in raw.split(b"\0") if b"=" in item)
        assert not {b"VLLM_SERVER_DEV_MODE", b"VLLM_API_KEY"} & set(environment)
        assert (environment[b"HF_HUB_OFFLINE"], environment[b"PYTHONSAFEPATH"]) == (b"1", b"1")
        ranks = environment[b"VLLM_CPU_OMP_THREADS_BIND"].decode().split("|")
        assert len(ranks) == engine.tensor_parallel == 2
        assert {int(core) for rank in ranks for core in rank.split(",")} <= set(cores)
    fleets.down_all()
    fleets.assert_nothing_left()


def test_the_key_is_only_in_its_file(fleets: FleetCommands) -> None:
    done = fleets.up()
    paths, (engine,) = fleets.paths(), fleets.engines()
    key = paths.key.read_bytes().strip()
    assert len(key) == 64
    assert mode_of(paths.key) == 0o600
    assert engine.process is not None
    places = [*fleets.run.fleets.glob("*.json"), Path(engine.log), fleets.run.record]
    places += [Path(f"/proc/{engine.process.pid}/{name}") for name in ("environ", "cmdline")]
    assert [place for place in places if key in place.read_bytes()] == []
    assert key.decode() not in done.stdout + done.stderr + fleets.call("fleet", "status", "--json").stdout


def test_up_again_starts_nothing(fleets: FleetCommands) -> None:
    fleets.up(engines=2)
    before = fleets.engines()
    assert len(fleets.up(engines=2).stdout.splitlines()) == 2
    assert fleets.engines() == before


def test_up_again_starts_only_what_is_dead(fleets: FleetCommands) -> None:
    fleets.up(engines=2)
    dead, alive = fleets.engines()
    kill_server(dead)
    fleets.up(engines=2)
    started, same = fleets.engines()
    assert same == alive
    assert started.engine_id != dead.engine_id
    assert started.process is not None
    assert is_alive(started.process)
    assert [p.pid for p in fleets.processes() if p.start_time < started.process.start_time] == [
        p.pid for p in fleets.processes() if os.getsid(p.pid) == alive.process.pid
    ]


@pytest.mark.parametrize(
    ("args", "engines", "options"),
    [(["--die-if", "nothing"], 1, []), ([], 2, []), ([], 1, ["--num-gpus-per-engine", "2"])],
)
def test_up_with_another_launch_line_is_refused(
    fleets: FleetCommands, args: list[str], engines: int, options: list[str]
) -> None:
    fleets.up()
    before = fleets.engines()
    done = fleets.up(*args, engines=engines, options=options, code=2)
    assert "evalkit fleet down" in done.stderr
    assert fleets.engines() == before


def test_an_engine_that_dies_at_once_fails_the_start_with_the_end_of_its_log(fleets: FleetCommands) -> None:
    done = fleets.up("--die", "no such device", code=69)
    assert "engine 0 ended with code 3" in done.stderr
    assert "no such device" in done.stderr.splitlines()[-2]
    assert "line 39" in done.stderr
    assert "line 3\n" not in done.stderr
    assert done.stdout == ""
    assert fleets.record().state == "down"
    assert not fleets.paths().key.exists()


def test_a_flag_that_vllm_does_not_know_is_shown(fleets: FleetCommands) -> None:
    assert "unrecognized arguments: --no-such-flag" in fleets.up("--no-such-flag", code=69).stderr


def test_one_engine_that_dies_takes_the_others_of_the_start_along(fleets: FleetCommands) -> None:
    die, go = fleets.root / "die", fleets.root / "go"
    die.touch()
    start = fleets.start(*fleets.up_words("--die-if", str(die), "--wait-for", str(go), engines=2))
    wait_until("engines are recorded", lambda: fleets.paths().record.exists() and fleets.engines())
    assert start.wait(60) == 69
    start.communicate()
    assert fleets.record().state == "down"
    fleets.assert_nothing_left()


def test_a_start_that_takes_too_long_is_ended(fleets: FleetCommands) -> None:
    start = fleets.start(*fleets.up_words("--hang", options=["--timeout", "2"]))
    wait_until("the engine is recorded", lambda: fleets.paths().record.exists() and fleets.engines())
    _, err = start.communicate(timeout=60)
    assert start.returncode == 69
    assert "engine 0 was not up within 2 s" in err
    fleets.assert_nothing_left()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_start_leaves_nothing(fleets: FleetCommands, signum: signal.Signals, code: int) -> None:
    start = fleets.start(*fleets.up_words("--hang", engines=2))
    wait_until("both engines run", lambda: fleets.paths().record.exists() and _started(fleets) == 2)
    start.send_signal(signum)
    _, err = start.communicate(timeout=60)
    assert start.returncode == code
    assert "Traceback" not in err
    assert fleets.record().state == "down"
    fleets.assert_nothing_left()


def _started(fleets: FleetCommands) -> int:
    """How many engines run and have mapped what they map."""
    return sum("core ready" in Path(engine.log).read_text() for engine in fleets.engines() if Path(engine.log).exists())


def test_a_killed_start_is_finished_by_the_next_one(fleets: FleetCommands) -> None:
    go = fleets.root / "go"
    start = fleets.start(*fleets.up_words("--wait-for", str(go), engines=2))
    wait_until("both engines run", lambda: fleets.paths().record.exists() and _started(fleets) == 2)
    start.kill()
    start.communicate()
    before = fleets.engines()
    go.touch()
    fleets.up("--wait-for", str(go), engines=2)
    assert fleets.engines() == before
    assert fleets.record().state == "up"


def test_a_killed_start_is_cleared_away_by_down(fleets: FleetCommands) -> None:
    start = fleets.start(*fleets.up_words("--hang", engines=2))
    wait_until("both engines run", lambda: fleets.paths().record.exists() and _started(fleets) == 2)
    start.kill()
    start.communicate()
    fleets.engines()
    fleets.call("fleet", "down")
    fleets.assert_nothing_left()


def test_of_two_starts_at_once_one_starts_the_engines(fleets: FleetCommands) -> None:
    starts = [fleets.start(*fleets.up_words(engines=2)) for _ in range(2)]
    outputs = [start.communicate(timeout=60)[0] for start in starts]
    assert [start.returncode for start in starts] == [0, 0]
    assert outputs[0] == outputs[1]
    assert len(fleets.engines()) == 2


def test_a_start_does_not_wait_for_ever_for_another(fleets: FleetCommands) -> None:
    fleets.run.fleets.mkdir(parents=True)
    with locked(fleets.paths().launch_lock, 0):
        done = fleets.call(*fleets.up_words(options=["--timeout", "0.2"]), code=75)
    assert "is locked by another process" in done.stderr


def test_down_ends_a_start_under_way(fleets: FleetCommands) -> None:
    start = fleets.start(*fleets.up_words("--hang", engines=2))
    wait_until("both engines run", lambda: fleets.paths().record.exists() and _started(fleets) == 2)
    fleets.call("fleet", "down")
    _, err = start.communicate(timeout=60)
    assert start.returncode == 69
    assert "brought down meanwhile" in err
    fleets.assert_nothing_left()


def test_an_engine_that_loses_its_port_gets_another(fleets: FleetCommands) -> None:
    thief = fleets.root / "thief"
    fleets.up("--lose-port", str(thief))
    pid = int(thief.read_text())
    assert start_time(pid) is not None
    os.kill(pid, signal.SIGKILL)
    assert [line.split()[2] for line in fleets.call("fleet", "status").stdout.splitlines()] == ["unpinned"]


def test_engines_outlive_the_terminal_that_they_were_started_from(fleets: FleetCommands) -> None:
    go = fleets.root / "go"
    words = fleets.up_words("--wait-for", str(go))
    shell = '"$@"; echo "code $?"; exec sleep 60'
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(fleets.root)
        os.execve("/bin/sh", ["sh", "-c", shell, "sh", sys.executable, "-m", "evalkit", *words], fleets.environment)
    shown = b""
    try:
        while b"code " not in shown:
            shown += os.read(terminal, 4096)
            if b"0 of 1 engines up" in shown:
                go.touch()
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)  # the shell ends by the hang-up
    assert b"code 0" in shown
    (engine,) = fleets.engines()
    assert engine.process is not None
    assert is_alive(engine.process)
    assert "ready" in fleets.call("probe").stdout


# Ending


def test_down_ends_everything_and_can_be_run_again(fleets: FleetCommands) -> None:
    fleets.up(engines=2)
    epoch = fleets.record().epoch
    wait_until("cores have mapped their memory", lambda: len(fleets.shared_memory()) == 2)
    assert "2 engines ended" in fleets.call("fleet", "down").stdout
    fleets.assert_nothing_left()
    record = fleets.record()
    assert (record.state, record.engines) == ("down", [])
    assert record.epoch > epoch
    assert not fleets.paths().key.exists()
    assert fleets.call("fleet", "down").stdout == "fleet eval is down\n"
    assert fleets.call("fleet", "status").stdout == "fleet eval is down\n"


def test_down_finds_what_a_killed_server_leaves(fleets: FleetCommands) -> None:
    fleets.up(engines=2)
    wait_until("cores have mapped their memory", lambda: len(fleets.shared_memory()) == 2)
    for engine in fleets.engines():
        kill_server(engine)
    assert fleets.processes()
    fleets.call("fleet", "down")
    fleets.assert_nothing_left()


def test_down_keeps_snapshots_that_engines_have_mapped(fleets: FleetCommands) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        snapshots = [Path(name) / "psm_model.safetensors", Path(f"{name}.safetensors")]
        try:
            fleets.up(*(word for path in snapshots for word in ("--maps", str(path))))
            wait_until("the core has mapped its memory", lambda: fleets.shared_memory() and snapshots[-1].exists())
            fleets.call("fleet", "down")
            assert [path.exists() for path in snapshots] == [True, True]
        finally:
            snapshots[-1].unlink(missing_ok=True)
    fleets.assert_nothing_left()


def test_down_touches_no_other_fleet(fleets: FleetCommands) -> None:
    fleets.up()
    fleets.up(options=["--fleet", "other"])
    mine, other = fleets.engines(), fleets.engines("other")
    fleets.call("fleet", "down", "--fleet", "other")
    assert {p.pid for p in fleets.processes()} >= {e.process.pid for e in mine if e.process}
    assert not any(is_alive(engine.process) for engine in other if engine.process)
    assert fleets.call("probe").returncode == 0


def test_a_fleet_may_stand_outside_of_the_run(fleets: FleetCommands) -> None:
    path = fleets.root / "shared" / "big.json"
    fleets.up(options=["--fleet", str(path)])
    record = fleets.json("fleet", "status", "--fleet", str(path))
    assert (record["fleet"], record["state"], len(record["engines"])) == ("big", "up", 1)
    fleets.call("fleet", "down", "--fleet", str(path))


def test_down_raises_the_epoch_and_replaces_a_holder(fleets: FleetCommands) -> None:
    from evalkit.ground.errors import UnavailableError
    from evalkit.state.fleet_queue import hold_fleet

    fleets.up()
    with hold_fleet(fleets.paths(), timeout=5) as hold:
        epoch = hold.next_epoch()
        fleets.call("fleet", "down")
        for step in (hold.check, hold.next_epoch):
            with pytest.raises(UnavailableError, match="was taken down") as caught:
                step()
            assert caught.value.skip_reason == "unhealthy"
    assert fleets.record().epoch > epoch


def test_down_clears_what_the_dead_left_half_done_and_nothing_else(fleets: FleetCommands) -> None:
    fleets.up()
    paths = fleets.paths()
    paths.queue.mkdir(exist_ok=True)
    old, queued, new = paths.directory / ".tmp-old", paths.queue / ".tmp-old", paths.directory / ".tmp-new"
    for leftover in (old, queued, new):
        leftover.touch()
    for leftover in (old, queued):
        os.utime(leftover, (1, 1))
    fleets.call("fleet", "down")
    assert [leftover.exists() for leftover in (old, queued, new)] == [False, False, True]


def test_a_hold_that_cannot_be_written_down_leaves_the_fleet_free(
    fleets: FleetCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    from evalkit.ground.locks import is_held
    from evalkit.state import fleet_queue

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    fleets.up()
    paths = fleets.paths()
    with monkeypatch.context() as broken:
        broken.setattr(fleet_queue, "change_fleet", full)
        with pytest.raises(OSError, match="No space"), fleet_queue.hold_fleet(paths, timeout=5):
            pass
    assert not is_held(paths.lock)
    assert not list(paths.queue.iterdir())


# Looking


def test_status_tells_how_each_engine_is(fleets: FleetCommands) -> None:
    fleets.up(engines=3)
    dead, hung, _ = fleets.engines()
    kill_server(dead)
    kill_server(hung, signal.SIGSTOP)
    try:
        engines = fleets.json("fleet", "status")["engines"]
    finally:
        kill_server(hung, signal.SIGCONT)
    assert [engine["state"] for engine in engines] == ["dead", "hung", "unpinned"]
    assert [engine["index"] for engine in engines] == [0, 1, 2]


def test_logs_that_go_on_are_no_object(fleets: FleetCommands) -> None:
    assert "exclude each other" in fleets.call("fleet", "logs", "--follow", "--json", code=2).stderr


def test_logs_show_their_end(fleets: FleetCommands) -> None:
    fleets.up(engines=2)
    assert "[0] starting" in fleets.call("fleet", "logs").stdout
    assert "starting" in fleets.call("fleet", "logs", "--engine", "1").stdout.splitlines()
    assert fleets.call("fleet", "logs", "--engine", "1", "--lines", "0").stdout == ""
    assert "engine 7" in fleets.call("fleet", "logs", "--engine", "7", code=2).stderr


def test_logs_follow(fleets: FleetCommands) -> None:
    fleets.up()
    (engine,) = fleets.engines()
    follower = fleets.start("fleet", "logs", "--follow")
    assert follower.stdout is not None
    for line in follower.stdout:
        if line == "starting\n":
            break
    with Path(engine.log).open("a") as log:
        log.write("something new\n")
    wait_until("the new line is shown", lambda: follower.stdout.readline() == "something new\n")
    follower.send_signal(signal.SIGINT)
    assert follower.wait(30) == 130
    follower.communicate()


# Arguments


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--engines", "1", "--num-gpus", "1"], 2, "either --num-gpus N or --engines K"),
        ([], 2, "either --num-gpus N or --engines K"),
        (["--engines", "0"], 2, "--engines"),
        (["--num-gpus", "3", "--num-gpus-per-engine", "2"], 2, "not divisible"),
        (["--num-gpus", "1", "--gpus", "1,"], 2, "no list of GPU ids"),
        (["--engines", "1", "--timeout", "soon"], 2, "no duration"),
        (["--engines", "1", "--fleet", "a b"], 2, "neither a name nor a path"),
        (["--engines", "1", "--", "--port", "1"], 2, "evalkit chooses the ports"),
        (["--engines", "1", "--", "--model=x"], 2, "--model"),
        (["--engines", "1", "--", "--tensor_parallel_size=2"], 2, "--num-gpus-per-engine"),
        (["--engines", "1", "--", "--worker-ext", "x"], 2, "worker extension"),
        (["--engines", "1", "--", "--api-key", "x"], 2, "no API key"),
        (["--engines", "1", "--model", "/nonexistent"], 66, "/nonexistent"),
        (["--engines", "1", "--model", "."], 65, "config.json"),
    ],
)
def test_up_refuses(fleets: FleetCommands, words: list[str], code: int, message: str) -> None:
    given = words if "--model" in words else ["--model", str(fleets.model), *words]
    done = fleets.call("fleet", "up", *given, code=code)
    assert message in done.stderr
    assert done.stdout == ""
    assert not list(fleets.run.fleets.glob("*"))


@pytest.mark.parametrize("words", [["fleet", "status"], ["fleet", "down"], ["probe"], ["pin", "./model"]])
def test_without_a_fleet(fleets: FleetCommands, words: list[str]) -> None:
    assert "there is no fleet eval" in fleets.call(*words, code=69).stderr


def test_engines_on_another_host_are_left_alone(fleets: FleetCommands) -> None:
    fleets.up()
    here = fleets.record()
    (engine,) = here.engines
    assert engine.process is not None
    process = msgspec.structs.replace(engine.process, host="other-node")
    engines = [msgspec.structs.replace(engine, process=process)]
    change_fleet(fleets.paths(), lambda record: msgspec.structs.replace(record, engines=engines))
    told = "engine 0 runs on other-node; start and stop the fleet's engines there"
    assert told in fleets.up(code=69).stderr
    assert told in fleets.call("fleet", "down", code=69).stderr
    change_fleet(fleets.paths(), lambda record: here)


def test_a_damaged_record_is_named(fleets: FleetCommands) -> None:
    fleets.run.fleets.mkdir(parents=True)
    fleets.paths().record.write_text('{"format": 1, "name": 3}')
    assert "$.name" in fleets.call("fleet", "status", code=65).stderr
    fleets.paths().record.write_text('{"format": 2, "name": "eval"}')
    assert "$.format" in fleets.call("fleet", "status", code=65).stderr
    fleets.paths().record.unlink()


def test_without_vllm(tmp_path: Path) -> None:
    (tmp_path / "hidden" / "sitecustomize.py").parent.mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'vllm' else find(name, *more)\n"
    )
    fleets = FleetCommands(tmp_path, {"PYTHONPATH": str(tmp_path / "hidden")})
    assert "vLLM is not installed" in fleets.up(code=69).stderr


# GPUs


def gpu_fleets(tmp_path: Path, *, used: int = 10, pid: int | None = None, **environment: str) -> FleetCommands:
    """On a machine with two GPUs of random numbers `ids`; the second has `used` MiB in use, by `pid`."""
    ids = sorted(random.Random(str(tmp_path)).sample(range(1000, 9999), 2))
    apps = [(str(ids[1]), pid)] if pid else []
    smi = fake_nvidia_smi(tmp_path / "bin", [(str(ids[0]), 10), (str(ids[1]), used)], apps)
    fleets = FleetCommands(
        tmp_path,
        {
            "PATH": f"{smi}:{os.environ['PATH']}",
            "PYTHONPATH": f"{FAKE_VLLM}:{FAKE_GPU_BUILD}",
            **{name: value.format(*ids) for name, value in environment.items()},
        },
    )
    fleets.environment.setdefault("CUDA_VISIBLE_DEVICES", f"{ids[0]},{ids[1]}")
    fleets.gpus = [str(number) for number in ids]
    return fleets


def up_on_gpus(fleets: FleetCommands, *options: str, code: int = 0) -> str:
    words = ["fleet", "up", "--model", str(fleets.model), *(option.format(*_gpus(fleets)) for option in options)]
    done = fleets.call(*words, code=code)
    if code == 0:
        fleets.record()
    return done.stderr


def _gpus(fleets: FleetCommands) -> list[str]:
    return fleets.gpus


def test_each_engine_gets_its_own_gpus(tmp_path: Path) -> None:
    fleets = gpu_fleets(tmp_path)
    up_on_gpus(fleets, "--num-gpus", "2")
    try:
        assert [engine.gpus for engine in fleets.engines()] == [[gpu] for gpu in _gpus(fleets)]
        for engine in fleets.engines():
            assert engine.process is not None
            environment = Path(f"/proc/{engine.process.pid}/environ").read_bytes().split(b"\0")
            assert f"CUDA_VISIBLE_DEVICES={engine.gpus[0]}".encode() in environment
            assert not any(item.startswith(b"VLLM_CPU_OMP") for item in environment)
        err = up_on_gpus(fleets, "--num-gpus", "1", "--gpus", "{0}", "--fleet", "other", code=69)
        taken = fleets.engines()[0].process
        assert f"GPU {_gpus(fleets)[0]} is taken by an engine of a fleet (pid " in err
        assert taken is not None
        assert "0 of 2 visible GPUs are free" in up_on_gpus(fleets, "--num-gpus", "1", "--fleet", "other", code=69)
    finally:
        fleets.down_all()
    fleets.assert_nothing_left()


def test_an_engine_can_have_several_gpus(tmp_path: Path) -> None:
    fleets = gpu_fleets(tmp_path)
    up_on_gpus(fleets, "--num-gpus", "2", "--num-gpus-per-engine", "2", "--gpus", "{1},{0}")
    (engine,) = fleets.engines()
    assert (engine.gpus, engine.tensor_parallel) == (_gpus(fleets)[::-1], 2)
    fleets.down_all()


def test_an_occupied_gpu_is_refused_with_its_process(tmp_path: Path) -> None:
    fleets = gpu_fleets(tmp_path, used=70_000, pid=4242)
    err = up_on_gpus(fleets, "--num-gpus", "1", "--gpus", "{1}", code=69)
    assert f"GPU {_gpus(fleets)[1]} is occupied by pid 4242 (70000 MiB)" in err
    err = up_on_gpus(fleets, "--num-gpus", "2", code=69)
    assert "1 of 2 visible GPUs are free, 2 are needed" in err
    assert "4242" in err


def test_an_occupied_gpu_is_refused_though_its_process_is_hidden(tmp_path: Path) -> None:
    fleets = gpu_fleets(tmp_path, used=70_000)
    assert "can't be seen from here" in up_on_gpus(fleets, "--num-gpus", "1", "--gpus", "{1}", code=69)


def test_free_gpus_are_chosen_around_an_occupied_one(tmp_path: Path) -> None:
    fleets = gpu_fleets(tmp_path, used=70_000, pid=4242)
    up_on_gpus(fleets, "--num-gpus", "1")
    assert fleets.engines()[0].gpus == _gpus(fleets)[:1]
    fleets.down_all()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--num-gpus", "1", "--gpus", "{1}"], 2, "outside CUDA_VISIBLE_DEVICES={0}"),
        (["--num-gpus", "2", "--gpus", "{0}"], 2, "names 1 GPUs, but the engines need 2"),
        (["--num-gpus", "2", "--gpus", "{0},{0}"], 2, "names a GPU twice"),
        (["--num-gpus", "2"], 69, "1 of 1 visible GPUs are free, 2 are needed"),
    ],
)
def test_only_visible_gpus_are_used(tmp_path: Path, options: list[str], code: int, message: str) -> None:
    fleets = gpu_fleets(tmp_path, CUDA_VISIBLE_DEVICES="{0}")
    assert message.format(*_gpus(fleets)) in up_on_gpus(fleets, *options, code=code)


def test_a_machine_without_gpus(tmp_path: Path) -> None:
    fleets = FleetCommands(tmp_path, {"PATH": str(tmp_path)})
    err = up_on_gpus_of_none(fleets)
    assert "no nvidia-smi" in err
    assert "--engines" in err


def up_on_gpus_of_none(fleets: FleetCommands) -> str:
    return fleets.call("fleet", "up", "--model", str(fleets.model), "--num-gpus", "1", code=69).stderr


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'NVIDIA-SMI has failed' >&2; exit 9", "nvidia-smi failed with code 9: NVIDIA-SMI has failed"),
        ("exit 0", "shows no GPU"),
        ("echo something else", "can't be read"),
    ],
)
def test_an_nvidia_smi_that_does_not_help(tmp_path: Path, script: str, message: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    fleets = FleetCommands(tmp_path, {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"})
    assert message in up_on_gpus_of_none(fleets)


def test_a_vllm_for_the_cpu_starts_no_engine_on_gpus(tmp_path: Path) -> None:
    fleets = gpu_fleets(tmp_path, PYTHONPATH=f"{tmp_path / 'cpu'}:{FAKE_VLLM}")
    information = tmp_path / "cpu" / "vllm-0.32.0+cpu.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    assert "built for the CPU" in up_on_gpus(fleets, "--num-gpus", "1", code=69)


def test_help_imports_nothing_heavy() -> None:
    import subprocess

    heavy = "'torch', 'vllm', 'transformers', 'aiohttp', 'asyncio', 'rich'"
    for words in (["fleet", "up"], ["fleet", "down"], ["fleet", "status"], ["fleet", "logs"], ["pin"], ["probe"]):
        code = (
            "import sys\nfrom evalkit.cli.main import main\n"
            f"try: main([*{words}, '--help'])\nexcept SystemExit: pass\n"
            f"sys.exit(str([name for name in ({heavy}) if name in sys.modules] or ''))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stderr.strip() == ""
        assert "Exit codes:" in done.stdout
