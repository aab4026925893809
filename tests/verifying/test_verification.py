"""The proof, the settings it goes through, and where two outputs differ."""

import sys
from pathlib import Path

import pytest
from examples import mostly_heavy
from grouped_model import GroupedModel
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins
from msgspec.structs import replace

from batcher import Request, SimulatedModel
from batcher.engine.model_runner import ModelRunner
from batcher.errors import InvariantError
from batcher.models.loading import as_model
from batcher.requests.lines import RequestParser
from batcher.requests.validation import ModelCapabilities
from batcher.result import ErrorInfo, Result, Segment, StepTimes, TokenLogprob, TopLogprob, Usage
from batcher.scheduling.kv_cache import KVCache
from batcher.scheduling.queue import POLICIES
from batcher.scheduling.scheduler import check_effects, check_settings
from batcher.verifying import Needs, arranged, first_difference, make_cases, needs_of, verify

SAMPLES = Path(__file__).parents[2] / "samples"
sys.path.insert(0, str(SAMPLES))
import batch_dependent  # noqa: E402 - it is a sample


def requests_of(name):
    parser = RequestParser(ModelCapabilities())
    lines = (SAMPLES / name).read_bytes().splitlines()
    return [parser.parse(line, number).request for number, line in enumerate(lines, start=1)]


def verdict_of(requests, make_model=SimulatedModel, num_cases=40, seed=0):
    cases = make_cases(needs_of(requests, make_model()), num_cases, seed)
    done = []
    found = verify(requests, make_model, cases, seed, done.append)
    assert done == [*range(1, found.num_settings + 1)]
    return found


FEW, MANY = (10, 21), (40, 0)  # settings, and the seed of what is drawn


@pytest.mark.parametrize(
    "name",
    mostly_heavy(
        [
            "scheduling/requests.jsonl",
            "prompts/sessions.jsonl",
            "decoding/beams.jsonl",
            "decoding/healing.jsonl",
            "decoding/states.jsonl",
            "decoding/sampling.jsonl",
        ],
        *("scheduling/requests.jsonl", "decoding/beams.jsonl"),
    ),
)
@pytest.mark.parametrize(
    ("num_settings", "seed"), [FEW, pytest.param(*MANY, marks=pytest.mark.heavy)]
)
def test_the_simulated_model_is_proven(name, num_settings, seed):
    found = verdict_of(requests_of(name), num_cases=num_settings, seed=seed)
    assert found.difference is None
    assert found.num_settings == num_settings
    assert found.exercised.cached_tokens
    assert found.exercised.chunks
    assert found.exercised.preemptions or name == "prompts/sessions.jsonl"


@pytest.mark.parametrize("kinds", [(None, 5, "state"), (None, 3)], ids=str)
def test_a_model_with_groups_of_layers_is_proven(kinds):
    requests = [
        Request(id=str(length), prompt=[5] * length, max_tokens=12, ignore_eos=True)
        for length in (20, 21, 22)
    ]
    found = verdict_of(requests, lambda: GroupedModel(*kinds), num_cases=24)
    assert found.difference is None
    assert found.exercised.cached_tokens


PLAIN = requests_of("scheduling/requests.jsonl")


def model_of(name):
    return lambda: as_model(getattr(batch_dependent, name))


@pytest.mark.heavy
def test_a_model_of_the_same_file_that_looks_at_its_rows_alone_is_proven():
    assert verdict_of(PLAIN, model_of("honest")).difference is None


def test_a_copy_that_is_lost_is_caught(monkeypatch):
    monkeypatch.setattr(KVCache, "take_copies", lambda _: [])
    found = verdict_of(requests_of("decoding/beams.jsonl"))
    assert found.case.settings.is_paged


def test_blocks_that_are_shared_wrongly_are_caught(monkeypatch):
    begin = KVCache.__init__

    def forgetful(cache, its_settings, contents, *others):
        begin(cache, its_settings, lambda *asked: (0 for _ in contents(*asked)), *others)

    monkeypatch.setattr(KVCache, "__init__", forgetful)  # all blocks look alike
    found = verdict_of(PLAIN)
    assert found.case.settings.has_prefix_cache


def test_blocks_that_are_lost_are_caught_where_it_happens(monkeypatch):
    monkeypatch.setattr(KVCache, "close", lambda *_: None)
    with pytest.raises(InvariantError, match=r"\(under setting \d+\)"):
        verdict_of(PLAIN)


def without_the_first(events):
    return events[1:]


def in_capitals(events):
    return [replace(event, text=event.text.upper()) for event in events]


@pytest.mark.parametrize("telling", [without_the_first, in_capitals])
def test_a_stream_that_tells_something_else_is_caught(monkeypatch, telling):
    take = ModelRunner.take_streamed
    monkeypatch.setattr(ModelRunner, "take_streamed", lambda runner: telling(take(runner)))
    found = verdict_of(PLAIN)
    assert found.difference.field == "stream"
    assert found.case.is_streaming


def logprob(value, *tops):
    return TokenLogprob(7, value, [TopLogprob(token, number) for token, number in tops])


RESULT = Result(
    id="a",
    index=0,
    text="abc",
    tokens=[1, 2, 3],
    finish_reason="length",
    stop_reason=None,
    usage=Usage(1, 3),
    slot=0,
    steps=StepTimes(0, 0, 0, 2),
    cumulative_logprob=-1.5,
    logprobs=[logprob(-0.5, (7, -0.5), (8, -0.7)), logprob(-0.5), logprob(-0.5)],
    score=-0.5,
)


def difference(**changes):
    return first_difference(["a"], {("a", 0): RESULT}, {("a", 0): replace(RESULT, **changes)})


def test_neither_slots_nor_steps_nor_the_last_digit_count():
    assert difference(slot=3, steps=StepTimes(5, 6, 7, 9)) is None
    told = [RESULT.logprobs[0], logprob(-0.500001), logprob(-0.499999)]
    assert difference(logprobs=told, cumulative_logprob=-1.500002, score=-0.500001) is None


@pytest.mark.parametrize(
    ("changes", "field", "position"),
    [
        ({"tokens": [1, 5, 3]}, "tokens", 1),
        ({"tokens": [1, 2, 3, 4]}, "tokens", 3),
        ({"text": "abd"}, "text", None),
        ({"finish_reason": "stop"}, "finish_reason", None),
        ({"stop_reason": 3}, "stop_reason", None),
        ({"segments": [Segment("a", "b", [1])]}, "segments", None),
        ({"constraint": "complete"}, "constraint", None),
        ({"constraint_verified": ("not",)}, "constraint_verified", None),
        ({"error": ErrorInfo("model-error", "no")}, "error", None),
        ({"logprobs": [RESULT.logprobs[0], logprob(-0.5)]}, "logprobs", 2),
        ({"logprobs": [RESULT.logprobs[0], logprob(-0.5), logprob(-0.500003)]}, "logprobs", 2),
        ({"logprobs": [logprob(-0.5, (7, -0.5), (9, -0.7)), *RESULT.logprobs[1:]]}, "logprobs", 0),
        ({"logprobs": [logprob(-0.5, (7, -0.5)), *RESULT.logprobs[1:]]}, "logprobs", 0),
        ({"cumulative_logprob": -1.50001}, "cumulative_logprob", None),
        ({"score": None}, "score", None),
    ],
)
def test_what_a_request_is_given_does(changes, field, position):
    found = difference(**changes)
    assert (found.field, found.position) == (field, position)


def test_the_first_difference_is_told_be_it_a_missing_result():
    wrong = replace(RESULT, tokens=[9])
    keys = [("b", 0), ("a", 1), ("a", 0), ("c", 0)]
    alone = dict.fromkeys(keys, RESULT)
    here = alone | {("c", 0): wrong, ("a", 1): wrong, ("b", 0): RESULT}
    found = first_difference(["c", "b", "a"], alone, here)
    assert (found.id, found.index) == ("c", 0)
    found = first_difference(["b", "a", "c"], alone, here)
    assert (found.id, found.index) == ("a", 1)
    both = {("a", 0): RESULT, ("a", 1): RESULT}
    for alone, here in ((both, {("a", 0): RESULT}), ({("a", 0): RESULT}, both)):
        found = first_difference(["a"], alone, here)
        assert (found.id, found.index, found.field) == ("a", 1, "result")


SMALL = Needs(1, [(1, 40), (1, 7)])
needs = st.builds(
    lambda sizes: Needs(max(rows for rows, _ in sizes), sizes),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 300)), min_size=1, max_size=5),
)


@given(needs, st.integers(0, 9))
def test_all_settings_make_sense_and_have_room_for_each_request(needs, seed):
    for case in make_cases(needs, 80, seed):
        settings = case.settings
        check_settings(case.batch, settings)
        check_effects(to_builtins(settings), [settings])
        assert case.batch >= needs.num_slots
        if settings.kv_blocks is not None:
            assert settings.kv_blocks >= needs.num_blocks(settings.block_size)


def test_cases_follow_from_number_and_seed_and_try_everything():
    cases = make_cases(SMALL, 80, 3)
    assert make_cases(SMALL, 20, 3) == cases[:20]
    others = make_cases(SMALL, 80, 4)
    same = [one == other for one, other in zip(cases, others, strict=True)]
    assert all(same[0:60:2])  # by system
    assert sum(same[1::2]) < 3
    assert [case.number for case in cases] == [*range(1, 81)]
    cases = make_cases(SMALL, 64, 0)
    tried = {name: {getattr(case.settings, name) for case in cases} for name in NAMES}
    assert tried["policy"] == set(POLICIES)
    assert tried["batching"] == {"continuous", "static"}
    assert tried["prefill_order"] == {"decode-first", "prefill-first"}
    assert tried["capacity"] == {"on-demand", "watermark", "no-evict"}
    assert tried["prefix_cache"] == {None, True, False}
    assert tried["block_size"] >= {1, 2, 4, 16, 32}
    assert None in tried["kv_blocks"]
    assert SMALL.num_blocks(4) in tried["kv_blocks"]  # as few as there can be
    assert {1, 3, 16, None} <= tried["long_prefill_threshold"]
    assert {case.arrivals for case in cases} == {"given", "at-once", "shuffled", "scattered"}
    assert {case.is_streaming for case in cases} == {True, False}
    assert {case.batch for case in cases} >= {1, 2, 3, 8, 64}


NAMES = make_cases(SMALL, 1, 0)[0].settings.__struct_fields__


def test_requests_need_room_and_turns_keep_their_order():
    requests = [
        Request(id="a", prompt="12345", max_tokens=5),
        Request(id="b", prompt="1", max_tokens=3, num_beams=4),
        Request(id="c", prompt="1", max_tokens=9, cfg_scale=2.0, negative_prompt="123456"),
        Request(id="d", prompt="1234", max_tokens=6, session="s"),
        Request(id="e", prompt="12", max_tokens=3, session="s"),
    ]
    found = needs_of(requests, SimulatedModel())
    assert found == Needs(4, [(1, 10), (4, 4), (2, 15), (1, 10), (1, 15)])
    assert found.num_blocks(4) == 2 * 4
    assert found.num_blocks(1) == 30
    requests = [
        Request(id=str(place), prompt="x", session="s" if place % 3 == 0 else None)
        for place in range(12)
    ]
    orders = set()
    for case in make_cases(SMALL, 64, 0):
        ids = [request.id for request in arranged(case, requests, 0)]
        assert sorted(ids, key=int) == [str(place) for place in range(12)]
        assert [name for name in ids if int(name) % 3 == 0] == ["0", "3", "6", "9"]
        assert case.arrivals != "given" or arranged(case, requests, 0) == requests
        orders.add(tuple(ids))
    assert len(orders) > 10
