"""How close an evaluation comes to a bare aiohttp loop: both against one instant server, in turn.

    python benchmarks/bench_run.py [--requests 4000] [--concurrency 64] [--rounds 5] [--json]

The server answers with fixed bytes from another process. Both send the same requests; the evaluation also checks
stamps, scores, writes every sample and computes the metrics. Exits with 1 when the ratio is below 0.8.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import msgspec

from evalkit.adapters.completions import request_of
from evalkit.adapters.datasets import read_rows
from evalkit.adapters.scorers import SCORERS
from evalkit.adapters.suite import Suite, load_suite
from evalkit.ground.layout import ResultPaths
from evalkit.ground.schema import PinnedEngine, PinProof
from evalkit.verbs.evaluate import evaluate

WANTED = 0.8
STAMP = "nonce/1/" + "0" * 64
SERVER = """
import asyncio, sys
body = b'{"choices":[{"index":0,"text":"42","finish_reason":"stop"}],"usage":{"completion_tokens":2}}'
stamps = f"x-evalkit-pin: {sys.argv[1]} {sys.argv[1]}"
head = ["HTTP/1.1 200 OK", "content-type: application/json", stamps, f"content-length: {len(body)}", "", ""]
answer = "\\r\\n".join(head).encode() + body

class Server(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport, self.data = transport, b""
    def data_received(self, data):
        self.data += data
        while b"\\r\\n\\r\\n" in self.data:
            head, _, rest = self.data.partition(b"\\r\\n\\r\\n")
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\\r\\n")[0] or 0)
            if len(rest) < length:
                return
            self.data = rest[length:]
            self.transport.write(answer)

async def main():
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@contextlib.contextmanager
def instant_server() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, "-c", SERVER, STAMP], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait(10)


def make_suite(root: Path, requests: int) -> Suite:
    rows = (json.dumps({"input": f"What is {i} + {i}? Answer:", "label": "42"}) + "\n" for i in range(requests))
    (root / "d.jsonl").write_text("".join(rows))
    (root / "evals.yaml").write_text("eval: {datasets: [{name: d, path: d.jsonl, rm_type: exact, temperature: 0}]}")
    return load_suite(root / "evals.yaml")


async def bare(url: str, suite: Suite, concurrency: int) -> None:
    """The least that a client does: build, send, read, decode."""
    dataset = suite.datasets[0]
    rows = read_rows(dataset, SCORERS["exact"])
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:

        async def work() -> None:
            for row in rows:
                request = request_of(dataset, row, 0, "policy")
                async with session.post(url + request.path, data=request.body) as response:
                    msgspec.json.decode(await response.read())

        await asyncio.gather(*(work() for _ in range(concurrency)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rates: dict[str, list[float]] = {"bare": [], "evaluate": []}
    with tempfile.TemporaryDirectory() as root, instant_server() as url:
        suite = make_suite(Path(root), args.requests)
        engine = PinnedEngine(index=0, url=url, nonce="nonce", ranks=1, vllm="none")
        proof = PinProof(epoch=1, version="1", digest="0" * 64, served_model="policy", engines=[engine])
        for number in range(args.rounds):
            results = ResultPaths(Path(root) / str(number))
            for name, work in (
                ("bare", bare(url, suite, args.concurrency)),
                ("evaluate", evaluate(suite, proof, results, concurrency=args.concurrency)),
            ):
                started = time.perf_counter()
                asyncio.run(work)  # type: ignore[arg-type]
                rates[name].append(args.requests / (time.perf_counter() - started))
    medians = {name: round(statistics.median(some)) for name, some in rates.items()}
    ratio = statistics.median(mine / its for mine, its in zip(rates["evaluate"], rates["bare"], strict=True))
    answer = {"requests_per_second": medians, "ratio": round(ratio, 3), "wanted": WANTED}
    print(json.dumps(answer) if args.json else f"{medians} requests/s; ratio {ratio:.2f}, wanted {WANTED}")
    return 0 if ratio >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
