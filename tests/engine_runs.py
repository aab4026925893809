"""Runs of an engine for tests: all that comes out of it, and requests in few words."""

from typing import NamedTuple

from batcher import Request, Result, SimulatedModel
from batcher.engine import Engine
from batcher.events import Event, TokenEvent


class Run(NamedTuple):
    results: list[Result]
    events: list[Event]
    tokens: list[TokenEvent]


def run(requests, batch_size=4, *, model=None):
    return drained(Engine(model or SimulatedModel(), batch_size, is_streaming=True), requests)


def traced(engine, requests=()):
    return [engine.run_event(), *drained(engine, requests).events, engine.end_event()]


def drained(engine, requests=()):
    for request in requests:
        engine.add(request)
    done = Run([], [], [])
    while engine.has_work:
        outcome = engine.step()
        done.results.extend(outcome.results)
        done.events.extend(outcome.events)
        done.tokens.extend(outcome.tokens)
    return done


def fields(**more):
    return Request(**{"id": "a", "prompt": "Count the boats", "max_tokens": 8, **more})


def of_kind(events, kind):
    return [event for event in events if type(event) is kind]
