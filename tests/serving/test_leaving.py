"""Clients that go or read nothing, and models that fail: nothing of them is left."""

import asyncio
import json

import pytest
from in_process import COMPLETIONS, asked

from batcher.serving import engine_thread
from batcher.serving.http import Limits
from batcher.settings import SchedulingSettings

LONG = {"prompt": "Once", "max_tokens": 100_000, "ignore_eos": True}


class Client:
    """A connection whose both ends are in the hands of a test."""

    def __init__(self, app, body, *, is_blocked=False):
        self.sent, self.is_blocked = [], is_blocked
        self._gone, self._data = asyncio.Event(), body
        scope = {
            "type": "http",
            "method": "POST",
            "path": COMPLETIONS,
            "raw_path": COMPLETIONS.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [],
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
        }
        self.task = asyncio.create_task(app(scope, self.receive, self.send))

    async def receive(self):
        if self._data is not None:
            data, self._data = self._data, None
            return {"type": "http.request", "body": json.dumps(data).encode(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)
        if self.is_blocked and message["type"] == "http.response.body":
            await asyncio.Event().wait()

    def go(self):
        self._gone.set()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - a thread changes it
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
@asked(settings=SchedulingSettings(kv_blocks=20_000))
async def test_a_request_whose_client_goes_is_aborted(server, stream):
    client = Client(server.app, {**LONG, "stream": stream})
    await until(lambda: server.engine.num_running == 1)
    if stream:
        await until(lambda: len(client.sent) > 3)
    client.go()
    async with asyncio.timeout(5):
        await client.task
    assert server.thread.num_open == 0
    await until(lambda: server.engine.num_running == 0)
    assert len(asyncio.all_tasks()) == 1
    metrics = (await server.client.get("/metrics")).text
    assert 'finished_reason="abort",model_name="simulated"} 1.0' in metrics


@asked(limits=Limits(write_seconds=0.05))
async def test_a_client_that_does_not_read_is_given_up_after_a_while(server):
    client = Client(server.app, {**LONG, "stream": True}, is_blocked=True)
    async with asyncio.timeout(5):
        await client.task
    assert len(client.sent) == 2


@asked()
async def test_what_waits_for_a_client_is_bounded(server, monkeypatch):
    monkeypatch.setattr(engine_thread, "MAX_UNREAD", 50)
    client = Client(server.app, {**LONG, "stream": True}, is_blocked=True)
    await until(lambda: client.sent and not server.thread.exchanges)
    await until(lambda: server.engine.num_running == 0)
    other = await server.post(prompt="Once", max_tokens=3)
    assert other.status_code == 200
    client.task.cancel()


@asked(batch=2, max_queue=1)
async def test_more_requests_than_may_wait_are_told_to_come_again(server):
    clients = [Client(server.app, LONG) for _ in range(3)]
    await until(lambda: server.thread.num_open == 3)
    answer = await server.post(**LONG)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "queue-full"
    assert answer.json()["error"]["type"] == "rate_limit_error"
    clients[0].go()
    await until(lambda: server.thread.num_open == 2)
    two = await server.post(prompt="x", max_tokens=1, n=2, temperature=1)
    assert two.status_code == 429
    one = Client(server.app, {"prompt": "x", "max_tokens": 1})
    for client in clients[1:]:
        client.go()
    await one.task
    assert one.sent[0]["status"] == 200
    many = await server.post(prompt="x", max_tokens=1, n=9, temperature=1)
    assert many.status_code == 200  # alone it may have as many as it wants


@asked()
async def test_a_server_that_drains_answers_what_it_has_and_takes_no_more(server):
    client = Client(server.app, {"prompt": "Once", "max_tokens": 3_000, "ignore_eos": True})
    await until(lambda: server.thread.num_open == 1)
    server.thread.is_draining = True
    answer = await server.post(prompt="x")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert (await server.client.get("/health")).status_code == 503
    await client.task
    assert client.sent[0]["status"] == 200


def failing(error):
    """Return a model that raises `error` instead of a fifth token."""

    def model(prefixes):
        if any(len(prefix) > 8 for prefix in prefixes):
            raise error
        return [5] * len(prefixes)

    return model


@asked(failing(ValueError("no such weight")))
async def test_a_model_error_ends_a_stream_with_an_error_event(server):
    body = {"prompt": [1, 2, 3, 4], "max_tokens": 9, "ignore_eos": True}
    answer = await server.post(**body, stream=True)
    *tokens, error, done, _ = answer.text.split("\n\n")
    assert len(tokens) == 5
    told = json.loads(error.removeprefix("data: "))["error"]
    assert told["type"] == "server_error"
    assert "no such weight" not in told["message"]  # nor what it says of other rows
    assert done == "data: [DONE]"
    whole = await server.post(**body)
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "model-error")


@asked(failing(KeyboardInterrupt("gone")))
async def test_an_engine_that_cannot_go_on_fails_what_is_in_it_and_what_comes(server):
    ended = asyncio.Event()
    server.thread.on_end = ended.set
    body = {"prompt": [1, 2, 3, 4], "max_tokens": 9, "ignore_eos": True}
    streamed, whole = await asyncio.gather(server.post(**body, stream=True), server.post(**body))
    assert '"code":"engine-failed"' in streamed.text
    assert whole.status_code == 503
    await ended.wait()
    assert (await server.post(**body)).status_code == 503
    assert (await server.client.get("/health")).status_code == 503
    assert server.thread.has_failed


@asked()
async def test_an_idle_engine_sleeps(server):
    await server.post(prompt="Once", max_tokens=3)
    await asyncio.sleep(0.05)
    num_rests, num_outcomes = server.watcher.num_rests, len(server.watcher.outcomes)
    await asyncio.sleep(0.1)
    assert server.watcher.num_rests == num_rests
    assert len(server.watcher.outcomes) == num_outcomes
