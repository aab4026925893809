"""A whole run in little, of whatever length: how busy slots were and how long the queue was.

Steps are put into at most NUM_CELLS cells; when they are full, every two become one.  What is kept
is exact all the same: a cell knows how many spans began and ended in it, and how far into it.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from batcher.trace.timeline import Stretch

MAX_ROWS = 16
"""Slots beyond these share rows, as many as it takes."""
NUM_CELLS = 512
MAX_BUFFERED = 3 * 4096
"""Numbers, three for each span."""

Counts: TypeAlias = NDArray[np.int64]
OpenSpans: TypeAlias = Sequence[tuple[int, int]]
"""Slots that are held, and since which step."""


class RunHistory:
    """Takes in spans in slots, in any order.

    rows: the slots of each row.  steps_per_cell: grows with the run.
    """

    def __init__(self, batch_size: int) -> None:
        self._slots_per_row = -(-batch_size // MAX_ROWS)
        starts = range(0, batch_size, self._slots_per_row)
        self.rows = [range(first, min(first + starts.step, batch_size)) for first in starts]
        self.steps_per_cell = 1
        # By row and cell: how many begin or, less, end there, and how many steps into the cell.
        shape = len(self.rows), NUM_CELLS
        self._changes: Counts = np.zeros(shape, np.int64)
        self._offsets: Counts = np.zeros(shape, np.int64)
        self._admissions: Counts = np.zeros(shape, np.int64)
        self._held = array("q")  # to be taken in

    def held(self, spans: Iterable[int]) -> None:
        """Take in which slot was used over which steps start..end, exclusive.

        spans: slot, start and end of one after the other.
        """
        self._held.extend(spans)
        if len(self._held) >= MAX_BUFFERED:
            self._take_in()

    def used(self, num_steps: int, num_cells: int, held: OpenSpans) -> NDArray[np.float64]:
        """Return how many slots of each row were used on average, [rows, num_cells].

        num_steps: of the run; each of `num_cells` shows as many of them.
        """
        totals = self._totals(num_steps, num_cells)
        edges = np.linspace(0, num_steps, num_cells + 1)
        for slot, start in held:
            totals[slot // self._slots_per_row] += np.maximum(edges - start, 0)
        return np.diff(totals, axis=1) * num_cells / num_steps

    def admissions(self, num_steps: int, held: OpenSpans) -> Counts | None:
        """Return how many sequences were admitted in each step, [rows, num_steps].

        None for a run of more steps than cells.
        """
        self._take_in()
        if self.steps_per_cell > 1 or num_steps > NUM_CELLS:
            return None
        found = self._admissions[:, :num_steps].copy()
        for slot, start in held:
            if start < num_steps:  # of a step under way the first may be known already
                found[slot // self._slots_per_row, start] += 1
        return found

    def _totals(self, num_steps: int, num_cells: int) -> NDArray[np.float64]:
        """Return the slot-steps of each row up to each of the cells' edges, [rows, edges]."""
        self._take_in()
        size = self.steps_per_cell
        running = np.cumsum(self._changes, axis=1)  # after each cell
        sums = np.zeros((len(self.rows), NUM_CELLS + 1))
        np.cumsum(running * size - self._offsets, axis=1, out=sums[:, 1:])
        edges = np.linspace(0, num_steps, num_cells + 1)
        boundaries = np.minimum(np.arange(NUM_CELLS + 1) * size, num_steps)  # of the last, a part
        return np.array([np.interp(edges, boundaries, row) for row in sums])

    def _take_in(self) -> None:
        if not self._held:
            return
        slots, starts, ends = np.array(self._held).reshape(-1, 3).T
        rows = slots // self._slots_per_row
        del self._held[:]
        while ends.max() > self.steps_per_cell * NUM_CELLS:
            odd = self._changes[:, 1::2]  # every cell is to stand for twice as many steps
            offsets = self._offsets[:, ::2] + self._offsets[:, 1::2]
            self._offsets = _in_front(offsets + odd * self.steps_per_cell)
            self._changes = _in_front(self._changes[:, ::2] + odd)
            self._admissions = _in_front(self._admissions[:, ::2] + self._admissions[:, 1::2])
            self.steps_per_cell *= 2
        for steps, sign in ((starts, 1), (ends, -1)):
            # A run of as many steps as the cells hold ends just behind the last of them.
            inside = steps < self.steps_per_cell * NUM_CELLS
            cells, offsets = np.divmod(steps[inside], self.steps_per_cell)
            place = rows[inside], cells
            np.add.at(self._changes, place, sign)
            np.add.at(self._offsets, place, sign * offsets)
        np.add.at(self._admissions, (rows, starts // self.steps_per_cell), 1)


class QueueDepths:
    """How long the queue was from some steps on: each length up to the step of the next.

    Where `add` has too many, the longest stays of those in the same few steps.
    """

    def __init__(self, steps: Iterable[int] = (), lengths: Iterable[int] = ()) -> None:
        self._steps, self._lengths = array("q", steps), array("q", lengths)
        self._size = 1  # how many steps have one length at most

    def add(self, step: int, length: int) -> None:
        """Take in how long it was after `step`, one after those before."""
        if self._steps and step // self._size == self._steps[-1] // self._size:
            self._lengths[-1] = max(self._lengths[-1], length)
            return
        self._steps.append(step)
        self._lengths.append(length)
        if len(self._steps) > 2 * NUM_CELLS:
            known = zip(self._steps, self._lengths, strict=True)
            self._steps, self._lengths = array("q"), array("q")
            self._size *= 2
            for each in known:
                self.add(*each)

    def at(self, step: int) -> int:
        """Return how long it was after `step`."""
        return self._lengths[max(bisect_right(self._steps, step) - 1, 0)]

    def stretches(self, num_steps: int) -> list[Stretch]:
        """Return how long it was in the steps of a run of `num_steps`."""
        steps = [0, *self._steps[1:], num_steps]
        return [Stretch(*each) for each in zip(steps, steps[1:], self._lengths, strict=False)]

    def highest(self, num_steps: int, num_cells: int) -> Counts:
        """Return the longest it was in each cell of a run of `num_steps`, [num_cells]."""
        if not self._steps:
            return np.zeros(num_cells, np.int64)
        edges = np.arange(num_cells + 1) * num_steps // num_cells
        steps, lengths = np.array(self._steps), np.append(self._lengths, 0)
        first = np.maximum(np.searchsorted(steps, edges[:-1], "right") - 1, 0)
        last = np.maximum(np.searchsorted(steps, edges[1:], "left"), first + 1)
        found: Counts = np.maximum.reduceat(lengths, np.stack([first, last], axis=1).ravel())[::2]
        return found


def _in_front(cells: Counts) -> Counts:
    """Return `cells`, and as many again that are empty."""
    return np.concatenate([cells, np.zeros_like(cells)], axis=1)
