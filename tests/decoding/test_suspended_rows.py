"""A row that leaves the batch and comes back has lost nothing, whatever it was asked for."""

from random import Random
from typing import Any

import numpy as np
import pytest
from control_requests import SCHEMA, STATES, control_requests
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from slotted_rows import MODEL, SlottedRows, decode_all, never

from batcher import Request
from batcher.decoding.stop_matcher import StopMatcher
from batcher.decoding.stops import stop_automaton

EVERY_KIND: dict[str, dict[str, Any]] = {
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


def request(kind: str) -> Request:
    return Request(**{"prompt": "Count the boats", "max_tokens": 14, **EVERY_KIND[kind]})


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_row_that_leaves_after_every_step_is_the_same_row(kind: str) -> None:
    """With a partner of another kind that stays, so that the tables are never empty."""
    requests = [request(kind), request("stop")]
    expected = decode_all(requests, Random(0))
    turns = Random(1)
    assert decode_all(requests, turns, lambda: turns.random() < 0.5) == expected
    assert expected.outputs


@given(
    st.lists(control_requests(), min_size=1, max_size=5),
    st.integers(0, 2**32),
    st.sampled_from([0.05, 0.3, 0.7]),
)
@examples(100)
def test_rows_of_any_kind_may_leave_and_come_back_anywhere(
    requests: list[Request], seed: int, rate: float
) -> None:
    random = Random(seed)
    left = decode_all(requests, random, lambda: random.random() < rate)
    assert left == decode_all(requests, Random(0))


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_row_that_ends_outside_the_batch_gives_what_it_had(kind: str, num_steps: int) -> None:
    def begun() -> SlottedRows:
        rows = SlottedRows([request(kind)])
        rows.admit(Random(0), never)
        for _ in range(num_steps):
            rows.compute()
        return rows

    inside, outside = begun(), begun()
    for first in list(inside.running.values()):
        inside.end(first, "aborted")
    for first in list(outside.running.values()):
        outside.suspend(first)
    for first, _ in outside.suspended:
        outputs = outside.runner.close_suspended(first, "aborted")
        outside.outcome.outputs[first.id, first.index] = outputs
    assert outside.finish() == inside.finish()
    assert outside.runner.rows.logit_slots.size == 0


def test_suspended_rows_tell_what_the_model_has_to_compute_again() -> None:
    rows = SlottedRows([request("guidance"), request("beams")])
    rows.admit(Random(0), never)
    guided, beams = rows.running.values()
    rows.suspend(beams)
    [(_, before)] = rows.suspended
    assert before.tokens == [[]]
    rows.suspended.clear()
    rows.take_slots(beams, Random(1))
    rows.resume(beams, before)
    for _ in range(4):
        rows.compute()
    for first in (guided, beams):
        slots = [row.slot for row in (first, *first.others)]
        read = [rows.runner.read(slot, 0, 4).tolist() for slot in slots]
        rows.suspend(first)
        assert rows.suspended[-1][1].tokens == read
        assert [len(tokens) for tokens in read] == [4] * first.num_slots
    own, negative = rows.suspended[0][1].tokens
    assert own == negative


def test_a_row_stands_in_its_automaton_where_it_stood_though_the_table_was_cleared() -> None:
    """Between leaving and coming back all lines are made anew."""
    table = StopMatcher(2, MODEL.vocab_size, MODEL.tokenizer)
    encode = MODEL.tokenizer.encode
    first, second = encode("a"), encode("b")
    automaton = stop_automaton(Request(prompt="", stop="ab"), ())
    table.open(0, automaton)
    table.advance(np.array([first[0], 0]))
    place = table.suspend(0)
    table._clear()
    table.open(0, stop_automaton(Request(prompt="", stop="xyz"), ()))
    table.resume(1, place)
    assert table.advance(np.array([5, second[0]])) == [1]
