"""No setting of the scheduler changes a token: blocks, budgets, orders, preemption, static batches.

Invariant 7 with all that a request can ask for, under all that a schedule can be.
"""

from typing import NamedTuple

from control_requests import control_requests
from examples import examples
from hypothesis import currently_in_test_context, event, given, settings
from hypothesis import strategies as st
from ledger import LedgerModel
from msgspec.structs import replace
from narrow_model import NarrowModel
from reference import english_requests, tiny_model, tiny_requests
from scheduling_settings import BLOCK_SIZES, blocks_needed, scheduling_settings, sharing, step_times
from soaking import kept

from batcher import Engine, Request, Result, SimulatedModel
from batcher.events import AdmitEvent, PreemptEvent
from batcher.requests.validation import num_slots_needed
from batcher.settings import DEFAULT_SCHEDULING, SchedulingSettings
from batcher.timing.step_time import StepTime

Outputs = dict[tuple[str, int], Result]
MAX_STEPS = 5000


class Case(NamedTuple):
    """Requests in one batch."""

    requests: list[Request]
    batch_size: int
    settings: SchedulingSettings
    step_time: StepTime | None


def attentive():
    return SimulatedModel(is_attentive=True)


@st.composite
def cases(draw, requests):
    """Draw up to a dozen requests, and settings under which each of them can run."""
    drawn = draw(st.lists(sharing(requests), min_size=1, max_size=12))
    batch_size = draw(st.sampled_from([3, 4, 8]))
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    least = max(blocks_needed(request, block_size) for request in drawn)
    num_blocks = st.one_of(st.integers(least, least + 4), st.integers(least, 3 * least), st.none())
    return Case(
        [replace(request, id=f"r{number}") for number, request in enumerate(drawn)],
        batch_size,
        draw(scheduling_settings(batch_size, num_blocks, block_size)),
        draw(step_times()),
    )


def engine_of(case, model, *, is_streaming=True, **fields):
    engine = Engine(
        model,
        case.batch_size,
        settings=case.settings,
        step_time=case.step_time,
        is_streaming=is_streaming,
        is_checked=True,
        **fields,
    )
    for request in case.requests:
        engine.add(request)
    return engine


def alone(make_model, request):
    engine = Engine(make_model(), num_slots_needed(request), settings=DEFAULT_SCHEDULING)
    engine.add(replace(request, arrival_time=0.0))
    return run(engine)


def run(engine):
    outputs = {}
    streamed = {}
    num_preemptions = num_cached = 0
    while engine.has_work:
        assert engine.num_steps < MAX_STEPS
        outcome = engine.step()
        for told in outcome.tokens:
            streamed.setdefault((told.id, told.index), []).extend(told.tokens)
        for result in outcome.results:
            assert (result.id, result.index) not in outputs
            outputs[result.id, result.index] = timeless(result)
        for told in outcome.events:
            num_preemptions += isinstance(told, PreemptEvent)
            num_cached += isinstance(told, AdmitEvent) and told.cached > 0
    assert kept(engine) == {}
    for row, tokens in streamed.items():
        if row in outputs:  # with best_of, others may have been better
            assert tokens == outputs[row].tokens, "not what was streamed"
    _note(f"preemptions: {bool(num_preemptions)}, hits: {bool(num_cached)}")
    return outputs


def _note(what):
    if currently_in_test_context():
        event(what)


def timeless(result):
    error = result.error and replace(result.error, message=result.error.message.partition(": ")[2])
    return replace(result, slot=None, steps=None, error=error)


def check(case, make_model, make_reference):
    expected = {}
    for request in case.requests:
        expected |= alone(make_reference, request)
    assert run(engine_of(case, make_model())) == expected


@given(cases(st.one_of(english_requests(), control_requests())))
@settings(examples(35), derandomize=True)
def test_a_model_that_attends_to_its_pages_gives_the_same(case):
    check(case, attentive, SimulatedModel)


@given(cases(st.one_of(english_requests(), control_requests())))
@settings(examples(15), derandomize=True)
def test_a_model_is_told_of_every_token_once(case):
    check(case, LedgerModel, SimulatedModel)


@given(cases(control_requests()), st.sampled_from([6, 60, 600]))
@settings(examples(100), derandomize=True)
def test_the_largest_logits_choose_the_same(case, num_top):
    check(case, lambda: NarrowModel(num_top), SimulatedModel)


class UnpagedModel(LedgerModel):
    """A model with a cache by slot, and no pages."""

    is_paged = False


@given(cases(st.one_of(english_requests(), control_requests())))
@settings(examples(25), derandomize=True)
def test_a_model_with_a_cache_by_slot_gives_the_same(case):
    check(case, UnpagedModel, SimulatedModel)


@given(cases(tiny_requests()))
@settings(examples(20), derandomize=True)
def test_a_model_without_pages_gives_the_same(case):
    check(case, tiny_model, tiny_model)


def test_the_first_token_of_a_row_that_was_preempted_is_its_first():
    settings = SchedulingSettings(kv_blocks=6, block_size=4)
    engine = Engine(attentive(), 2, settings=settings, is_checked=True)
    for number in range(2):
        engine.add(Request(id=f"r{number}", prompt=[5] * 4, max_tokens=16, ignore_eos=True))
    first_tokens, preempted = {}, set()
    while engine.has_work:
        outcome = engine.step()
        preempted |= {event.id for event in outcome.events if isinstance(event, PreemptEvent)}
        first_tokens |= {result.id: result.steps.first_token for result in outcome.results}
    assert preempted == {"r1"}
    assert first_tokens == {"r0": 0, "r1": 0}
