"""Runs of an engine for tests: all that comes out of it, and requests in few words."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from batcher import Request, Result, SimulatedModel
from batcher.engine import Engine
from batcher.events import (
    Event,
    TokenEvent,
)


class Run(NamedTuple):
    results: list[Result]
    events: list[Event]
    tokens: list[TokenEvent]


def run(requests: Sequence[Request], batch_size: int = 4, *, model: Any = None) -> Run:
    engine = Engine(model or SimulatedModel(), batch_size, is_streaming=True)
    for request in requests:
        engine.add(request)
    return drained(engine)


def drained(engine: Engine) -> Run:
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
