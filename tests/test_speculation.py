"""Drafts change no token: invariant 13, with all that a request can ask for, in every schedule."""

from itertools import count

import engine_runs
import numpy as np
import pytest
from control_requests import control_requests
from drafters import Oracle
from engine_runs import of_kind
from examples import examples, mostly_heavy
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from reference import english_requests
from test_scheduling_invariance import Case, alone, attentive, cases, engine_of, run

from batcher import BatchdecodeError, Engine, Request, SimulatedModel
from batcher.errors import ModelError
from batcher.events import AcceptEvent, AdmitEvent, DraftEvent, RollbackEvent, SpeculateEvent
from batcher.models.callables import CallableModel
from batcher.models.simulated import SimulatedDraft
from batcher.prompts import read_prompt
from batcher.scheduling.clock import WallClock
from batcher.settings import SchedulingSettings
from batcher.speculation.settings import Proposal, SpeculationSettings, proposal_of
from batcher.timing.profiles import step_time_of
from batcher.trace.timeline import Timeline


def plain(num_requests, num_prompt, max_tokens):
    return [
        Request(id=str(n), prompt=[n] * num_prompt, max_tokens=max_tokens, ignore_eos=True)
        for n in range(num_requests)
    ]


def outputs_of(case):
    found = {}
    for request in case.requests:
        found |= alone(SimulatedModel, request)
    return found


def oracle(case, expected, chance, seed):
    known = []
    for request in case.requests:
        prompt = read_prompt(request.prompt, "prompt", "", SimulatedModel()).tokens
        known += [(prompt, result) for (name, _), result in expected.items() if name == request.id]
    return Oracle(known, chance, seed)


@given(
    case=cases(st.one_of(english_requests(), control_requests())),
    draft=st.sampled_from([None, "ngram", "simulated:0.5", "simulated:0.9", "simulated"]),
    chance=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    num_tokens=st.sampled_from([1, 4, 9]),
    tree=st.sampled_from([None, "2x3", "3x4", "4x1"]),
    model=st.sampled_from([attentive, SimulatedModel]),
    seed=st.integers(0, 9),
    is_streaming=st.booleans(),
)
@settings(examples(100), derandomize=True)
def test_drafts_change_no_token(
    case, draft, chance, num_tokens, tree, model, seed, *, is_streaming
):
    """Be they of n-grams, of a model, or of who knows what follows and is wrong by a chance."""
    expected = outputs_of(case)
    drafts = oracle(case, expected, chance, seed)
    if draft is not None:
        drafts = SpeculationSettings(draft=draft, draft_tokens=num_tokens, draft_tree=tree)
    engine = engine_of(case, model(), is_streaming=is_streaming, speculation=drafts)
    assert run(engine) == expected


@pytest.mark.parametrize("min_tokens", [2, 4])
def test_a_stop_acts_from_min_tokens_on_within_the_drafts_of_a_step(min_tokens):
    free = Request(id="a", prompt="Once", max_tokens=30, ignore_eos=True)
    (whole,) = alone(SimulatedModel, free).values()
    words = [SimulatedModel().tokenizer.token_bytes[token].decode() for token in whole.tokens[:8]]
    request = replace(free, stop=words, min_tokens=min_tokens)
    case = Case([request], 1, SchedulingSettings(), None)
    expected = outputs_of(case)
    (stopped,) = expected.values()
    assert len(stopped.tokens) == min_tokens
    for seed in range(4):
        known = oracle(case, {("a", 0): whole}, 0.0, seed)
        assert run(engine_of(case, attentive(), speculation=known)) == expected


class Late(Oracle):
    """Proposes trees of pairs, of which the second is right, and the next pair behind it."""

    def _drafts(self, slot, num):
        row = self.rows[slot]
        follows = next(whole for whole in self._wholes if whole[: len(row)] == row)[len(row) :]
        pairs = [((token + 1) % 512, token) for token in follows[: num // 2]]
        tokens = [token for pair in pairs for token in pair]
        return proposal_of(tokens, [draft // 2 * 2 for draft in range(len(tokens))])


def late(requests, settings):
    """Return an engine for requests, whose drafts are all to be moved when they are accepted."""
    case = Case(requests, 2, settings, None)
    known = oracle(case, outputs_of(case), 0.0, 0).known
    return engine_of(case, attentive(), is_streaming=False, speculation=Late(known, 0.0, 0))


def test_what_was_accepted_is_found_in_the_blocks_of_a_row_that_ended_in_that_step():
    first = Request(id="a", prompt=[40] * 5, max_tokens=14, ignore_eos=True)
    ((_, whole),) = outputs_of(Case([first], 1, SchedulingSettings(), None)).items()
    follows = Request(
        id="b", prompt=[40] * 5 + whole.tokens + [7], max_tokens=9, ignore_eos=True, arrival_time=9
    )
    settings = SchedulingSettings(block_size=2, prefix_cache=True)
    for stop in whole.tokens[5:12]:
        ends = replace(first, stop_token=stop)
        engine = late([ends, follows], settings)
        done = engine_runs.drained(engine)
        expected = outputs_of(Case([ends, follows], 1, settings, None))
        assert {(r.id, r.index): r.tokens for r in done.results} == {
            name: result.tokens for name, result in expected.items()
        }
        assert sum(event.cached for event in of_kind(done.events, AdmitEvent)) > 8


@pytest.mark.parametrize("first_call", mostly_heavy([0, 3, 6], 3))
def test_a_model_that_fails_leaves_nobody_what_was_to_be_moved(first_call):
    first = Request(id="a", prompt=[40] * 5, max_tokens=24, ignore_eos=True)
    ((_, whole),) = outputs_of(Case([first], 1, SchedulingSettings(), None)).items()
    requests = [
        first,
        replace(first, id="b", prompt=[41] * 9, arrival_time=3),
        replace(first, id="c", prompt=[40] * 5 + whole.tokens, arrival_time=6),
        Request(id="d", prompt=[42] * 5, regex="a[bc]+(defghij|k)", max_tokens=24, arrival_time=2),
    ]
    settings = SchedulingSettings(
        prefill_order="prefill-first", block_size=2, max_batch_tokens=6, prefix_cache=True
    )
    expected = outputs_of(Case(requests, 2, settings, None))
    num_failed = 0
    for number in range(first_call, 40, 9):
        engine, calls = late(requests, settings), count()
        forward = engine._model.forward

        def failing(batch, forward=forward, calls=calls, number=number):
            if next(calls) == number:
                raise ModelError("out of memory")
            return forward(batch)

        engine._model.forward = failing
        for name, result in run(engine).items():
            num_failed += result.finish_reason == "error"
            assert result.finish_reason == "error" or result == expected[name]
    assert num_failed


def checked(engine, requests=()):
    events = engine_runs.traced(engine, requests)
    Timeline.from_events(events).check_integrity()
    return events


def test_the_trace_tells_the_way_through_each_tree():
    requests = [
        Request(id=str(n), prompt=[n] * 5, max_tokens=30, stop=[" the"], logprobs=n % 2 or None)
        for n in range(40, 50)
    ]
    engine = late(requests, SchedulingSettings())
    events = checked(engine)
    accepted = of_kind(events, AcceptEvent)
    assert accepted
    assert all(event.drafts == tuple(range(2, 2 * event.tokens + 1, 2)) for event in accepted)
    for event in of_kind(events, DraftEvent):
        assert event.parents == tuple(n // 2 * 2 for n in range(event.tokens))


class Recomputing(SimulatedModel):
    """A model that computes accepted drafts again, as one with recurrent layers does."""

    recomputes_drafts, verifies_trees = True, False


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"kv_blocks": 50},
        {"max_batch_tokens": 4, "block_size": 4, "long_prefill_threshold": 2},
        {"max_batch_tokens": 5, "block_size": 4, "prefill_order": "prefill-first"},
    ],
)
def test_the_trace_tells_which_drafts_are_computed_again(limits):
    speculation = SpeculationSettings(draft="simulated:0.8")
    limited = SchedulingSettings(**limits)
    engine = Engine(Recomputing(), 3, settings=limited, speculation=speculation)
    for number, request in enumerate(plain(5, 7, 20)):
        engine.add(replace(request, temperature=float(number % 2)))
    events = checked(engine)
    assert of_kind(events, AcceptEvent)


def test_a_row_holds_no_block_behind_what_it_was_given():
    limits = SchedulingSettings(block_size=2, prefix_cache=True)
    speculation = SpeculationSettings(draft="simulated:0.4", draft_tokens=9)
    engine = Engine(SimulatedModel(), 3, settings=limits, speculation=speculation)
    for request in plain(3, 5, 40):
        engine.add(request)
    while engine.has_work:
        engine.step()
        batch = engine.scheduler.batch
        for row in batch.holders:
            assert len(row.block_table) == -(-(batch.decode_step + row.offset) // 2)


def drained(speculation, *requests):
    engine = Engine(SimulatedModel(), 4, speculation=speculation, is_checked=True)
    done = engine_runs.drained(engine, requests)
    return done.results, done.events, engine.num_steps


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.3}])
def test_a_draft_that_is_its_target_is_always_right(fields):
    request = Request(prompt="Once", max_tokens=41, ignore_eos=True, **fields)
    _, events, num_steps = drained(SpeculationSettings(draft="simulated"), request)
    assert num_steps == 1 + 40 // 5
    assert sum(event.tokens for event in of_kind(events, AcceptEvent)) == 32
    assert not of_kind(events, RollbackEvent)


@pytest.mark.parametrize("draft", ["simulated:0.7", "ngram"])
def test_a_tree_of_one_branch_is_a_line(draft):
    requests, line = plain(6, 5, 40), SpeculationSettings(draft=draft, draft_tokens=3)
    tree = SpeculationSettings(draft=draft, draft_tree="1x3")
    assert drained(line, *requests) == drained(tree, *requests)


def test_a_request_says_how_many_drafts_it_is_given_and_no_way_through_them_is_too_long():
    """A row of 9 tokens has at most 7 more behind the first of a step that is verified."""
    asked = {
        "all": {},
        "two": {"draft_tokens": 2},
        "four": {"draft_tokens": 4},
        "more": {"draft_tokens": 60},
        "zero": {"draft_tokens": 0},
        "none": {"speculate": False},
    }
    requests = [
        Request(id=name, prompt="a", max_tokens=9, ignore_eos=True, **fields)
        for name, fields in asked.items()
    ]
    speculation = SpeculationSettings(draft="simulated:0", draft_tree="3x4")
    _, events, _ = drained(speculation, *requests)
    found = {}
    for event in of_kind(events, DraftEvent):
        found.setdefault(event.id, []).append(event.tokens)
        assert event.parents == (0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9)[: event.tokens]
    assert found == {
        "all": [12] * 4 + [9, 6, 3],
        "two": [2] * 7,
        "four": [4] * 6 + [3],
        "more": [12] * 4 + [9, 6, 3],
    }
    line = SpeculationSettings(draft="simulated:0", draft_tokens=5)
    drafts = of_kind(drained(line, *requests)[1], DraftEvent)
    assert [event.tokens for event in drafts if event.id == "all"] == [5, 5, 5, 4, 3, 2, 1]


def test_branches_that_a_constraint_refuses_are_cut():
    engine = Engine(SimulatedModel(), 1, speculation=SpeculationSettings(draft="ngram"))
    engine.add(Request(prompt="a", max_tokens=30, regex="[a-d]([ab]c|[cd]e)*x"))
    engine.step()
    a, c, d, e, f = (2 + byte for byte in b"acdef")
    rows = engine._speculator
    proposal = Proposal([a, d, f, c, e, e, a, c], (0, 0, 0, 1, 2, 1, 3, 4))
    assert rows.cut({0: proposal})[0] == Proposal([a, d, c, e, c], (0, 0, 1, 2, 3))


def test_drafts_where_there_cannot_be_any_are_refused(monkeypatch):
    def refused(match, model=None, **fields):
        with pytest.raises(BatchdecodeError, match=match):
            Engine(model or SimulatedModel(), 1, speculation=SpeculationSettings(**fields))

    fives = CallableModel(lambda prefixes: [5] * len(prefixes), name="fives")
    refused("drafts need a model that verifies them", model=fives, draft="ngram")
    refused("--draft-tree 3: expected WxD", draft="ngram", draft_tree="3")
    refused("does not work with --draft-tree", draft="ngram", draft_tree="2x2", draft_tokens="auto")
    monkeypatch.setattr(SimulatedDraft, "verifies_trees", False)
    refused("simulated:1 cannot", draft="simulated", draft_tree="2x2")
    monkeypatch.setattr(SimulatedModel, "verifies_trees", False)
    refused("simulated cannot", draft="ngram", draft_tree="2x2")


class Failing:
    """Proposes nothing good, and fails after a while."""

    def __init__(self, method, num_calls):
        self._method, self._num_left = method, num_calls

    def _call(self, method):
        if method == self._method:
            self._num_left -= 1
            if self._num_left < 0:
                raise MemoryError("no room for drafts")

    def open(self, slot, tokens):
        self._call("open")

    def extend(self, given):
        self._call("extend")

    def propose(self, num_wanted):
        self._call("propose")
        return {slot: Proposal([40, 41, 42], (0, 0, 1)) for slot in num_wanted}

    def close(self, slot, *, has_ended):
        self._call("close")


@pytest.mark.parametrize("method", ["open", "extend", "propose", "close"])
def test_a_draft_that_fails_fails_no_request(method):
    requests = [Request(id=str(n), prompt=[n], max_tokens=9 + n, ignore_eos=True) for n in range(9)]
    results, events, _ = drained(Failing(method, 3), *requests)
    assert {result.finish_reason for result in results} == {"length"}
    told = of_kind(events, SpeculateEvent)
    assert {(event.tokens, event.reason) for event in told} <= {(0, "failure")}
    assert told or method == "close"


def test_a_draft_that_fails_is_told_of_rows_that_run():
    settings = SchedulingSettings(kv_blocks=12, block_size=2, prefix_cache=False)
    num_told = 0
    for num_calls in range(0, 12, 2):
        engine = Engine(
            SimulatedModel(), 4, settings=settings, speculation=Failing("propose", num_calls)
        )
        num_told += len(of_kind(checked(engine, plain(6, 3, 12)), SpeculateEvent))
    assert num_told > 6


@pytest.mark.parametrize(
    "nonsense",
    [
        {99: Proposal([1])},
        {0: Proposal(["a"])},
        {0: None},
        5,
        {0: Proposal([40, -1, 10**9])},
        {0: Proposal([40, 41, 42], (0, 1))},
        {0: Proposal([40, 41, 42], (0, 2, 1))},
        {0: Proposal([40, 41, 42], (0, -1, 1))},
        {0: Proposal([40, 40, 40], (0, 0, 1))},
        {0: Proposal(np.array([40, 41]))},
        {0: Proposal([40.5, 41])},
        {0: Proposal((40, 41))},
        "a tree for a model that verifies none",
    ],
)
def test_a_drafter_that_proposes_nonsense_fails_no_request(monkeypatch, nonsense):
    drafter = Failing("", 0)
    if isinstance(nonsense, str):
        monkeypatch.setattr(SimulatedModel, "verifies_trees", False)
    else:
        drafter.propose = lambda _: nonsense
    results, events, _ = drained(drafter, Request(prompt="a", max_tokens=9, ignore_eos=True))
    assert [len(result.tokens) for result in results] == [9]
    told = [event.reason for event in of_kind(events, SpeculateEvent)]
    assert told == ["failure"] or not isinstance(nonsense, str)


def test_a_model_drafts_for_an_empty_prompt_in_a_slot_that_was_used():
    before = Request(id="long", prompt=[40] * 30, max_tokens=2, ignore_eos=True)
    empty = Request(id="empty", prompt="", max_tokens=21, ignore_eos=True)
    engine = Engine(SimulatedModel(), 1, speculation=SpeculationSettings(draft="simulated"))
    events = engine_runs.drained(engine, [before, empty]).events
    assert not of_kind(events, RollbackEvent)
    assert sum(event.tokens for event in of_kind(events, AcceptEvent)) == 16


def test_auto_gives_no_drafts_that_are_never_right_and_learns_on_the_wall():
    engine = Engine(
        SimulatedModel(),
        4,
        step_time=step_time_of("rtx4090_llama3.1-8b"),
        speculation=SpeculationSettings(draft="simulated:0", draft_tokens="auto"),
    )
    events = engine_runs.drained(engine, plain(4, 9, 200)).events
    assert (0, "cost") in {(e.tokens, e.reason) for e in of_kind(events, SpeculateEvent)}
    assert sum(event.tokens for event in of_kind(events, DraftEvent)) < 800 / 2  # of a token each
    seconds = iter(range(10**6))
    clock = WallClock(lambda: next(seconds) / 8)
    speculation = SpeculationSettings(draft="simulated", draft_tokens="auto")
    engine = Engine(SimulatedModel(), 1, clock=clock, speculation=speculation)
    engine_runs.drained(engine, [Request(prompt="Once", max_tokens=200, ignore_eos=True)])
    assert engine.num_steps < 100
