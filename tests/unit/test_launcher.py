"""How an engine is started: ports, arguments, environment, log."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from evalkit.adapters.launcher import (
    check_engine_args,
    engine_environment,
    engine_url,
    log_tail,
    reserve_port,
    with_port,
)
from evalkit.ground.errors import UsageError
from evalkit.ground.layout import FleetPaths
from evalkit.ground.schema import EngineRecord


def test_a_reserved_port_is_nobodys_but_the_engines() -> None:
    with reserve_port("127.0.0.1") as reserved:
        address = reserved.getsockname()
        with socket.socket() as plain, pytest.raises(OSError, match="in use"):
            plain.bind(address)
        with socket.socket() as engine:  # as vLLM makes it
            engine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            engine.bind(address)
            engine.listen()
            socket.create_connection(address).close()
            with pytest.raises(OSError, match="in use"):
                reserve_port(*address)


def test_reserved_ports_differ() -> None:
    sockets = [reserve_port("127.0.0.1") for _ in range(100)]
    try:
        assert len({reserved.getsockname()[1] for reserved in sockets}) == 100
    finally:
        for reserved in sockets:
            reserved.close()


def test_urls() -> None:
    assert engine_url("127.0.0.1", 80) == "http://127.0.0.1:80"
    assert engine_url("::1", 80) == "http://[::1]:80"


def test_the_port_of_an_argument_list_can_be_replaced() -> None:
    assert with_port(["x", "--port", "0", "--dtype", "auto"], 7) == ["x", "--port", "7", "--dtype", "auto"]


@pytest.mark.parametrize(
    "arg", ["--model", "--port=1", "--served_model_name", "--tensor-par", "-tp", "--config=x.yaml"]
)
def test_what_evalkit_sets_itself_is_refused(arg: str) -> None:
    with pytest.raises(UsageError, match=arg):
        check_engine_args(["--dtype", "float32", arg, "1"])


def test_other_arguments_are_vllms() -> None:
    check_engine_args(
        ["--max-model-len", "512", "--middleware", "mine.Own", "--max-num-seqs=3", "-1", "model", "--", "-q"]
    )


def engine(**fields: object) -> EngineRecord:
    return EngineRecord(index=0, engine_id="e1", url="http://h:1", log="/l", **fields)


def environment(record: EngineRecord, **base: str) -> dict[str, str]:
    return engine_environment(base, record, FleetPaths(Path("/run/fleets"), "eval"), 7)


def test_every_engine_is_offline_marked_and_fenced() -> None:
    made = environment(engine(), VLLM_SERVER_DEV_MODE="1", HF_HUB_OFFLINE="0", VLLM_HOST_IP="10.0.0.1", HOME="/h")
    assert "VLLM_SERVER_DEV_MODE" not in made
    assert (made["HF_HUB_OFFLINE"], made["VLLM_HOST_IP"], made["HOME"]) == ("1", "10.0.0.1", "/h")
    assert (made["EVALKIT_ENGINE_ID"], made["EVALKIT_ENGINE_EPOCH"]) == ("e1", "7")
    assert made["EVALKIT_ENGINE_KEY_FILE"] == "/run/fleets/eval.key"


def test_an_engine_on_the_cpu_has_cores_and_no_gpu() -> None:
    made = environment(engine(cores=[0, 1, 2, 3], tensor_parallel=2), CUDA_VISIBLE_DEVICES="0")
    assert (made["VLLM_CPU_OMP_THREADS_BIND"], made["CUDA_VISIBLE_DEVICES"]) == ("0,1|2,3", "")
    assert made["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert environment(engine(cores=[0]), VLLM_CPU_KVCACHE_SPACE="4")["VLLM_CPU_KVCACHE_SPACE"] == "4"


def test_an_engine_on_gpus_has_its_own() -> None:
    made = environment(engine(gpus=["6", "7"], tensor_parallel=2), CUDA_VISIBLE_DEVICES="4,5,6,7")
    assert (made["CUDA_VISIBLE_DEVICES"], made["CUDA_DEVICE_ORDER"]) == ("6,7", "PCI_BUS_ID")
    assert not {"VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"} & set(made)


def test_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_tail(log, lines=3) == []
    log.write_text("old\n" + "x" * 5000 + "\na\nb\n")
    assert log_tail(log, lines=2) == ["a", "b"]
    assert log_tail(log, lines=9, offset=4)[-2:] == ["a", "b"]
    assert "old" not in log_tail(log, lines=100, offset=4)
    assert log_tail(log, lines=0) == []
