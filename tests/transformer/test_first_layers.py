"""The first layers of a model draft in its cells, as if they had computed all of the row."""

from functools import partial
from itertools import count
from random import Random

import numpy as np
import pytest
from examples import mostly_heavy
from kinds import KINDS, QWEN3_NEXT
from rank_threads import RankThreads, ThreadedDecoder
from test_drafts import parts_of
from tiny import tiny_model
from tiny_ranks import make_tiny

from batcher import BatchdecodeError, ByteTokenizer, Engine, ModelOutput, Request
from batcher.errors import InvariantError
from batcher.models.base import Batch, Chunk, Pages
from batcher.models.first_layers import FirstLayersModel
from batcher.models.transformer import TransformerModel
from batcher.settings import SchedulingSettings
from batcher.speculation.settings import SpeculationSettings
from batcher.transformer.config import DeltaNetSettings

NUM_ROWS, NUM_LAYERS, BLOCK_SIZE, NUM_BLOCKS, NUM_ALL = 3, 4, 4, 8, 99
LATE_NET = DeltaNetSettings(
    layers=(2,),
    num_key_heads=2,
    num_value_heads=6,
    key_head_dim=12,
    value_head_dim=8,
    kernel_size=4,
)
DEEP = {
    **{name: KINDS[name] | {"num_layers": NUM_LAYERS} for name in ("plain", "int8", "gemma3")},
    "recurrent later": {**QWEN3_NEXT, "num_layers": NUM_LAYERS, "delta_net": LATE_NET},
}


class Pair:
    """Rows of a model in pages, for which its first layers draft."""

    def __init__(self, model: TransformerModel, num_layers: int) -> None:
        self.random = Random(num_layers)
        self.model, self.draft = model, FirstLayersModel(model, num_layers)
        num_groups = len(model.cache_windows)
        blocks = iter(self.random.sample(range(NUM_ALL), NUM_BLOCKS * NUM_ROWS * num_groups))
        tables = [
            [[next(blocks) for _ in range(NUM_BLOCKS)] for _ in range(NUM_ROWS)]
            for _ in range(num_groups)
        ]
        self.pages = Pages(BLOCK_SIZE, tables[0], tables[1:], num_blocks=NUM_ALL)
        self.rows = [self.draw(9 + slot) for slot in range(NUM_ROWS)]
        self.batch = Batch(NUM_ROWS, self.pages)
        self.batch.logit_slots = np.arange(NUM_ROWS)
        model.allocate_pages(NUM_ROWS, NUM_ALL, BLOCK_SIZE)
        for slot, row in enumerate(self.rows):
            self.batch.join(Chunk(slot, row, 0))
        model.forward(self.batch)
        self.rows = [row + self.draw(1) for row in self.rows]

    def draw(self, num_tokens: int) -> list[int]:
        return [self.random.randrange(256) for _ in range(num_tokens)]

    def spoil(self) -> None:
        """Let all that is not computed of the rows hold what no sum gets rid of."""
        known = [
            self.model.store.cells(tables[slot], BLOCK_SIZE, len(row) - 1)
            for tables in (self.pages.tables, *self.pages.group_tables)
            for slot, row in enumerate(self.rows)
        ]
        every = self.model.store.cells([*range(NUM_ALL)], BLOCK_SIZE, NUM_ALL * BLOCK_SIZE)
        cells = np.setdiff1d(every, np.concatenate(known))
        for store in parts_of(self.model.store):
            for layer in (*store.keys, *store.values):
                layer[cells] = np.nan

    def drafted(self, num_drafts: int) -> list[np.ndarray]:
        """Return the logits [rows, vocab] after each row and some drafts of it."""
        self.drafts = [self.draw(num_drafts) for _ in self.rows]
        logits = []
        self.batch.chunks = []
        for number in range(num_drafts):
            tokens = [
                [row[-1], *draft][number] for row, draft in zip(self.rows, self.drafts, strict=True)
            ]
            self.batch.tokens = np.array(tokens)
            self.pages.moved = {slot: len(row) - 1 + number for slot, row in enumerate(self.rows)}
            logits.append(self.draft.forward(self.batch).logits.copy())
        return logits

    def verified(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the logits after each row [rows, vocab], and after all drafts."""
        self.pages.moved = {}
        self.batch.chunks = [
            Chunk(slot, [row[-1], *draft], len(row) - 1, num_drafts=len(draft))
            for slot, (row, draft) in enumerate(zip(self.rows, self.drafts, strict=True))
        ]
        output = self.model.forward(self.batch)
        return output.logits, output.draft_logits

    def kept(self) -> list[np.ndarray]:
        """Return a copy of all keys and values."""
        return [
            layer.copy()
            for store in parts_of(self.model.store)
            for layer in (*store.keys, *store.values)
        ]


def alone(model: TransformerModel, tokens: list[int], num_layers: int | None = None) -> np.ndarray:
    """Return the logits after each of some tokens, which so many layers compute in one go."""
    transformer, layers = model.decoder, model.decoder._layers
    transformer._layers = layers[:num_layers]
    model.allocate(1)
    batch = Batch(1)
    batch.join(Chunk(0, tokens, 0, is_scored=True))
    logits = np.concatenate([*model.forward(batch).chunk_logits[0]])
    transformer._layers = layers
    return logits


def check(model: TransformerModel, reference: TransformerModel, num_layers: int) -> None:
    pair = Pair(model, num_layers)
    has_states = model.recomputes_drafts
    for _ in range(3):
        pair.spoil()
        found = pair.drafted(3)
        kept = pair.kept()
        logits, draft_logits = pair.verified()
        for before, after in zip(kept, pair.kept(), strict=True):
            is_computed = ~np.isnan(before)
            assert (before[is_computed] == after[is_computed]).all()
        for slot, (row, draft) in enumerate(zip(pair.rows, pair.drafts, strict=True)):
            expected = alone(reference, row + draft[:-1], num_layers)[len(row) - 1 :]
            assert (np.array([each[slot] for each in found]) == expected).all()
            whole = alone(reference, row + draft)[len(row) - 1 :]
            assert (logits[slot] == whole[0]).all()
            assert (draft_logits[3 * slot : 3 * slot + 3] == whole[1:]).all()
            num_accepted = 0 if has_states else pair.random.randint(0, 3)
            row.extend(draft[:num_accepted] + pair.draw(1))


@pytest.mark.parametrize("num_layers", mostly_heavy([1, 2, 3], 2))
@pytest.mark.parametrize("kind", DEEP)
def test_first_layers_draft_in_the_cells_of_the_whole(kind: str, num_layers: int) -> None:
    if kind == "recurrent later" and num_layers > 2:
        return
    check(tiny_model(**DEEP[kind]), tiny_model(**DEEP[kind]), num_layers)


def test_first_layers_of_several_ranks_draft() -> None:
    with RankThreads(2) as ranks:
        decoder = ThreadedDecoder(ranks, partial(make_tiny, DEEP["gemma3"]))
        model = TransformerModel(decoder, ByteTokenizer(), "tiny", {})
        check(model, tiny_model(**DEEP["gemma3"]), 2)


def test_first_layers_follow_the_model_when_it_is_allocated_anew() -> None:
    pair = Pair(tiny_model(num_layers=2), 1)
    first = pair.drafted(1)
    draft, other = pair.draft, Pair(pair.model, 1)
    other.draft = draft
    assert (other.drafted(1)[0] == first[0]).all()
    assert draft.store is pair.model.store
    assert draft.twin().store is pair.model.store


def test_blocks_are_copied_for_both() -> None:
    pair = Pair(tiny_model(num_layers=2), 1)
    pair.drafted(1)
    source, target = pair.pages.tables[0][0], NUM_ALL - 1
    pair.pages.copies = [(source, target)]
    pair.pages.moved = {}
    pair.drafted(1)
    for layer in pair.kept():
        cells = [layer[2 + block * BLOCK_SIZE :][:BLOCK_SIZE] for block in (source, target)]
        assert (cells[0] == cells[1]).all()


@pytest.mark.parametrize(
    ("kind", "num_layers", "message"),
    [
        ("plain", 0, "layers:0: tiny has 4 layers, of which 1 to 3 can draft"),
        ("plain", 4, "layers:4: tiny has 4 layers, of which 1 to 3 can draft"),
        ("recurrent later", 3, "layers:3: layer 2 of tiny is recurrent"),
    ],
)
def test_layers_that_cannot_draft_are_refused(kind: str, num_layers: int, message: str) -> None:
    with pytest.raises(BatchdecodeError, match=f"^{message}"):
        FirstLayersModel(tiny_model(**DEEP[kind]), num_layers)
    with pytest.raises(BatchdecodeError, match="of which none can draft"):
        FirstLayersModel(tiny_model(num_layers=1), 1)


def test_first_layers_have_no_cache_by_slot() -> None:
    draft = FirstLayersModel(tiny_model(), 1)
    batch = Batch(1)
    batch.join(Chunk(0, [1], 0))
    with pytest.raises(InvariantError, match="no cache of their own"):
        draft.forward(batch)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "shape", [{"draft_tree": "3x3"}, pytest.param({"draft_tokens": 3}, marks=pytest.mark.heavy)]
)
def test_layers_that_fail_leave_every_row_what_was_to_be_copied_or_moved(
    shape: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        Request(id="beams", prompt=[40] * 5, max_tokens=24, num_beams=2, ignore_eos=True),
        *(Request(id=str(n), prompt=[n] * 5, max_tokens=24, ignore_eos=True) for n in range(3)),
    ]
    model = tiny_model(num_layers=2)

    def tokens(speculation: SpeculationSettings | None) -> dict[str, list[int]]:
        settings = SchedulingSettings(block_size=4, kv_blocks=60)
        engine = Engine(model.twin(), 5, settings=settings, speculation=speculation)
        for request in requests:
            engine.add(request)
        found = {}
        while engine.has_work:
            found |= {result.id: result.tokens for result in engine.step().results}
        return found

    expected = tokens(None)
    whole = FirstLayersModel.forward
    for number in range(0, 40, 2):
        calls = count()

        def failing(self: FirstLayersModel, batch: Batch) -> ModelOutput:
            if next(calls) == number and batch.chunks:  # noqa: B023 - it is called in this turn
                raise MemoryError
            return whole(self, batch)

        monkeypatch.setattr(FirstLayersModel, "forward", failing)
        assert tokens(SpeculationSettings(draft="layers:1", **shape)) == expected, number
