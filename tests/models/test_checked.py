"""What somebody else's Model answers is checked before it can mix anything up."""

from collections.abc import Callable

import numpy as np
import pytest

from batcher import BatchdecodeError, Engine, Request, Result, SimulatedModel, decode
from batcher.errors import ModelError
from batcher.models.base import Batch, ModelOutput
from batcher.models.loading import as_model

REQUESTS = [Request(prompt=[7] * n, max_tokens=4, ignore_eos=True) for n in (1, 2, 3)]


class Faulty:
    """A Model of another's making; `spoil` changes the third answer."""

    def __init__(self, spoil: Callable[[np.ndarray], object]) -> None:
        self._inner, self._spoil, self._num_calls = SimulatedModel(), spoil, 0
        self.name, self.settings = "faulty", {}
        self.tokenizer, self.vocab_size = self._inner.tokenizer, self._inner.vocab_size
        self.eos_token_id = self._inner.eos_token_id
        self.allocate, self.release = self._inner.allocate, self._inner.release

    def forward(self, batch: Batch) -> object:
        self._num_calls += 1
        tokens = self._inner.forward(batch).tokens
        return self._spoil(tokens.copy()) if self._num_calls == 3 else ModelOutput(tokens)


def decoded(spoil: Callable[[np.ndarray], object]) -> list[Result]:
    return decode(REQUESTS, model=Faulty(spoil), batch_size=2)


def fail(error: Exception) -> object:
    raise error


def put(slot: int, value: int) -> Callable[[np.ndarray], ModelOutput]:
    def spoil(tokens: np.ndarray) -> ModelOutput:
        tokens[slot] = value
        return ModelOutput(tokens)

    return spoil


def test_a_good_model_gives_what_it_gives_unchecked() -> None:
    assert decoded(ModelOutput) == decode(REQUESTS, batch_size=2)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda _: fail(RuntimeError("out of memory")), "raised RuntimeError: out of memory"),
        (lambda _: fail(ModelError("shape mismatch")), "shape mismatch"),
        (lambda _: None, "raised AttributeError"),
        (lambda tokens: ModelOutput(tokens[:1]), r"returned int64 [1], not integers [2]"),
        (lambda tokens: ModelOutput(tokens[:, None]), r"returned int64 [2, 1], not integers [2]"),
        (lambda tokens: ModelOutput(tokens * 1.0), r"returned float64 [2], not integers [2]"),
        (lambda tokens: ModelOutput(tokens > 0), r"returned bool [2], not integers [2]"),
    ],
)
def test_no_answer_fails_the_batch(spoil: Callable, message: str) -> None:
    results = decoded(spoil)
    assert [result.finish_reason for result in results] == ["error", "error", "length"]
    for result in results[:2]:
        assert len(result.tokens) == 2
        assert result.error.message.startswith("step 2: ")
        assert message in result.error.message


@pytest.mark.parametrize("value", [-1, 512, 2**40])
def test_a_token_out_of_range_fails_its_row_alone(value: int) -> None:
    good = decode(REQUESTS, batch_size=2)
    results = decoded(put(0, value))
    assert results[0].error.message.startswith(
        f"step 2: faulty returned {value}, which is no token"
    )
    assert [result.tokens for result in results[1:]] == [result.tokens for result in good[1:]]


def test_what_stands_in_empty_slots_means_nothing() -> None:
    [result] = decode(REQUESTS[:1], model=Faulty(put(1, 10**6)), batch_size=2)
    assert result == decode(REQUESTS[:1], batch_size=2)[0]


def test_a_row_that_the_model_gives_up_fails_with_its_words() -> None:
    results = decoded(lambda tokens: ModelOutput(tokens, {1: "context is full"}))
    assert [result.finish_reason for result in results] == ["length", "error", "length"]
    assert results[1].error.message == "step 2: context is full"


@pytest.mark.parametrize("method", ["allocate", "release"])
def test_a_cache_that_fails_ends_the_run_with_its_words(method: str) -> None:
    model = Faulty(ModelOutput)
    setattr(model, method, lambda _: fail(MemoryError("no blocks")))
    with pytest.raises(BatchdecodeError, match=r"faulty cannot .*: MemoryError: no blocks"):
        decode(REQUESTS, model=model)


def test_another_ones_model_serves_one_engine_at_a_time_too() -> None:
    model = Faulty(ModelOutput)
    first = Engine(model, 2)
    first.add(REQUESTS[0])
    first.step()
    Engine(model, 2)
    with pytest.raises(BatchdecodeError, match="another engine has taken the model"):
        first.step()


def test_an_engine_takes_a_callable_as_well() -> None:
    engine = Engine(lambda prefixes: [5 for _ in prefixes], 2)
    engine.add(Request(prompt="", max_tokens=1))
    assert engine.step().results[0].tokens == [5]


def test_a_class_that_cannot_be_made_is_a_clear_error() -> None:
    with pytest.raises(BatchdecodeError, match="cannot make a Faulty: TypeError"):
        as_model(Faulty)
