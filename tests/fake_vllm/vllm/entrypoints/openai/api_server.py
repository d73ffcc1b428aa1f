"""A server that starts, dies, hangs or loses its port as its arguments say, with a child as vLLM has."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[5]))

CHILD = """
import mmap, os, signal, sys, time
maps = []
for path in ["/dev/shm/vllm_fake_" + os.environ["EVALKIT_ENGINE_ID"], *sys.argv[1:]]:
    with open(path, "a+b") as file:
        file.truncate(4096)
        maps.append(mmap.mmap(file.fileno(), 4096))
print("core ready", flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""
LISTENER = """
import socket, sys, time
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", int(sys.argv[1])))
server.listen()
print("listening", flush=True)
time.sleep(60)
"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="api_server")
    for name in ("--model", "--served-model-name", "--middleware", "--worker-extension-cls", "--tensor-parallel-size"):
        parser.add_argument(name, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--disable-uvicorn-access-log", action="store_true")
    parser.add_argument("--die", help="say this and end")
    parser.add_argument("--die-if", type=Path, help="end if this file is there, and take it away")
    parser.add_argument("--die-always-if", type=Path, help="end if this file is there")
    parser.add_argument("--hang", action="store_true", help="never listen")
    parser.add_argument("--wait-for", type=Path, help="listen only when this file is there")
    parser.add_argument("--lose-port", type=Path, help="once: somebody else listens on the port; their pid goes here")
    parser.add_argument("--maps", action="append", default=[], help="map this file, as a load does")
    parser.add_argument("--fault", type=json.loads, default={}, help="as tests/fake_engine.py takes it")
    return parser.parse_args()


def lose_port(args: argparse.Namespace) -> None:
    if args.lose_port is None or args.lose_port.exists():
        return
    environment = {name: value for name, value in os.environ.items() if name != "EVALKIT_ENGINE_ID"}
    other = subprocess.Popen(
        [sys.executable, "-c", LISTENER, str(args.port)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, env=environment,
    )  # fmt: skip
    assert other.stdout is not None
    other.stdout.readline()
    args.lose_port.write_text(str(other.pid))
    sys.exit("OSError: [Errno 98] Address already in use")


def start_child(maps: list[str]) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, "-c", CHILD, *maps], stdin=subprocess.DEVNULL)

    def end(*_: object) -> None:
        child.kill()
        child.wait()
        Path(f"/dev/shm/vllm_fake_{os.environ['EVALKIT_ENGINE_ID']}").unlink(missing_ok=True)
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    return child


async def serve(args: argparse.Namespace) -> None:
    from aiohttp import web

    from tests.fake_engine import application

    app = application(Path(os.environ["EVALKIT_ENGINE_KEY_FILE"]).read_text().strip(), args.fault)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, args.host, args.port, reuse_address=True).start()
    await asyncio.Event().wait()


def main() -> None:
    args = parse()
    if args.die is not None:
        sys.stderr.write("\n".join([f"line {n}" for n in range(40)] + [args.die]) + "\n")
        sys.exit(3)
    if args.die_if is not None and args.die_if.exists():
        args.die_if.unlink()
        sys.exit("told to end")
    if args.die_always_if is not None and args.die_always_if.exists():
        sys.exit("told to end")
    lose_port(args)
    start_child(args.maps)
    sys.stderr.write("starting\n")
    while args.hang or (args.wait_for is not None and not args.wait_for.exists()):
        time.sleep(0.02)
    asyncio.run(serve(args))


if __name__ == "__main__":
    main()
