"""Output tokens of running rows."""

from array import array

import numpy as np

from batcher.models.base import IntArray

MAX_PAGE_STEPS = 1024
MAX_PAGE_TOKENS = 2**21
MIN_PAGE_STEPS = 16
NO_TOKEN = -1  # where a row has none in a line of the page


class OutputTokens:
    """The tokens of all rows: written once per step for all, read when a row finishes.

    They are a time-major page [page_steps, num_slots]. When it is full, each open row moves its
    part aside and the page starts over. So a long row does not lengthen the page for all. A step
    that gives rows several tokens has further lines, with gaps for the others.

    row: the next step's row in the page.
    first_rows: open slot -> the page's row of its first token there.
    aside: open slot -> its tokens outside the page.
    """

    __slots__ = ("_has_gaps", "_page_steps", "aside", "first_rows", "page", "row")

    def __init__(self, num_slots: int) -> None:
        self._page_steps = max(MIN_PAGE_STEPS, min(MAX_PAGE_STEPS, MAX_PAGE_TOKENS // num_slots))
        self.page = np.zeros((self._page_steps, num_slots), np.int64)
        self.row = 0
        self._has_gaps = False
        self.first_rows: dict[int, int] = {}
        self.aside: dict[int, array[int]] = {}

    def append(self, tokens: IntArray) -> None:
        """Append one step's tokens: [num_slots]; slots that are not open are ignored."""
        if self.row == self._page_steps:
            for slot in self.first_rows:
                self._put_aside(slot, 0)
            self.row, self._has_gaps = 0, False
        self.page[self.row] = tokens
        self.row += 1

    def append_more(self, slots: IntArray, tokens: IntArray) -> None:
        """Append a further token of some rows to the last step; slots, tokens: [rows]."""
        self.append(np.full(self.page.shape[1], NO_TOKEN))
        self.page[self.row - 1, slots] = tokens
        self._has_gaps = True

    def extend(self, slot: int, tokens: list[int]) -> None:
        """Append `tokens` to the row in `slot`."""
        self._put_aside(slot, self.row).extend(tokens)

    def close(self, slot: int, num_tokens: int) -> list[int]:
        """Return the first `num_tokens` tokens of the row in `slot` and forget the row."""
        if slot in self.aside or self._has_gaps:
            tokens = self.read(slot, 0, num_tokens).tolist()
            del self.aside[slot], self.first_rows[slot]
        else:
            first_row = self.first_rows.pop(slot)
            tokens = self.page[first_row : first_row + num_tokens, slot].tolist()
        return tokens

    def resume(self, slot: int, tokens: list[int]) -> None:
        self.first_rows[slot] = self.row
        if tokens:
            self.aside[slot] = array("q", tokens)

    def read(self, slot: int, start: int, stop: int) -> "array[int]":
        """Return tokens `start` to `stop`, exclusive, of the row in `slot`."""
        first = self.first_rows[slot]
        if self._has_gaps:
            return self._put_aside(slot, self.row)[start:stop]
        if slot not in self.aside:
            return array("q", self.page[first + start : first + stop, slot].tobytes())
        tokens = self.aside[slot]
        if stop <= len(tokens):
            return tokens[start:stop]
        first -= len(tokens)
        in_page = self.page[first + max(start, len(tokens)) : first + max(stop, len(tokens)), slot]
        return tokens[start:stop] + array("q", in_page.tobytes())

    def _put_aside(self, slot: int, next_row: int) -> "array[int]":
        first_row, aside = self.first_rows[slot], self.aside.get(slot)
        if aside is None:
            aside = self.aside[slot] = array("q")
        tokens = self.page[first_row : self.row, slot]
        if self._has_gaps:
            tokens = tokens[tokens != NO_TOKEN]
        aside.frombytes(tokens.tobytes())
        self.first_rows[slot] = next_row
        return aside
