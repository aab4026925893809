"""A workload without an end: pressure on the blocks, prefixes that come and go, and aborts."""

import random
from collections import Counter
from typing import NamedTuple

from batcher import Engine, Request, SimulatedModel
from batcher.events import AdmitEvent, PreemptEvent
from batcher.settings import SchedulingSettings

NUM_SLOTS = 64
NUM_IN_FLIGHT = 160
SETTINGS = SchedulingSettings(
    policy="sjf", aging=200.0, kv_blocks=190, block_size=4, max_batch_tokens=256
)
LIFE_OF_A_PREFIX = 400  # requests
NUM_CHECKED_STEPS = 2000  # each; after that one in as many as this
CHECK_EVERY = 50


class Soaked(NamedTuple):
    """What a soak has come to; kept: what the engine still holds."""

    outcomes: Counter[str]
    num_steps: int
    num_preemptions: int
    num_hits: int
    kept: dict[str, int]


def requests(num_requests):
    """Yield requests whose prompts begin as those of their time do; one in fifty asks for two."""
    draw = random.Random(0)
    for number in range(num_requests):
        family = number // LIFE_OF_A_PREFIX + draw.randint(0, 2)
        prefix = random.Random(family)
        shared = [prefix.randrange(3, 500) for _ in range(draw.choice([0, 4, 8, 14]))]
        more = {"n": 2, "temperature": 1.0} if number % 50 == 0 else {}
        if number % 40 == 0:
            more["cache_salt"] = f"salt {family}"
        yield Request(
            id=f"r{number}",
            prompt=[*shared, *(draw.randrange(3, 500) for _ in range(draw.randint(0, 6)))],
            max_tokens=draw.randint(1, 24),
            stop_token=[4, 5] if number % 3 else None,
            **more,
        )


def soak(num_requests):
    """Run so many requests through one engine, and abort one in thirty at some stage."""
    engine = Engine(SimulatedModel(), NUM_SLOTS, settings=SETTINGS)
    draw, outcomes = random.Random(1), Counter[str]()
    living = {}
    num_preemptions = num_hits = 0
    unread = requests(num_requests)
    while True:
        for request in unread:
            living[engine.add(request)] = None
            if len(living) >= NUM_IN_FLIGHT:
                break
        if not engine.has_work:
            break
        if draw.random() < 0.25:
            engine.abort(draw.choice([*living]) if draw.random() < 0.5 else next(iter(living)))
        outcome = engine.step()
        for result in outcome.results:
            outcomes[result.finish_reason] += 1
            living.pop(result.id, None)
        for event in outcome.events:
            num_preemptions += isinstance(event, PreemptEvent)
            num_hits += isinstance(event, AdmitEvent) and event.cached > 0
        if engine.num_steps < NUM_CHECKED_STEPS or engine.num_steps % CHECK_EVERY == 0:
            engine.scheduler.check()
    engine.scheduler.check()
    return Soaked(outcomes, engine.num_steps, num_preemptions, num_hits, kept(engine))


def kept(engine):
    """Return how much an engine still holds of rows that have ended, by place; {} if nothing."""
    scheduler, runner, rows = engine.scheduler, engine._runner, engine._runner.rows
    batch = scheduler.batch
    queue = scheduler.queue
    sizes = {
        "rows": len(rows._states) if rows else 0,
        "beams": len(rows._searches) if rows else 0,
        "firsts": len(batch._first_of) + (len(rows.first_slots) if rows else 0),
        "first rows": len(runner.tokens.first_rows),
        "rows aside": len(runner.tokens.aside),
        "logit rows": len(rows.sampler.slots) if rows else 0,
        "rows in the batch": len(runner.batch.slots),
        "chunks": len(runner.batch.chunks),
        "lost": len(runner._lost),
        "ending": len(batch.ending),
        "occupied": batch.num_occupied,
        "prefilling": len(batch.prefilling),
        "decoding": batch.num_decoding,
        "forked": len(batch._forked),
        "waiting": queue.num_waiting + queue.num_slots,
        "order": sum(len(getattr(queue, name, ())) for name in ("_by_key", "_by_arrival")),
        "pending": queue.num_pending + len(queue._pending),
        "open requests": len(engine._num_open),
        "candidates": len(engine._candidates),
        "results": len(engine._results),
    }
    kv_cache = scheduler.kv_cache
    if kv_cache is not None:
        pages = runner.pages
        sizes |= {
            "blocks": kv_cache.pool.num_used,
            "shared blocks": sum(count > 1 for count in kv_cache.pool._holders),
            "siblings": len(kv_cache._siblings),
            "boundaries": len(kv_cache._boundaries),
            "moved rows": len(pages.moved) if pages is not None else 0,
        }
    return {name: size for name, size in sizes.items() if size}
