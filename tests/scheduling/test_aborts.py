"""Whatever a request has come to when it is aborted, all that it held is free again."""

from collections.abc import Callable
from typing import Any

import pytest
from ledger import LedgerModel
from soaking import kept

from batcher import Engine, Request, Result, SimulatedModel
from batcher.events import AdmitEvent, PreemptEvent, PrefillEvent, RequestEvent
from batcher.settings import SchedulingSettings
from batcher.trace.timeline import Timeline

SETTINGS = SchedulingSettings(kv_blocks=16, block_size=4, max_batch_tokens=8)
Stage = Callable[["Run"], str | None]  # who has come to it


def request(name: str, prompt: int = 5, **fields: Any) -> Request:
    tokens = [number + len(name) for number in range(10, 10 + prompt)]
    return Request(id=name, **{"prompt": tokens, "max_tokens": 14, "ignore_eos": True, **fields})


REQUESTS = [
    request("first"),
    request("long", prompt=30),
    request("pair", cfg_scale=1.5, negative_prompt=[3] * 6),
    request("samples", n=3, temperature=1.0),
    request("beams", num_beams=3, max_tokens=9),
    request("later", arrival_time=400.0),
    request("turn", session="s"),
    request("next", session="s"),
    request("last", session="s"),
]


class Run:
    """An engine under pressure, and what it has told."""

    def __init__(self) -> None:
        self.engine = Engine(LedgerModel(is_attentive=True), 4, settings=SETTINGS, is_checked=True)
        self.events: list[RequestEvent] = []
        self.results: list[Result] = []
        for each in REQUESTS:
            self.engine.add(each)

    def step(self) -> None:
        outcome = self.engine.step()
        self.events = outcome.events
        self.results += outcome.results

    def first_of(self, kind: type, **fields: Any) -> str | None:
        """Return the request of the first event of a kind in the last step, if it still lives."""
        for event in self.events:
            is_so = all(getattr(event, name) == value for name, value in fields.items())
            if isinstance(event, kind) and is_so and event.id in self.engine._outputs.num_open:
                return event.id
        return None


def is_pending(run: Run) -> str | None:
    return "later"


def waits(run: Run) -> str | None:
    queue = run.engine._queue
    return next((sequence.id for sequence in queue._ordering), None)


def is_partly_computed(run: Run) -> str | None:
    partly = [event for event in run.events if isinstance(event, AdmitEvent | PrefillEvent)]
    left = [event.id for event in partly if event.left and event.id in run.engine._outputs.num_open]
    return left[0] if left else None


def decodes(role: str) -> Stage:
    def stage(run: Run) -> str | None:
        rows = run.engine._batch.slots
        return next((row.id for row in rows if row and row.is_decoding and row.role == role), None)

    return stage


def is_preempted(run: Run) -> str | None:
    return run.first_of(PreemptEvent)


def is_back(run: Run) -> str | None:
    for event in run.events:
        if (
            isinstance(event, AdmitEvent)
            and event.generated
            and event.id in run.engine._outputs.num_open
        ):
            return event.id
    return None


def waits_for_its_turn(run: Run) -> str | None:
    return "last" if "last" in run.engine._outputs.num_open else None


STAGES: list[Stage] = [
    is_pending,
    waits,
    is_partly_computed,
    decodes("sample"),
    decodes("beam"),
    decodes("negative"),
    is_preempted,
    is_back,
    waits_for_its_turn,
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("num_before", [0, 3])
def test_an_abort_frees_what_was_held(stage: Stage, num_before: int) -> None:
    run, num_seen, aborted = Run(), 0, None
    while run.engine.has_work:
        assert run.engine.num_steps < 1000
        run.step()
        found = stage(run) if aborted is None else None
        num_seen += found is not None
        if found is None or num_seen <= num_before:
            continue
        aborted = found
        run.engine.abort(found)
        rows = [row for row in run.engine._batch.slots if row is not None]
        assert found not in {row.id for row in rows}
        held = {block for row in rows for block in row.block_table}
        assert run.engine.scheduler.kv_cache.pool.num_used == len(held)
        run.engine.scheduler.check()
    assert aborted is not None or num_before, "nobody has come to that"
    assert kept(run.engine) == {}
    assert len(run.results) == sum(each.n for each in REQUESTS)
    if aborted is not None:
        of_it = {result.finish_reason for result in run.results if result.id == aborted}
        assert "aborted" in of_it


def test_beams_that_are_aborted_when_they_are_back_may_have_whole_outputs() -> None:
    settings = SchedulingSettings(
        kv_blocks=60,
        block_size=1,
        max_batch_tokens=4,
        long_prefill_threshold=1,
        preempt_for="priority",
        prefix_cache=False,
    )
    engine = Engine(SimulatedModel(), 3, settings=settings)
    stops = {"stop": [" the", "c"], "ignore_eos": False}
    engine.add(request("beams", max_tokens=22, num_beams=2, n=2, length_penalty=2.0, **stops))
    for name in "pq":
        engine.add(request(name, max_tokens=5, priority=-1, arrival_time=9.0))
    events = [engine.run_event()]
    while not any(isinstance(event, AdmitEvent) and event.generated for event in events):
        events += engine.step().events
    engine.abort("beams")
    outcome = engine.step()
    assert "stop" in [result.finish_reason for result in outcome.results]
    while engine.has_work:
        outcome.events.extend(engine.step().events)
    Timeline.from_events([*events, *outcome.events, engine.end_event()]).check_integrity()
