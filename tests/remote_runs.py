"""Runs of a RemoteEngine against the server of faults, in this process, and what comes of them."""

from contextlib import contextmanager
from typing import Any, NamedTuple

from batcher.events import Event
from batcher.remote.client import remote_model_of
from batcher.remote.engine import RemoteEngine
from batcher.request import Request
from batcher.result import Result
from batcher.trace.timeline import Timeline

QUICK = {"backoff": 0.01, "connect_timeout": 5.0, "first_token_timeout": 5.0, "idle_timeout": 5.0}


class RemoteRun(NamedTuple):
    """What a run told: its events, its results and its token events, each in order."""

    events: list[Event]
    results: list[Result]
    tokens: list[Any]

    def kinds(self, kind):
        return [event for event in self.events if type(event) is kind]

    @property
    def by_id(self):
        return {result.id: result for result in self.results}


@contextmanager
def engine_of(server, batch=4, **options):
    """An engine over the server, closed at the end; options: of the server, or of the engine."""
    names = {"settings", "is_streaming", "waiting"}
    of_engine = {name: options.pop(name) for name in names & options.keys()}
    model = remote_model_of(server.name, QUICK | options)
    engine = RemoteEngine(model, batch, **of_engine)
    try:
        yield engine
    finally:
        engine.close()


def carry_out(engine, requests):
    """Put all requests in, and step until nothing is left; the trace has to make sense."""
    run = RemoteRun([engine.run_event()], [], [])
    for index, request in enumerate(requests):
        engine.enqueue(request, input_index=index)
    while engine.has_work:
        for told, outcome in zip(run, engine.step(), strict=True):
            told.extend(outcome)
    run.events.append(engine.end_event())
    Timeline.from_events(run.events).check_integrity()
    return run


def answered(server, requests, batch=4, **options):
    with server, engine_of(server, batch, **options) as engine:
        return carry_out(engine, requests)


def asking(*prompts, **fields):
    return [Request(prompt=prompt, id=prompt, **fields) for prompt in prompts]
