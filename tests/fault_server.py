"""A server of OpenAI's protocol that answers as it is told to, faults included; nothing is random.

A request is told apart by its prompt, or by what its last message says: the n-th request with one
is answered by the n-th of the behaviours that stand for it, and every later one by the last.
"""

import asyncio
import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

Behaviour = Callable[["Exchange"], Awaitable[None]]


class Exchange:
    """A request, and the connection on which it is answered."""

    def __init__(self, path, headers, body, writer):
        self.path, self.headers, self.body, self.writer = path, headers, body, writer
        self.is_chat = path.endswith("/chat/completions")

    async def begin(self, kind="text/event-stream"):
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n"
        await self.send(head.encode())

    async def send(self, data):
        self.writer.write(data)
        await self.writer.drain()

    async def event(self, told):
        data = told if isinstance(told, str) else json.dumps(told)
        await self.send(f"data: {data}\n\n".encode())

    async def choice(self, text=None, **more):
        said = {"delta": {"content": text}} if self.is_chat else {"text": text}
        finish = more.pop("finish_reason", None)
        await self.event({"choices": [{"index": 0, **said, "finish_reason": finish, **more}]})

    async def refuse(self, status, said, **headers):
        body = json.dumps(said).encode()
        lines = [f"HTTP/1.1 {status} No", f"Content-Length: {len(body)}", "Connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.send("\r\n".join([*lines, "", ""]).encode() + body)

    def reset(self):
        endpoint = self.writer.get_extra_info("socket")
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def answer(*texts, finish="stop", gap=0.0, first=0.0, usage=None, **of_last):
    """Stream these texts, a chunk each, `gap` seconds apart, the first after `first`."""

    async def behave(exchange):
        await asyncio.sleep(first)
        await exchange.begin()
        for number, text in enumerate(texts):
            if number and gap:
                await asyncio.sleep(gap)
            await exchange.choice(text)
        if finish is not None:
            await exchange.choice("", finish_reason=finish, **of_last)
            told = usage or {"prompt_tokens": 3, "completion_tokens": len(texts)}
            await exchange.event({"choices": [], "usage": told})
            await exchange.event("[DONE]")

    return behave


def refusal(status, message="no", **headers):

    async def behave(exchange):
        await exchange.refuse(status, {"error": {"message": message}}, **headers)

    return behave


async def reset(exchange):
    exchange.reset()


async def silence(_):
    await asyncio.sleep(3600)


def chunks(*told, kind="text/event-stream", then=None):
    """Send these events, whatever they are, and go on as `then` does, or close."""

    async def behave(exchange):
        await exchange.begin(kind)
        for each in told:
            await exchange.event(each)
        if then is not None:
            await then(exchange)

    return behave


class FaultServer:
    """Listens on a port of this machine, in a thread; a context.

    behaviours: by what a request says.  usual: of all other requests.
    requests: all that came, as (path, headers, body), in order.  num_open: requests that are being
    answered; most_open: the most that were at once.  num_gone: whose clients left before the end.
    """

    def __init__(self, behaviours=None, usual=None, models=("tiny",), max_open=None):
        self.behaviours, self.usual = behaviours or {}, usual or answer("one", " two")
        self.models, self.max_open = models, max_open
        self.requests = []
        self.num_open = self.most_open = self.num_gone = 0
        self._times = Counter[str]()
        self._tasks = set()
        self._ready = threading.Event()
        self.port = 0

    @property
    def name(self):
        return f"openai:http://127.0.0.1:{self.port}/v1"

    @property
    def bodies(self):
        return [body for _, _, body in self.requests]

    def __enter__(self):
        self._ready.clear()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self):
        loop = self._loop
        server = loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=4096)
        )
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    async def _serve(self, reader, writer):
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.split("\r\n")
            path = first.split()[1]
            headers = {n.lower(): v for n, _, v in (li.partition(": ") for li in lines if li)}
            data = await reader.readexactly(int(headers.get("content-length", 0)))
            body = json.loads(data) if data else None
            exchange = Exchange(path, headers, body, writer)
            if path.endswith("/models"):
                await exchange.refuse(200, {"data": [{"id": name} for name in self.models]})
            else:
                await self._answer(exchange, reader)
        writer.close()
        with suppress(ConnectionError, asyncio.CancelledError):
            await writer.wait_closed()

    async def _answer(self, exchange, reader):
        self.requests.append((exchange.path, exchange.headers, exchange.body))
        if self.max_open is not None and self.num_open >= self.max_open:
            await exchange.refuse(429, {"error": {"message": "busy"}}, Retry_After="0.05")
            return
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        behaving = asyncio.ensure_future(self._behaviour(exchange)(exchange))
        leaving = asyncio.ensure_future(reader.read())
        try:
            await asyncio.wait([behaving, leaving], return_when=asyncio.FIRST_COMPLETED)
            self.num_gone += not behaving.done()
        finally:
            self.num_open -= 1
            for task in (behaving, leaving):
                task.cancel()
            await asyncio.gather(behaving, leaving, return_exceptions=True)

    def _behaviour(self, exchange):
        body = exchange.body
        said = body["messages"][-1]["content"] if exchange.is_chat else body["prompt"]
        known = self.behaviours.get(said if isinstance(said, str) else json.dumps(said))
        if known is None:
            return self.usual
        number = self._times[said]
        self._times[said] += 1
        return known[min(number, len(known) - 1)]
