"""A whole run in little, of whatever length: how busy slots were and how many requests waited.

Steps are put into at most NUM_CELLS cells; when they are full, every two become one.  What is kept
is exact all the same: a cell knows how many spans began and ended in it, and how far into it.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

MAX_ROWS = 16
"""Slots beyond these share rows, as many as it takes."""
NUM_CELLS = 512
MAX_BUFFERED = 3 * 4096
"""Numbers, three for each span, two for each wait."""

Counts: TypeAlias = NDArray[np.int64]
OpenSpans: TypeAlias = Sequence[tuple[int, int]]
"""Slots that are held, and since which step."""


class RunHistory:
    """Takes in spans in slots, and waits for them, in any order.

    rows: the slots of each row.  steps_per_cell: grows with the run.
    """

    def __init__(self, batch_size: int) -> None:
        self._slots_per_row = -(-batch_size // MAX_ROWS)
        starts = range(0, batch_size, self._slots_per_row)
        self.rows = [range(first, min(first + starts.step, batch_size)) for first in starts]
        self.steps_per_cell = 1
        # By row and cell: how many begin or, less, end there, and how many steps into the cell.
        # The last row is for waits.  [rows + 1, cells]
        self._wait_row = len(self.rows)
        shape = self._wait_row + 1, NUM_CELLS
        self._changes: Counts = np.zeros(shape, np.int64)
        self._offsets: Counts = np.zeros(shape, np.int64)
        self._admissions: Counts = np.zeros(shape, np.int64)
        self._held, self._waited = array("q"), array("q")  # to be taken in

    def held(self, spans: Iterable[int]) -> None:
        """Take in which slot was used over which steps start..end, exclusive.

        spans: slot, start and end of one after the other.
        """
        self._held.extend(spans)
        if len(self._held) >= MAX_BUFFERED:
            self._take_in()

    def waited(self, spans: Iterable[int]) -> None:
        """Take in over which steps start..end, exclusive, requests waited.

        spans: start and end of one after the other.
        """
        self._waited.extend(spans)
        if len(self._waited) >= MAX_BUFFERED:
            self._take_in()

    def used(self, num_steps: int, num_cells: int, held: OpenSpans) -> NDArray[np.float64]:
        """Return how many slots of each row were used on average, [rows, num_cells].

        num_steps: of the run; each of `num_cells` shows as many of them.
        """
        totals = self._totals(num_steps, num_cells)[:-1]
        edges = np.linspace(0, num_steps, num_cells + 1)
        for slot, start in held:
            totals[slot // self._slots_per_row] += np.maximum(edges - start, 0)
        return np.diff(totals, axis=1) * num_cells / num_steps

    def waiting(
        self, num_steps: int, num_cells: int, waits: Sequence[tuple[int, int]] = ()
    ) -> NDArray[np.float64]:
        """Return how many requests waited on average, [num_cells]; see `used`.

        waits: the start and the end of those that were not taken in.
        """
        totals = self._totals(num_steps, num_cells)[-1]
        edges = np.linspace(0, num_steps, num_cells + 1)
        for start, end in waits:
            totals += np.clip(edges - start, 0, end - start)
        means: NDArray[np.float64] = np.diff(totals)
        return means * (num_cells / num_steps)

    def admissions(self, num_steps: int, held: OpenSpans) -> Counts | None:
        """Return how many sequences were admitted in each step, [rows, num_steps].

        None for a run of more steps than cells.
        """
        self._take_in()
        if self.steps_per_cell > 1 or num_steps > NUM_CELLS:
            return None
        found = self._admissions[:-1, :num_steps].copy()
        for slot, start in held:
            if start < num_steps:  # of a step under way the first may be known already
                found[slot // self._slots_per_row, start] += 1
        return found

    def _totals(self, num_steps: int, num_cells: int) -> NDArray[np.float64]:
        """Return the slot-steps of each row up to each of the cells' edges, [rows + 1, edges]."""
        self._take_in()
        size = self.steps_per_cell
        running = np.cumsum(self._changes, axis=1)  # after each cell
        sums = np.zeros((len(self.rows) + 1, NUM_CELLS + 1))
        np.cumsum(running * size - self._offsets, axis=1, out=sums[:, 1:])
        edges = np.linspace(0, num_steps, num_cells + 1)
        boundaries = np.minimum(np.arange(NUM_CELLS + 1) * size, num_steps)  # of the last, a part
        return np.array([np.interp(edges, boundaries, row) for row in sums])

    def _take_in(self) -> None:
        if not (self._held or self._waited):
            return
        slots, *held = np.array(self._held).reshape(-1, 3).T
        waited = np.array(self._waited).reshape(-1, 2).T
        rows = np.append(slots // self._slots_per_row, np.full(waited.shape[1], self._wait_row))
        starts, ends = np.concatenate([held, waited], axis=1)
        del self._held[:], self._waited[:]
        while ends.max() > self.steps_per_cell * NUM_CELLS:
            self._halve()
        for steps, sign in ((starts, 1), (ends, -1)):
            # A run of as many steps as the cells hold ends just behind the last of them.
            inside = steps < self.steps_per_cell * NUM_CELLS
            cells, offsets = np.divmod(steps[inside], self.steps_per_cell)
            place = rows[inside], cells
            np.add.at(self._changes, place, sign)
            np.add.at(self._offsets, place, sign * offsets)
        np.add.at(self._admissions, (rows, starts // self.steps_per_cell), 1)

    def _halve(self) -> None:
        """Let every cell stand for twice as many steps."""
        odd = self._changes[:, 1::2]
        offsets = self._offsets[:, ::2] + self._offsets[:, 1::2]
        self._offsets = _in_front(offsets + odd * self.steps_per_cell)
        self._changes = _in_front(self._changes[:, ::2] + odd)
        self._admissions = _in_front(self._admissions[:, ::2] + self._admissions[:, 1::2])
        self.steps_per_cell *= 2


def _in_front(cells: Counts) -> Counts:
    """Return `cells`, and as many again that are empty."""
    return np.concatenate([cells, np.zeros_like(cells)], axis=1)
