"""The tokens of running rows: written once a step for all, cut out once, when a row leaves."""

import numpy as np

from batcher.models.base import IntArray

MAX_PAGE_STEPS = 1024
MAX_PAGE_TOKENS = 2**21
MIN_PAGE_STEPS = 16
MAX_PARTS = 8  # of what a row has put aside, before a look at it joins them


class OutputTokens:
    """A time-major page [page_steps, num_slots] of tokens.

    When the page is full, each open row puts its part aside and the page starts over, so a long row
    costs its own tokens and not a longer page for everybody.
    """

    __slots__ = ("_aside", "_first_rows", "_page", "_page_steps", "_row")

    def __init__(self, num_slots: int) -> None:
        self._page_steps = max(MIN_PAGE_STEPS, min(MAX_PAGE_STEPS, MAX_PAGE_TOKENS // num_slots))
        self._page = np.zeros((self._page_steps, num_slots), np.int64)
        self._row = 0  # the next step's row in the page
        self._first_rows: dict[int, int] = {}  # open slot -> the page's row of its first token
        self._aside: dict[int, list[IntArray]] = {}  # open slot -> its tokens of earlier pages

    def open(self, slot: int) -> None:
        """Let `slot` begin a new row with the next step."""
        self._first_rows[slot] = self._row

    def append(self, tokens: IntArray) -> None:
        """Keep one step's tokens: [num_slots], whatever stands at slots that are not open."""
        row = self._row
        if row == self._page_steps:
            self._turn_page()
            row = 0
        self._page[row] = tokens
        self._row = row + 1

    def extend(self, slot: int, tokens: list[int]) -> None:
        """Put `tokens` behind those that the row in `slot` has, as if steps had given them."""
        self._put_aside(slot, self._row)
        self._aside[slot].append(np.array(tokens, np.int64))

    def close(self, slot: int, num_tokens: int) -> list[int]:
        """Return the first `num_tokens` tokens of the row in `slot` and forget the row."""
        first_row = self._first_rows.pop(slot)
        if slot in self._aside:
            rest = self._page[first_row : self._row, slot]
            row = np.concatenate([*self._aside.pop(slot), rest])[:num_tokens]
        else:
            row = self._page[first_row : first_row + num_tokens, slot]
        tokens: list[int] = row.tolist()
        return tokens

    def resume(self, slot: int, tokens: list[int]) -> None:
        """Let `slot` go on with a row that was closed when it had `tokens`."""
        self._first_rows[slot] = self._row
        if tokens:
            self._aside[slot] = [np.array(tokens, np.int64)]

    def read(self, slot: int, start: int, stop: int) -> list[int]:
        """Return tokens number `start` to `stop`, exclusive, of those the row in `slot` has."""
        first_row = self._first_rows[slot]
        parts = self._aside.get(slot)
        if parts is not None:
            if len(parts) > MAX_PARTS:
                parts[:] = [np.concatenate(parts)]
            first_row -= sum(map(len, parts))
        if parts is None or first_row + start >= self._first_rows[slot]:
            row = self._page[first_row + start : first_row + stop, slot]
        else:
            rest = self._page[self._first_rows[slot] : self._row, slot]
            row = np.concatenate([*parts, rest])[start:stop]
        tokens: list[int] = row.tolist()
        return tokens

    def _turn_page(self) -> None:
        for slot in self._first_rows:
            self._put_aside(slot, 0)
        self._row = 0

    def _put_aside(self, slot: int, next_row: int) -> None:
        """Keep what the page has of the row in `slot`, which goes on at the page's `next_row`."""
        first_row = self._first_rows[slot]
        self._aside.setdefault(slot, []).append(self._page[first_row : self._row, slot].copy())
        self._first_rows[slot] = next_row
