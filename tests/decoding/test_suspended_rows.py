"""A row that leaves the batch and comes back has lost nothing, whatever it was asked for."""

import numpy as np
import pytest
from control_requests import SCHEMA, STATES, control_requests
from engine_runs import drained, of_kind
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from ledger import LedgerModel
from msgspec.structs import replace
from test_scheduling_invariance import timeless

from batcher import Engine, Request, SimulatedModel
from batcher.decoding.stop_matcher import StopMatcher
from batcher.decoding.stops import stop_automaton
from batcher.events import PreemptEvent
from batcher.settings import SchedulingSettings

NUM_SLOTS = 7
EVERY_KIND = {
    "plain": {},
    "stop": {"stop": ["s.", "e t"], "max_tokens": 30},
    "states": {"states": STATES, "max_tokens": 30},
    "sampled": {"temperature": 1.3, "top_p": 0.9, "seed": 2, "n": 3},
    "mirostat": {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 3.0},
    "penalties": {"frequency_penalty": 1.5, "repetition_penalty": 1.4, "temperature": 1.0},
    "bad words": {"bad_words": ["door", "r. ", "e"], "min_tokens": 4},
    "logprobs": {"logprobs": 2, "temperature": 0.7},
    "best of": {"best_of": 3, "n": 2, "temperature": 1.0},
    "guidance": {"cfg_scale": 1.5, "negative_prompt": "No no", "temperature": 1.0},
    "beams": {"num_beams": 3, "n": 2, "length_penalty": 0.5},
    "constrained beams": {"num_beams": 2, "regex": "(ab|cd)+ the door", "frequency_penalty": 1.0},
    "fewer ways than beams": {"num_beams": 3, "choice": ["yes", "no"]},
    "schema": {"json_schema": SCHEMA, "max_tokens": 60},
    "forced from the outset": {"choice": ["yes indeed now"], "max_tokens": 20},
    "guided schema": {
        "json_schema": SCHEMA,
        "max_tokens": 40,
        "cfg_scale": 1.5,
        "negative_prompt": "",
    },
    "healed": {"prompt": "Count the bo", "heal": True},
    "min_tokens": {"min_tokens": 9, "stop": " ", "max_tokens": 12},
}
# Everybody gives way to it: it takes all slots for a step.
VIP = Request(prompt="Now", max_tokens=1, num_beams=NUM_SLOTS, ignore_eos=True, priority=-1)


def engine_of(requests):
    settings = SchedulingSettings(preempt_for="priority")
    engine = Engine(LedgerModel(), NUM_SLOTS, settings=settings, is_streaming=True, is_checked=True)
    for number, one in enumerate(requests):
        engine.add(replace(one, id=f"r{number}", arrival_time=0.0))
    return engine


def told(done):
    """Return what came of each output, and what was streamed of it, but for when."""
    found = {(one.id, one.index): [timeless(one)] for one in done.results if one.id.startswith("r")}
    for event in done.tokens:
        if event.id.startswith("r"):
            output = found.setdefault((event.id, event.index), [])
            output.append((event.tokens, event.text, event.state))
    return found


def interrupted(requests, times):
    """Decode requests that leave the batch for a step at each of `times`."""
    vips = [replace(VIP, id=f"vip-{time}", arrival_time=float(time)) for time in times]
    return drained(engine_of(requests), vips)


def request(kind):
    return Request(**{"prompt": "Count the boats", "max_tokens": 14, **EVERY_KIND[kind]})


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_row_that_leaves_after_every_step_is_the_same_row(kind):
    requests = [request(kind), request("stop")]
    done = interrupted(requests, [*range(1, 120, 2)])
    assert told(done) == told(drained(engine_of(requests)))
    assert of_kind(done.events, PreemptEvent)


@given(
    st.lists(control_requests(), min_size=1, max_size=5), st.sets(st.integers(1, 60), max_size=30)
)
@examples(100)
def test_rows_of_any_kind_may_leave_and_come_back_anywhere(requests, times):
    assert told(interrupted(requests, sorted(times))) == told(drained(engine_of(requests)))


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_row_that_ends_outside_the_batch_gives_what_it_had(kind, num_steps):
    inside, outside = engine_of([request(kind)]), engine_of([request(kind)])
    for engine in (inside, outside):
        for _ in range(num_steps):
            engine.step()
    if not inside.num_running:
        assert num_steps > 1
        return
    outside.add(replace(VIP, id="vip", max_tokens=9))
    assert of_kind(outside.step().events, PreemptEvent)
    for engine in (inside, outside):
        engine.abort("r0")
    assert told(drained(outside)) == told(drained(inside))


def test_a_row_stands_in_its_automaton_where_it_stood_though_the_table_was_cleared():
    """Between leaving and coming back all lines are made anew."""
    model = SimulatedModel()
    table = StopMatcher(2, model.vocab_size, model.tokenizer)
    encode = model.tokenizer.encode
    first, second = encode("a"), encode("b")
    automaton = stop_automaton(Request(prompt="", stop="ab"), ())
    table.open(0, automaton)
    table.advance(np.array([first[0], 0]))
    place = table.suspend(0)
    table._clear()
    table.open(0, stop_automaton(Request(prompt="", stop="xyz"), ()))
    table.resume(1, place)
    assert table.advance(np.array([5, second[0]])) == [1]
