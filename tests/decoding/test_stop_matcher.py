"""The table of all rows does what the definition says of each, whatever else is in it."""

import random
from copy import deepcopy
from unittest.mock import patch

import numpy as np
import pytest
from examples import mostly_heavy
from random_automata import IDS, LONE, PIECES, random_automaton
from reference import ENGLISH
from slow_automaton import SlowReader

from batcher.decoding import stop_matcher as matcher
from batcher.decoding.stop_matcher import StopMatcher
from batcher.decoding.stops import StopProgress, stop_automaton
from batcher.models.tokenizers import ByteTokenizer
from batcher.request import Request

NUM_SLOTS = 4
BYTES = ByteTokenizer()


class Rows:
    """A table, and beside it each row read by the slow reader; every answer is compared."""

    def __init__(self, seed, vocab_size):
        self.draw = random.Random(seed)
        self.table = StopMatcher(NUM_SLOTS, vocab_size, PIECES)
        self.rows = [None] * NUM_SLOTS
        self.ids = [i for i in IDS + LONE if vocab_size is None or i < vocab_size]
        self.automata = [random_automaton(self.draw, self.draw.choice([1, 2, 3])) for _ in range(4)]

    def open(self, slot):
        if self.draw.random() < 0.5:
            self.automata[slot] = random_automaton(self.draw, self.draw.choice([1, 2, 3]))
        automaton, skip = self.draw.choice(self.automata), self.draw.choice([0, 0, 0, 1, 3])
        min_tokens = self.draw.choice([0, 0, 0, 2, 4])
        self.rows[slot] = SlowReader(automaton, PIECES, skip, min_tokens)
        first = automaton.endless if min_tokens > 1 else automaton
        self.table.open(slot, first, StopProgress(skip=skip))

    def close(self, slot):
        self.rows[slot] = None
        self.table.close(slot)

    def fork(self, source):
        target = self.draw.randrange(NUM_SLOTS)
        self.table.fork(source, target)
        self.rows[target] = deepcopy(self.rows[source])

    def run_of(self, slot):
        """Return tokens for one row alone, and how many it reads, up to one that would end it.

        They are fewer if the row has to read more by then.
        """
        row, num_read = self.rows[slot], 0
        tokens = self.draw.choices(self.ids, k=self.draw.randrange(5))
        while row is not None and num_read < len(tokens) and not row.has_ended:
            ahead = deepcopy(row)
            ahead.read(tokens[num_read])
            if num_read == 0:
                assert self.table.would_end(slot, tokens[0]) == ahead.has_ended
            if ahead.has_ended:
                break
            row, num_read = ahead, num_read + 1
            if len(row.tokens) + 1 == row.min_tokens:
                del tokens[num_read:]
        self.rows[slot] = row
        return tokens, num_read

    def read_some(self, slot):
        """Let one row alone read several tokens."""
        tokens, num_read = self.run_of(slot)
        row = self.rows[slot]
        if row is not None and not row.has_ended:
            assert self.table.advance_row(slot, tokens) == num_read
            self.stop_going_on(slot)

    def stop_going_on(self, slot):
        """Watch for the end of a row whose next token may be the last."""
        row = self.rows[slot]
        if row is not None and len(row.tokens) + 1 == row.min_tokens:
            self.table.switch(slot, row.automaton)

    def read_all(self):
        tokens = self.draw.choices(self.ids, k=NUM_SLOTS)
        ended = self.table.advance(np.array(tokens))
        assert ended == [slot for slot in range(NUM_SLOTS) if self.has_read(slot, tokens[slot])]

    def has_read(self, slot, token_id):
        """Let the slow reader read it too; return whether its row has just ended."""
        row = self.rows[slot]
        if row is None or row.has_ended:
            return False
        row.read(token_id)
        if not row.has_ended:
            self.stop_going_on(slot)
        return row.has_ended


@pytest.mark.parametrize("max_entries", [0, 1 << 12])
@pytest.mark.parametrize("vocab_size", [None, 15])
@pytest.mark.parametrize("seeds", mostly_heavy([range(15), range(15, 60)], range(15)))
def test_rows_that_come_and_go_end_when_the_definition_says(vocab_size, max_entries, seeds):
    for seed in seeds:
        with patch.object(matcher, "MAX_ENTRIES", max_entries):
            rows = Rows(seed, vocab_size)
            for _ in range(60):
                slot = rows.draw.randrange(NUM_SLOTS)
                act = rows.draw.random()
                if rows.rows[slot] is None:
                    rows.open(slot)
                elif act < 0.1 or rows.rows[slot].has_ended:
                    rows.close(slot)
                elif act < 0.2:
                    rows.fork(slot)
                elif act < 0.4:
                    rows.read_some(slot)
                else:
                    rows.read_all()


def stops_at(**fields):
    return stop_automaton(Request(prompt="", **fields), ())


@pytest.mark.parametrize("vocab_size", [None, 256, 5000])
@pytest.mark.parametrize("stops", [{"stop": "abc"}, {"stop_sequence": [97, 98, 99]}])
def test_a_row_keeps_its_place_when_the_table_is_cleared_under_it(vocab_size, stops):
    with patch.object(matcher, "MAX_ENTRIES", 0):
        table = StopMatcher(2, vocab_size, BYTES)
    table.open(0, stops_at(**stops))
    assert table.advance(np.array([97, 0])) == []
    assert table.advance(np.array([98, 0])) == []
    for number in range(50):
        table.close(1)
        table.open(1, stops_at(stop=f"{number}", stop_sequence=[4000 + number, number]))
    assert len(table._places) < 10
    assert table.advance(np.array([99, 0])) == [0]


def test_a_long_stream_of_distinct_stops_takes_no_more_room():
    with patch.object(matcher, "MAX_ENTRIES", 1 << 16):
        table = StopMatcher(4, 512, ENGLISH.tokenizer)
    size = table._table.size
    for number in range(2000):
        slot = number % 4
        table.close(slot)
        table.open(slot, stops_at(stop_sequence=[number % 500, number % 7, number % 11]))
    assert table._table.size == size <= 1 << 16
    assert table._reader_of.cache_info().currsize <= len(table._table)


def test_long_stops_of_both_kinds_take_room_for_each_and_not_for_every_pair():
    table = StopMatcher(1, 512, ENGLISH.tokenizer)
    [letter] = ENGLISH.tokenizer.encode("a")
    table.open(0, stops_at(stop_sequence=[500] * 400, stop="a" * 400))
    for token_id in [500, letter, *[500] * 399, *[letter] * 400]:
        assert table.watched
        ended = table.advance(np.array([token_id]))
    assert ended == [0]
    assert len(table._places) < 900


@pytest.mark.parametrize("vocab_size", [10**8, 2**31 - 1])
def test_a_vocabulary_far_beyond_the_tokenizer_takes_no_memory(vocab_size):
    table = StopMatcher(4, vocab_size, BYTES)
    table.open(1, stop_automaton(Request(prompt="", stop_token=10**7, stop="ab"), ()))
    assert table.advance(np.array([0, 10**7 - 1, 0, 0])) == []
    assert table.advance(np.array([0, 97, 0, 0])) == []
    assert table.advance(np.array([0, 10**7, 0, 0])) == [1]
