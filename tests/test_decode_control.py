"""What a request may ask for beside greedy tokens, as the engine serves it and events tell it."""

import pytest
from control_requests import SCHEMA, control_requests
from engine_runs import drained, fields, of_kind, run
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from batcher import Request, SimulatedModel
from batcher.engine import Engine
from batcher.events import FinishEvent, JumpEvent, StepsEvent
from batcher.request import Transition
from batcher.settings import SchedulingSettings


def test_forced_tokens_count_and_some_grammars_go_unchecked():
    done = run([fields(json_schema=SCHEMA, max_tokens=100)])
    [result] = done.results
    [*_, finish] = of_kind(done.events, FinishEvent)
    num_jumped = sum(jump.tokens for jump in of_kind(done.events, JumpEvent))
    assert num_jumped > 10
    assert result.steps.finished is not None
    assert len(result.tokens) == result.steps.finished + 1 + num_jumped == finish.tokens
    assert (result.finish_reason, result.constraint) == ("stop", "complete")
    grammar = {"lark": 'start: "yes" | "no"', "max_tokens": 8}
    asked = [fields(id="lark", **grammar), fields(id="cut", **grammar | {"max_tokens": 1})]
    results = {result.id: result for result in run([*asked, fields(id="re", regex="yes")]).results}
    assert (results["lark"].constraint, results["lark"].constraint_check) == ("complete", "none")
    assert (results["cut"].constraint, results["cut"].constraint_check) == ("incomplete", None)
    assert (results["re"].constraint, results["re"].constraint_check) == ("complete", None)


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9, 10, 30])
def test_max_tokens_cuts_a_constrained_output_and_says_so(max_tokens):
    [result] = run([fields(json_schema=SCHEMA, max_tokens=max_tokens)]).results
    assert len(result.tokens) == max_tokens
    assert (result.finish_reason, result.constraint) == ("length", "incomplete")


def test_a_constraint_ends_where_its_grammar_does_and_is_compiled_once():
    [result] = run([fields(regex="", min_tokens=3)]).results
    assert (result.text, result.tokens, result.finish_reason) == ("", [0], "stop")
    assert result.constraint == "complete"
    for stop in ("indeed", "s", "now"):
        request = fields(choice=["yes indeed now"], stop=stop, max_tokens=20)
        [result] = run([request]).results
        assert (result.finish_reason, result.stop_reason) == ("stop", stop)
        assert result.text == "yes indeed now".partition(stop)[0]
        assert len(result.tokens) == len(result.text) + len(stop)
    for num_requests in (1, 3):
        engine = Engine(SimulatedModel(), 2)
        drained(engine, [fields(id=str(n), regex="[ab]+c") for n in range(num_requests)])
        assert engine.constraint_counts == (1, num_requests - 1)


@pytest.mark.parametrize("stop", [{"stop_token": 0}, {"stop_sequence": [103, 0]}, {"stop": "e"}])
@pytest.mark.parametrize("states", [None, {"x": [Transition([103, 0], None)]}])
def test_where_only_the_end_is_left_stops_do_not_act_before_min_tokens(stop, states):
    """103 is the e of the output: what the stop would take away is kept."""
    [result] = run(
        [fields(choice=["e"], min_tokens=9, max_tokens=12, states=states, **stop)]
    ).results
    assert (result.tokens, result.text, result.stop_reason) == ([103, 0], "e", None)
    assert (result.finish_reason, result.constraint) == ("stop", "complete")
    if states is not None:
        assert result.segments is not None
        assert [segment.text for segment in result.segments] == ["e"]


def test_stops_act_only_from_min_tokens_on():
    [free] = run([fields(max_tokens=12, ignore_eos=True)]).results
    stop = free.tokens[2]
    [stopped] = run([fields(max_tokens=12, stop_token=stop)]).results
    assert len(stopped.tokens) == 3
    [longer] = run([fields(max_tokens=12, stop_token=stop, min_tokens=6)]).results
    assert len(longer.tokens) >= 6
    assert stop not in longer.tokens[:5]
    [free] = run([fields(max_tokens=12, ignore_eos=True)]).results
    for number in range(1, 13):
        [held] = run([fields(max_tokens=12, ignore_eos=True, stop=" ", min_tokens=number)]).results
        assert held.tokens == free.tokens[: len(held.tokens)]
        assert len(held.tokens) >= number


def test_samples_differ_by_seed_and_id_and_logprobs_sum_up():
    tokens = [
        run([fields(temperature=1.0, **more)]).results[0].tokens
        for more in ({}, {"seed": 1}, {"id": "b"})
    ]
    assert len({tuple(own) for own in tokens}) == 3
    [result] = run([fields(logprobs=3)]).results
    assert result.logprobs is not None
    assert [entry.token for entry in result.logprobs] == result.tokens
    assert all(entry.top[0].token == entry.token for entry in result.logprobs)
    assert all(len(entry.top) == 3 for entry in result.logprobs)
    assert result.cumulative_logprob == pytest.approx(sum(e.logprob for e in result.logprobs))


def test_a_healed_prompt_is_written_anew_and_stops_do_not_act_in_it():
    prompt = "Count the bo"
    [result] = run([fields(prompt=prompt, heal=True)]).results
    tokenizer = SimulatedModel().tokenizer
    written = b"".join(tokenizer.token_bytes[token] for token in result.tokens).decode()
    assert written.startswith((" bo", "bo"))
    forced = written[: len(written) - len(result.text)]
    assert prompt.endswith(forced)
    assert result.usage.prompt_tokens == len(tokenizer.encode(prompt))
    [free] = run([fields(prompt="Count the bo", heal=True, max_tokens=6)]).results
    for stop in ("bo", "o", " b"):
        [result] = run([fields(prompt="Count the bo", heal=True, max_tokens=6, stop=stop)]).results
        where = free.text.find(stop)
        assert result.text == (free.text if where < 0 else free.text[:where])


@given(st.lists(control_requests(), min_size=1, max_size=5), st.integers(4, 6))
@examples(60)
def test_streamed_text_and_tokens_are_those_of_the_results(requests, batch_size):
    requests = [replace(request, id=f"r{place}") for place, request in enumerate(requests)]
    done = run(requests, batch_size)
    by_id = {request.id: request for request in requests}
    for result in done.results:
        request = by_id[result.id]
        if request.num_beams > 1 or request.best_of is not None or request.output_limit == 0:
            continue
        told = [e for e in done.tokens if (e.id, e.index) == (result.id, result.index)]
        assert [token for event in told for token in event.tokens] == result.tokens
        if result.segments is None:
            text = result.text.removeprefix(str(request.prompt)) if request.echo else result.text
            assert "".join(event.text for event in told) == text
        else:
            streamed = "".join(event.text for event in told)
            assert streamed == "".join(segment.text for segment in result.segments)


def test_what_is_too_much_for_the_grammar_byte_by_byte_is_legal_all_the_same():
    schema = {"type": "string", "maxLength": 300, "pattern": r"^(?:\S+\s+){0,29}\S+$"}
    requests = [
        fields(id=str(n), json_schema=schema, max_tokens=40, temperature=1.0) for n in range(6)
    ]
    results = run(requests).results
    assert [result.error for result in results] == [None] * 6
    assert {result.constraint for result in results} <= {"complete", "incomplete"}


def test_a_row_that_jumps_and_gets_no_budget_for_a_step_keeps_its_tokens():
    words = "the brave fox found a round road"
    jumping = {"temperature": 1.0, "max_tokens": 31}
    requests = [
        Request(
            id="0",
            prompt=" ".join(["go"] * 5),
            regex=f"(x|y|z){words[:17]}(a|b|c){words[:17]}.*",
            **jumping,
        ),
        Request(
            id="1", prompt="go", regex=f"(x|y|z){words[:9]}(a|b|c){words[:9]}.*", seed=1, **jumping
        ),
        Request(id="2", prompt=" ".join(["go"] * 12), max_tokens=21, ignore_eos=True),
        Request(id="3", prompt=" ".join(["go"] * 4), max_tokens=5, ignore_eos=True),
    ]

    def tokens_of(some, batch_size, **settings):
        engine = Engine(SimulatedModel(), batch_size, settings=SchedulingSettings(**settings))
        for request in some:
            engine.add(request)
        return {result.id: result.tokens for result in drained(engine).results}

    alone = {}
    for request in requests:
        alone |= tokens_of([request], 1)
    for budget in range(3, 8):
        assert tokens_of(requests, 3, max_batch_tokens=budget) == alone, budget


def test_an_empty_prompt_counts_as_one_row_of_its_step():
    engine = Engine(SimulatedModel(), 2, is_measured=True)
    engine.add(Request(prompt="", max_tokens=2, ignore_eos=True))
    engine.add(Request(prompt="x y", max_tokens=2, ignore_eos=True))
    events = [*drained(engine).events, *engine.take_step_events()]
    steps = [event for event in events if isinstance(event, StepsEvent)]
    assert [rows for event in steps for rows in event.rows] == [2, 2]
