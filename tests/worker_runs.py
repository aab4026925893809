"""Runs of several workers for tests: engines with a share of the requests each, and their trace."""

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from msgspec.structs import replace

from batcher import Request, SimulatedModel
from batcher.engine import Engine
from batcher.events import Event, RunEvent
from batcher.trace.run import event_of_worker


class WorkerRun(NamedTuple):
    """One engine's part of a run: its own events, the run event first and the end last."""

    engine: Engine
    events: list[Event]


def worker_runs(
    requests: Sequence[Request],
    num_workers: int,
    batch_size: int,
    draw: Random,
    **settings: Any,
) -> list[WorkerRun]:
    """Decode `requests`, each in a worker drawn at random, with `settings` of the engines."""
    engines = [Engine(SimulatedModel(), batch_size, **settings) for _ in range(num_workers)]
    for request in requests:
        draw.choice(engines).add(request)
    runs = []
    for engine in engines:
        events: list[Event] = [engine.run_event()]
        while engine.has_work:
            events += engine.step().events
        runs.append(WorkerRun(engine, [*events, engine.end_event()]))
    return runs


def interleaved(runs: Sequence[Sequence[Event]], batch_size: int, draw: Random) -> list[Event]:
    """Return the events of workers as one trace: those of each in order, the rest at random."""
    (run, *_), *_ = runs
    assert isinstance(run, RunEvent)
    left = [(worker, iter(events[1:])) for worker, events in enumerate(runs)]
    told: list[Event] = [replace(run, workers=len(runs))]
    while left:
        worker, events = at = draw.choice(left)
        for _ in range(draw.randint(1, 5)):
            event = next(events, None)
            if event is None:
                left.remove(at)
                break
            told.append(event_of_worker(event, worker, batch_size))
    return told
