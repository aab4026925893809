"""Clients that misbehave on a real socket: what they are told, and that nothing of them is left."""

import asyncio
import json
import resource
import socket
import time
from contextlib import asynccontextmanager, suppress
from itertools import chain, repeat

import httpx
import pytest
from in_process import asked, served

from batcher.serving.http import Access, Limits
from cli import server as server_of_command
from cli.server import WebServer

LIMITS = Limits(max_body_bytes=1_000_000, read_seconds=0.3, write_seconds=0.3)
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"


@asynccontextmanager
async def listening(**more):
    """Give a Served that listens at its `port`; it has to be alive and empty at the end."""
    async with served(**more) as server:
        listener = socket.create_server(("127.0.0.1", 0))
        server.port = listener.getsockname()[1]
        web = WebServer(server.app, listener)
        serving = asyncio.create_task(web.serve_until_stopped())
        try:
            yield server
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
                body, is_closed = {"prompt": "Once", "max_tokens": 3}, "access" in more
                status = (await client.post("/v1/completions", json=body)).status_code
                assert status in ({401, 403} if is_closed else {200})
            async with asyncio.timeout(10):
                while server.engine.has_work:  # noqa: ASYNC110 - not ours
                    await asyncio.sleep(0.01)
        finally:
            web.stop()
            async with asyncio.timeout(10):  # what is left of a connection would be waited for
                await serving


async def all_of(reader):
    """Return what comes until the other side hangs up, though that may be in the middle."""
    parts = []
    with suppress(ConnectionError):
        async with asyncio.timeout(20):
            while part := await reader.read(2**16):
                parts.append(part)
    return b"".join(parts)


async def said_to(server, sends, pause=0.0):
    """Return what a server says to a client that sends each of `sends`, until it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)

    async def send():
        with suppress(ConnectionError):
            for data in sends:
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(pause)

    sending = asyncio.create_task(send())
    said = await all_of(reader)
    sending.cancel()
    writer.close()
    return said


def told(sends, **more):
    async def main():
        async with listening(limits=LIMITS, **more) as server:
            return await said_to(server, sends, pause=0.02)

    return asyncio.run(main())


def code_of(said):
    """Return the status of an answer, and the code of its error if it has one of ours."""
    head, _, body = said.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body).get("error", {}).get("code") if body else None


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
ENDED = CHUNKED + b"0\r\n"
MIB = 2**20

# What is sent, in one piece or over and over, and the answer before the server hangs up.
FLOODS = {
    "headers": (HEAD, b"a: b\r\n" * 10_000, 48 * MIB, 431),
    "a header without an end": (HEAD + b"a: ", b"x" * 2**16, 48 * MIB, 431),
    "a target without an end": (b"GET /", b"x" * 2**16, 48 * MIB, 431),
    "trailers": (ENDED, b"a: b\r\n" * 10_000, 48 * MIB, 400),
    "a chunk extension": (CHUNKED + b"1;", b"x" * 2**16, 48 * MIB, 400),
    "chunk extensions": (CHUNKED, b"1;%s\r\n \r\n" % (b"x" * 1000), MIB, 400),
    "a huge chunk": (CHUNKED + b"f" * 15 + b"\r\n", b" " * 2**16, 48 * MIB, 413),
    "chunks": (CHUNKED, b"%x\r\n%s\r\n" % (2**16, b" " * 2**16), 48 * MIB, 413),
    "a stated length": (HEAD + b"content-length: 100000000\r\n\r\n", b"", 1, 413),
    "two lengths": (HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n", b"", 1, 400),
    "no HTTP": (b"\x16\x03\x01 hello\r\n\r\n", b"", 1, 400),
}


def flood(head, unit, size):
    """Return the answer to a flood, the worst wait for /health meanwhile, and the memory taken."""

    async def main():
        async with listening(limits=LIMITS) as server:
            before, waits = peak_memory(), []
            units = repeat(unit, size // len(unit) if unit and size > 1 else 1)
            saying = asyncio.create_task(said_to(server, chain([head], units)))
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
                while not (waits and saying.done()):
                    begun = time.monotonic()
                    assert (await client.get("/health")).status_code == 200
                    waits.append(time.monotonic() - begun)
            return await saying, max(waits), peak_memory() - before

    return asyncio.run(main())


def peak_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("case", FLOODS)
def test_what_has_no_end_is_refused_in_little_memory_and_delays_nobody(case):
    head, unit, size, status = FLOODS[case]
    said, wait, memory = flood(head, unit, size)
    assert said == b"" or code_of(said)[0] == status  # a reset may overtake the answer
    assert wait < 1
    assert memory < 20 * MIB


SLOW = {
    "nothing": ([], None),
    "a head": ([HEAD, *[b"x: y\r\n"] * 100], None),
    "a second head": ([b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n", *[b"G"] * 100], 200),
    "a body": ([HEAD + b"content-length: 1000\r\n\r\n", *[b" "] * 100], 408),
    "trailers": ([ENDED, *[b"x: y\r\n"] * 100], 408),
}


@pytest.mark.parametrize("case", SLOW)
def test_what_trickles_in_is_not_waited_for(case, monkeypatch):
    monkeypatch.setattr(server_of_command, "HEAD_SECONDS", 0.3)
    sends, status = SLOW[case]
    said = told(sends)
    assert said == b"" if status is None else code_of(said)[0] == status


def test_idle_connections_are_closed_and_keep_nobody_waiting(monkeypatch):
    monkeypatch.setattr(server_of_command, "HEAD_SECONDS", 0.5)

    async def main():
        async with listening() as server:
            opened = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(100)]
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
                begun = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                assert time.monotonic() - begun < 1
            async with asyncio.timeout(10):
                assert {await all_of(reader) for reader, _ in opened} == {b""}
            for _, writer in opened:
                writer.close()

    asyncio.run(main())


def test_another_protocol_is_not_spoken_and_the_body_is_answered():
    body = b'{"prompt": "Once", "max_tokens": 2}'
    head = HEAD + b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    head += b"content-length: %d\r\n\r\n" % len(body)
    said = told([head, body, b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"])
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b" We touched" in said


REFUSED = [
    (Access(api_key="k"), (401, "invalid_api_key")),
    (Access(hosts=frozenset({"localhost"})), (403, "host-not-allowed")),
]


@pytest.mark.parametrize(("access", "expected"), REFUSED, ids=["key", "host"])
def test_who_may_not_enter_is_refused_before_the_body_and_hung_up_on(access, expected):
    said = told([HEAD + b"content-length: 1000\r\n\r\n"], access=access)  # of which nothing comes
    assert code_of(said) == expected
    assert b"\r\nconnection: close" in said


@asked(context=listening)
async def test_a_client_that_hangs_up_in_a_body_leaves_nothing(server):
    for data in (HEAD, HEAD + b"content-length: 10\r\n\r\n", HEAD[:20]):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(data)
        await writer.drain()
        writer.close()
    await asyncio.sleep(0.05)
