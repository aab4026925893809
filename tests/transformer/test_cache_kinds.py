"""Rows join, are added to, leave, are taken out and put back in any order, in every kind of cache.

What a row comes to is that of its tokens alone, in one go.
"""

from random import Random

import numpy as np
import pytest
from examples import mostly_heavy
from tiny import KINDS, tiny_config, tiny_model

from batcher.models.base import Batch, Chunk, Pages
from batcher.models.transformer import TransformerModel
from batcher.transformer.config import DeltaNetSettings
from batcher.transformer.kv_store import OWN_BLOCK_SIZE, cache_groups

NUM_SLOTS, BLOCK_SIZE = 5, 4
CACHES = ["plain", "window", "gemma3", "qwen3-next"]


class Row:
    """The tokens of a row, and where it keeps what it has computed of them."""

    def __init__(self, tokens: list[int], num_groups: int) -> None:
        self.tokens, self.num_computed = tokens, 0
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]


class Rows:
    """Rows in slots of a model, and others that were taken out."""

    def __init__(self, model: TransformerModel, seed: int, *, is_paged: bool) -> None:
        self.model, self.random = model, Random(seed)
        self.rows: dict[int, Row] = {}
        self.taken_out: list[Row] = []
        self.pages = None
        self.num_groups = len(model.cache_windows)
        if is_paged:
            tables = [[[] for _ in range(NUM_SLOTS)] for _ in range(self.num_groups)]
            self.pages = Pages(BLOCK_SIZE, tables[0], tables[1:])
            model.allocate_pages(NUM_SLOTS, None, BLOCK_SIZE)
        else:
            model.allocate(NUM_SLOTS)
        self.free: list[int] = []
        self.num_checked = 0

    def draw(self, most: int) -> list[int]:
        return [self.random.randrange(256) for _ in range(self.random.randint(1, most))]

    def act(self) -> None:
        self.batch = Batch(NUM_SLOTS, self.pages)
        for slot in [*self.rows]:
            self.random.choice([self.add_to, self.decode, self.decode, self.decode, self.leave])(
                slot
            )
        free = [slot for slot in range(NUM_SLOTS) if slot not in self.rows]
        for slot in self.random.sample(free, self.random.randint(0, len(free))):
            is_back = self.taken_out and self.random.random() < 0.6
            self.rows[slot] = self.put_back() if is_back else self.new_row()
            self.add_to(slot)
        if self.batch.chunks or self.batch.slots.size:
            self.step()

    def new_row(self) -> Row:
        return Row(self.draw(60), self.num_groups)

    def put_back(self) -> Row:
        return self.taken_out.pop(self.random.randrange(len(self.taken_out)))

    def decode(self, slot: int) -> None:
        row = self.rows[slot]
        if len(row.tokens) - row.num_computed > 1:
            self.add_to(slot)
            return
        row.tokens += [self.random.randrange(256)] * (row.num_computed == len(row.tokens))
        self.batch.enter(slot)
        self.batch.tokens[slot] = row.tokens[-1]
        if self.pages is not None:
            self.pages.moved[slot] = row.num_computed
        self.hold(slot, len(row.tokens))

    def add_to(self, slot: int) -> None:
        row = self.rows[slot]
        if row.num_computed == len(row.tokens):
            row.tokens += self.draw(30)
        start, end = row.num_computed, len(row.tokens)
        stop = self.random.choice([end, self.random.randint(start + 1, end)])
        chunk = Chunk(slot, row.tokens[start:stop], start)
        (self.batch.join if stop == end else self.batch.add_part)(chunk)
        self.hold(slot, stop)

    def leave(self, slot: int) -> None:
        row = self.rows.pop(slot)
        self.model.release(slot)
        if self.random.random() < 0.5:
            for table in row.tables:
                self.free += [block for block in table if block >= 0]
            return
        if self.pages is None:
            row.num_computed = 0
        self.taken_out.append(row)

    def hold(self, slot: int, num_tokens: int) -> None:
        """Let a row have blocks for so many tokens; perhaps free what is behind its windows."""
        row = self.rows[slot]
        if self.pages is not None:
            tables = [self.pages.tables, *self.pages.group_tables]
            for shown, table, window in zip(
                tables, row.tables, self.model.cache_windows, strict=True
            ):
                while len(table) * BLOCK_SIZE < num_tokens:
                    if not self.free:
                        self.free = [*range(self.pages.num_blocks, self.pages.num_blocks + 9)]
                        self.random.shuffle(self.free)
                        self.pages.num_blocks += 9
                    table.append(self.free.pop())
                if window is not None and self.random.random() < 0.7:
                    num_passed = max(row.num_computed - window + 1, 0) // BLOCK_SIZE
                    self.free += [block for block in table[:num_passed] if block >= 0]
                    table[:num_passed] = [-1] * num_passed
                shown[slot] = table
        row.num_computed = num_tokens

    def step(self) -> None:
        self.batch.logit_slots = self.batch.slots
        output = self.model.forward(self.batch)
        assert not output.failed
        for number, slot in enumerate(self.batch.slots.tolist()):
            assert (output.logits[number] == alone(self.model, self.rows[slot].tokens)).all()
            self.num_checked += 1
        if self.pages is not None:
            self.pages.moved = {}


def alone(model: TransformerModel, tokens: list[int]) -> np.ndarray:
    twin = model.twin()
    twin.allocate(1)
    batch = Batch(1)
    batch.join(Chunk(0, tokens, 0))
    batch.logit_slots = batch.slots
    return twin.forward(batch).logits[0].copy()


@pytest.mark.parametrize(
    "is_paged", [pytest.param(False, marks=pytest.mark.heavy), True], ids=["slots", "pages"]
)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("seed", mostly_heavy(range(3), 0))
def test_rows_come_and_go_in_any_order(kind: str, seed: int, *, is_paged: bool) -> None:
    model = tiny_model(**KINDS[kind])
    rows = Rows(model, seed, is_paged=is_paged)
    for _ in range(16):
        rows.act()
    assert rows.num_checked > 10
    assert max(len(row.tokens) for row in [*rows.rows.values(), *rows.taken_out]) > 40


def test_blocks_of_slots_behind_a_window_are_used_again() -> None:
    model = tiny_model(**KINDS["gemma3"])
    model.allocate(1)
    for start in range(0, 320, 40):
        batch = Batch(1)
        batch.join(Chunk(0, [5] * 40, start))
        model.forward(batch)
    # a full group has 5 blocks of 64 by then, one with a window of 20 two at most
    assert OWN_BLOCK_SIZE == 64
    assert model._own.num_blocks == 7


def test_groups_have_as_many_layers_as_the_fewest_that_read_the_same() -> None:
    gemma = tiny_config(num_layers=26, sliding_window=20, full_layers=(5, 11, 17, 23))
    assert [(len(group.layers), group.window) for group in cache_groups(gemma)] == [
        (4, None),
        *[(4, 20)] * 5,
        (2, 20),
    ]
    mistral = tiny_config(num_layers=8, sliding_window=20)
    assert [(len(group.layers), group.window) for group in cache_groups(mistral)] == [(8, 20)]
    roomy = tiny_config(num_layers=8, sliding_window=512)  # of a context of 512
    assert [(len(group.layers), group.window) for group in cache_groups(roomy)] == [(8, None)]
    delta_net = DeltaNetSettings(
        layers=(0, 1, 2, 4, 5, 6),
        num_key_heads=2,
        num_value_heads=6,
        key_head_dim=12,
        value_head_dim=8,
        kernel_size=4,
    )
    hybrid = cache_groups(tiny_config(num_layers=8, delta_net=delta_net))
    assert [(group.layers, group.window) for group in hybrid] == [
        ((3, 7), None),
        (delta_net.layers, 2),
    ]
