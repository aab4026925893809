"""The stop conditions of all running rows: an add, a gather and a compare a step for each kind.

Each StopSet in use has one automaton over token ids and one over text, in consecutive lines of a
table for either kind; a row's whole stop state is one number in each: where in the flattened table
the line of its state begins.
"""

from collections.abc import Callable

import numpy as np

from batcher.decoding.automaton import MATCHED, TokenMatrix, aho_corasick, text_automaton
from batcher.decoding.stops import StopSet
from batcher.models.base import IntArray, Tokenizer

FREE_LINE = 0  # the state of rows that cannot stop: every token leads back to it
SINK_LINE = 1  # the state of rows that have matched
FIRST_LINE = 2
MIN_LINES = 64
MAX_PLAIN_WIDTH = 1024  # a larger vocabulary has columns only for the ids that occur in stops


class StopTable:
    """Tells which rows have just completed a stop.

    vocab_size: None for a model that takes any id.
    """

    def __init__(self, num_slots: int, vocab_size: int | None, tokenizer: Tokenizer) -> None:
        self._matrix = TokenMatrix(tokenizer.token_bytes)
        self._has_plain_ids = vocab_size is not None and vocab_size <= MAX_PLAIN_WIDTH
        self._has_plain_text = vocab_size == self._matrix.num_tokens
        self._known_ids: IntArray = np.zeros(0, np.int64)  # ascending; column i is for the i-th
        width = vocab_size if self._has_plain_ids and vocab_size is not None else 1
        self._ids = AutomatonTable(num_slots, width, self._id_automaton)
        self._texts = AutomatonTable(num_slots, self._matrix.num_tokens + 1, self._text_automaton)

    def open(self, slot: int, stops: StopSet) -> None:
        """Let `slot` begin a new row that ends at `stops`."""
        if stops.has_ids:
            if not self._has_plain_ids:
                self._make_known(stops)
            self._ids.open(slot, stops)
        if stops.texts:
            self._texts.open(slot, stops)

    def close(self, slot: int) -> None:
        """Forget the row in `slot`."""
        self._ids.close(slot)
        if self._texts.num_open:
            self._texts.close(slot)

    def advance(self, tokens: IntArray) -> list[int]:
        """Let every row read its token, tokens: [num_slots]; return the slots that have matched."""
        matched: list[int] = []
        if self._ids.num_open:
            columns = tokens if self._has_plain_ids else self._columns_of(tokens)
            matched += self._ids.advance(columns)
        if self._texts.num_open:
            if not self._has_plain_text:
                tokens = np.minimum(tokens, self._matrix.num_tokens)
            matched += self._texts.advance(tokens)
        return matched

    def _id_automaton(self, stops: StopSet) -> IntArray:
        patterns = stops.id_patterns
        if not self._has_plain_ids:
            columns = self._known_ids.searchsorted
            patterns = [tuple(columns(np.array(ids)).tolist()) for ids in patterns]
        return aho_corasick(patterns, self._ids.width)

    def _text_automaton(self, stops: StopSet) -> IntArray:
        return text_automaton(stops.text_patterns, self._matrix)

    def _columns_of(self, tokens: IntArray) -> IntArray:
        """Return the column of each token; the last one is for ids that are not known."""
        num_known = len(self._known_ids)
        columns = np.minimum(self._known_ids.searchsorted(tokens), num_known - 1)
        return np.where(self._known_ids[columns] == tokens, columns, num_known)

    def _make_known(self, stops: StopSet) -> None:
        """Give every id of `stops` a column; ids of sets without a running row may lose theirs."""
        ids = {token_id for pattern in stops.id_patterns for token_id in pattern}
        if ids.issubset(self._known_ids.tolist()):
            return
        for live in self._ids.live_sets():
            ids.update(token_id for pattern in live.id_patterns for token_id in pattern)
        self._known_ids = np.array(sorted(ids))
        self._ids.rebuild(len(ids) + 1)


class AutomatonTable:
    """The automata of one kind, stacked, and the state of every row in its own.

    width: how many columns an automaton has.  num_open: how many rows have one.
    """

    def __init__(self, num_slots: int, width: int, build: Callable[[StopSet], IntArray]) -> None:
        self.num_open = 0
        self._build = build
        self._states = np.zeros(num_slots, np.int64)
        self._index = np.zeros(num_slots, np.int64)
        self._matched = np.zeros(num_slots, np.bool_)
        self._sets: list[StopSet | None] = [None] * num_slots  # [num_slots] what each row stops at
        self._lines: dict[StopSet, range] = {}  # every set in the table -> its lines
        self._clear(MIN_LINES, width)

    def open(self, slot: int, stops: StopSet) -> None:
        """Let `slot` begin a new row with the automaton of `stops`."""
        lines = self._lines.get(stops) or self._insert(stops)
        self._sets[slot] = stops
        self._states[slot] = lines.start * self.width
        self.num_open += 1

    def close(self, slot: int) -> None:
        """Forget the row in `slot`, if it has an automaton."""
        if self._sets[slot] is not None:
            self._sets[slot] = None
            self._states[slot] = FREE_LINE
            self.num_open -= 1

    def advance(self, columns: IntArray) -> list[int]:
        """Move every row on by its column, columns: [num_slots]; return the slots that matched."""
        np.add(self._states, columns, self._index)
        self._flat.take(self._index, None, self._states, "clip")
        np.equal(self._states, self._sink, self._matched)
        if not np.count_nonzero(self._matched):
            return []
        return self._matched.nonzero()[0].tolist()

    def live_sets(self) -> list[StopSet]:
        """Return the sets of running rows, each once, in slot order."""
        return list(dict.fromkeys(stops for stops in self._sets if stops is not None))

    def rebuild(self, width: int) -> None:
        """Make every automaton anew, with `width` columns that may mean something else."""
        within = self._states_within()
        live = self.live_sets()
        self._clear(len(self._table), width)
        self._lay({stops: self._build(stops) for stops in live}, within)

    def _insert(self, stops: StopSet) -> range:
        """Put `stops` into the table; if it is full, sets without a running row leave it first."""
        automaton = self._build(stops)
        if self._next_line + len(automaton) > len(self._table):
            within = self._states_within()
            live = {live: self._automaton_of(live) for live in self.live_sets()}
            in_use = sum(map(len, live.values()))
            self._clear(max(MIN_LINES, 2 * (FIRST_LINE + in_use + len(automaton))), self.width)
            self._lay(live, within)
        return self._write(stops, automaton)

    def _clear(self, num_lines: int, width: int) -> None:
        self.width = width
        self._table = np.zeros((num_lines, width), np.int64)
        self._table[SINK_LINE] = SINK_LINE * width
        self._flat = self._table.reshape(-1)
        self._sink = np.full_like(self._states, SINK_LINE * width)  # numpy is slower with a scalar
        self._next_line = FIRST_LINE
        self._lines.clear()

    def _lay(
        self, automata: dict[StopSet, IntArray], within: list[tuple[int, StopSet, int]]
    ) -> None:
        """Fill a table that was cleared, and put the running rows back into their states."""
        for stops, automaton in automata.items():
            self._write(stops, automaton)
        for slot, stops, line in within:
            self._states[slot] = (self._lines[stops].start + line) * self.width

    def _write(self, stops: StopSet, automaton: IntArray) -> range:
        lines = range(self._next_line, self._next_line + len(automaton))
        targets = np.where(automaton == MATCHED, SINK_LINE, lines.start + automaton)
        self._table[lines.start : lines.stop] = targets * self.width
        self._next_line, self._lines[stops] = lines.stop, lines
        return lines

    def _automaton_of(self, stops: StopSet) -> IntArray:
        """Return the automaton of a set in the table, as `_build` gave it."""
        lines = self._lines[stops]
        targets = self._table[lines.start : lines.stop] // self.width
        return np.where(targets == SINK_LINE, MATCHED, targets - lines.start)

    def _states_within(self) -> list[tuple[int, StopSet, int]]:
        """Return (slot, its set, the line of its state counted from the set's first) of rows."""
        return [
            (slot, stops, int(self._states[slot]) // self.width - self._lines[stops].start)
            for slot, stops in enumerate(self._sets)
            if stops is not None
        ]
