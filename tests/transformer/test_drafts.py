"""Rows come, go, share blocks and have drafts that may be accepted, in every kind of cache.

What a row comes to, and what it would come to after each draft, is that of its tokens alone.
"""

from functools import partial
from random import Random

import numpy as np
import pytest
from drafted_trees import is_line, random_parents, way_to
from examples import mostly_heavy
from rank_threads import RankThreads, ThreadedDecoder, make_tiny
from tiny import KINDS, tiny_config, tiny_model
from tiny_checkpoints import random_weights

from batcher import BatchdecodeError, ByteTokenizer, Engine
from batcher.engine import speculating as drafting
from batcher.errors import InvariantError
from batcher.models.base import (
    Batch,
    Chunk,
    ModelOutput,
    Pages,
    can_verify,
    can_verify_trees,
    moves_along,
)
from batcher.models.transformer import TransformerModel
from batcher.speculation.settings import SpeculationSettings
from batcher.transformer.linear import WholeLinears
from batcher.transformer.transformer import EMBEDDING, Transformer

NUM_SLOTS, BLOCK_SIZE, MAX_TOKENS = 4, 4, 70
NOTHING = np.zeros(0, np.int64)


class Row:
    """The tokens of a row, how many are computed, and what it may be given next.

    does_go_back: whether its next token does not stand behind the one that it computed last.
    """

    def __init__(self, tokens: list[int], num_computed: int = 0) -> None:
        self.tokens, self.num_computed = tokens, num_computed
        self.drafts: list[int] = []
        self.parents: list[int] = []
        self.does_go_back = False


class Drafting:
    """Rows in slots, with drafts that are accepted or not at random; a pager to try out."""

    def __init__(self, model: TransformerModel, reference: TransformerModel, seed: int) -> None:
        self.model, self.reference, self.random = model, reference, Random(seed)
        self.rows: dict[int, Row] = {}
        self.num_groups = len(model.cache_windows)
        tables = [[[] for _ in range(NUM_SLOTS)] for _ in range(self.num_groups)]
        self.pages = Pages(BLOCK_SIZE, tables[0], tables[1:])
        self.tables = tables
        self.counts: dict[int, int] = {}  # block -> how many tables have it
        self.num_accepted = self.num_rejected = 0
        model.allocate_pages(NUM_SLOTS, None, BLOCK_SIZE)

    def draw(self, most: int) -> list[int]:
        return [self.random.randrange(256) for _ in range(self.random.randint(1, most))]

    # -- blocks ----------------------------------------------------------------------------------

    def take_block(self) -> int:
        free = [block for block in range(self.pages.num_blocks) if block not in self.counts]
        if not free:
            self.pages.num_blocks += 9
            return self.take_block()
        block = self.random.choice(free)
        self.counts[block] = 1
        return block

    def drop(self, block: int) -> None:
        if block >= 0:
            self.counts[block] -= 1
            if not self.counts[block]:
                del self.counts[block]

    def hold(self, slot: int, start: int, stop: int) -> None:
        """Let a row have blocks for start..stop that nobody else has; free what windows passed."""
        for tables, window in zip(self.tables, self.model.cache_windows, strict=True):
            table = tables[slot]
            while len(table) * BLOCK_SIZE < stop:
                table.append(self.take_block())
            for place in range(start // BLOCK_SIZE, len(table)):
                if self.counts[table[place]] > 1:
                    copy = self.take_block()
                    self.pages.copies.append((table[place], copy))
                    self.drop(table[place])
                    table[place] = copy
            if window is not None and self.random.random() < 0.7:
                for place in range(max(start - window + 1, 0) // BLOCK_SIZE):
                    self.drop(table[place])
                    table[place] = -1

    def give_back(self, slot: int, num_tokens: int) -> None:
        """Take the blocks from a row that are not needed for so many tokens."""
        for tables in self.tables:
            num_kept = -(-num_tokens // BLOCK_SIZE)
            for block in tables[slot][num_kept:]:
                self.drop(block)
            del tables[slot][num_kept:]

    def spoil(self) -> None:
        """Let all that no row has computed hold what no sum gets rid of."""
        self.model._make_room(self.pages.num_blocks, BLOCK_SIZE)
        is_recurrent = self.model.recomputes_drafts
        known, known_blocks = [NOTHING], [NOTHING]
        for slot, row in self.rows.items():
            *tables, last = [tables[slot] for tables in self.tables]
            if is_recurrent:
                known_blocks.append(np.array(last[: -(-row.num_computed // BLOCK_SIZE)], np.int64))
            known += [
                self.model._store.cells(table, BLOCK_SIZE, row.num_computed)
                for table in (tables if is_recurrent else (*tables, last))
            ]
        every = self.model._store.cells(
            [*range(self.pages.num_blocks)], BLOCK_SIZE, BLOCK_SIZE * self.pages.num_blocks
        )
        moved = self.model._store.cells(
            [source for source, _ in self.pages.moves], 1, len(self.pages.moves)
        )
        cells = np.setdiff1d(every, np.concatenate([*known, moved]))
        for store in parts_of(self.model._store):
            for layer in (*store.keys, *store.values):
                layer[cells] = np.nan
        blocks = np.setdiff1d(np.arange(self.pages.num_blocks), np.concatenate(known_blocks))
        for states in parts_of(self.model._states) if is_recurrent else ():
            for layer in (*states.delta, *states.convolution):
                layer[1 + blocks] = np.nan

    # -- steps -----------------------------------------------------------------------------------

    def act(self) -> None:
        """Do a few things at once, and compute them in one step."""
        self.batch = Batch(NUM_SLOTS, self.pages)
        for slot in [*self.rows]:
            if len(self.rows[slot].tokens) > MAX_TOKENS or self.random.random() < 0.05:
                self.leave(slot)
        for slot in range(NUM_SLOTS):
            if slot not in self.rows and self.random.random() < 0.4:
                self.begin(slot)
        self.spoil()
        for slot in self.random.sample([*self.rows], len(self.rows)):
            self.random.choice([self.stand_still, self.go_on, self.go_on, self.go_on])(slot)
        if self.batch.chunks or self.batch.slots.size:
            self.step()

    def leave(self, slot: int) -> None:
        del self.rows[slot]
        self.give_back(slot, 0)
        self.model.release(slot)

    def stand_still(self, slot: int) -> None:
        """Compute nothing of a row."""

    def begin(self, slot: int) -> None:
        """Begin a row; perhaps after tokens of another, in blocks that both then have."""
        self.rows[slot] = Row(self.draw(30))
        if len(self.rows) == 1 or self.random.random() < 0.5:
            return
        source = self.random.choice([other for other in self.rows if other != slot])
        row = self.rows[source]
        num_shared = self.random.randint(0, row.num_computed)
        if self.model.recomputes_drafts:  # states are kept at the ends of blocks, and at the end
            ends = range(0, row.num_computed + 1, BLOCK_SIZE)
            num_shared = self.random.choice([self.random.choice(ends), row.num_computed])
        num_blocks = -(-num_shared // BLOCK_SIZE)
        shared = [tables[source][:num_blocks] for tables in self.tables]
        for table, window in zip(shared, self.model.cache_windows, strict=True):
            first = 0 if window is None else max(num_shared - window + 1, 0)
            if -1 in table[first // BLOCK_SIZE :]:
                return
        for tables, table in zip(self.tables, shared, strict=True):
            tables[slot] += table
            for block in table:
                if block >= 0:
                    self.counts[block] += 1
        self.rows[slot] = Row(row.tokens[:num_shared] + self.draw(30), num_shared)

    def go_on(self, slot: int) -> None:
        """Compute the next token of a row, or several, perhaps with drafts behind them."""
        row, start = self.rows[slot], self.rows[slot].num_computed
        num_new = len(row.tokens) - start
        count = self.random.choice([num_new, self.random.randint(1, num_new)])
        if count == num_new:
            row.drafts = self.random.choice([[], self.draw(9)])
            row.parents = [*range(-1, len(row.drafts) - 1)]
            if self.model.verifies_trees:
                row.parents = random_parents(self.random, len(row.drafts))
        before = [tables[slot].copy() for tables in self.tables]
        self.hold(slot, start, start + count + len(row.drafts))
        has_changed = before != [tables[slot] for tables in self.tables]
        if num_new == 1 and not row.drafts and self.random.random() < 0.8:
            self.batch.enter(slot)
            self.batch.tokens[slot] = row.tokens[-1]
            if start % BLOCK_SIZE == 0 or row.does_go_back or has_changed:
                self.pages.moved[slot] = start
        else:
            chunk = Chunk(
                slot,
                row.tokens[start : start + count] + row.drafts,
                start,
                num_drafts=len(row.drafts),
                draft_parents=()
                if is_line(row.parents)
                else tuple(count + parent for parent in row.parents),
            )
            (self.batch.join if count == num_new else self.batch.add_part)(chunk)
        row.num_computed += count
        row.does_go_back = False

    def step(self) -> None:
        self.batch.logit_slots = self.batch.slots
        output = self.model.forward(self.batch)
        self.pages.moved, self.pages.copies, self.pages.moves = {}, [], []
        assert not output.failed
        expected = {slot: self.alone(self.rows[slot]) for slot in self.batch.slots.tolist()}
        if expected:
            first = np.array([logits[0] for logits in expected.values()])
            assert (output.logits == first).all()
            assert (output.tokens[[*expected]] == first.argmax(1)).all()
        drafting = [chunk.slot for chunk in self.batch.chunks if chunk.num_drafts]
        if drafting:
            after_drafts = np.concatenate([expected[slot][1:] for slot in drafting])
            assert (output.draft_logits == after_drafts).all()
            assert output.draft_logits.dtype == np.float32
        for slot in expected:
            self.accept(slot)

    def accept(self, slot: int) -> None:
        """Give a row some of its drafts, and one token more."""
        row = self.rows[slot]
        path = way_to(self.random.randint(-1, len(row.drafts) - 1), row.parents)
        for chunk in self.batch.chunks if path else ():
            if chunk.slot == slot:
                first = len(chunk.token_ids) - chunk.num_drafts
                nodes = [first + draft for draft in path]
                self.pages.moves += moves_along(nodes, chunk, self.pages)
        row.tokens += [row.drafts[draft] for draft in path] + self.draw(1)
        if not self.model.recomputes_drafts:
            row.num_computed += len(path)
        self.num_accepted += len(path)
        self.num_rejected += len(row.drafts) - len(path)
        if row.drafts and self.random.random() < 0.5:
            self.give_back(slot, row.num_computed)
        row.does_go_back, row.drafts = bool(row.drafts), []

    def alone(self, row: Row) -> np.ndarray:
        """Return the logits after a row's tokens, and after each draft, computed in one go."""
        if is_line(row.parents):
            return self.scores(row.tokens + row.drafts)[len(row.tokens) - 1 :]
        drafts = [
            [row.drafts[number] for number in way_to(draft, row.parents)]
            for draft in range(-1, len(row.drafts))
        ]
        return np.array([self.scores(row.tokens + way)[-1] for way in drafts])

    def scores(self, tokens: list[int]) -> np.ndarray:
        """Return the logits after each of some tokens, with nothing beside them."""
        self.reference.allocate(1)
        batch = Batch(1)
        batch.join(Chunk(0, tokens, 0, is_scored=True))
        return np.concatenate([*self.reference.forward(batch).chunk_logits[0]])


def parts_of(kept: object) -> list:
    """Return what is kept, by rank if there are several."""
    return [*kept.parts.values()] if hasattr(kept, "parts") else [kept]


def check(model: TransformerModel, reference: TransformerModel, num_seeds: int = 1) -> None:
    assert can_verify(model)
    for seed in range(num_seeds):
        drafting = Drafting(model, reference, seed)
        for _ in range(20):
            drafting.act()
        assert min(drafting.num_accepted, drafting.num_rejected) > 10


@pytest.mark.parametrize("kind", mostly_heavy(KINDS, "plain", "window", "gemma3", "qwen3-next"))
def test_drafts_are_verified_to_the_bit(kind: str) -> None:
    check(tiny_model(**KINDS[kind]), tiny_model(**KINDS[kind]))


@pytest.mark.parametrize("kind", mostly_heavy(["plain", "gemma3", "qwen3-next"], "gemma3"))
def test_drafts_are_padded_as_other_tokens_are(kind: str) -> None:
    check(tiny_model(**KINDS[kind], layout="padded"), tiny_model(**KINDS[kind]))


@pytest.mark.parametrize("kind", ["window", "qwen3-next int8"])
def test_several_ranks_verify_drafts(kind: str) -> None:
    with RankThreads(2) as ranks:
        decoder = ThreadedDecoder(ranks, partial(make_tiny, KINDS[kind]))
        model = TransformerModel(decoder, ByteTokenizer(), "tiny", {})
        check(model, tiny_model(**KINDS[kind]))


def test_packed_weights_verify_drafts() -> None:
    config = tiny_config()
    read = random_weights(config)
    linears = WholeLinears("int8-channel", table=read(EMBEDDING).__getitem__)
    model = TransformerModel(Transformer(config, read, linears), ByteTokenizer(), "tiny", {})
    check(model, tiny_model(weights="int8-channel"))


def drafted(
    model: TransformerModel, draft_parents: tuple[int, ...] = ()
) -> tuple[Batch, ModelOutput]:
    """Return a batch of a row of 6 tokens in blocks of 4, with 3 drafts; and what came of it."""
    model.allocate_pages(1, 9, 4)
    tables = [[[0, 1, 2, 3]], *([[4, 5, 6, 7]] for _ in model.cache_windows[1:])]
    batch = Batch(1, Pages(4, tables[0], tables[1:], num_blocks=9))
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    batch.join(Chunk(0, tokens, 0, num_drafts=3, draft_parents=draft_parents))
    return batch, model.forward(batch)


def logits_behind_a_tree(model: TransformerModel) -> np.ndarray:
    """Return the logits after a token behind the second of two drafts that follow the same."""
    batch, _ = drafted(model, (5, 5, 6))
    batch.pages.moves = moves_along([7], batch.chunks[0], batch.pages)
    batch.chunks, batch.logit_slots = [Chunk(0, [10], 7)], batch.slots
    return model.forward(batch).logits[0]


def test_what_is_accepted_of_a_tree_is_what_a_row_goes_on_from() -> None:
    model = tiny_model()
    alone = Drafting(model, tiny_model(), 0).scores([1, 2, 3, 4, 5, 6, 8, 10])[-1]
    assert (logits_behind_a_tree(model) == alone).all()


@pytest.mark.parametrize("position", [7, 8, 9])
def test_a_row_of_recurrent_layers_goes_on_before_its_drafts(position: int) -> None:
    model = tiny_model(**KINDS["qwen3-next"])
    assert model.recomputes_drafts
    assert not tiny_model().recomputes_drafts
    batch, _ = drafted(model)
    batch.chunks = [Chunk(0, [7, 8, 9, 10][position - 6 :], position)]
    with pytest.raises(InvariantError, match=f"position {position}, and states after "):
        model.forward(batch)


def test_recurrent_layers_verify_no_trees() -> None:
    model = tiny_model(**KINDS["qwen3-next"])
    assert not can_verify_trees(model)
    assert can_verify_trees(tiny_model())
    with pytest.raises(InvariantError, match="drafts in a tree, which tiny does not verify"):
        drafted(model, (5, 5, 6))


def test_a_tree_reaches_as_far_into_the_context_as_its_longest_way() -> None:
    for num_tokens, fails in ((8, False), (7, True)):
        model = tiny_model(max_position_embeddings=num_tokens)
        assert bool(drafted(model, (5, 5, 6))[1].failed) == fails


def test_a_row_that_outgrows_the_context_fails_alone() -> None:
    model, reference = tiny_model(max_position_embeddings=8), tiny_model()
    model.allocate_pages(2, 4, 8)
    batch = Batch(2, Pages(8, [[0, 1], [2]], num_blocks=4))
    batch.join(Chunk(0, [5] * 9, 0, num_drafts=2))
    batch.join(Chunk(1, [1, 2, 3, 4], 0, num_drafts=2))
    output = model.forward(batch)
    assert [*output.failed] == [0]
    row = Row([1, 2])
    row.drafts, row.parents = [3, 4], [-1, 0]
    alone = Drafting(reference, reference, 0).alone(row)
    assert output.tokens[1] == alone[0].argmax()
    assert output.draft_logits.shape == (4, 256)
    assert (output.draft_logits[2:] == alone[1:]).all()
    batch.leave(1)
    assert model.forward(batch).draft_logits.shape == (2, 256)


def test_a_draft_with_recurrent_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states would be those after its own drafts."""
    model = tiny_model(**KINDS["qwen3-next"])
    monkeypatch.setattr(drafting, "_load", lambda *_: model)
    with pytest.raises(BatchdecodeError, match="--draft simulated has recurrent layers"):
        Engine(model, 2, speculation=SpeculationSettings(draft="simulated"))
