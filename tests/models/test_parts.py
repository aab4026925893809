"""Prompts in parts: a row that yields no token yet disturbs nobody, and nobody disturbs it."""

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batcher import LLMModel, ModelOutput, SimulatedModel
from batcher.models.base import NO_SLOTS, Batch, Chunk, Model
from batcher.models.callables import CallableModel
from batcher.models.loading import CheckedModel
from batcher.models.simulated import reference_next_token

REFERENCE = SimulatedModel()
NUM_SLOTS = 4


def next_tokens(prefixes: list[list[int]]) -> list[int]:
    assert prefixes, "asked for nothing"
    return [reference_next_token(REFERENCE, prefix) for prefix in prefixes]


class Likely:
    """An LLM that gives the reference's token a logit of 1."""

    vocab_size = 512

    def next_token_logits(self, prev_token_ids: list[int]) -> list[float]:
        likely = reference_next_token(REFERENCE, prev_token_ids)
        return [float(token == likely) for token in range(512)]

    def get_stop_token_id(self) -> int:
        return 0


class Forkless:
    """The simulated model as one that does not know how to fork."""

    fork = None

    def __init__(self) -> None:
        inner = SimulatedModel()
        self.name, self.settings, self.tokenizer = inner.name, inner.settings, inner.tokenizer
        self.vocab_size, self.eos_token_id = inner.vocab_size, inner.eos_token_id
        self.allocate, self.forward, self.release = inner.allocate, inner.forward, inner.release


MODELS: dict[str, Callable[[], Model]] = {
    "simulated": SimulatedModel,
    "callable": lambda: CallableModel(next_tokens),
    "llm": lambda: LLMModel(Likely()),
    "checked": lambda: CheckedModel(SimulatedModel()),
    "checked, without fork": lambda: CheckedModel(Forkless()),
}


class Rows:
    """Rows of a model that come in parts, decode, jump, fork and go, and what they must yield."""

    def __init__(self, model: Model, random: Random) -> None:
        self.model, self.random = model, random
        self.batch = Batch(NUM_SLOTS)
        self.prefixes: dict[int, list[int]] = {}  # slot -> all tokens of its row
        self.num_computed: dict[int, int] = {}
        model.allocate(NUM_SLOTS)

    def change(self) -> None:
        """Let rows come, go, and be forked."""
        for slot in range(NUM_SLOTS):
            if slot in self.prefixes and self.random.random() < 0.1:
                del self.prefixes[slot], self.num_computed[slot]
                self.batch.leave(slot)
                self.model.release(slot)
            elif slot not in self.prefixes and self.random.random() < 0.5:
                size = self.random.choice([0, 1, 3, 20, 60])
                self.prefixes[slot] = [self.random.randrange(512) for _ in range(size)]
                self.num_computed[slot] = 0
        decoding = [slot for slot in self.prefixes if self._num_new(slot) == 1]
        decoding = [slot for slot in decoding if self.batch.holds(slot)]
        if len(decoding) > 1 and self.random.random() < 0.3:
            source, target = self.random.sample(decoding, 2)
            self.model.fork(source, target)
            self.batch.enter(target)
            token = self.random.randrange(512)
            self.prefixes[target] = [*self.prefixes[source][:-1], token]
            self.num_computed[target] = self.num_computed[source]
            self.batch.tokens[target] = token

    def _num_new(self, slot: int) -> int:
        return len(self.prefixes[slot]) - self.num_computed[slot]

    def step(self) -> None:
        """Compute some of what is there to compute, and check what every row yields."""
        stands_still = self.random.random() < 0.25
        yielding = self._add_chunks(stands_still=stands_still)
        if stands_still:
            if self.batch.chunks:
                with self.batch.standing_still():
                    self.check_stillness()
                    self.model.forward(self.batch)
        elif yielding or self.batch.chunks:
            self._yield(yielding)
        self.batch.chunks = []

    def check_stillness(self) -> None:
        assert self.batch.slots.size == 0
        assert self.batch.logit_slots.size == 0

    def _add_chunks(self, *, stands_still: bool) -> list[int]:
        """Plan a step; return the slots that will yield."""
        yielding = []
        for slot, prefix in self.prefixes.items():
            num_new, start = self._num_new(slot), self.num_computed[slot]
            if self.batch.holds(slot) and num_new == 1:
                yielding.append(slot)
                continue
            is_jump = self.batch.holds(slot)
            if stands_still:
                count = self.random.randrange(max(1, num_new)) if not is_jump else 0
            else:
                count = self.random.randint(1 if is_jump else 0, num_new)
            if count == num_new and not stands_still:
                self.batch.join(Chunk(slot, prefix[start:], start))
                yielding.append(slot)
            elif count:
                self.batch.add_part(Chunk(slot, prefix[start : start + count], start))
                self.num_computed[slot] += count
        return yielding

    def _yield(self, yielding: list[int]) -> None:
        self.batch.logit_slots = NO_SLOTS if self.model.gives == "tokens" else self.batch.slots
        assert self.batch.slots.tolist() == sorted(yielding)
        output = self.model.forward(self.batch)
        assert not output.failed
        tokens = output.tokens
        if output.logits is not None:
            tokens[self.batch.slots] = output.logits.argmax(axis=1)
        for slot in yielding:
            prefix = self.prefixes[slot]
            self.num_computed[slot] = len(prefix)
            assert int(tokens[slot]) == reference_next_token(REFERENCE, prefix)
            num_jumped = self.random.choice([0, 0, 0, 3])
            jumped = [self.random.randrange(512) for _ in range(num_jumped)]
            self.prefixes[slot] = [*prefix, int(tokens[slot]), *jumped]
        self.batch.tokens = tokens


@pytest.mark.parametrize("name", MODELS)
@given(seed=st.integers(0, 2**32))
@examples(30)
def test_rows_in_parts_and_rows_that_decode_do_not_disturb_each_other(name: str, seed: int) -> None:
    rows = Rows(MODELS[name](), Random(seed))
    for _ in range(25):
        rows.change()
        rows.step()


def test_a_step_that_stands_still_leaves_the_batch_as_it_was() -> None:
    batch = Batch(2)
    batch.join(Chunk(0, [5], 0))
    batch.chunks, batch.tokens = [], np.array([7, 8])
    batch.logit_slots = batch.slots
    with batch.standing_still():
        batch.add_part(Chunk(1, [5, 6], 0))
        batch.tokens[0] = 99
        batch_slots = batch.slots
    assert batch_slots.size == 0
    assert (batch.slots.tolist(), batch.logit_slots.tolist()) == ([0], [0])
    assert batch.tokens.tolist() == [7, 8]


def test_a_part_may_fail_and_a_row_that_was_not_computed_may_not() -> None:
    class Failing(SimulatedModel):
        failed: dict[int, str]

        def forward(self, batch: Batch) -> ModelOutput:
            return ModelOutput(super().forward(batch).tokens, self.failed)

    inner = Failing()
    model = CheckedModel(inner)
    model.allocate(3)
    batch = Batch(3)
    batch.add_part(Chunk(1, [5, 6], 0))
    inner.failed = {1: "no room"}
    assert model.forward(batch).failed == {1: "no room"}
    inner.failed = {2: "no room"}
    with pytest.raises(Exception, match="not asked for"):
        model.forward(batch)


def test_a_part_does_not_ask_an_llm_for_anything() -> None:
    asked: list[list[int]] = []

    class Counting(Likely):
        def next_token_logits(self, prev_token_ids: list[int]) -> list[float]:
            asked.append(prev_token_ids)
            return super().next_token_logits(prev_token_ids)

    model = LLMModel(Counting())
    model.allocate(1)
    batch = Batch(1)
    batch.add_part(Chunk(0, [5, 6], 0))
    model.forward(batch)
    assert not asked
