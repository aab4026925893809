"""Slots as rows of a table, in one column or several: what a row says depends on its width."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..cells import cell_width, counted, cut_middle, pad
from .scene import Scene, phase_style
from .strips import MAX_CELLS
from .theme import LABEL, Line

GAP = 2  # between columns of slots
MIN_CELL = 16
MIN_REQUEST, MAX_REQUEST = 7, 36
MIN_BAR, MAX_BAR = 5, 24
PHASE, MIN_STRIP = len("prefill"), 10
_RUNS = re.compile(r"(.)\1*")


class Columns(NamedTuple):
    """The widths of what a row consists of; 0 for what there is no room for."""

    slot: int
    request: int
    bar: int
    tokens: int
    phase: int
    strip: int

    @property
    def width(self) -> int:
        """The width of a row."""
        gaps = 2 + bool(self.tokens) + 2 * bool(self.phase) + 2 * bool(self.strip)
        return sum(self) + gaps


class Longest:
    """The widest request and progress so far: a picture whose columns only grow stands still."""

    def __init__(self) -> None:
        self.request, self.tokens = MIN_REQUEST, len("tokens")

    def see(self, scene: Scene, numbers: Sequence[int]) -> None:
        """Take in what the slots of these numbers show."""
        for number in numbers:
            slot = scene.run.slots[number]
            self.request = max(self.request, min(cell_width(scene.request(slot)), MAX_REQUEST))
            self.tokens = max(self.tokens, len(scene.progress(slot)))


def plan_columns(width: int, slot: int, longest: Longest) -> Columns:
    """Return the widths that make up `width`: request and bar, then tokens, phase and a strip.

    Where there is no strip, the name has what it needs, and the bar the rest.
    """
    request = min(longest.request, max(MIN_REQUEST, width // 5))
    bar = MIN_BAR if width < 2 * MIN_CELL else MIN_BAR + 3
    room = width - slot - 1 - request - 1 - bar
    if room < 0:
        request, room = max(request + room, 1), 0
    tokens = longest.tokens if room >= longest.tokens + 1 else 0
    room -= tokens + 1 if tokens else 0
    phase = PHASE if tokens and room >= PHASE + 2 else 0
    room -= phase + 2 if phase else 0
    strip = min(room - 2, MAX_CELLS) if phase and room >= MIN_STRIP + 2 else 0
    if not strip:
        more = min(room, longest.request - request)
        request += more
        bar += min(room - more, MAX_BAR)
    return Columns(slot, request, bar, tokens, phase, strip)


def cell_size(width: int, num_slots: int, num_rows: int) -> int:
    """Return how wide a slot's cell is where as few columns stand side by side as it takes."""
    return (width + GAP) // -(-num_slots // num_rows) - GAP if num_rows > 0 else 0


def grid(
    scene: Scene, longest: Longest, width: int, num_rows: int, *, has_titles: bool
) -> list[Line]:
    """Return all slots in at most `num_rows`, down the first column, then down the next."""
    numbers = range(len(scene.run.slots))
    longest.see(scene, numbers)
    num_columns = -(-len(numbers) // num_rows)
    height = -(-len(numbers) // num_columns)
    columns = plan_columns((width + GAP) // num_columns - GAP, len(str(numbers[-1])), longest)
    lines: list[Line] = []
    if has_titles:
        title = titles(scene, columns)
        lines.append(_side_by_side([title] * num_columns))
    for first in range(height):
        cells = [row(scene, number, columns) for number in numbers[first::height]]
        lines.append(_side_by_side(cells))
    return lines


def row(scene: Scene, number: int, columns: Columns) -> Line:
    """Return what a slot's row says, in the widths of `columns`."""
    slot = scene.run.slots[number]
    mark, phase = scene.marks[number], scene.phase(slot)
    name = cut_middle(scene.request(slot), columns.request, scene.glyphs.cut)
    line: Line = [
        (f"{number:>{columns.slot}}", LABEL),
        (scene.glyphs.marks[mark], mark),
        (pad(name, columns.request), ""),
        (" ", ""),
        *scene.bar(slot, columns.bar),
    ]
    if columns.tokens:
        line.append((f" {scene.progress(slot):>{columns.tokens}}", ""))
    if columns.phase:
        line += [("  ", ""), (f"{phase:<{columns.phase}}", phase_style(phase))]
    if columns.strip:
        line += [("  ", ""), *_strip(scene, number, columns.strip)]
    return line


def _strip(scene: Scene, number: int, width: int) -> Line:
    """Return the last cells of a slot's strip: they grow to the right, then scroll."""
    styles = scene.strips.styles
    cells = scene.strips.cells[number][-width:]
    parts = [(same.group(), styles[same.group(1)]) for same in _RUNS.finditer(cells)]
    return [*parts, (" " * (width - len(cells)), "")]


def titles(scene: Scene, columns: Columns) -> Line:
    """Return what the columns are called."""
    text = f"{'#':>{columns.slot}} {'request':<{columns.request}} "
    tokens = columns.bar + (columns.tokens + 1 if columns.tokens else 0)
    text += f"{'tokens'[:tokens]:<{tokens}}"
    if columns.phase:
        text += f"  {'phase':<{columns.phase}}"
    if columns.strip:
        text += f"  {_strip_title(scene, columns.strip)}"
    return [(text.ljust(columns.width), LABEL)]


def _strip_title(scene: Scene, width: int) -> str:
    """Return what the strip shows: how many steps, and how many of them a cell stands for."""
    steps = list(scene.strips.steps)[-width - 1 :]
    num_steps, num_cells = steps[-1] - steps[0], max(len(steps) - 1, 1)
    each = -(-num_steps // num_cells)
    shown = f"last {counted(num_steps, 'step')}"
    if each > 1:
        shown += f", about {each:,} a cell"
    legend = f"{shown}  {scene.glyphs.admitted} admitted"
    return next((text for text in (legend, shown) if len(text) <= width), "steps"[:width])


def _side_by_side(cells: Sequence[Line]) -> Line:
    """Return `cells`, which are as wide as they are to be, as one line."""
    line = list(cells[0])
    for cell in cells[1:]:
        line.append((" " * GAP, ""))
        line += cell
    return line
