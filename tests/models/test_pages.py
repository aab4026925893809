"""Rows that come in parts, share blocks, draft, fork and go yield what their prefixes say.

A row that yields no token yet disturbs nobody, and nobody disturbs it; in pages, the answers of the
simulated model are the function of what the block tables say.
"""

from random import Random

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from paged_rows import PagedRows

from batcher import BatchdecodeError, LLMModel, ModelOutput, SimulatedModel
from batcher.models.base import Batch, Chunk, Pages, can_page
from batcher.models.callables import CallableModel
from batcher.models.loading import CheckedModel
from batcher.models.simulated import NUM_FIXED, cell_of, reference_next_token

REFERENCE = SimulatedModel()


def next_tokens(prefixes):
    assert prefixes, "asked for nothing"
    return [reference_next_token(REFERENCE, prefix) for prefix in prefixes]


class Likely:
    """An LLM that gives the reference's token a logit of 1."""

    vocab_size = 512

    def next_token_logits(self, prev_token_ids):
        likely = reference_next_token(REFERENCE, prev_token_ids)
        return [float(token == likely) for token in range(512)]

    def get_stop_token_id(self):
        return 0


class Forkless:
    """The simulated model as one that does not know how to fork."""

    fork = None

    def __init__(self):
        inner = SimulatedModel()
        self.name, self.settings, self.tokenizer = inner.name, inner.settings, inner.tokenizer
        self.vocab_size, self.eos_token_id = inner.vocab_size, inner.eos_token_id
        self.allocate, self.forward, self.release = inner.allocate, inner.forward, inner.release


MODELS = {
    "simulated": SimulatedModel,
    "callable": lambda: CallableModel(next_tokens),
    "llm": lambda: LLMModel(Likely()),
    "checked": lambda: CheckedModel(SimulatedModel()),
    "checked, without fork": lambda: CheckedModel(Forkless()),
}


def logits_alone(prefixes):
    """Return the logits [rows, vocab] after each prefix, computed from its beginning."""
    REFERENCE.allocate(len(prefixes))
    batch = Batch(len(prefixes))
    for slot, prefix in enumerate(prefixes):
        batch.join(Chunk(slot, prefix, 0))
    batch.logit_slots = batch.slots
    logits = REFERENCE.forward(batch).logits
    assert logits is not None
    return logits


def scores(tokens, ways):
    return logits_alone([tokens, *(tokens + way for way in ways)]).copy()


def likely(tokens, _ways):
    return np.arange(512)[None] == reference_next_token(REFERENCE, tokens)


def spoil(rows):
    """Write over all that no row has computed, or had for a draft that was not accepted."""
    size, [tables] = rows.pages.block_size, rows.tables
    cells = [
        cell_of(rows.pages, slot, position)
        for slot, row in rows.rows.items()
        for position in range(row.num_computed, len(tables[slot]) * size)
        if rows.counts[tables[slot][position // size]] == 1
    ]
    pages = getattr(rows.model, "inner", rows.model)._pages
    is_moved = {NUM_FIXED + source for source, _ in rows.pages.moves}
    free = [block for block in range(rows.pages.num_blocks) if block not in rows.counts]
    cells += [NUM_FIXED + block * size + offset for block in free for offset in range(size)]
    for values in (pages._hashes, pages._hashes if pages._tokens is None else pages._tokens):
        values[[cell for cell in cells if cell < len(values) and cell not in is_moved]] = 77


@pytest.mark.parametrize("is_attentive", [False, True])
@pytest.mark.parametrize("is_checked", [False, True])
@given(seed=st.integers(0, 2**32))
@examples(60)
def test_rows_that_share_blocks_are_the_function_of_their_prefixes(
    seed, *, is_attentive, is_checked
):
    model = SimulatedModel(is_attentive=is_attentive)
    rows = PagedRows(CheckedModel(model) if is_checked else model, Random(seed), scores, spoil)
    for _ in range(30):
        rows.change()
        rows.step()
    assert rows.num_accepted + rows.num_rejected > 9


@pytest.mark.parametrize("name", MODELS)
@given(seed=st.integers(0, 2**32))
@examples(30)
def test_rows_in_parts_and_rows_that_decode_do_not_disturb_each_other(name, seed):
    rows = PagedRows(MODELS[name](), Random(seed), likely, is_paged=False)
    for _ in range(25):
        rows.change()
        rows.step()


def begun(*, is_attentive):
    """Return a model with a row of 9 tokens in blocks 5, 2, and 7 of 4 tokens."""
    model = SimulatedModel(is_attentive=is_attentive)
    model.allocate_pages(2, 8, 4)
    batch = Batch(2, Pages(4, [[5, 2, 7], []], num_blocks=8))
    prompt = [*range(300, 309)]
    batch.join(Chunk(0, prompt, 0))
    batch.tokens = model.forward(batch).tokens
    batch.chunks = []
    return model, batch, [*prompt, int(batch.tokens[0])]


@pytest.mark.parametrize("block", [5, 2])
def test_an_attentive_model_sees_that_any_earlier_block_was_overwritten(block):
    """The row in slot 1 writes where the one in slot 0 still reads."""
    model, batch, prefix = begun(is_attentive=True)
    assert batch.pages is not None
    batch.pages.tables[1] = [block]
    batch.add_part(Chunk(1, [11], 0))
    token = int(model.forward(batch).tokens[0])
    spoiled = prefix.copy()
    spoiled[{5: 0, 2: 4}[block]] = 11
    assert token == reference_next_token(REFERENCE, spoiled)
    assert token != reference_next_token(REFERENCE, prefix)


@pytest.mark.parametrize(("block", "is_seen"), [(5, False), (2, False), (7, True)])
def test_a_model_that_is_not_attentive_sees_it_of_the_last_token(block, is_seen):
    model, batch, prefix = begun(is_attentive=False)
    assert batch.pages is not None
    batch.pages.tables[1] = [block]
    batch.add_part(Chunk(1, [11], 0))
    token = int(model.forward(batch).tokens[0])
    assert (token != reference_next_token(REFERENCE, prefix)) == is_seen


def test_a_checked_model_is_paged_exactly_if_its_own_is():
    class Unpaged(SimulatedModel):
        is_paged = False

    class Small(SimulatedModel):
        def allocate_pages(self, num_slots, num_blocks, block_size):
            raise MemoryError(f"{num_slots} {num_blocks} {block_size}")

    class Plain:
        name, settings, tokenizer = "plain", REFERENCE.settings, REFERENCE.tokenizer
        vocab_size, eos_token_id = 512, 0

        def allocate(self, num_slots): ...
        def forward(self, batch):
            return ModelOutput(batch.tokens)

        def fork(self, source, target): ...
        def release(self, slot): ...

    assert can_page(CheckedModel(SimulatedModel()))
    assert not can_page(CheckedModel(Unpaged()))
    assert not can_page(Plain())
    assert not can_page(CheckedModel(Plain()))
    expected = "simulated cannot make room for 2 rows in 9 blocks of 16 tokens: MemoryError: 2 9 16"
    with pytest.raises(BatchdecodeError, match=expected):
        CheckedModel(Small()).allocate_pages(2, 9, 16)


def test_parts_may_fail_and_ask_an_llm_for_nothing():
    class Failing(SimulatedModel):
        failed: dict[int, str]

        def forward(self, batch):
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
    asked = []

    class Counting(Likely):
        def next_token_logits(self, prev_token_ids):
            asked.append(prev_token_ids)
            return super().next_token_logits(prev_token_ids)

    model = LLMModel(Counting())
    model.allocate(1)
    batch = Batch(1)
    batch.add_part(Chunk(0, [5, 6], 0))
    model.forward(batch)
    assert not asked
