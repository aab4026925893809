"""The picture of a run for a terminal of any size: its layout follows from the room there is.

Rule: every slot is in it, in a row, a cell or a share of a cell.
"""

from dataclasses import dataclass, field

from .gantt import small_gantt
from .grid import MIN_CELL, Longest, cell_size, grid, heat_map
from .header import header
from .scene import Scene
from .theme import Line

MIN_GANTT = 6
"""In fewer spare lines there is no gantt."""
ROOMY = 16
"""Of fewer lines none is left blank."""
HEADER_SHARE = 4
"""The header has one of so many lines, at least one."""
MANY_SLOTS = 256
"""So many are a map, whatever room there is: nobody reads as many rows."""


@dataclass
class Picture:
    """Lays out a run, line by line."""

    longest: Longest = field(default_factory=Longest)

    def lines(self, scene: Scene, width: int, height: int, *, has_gantt: bool) -> list[Line]:
        """Return at most `height` lines of at most `width`; with the run so far if there is room.

        Where there is room the first is blank: the cursor rests there, and what is typed spoils
        nothing.
        """
        blank: list[Line] = [[]] if height >= ROOMY else []
        top = [*blank, *header(scene, width, max(1, height // HEADER_SHARE))][:height]
        room, num_slots = height - len(top), len(scene.run.slots)
        if room < 1:
            return top
        plan = _plan_grid(num_slots, width, room, len(blank))
        if plan is None:
            return top + heat_map(scene, self.longest, width, room)
        num_blank, num_titles = plan
        num_rows = room - num_blank - num_titles
        rows = grid(scene, self.longest, width, num_rows, has_titles=bool(num_titles))
        spare = num_rows + num_titles - len(rows)
        gantt = small_gantt(scene, width, spare - 1) if has_gantt and spare > MIN_GANTT else []
        return [*top, *blank[:num_blank], *rows, *([[], *gantt] if gantt else [])]


def _plan_grid(num_slots: int, width: int, room: int, max_blank: int) -> tuple[int, int] | None:
    """Return how many blank lines and lines of titles to put before the slots, None for no grid.

    As many as do not make the rows any narrower.
    """
    if num_slots >= MANY_SLOTS:
        return None
    plans = [(max_blank, 1), (0, 1), (0, 0)]
    sizes = {plan: cell_size(width, num_slots, room - sum(plan)) for plan in plans}
    widest = max(sizes.values())
    if widest < MIN_CELL:
        return None
    return next(plan for plan in plans if sizes[plan] == widest)
