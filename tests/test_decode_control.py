"""What a request may ask for beside greedy tokens, as the engine serves it and events tell it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from control_requests import SCHEMA, control_requests
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from batcher import ModelOutput, Request, Result, SimulatedModel
from batcher.decoding.constraints import GrammarRow
from batcher.engine import Engine
from batcher.errors import RequestError
from batcher.events import AdmitEvent, Event, FinishEvent, ForkEvent, JumpEvent, TokenEvent
from batcher.models.base import Batch
from batcher.models.simulated import SimulatedSettings


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
    assert [(fork.step, fork.slot, fork.parent) for fork in forks[:2]] == [(0, 1, 0), (0, 2, 0)]
    assert all(fork.parent != fork.index for fork in forks)
    first, second = done.results
    assert (first.index, second.index) == (0, 1)
    assert first.score is not None
    assert second.score is not None
    assert first.score >= second.score
    reasons = [(finish.index, finish.reason) for finish in of_kind(done.events, FinishEvent)]
    assert reasons == [(0, first.finish_reason), (1, second.finish_reason), (2, "unused")]


def test_one_beam_is_greedy() -> None:
    assert run([fields(num_beams=1)]).results == run([fields()]).results


@pytest.mark.parametrize(
    ("more", "field"),
    [({"num_beams": 5}, "num_beams"), ({"cfg_scale": 2.0, "negative_prompt": ""}, "cfg_scale")],
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
    [partner] = run(
        [fields(cfg_scale=2.0, negative_prompt="x")], model=Faulty(np.nan, slot % 2)
    ).results
    assert partner.finish_reason == "error"


def test_beams_that_do_not_exist_are_errors() -> None:
    [only, missing] = run([fields(choice=["yes"], num_beams=3, n=2)]).results
    assert (only.text, only.finish_reason, only.constraint) == ("yes", "stop", "complete")
    assert missing.error is not None
    assert (missing.error.code, missing.tokens) == ("too-few-outputs", [])


def test_an_output_that_breaks_its_constraint_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """However it came about: here the mask lets everything pass."""
    monkeypatch.setattr(GrammarRow, "packed_mask", lambda _: b"\xff" * 64)
    monkeypatch.setattr(GrammarRow, "forced_token", lambda _: None)
    monkeypatch.setattr(GrammarRow, "advance", lambda _, token: None)
    [result] = run([fields(regex="[0-9]+")]).results
    assert result.error is not None
    assert result.error.code == "constraint-error"
    assert "byte 0" in result.error.message
    assert result.finish_reason == "error"


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
