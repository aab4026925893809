"""Rows come, go, share blocks and have drafts that may be accepted, in every kind of cache.

What a row comes to, and what it would come to after each draft, is that of its tokens alone.
"""

from functools import partial
from random import Random

import numpy as np
import pytest
from examples import mostly_heavy
from paged_rows import PagedRows
from rank_threads import RankThreads, ThreadedDecoder, make_tiny
from tiny import KINDS, tiny_model

from batcher import BatchdecodeError, ByteTokenizer, Engine
from batcher.engine import speculating as drafting
from batcher.errors import InvariantError
from batcher.models.base import Batch, Chunk, Pages, can_verify, can_verify_trees, moves_along
from batcher.models.transformer import TransformerModel
from batcher.speculation.settings import SpeculationSettings

NOTHING = np.zeros(0, np.int64)


def parts_of(kept):
    return [*kept.parts.values()] if hasattr(kept, "parts") else [kept]


def scores_of(model, tokens):
    model.allocate(1)
    batch = Batch(1)
    batch.join(Chunk(0, tokens, 0, is_scored=True))
    return np.concatenate([*model.forward(batch).chunk_logits[0]])


def spoil(rows):
    """Let all that no row has computed hold what no sum gets rid of."""
    model, pages = rows.model, rows.pages
    size, is_recurrent = pages.block_size, rows.recomputes
    model._cache.make_room(pages.num_blocks)
    known, known_blocks = [NOTHING], [NOTHING]
    for slot, row in rows.rows.items():
        *tables, last = [tables[slot] for tables in rows.tables]
        if is_recurrent:
            known_blocks.append(np.array(last[: -(-row.num_computed // size)], np.int64))
        known += [
            model._cache.store.cells(table, size, row.num_computed)
            for table in (tables if is_recurrent else (*tables, last))
        ]
    every = model._cache.store.cells([*range(pages.num_blocks)], size, size * pages.num_blocks)
    moved = model._cache.store.cells([source for source, _ in pages.moves], 1, len(pages.moves))
    cells = np.setdiff1d(every, np.concatenate([*known, moved]))
    for store in parts_of(model._cache.store):
        for layer in (*store.keys, *store.values):
            layer[cells] = np.nan
    blocks = np.setdiff1d(np.arange(pages.num_blocks), np.concatenate(known_blocks))
    for states in parts_of(model._cache.states) if is_recurrent else ():
        for layer in (*states.delta, *states.convolution):
            layer[1 + blocks] = np.nan


def check(model, reference):
    assert can_verify(model)

    def scores(tokens, ways):
        if all(way == ways[-1][: len(way)] for way in ways):  # a line: all in one go
            return scores_of(reference, tokens + (ways[-1] if ways else []))[len(tokens) - 1 :]
        return np.array([scores_of(reference, tokens + way)[-1] for way in ([], *ways)])

    rows = PagedRows(model, Random(0), scores, spoil, vocab_size=256, max_tokens=70)
    for _ in range(25):
        rows.change()
        rows.step()
    assert min(rows.num_accepted, rows.num_rejected) > 10


@pytest.mark.parametrize("kind", mostly_heavy(KINDS, "plain", "window", "gemma3", "qwen3-next"))
def test_drafts_are_verified_to_the_bit(kind):
    check(tiny_model(**KINDS[kind]), tiny_model(**KINDS[kind]))


@pytest.mark.parametrize("kind", mostly_heavy(["plain", "gemma3", "qwen3-next"], "gemma3"))
def test_drafts_are_padded_as_other_tokens_are(kind):
    check(tiny_model(**KINDS[kind], layout="padded"), tiny_model(**KINDS[kind]))


@pytest.mark.parametrize("kind", ["window", "qwen3-next q8"])
def test_several_ranks_verify_drafts(kind):
    with RankThreads(2) as ranks:
        decoder = ThreadedDecoder(ranks, partial(make_tiny, KINDS[kind]))
        model = TransformerModel(decoder, ByteTokenizer(), "tiny", {})
        check(model, tiny_model(**KINDS[kind]))


def drafted(model, draft_parents=()):
    """Return a batch of a row of 6 tokens in blocks of 4, with 3 drafts; and what came of it."""
    model.allocate_pages(1, 9, 4)
    tables = [[[0, 1, 2, 3]], *([[4, 5, 6, 7]] for _ in model.cache_windows[1:])]
    batch = Batch(1, Pages(4, tables[0], tables[1:], num_blocks=9))
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    batch.join(Chunk(0, tokens, 0, num_drafts=3, draft_parents=draft_parents))
    return batch, model.forward(batch)


def logits_behind_a_tree(model):
    batch, _ = drafted(model, (5, 5, 6))
    batch.pages.moves = moves_along([7], batch.chunks[0], batch.pages)
    batch.chunks, batch.logit_slots = [Chunk(0, [10], 7)], batch.slots
    return model.forward(batch).logits[0]


def test_what_is_accepted_of_a_tree_is_what_a_row_goes_on_from():
    model = tiny_model()
    alone = scores_of(tiny_model(), [1, 2, 3, 4, 5, 6, 8, 10])[-1]
    assert (logits_behind_a_tree(model) == alone).all()


@pytest.mark.parametrize("position", [7, 8, 9])
def test_a_row_of_recurrent_layers_goes_on_before_its_drafts(position):
    model = tiny_model(**KINDS["qwen3-next"])
    assert model.recomputes_drafts
    assert not tiny_model().recomputes_drafts
    batch, _ = drafted(model)
    batch.chunks = [Chunk(0, [7, 8, 9, 10][position - 6 :], position)]
    with pytest.raises(InvariantError, match=f"position {position}, and states after "):
        model.forward(batch)


def test_recurrent_layers_verify_no_trees_and_draft_nothing(monkeypatch):
    model = tiny_model(**KINDS["qwen3-next"])
    assert not can_verify_trees(model)
    assert can_verify_trees(tiny_model())
    with pytest.raises(InvariantError, match="drafts in a tree, which tiny does not verify"):
        drafted(model, (5, 5, 6))
    # Its states would be those after its own drafts.
    model = tiny_model(**KINDS["qwen3-next"])
    monkeypatch.setattr(drafting, "_load", lambda *_: model)
    with pytest.raises(BatchdecodeError, match="--draft simulated has recurrent layers"):
        Engine(model, 2, speculation=SpeculationSettings(draft="simulated"))


def test_rows_reach_as_far_into_the_context_as_their_longest_way_alone():
    for num_tokens, fails in ((8, False), (7, True)):
        model = tiny_model(max_position_embeddings=num_tokens)
        assert bool(drafted(model, (5, 5, 6))[1].failed) == fails
    model, reference = tiny_model(max_position_embeddings=8), tiny_model()
    model.allocate_pages(2, 4, 8)
    batch = Batch(2, Pages(8, [[0, 1], [2]], num_blocks=4))
    batch.join(Chunk(0, [5] * 9, 0, num_drafts=2))
    batch.join(Chunk(1, [1, 2, 3, 4], 0, num_drafts=2))
    output = model.forward(batch)
    assert [*output.failed] == [0]
    alone = scores_of(reference, [1, 2, 3, 4])[1:]
    assert output.tokens[1] == alone[0].argmax()
    assert output.draft_logits.shape == (4, 256)
    assert (output.draft_logits[2:] == alone[1:]).all()
    batch.leave(1)
    assert model.forward(batch).draft_logits.shape == (2, 256)
