"""Clients that misbehave on a real socket: what they are told, and that nothing of them is left."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
import uvicorn
from in_process import served

from batcher.serving.http import Limits
from cli.serving import guard
from cli.serving.guard import GuardedProtocol

LIMITS = Limits(max_body_bytes=1_000_000, read_seconds=0.3, write_seconds=0.3)
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
ENDLESS = {"prompt": "Once", "max_tokens": 10_000_000, "ignore_eos": True, "stream": True}


@asynccontextmanager
async def listening(**more):
    """Give a Served that listens at its `port`; it has to be alive and empty at the end."""
    async with served(**more) as server:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            server.app, http=GuardedProtocol, ws="none", lifespan="off", log_config=None
        )
        web = uvicorn.Server(config)
        serving = asyncio.create_task(web._serve([listener]))
        server.port = listener.getsockname()[1]
        try:
            yield server
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
                body = {"prompt": "Once", "max_tokens": 3}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
            async with asyncio.timeout(10):
                while server.engine.has_work or web.server_state.connections:  # noqa: ASYNC110 - not ours
                    await asyncio.sleep(0.01)
            assert web.server_state.tasks == set()
        finally:
            web.should_exit = True
            await serving


async def all_of(reader):
    """Return what comes until the other side hangs up, though that may be in the middle."""
    parts = []
    with suppress(ConnectionError):
        async with asyncio.timeout(20):
            while part := await reader.read(2**16):
                parts.append(part)
    return b"".join(parts)


def told(sends):
    """Return what a server says to a client that sends each of `sends`, until it hangs up."""

    async def main():
        async with listening(limits=LIMITS) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            said = asyncio.create_task(all_of(reader))
            for data in sends:
                try:
                    writer.write(data)
                    await writer.drain()
                except ConnectionError:
                    break
                await asyncio.sleep(0.02)
                if said.done():
                    break
            answer = await said
            writer.close()
            return answer

    return asyncio.run(main())


def error_of(said):
    """Return the status and the code of an answer."""
    head, _, body = said.partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(guard, "HEAD_SECONDS", 0.3)


@pytest.mark.usefixtures("hurried")
def test_a_client_that_says_nothing_is_not_waited_for():
    assert error_of(told([])) == (408, "head-timeout")


@pytest.mark.usefixtures("hurried")
def test_a_head_that_trickles_in_is_not_waited_for():
    assert error_of(told([HEAD, *[b"x: y\r\n"] * 200])) == (408, "head-timeout")


def test_a_head_of_any_length_is_not_taken():
    flood = [b"".join(b"x-%d-%d: y\r\n" % (n, m) for m in range(1000)) for n in range(20)]
    assert error_of(told([HEAD, *flood])) == (431, "headers-too-large")


def test_a_body_that_trickles_in_is_not_waited_for():
    sends = [HEAD + b"content-length: 1000\r\n\r\n", *[b" "] * 100]
    assert error_of(told(sends)) == (408, "body-timeout")


def test_a_body_of_100_mb_is_refused_by_its_length():
    assert error_of(told([HEAD + b"content-length: 100000000\r\n\r\n"])) == (413, "body-too-large")


def test_a_body_that_does_not_say_how_long_it_is_is_refused_at_its_limit():
    chunk = b"%x\r\n%s\r\n" % (100_000, b" " * 100_000)
    said = told([HEAD + b"transfer-encoding: chunked\r\n\r\n", *[chunk] * 1000])
    assert said == b"" or error_of(said) == (413, "body-too-large")


def test_a_body_that_wants_another_protocol_is_refused():
    head = (
        HEAD + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\ncontent-length: 15\r\n\r\n"
    )
    assert error_of(told([head, b'{"prompt": "a"}'])) == (400, "unsupported-upgrade")


def test_what_is_no_http_is_refused():
    assert told([b"\x16\x03\x01 hello\r\n\r\n"]).startswith(b"HTTP/1.1 400 ")


def test_a_client_that_hangs_up_in_a_body_leaves_nothing():
    async def main():
        async with listening() as server:
            for data in (HEAD, HEAD + b"content-length: 10\r\n\r\n", HEAD[:20]):
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(data)
                await writer.drain()
                writer.close()
            await asyncio.sleep(0.05)

    asyncio.run(main())


@pytest.mark.heavy
def test_a_client_that_stops_reading_is_given_up_and_keeps_nobody_waiting():
    async def main():
        async with listening(limits=LIMITS) as server:
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # soon full
            slow.connect(("127.0.0.1", server.port))
            reader, writer = await asyncio.open_connection(sock=slow, limit=1000)
            body = json.dumps(ENDLESS).encode()
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            await reader.readline()
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
                asked = {"prompt": "Once", "max_tokens": 3}
                async with asyncio.timeout(20):
                    while server.thread.exchanges:
                        answer = await client.post("/v1/completions", json=asked)
                        assert answer.status_code == 200
                    while server.engine.num_running:  # noqa: ASYNC110 - a thread changes it
                        await asyncio.sleep(0.01)
            writer.transport.abort()

    asyncio.run(main())
