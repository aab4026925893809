"""A server with the times of a GPU, as its clients see it, against `replay` for the same arrivals.

The clients are connections of asyncio in this process, which cost as little as can be; what they
see is a log as `replay` reads it.
"""

import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from report import Row

TOOL = str(Path(sys.executable).with_name("batchdecode"))
PROFILE = "h100_llama3.1-8b_tp1"
SLOTS = 64
RATE, NUM_REQUESTS = 6.0, 240  # a second, of a Poisson process
PROMPT_TOKENS, OUTPUT_TOKENS = (500, 3000), (50, 250)
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {}\r\n\r\n"
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


def serving() -> Iterator[Row]:
    """Compare what clients see with what `replay` says of the same arrivals."""
    with server("-b", str(SLOTS), "--profile", PROFILE) as address:
        log = asyncio.run(measure(address))
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in log)
        file.flush()
        command = [TOOL, "replay", file.name, "--profile", PROFILE, "-b", str(SLOTS), "--json"]
        done = subprocess.run([*command, *UNLIMITED], check=True, capture_output=True, text=True)
    for number in json.loads(done.stdout)["numbers"]:
        if number["name"].startswith(("ttft", "tpot")):
            real, simulated = (1000 * number[name] for name in ("real", "simulated"))
            name = f"serve, {number['name']} of clients {real:.2f} ms, by replay {simulated:.2f} ms"
            yield Row(name, f"{real / simulated - 1:+.1%}", "within 3 %")
