"""What a gantt writes over a bar where steps verified drafts: how many of them were accepted."""

from collections.abc import Iterable

from msgspec import Struct

from batcher.timeline.drafts import StepDrafts

from .gantt_chart import Scale

MANY = "+"
"""Stands for a number that a cell has no room for."""
GAP = 1  # so that one mark is told from the next


class _Cell(Struct):
    """The drafts of the steps that a cell shows, or begins to show."""

    num_steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def mark(self, room: int) -> str:
        """Return how many were accepted, and of how many if `room` cells take that.

        Of several steps: how many in one of them, on average.
        """
        accepted = str(round(self.accepted / self.num_steps))
        whole = f"{self.accepted}/{self.drafted}"
        if len(whole) + GAP <= room:
            return whole
        return accepted if len(accepted) <= max(room - GAP, 1) else MANY


def draft_marks(drafts: Iterable[StepDrafts], scale: Scale) -> dict[int, dict[int, str]]:
    """Return the marks of each slot, by the cell in which they begin.

    drafts: those of the steps of `scale`.
    """
    cells: dict[int, dict[int, _Cell]] = {}
    for step in drafts:
        cell = cells.setdefault(step.slot, {}).setdefault(scale.first_cell(step.step), _Cell())
        cell.num_steps += 1
        cell.drafted += step.drafted
        cell.accepted += step.accepted
    room = scale.cells_per_step
    return {
        slot: {number: cell.mark(room) for number, cell in of_slot.items()}
        for slot, of_slot in cells.items()
    }


def legend_of(scale: Scale, most_drafted: int) -> str:
    """Return what the marks say; most_drafted: the most drafts of a step."""
    if len(f"{most_drafted}/{most_drafted}") + GAP <= scale.cells_per_step:
        return "n/m drafts accepted"
    return "n drafts accepted" if scale.cells_per_step else "n drafts accepted a step"
