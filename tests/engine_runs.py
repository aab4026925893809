"""Runs of an engine for tests: all that comes out of it, and requests in few words."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from batcher import Request, Result, SimulatedModel
from batcher.engine import Engine
from batcher.events import Event, TokenEvent


class Run(NamedTuple):
    results: list[Result]
    events: list[Event]
    tokens: list[TokenEvent]


def run(requests: Iterable[Request], batch_size: int = 4, *, model: Any = None) -> Run:
    return drained(Engine(model or SimulatedModel(), batch_size, is_streaming=True), requests)


def traced(engine: Engine, requests: Iterable[Request] = ()) -> list[Event]:
    return [engine.run_event(), *drained(engine, requests).events, engine.end_event()]


def drained(engine: Engine, requests: Iterable[Request] = ()) -> Run:
    for request in requests:
        engine.add(request)
    done = Run([], [], [])
    while engine.has_work:
        outcome = engine.step()
        done.results.extend(outcome.results)
        done.events.extend(outcome.events)
        done.tokens.extend(outcome.tokens)
    return done


def fields(**more: Any) -> Request:
    return Request(**{"id": "a", "prompt": "Count the boats", "max_tokens": 8, **more})


def of_kind(events: list[Event], kind: type) -> list[Any]:
    return [event for event in events if type(event) is kind]
