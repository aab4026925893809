"""What slots did between the last frames: a cell of text for each slot and each time between two.

Rule: a cell stands for all steps since the frame before, so what is drawn has all been looked at.
"""

from collections import deque
from collections.abc import Sequence

from .slots import SlotState
from .theme import Glyphs, shade

MAX_CELLS = 256
"""The most cells a strip has."""
MAX_ALL_CELLS = 2**18
"""The most that all have together: of so many slots that this cuts them, few are ever seen."""
MANY = 2
"""So many admissions in a cell hide each other; it is shaded by how busy it was."""


class Strips:
    """The strip of each slot.

    cells: by slot.  steps: the first step of each cell, and the one after the last.
    styles: that of each character.
    """

    def __init__(self, slots: Sequence[SlotState], glyphs: Glyphs) -> None:
        self.cells = [""] * len(slots)
        self.steps: deque[int] = deque([0], maxlen=MAX_CELLS + 1)
        self._slots, self._glyphs = slots, glyphs
        self._max_cells = max(1, min(MAX_CELLS, MAX_ALL_CELLS // len(slots)))
        self.styles = _styles(glyphs)
        self._before = [(0, 0)] * len(slots)  # steps busy and sequences admitted

    def extend(self, step: int, marks: Sequence[str]) -> None:
        """Add a cell for the steps up to `step`; `marks`: what has happened in each slot."""
        num_steps = step + 1 - self.steps[-1]
        if num_steps <= 0:
            return
        self.steps.append(step + 1)
        for number, (slot, mark) in enumerate(zip(self._slots, marks, strict=True)):
            busy, admitted = slot.busy_steps(step), slot.num_admitted
            busy_before, admitted_before = self._before[number]
            self._before[number] = busy, admitted
            share = (busy - busy_before) / num_steps
            cell = self._cell(slot, mark, share, admitted - admitted_before)
            self.cells[number] = (self.cells[number] + cell)[-self._max_cells :]

    def _cell(self, slot: SlotState, mark: str, share: float, admitted: int) -> str:
        glyphs = self._glyphs
        if mark in ("preempted", "failed"):
            return glyphs.marks[mark]
        if admitted >= MANY:
            return shade(share, glyphs)
        if admitted:
            return glyphs.admitted
        if 2 * share < 1:
            return glyphs.nothing
        if slot.end is None and slot.first_token is None:
            return glyphs.prefill
        return glyphs.turns[(slot.num_admitted - 1) % 2]


def _styles(glyphs: Glyphs) -> dict[str, str]:
    return {
        glyphs.marks["preempted"]: "preempted",
        glyphs.marks["failed"]: "failed",
        glyphs.admitted: "admitted",
        glyphs.nothing: "idle",
        glyphs.prefill: "prefill",
        glyphs.turns[0]: "turn0",
        glyphs.turns[1]: "turn1",
        **dict.fromkeys(glyphs.shades[:-1], "bubble"),
        glyphs.shades[-1]: "turn0",
    }
