"""Runs of all kinds, drawn from a seed: what a page has to show of them is anything there is."""

from random import Random

from msgspec.structs import replace

from batcher import Engine, Request, SimulatedModel
from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    DropEvent,
    EndEvent,
    FinishEvent,
    RejectEvent,
    RunEvent,
)
from batcher.result import ErrorInfo
from batcher.settings import SchedulingSettings
from batcher.speculation.settings import SpeculationSettings
from batcher.timing.profiles import step_time_of

NAMES = ["r{}", "é☃ {}", "😀{}", "</script>{}", "r{}#1", "אבג{}\n\u202e\x1b[31m", "x" * 5000 + "{}"]


def events_of(seed):
    """The events of a run, which may break off: rows, samples and beams under any limits."""
    rng = Random(seed)
    engine = _engine(rng)
    for number in range(rng.randint(1, 24)):
        kind = rng.choice(
            [
                {},
                {},
                {"n": 2, "temperature": 1.0},
                {"num_beams": 2},
                {"cfg_scale": 1.5, "negative_prompt": [1, 2]},
            ]
        )
        if kind == {"n": 2, "temperature": 1.0} and rng.random() < 0.5:
            kind["best_of"] = 3
        request = Request(
            id=rng.choice(NAMES).format(number),
            prompt=[rng.randint(1, 4) for _ in range(rng.randint(1, 14))],
            max_tokens=rng.choice([0, 1, 3, 12, 30]),
            arrival_time=rng.choice([0, 0, 0.5, 3, 40]),
            priority=rng.randint(0, 2),
            ignore_eos=True,
            **(kind if engine.batch_size > 2 else {}),
        )
        engine.add(request)
    events = [engine.run_event()]
    while engine.has_work:
        events += engine.step().events
        if rng.random() < 0.02:
            events.append(RejectEvent(engine.num_steps, engine.now, "bad \u202e", 0, "bad-json"))
    events.append(engine.end_event())
    if rng.random() < 0.3:
        dropped = {event.id for event in events if isinstance(event, DropEvent)}
        events = [_failed(e, dropped) if rng.random() < 0.2 else e for e in events]
    return events[: rng.randint(1, len(events))] if rng.random() < 0.2 else events


def _failed(event, dropped):
    if not isinstance(event, FinishEvent) or event.reason != "length" or event.id in dropped:
        return event
    return replace(event, reason="error", error=ErrorInfo("model-failed", "no \u202e<b>"))


def short_run(ids, model="simulated"):
    """The events of a run of one slot, in which each request takes a step."""
    yield RunEvent(batch=1, model=model, settings={})
    for step, name in enumerate(ids):
        yield ArriveEvent(0, 0.0, name, 0, "input", 1, 1)
        yield AdmitEvent(step, float(step), name, 0, 0, "refill")
        yield FinishEvent(step, float(step), name, 0, 0, "length", None, 1)
    yield EndEvent(len(ids), float(len(ids)), len(ids), len(ids))


def _engine(rng):
    batch = rng.randint(1, 6)
    block_size = rng.choice([1, 2, 4])
    batching = rng.choice(["continuous", "continuous", "static"])
    scheduling = SchedulingSettings(
        policy=rng.choice(["fcfs", "priority"]),
        preempt_for=None if batching == "static" else rng.choice([None, "priority"]),
        kv_blocks=rng.choice([None, 44 // block_size, 60 // block_size]),
        block_size=block_size,
        max_batch_tokens=rng.choice([None, rng.randint(max(batch, 4), 20)]),
        prefill_order=rng.choice(["decode-first", "prefill-first"]),
        batching=batching,
    )
    drafts = SpeculationSettings(draft="simulated:0.6") if rng.random() < 0.3 else None
    step_time = step_time_of("constant:0.3") if rng.random() < 0.5 else None
    model = SimulatedModel()
    return Engine(model, batch, settings=scheduling, speculation=drafts, step_time=step_time)
