"""When a server is given up of which only failures come: clients and servers of this process."""

import asyncio
import socket
from contextlib import closing

import pytest
from aiohttp import ClientConnectionError, ClientSession, web
from hypothesis import given
from hypothesis import strategies as st

from cli.run.urls import Patience, watching


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["answer", "failure", "check"]))))
def test_it_is_given_up_when_failures_alone_have_come_for_too_long(happened):
    now = 0
    patience, failing_since = Patience(10, lambda: now), None
    for seconds, what in happened:
        now += seconds
        if what == "answer":
            patience.note_answer()
            failing_since = None
        elif what == "failure":
            patience.note_failure(f"at {now}")
            failing_since = now if failing_since is None else failing_since
        elif failing_since is not None and now - failing_since > 10:
            with pytest.raises(TimeoutError, match="at "):
                patience.check()
            failing_since = None
        else:
            patience.check()


class Time:
    now = 0

    def __call__(self):
        return self.now


async def asked(session, url, seconds, time):
    """Ask every so many seconds until something else than failures comes; return how often."""
    for number in range(20):
        try:
            async with session.get(url) as answer:
                if answer.status < 500:
                    return number
        except ClientConnectionError:
            pass
        time.now += seconds
    raise AssertionError


def free_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        return listening.getsockname()[1]


async def ask_nobody(patience, time):
    async with ClientSession(trace_configs=[watching(patience)]) as session:
        await asked(session, f"http://127.0.0.1:{free_port()}/", 7, time)


def test_a_server_that_is_not_there_is_given_up_with_the_reason():
    patience = Patience(60, time := Time())
    with pytest.raises(TimeoutError, match="Connect call failed"):
        asyncio.run(ask_nobody(patience, time))
    assert time.now == 63
    patience.check()  # another request begins anew


async def ask_one_that_answers(statuses, patience, time):
    async def answer(_):
        return web.Response(status=statuses.pop(0))

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        async with ClientSession(trace_configs=[watching(patience)]) as session:
            return await asked(session, f"http://127.0.0.1:{port}/", 7, time)
    finally:
        await runner.cleanup()


def test_one_that_only_tells_of_its_faults_is_given_up():
    patience = Patience(60, time := Time())
    with pytest.raises(TimeoutError, match="503 Service Unavailable"):
        asyncio.run(ask_one_that_answers([503] * 20, patience, time))
    assert time.now == 63


def test_one_that_answers_is_not():
    patience = Patience(60, time := Time())
    assert asyncio.run(ask_one_that_answers([503] * 5 + [200], patience, time)) == 5
    time.now += 1000
    patience.check()
