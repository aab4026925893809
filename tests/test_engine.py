"""The step, exactly: the schedule against a slow one, the tokens against one at a time."""

import engine_runs
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from reference import (
    ENGLISH,
    TINY,
    decode_alone,
    english_requests,
    place_of,
    tiny_model,
    tiny_requests,
)

from batcher import BatchdecodeError, Engine, Request, RequestError, SimulatedModel
from batcher.events import AdmitEvent
from batcher.result import StepTimes
from batcher.settings import SchedulingSettings

BATCH_SIZES = st.sampled_from([1, 2, 3, 8, 64])


def run(requests, batch_size, model=None):
    return drain(Engine(model or SimulatedModel(), batch_size), requests)


def drain(engine, requests=()):
    done = engine_runs.drained(engine, requests)
    return done.events, done.results


def plain(request_id, max_tokens, arrival_time=0.0):
    return Request(
        id=request_id, prompt=[5], max_tokens=max_tokens, ignore_eos=True, arrival_time=arrival_time
    )


def test_without_tokens_there_is_no_step_and_no_slot():
    engine = Engine(SimulatedModel(), 3)
    assert not engine.has_work
    assert engine.step() == ((), (), ())
    assert engine.num_steps == 0
    engine = Engine(SimulatedModel(), 2)
    engine.add(plain("a", 0))
    engine.add(plain("b", 0, arrival_time=7.5))
    _, results = drain(engine)
    assert [result.id for result in results] == ["a", "b"]
    assert engine.num_steps == 0
    assert engine.now == 7.5
    events, results = run([plain("a", 3), plain("z", 0), plain("b", 1)], 1)
    assert [result.id for result in results] == ["z", "a", "b"]
    zero = results[0]
    assert (zero.slot, zero.tokens, zero.text, zero.finish_reason) == (None, [], "", "length")
    assert (zero.steps.arrived, zero.steps.admitted, zero.steps.finished) == (0, None, 0)
    assert not any(isinstance(event, AdmitEvent) and event.id == "z" for event in events)


def test_a_freed_slot_is_refilled_in_the_next_step_and_says_so():
    requests = [plain("long", 9), plain("a", 1), plain("b", 1), plain("c", 1, arrival_time=5)]
    events, _ = run(requests, 2)
    reasons = {event.id: event.reason for event in events if isinstance(event, AdmitEvent)}
    assert reasons == {"long": "empty", "a": "empty", "b": "refill", "c": "empty"}


def test_a_request_is_wanted_that_would_fill_a_slot_or_arrives_with_others():
    engine = Engine(SimulatedModel(), 2)
    assert engine.wants_request
    engine.add(plain("a", 1))
    assert engine.wants_request
    engine.add(plain("b", 3))
    assert not engine.wants_request
    engine.step()
    assert engine.wants_request
    engine.add(plain("future", 1, arrival_time=9))
    assert not engine.wants_request
    engine = Engine(SimulatedModel(), 3)
    waiting = [plain(str(number), 1, arrival_time=5) for number in range(4)]
    while engine.wants_request and waiting:
        engine.add(waiting.pop(0))
    outcome = engine.step()
    assert len(outcome.results) == 3
    engine = Engine(SimulatedModel(), 2)
    for name in "abc":
        engine.add(plain(name, 9))
    engine.step()
    assert not engine.wants_request
    engine.abort("a")
    assert not engine.wants_request
    engine.abort("c")
    assert engine.wants_request


@pytest.mark.parametrize("before", [plain("z", 0), plain("z", 90)], ids=["no tokens", "too large"])
def test_all_that_arrive_together_are_wanted_behind_what_ends_without_a_slot(before):
    settings = SchedulingSettings(policy="priority", kv_blocks=4)
    engine = Engine(SimulatedModel(), 1, settings=settings)
    late = replace(plain("x", 3, arrival_time=1), priority=5)
    waiting = [before, late, plain("y", 2, arrival_time=1)]
    while engine.wants_request and waiting:
        engine.add(waiting.pop(0))
    _, results = drain(engine)
    assert [result.id for result in results] == ["z", "y", "x"]


@pytest.mark.parametrize("batch_size", [0, -1, 2**20 + 1, 2.5, "8", None])
def test_a_batch_size_out_of_range_is_refused(batch_size):
    with pytest.raises(BatchdecodeError, match="batch size"):
        Engine(SimulatedModel(), batch_size)


def test_an_id_is_unique_among_those_that_have_not_ended():
    engine = Engine(SimulatedModel(), 1)
    engine.add(plain("a", 1))
    with pytest.raises(RequestError, match="has not ended"):
        engine.add(plain("a", 1))
    drain(engine)
    with pytest.raises(BatchdecodeError, match="in the engine"):
        engine.abort("a")
    engine.add(plain("a", 1))


def check_tokens(requests, results, language):
    """Invariants 1 and 7: one result for each request, with the tokens of decoding it alone."""
    assert sorted(place_of(result) for result in results) == list(range(len(requests)))
    for result in results:
        got = (result.tokens, result.text, result.finish_reason, result.stop_reason)
        assert got == decode_alone(requests[place_of(result)], language)


def check_schedule(requests, results, batch_size):
    """Invariants 2, 5 and the step itself, against a scheduler that knows only output lengths."""
    lengths = {place_of(result): len(result.tokens) for result in results}
    queue = sorted(range(len(requests)), key=lambda i: (requests[i].arrival_time, i))
    queue = [index for index in queue if requests[index].max_tokens > 0]
    slots = [None] * batch_size  # (index, tokens left)
    expected = {}
    step, now = 0, 0.0
    while queue or any(slots):
        if not any(slots) and requests[queue[0]].arrival_time > now:
            now = requests[queue[0]].arrival_time
        for slot in range(batch_size):
            if slots[slot] is None and queue and requests[queue[0]].arrival_time <= now:
                index = queue.pop(0)
                slots[slot] = (index, lengths[index])
                expected[index] = (slot, step, step + lengths[index] - 1)
        slots = [None if held is None or held[1] == 1 else (held[0], held[1] - 1) for held in slots]
        step, now = step + 1, now + 1.0
    got = {
        place_of(result): (result.slot, result.steps.admitted, result.steps.finished)
        for result in results
        if result.slot is not None
    }
    assert got == expected
    order = [(result.steps.finished, result.slot) for result in results if result.slot is not None]
    assert order == sorted(order)


@given(st.lists(english_requests(), max_size=12), BATCH_SIZES)
@examples(60)
def test_tokens_and_schedule_for_any_batch_size(requests, batch_size):
    _, results = run(requests, batch_size)
    check_tokens(requests, results, ENGLISH)
    check_schedule(requests, results, batch_size)


@given(st.lists(tiny_requests(), max_size=12), BATCH_SIZES)
@examples(120)
def test_overlapping_stops_of_a_model_with_any_vocabulary(requests, batch_size):
    _, results = run(requests, batch_size, tiny_model())
    check_tokens(requests, results, TINY)
    check_schedule(requests, results, batch_size)


def slots_of(results):
    return [
        result if result.slot is not None else replace(result, steps=StepTimes(0, None, None, 0))
        for result in sorted(results, key=place_of)
    ]


@given(st.lists(english_requests(), max_size=10), BATCH_SIZES, st.randoms())
@examples(30)
def test_adding_late_in_order_of_arrival_gives_the_same_results(requests, batch_size, random):
    """What a driver that reads only when a slot is free gets is what adding all at once gives.

    But one without a slot ends where it is read, and not where it arrived.
    """
    _, expected = run(requests, batch_size)
    engine = Engine(SimulatedModel(), batch_size)
    ahead = sorted(range(len(requests)), key=lambda i: (requests[i].arrival_time, i))
    results, times = [], []
    while True:
        while ahead and engine.wants_request:
            engine.add(requests[ahead[0]], input_index=ahead.pop(0))
        if not engine.has_work:
            break
        results += engine.step().results
        times.append(engine.now)
    assert slots_of(results) == slots_of(expected)
    assert times == sorted(times)


def test_a_replay_of_known_results_never_calls_the_model():
    requests = [plain(str(number), 5) for number in range(7)]
    _, results = run(requests, 3)

    class Silent(SimulatedModel):
        def forward(self, batch):
            raise AssertionError("the model was asked")

    engine = Engine(Silent(), 3)
    for request, result in zip(requests, sorted(results, key=place_of), strict=True):
        engine.add(request, replayed={0: result})
    assert drain(engine)[1] == []
    assert engine.num_tokens == 35


@pytest.mark.parametrize("setting", [{"kv_blocks": 9}, {"preempt_for": "priority"}], ids=str)
def test_nothing_is_replayed_where_what_it_computed_would_be_missed(setting):
    engine = Engine(SimulatedModel(), 2, settings=SchedulingSettings(**setting))
    _, [result] = run([plain("a", 3)], 1)
    with pytest.raises(BatchdecodeError, match="only without KV blocks and without preemption"):
        engine.add(plain("a", 3), replayed={0: result})
    assert not engine.has_work


def test_requests_without_a_slot_are_handed_out_without_a_step():
    engine = Engine(SimulatedModel(), 1)
    engine.add(Request(id="a", prompt=[5], max_tokens=3, ignore_eos=True))
    engine.step()
    engine.add(Request(id="late", prompt=[5], max_tokens=0))
    [result] = engine.take_outcome().results
    assert (result.id, result.steps.arrived, result.steps.finished) == ("late", 0, 1)
    assert engine.num_steps == 1
    assert engine.take_outcome().results == []
