"""What paged memory costs the engine: block tables and a prefix cache, with room and without."""

import statistics
import time
from typing import NamedTuple

import bare
import workload
from workload import Row

from batcher import Engine, Request, SimulatedModel
from batcher.events import PreemptEvent
from batcher.settings import SchedulingSettings

AMPLE, TIGHT = 12, 4  # blocks for each slot
TIMES = 5


class Timed(NamedTuple):
    """What a run took; num_preemptions: of requests."""

    seconds: float
    num_preemptions: int


def paging(folder):
    """Measure the engine with blocks of 16 tokens against the bare loop, and with too few."""
    rows = list(workload.rows(4000))
    requests = [Request(**row) for row in rows]
    for batch_size, target in ((64, 1.5), (256, 2.0)):
        bares, ample, tight = in_turn(
            lambda: timed(lambda: bare.decode(rows, batch_size)),  # noqa: B023
            lambda: paged(requests, batch_size, AMPLE),  # noqa: B023
            lambda: paged(requests, batch_size, TIGHT),  # noqa: B023
        )
        ratio = statistics.median(map(ratio_of, bares, ample))
        name = f"engine with paged KV and prefix cache, B={batch_size}, against the bare loop"
        yield Row(name, f"{ratio:.2f}x", f">= {target}x")
        share = statistics.median(map(ratio_of, ample, tight))
        name = f"the same with a third of the blocks: {tight[0].num_preemptions} preemptions"
        yield Row(name, f"{share:.2f}x", ">= 0.8x")


def in_turn(*runs):
    laps = [[run() for run in runs] for _ in range(TIMES + 1)]
    return [list(column) for column in zip(*laps[1:], strict=True)]


def ratio_of(one, other):
    return one.seconds / other.seconds


def timed(work):
    began = time.process_time()
    work()
    return Timed(time.process_time() - began, 0)


def paged(requests, batch_size, blocks_per_slot):
    """Return what the engine takes with so many blocks."""
    settings = SchedulingSettings(kv_blocks=batch_size * blocks_per_slot)
    engine = Engine(SimulatedModel(), batch_size, settings=settings)
    num_preemptions = 0
    began = time.process_time()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        events = engine.step().events
        num_preemptions += sum(type(event) is PreemptEvent for event in events)
    return Timed(time.process_time() - began, num_preemptions)
