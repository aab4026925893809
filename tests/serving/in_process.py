"""A server in the event loop of a test: the application alone, without a socket."""

import asyncio
import json
from contextlib import asynccontextmanager
from inspect import Signature, signature

import httpx

from batcher.engine import Engine
from batcher.models.base import bytes_of
from batcher.models.loading import as_model
from batcher.models.simulated import SimulatedModel
from batcher.requests.lines import RequestParser
from batcher.scheduling.clock import WallClock
from batcher.serving.app import ServerMetrics, Service, make_app
from batcher.serving.engine_thread import EngineThread
from batcher.serving.http import Access, BodyReader, Limits

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


class Watcher:
    """Counts what there was to see; metrics: what the application tells."""

    def __init__(self, metrics):
        self.metrics, self.outcomes, self.num_rests = metrics, [], 0

    def after_step(self, outcome):
        self.metrics.after_step(outcome)
        self.outcomes.append(outcome)

    def while_idle(self):
        self.num_rests += 1


class Served:
    """What a test has of a server; client: an httpx client of it."""

    def __init__(self, engine, thread, watcher, app):
        self.engine, self.thread, self.watcher, self.app = engine, thread, watcher, app
        transport = httpx.ASGITransport(app=app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server", timeout=30)

    async def post(self, url=COMPLETIONS, headers=None, **body):
        return await self.client.post(url, json=body, headers=headers)

    async def chunks(self, url=COMPLETIONS, **body):
        """Return the chunks of a stream."""
        answer = await self.post(url, stream=True, **body)
        assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
        *events, done, end = answer.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@asynccontextmanager
async def served(
    model=None, batch=4, *, clock=None, max_queue=100, access=None, limits=None, **more
):
    """Give a Served, and make sure that nothing is left in it at the end."""
    model, clock = as_model(model or SimulatedModel()), clock or WallClock()
    engine = Engine(model, batch, clock=clock, is_streaming=True, **more)
    metrics = ServerMetrics(engine, "simulated")
    watcher = Watcher(metrics)
    thread = EngineThread(engine, clock, watcher, max_queue)
    parser, encode = RequestParser(engine.capabilities), engine.capabilities.encode
    token_bytes = model.tokenizer.token_bytes
    service = Service(
        engine=thread,
        reader=BodyReader(parser, "simulated", asks_tokenizer=encode is not None),
        model="simulated",
        bytes_of=lambda token: bytes_of(token, token_bytes),
        limits=limits or Limits(),
        access=access or Access(),
    )
    server = Served(engine, thread, watcher, make_app(service, metrics.text))
    thread.start()
    try:
        yield server
    finally:
        await server.client.aclose()
        thread.stop()
        thread.join(10)
    assert thread.exchanges == {}
    assert thread.num_open == 0
    if not thread.has_failed:
        assert engine.num_running == engine.num_waiting == engine.num_pending == 0
        if engine.scheduler.kv_cache is not None:
            assert engine.scheduler.kv_cache.pool.num_used == 0


def asked(*args, context=served, **how):
    """Run a coroutine as a test that is given a server, which is made with these arguments."""

    def made(test):
        def run(**given):
            async def main():
                async with context(*args, **how) as server:
                    await test(server, **given)

            asyncio.run(main())

        run.__signature__ = Signature([*signature(test).parameters.values()][1:])
        run.__name__ = test.__name__
        return run

    return made
