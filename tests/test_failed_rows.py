"""What fails, fails alone, with those that were to go on from what it has not computed."""

from itertools import count

import numpy as np
import pytest
from engine_runs import drained, fields, run
from msgspec.structs import replace
from test_scheduling_invariance import alone
from test_scheduling_invariance import run as outputs_of

from batcher import ModelOutput, Request, SimulatedModel
from batcher.decoding.constraints import GrammarRow
from batcher.engine import Engine
from batcher.errors import ModelError, RequestError
from batcher.models.callables import CallableModel
from batcher.settings import SchedulingSettings


@pytest.mark.parametrize(
    ("more", "field"),
    [({"num_beams": 5}, "num_beams"), ({"cfg_scale": 2.0, "negative_prompt": ""}, "cfg_scale")],
)
def test_what_needs_more_slots_than_there_are_is_refused(more, field):
    engine = Engine(SimulatedModel(), 1)
    with pytest.raises(RequestError, match="slots") as caught:
        engine.add(fields(**more))
    [problem] = caught.value.problems
    assert (problem.code, problem.field) == ("too-few-slots", field)


class Altered(SimulatedModel):
    """A model of which one call, the third unless told otherwise, comes to something else."""

    def __init__(self, alter, call=3):
        super().__init__()
        self._alter, self._num_left = alter, call

    def forward(self, batch):
        output = super().forward(batch)
        self._num_left -= 1
        return (not self._num_left and self._alter(batch, output)) or output


@pytest.mark.parametrize("fault", [np.nan, -np.inf, np.inf])
def test_logits_of_no_use_fail_their_request_alone_with_the_step(fault):
    requests = [fields(id=name, temperature=1.0, ignore_eos=True) for name in "abc"]

    def faulty(batch, output):
        output.logits[batch.logit_slots.tolist().index(1)] = fault

    good = {result.id: result for result in run(requests).results}
    results = {result.id: result for result in run(requests, model=Altered(faulty)).results}
    assert results["a"] == good["a"]
    assert results["c"] == good["c"]
    error = results["b"].error
    assert error is not None
    assert (error.code, error.message.partition(":")[0]) == ("model-error", "step 2")
    assert results["b"].tokens == good["b"].tokens[:2]


def test_rows_and_beams_without_a_token_left_fail_alone():
    """Even if it is the only one of its settings."""
    lost = fields(id="lost", regex="abc", allowed_token_ids=[5], repetition_penalty=1.2)
    results = {result.id: result for result in run([lost, fields(id="ok")]).results}
    assert results["lost"].error is not None
    assert results["lost"].error.code == "constraint-error"
    assert results["ok"].tokens == run([fields(id="ok")]).results[0].tokens
    [result] = run([fields(num_beams=2, regex="abc|xyz", bad_words=["bc"], max_tokens=9)]).results
    assert (result.text, result.finish_reason) == ("xyz", "stop")
    [only, missing] = run([fields(choice=["yes"], num_beams=3, n=2)]).results
    assert (only.text, only.finish_reason, only.constraint) == ("yes", "stop", "complete")
    assert missing.error is not None
    assert (missing.error.code, missing.tokens) == ("too-few-outputs", [])


def test_tokens_forced_before_a_failure_are_streamed():
    def interrupted(batch, output):
        return ModelOutput(output.tokens, dict.fromkeys(batch.slots.tolist(), "no"), output.logits)

    done = run([fields(regex="abcdef[0-9]")], model=Altered(interrupted, 1))
    [result] = done.results
    assert (result.text, result.finish_reason) == ("abcdef", "error")
    assert "".join(event.text for event in done.tokens) == "abcdef"
    assert [token for event in done.tokens for token in event.tokens] == result.tokens


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_a_text_of_tokens_that_the_model_does_not_know_is_refused(field):
    class Small(CallableModel):
        def __init__(self):
            super().__init__(lambda prefixes: [[0.0] * 20 for _ in prefixes], "small")
            self.vocab_size, self.gives = 20, "logits"

    request = {"prompt": [1], "cfg_scale": 2.0, field: "ab"}
    with pytest.raises(RequestError, match="token 97") as caught:
        Engine(Small(), 2).add(Request(**request))
    assert caught.value.problems[0].field == field


def test_an_output_that_breaks_its_constraint_is_an_error(monkeypatch):
    """However it came about: here the mask lets everything pass."""
    monkeypatch.setattr(GrammarRow, "packed_mask", lambda _: b"\xff" * 64)
    monkeypatch.setattr(GrammarRow, "forced_tokens", lambda _, most: ())
    monkeypatch.setattr(GrammarRow, "advance", lambda _, token: None)
    [result] = run([fields(regex="[0-9]+", max_tokens=200)]).results
    assert result.error is not None
    assert result.error.code == "constraint-error"
    assert "' Our librarian remem…' does not match" in result.error.message
    assert result.finish_reason == "error"


def breaking(slot):
    """Return a model that fails one slot in a call in which it gives every row an EOS."""

    def broken(_, output):
        output.tokens[:] = 0
        return ModelOutput(output.tokens, {slot: "no more"}, output.logits)

    return Altered(broken)


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize(
    "more", [{"num_beams": 2, "n": 2}, {"cfg_scale": 2.0, "negative_prompt": "x"}]
)
def test_what_a_model_fails_in_a_partner_fails_its_sample(more, slot):
    *results, beside = run([fields(**more), fields(id="b")], 3, model=breaking(slot)).results
    errors = [result.error and result.error.message for result in results]
    assert errors == ["step 2: no more"] * len(results)
    assert (len(results), beside.finish_reason) == (more.get("n", 1), "stop")


@pytest.mark.parametrize("more", [{}, {"regex": "[a-z ]*"}, {"temperature": 1.0}])
def test_a_failed_row_is_told_no_token_for_the_step_that_failed(more):
    done = run([fields(**more), fields(id="b")], model=breaking(0))
    told = [(event.step, event.tokens) for event in done.tokens if event.id == "a" and event.tokens]
    assert told == [(step, [token]) for step, token in enumerate(done.results[0].tokens)]
    assert len(told) == 2


SHARED = list(range(10, 30))
BAD_TOKEN = 499
BAD = Request(id="bad", prompt=[*SHARED, BAD_TOKEN], max_tokens=5, ignore_eos=True)
GOOD = Request(id="good", prompt=[*SHARED, 5], max_tokens=5, ignore_eos=True)
OTHER = Request(id="other", prompt=[*SHARED[1:], 5], max_tokens=5, ignore_eos=True)


class FailsOnAToken(SimulatedModel):
    """Computes nothing of a prompt with BAD_TOKEN in it, and says that its row has failed."""

    def forward(self, batch):
        bad = {chunk.slot for chunk in batch.chunks if BAD_TOKEN in chunk.token_ids}
        kept, is_yielding = batch.chunks, batch._is_yielding.copy()
        batch.chunks = [chunk for chunk in kept if chunk.slot not in bad]
        for slot in bad:
            batch._is_yielding[slot] = False
        output = super().forward(batch)
        batch.chunks, batch._is_yielding = kept, is_yielding
        return ModelOutput(output.tokens, dict.fromkeys(bad, "boom"), output.logits)


class FailsWithoutPages(FailsOnAToken):
    is_paged = False


def results_of(model, requests):
    settings = SchedulingSettings(kv_blocks=40, block_size=4)
    engine = Engine(model, 4, settings=settings, is_checked=True)
    return {result.id: result for result in drained(engine, requests).results}


@pytest.mark.parametrize("is_attentive", [False, True])
def test_who_shares_what_was_not_computed_fails_and_nobody_else(*, is_attentive):
    alone = results_of(SimulatedModel(), [OTHER])["other"]
    results = results_of(FailsOnAToken(is_attentive=is_attentive), [BAD, GOOD, OTHER])
    assert results["bad"].error.message == "step 0: boom"
    message = "step 0: it shares its first tokens with request 'bad', which failed: boom"
    assert results["good"].error.message == message
    assert (results["good"].error.code, results["good"].tokens) == ("model-error", [])
    assert results["other"].tokens == alone.tokens


def test_a_row_whose_settings_allow_no_token_fails_alone():
    [zero] = SimulatedModel().tokenizer.encode("0")
    none_left = Request(id="bad", prompt=BAD.prompt, allowed_token_ids=[zero], bad_words=["0"])
    alone = results_of(SimulatedModel(), [GOOD])["good"]
    results = results_of(SimulatedModel(), [none_left, GOOD])
    assert results["bad"].error.code == "constraint-error"
    assert results["good"].tokens == alone.tokens


class NoNumberAfterAToken(SimulatedModel):
    """Computes every row, and gives NaN after a prompt with BAD_TOKEN in it."""

    def forward(self, batch):
        output = super().forward(batch)
        bad = [chunk.slot for chunk in batch.chunks if BAD_TOKEN in chunk.token_ids]
        if output.logits is not None:
            output.logits[np.isin(batch.logit_slots, bad)] = np.nan
        return output


def test_a_row_whose_logits_are_no_numbers_fails_alone():
    bad, good = (replace(request, temperature=1.0) for request in (BAD, GOOD))
    alone = results_of(SimulatedModel(), [good])["good"]
    results = results_of(NoNumberAfterAToken(), [bad, good])
    assert results["bad"].error.message == "step 0: a logit is not a number"
    assert results["good"].tokens == alone.tokens


def test_who_finds_blocks_later_or_has_a_cache_of_its_own_computes_what_failed():
    later = Request(id="later", prompt=GOOD.prompt, max_tokens=5, ignore_eos=True, arrival_time=3.0)
    alone = results_of(SimulatedModel(), [GOOD])["good"]
    assert results_of(FailsOnAToken(), [BAD, later])["later"].tokens == alone.tokens
    alone = results_of(SimulatedModel(), [GOOD])["good"]
    results = results_of(FailsWithoutPages(), [BAD, GOOD])
    assert results["bad"].finish_reason == "error"
    assert results["good"].tokens == alone.tokens


@pytest.mark.parametrize("max_batch_tokens", [8, 30])
def test_who_shares_it_in_chunks_may_fail_and_is_given_no_other_tokens(max_batch_tokens):
    settings = SchedulingSettings(kv_blocks=60, block_size=4, max_batch_tokens=max_batch_tokens)
    engine = Engine(FailsOnAToken(is_attentive=True), 4, settings=settings, is_checked=True)
    requests = [BAD, GOOD, replace(OTHER, prompt=[*SHARED, 6, 7, 8, 9, 9, 9])]
    for request in requests:
        engine.add(request)
    outputs = outputs_of(engine)
    assert outputs["bad", 0].finish_reason == "error"
    for request in requests[1:]:
        found = outputs[request.id, 0]
        expected = alone(SimulatedModel, request)[request.id, 0]
        assert found == expected or (found.finish_reason, found.tokens) == ("error", [])


class FailsOnce(SimulatedModel):
    """A model that raises in one of its calls, before it has done anything."""

    def __init__(self, number):
        super().__init__(is_attentive=True)
        self._number, self._calls = number, count()

    def forward(self, batch):
        if next(self._calls) == self._number:
            raise ModelError("out of memory")
        return super().forward(batch)


def test_a_beam_does_not_go_on_from_a_copy_that_a_call_of_prompts_alone_was_to_make():
    beams = Request(id="beams", prompt=[40] * 5, max_tokens=24, num_beams=3, n=3, ignore_eos=True)
    later = [
        Request(id=f"late{n}", prompt=[50 + n] * 9, max_tokens=2, arrival_time=n)
        for n in range(2, 20, 2)
    ]
    settings = SchedulingSettings(
        prefill_order="prefill-first", max_batch_tokens=5, block_size=4, kv_blocks=90
    )
    good = {}
    for request in [beams, *later]:
        good |= alone(SimulatedModel, request)
    num_failed = 0
    for number in range(30):
        engine = Engine(FailsOnce(number), 5, settings=settings, is_checked=True)
        for request in [beams, *later]:
            engine.add(request)
        for name, result in outputs_of(engine).items():
            num_failed += result.finish_reason == "error"
            assert result.finish_reason == "error" or result == good[name], (number, name)
    assert 30 < num_failed < 30 * len(good) / 3
