"""What a request may ask for beside greedy tokens, as the engine serves it and events tell it."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from control_requests import SCHEMA, STATES, control_requests
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger import LedgerModel
from msgspec.structs import replace

from batcher import ModelOutput, Request, Result, SimulatedModel
from batcher.decoding.constraints.rows import GrammarRow
from batcher.engine import Engine
from batcher.errors import RequestError
from batcher.events import (
    AdmitEvent,
    DropEvent,
    Event,
    FinishEvent,
    ForkEvent,
    JumpEvent,
    TokenEvent,
)
from batcher.models.base import Batch
from batcher.models.callable import CallableModel
from batcher.models.simulated import SimulatedSettings
from batcher.rows.row import Row
from batcher.validation import CONSTRAINT_FIELDS


class Run(NamedTuple):
    results: list[Result]
    events: list[Event]
    tokens: list[TokenEvent]


def run(requests: Sequence[Request], batch_size: int = 4, *, model: Any = None) -> Run:
    engine = Engine(model or SimulatedModel(), batch_size, is_streaming=True)
    for request in requests:
        engine.add(request)
    done = Run([], [], [])
    while engine.has_work:
        outcome = engine.step()
        done.results.extend(outcome.results)
        done.events.extend(outcome.events)
        done.tokens.extend(outcome.tokens)
    return done


def fields(**more: Any) -> Request:
    return Request(**{"id": "a", "prompt": "Count the boats", "max_tokens": 8, **more})


def of_kind(events: list[Event], kind: type) -> list[Any]:
    return [event for event in events if type(event) is kind]


def test_a_negative_prompt_has_a_slot_of_its_own_beside_its_sample() -> None:
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


def test_a_scale_of_one_without_a_partner_and_of_zero_are_the_two_ends() -> None:
    """At 0 the negative prompt alone speaks: its tokens are those of that prompt by itself."""
    [only_negative] = run([fields(cfg_scale=0.0, negative_prompt="The fox")]).results
    [by_itself] = run([fields(prompt="The fox")]).results
    assert only_negative.tokens == by_itself.tokens


def test_a_unit_that_finds_no_room_waits_and_those_behind_it_too() -> None:
    requests = [
        fields(id="short", max_tokens=2, ignore_eos=True),
        fields(id="beams", num_beams=3, max_tokens=2),
        fields(id="late", max_tokens=1),
    ]
    admits = of_kind(run(requests, 3).events, AdmitEvent)
    assert [(admit.id, admit.step) for admit in admits] == [
        ("short", 0),
        ("beams", 2),
        ("beams", 2),
        ("beams", 2),
        ("late", 4),
    ]


def test_beams_fork_from_the_first_and_their_events_name_parents() -> None:
    done = run([fields(num_beams=3, n=2)], 4)
    forks = of_kind(done.events, ForkEvent)
    assert [(fork.step, fork.slot, fork.parent) for fork in forks[:2]] == [
        (0, 1, 0),
        (0, 2, 0),
    ]
    assert all(fork.parent != fork.index for fork in forks)
    first, second = done.results
    assert (first.index, second.index) == (0, 1)
    assert first.score is not None
    assert second.score is not None
    assert first.score >= second.score
    reasons = [(finish.index, finish.reason) for finish in of_kind(done.events, FinishEvent)]
    assert reasons == [
        (0, first.finish_reason),
        (1, second.finish_reason),
        (2, "unused"),
    ]


def test_one_beam_is_greedy() -> None:
    assert run([fields(num_beams=1)]).results == run([fields()]).results


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"num_beams": 5}, "num_beams"),
        ({"cfg_scale": 2.0, "negative_prompt": ""}, "cfg_scale"),
    ],
)
def test_what_needs_more_slots_than_there_are_is_refused(more: dict[str, Any], field: str) -> None:
    engine = Engine(SimulatedModel(), 1)
    with pytest.raises(RequestError, match="slots") as caught:
        engine.add(fields(**more))
    [problem] = caught.value.problems
    assert (problem.code, problem.field) == ("too-few-slots", field)


def test_forced_tokens_come_in_one_step_and_count() -> None:
    done = run([fields(json_schema=SCHEMA, max_tokens=100)])
    [result] = done.results
    [*_, finish] = of_kind(done.events, FinishEvent)
    num_jumped = sum(jump.tokens for jump in of_kind(done.events, JumpEvent))
    assert num_jumped > 10
    assert result.steps.finished is not None
    assert len(result.tokens) == result.steps.finished + 1 + num_jumped == finish.tokens
    assert (result.finish_reason, result.constraint) == ("stop", "complete")


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9, 10, 30])
def test_max_tokens_cuts_a_constrained_output_and_says_so(max_tokens: int) -> None:
    [result] = run([fields(json_schema=SCHEMA, max_tokens=max_tokens)]).results
    assert len(result.tokens) == max_tokens
    assert (result.finish_reason, result.constraint) == ("length", "incomplete")


def test_a_stop_among_forced_tokens_ends_the_row_there() -> None:
    for stop in ("indeed", "s", "now"):
        request = fields(choice=["yes indeed now"], stop=stop, max_tokens=20)
        [result] = run([request]).results
        assert (result.finish_reason, result.stop_reason) == ("stop", stop)
        assert result.text == "yes indeed now".partition(stop)[0]
        assert len(result.tokens) == len(result.text) + len(stop)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_penalties_count_forced_tokens_as_well(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    regex = "(the door ){3}(the door|a river|sea)"
    request = fields(regex=regex, max_tokens=60, frequency_penalty=2.0, temperature=temperature)
    jumping = run([request])
    assert of_kind(jumping.events, JumpEvent)
    monkeypatch.setattr(Row, "may_jump", False)
    walking = run([request])
    assert not of_kind(walking.events, JumpEvent)
    assert jumping.results[0].tokens == walking.results[0].tokens


def test_a_grammar_that_allows_nothing_but_the_end_ends() -> None:
    [result] = run([fields(regex="", min_tokens=3)]).results
    assert (result.text, result.tokens, result.finish_reason) == ("", [0], "stop")
    assert result.constraint == "complete"


def test_tokens_before_min_tokens_do_not_stop() -> None:
    [free] = run([fields(max_tokens=12, ignore_eos=True)]).results
    stop = free.tokens[2]
    [stopped] = run([fields(max_tokens=12, stop_token=stop)]).results
    assert len(stopped.tokens) == 3
    [longer] = run([fields(max_tokens=12, stop_token=stop, min_tokens=6)]).results
    assert len(longer.tokens) >= 6
    assert stop not in longer.tokens[:5]


def test_a_text_stop_counts_only_from_min_tokens_on() -> None:
    [free] = run([fields(max_tokens=12, ignore_eos=True)]).results
    for number in range(1, 13):
        [held] = run([fields(max_tokens=12, ignore_eos=True, stop=" ", min_tokens=number)]).results
        assert held.tokens == free.tokens[: len(held.tokens)]
        assert len(held.tokens) >= number


def test_the_best_samples_are_those_with_the_highest_sum() -> None:
    everything = run([fields(temperature=1.0, n=5, logprobs=0)]).results
    best = run([fields(temperature=1.0, n=2, best_of=5)]).results
    sums = {result.index: result.cumulative_logprob for result in everything}
    ranked = sorted(sums, key=lambda index: -(sums[index] or 0.0))
    assert [result.index for result in best] == ranked[:2]
    assert best[0].tokens == next(r.tokens for r in everything if r.index == ranked[0])


def test_a_sample_is_the_same_whatever_n_is() -> None:
    few = run([fields(temperature=1.0, n=2)]).results
    many = run([fields(temperature=1.0, n=6)]).results
    assert [r.tokens for r in few] == [r.tokens for r in many if r.index < 2]
    assert len({tuple(result.tokens) for result in many}) > 1


def test_another_seed_and_another_id_give_other_samples() -> None:
    tokens = [
        run([fields(temperature=1.0, **more)]).results[0].tokens
        for more in ({}, {"seed": 1}, {"id": "b"})
    ]
    assert len({tuple(own) for own in tokens}) == 3


def test_logprobs_sum_up_and_the_greedy_token_is_the_likeliest() -> None:
    [result] = run([fields(logprobs=3)]).results
    assert result.logprobs is not None
    assert [entry.token for entry in result.logprobs] == result.tokens
    assert all(entry.top[0].token == entry.token for entry in result.logprobs)
    assert all(len(entry.top) == 3 for entry in result.logprobs)
    assert result.cumulative_logprob == pytest.approx(sum(e.logprob for e in result.logprobs))


def test_echo_puts_the_prompt_before_the_text() -> None:
    [plain] = run([fields()]).results
    [echoed] = run([fields(echo=True)]).results
    assert echoed.text == "Count the boats" + plain.text
    assert echoed.tokens == plain.tokens


def test_a_healed_prompt_is_written_anew_and_only_what_follows_is_text() -> None:
    prompt = "Count the bo"
    [result] = run([fields(prompt=prompt, heal=True)]).results
    tokenizer = SimulatedModel().tokenizer
    written = b"".join(tokenizer.token_bytes[token] for token in result.tokens).decode()
    assert written.startswith((" bo", "bo"))
    forced = written[: len(written) - len(result.text)]
    assert prompt.endswith(forced)
    assert result.usage.prompt_tokens == len(tokenizer.encode(prompt))


def test_stops_act_after_a_healed_prompt() -> None:
    prompt = "Count the bo"
    [free] = run([fields(prompt=prompt, heal=True, max_tokens=20)]).results
    stop = free.text[4:6]
    [stopped] = run([fields(prompt=prompt, heal=True, max_tokens=20, stop=stop)]).results
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.text == free.text[: free.text.index(stop)]


def test_stops_do_not_act_in_the_end_of_the_prompt_that_is_healed() -> None:
    [free] = run([fields(prompt="Count the bo", heal=True, max_tokens=6)]).results
    for stop in ("bo", "o", " b"):
        [result] = run([fields(prompt="Count the bo", heal=True, max_tokens=6, stop=stop)]).results
        where = free.text.find(stop)
        assert result.text == (free.text if where < 0 else free.text[:where])


@given(st.lists(control_requests(), min_size=1, max_size=5), st.integers(4, 6))
@settings(max_examples=60, deadline=None)
def test_streamed_text_and_tokens_are_those_of_the_results(
    requests: list[Request], batch_size: int
) -> None:
    requests = [replace(request, id=f"r{place}") for place, request in enumerate(requests)]
    done = run(requests, batch_size)
    by_id = {request.id: request for request in requests}
    for result in done.results:
        request = by_id[result.id]
        if request.num_beams > 1 or request.best_of is not None or request.max_tokens == 0:
            continue
        told = [e for e in done.tokens if (e.id, e.index) == (result.id, result.index)]
        assert [token for event in told for token in event.tokens] == result.tokens
        if result.segments is None:
            text = result.text.removeprefix(str(request.prompt)) if request.echo else result.text
            assert "".join(event.text for event in told) == text
        else:
            streamed = "".join(event.text for event in told)
            assert streamed == "".join(segment.text for segment in result.segments)


class Faulty(SimulatedModel):
    """A model whose logits in some slot are of no use in its third call."""

    def __init__(self, fault: float, slot: int) -> None:
        super().__init__(SimulatedSettings())
        self._fault, self._slot, self._num_calls = fault, slot, 0

    def forward(self, batch: Batch) -> ModelOutput:
        output = super().forward(batch)
        self._num_calls += 1
        if self._num_calls == 3 and output.logits is not None:
            output.logits[batch.logit_slots.tolist().index(self._slot)] = self._fault
        return output


@pytest.mark.parametrize("fault", [np.nan, -np.inf, np.inf])
def test_logits_of_no_use_fail_their_request_alone_with_the_step(fault: float) -> None:
    requests = [fields(id=name, temperature=1.0, ignore_eos=True) for name in "abc"]
    good = {result.id: result for result in run(requests).results}
    results = {result.id: result for result in run(requests, model=Faulty(fault, 1)).results}
    assert results["a"] == good["a"]
    assert results["c"] == good["c"]
    error = results["b"].error
    assert error is not None
    assert (error.code, error.message.partition(":")[0]) == ("model-error", "step 2")
    assert results["b"].tokens == good["b"].tokens[:2]


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_a_failed_companion_fails_its_leader(slot: int) -> None:
    done = run([fields(num_beams=3, n=2), fields(id="b")], model=Faulty(np.nan, slot))
    beams = [result for result in done.results if result.id == "a"]
    assert [result.finish_reason for result in beams] == ["error", "error"]
    errors = [result.error for result in beams]
    assert [error and error.code for error in errors] == ["model-error", "model-error"]
    [partner] = run(
        [fields(cfg_scale=2.0, negative_prompt="x")], model=Faulty(np.nan, slot % 2)
    ).results
    assert partner.finish_reason == "error"


def test_a_row_without_a_token_left_fails_alone() -> None:
    """Even if it is the only one of its settings."""
    lost = fields(id="lost", regex="abc", allowed_token_ids=[5], repetition_penalty=1.2)
    results = {result.id: result for result in run([lost, fields(id="ok")]).results}
    assert results["lost"].error is not None
    assert results["lost"].error.code == "constraint-error"
    assert results["ok"].tokens == run([fields(id="ok")]).results[0].tokens


def test_a_beam_at_a_dead_end_is_no_failure_of_the_others() -> None:
    [result] = run([fields(num_beams=2, regex="abc|xyz", bad_words=["bc"], max_tokens=9)]).results
    assert (result.text, result.finish_reason) == ("xyz", "stop")


@pytest.mark.parametrize("stop", [{"stop": "fg"}, {"stop_token": 105}])
@pytest.mark.parametrize("min_tokens", [0, 1, 2, 4, 6])
def test_stops_that_forced_tokens_complete_act(stop: dict[str, Any], min_tokens: int) -> None:
    forced = {"regex": "abcdefghij", "min_tokens": min_tokens, "max_tokens": 20, **stop}
    [jumped] = run([fields(**forced)]).results
    [walked] = run([fields(**forced, logprobs=0)]).results
    assert jumped.tokens == walked.tokens
    assert jumped.stop_reason == walked.stop_reason is not None


def test_as_many_best_samples_as_there_are_come_best_first_in_any_batch() -> None:
    several = fields(temperature=1.0, n=4, best_of=4, max_tokens=50)
    orders = [
        [
            result.index
            for result in run([several, fields(id="b")], size).results
            if result.id == "a"
        ]
        for size in (1, 2, 4, 8)
    ]
    assert orders == [orders[0]] * 4
    sums = [result.cumulative_logprob or 0.0 for result in run([several]).results]
    assert sums == sorted(sums, reverse=True)


class Interrupted(SimulatedModel):
    """A model that fails all rows of its first call."""

    def forward(self, batch: Batch) -> ModelOutput:
        return replace_output(super().forward(batch), dict.fromkeys(batch.slots.tolist(), "no"))


def replace_output(output: ModelOutput, failed: dict[int, str]) -> ModelOutput:
    return ModelOutput(output.tokens, failed, output.logits)


def test_tokens_forced_before_a_failure_are_streamed() -> None:
    done = run([fields(regex="abcdef[0-9]")], model=Interrupted())
    [result] = done.results
    assert (result.text, result.finish_reason) == ("abcdef", "error")
    assert "".join(event.text for event in done.tokens) == "abcdef"
    assert [token for event in done.tokens for token in event.tokens] == result.tokens


def test_beams_that_do_not_exist_are_errors() -> None:
    [only, missing] = run([fields(choice=["yes"], num_beams=3, n=2)]).results
    assert (only.text, only.finish_reason, only.constraint) == (
        "yes",
        "stop",
        "complete",
    )
    assert missing.error is not None
    assert (missing.error.code, missing.tokens) == ("too-few-outputs", [])


def test_beams_end_where_a_constraint_leaves_only_the_end() -> None:
    results = run([fields(regex="[0-9]{3}", num_beams=2, n=2, min_tokens=6)]).results
    ends = {(result.finish_reason, result.constraint, len(result.tokens)) for result in results}
    assert ends == {("stop", "complete", 4)}


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_a_text_of_tokens_that_the_model_does_not_know_is_refused(field: str) -> None:
    class Small(CallableModel):
        def __init__(self) -> None:
            super().__init__(lambda prefixes: [[0.0] * 20 for _ in prefixes], "small")
            self.vocab_size, self.gives = 20, "logits"

    request = {"prompt": [1], "cfg_scale": 2.0, field: "ab"}
    with pytest.raises(RequestError, match="token 98") as caught:
        Engine(Small(), 2).add(Request(**request))
    assert caught.value.problems[0].field == field


def test_an_output_that_breaks_its_constraint_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However it came about: here the mask lets everything pass."""
    monkeypatch.setattr(GrammarRow, "packed_mask", lambda _: b"\xff" * 64)
    monkeypatch.setattr(GrammarRow, "forced_token", lambda _: None)
    monkeypatch.setattr(GrammarRow, "advance", lambda _, token: None)
    [result] = run([fields(regex="[0-9]+")]).results
    assert result.error is not None
    assert result.error.code == "constraint-error"
    assert "byte 0" in result.error.message
    assert result.finish_reason == "error"


class Breaking(SimulatedModel):
    """A model that fails one slot in its third call, in which it gives every row an EOS."""

    def __init__(self, slot: int = 0) -> None:
        super().__init__()
        self._slot, self._num_calls = slot, 0

    def forward(self, batch: Batch) -> ModelOutput:
        output = super().forward(batch)
        self._num_calls += 1
        if self._num_calls != 3:
            return output
        output.tokens[:] = self.eos_token_id
        return ModelOutput(output.tokens, {self._slot: "no more"}, output.logits)


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize(
    "more", [{"num_beams": 2, "n": 2}, {"cfg_scale": 2.0, "negative_prompt": "x"}]
)
def test_what_a_model_fails_in_a_companion_fails_its_leader(
    more: dict[str, Any], slot: int
) -> None:
    *results, beside = run([fields(**more), fields(id="b")], 3, model=Breaking(slot)).results
    errors = [result.error and result.error.message for result in results]
    assert errors == ["step 2: no more"] * len(results)
    assert (len(results), beside.finish_reason) == (more.get("n", 1), "stop")


def test_of_a_failed_output_no_constraint_is_told() -> None:
    [failed] = run([fields(regex="[a-z ]*")], model=Breaking()).results
    assert (failed.finish_reason, failed.constraint) == ("error", None)


@pytest.mark.parametrize("more", [{}, {"regex": "[a-z ]*"}, {"temperature": 1.0}])
def test_a_failed_row_is_told_no_token_for_the_step_that_failed(
    more: dict[str, Any],
) -> None:
    done = run([fields(**more), fields(id="b")], model=Breaking())
    told = [(event.step, event.tokens) for event in done.tokens if event.id == "a" and event.tokens]
    assert told == [(step, [token]) for step, token in enumerate(done.results[0].tokens)]
    assert len(told) == 2


@pytest.mark.parametrize(
    "more", [{"regex": "the door(way)?"}, {"prompt": "Count the bo", "heal": True}]
)
def test_tokens_that_are_forced_from_the_outset_are_told_with_the_first(
    more: dict[str, Any],
) -> None:
    done = run([fields(**more)])
    [result] = done.results
    assert [token for told in done.tokens for token in told.tokens] == result.tokens
    assert "".join(told.text for told in done.tokens) == result.text


def test_a_row_that_failed_has_not_stopped_whatever_stands_at_its_slot() -> None:
    failed, stopped = run([fields(), fields(id="b")], model=Breaking()).results
    assert (failed.finish_reason, failed.stop_reason, len(failed.tokens)) == (
        "error",
        None,
        2,
    )
    assert failed.error is not None
    assert failed.error.message == "step 2: no more"
    assert (stopped.finish_reason, stopped.tokens[2:]) == ("stop", [0])


def test_a_stop_in_the_last_step_allowed_is_a_stop() -> None:
    [_, result] = run([fields(), fields(id="b", max_tokens=3)], model=Breaking()).results
    assert (result.finish_reason, len(result.tokens)) == ("stop", 3)


def test_aborting_beams_gives_what_they_have() -> None:
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


def test_beams_and_partners_arrived_when_their_leader_did() -> None:
    requests = [fields(id="first", max_tokens=3), fields(num_beams=3, n=3)]
    results = [result for result in run(requests, 3).results if result.id == "a"]
    assert [(r.steps.arrived, r.steps.admitted) for r in results] == [(0, 3)] * 3


@pytest.mark.parametrize(
    ("more", "ends"),
    [
        ({"num_beams": 3, "n": 2}, [(0, "beam"), (1, "beam")]),
        ({"cfg_scale": 2.0, "negative_prompt": "x"}, [(0, "sample")]),
        (
            {"temperature": 1.0, "best_of": 3},
            [(0, "sample"), (1, "sample"), (2, "sample")],
        ),
    ],
)
def test_what_is_aborted_before_it_has_a_slot_gives_what_was_asked_for(
    more: dict[str, Any], ends: list[tuple[int, str]]
) -> None:
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


def test_behind_a_known_sample_and_its_partner_the_model_computes_again() -> None:
    requests = [
        fields(cfg_scale=2.0, negative_prompt="x", ignore_eos=True),
        fields(id="b", ignore_eos=True),
    ]
    first, second = run(requests, 2).results
    engine = Engine(SimulatedModel(), 2)
    engine.add(requests[0], known={0: first})
    engine.add(requests[1])
    results = []
    while engine.has_work:
        results += engine.step().results
    assert results == [second]


FORCED = [
    {"json_schema": SCHEMA, "max_tokens": 60},
    {
        "json_schema": SCHEMA,
        "max_tokens": 60,
        "cfg_scale": 1.5,
        "negative_prompt": "No no",
    },
    {
        "choice": ["yes indeed", "no"],
        "prompt": "",
        "cfg_scale": 0.0,
        "negative_prompt": "",
    },
    {"regex": "the door(way)?", "prompt": ""},
    {"prompt": "Count the bo", "heal": True},
    {"num_beams": 3, "n": 2, "max_tokens": 12},
]


@pytest.mark.parametrize("more", FORCED)
def test_a_model_is_told_all_tokens_of_a_row_once_and_where_they_go_on(
    more: dict[str, Any],
) -> None:
    model = LedgerModel()
    engine = Engine(model, 3)
    engine.add(fields(**more))
    prompts = [model.tokenizer.encode(more.get("prompt", "Count the boats"))]
    if "negative_prompt" in more:
        prompts.append(model.tokenizer.encode(more["negative_prompt"]))
    results: list[Result] = []
    while not results:
        held = {slot: row.copy() for slot, row in model.rows.items()}
        results = engine.step().results
    assert model.rows == {}
    if more.get("num_beams") is None and not more.get("heal"):
        for slot, prompt in enumerate(prompts):
            told = held[slot][len(prompt) :]
            assert held[slot] == prompt + results[0].tokens[: len(told)]


def test_samples_that_are_whole_are_better_than_those_that_were_aborted() -> None:
    """The second sample has a token still when the first two have all eight of theirs."""
    engine = Engine(SimulatedModel(), 2)
    engine.add(fields(temperature=1.0, n=1, best_of=3, ignore_eos=True))
    for _ in range(9):
        assert engine.step().results == []
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


def test_what_is_aborted_ended_in_the_step_before() -> None:
    engine = Engine(SimulatedModel(), 4)
    engine.add(fields(temperature=1.0, best_of=2, ignore_eos=True))
    engine.step()
    engine.step()
    engine.abort("a")
    events = engine.step().events
    ends = [(type(event), event.step, event.time) for event in events]
    assert ends == [(FinishEvent, 1, 1.0), (FinishEvent, 1, 1.0), (DropEvent, 1, 1.0)]


def test_a_known_sample_and_its_partner_never_call_the_model() -> None:
    request = fields(cfg_scale=2.0, negative_prompt="x", n=2, temperature=1.0)
    results = run([request], 2).results

    class Silent(SimulatedModel):
        def forward(self, batch: Batch) -> ModelOutput:
            raise AssertionError("the model was asked")

    engine = Engine(Silent(), 2)
    engine.add(request, known={result.index: result for result in results})
    while engine.has_work:
        assert engine.step().results == []
    assert engine.num_tokens == sum(len(result.tokens) for result in results)


def test_a_search_gives_as_many_results_as_were_asked_for_even_if_it_finds_fewer() -> None:
    results = run([fields(num_beams=3, n=3, regex="yes|no")]).results
    assert [result.index for result in results] == [0, 1, 2]
    assert sorted(result.text for result in results) == ["", "no", "yes"]


def test_beams_end_with_a_stop_or_for_their_length_each_for_itself() -> None:
    results = run([fields(num_beams=3, n=3, ignore_eos=True)]).results
    assert [result.finish_reason for result in results] == ["length"] * 3
    stop = results[0].tokens[3]
    results = run([fields(num_beams=3, n=3, ignore_eos=True, stop_token=stop)]).results
    assert {result.finish_reason for result in results} >= {"stop"}
    for result in results:
        assert (result.finish_reason == "stop") == (stop in result.tokens)


def test_text_stops_of_beams_are_found_in_any_slots() -> None:
    [free] = run([fields(num_beams=3, ignore_eos=True, max_tokens=12)]).results
    for start in range(len(free.text) - 3):
        beams = fields(num_beams=3, n=3, max_tokens=12, stop=free.text[start : start + 3])
        alone = run([beams], 3).results
        beside = run([fields(id="b", max_tokens=1), fields(id="c", max_tokens=20), beams], 5)
        found = [result for result in beside.results if result.id == "a"]
        assert [(r.tokens, r.text) for r in found] == [(r.tokens, r.text) for r in alone]


def test_a_beam_that_forks_takes_along_how_far_a_stop_has_come() -> None:
    token_bytes = SimulatedModel().tokenizer.token_bytes
    [free] = run([fields(num_beams=3, ignore_eos=True, max_tokens=12)]).results
    for start in range(len(free.text) - 5):
        stop = free.text[start : start + 5]
        for result in run([fields(num_beams=3, n=3, max_tokens=12, stop=stop)]).results:
            *before, last = (token_bytes[token] for token in result.tokens)
            assert stop.encode() not in b"".join(before)
            assert (stop.encode() in b"".join([*before, last])) == (result.stop_reason == stop)


@pytest.mark.parametrize("min_tokens", [2, 4, 7])
def test_each_beam_may_stop_from_min_tokens_on(min_tokens: int) -> None:
    [free] = run([fields(num_beams=3, ignore_eos=True, max_tokens=12)]).results
    seen = set()
    for stop in sorted(set(free.tokens)):
        beams = fields(
            num_beams=3,
            n=3,
            max_tokens=12,
            ignore_eos=True,
            stop_token=stop,
            min_tokens=min_tokens,
        )
        for result in run([beams]).results:
            assert len(result.tokens) >= min_tokens
            assert stop not in result.tokens[min_tokens - 1 : -1]
            assert (result.finish_reason == "stop") == (result.tokens[-1] == stop)
            seen.add(result.finish_reason)
    assert seen == {"stop", "length"}


@pytest.mark.parametrize("min_tokens", [3, 6])
def test_text_stops_of_beams_act_from_min_tokens_on(min_tokens: int) -> None:
    token_bytes = SimulatedModel().tokenizer.token_bytes
    [free] = run([fields(num_beams=3, ignore_eos=True, max_tokens=12)]).results
    for start in range(len(free.text) - 3):
        stop = free.text[start : start + 3]
        beams = fields(num_beams=3, n=3, max_tokens=14, stop=stop, min_tokens=min_tokens)
        for result in run([beams]).results:
            late = b"".join(token_bytes[token] for token in result.tokens[min_tokens:])
            assert stop.encode() not in late or result.stop_reason == stop


@pytest.mark.parametrize("more", [{"temperature": 1.0, "n": 3}, {"states": STATES}])
def test_every_sample_is_told_its_own_tokens_once(more: dict[str, Any]) -> None:
    done = run([fields(max_tokens=40, ignore_eos=True, **more)])
    for result in done.results:
        told = [event.tokens for event in done.tokens if event.index == result.index]
        assert [token for tokens in told for token in tokens] == result.tokens


@pytest.mark.parametrize("max_tokens", [3, 30])
def test_of_every_beam_it_is_told_whether_it_keeps_its_constraint(
    max_tokens: int,
) -> None:
    done = run([fields(num_beams=3, n=3, regex="(ab|cd)+e", max_tokens=max_tokens)])
    assert of_kind(done.events, ForkEvent)
    for result in done.results:
        is_whole = re.fullmatch("(ab|cd)+e", result.text) is not None
        assert result.constraint == ("complete" if is_whole else "incomplete")


def test_penalties_count_the_tokens_of_each_beam() -> None:
    """Of six tokens that are about as likely, the one that is new costs least."""
    allowed = [48, 49, 50, 51, 52, 53]
    beams = fields(num_beams=3, max_tokens=6, allowed_token_ids=allowed, frequency_penalty=2.0)
    [best] = run([beams]).results
    assert sorted(best.tokens) == allowed


def test_best_of_no_tokens_makes_no_samples_to_drop() -> None:
    done = run([fields(temperature=1.0, best_of=3, max_tokens=0)])
    assert [result.index for result in done.results] == [0]
    assert of_kind(done.events, DropEvent) == []


def test_what_is_aborted_before_its_time_has_not_arrived() -> None:
    engine = Engine(SimulatedModel(), 1)
    engine.add(fields(arrival_time=9.0))
    engine.abort("a")
    [result] = engine.step().results
    assert (result.steps.arrived, result.steps.admitted) == (None, None)


def is_replayed(request: Request) -> bool:
    """Whether a run that goes on replays what there is of a request: see docs/cli.md."""
    constraints = [getattr(request, field) for field in CONSTRAINT_FIELDS]
    is_forced = request.heal or any(constraint is not None for constraint in constraints)
    return not (is_forced or request.num_beams > 1 or request.best_of is not None)


@given(st.lists(control_requests(), max_size=15), st.data())
@settings(max_examples=40, deadline=None)
def test_known_samples_replay_the_schedule_whatever_is_beside_them(
    requests: list[Request], data: st.DataObject
) -> None:
    requests = [
        replace(request, id=f"r{place}")
        for place, request in enumerate(filter(is_replayed, requests))
    ]
    done = run(requests, 3)
    known: dict[str, dict[int, Result]] = {request.id or "": {} for request in requests}
    for result in done.results:
        if data.draw(st.booleans(), label="finished before"):
            known[result.id][result.index] = result
    engine = Engine(SimulatedModel(), 3)
    for request in requests:
        engine.add(request, known=known[request.id or ""])
    events, results = [], []
    while engine.has_work:
        outcome = engine.step()
        events += outcome.events
        results += outcome.results
    assert events == done.events
    assert results == [r for r in done.results if r.index not in known[r.id]]
