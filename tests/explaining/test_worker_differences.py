"""Runs of several workers are compared by what became of their requests, not by their schedules."""

from random import Random

import msgspec
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from reference import english_requests
from test_restarted_workers import ARGUMENTS, TIMED, cases, places
from worker_runs import worker_runs

from batcher.events import EndEvent, FinishEvent
from batcher.explaining.differences import compare
from batcher.explaining.worker_differences import compare_workers


@cases
@examples(40)
def test_whoever_dies_and_however_many_there_are_results_agree(drawn, num_workers, seed, kind):
    _, _, events_a = places(drawn, num_workers, seed, kind)
    _, _, events_b = places(drawn, num_workers, seed + 1, kind)
    found = compare_workers(events_a, events_b)
    assert found.is_equal
    assert found.num_compared == found.totals_a.ended == found.totals_b.ended == len(drawn)
    assert found.totals_a.tokens == found.totals_b.tokens
    assert found.agreement.differing == []
    assert msgspec.json.encode(found)
    _, _, others = places(drawn[1:] or drawn, num_workers, seed, kind)
    assert compare_workers(events_a, others).is_equal == (len(drawn) == 1)


@given(st.lists(english_requests(), min_size=1, max_size=12), st.integers(0, 2**32))
@examples(30)
def test_of_one_engine_the_numbers_are_those_of_the_usual_comparison(drawn, seed):
    named = [replace(each, id=f"r{number}") for number, each in enumerate(drawn)]
    (a,), (b,) = (worker_runs(named, 1, batch_size, Random(seed), **TIMED) for batch_size in (2, 3))
    usual, found = compare(a.events, b.events), compare_workers(a.events, b.events)
    for name in ("settings", "only_a", "only_b", "altered", "num_compared", "changes"):
        assert getattr(found, name) == getattr(usual, name)
    assert (found.totals_a, found.totals_b) == (usual.totals_a, usual.totals_b)


@cases
@examples(20)
def test_a_worker_that_was_never_ready_breaks_nothing_off(drawn, num_workers, seed, kind):
    _, _, events = places(drawn, num_workers, seed, kind)
    more = [replace(events[0], workers=num_workers + 1), *events[1:]]
    found = compare_workers(events, more)
    assert found.is_equal
    assert found.agreement.is_whole_b


@cases
@examples(20)
def test_an_end_that_differs_is_told(drawn, num_workers, seed, kind):
    _, _, events = places(drawn, num_workers, seed, kind)
    ends = [n for n, e in enumerate(events) if isinstance(e, FinishEvent) and e.slot is not None]
    if not ends:
        return
    changed = list(events)
    changed[ends[0]] = replace(events[ends[0]], reason="aborted")
    found = compare_workers(events, changed)
    assert not found.is_equal
    assert found.agreement.differing == [events[ends[0]].id]


@given(st.data())
@examples(20)
def test_what_breaks_off_is_compared_as_far_as_it_has_ended(data):
    drawn, num_workers, seed, kind = (data.draw(each) for each in ARGUMENTS)
    _, _, events = places(drawn, num_workers, seed, kind)
    kept = events[: data.draw(st.integers(1, len(events) - 1))]
    ended = {event.worker for event in kept if isinstance(event, EndEvent)}
    is_whole = bool(ended) and {event.worker for event in kept[1:]} <= ended
    found = compare_workers(events, kept)
    assert found.is_equal or is_whole
    assert (found.agreement.is_whole_a, found.agreement.is_whole_b) == (True, is_whole)
    assert found.num_compared <= len(drawn)
