"""Runs of several workers for tests: engines with a share of the requests each, and their trace."""

from typing import NamedTuple

from engine_runs import traced
from msgspec.structs import replace

from batcher import SimulatedModel
from batcher.engine import Engine
from batcher.events import Event, RunEvent
from batcher.settings import SchedulingSettings
from batcher.speculation.settings import SpeculationSettings
from batcher.timing.profiles import step_time_of
from batcher.trace.run import event_of_worker

BATCH = 3
TIMED = {"step_time": step_time_of("h100_llama3.1-8b_tp1")}
SETTINGS = {
    "plain": {},
    "few blocks": {"settings": SchedulingSettings(kv_blocks=30, block_size=4, max_batch_tokens=16)},
    "timed": TIMED,
    "drafts": {"speculation": SpeculationSettings(draft="ngram"), **TIMED},
}


class WorkerRun(NamedTuple):
    """One engine's part of a run: its own events, the run event first and the end last."""

    engine: Engine
    events: list[Event]


def worker_runs(requests, num_workers, batch_size, draw, **settings):
    """Decode `requests`, each in a worker drawn at random, with `settings` of the engines."""
    engines = [Engine(SimulatedModel(), batch_size, **settings) for _ in range(num_workers)]
    for request in requests:
        draw.choice(engines).add(request)
    return [WorkerRun(engine, traced(engine)) for engine in engines]


def interleaved(runs, batch_size, draw):
    """Return the events of workers as one trace: those of each in order, the rest at random."""
    (run, *_), *_ = runs
    assert isinstance(run, RunEvent)
    left = [(worker, iter(events[1:])) for worker, events in enumerate(runs)]
    told = [replace(run, workers=len(runs))]
    while left:
        worker, events = at = draw.choice(left)
        for _ in range(draw.randint(1, 5)):
            event = next(events, None)
            if event is None:
                left.remove(at)
                break
            told.append(event_of_worker(event, worker, batch_size))
    return told
