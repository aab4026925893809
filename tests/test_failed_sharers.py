"""Rows that were to go on from blocks which a failed row has not filled fail with it."""

from collections.abc import Iterable

import pytest
from engine_runs import drained

from batcher import Batch, Engine, ModelOutput, Request, Result, SimulatedModel
from batcher.settings import SchedulingSettings

SHARED = list(range(10, 30))
BAD_TOKEN = 499
BAD = Request(id="bad", prompt=[*SHARED, BAD_TOKEN], max_tokens=5, ignore_eos=True)
GOOD = Request(id="good", prompt=[*SHARED, 5], max_tokens=5, ignore_eos=True)
OTHER = Request(id="other", prompt=[*SHARED[1:], 5], max_tokens=5, ignore_eos=True)


class FailsOnAToken(SimulatedModel):
    """Computes nothing of a prompt with BAD_TOKEN in it, and says that its row has failed."""

    def forward(self, batch: Batch) -> ModelOutput:
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


def results_of(model: SimulatedModel, requests: Iterable[Request]) -> dict[str, Result]:
    settings = SchedulingSettings(kv_blocks=40, block_size=4)
    engine = Engine(model, 4, settings=settings, is_checked=True)
    for request in requests:
        engine.add(request)
    return {result.id: result for result in drained(engine).results}


@pytest.mark.parametrize("is_attentive", [False, True])
def test_who_shares_what_was_not_computed_fails_and_nobody_else(*, is_attentive: bool) -> None:
    alone = results_of(SimulatedModel(), [OTHER])["other"]
    results = results_of(FailsOnAToken(is_attentive=is_attentive), [BAD, GOOD, OTHER])
    assert results["bad"].error.message == "step 0: boom"
    message = "step 0: its first tokens are those of request 'bad', which failed: boom"
    assert results["good"].error.message == message
    assert (results["good"].error.code, results["good"].tokens) == ("model-error", [])
    assert results["other"].tokens == alone.tokens


def test_a_later_request_finds_nothing_of_what_failed() -> None:
    later = Request(id="later", prompt=GOOD.prompt, max_tokens=5, ignore_eos=True, arrival_time=3.0)
    alone = results_of(SimulatedModel(), [GOOD])["good"]
    assert results_of(FailsOnAToken(), [BAD, later])["later"].tokens == alone.tokens


def test_a_model_with_a_cache_of_its_own_computes_everything_itself() -> None:
    alone = results_of(SimulatedModel(), [GOOD])["good"]
    results = results_of(FailsWithoutPages(), [BAD, GOOD])
    assert results["bad"].finish_reason == "error"
    assert results["good"].tokens == alone.tokens
