"""The automata of all running rows: an add, a gather and a compare a step.

A row's whole state is one number: where in the flattened table the line of its Progress begins.
Lines and entries are made when a row first needs them, by reader.py, and then serve every
row whose request has an equal automaton; so no product of states is ever laid out, as in the lazy
automata of Cox, "Regular Expression Matching in the Wild" (2010).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from batcher.decoding.stops.automaton import Progress, StopAutomaton
from batcher.decoding.stops.columns import TokenColumns
from batcher.decoding.stops.reader import StopReader
from batcher.models.base import IntArray, Tokenizer

FREE_LINE = 0  # of rows that have nothing to watch for: every token leads back to it
FIRST_LINE = 1
ENDED = -1  # the entry of a token that ends generation
UNKNOWN = -2  # that of a token which no row has had there yet
MAX_ENTRIES = 1 << 22  # of 8 bytes; memory is taken as lines are made
START = Progress()


class Place(NamedTuple):
    """Where a row stands in its automaton."""

    automaton: StopAutomaton
    progress: Progress


class StopMatcher:
    """Tells which rows have just come to the end of their automaton.

    vocab_size: None for a model that takes any id.
    """

    def __init__(self, num_slots: int, vocab_size: int | None, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._columns = TokenColumns(self._token_bytes, vocab_size)
        self._open_slots: set[int] = set()
        self._states = np.zeros(num_slots, np.int64)
        self._index = np.zeros(num_slots, np.int64)
        self._zeros = np.zeros(num_slots, np.int64)  # numpy is slower with a scalar
        self._is_special = np.zeros(num_slots, np.bool_)
        self._readers: dict[StopAutomaton, StopReader] = {}
        self._lines: dict[tuple[StopAutomaton, Progress], int] = {}
        self._starts: dict[StopAutomaton, int] = {}  # the states in which most rows begin
        self._places: list[tuple[StopReader, Progress]] = []  # what each line stands for
        self._lay_out()

    def open(self, slot: int, automaton: StopAutomaton, progress: Progress = START) -> None:
        """Let `slot` begin a new row, at `progress` in `automaton`."""
        state = self._starts.get(automaton) if progress is START else None
        if state is not None:
            self._open_slots.add(slot)
            self._states[slot] = state
            return
        if not automaton.has_exits:
            self.close(slot)
            return
        if not self._columns.has_asked_for(automaton):
            self._columns.ask_for([*self._live_automata(), automaton])
            self._clear()
        elif self._is_full:
            self._clear()
        self._open_slots.add(slot)
        self._states[slot] = state = self._line_of(automaton, progress) * self._width
        if progress is START:
            self._starts[automaton] = state

    def close(self, slot: int) -> None:
        """Forget the row in `slot`."""
        self._open_slots.discard(slot)
        self._states[slot] = FREE_LINE

    def suspend(self, slot: int) -> Place | None:
        """Forget the row in `slot`; return where it stands, None if it watches for nothing."""
        place = None
        if self._states.item(slot) != FREE_LINE:
            reader, progress = self._place_of(slot)
            place = Place(reader.automaton, progress)
        self.close(slot)
        return place

    def resume(self, slot: int, place: Place | None) -> None:
        """Let a row go on in `slot` from where it stood."""
        if place is None:
            self.close(slot)
        else:
            self.open(slot, place.automaton, place.progress)

    def fork(self, source: int, target: int) -> None:
        """Let `target`, whose row is forgotten, stand where `source` does."""
        self._states[target] = self._states[source]
        if source in self._open_slots:
            self._open_slots.add(target)
        else:
            self._open_slots.discard(target)

    def switch(self, slot: int, automaton: StopAutomaton) -> None:
        """Let the row in `slot` go on in `automaton`, the endless one of its own or the reverse."""
        if slot in self._open_slots:
            self.open(slot, automaton, self._place_of(slot)[1])

    def advance(self, tokens: IntArray) -> list[int]:
        """Let every row read its token, tokens: [num_slots]; return the slots that have ended."""
        if not self._open_slots:
            return []
        np.add(self._states, self._columns.of_all(tokens), self._index)
        self._flat.take(self._index, None, self._states, "clip")
        np.less(self._states, self._zeros, self._is_special)
        if not np.count_nonzero(self._is_special):
            return []
        slots = self._is_special.nonzero()[0]
        self._states[slots] = self._index[slots] // self._width * self._width
        read = zip(slots.tolist(), tokens[slots].tolist(), strict=True)
        return [slot for slot, token_id in read if self.advance_row(slot, token_id)]

    def advance_row(self, slot: int, token_id: int) -> bool:
        """Let the row in `slot` alone read a token; return whether it has ended."""
        state = self._state_after(slot, token_id)
        self._states[slot] = FREE_LINE if state == ENDED else state
        return state == ENDED

    def would_end(self, slot: int, token_id: int) -> bool:
        """Return whether the row in `slot` would end if it read `token_id` next."""
        return self._state_after(slot, token_id) == ENDED

    def _state_after(self, slot: int, token_id: int) -> int:
        """Return the state that a token leads the row in `slot` to, or ENDED."""
        if slot not in self._open_slots:
            return FREE_LINE
        state = self._states.item(slot)
        column = self._columns.of(token_id)
        after = self._flat.item(state + column)
        if after != UNKNOWN:
            return after
        if self._is_full:
            self._clear()
            state = self._states.item(slot)
        reader, progress = self._place_of(slot)
        then = reader.read(progress, token_id).progress
        after = ENDED if then is None else self._line_of(reader.automaton, then) * self._width
        self._flat[state + column] = after
        return after

    def _place_of(self, slot: int) -> tuple[StopReader, Progress]:
        return self._places[self._states.item(slot) // self._width - FIRST_LINE]

    def _live_automata(self) -> list[StopAutomaton]:
        places = map(self._place_of, self._rows())
        return list({reader.automaton: None for reader, _ in places})

    def _rows(self) -> list[int]:
        """Return the slots of rows that have not ended."""
        return [slot for slot in sorted(self._open_slots) if self._states.item(slot) != FREE_LINE]

    @property
    def _is_full(self) -> bool:
        """Whether a place may find no room for a line and for that of its root."""
        return FIRST_LINE + len(self._places) + 2 > len(self._table)

    def _lay_out(self) -> None:
        """Make an empty table, with room for twice as many lines as all rows can need at once."""
        self._width = self._columns.num_columns
        num_slots = len(self._states)
        num_lines = max(FIRST_LINE + 4 * num_slots, MAX_ENTRIES // self._width)
        self._table: IntArray = np.empty((num_lines, self._width), np.int64)
        self._table[FREE_LINE] = FREE_LINE
        self._flat = self._table.reshape(-1)

    def _clear(self) -> None:
        """Forget all lines but those in which rows stand."""
        standing = [(slot, *self._place_of(slot)) for slot in self._rows()]
        self._lines.clear()
        self._starts.clear()
        self._places.clear()
        self._readers.clear()
        if self._columns.num_columns != self._width:
            self._lay_out()
        for slot, reader, progress in standing:
            self._states[slot] = self._line_of(reader.automaton, progress) * self._width

    def _line_of(self, automaton: StopAutomaton, progress: Progress) -> int:
        """Return the line of a place, made if there is none yet."""
        line = self._lines.get((automaton, progress))
        return self._make_line(automaton, progress) if line is None else line

    def _make_line(self, automaton: StopAutomaton, progress: Progress) -> int:
        """Begin the line of a place: with what can be told of many tokens at once."""
        reader = self._readers.get(automaton)
        if reader is None:
            reader = self._readers[automaton] = StopReader(automaton, self._token_bytes)
        root = Progress(progress.state)
        entries: IntArray | int
        if progress.skip:
            entries = UNKNOWN
        elif progress == root:
            entries = (FIRST_LINE + len(self._places)) * self._width
        else:
            entries = self._table[self._line_of(automaton, root)]
        line = FIRST_LINE + len(self._places)
        self._places.append((reader, progress))
        self._lines[automaton, progress] = line
        self._table[line] = entries
        for columns in self._to_be_read(reader, progress):
            self._table[line, columns] = UNKNOWN
        return line

    def _to_be_read(self, reader: StopReader, progress: Progress) -> Iterator[IntArray | list[int]]:
        """Yield the columns of tokens that may not lead to where they lead from the root.

        For the root itself: those that may not lead back to it.
        """
        _, id_node, text_node, skip = progress
        ids, texts = reader.tries[progress.state]
        if skip:
            return
        if not id_node and not text_node:
            yield [self._columns.of(pattern[0]) for pattern in ids.patterns]
            for pattern in texts.patterns:
                yield self._columns.touching(bytes(pattern))
            return
        yield [self._columns.of(token_id) for token_id in ids.own_symbols(id_node)]
        if text_node:
            yield self._columns.without_text
            for byte in texts.own_symbols(text_node):
                yield self._columns.beginning(byte)
