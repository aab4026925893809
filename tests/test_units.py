"""Beams, negative prompts and samples: what is admitted, aborted and replayed together."""

import re

import pytest
from control_requests import control_requests
from engine_runs import drained, fields, of_kind, run
from examples import examples, mostly_heavy
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from reference import english_requests

from batcher import SimulatedModel
from batcher.engine import Engine
from batcher.events import AdmitEvent, DropEvent, FinishEvent, ForkEvent
from batcher.request import CONSTRAINT_FIELDS


def test_partners_have_slots_of_their_own_and_speak_by_their_scale():
    done = run([fields(cfg_scale=1.5, negative_prompt="No", temperature=1.0, n=2)], 3)
    admits = of_kind(done.events, AdmitEvent)
    assert [(admit.slot, admit.index, admit.role) for admit in admits] == [
        (0, 0, "sample"),
        (1, 0, "negative"),
        (0, 1, "sample"),
        (1, 1, "negative"),
    ]
    unused = [finish for finish in of_kind(done.events, FinishEvent) if finish.reason == "unused"]
    assert [(finish.role, finish.tokens) for finish in unused] == [("negative", 0)] * 2
    assert [result.index for result in done.results] == [0, 1]
    # At 0 the negative prompt alone speaks: its tokens are those of that prompt by itself.
    [only_negative] = run([fields(cfg_scale=0.0, negative_prompt="The fox")]).results
    [by_itself] = run([fields(prompt="The fox")]).results
    assert only_negative.tokens == by_itself.tokens


def test_beams_fork_from_the_first_and_their_events_name_parents():
    done = run([fields(num_beams=3, n=2)], 4)
    forks = of_kind(done.events, ForkEvent)
    assert [(fork.step, fork.slot, fork.parent) for fork in forks[:2]] == [(0, 1, 0), (0, 2, 0)]
    assert all(fork.parent != fork.index for fork in forks)
    first, second = done.results
    assert (first.index, second.index) == (0, 1)
    assert first.score is not None
    assert second.score is not None
    assert first.score >= second.score
    reasons = [(finish.index, finish.reason) for finish in of_kind(done.events, FinishEvent)]
    assert reasons == [(0, first.finish_reason), (1, second.finish_reason), (2, "unused")]


def test_beams_end_where_only_the_end_is_left_and_when_aborted_with_what_they_have():
    results = run([fields(regex="[0-9]{3}", num_beams=2, n=2, min_tokens=6)]).results
    ends = {(result.finish_reason, result.constraint, len(result.tokens)) for result in results}
    assert ends == {("stop", "complete", 4)}
    engine = Engine(SimulatedModel(), 4)
    engine.add(fields(num_beams=3, n=2, ignore_eos=True))
    engine.step()
    engine.step()
    engine.abort("a")
    results = engine.step().results
    ends = [(result.finish_reason, len(result.tokens)) for result in results]
    assert ends == [("aborted", 2)] * 2
    assert not engine.has_work
    assert engine.num_running == 0


@pytest.mark.parametrize(
    ("more", "ends"),
    [
        ({"num_beams": 3, "n": 2}, [(0, "beam"), (1, "beam")]),
        ({"cfg_scale": 2.0, "negative_prompt": "x"}, [(0, "sample")]),
        ({"temperature": 1.0, "best_of": 3}, [(0, "sample"), (1, "sample"), (2, "sample")]),
    ],
)
def test_what_is_aborted_before_it_has_a_slot_gives_what_was_asked_for(more, ends):
    request = fields(**more)
    engine = Engine(SimulatedModel(), 4)
    engine.add(request)
    engine.abort("a")
    outcome = engine.step()
    finishes = of_kind(outcome.events, FinishEvent)
    assert [(finish.index, finish.role) for finish in finishes] == ends
    assert [result.index for result in outcome.results] == list(range(request.n))
    drops = [(drop.index, drop.reason) for drop in of_kind(outcome.events, DropEvent)]
    assert drops == [(index, "aborted") for index, _ in ends[request.n :]]
    assert not engine.has_work


def test_samples_that_are_whole_are_better_than_those_that_were_aborted():
    """The second sample has a token still when the first two have all eight of theirs."""
    engine = Engine(SimulatedModel(), 2)
    engine.add(fields(temperature=1.0, n=1, best_of=3, ignore_eos=True))
    for _ in range(9):
        assert not engine.step().results
    engine.abort("a")
    outcome = engine.step()
    [best] = outcome.results
    drops = of_kind(outcome.events, DropEvent)
    assert best.finish_reason == "length"
    assert best.index in {0, 1}
    assert [(drop.index, drop.reason) for drop in drops] == [
        (1 - best.index, "length"),
        (2, "aborted"),
    ]


def test_what_is_aborted_ended_in_the_step_before_or_has_not_arrived():
    engine = Engine(SimulatedModel(), 4)
    engine.add(fields(temperature=1.0, best_of=2, ignore_eos=True))
    engine.step()
    engine.step()
    engine.abort("a")
    events = engine.step().events
    ends = [(type(event), event.step, event.time) for event in events]
    assert ends == [(FinishEvent, 1, 1.0), (FinishEvent, 1, 1.0), (DropEvent, 1, 1.0)]
    engine = Engine(SimulatedModel(), 1)
    engine.add(fields(arrival_time=9.0))
    engine.abort("a")
    [result] = engine.step().results
    assert (result.steps.arrived, result.steps.admitted) == (None, None)


@pytest.mark.parametrize("first", mostly_heavy(range(4), 0))
def test_a_beam_that_forks_takes_along_how_far_a_stop_has_come(first):
    token_bytes = SimulatedModel().tokenizer.token_bytes
    [free] = run([fields(num_beams=3, ignore_eos=True, max_tokens=12)]).results
    for start in range(first, len(free.text) - 5, 4):
        stop = free.text[start : start + 5]
        for result in run([fields(num_beams=3, n=3, max_tokens=12, stop=stop)]).results:
            *before, last = (token_bytes[token] for token in result.tokens)
            assert stop.encode() not in b"".join(before)
            assert (stop.encode() in b"".join([*before, last])) == (result.stop_reason == stop)


@pytest.mark.parametrize("min_tokens", mostly_heavy([2, 4, 7], 4))
def test_each_beam_may_stop_from_min_tokens_on(min_tokens):
    [free] = run([fields(num_beams=3, ignore_eos=True, max_tokens=12)]).results
    seen = set()
    for stop in sorted(set(free.tokens)):
        beams = fields(
            num_beams=3, n=3, max_tokens=12, ignore_eos=True, stop_token=stop, min_tokens=min_tokens
        )
        for result in run([beams]).results:
            assert len(result.tokens) >= min_tokens
            assert stop not in result.tokens[min_tokens - 1 : -1]
            assert (result.finish_reason == "stop") == (result.tokens[-1] == stop)
            seen.add(result.finish_reason)
    assert seen == {"stop", "length"}


@pytest.mark.parametrize("max_tokens", [3, 30])
def test_of_every_beam_it_is_told_whether_it_keeps_its_constraint(max_tokens):
    done = run([fields(num_beams=3, n=3, regex="(ab|cd)+e", max_tokens=max_tokens)])
    assert of_kind(done.events, ForkEvent)
    for result in done.results:
        is_whole = re.fullmatch("(ab|cd)+e", result.text) is not None
        assert result.constraint == ("complete" if is_whole else "incomplete")


def test_penalties_count_the_tokens_of_each_beam():
    """Of six tokens that are about as likely, the one that is new costs least."""
    allowed = [48, 49, 50, 51, 52, 53]
    beams = fields(num_beams=3, max_tokens=6, allowed_token_ids=allowed, frequency_penalty=2.0)
    [best] = run([beams]).results
    assert sorted(best.tokens) == allowed


def is_replayed(request):
    constraints = [getattr(request, field) for field in CONSTRAINT_FIELDS]
    is_forced = request.heal or any(constraint is not None for constraint in constraints)
    return not (is_forced or request.num_beams > 1 or request.best_of is not None)


@given(
    st.lists(st.one_of(control_requests(), english_requests()), max_size=15),
    st.sampled_from([3, 8, 64]),
    st.data(),
)
@examples(60)
def test_known_samples_replay_the_schedule_whatever_is_beside_them(requests, num_slots, data):
    requests = [
        replace(request, id=f"r{place}")
        for place, request in enumerate(filter(is_replayed, requests))
    ]
    done = run(requests, num_slots)
    known = {request.id or "": {} for request in requests}
    for result in done.results:
        if data.draw(st.booleans(), label="finished before"):
            known[result.id][result.index] = result
    engine = Engine(SimulatedModel(), num_slots)
    for request in requests:
        engine.add(request, replayed=known[request.id or ""])
    again = drained(engine)
    assert again.events == done.events
    assert again.results == [r for r in done.results if r.index not in known[r.id]]
