"""Rows that come in parts, share blocks, draft, fork and go yield what their prefixes say.

A row that yields no token yet disturbs nobody, and nobody disturbs it; in pages, the answers of the
simulated model are the function of what the block tables say.
"""

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from drafted_trees import is_line, random_parents, way_to
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batcher import BatchdecodeError, LLMModel, ModelOutput, SimulatedModel
from batcher.models.base import NO_SLOTS, Batch, Chunk, Model, Pages, can_page, moves_along
from batcher.models.callables import CallableModel
from batcher.models.loading import CheckedModel
from batcher.models.simulated import (
    NUM_FIXED,
    cell_of,
    reference_next_token,
)

REFERENCE = SimulatedModel()
NUM_SLOTS = 5


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


class Row:
    """A row of a slot: its tokens, how many are computed, how many were before this step.

    drafts: what it has beside its tokens in this step, and parents: which of these each follows.
    has_gone_back: whether it had any before.
    """

    def __init__(self, tokens: list[int], num_computed: int, num_before: int) -> None:
        self.tokens, self.num_computed, self.num_before = tokens, num_computed, num_before
        self.drafts: list[int] = []
        self.parents: list[int] = []
        self.has_gone_back = False

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.num_computed

    def drafts_to(self, draft: int) -> list[int]:
        return [self.drafts[number] for number in way_to(draft, self.parents)]


class Rows:
    """Rows that are cut into chunks, stand still, jump, fork and leave.

    In pages they also draft, and share blocks; without, the blocks are counted all the same, and
    nobody is told of them.
    """

    def __init__(self, model: Model, random: Random, *, is_paged: bool) -> None:
        self.model, self.random, self.is_paged = model, random, is_paged
        size = random.choice([1, 2, 4, 16])
        self.pages = Pages(size, [[] for _ in range(NUM_SLOTS)])
        self.batch = Batch(NUM_SLOTS, self.pages if is_paged else None)
        self.counts: dict[int, int] = {}  # block -> how many tables have it
        self.rows: dict[int, Row] = {}
        self.num_drafts = 0  # that were checked
        is_limited = random.random() < 0.5
        self.pages.num_blocks = 600 if is_limited else 0
        if is_paged:
            model.allocate_pages(NUM_SLOTS, 600 if is_limited else None, size)
        else:
            model.allocate(NUM_SLOTS)

    def pick_block(self) -> int:
        """Take a free block, any; there are more of them if there were none."""
        free = [block for block in range(self.pages.num_blocks) if block not in self.counts]
        if not free:
            self.pages.num_blocks += 3
            return self.pick_block()
        block = self.random.choice(free)
        self.counts[block] = 1
        return block

    def drop(self, table: list[int]) -> None:
        for block in table:
            self.counts[block] -= 1
            if not self.counts[block]:
                del self.counts[block]
        table.clear()

    def own(self, slot: int, start: int, stop: int) -> None:
        """Have blocks that nobody else has where the row writes."""
        table, size = self.pages.tables[slot], self.pages.block_size
        while len(table) * size < stop:
            table.append(self.pick_block())
        for place in range(start // size, -(-stop // size)):
            if self.counts[table[place]] > 1:
                self.counts[table[place]] -= 1
                copy = self.pick_block()
                self.pages.copies.append((table[place], copy))
                table[place] = copy

    def change(self) -> None:
        """Let rows go and be forked."""
        for slot in list(self.rows):
            if self.random.random() < 0.1:
                self.leave(slot)
        decoding = [slot for slot, row in self.rows.items() if self.is_decoding(slot, row)]
        free = [slot for slot in range(NUM_SLOTS) if slot not in self.rows]
        if decoding and free and self.random.random() < 0.3:
            self.fork(self.random.choice(decoding), self.random.choice(free))
        if not self.is_paged and len(decoding) > 1 and self.random.random() < 0.3:
            source, target = self.random.sample(decoding, 2)
            self.drop(self.pages.tables[target])
            self.fork(source, target)  # whose row is forgotten
        if self.is_paged and self.random.random() < 0.5:
            self.spoil()

    def spoil(self) -> None:
        """Write over all that no row has computed, or had for a draft that was not accepted."""
        size = self.pages.block_size
        cells = [
            cell_of(self.pages, slot, position)
            for slot, row in self.rows.items()
            for position in range(row.num_computed, len(self.pages.tables[slot]) * size)
            if self.counts[self.pages.tables[slot][position // size]] == 1
        ]
        pages = getattr(self.model, "inner", self.model)._pages
        is_moved = {NUM_FIXED + source for source, _ in self.pages.moves}
        free = [block for block in range(self.pages.num_blocks) if block not in self.counts]
        cells += [NUM_FIXED + block * size + offset for block in free for offset in range(size)]
        for values in (pages._hashes, pages._hashes if pages._tokens is None else pages._tokens):
            values[[cell for cell in cells if cell < len(values) and cell not in is_moved]] = 77

    def leave(self, slot: int) -> None:
        del self.rows[slot]
        self.drop(self.pages.tables[slot])
        self.pages.moved.pop(slot, None)
        self.batch.leave(slot)
        self.model.release(slot)

    def is_decoding(self, slot: int, row: Row) -> bool:
        return self.batch.holds(slot) and row.num_new == 1

    def fork(self, source: int, target: int) -> None:
        row, token = self.rows[source], self.random.randrange(512)
        self.share(source, target, len(row.tokens))
        self.rows[target] = Row([*row.tokens[:-1], token], row.num_computed, row.num_computed)
        self.model.fork(source, target)
        self.batch.enter(target)
        self.batch.tokens[target] = token
        self.pages.moved[target] = row.num_computed

    def share(self, source: int, target: int, num_tokens: int) -> None:
        shared = self.pages.tables[source][: -(-num_tokens // self.pages.block_size)]
        for block in shared:
            self.counts[block] += 1
        self.pages.tables[target].extend(shared)

    def admit(self, slot: int) -> None:
        """Begin a row; half of them after tokens that another one has, or will have by then."""
        size = self.random.choice([0, 1, 5, 30, 60])
        tokens = [self.random.randrange(512) for _ in range(size)]
        num_shared = num_before = 0
        if self.is_paged and self.rows and tokens and self.random.random() < 0.5:
            source = self.random.choice(list(self.rows))
            row, block_size = self.rows[source], self.pages.block_size
            num_shared = self.random.randint(0, row.num_computed)
            if num_shared > row.num_before:  # what is written in this step cannot be copied in it
                num_shared = num_shared // block_size * block_size
            self.share(source, slot, num_shared)
            num_before = min(num_shared, row.num_before)
            tokens = row.tokens[:num_shared] + tokens
        self.rows[slot] = Row(tokens, num_shared, num_before)

    def step(self) -> None:
        """Compute some of what is there to compute, and check what every row yields."""
        stands_still = self.random.random() < 0.2
        for row in self.rows.values():
            row.num_before = row.num_computed
        yielding = [slot for slot, row in self.rows.items() if self.is_decoding(slot, row)]
        if stands_still:
            yielding = []
        for slot in yielding:
            self.decode(slot)
        for slot in self.random.sample(range(NUM_SLOTS), NUM_SLOTS):
            if slot not in self.rows and self.random.random() < 0.5:
                self.admit(slot)
            if slot in self.rows and slot not in yielding and self.add_chunk(slot, stands_still):
                yielding.append(slot)
        if stands_still and self.batch.chunks:
            with self.batch.standing_still():
                assert self.batch.slots.size == self.batch.logit_slots.size == 0
                self.model.forward(self.batch)
            self.pages.moves.clear()
        elif self.batch.chunks or yielding:
            self.check(yielding)
            self.pages.moved.clear()
        self.batch.chunks = []
        self.pages.copies.clear()

    def chunk(self, slot: int, start: int, stop: int, *, can_draft: bool) -> Chunk:
        """Return some tokens of a row, perhaps with drafts behind them, and have blocks for all."""
        row = self.rows[slot]
        num_drafts = self.random.choice([0, 0, 1, 3, 9]) if can_draft and self.is_paged else 0
        row.drafts = [self.random.randrange(512) for _ in range(num_drafts)]
        row.parents = random_parents(self.random, num_drafts)
        self.own(slot, start, stop + num_drafts)
        parents = () if is_line(row.parents) else tuple(stop - start + p for p in row.parents)
        tokens = row.tokens[start:stop] + row.drafts
        return Chunk(slot, tokens, start, num_drafts=num_drafts, draft_parents=parents)

    def decode(self, slot: int) -> None:
        row, position = self.rows[slot], self.rows[slot].num_computed
        before = self.pages.tables[slot].copy()
        chunk = self.chunk(slot, position, position + 1, can_draft=True)
        if row.drafts:
            self.pages.moved.pop(slot, None)
            self.batch.join(chunk)
        elif before != self.pages.tables[slot] or self.begins_anew(row):
            self.pages.moved[slot] = position
        row.num_computed += 1

    def begins_anew(self, row: Row) -> bool:
        """Return whether the cell of a row's token is not behind that of its last step."""
        return row.has_gone_back or row.num_computed % self.pages.block_size == 0

    def add_chunk(self, slot: int, stands_still: bool) -> bool:  # noqa: FBT001 - of the step
        """Plan some of a row's new tokens; return whether it yields."""
        row = self.rows[slot]
        start, is_jump = row.num_computed, self.batch.holds(slot)
        if stands_still:
            count = 0 if is_jump else self.random.randrange(max(1, row.num_new))
        else:
            count = self.random.randint(1 if is_jump else 0, row.num_new)
        does_yield = count == row.num_new and not stands_still
        if not count and not does_yield:
            return False
        can_draft = does_yield and count > 0
        chunk = self.chunk(slot, start, start + count, can_draft=can_draft)
        row.num_computed += count
        if does_yield:
            self.batch.join(chunk)
        else:
            self.batch.add_part(chunk)
        return does_yield

    def check(self, yielding: list[int]) -> None:
        assert self.batch.slots.tolist() == sorted(yielding)
        has_tokens = self.is_paged or self.model.gives == "tokens"
        self.batch.logit_slots = NO_SLOTS if has_tokens else self.batch.slots
        output = self.model.forward(self.batch)
        assert not output.failed
        self.pages.moves.clear()
        tokens = output.tokens
        if output.logits is not None:
            tokens[self.batch.slots] = output.logits.argmax(axis=1)
        self.check_drafts(output.draft_logits)
        for slot in yielding:
            row = self.rows[slot]
            assert int(tokens[slot]) == reference_next_token(REFERENCE, row.tokens)
            row.has_gone_back = bool(row.drafts)
            accepted = way_to(self.random.randint(-1, len(row.drafts) - 1), row.parents)
            jumped = [self.random.randrange(512) for _ in range(self.random.choice([0, 0, 3]))]
            row.tokens += [*[row.drafts[at] for at in accepted], int(tokens[slot]), *jumped]
            row.num_computed += len(accepted)
            for chunk in self.batch.chunks:
                if chunk.slot == slot and accepted:
                    first = len(chunk.token_ids) - chunk.num_drafts
                    path = [first + at for at in accepted]
                    self.pages.moves += moves_along(path, chunk, self.pages)
            row.drafts = []
            if row.has_gone_back and self.random.random() < 0.5:  # some blocks are given back
                self.give_back(slot, row.num_computed)
        self.batch.tokens = tokens

    def check_drafts(self, logits: np.ndarray | None) -> None:
        """Make sure that the logits after drafts are those of the tokens up to them."""
        drafting = [self.rows[chunk.slot] for chunk in self.batch.chunks if chunk.num_drafts]
        if not drafting:
            assert logits is None
            return
        prefixes = [
            row.tokens + row.drafts_to(draft)
            for row in drafting
            for draft in range(len(row.drafts))
        ]
        assert (logits == logits_alone(prefixes)).all()
        self.num_drafts += len(prefixes)

    def give_back(self, slot: int, num_tokens: int) -> None:
        """Take the blocks from a row that are not needed for so many tokens."""
        table = self.pages.tables[slot]
        num_kept = -(-num_tokens // self.pages.block_size)
        rest = table[num_kept:]
        del table[num_kept:]
        self.drop(rest)


def logits_alone(prefixes: list[list[int]]) -> np.ndarray:
    """Return the logits [rows, vocab] after each prefix, computed from its beginning."""
    REFERENCE.allocate(len(prefixes))
    batch = Batch(len(prefixes))
    for slot, prefix in enumerate(prefixes):
        batch.join(Chunk(slot, prefix, 0))
    batch.logit_slots = batch.slots
    logits = REFERENCE.forward(batch).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("is_attentive", [False, True])
@pytest.mark.parametrize("is_checked", [False, True])
@given(seed=st.integers(0, 2**32))
@examples(60)
def test_rows_that_share_blocks_are_the_function_of_their_prefixes(
    seed: int, *, is_attentive: bool, is_checked: bool
) -> None:
    model = SimulatedModel(is_attentive=is_attentive)
    rows = Rows(CheckedModel(model) if is_checked else model, Random(seed), is_paged=True)
    for _ in range(30):
        rows.change()
        rows.step()
    assert rows.num_drafts > 9


@pytest.mark.parametrize("name", MODELS)
@given(seed=st.integers(0, 2**32))
@examples(30)
def test_rows_in_parts_and_rows_that_decode_do_not_disturb_each_other(name: str, seed: int) -> None:
    rows = Rows(MODELS[name](), Random(seed), is_paged=False)
    for _ in range(25):
        rows.change()
        rows.step()


def begun(*, is_attentive: bool) -> tuple[SimulatedModel, Batch, list[int]]:
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
def test_an_attentive_model_sees_that_any_earlier_block_was_overwritten(block: int) -> None:
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
def test_a_model_that_is_not_attentive_sees_it_of_the_last_token(block: int, is_seen: bool) -> None:  # noqa: FBT001 - a case
    model, batch, prefix = begun(is_attentive=False)
    assert batch.pages is not None
    batch.pages.tables[1] = [block]
    batch.add_part(Chunk(1, [11], 0))
    token = int(model.forward(batch).tokens[0])
    assert (token != reference_next_token(REFERENCE, prefix)) == is_seen


def test_a_checked_model_is_paged_exactly_if_its_own_is() -> None:
    class Unpaged(SimulatedModel):
        is_paged = False

    class Small(SimulatedModel):
        def allocate_pages(self, num_slots: int, num_blocks: int | None, block_size: int) -> None:
            raise MemoryError(f"{num_slots} {num_blocks} {block_size}")

    class Plain:
        name, settings, tokenizer = "plain", REFERENCE.settings, REFERENCE.tokenizer
        vocab_size, eos_token_id = 512, 0

        def allocate(self, num_slots: int) -> None: ...
        def forward(self, batch: Batch) -> ModelOutput:
            return ModelOutput(batch.tokens)

        def fork(self, source: int, target: int) -> None: ...
        def release(self, slot: int) -> None: ...

    assert can_page(CheckedModel(SimulatedModel()))
    assert not can_page(CheckedModel(Unpaged()))
    assert not can_page(Plain())
    assert not can_page(CheckedModel(Plain()))
    expected = "simulated cannot make room for 2 rows in 9 blocks of 16 tokens: MemoryError: 2 9 16"
    with pytest.raises(BatchdecodeError, match=expected):
        CheckedModel(Small()).allocate_pages(2, 9, 16)


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
