"""A server with the times of a GPU against `replay` for the same arrivals, and under load.

The clients are connections of asyncio in this process, which cost as little as can be; what they
see is a log as `replay` reads it.  The load is that of wrk, where it is installed.
"""

import asyncio
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

from report import Row

TOOL = str(Path(sys.executable).with_name("batchdecode"))
PROFILE = "h100_llama3.1-8b_tp1"
SLOTS = 64
RATE, NUM_REQUESTS = 6.0, 240  # a second, of a Poisson process
PROMPT_TOKENS, OUTPUT_TOKENS = (500, 3000), (50, 250)
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {}\r\n\r\n"
GOAL = "within 3 %"
LOAD_SECONDS = 60
UNLIMITED = ["--max-batch-tokens", str(2**31 - 1), "--kv-blocks", str(2**24)]


@contextmanager
def server(*arguments: str) -> Iterator[str]:
    """Start `batchdecode serve` and give its address."""
    command = [TOOL, "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stderr.readline() if process.stderr else ""
            found = re.search(r"http://\S+(?=/v1$)", line)
            if found is None:
                raise RuntimeError(line)
            yield found[0]
        finally:
            process.terminate()


class Client(asyncio.Protocol):
    """One connection, and when what came on it; `done` is told a line of the log."""

    def __init__(self, number: int, prompt: list[int], length: int) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self._line = {"request_id": str(number), "input_toks": len(prompt), "output_toks": length}
        asked = {"prompt": prompt, "max_tokens": length, "ignore_eos": True, "stream": True}
        body = json.dumps(asked)
        self._request = (HEAD.format(len(body)) + body).encode()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def ask(self) -> None:
        """Send the request."""
        self._line["queued_ts"] = time.monotonic()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if b"data: {" in data:
            self._line.setdefault("first_token_ts", now)
            self._line["last_token_ts"] = now
        if b"data: [DONE]" in data:
            self.done.set_result(self._line)
            self._transport.close()


async def measure(address: str) -> list[dict]:
    """Return the log of all requests."""
    loop, draw = asyncio.get_running_loop(), random.Random(0)
    host, port = urlsplit(address).hostname, urlsplit(address).port
    clients = []
    for number in range(NUM_REQUESTS):
        prompt = draw.choices(range(2, 500), k=draw.randrange(*PROMPT_TOKENS))
        client = Client(number, prompt, draw.randrange(*OUTPUT_TOKENS))
        clients.append(client)
    start = time.monotonic()
    for client in clients:
        start += draw.expovariate(RATE)
        await asyncio.sleep(max(0.0, start - 0.05 - time.monotonic()))
        await loop.create_connection(lambda client=client: client, host, port)
        loop.call_later(max(0.0, start - time.monotonic()), client.ask)
    return await asyncio.gather(*(client.done for client in clients))


def mean_ttft(address: str) -> float:
    """Return what the server says of its requests, in seconds."""
    with urlopen(f"{address}/metrics") as answer:  # noqa: S310 - of our own server
        text = answer.read().decode()
    found = [
        re.search(rf"^vllm:time_to_first_token_seconds_{name}{{.*}} (.*)$", text, re.MULTILINE)
        for name in ("sum", "count")
    ]
    total, number = (float(match[1]) for match in found if match is not None)
    return total / number


def times() -> Iterator[Row]:
    """Compare what clients and the server see with what `replay` says of the same arrivals."""
    with server("-b", str(SLOTS), "--profile", PROFILE) as address:
        log = asyncio.run(measure(address))
        of_server = mean_ttft(address)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in log)
        file.flush()
        command = [TOOL, "replay", file.name, "--profile", PROFILE, "-b", str(SLOTS), "--json"]
        done = subprocess.run([*command, *UNLIMITED], check=True, capture_output=True, text=True)
    for number in json.loads(done.stdout)["numbers"]:
        name, real, simulated = number["name"], number["real"], number["simulated"]
        if name == "ttft mean":
            yield Row("serve, mean TTFT by its metrics", f"{of_server / simulated - 1:+.1%}", GOAL)
        if name.startswith(("ttft", "tpot")):
            shown = f"{1000 * real:.2f} ms, by replay {1000 * simulated:.2f} ms"
            yield Row(f"serve, {name} of clients {shown}", f"{real / simulated - 1:+.1%}", GOAL)


def load(folder: Path) -> Iterator[Row]:
    """Ask for eight tokens as fast as answers come, on 64 connections."""
    script = folder / "post.lua"
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 8})
    script.write_text(f"wrk.method, wrk.body = 'POST', '{body}'\n")
    for workers in (1, 2):
        arguments = ["-b", "64", "--max-queue", "10000", "--workers", str(workers)]
        with server(*arguments) as address:
            command = ["wrk", "-t1", "-c64", f"-d{LOAD_SECONDS}s", "--latency", "-s", str(script)]
            done = subprocess.run(
                [*command, f"{address}/v1/completions"], check=True, capture_output=True, text=True
            )
        told = re.findall(r"(?:99%|Requests/sec:|Non-2xx .*:) +(\S+)", done.stdout)
        name = f"serve, requests a second, --workers {workers}, p99 {told[0]}"
        yield Row(name, f"{float(told[1]):,.0f}", ">= 5,000, p99 < 1 s, on four cores")


def serving(folder: Path) -> Iterator[Row]:
    """Measure times, and what load is held."""
    yield from times()
    if shutil.which("wrk") is not None:
        yield from load(folder)
