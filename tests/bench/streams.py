"""Many streams at once from one server: `python tests/bench/streams.py [STREAMS] [TOKENS]`.

The server is that of the tests, in a process of its own, and gives each stream a token every 0.1 s.
Told are the memory at its most, and the processor time for a token, in ratio to reading the same
bytes bare.
"""

import asyncio
import json
import multiprocessing
import resource
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from fault_server import FaultServer, answer  # noqa: E402 - the path comes first

from batcher.metrics.summary import RunMetrics  # noqa: E402 - as above
from batcher.remote.engine import RemoteEngine  # noqa: E402 - as above
from batcher.remote.model import remote_model_of  # noqa: E402 - as above
from batcher.request import Request  # noqa: E402 - as above

GAP = 0.1  # seconds


def serve(num_tokens: int, port: "multiprocessing.Queue[int]") -> None:
    """Serve until the process is ended."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with FaultServer(usual=answer(*["token "] * num_tokens, gap=GAP)) as server:
        port.put(server.port)
        time.sleep(3600)


async def read_bare(port: int, num_streams: int) -> None:
    """Read as many answers with nothing but sockets."""
    body = json.dumps({"prompt": "x"}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async def read() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body)
        while await reader.read(65536):
            pass
        writer.close()

    await asyncio.gather(*[read() for _ in range(num_streams)])


def main(num_streams: int, num_tokens: int) -> None:
    """Measure, and print."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    process = context.Process(target=serve, args=(num_tokens, ports), daemon=True)
    process.start()
    port = ports.get()
    began = time.process_time()
    asyncio.run(read_bare(port, num_streams))
    bare = time.process_time() - began
    model = remote_model_of(f"openai:http://127.0.0.1:{port}/v1", {})
    engine, metrics = RemoteEngine(model, num_streams), RunMetrics()
    metrics.observe([engine.run_event()])
    began, wall = time.process_time(), time.monotonic()
    for number in range(num_streams):
        engine.enqueue(Request(prompt="x", id=str(number), max_tokens=num_tokens))
    most = num_ok = 0
    while engine.has_work:
        outcome = engine.step()
        metrics.observe(outcome.events)
        most = max(most, engine.num_running)
        num_ok += sum(result.error is None for result in outcome.results)
    spent, wall = time.process_time() - began, time.monotonic() - wall
    engine.close()
    process.terminate()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tokens = num_streams * num_tokens
    print(f"{num_ok} of {num_streams} streams came whole, {most} at once; {tokens} tokens")
    print(f"{memory:.0f} MB at most; {wall:.1f} s, {GAP * num_tokens:.1f} s of them the server's")
    print(f"{spent / tokens * 1e6:.0f} us of processor time for a token, {spent / bare:.1f} x bare")


if __name__ == "__main__":
    main(*(int(given) for given in [*sys.argv[1:], "1000", "20"][:2]))
