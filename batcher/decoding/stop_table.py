"""The stop conditions of all running rows in one table: one add, one gather and one compare a step.

Each StopSet in use has its automaton in consecutive lines of the table, and a row's whole stop
state is one
number: where in the flattened table the line of its state begins.
"""

import numpy as np

from batcher.decoding.automaton import MATCHED, TokenMatrix, build
from batcher.decoding.stops import StopSet
from batcher.models.base import IntArray, Tokenizer

FREE_LINE = 0  # the state of rows that cannot stop: every token leads back to it
SINK_LINE = 1  # the state of rows that have matched
FIRST_LINE = 2
MIN_LINES = 64


class StopTable:
    """Tells which rows have just completed a stop.

    vocab_size: None for a model that takes any id; the table then is as wide as the stops make it
    and its last column stands for all larger ids.
    """

    def __init__(self, num_slots: int, vocab_size: int | None, tokenizer: Tokenizer) -> None:
        self._matched = np.zeros(num_slots, np.bool_)
        self._states = np.zeros(num_slots, np.int64)
        self._index = np.zeros(num_slots, np.int64)
        self._sets: list[StopSet | None] = [None] * num_slots  # [num_slots] what each row stops at
        self._is_open = vocab_size is None
        self._matrix = TokenMatrix(tokenizer.token_bytes)
        self._lines: dict[StopSet, range] = {}  # every set in the table -> its lines
        self._width = vocab_size or 1
        self._lay(MIN_LINES, self._width)

    def open(self, slot: int, stops: StopSet) -> None:
        """Let `slot` begin a new row that ends at `stops`."""
        lines = self._lines.get(stops) or self._insert(stops)
        self._sets[slot] = stops
        self._states[slot] = lines.start * self._width

    def close(self, slot: int) -> None:
        """Forget the row in `slot`."""
        self._sets[slot] = None
        self._states[slot] = FREE_LINE

    def advance(self, tokens: IntArray) -> int:
        """Let every row read its token, tokens: [num_slots]; return how many have matched."""
        if self._is_open:
            tokens = np.minimum(tokens, self._width - 1)
        np.add(self._states, tokens, self._index)
        self._flat.take(self._index, None, self._states, "clip")
        np.equal(self._states, self._sink, self._matched)
        return int(np.count_nonzero(self._matched))

    def matched_slots(self) -> list[int]:
        """Return the slots whose rows completed a stop in the last `advance`, ascending."""
        return self._matched.nonzero()[0].tolist()

    def _insert(self, stops: StopSet) -> range:
        """Put `stops` into the table.

        When it is full or too narrow, the sets without a running row leave it first.
        """
        width = max(self._width, self._width_for(stops)) if self._is_open else self._width
        automaton = build(stops, width, self._matrix)
        if width > self._width or self._next_line + len(automaton) > len(self._table):
            in_use = sum(len(self._lines[live]) for live in self._live_sets())
            self._lay(max(MIN_LINES, 2 * (FIRST_LINE + in_use + len(automaton))), width)
        return self._write(stops, automaton)

    def _lay(self, num_lines: int, width: int) -> None:
        """Start a new table with the sets of running rows alone; the rows keep their states."""
        live = self._live_sets()
        within = [  # (slot, its set, the line of its state counted from the set's first)
            (slot, stops, int(self._states[slot]) // self._width - self._lines[stops].start)
            for slot, stops in enumerate(self._sets)
            if stops is not None
        ]
        self._width = width
        self._table = np.zeros((num_lines, width), np.int64)
        self._table[SINK_LINE] = SINK_LINE * width
        self._flat = self._table.reshape(-1)
        self._sink = np.full_like(self._states, SINK_LINE * width)  # numpy is slower with a scalar
        self._next_line = FIRST_LINE
        self._lines.clear()
        for stops in live:
            self._write(stops, build(stops, width, self._matrix))
        for slot, stops, line in within:
            self._states[slot] = (self._lines[stops].start + line) * width

    def _write(self, stops: StopSet, automaton: IntArray) -> range:
        first = self._next_line
        self._next_line += len(automaton)
        self._lines[stops] = range(first, self._next_line)
        lines = np.where(automaton == MATCHED, SINK_LINE, first + automaton)
        self._table[first : self._next_line] = lines * self._width
        return self._lines[stops]

    def _live_sets(self) -> list[StopSet]:
        """Return the sets of running rows, each once, in slot order."""
        return list(dict.fromkeys(stops for stops in self._sets if stops is not None))

    def _width_for(self, stops: StopSet) -> int:
        """Return how many columns tell the tokens of `stops` apart, and one for all larger ids."""
        largest = max((max(ids) for ids in stops.id_patterns), default=-1)
        if stops.texts:
            largest = max(largest, self._matrix.num_tokens - 1)
        return largest + 2
