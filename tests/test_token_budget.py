"""Invariant 11: no step computes more than the budget, whatever decodes beside prompts."""

import pytest

from batcher import Engine, Request, SimulatedModel
from batcher.events import AdmitEvent, PrefillEvent, StepsEvent
from batcher.settings import SchedulingSettings

PROMPT = [5] * 9
ORDERS = ["decode-first", "prefill-first"]


def events_of(settings: SchedulingSettings) -> list[object]:
    engine = Engine(SimulatedModel(), 4, settings=settings)
    for _ in range(8):
        engine.add(Request(prompt=PROMPT, max_tokens=20, ignore_eos=True))
    events: list[object] = []
    while engine.has_work:
        events += engine.step().events
    return events


@pytest.mark.parametrize("order", ORDERS)
def test_decoding_rows_and_prompts_share_the_budget(order) -> None:
    settings = SchedulingSettings(max_batch_tokens=6, prefill_order=order)
    computed = [
        decodes + prefills
        for event in events_of(settings)
        if isinstance(event, StepsEvent)
        for decodes, prefills in zip(event.decodes, event.prefills, strict=True)
    ]
    assert max(computed) == 6


@pytest.mark.parametrize("order", ORDERS)
def test_no_chunk_is_larger_than_the_threshold(order) -> None:
    settings = SchedulingSettings(long_prefill_threshold=2, prefill_order=order)
    chunks = []
    for event in events_of(settings):
        if isinstance(event, AdmitEvent):
            chunks.append(len(PROMPT) - event.left)
        elif isinstance(event, PrefillEvent):
            chunks.append(event.tokens)
    assert max(chunks) == 2


def test_a_threshold_below_the_number_of_rows_holds_for_each_prompt() -> None:
    settings = SchedulingSettings(long_prefill_threshold=1)
    engine = Engine(SimulatedModel(), 2, settings=settings)
    request = Request(prompt=[5] * 9, id="g", max_tokens=2, cfg_scale=1.5, negative_prompt=[6] * 3)
    engine.add(request)
    told: list[int] = []
    while engine.has_work:
        told += [e.tokens for e in engine.step().events if isinstance(e, PrefillEvent)]
    assert told == [1] * 11  # beside that of the admission
