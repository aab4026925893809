"""Slots as rows of a table in one column or several, or, where there are many, as cells of a map.

What a row says depends on its width; a map has one cell a slot while there is room for that, and
the rows worth seeing beside it.
"""

import re
from collections.abc import Sequence
from heapq import nsmallest
from typing import NamedTuple

from ..cells import cell_width, counted, cut_middle, pad
from .header import note_text
from .scene import MAX_CELLS, Scene, phase_style
from .theme import ALL, LABEL, Line, Part, bar, hue_of, joined, level, shade

GAP = 2  # between columns of slots, and beside a map
MIN_CELL = 16
MIN_REQUEST, MAX_REQUEST = 7, 36
MIN_BAR, MAX_BAR = 5, 24
PHASE, MIN_STRIP = len("prefill"), 10
MIN_PANEL = 34
MIN_LABELLED = 30
MAX_CELL = 12
PER_ROW = (8, 16, 32, 64, 128, 256, 512)
DOTS = 8
BRAILLE = 0x2800
MANY = 2
_RUNS = re.compile(r"(.)\1*")


class Columns(NamedTuple):
    """The widths of what a row consists of; 0 for what there is no room for."""

    slot: int
    request: int
    bar: int
    tokens: int
    drafts: int
    phase: int
    strip: int

    @property
    def width(self) -> int:
        """The width of a row."""
        gaps = 2 + bool(self.tokens) + sum(2 * bool(width) for width in self[4:])
        return sum(self) + gaps


class Longest:
    """The widest request, progress and drafts so far.

    A picture whose columns only grow stands still.
    """

    def __init__(self) -> None:
        self.request, self.tokens, self.drafts = MIN_REQUEST, len("tokens"), 0

    def see(self, scene: Scene, numbers: Sequence[int]) -> None:
        """Take in what the slots of these numbers show."""
        for number in numbers:
            slot = scene.run.slots[number]
            self.request = max(self.request, min(cell_width(scene.request(slot)), MAX_REQUEST))
            self.tokens = max(self.tokens, len(scene.progress(slot)))
        if scene.run.fold.num_drafted:
            drafts = (len(scene.drafts(scene.run.slots[number])) for number in numbers)
            self.drafts = max(self.drafts, len("drafts"), *drafts)


def plan_columns(width: int, slot: int, longest: Longest) -> Columns:
    """Return the widths that make up `width`: request and bar, then tokens, drafts, phase, a strip.

    Where there is no strip, the name has what it needs, and the bar the rest.
    """
    request = min(longest.request, max(MIN_REQUEST, width // 5))
    bar = MIN_BAR if width < 2 * MIN_CELL else MIN_BAR + 3
    room = width - slot - 1 - request - 1 - bar
    if room < 0:
        request, room = max(request + room, 1), 0
    tokens = longest.tokens if room >= longest.tokens + 1 else 0
    room -= tokens + 1 if tokens else 0
    drafts = longest.drafts if tokens and longest.drafts and room >= longest.drafts + 2 else 0
    room -= drafts + 2 if drafts else 0
    phase = PHASE if tokens and room >= PHASE + 2 else 0
    room -= phase + 2 if phase else 0
    strip = min(room - 2, MAX_CELLS) if phase and room >= MIN_STRIP + 2 else 0
    if not strip:
        more = min(room, longest.request - request)
        request += more
        bar += min(room - more, MAX_BAR)
    return Columns(slot, request, bar, tokens, drafts, phase, strip)


def cell_size(width: int, num_slots: int, num_rows: int) -> int:
    """Return how wide a slot's cell is where as few columns stand side by side as it takes."""
    return (width + GAP) // -(-num_slots // num_rows) - GAP if num_rows > 0 else 0


def grid(
    scene: Scene,
    longest: Longest,
    width: int,
    num_rows: int,
    numbers: Sequence[int],
    *,
    has_titles: bool,
) -> list[Line]:
    """Return slots in at most `num_rows`, down the first column, then down the next."""
    longest.see(scene, numbers)
    num_columns = -(-len(numbers) // num_rows)
    height = -(-len(numbers) // num_columns)
    slot_width = _slot_width(scene)
    columns = plan_columns((width + GAP) // num_columns - GAP, slot_width, longest)
    lines: list[Line] = []
    if has_titles:
        title = titles(scene, columns)
        lines.append(_side_by_side([title] * num_columns))
    for first in range(height):
        cells = [row(scene, number, columns) for number in numbers[first::height]]
        lines.append(_side_by_side(cells))
    return lines


def _slot_width(scene: Scene) -> int:
    """Return the width of what slots are called, of which the last has the longest name."""
    return len(scene.run.slots[-1].name)


def row(scene: Scene, number: int, columns: Columns) -> Line:
    """Return what a slot's row says, in the widths of `columns`."""
    slot = scene.run.slots[number]
    mark, phase = scene.marks[number], scene.phase(slot)
    name = cut_middle(scene.request(slot), columns.request, scene.glyphs.cut)
    line: Line = [
        (f"{slot.name:>{columns.slot}}", LABEL),
        (scene.glyphs.marks[mark], mark),
        (pad(name, columns.request), "found" if number == scene.found else ""),
        (scene.glyphs.found if number == scene.found else " ", ""),
        *scene.bar(slot, columns.bar),
    ]
    if columns.tokens:
        line.append((f" {scene.progress(slot):>{columns.tokens}}", ""))
    if columns.drafts:
        line += [("  ", ""), (f"{scene.drafts(slot):>{columns.drafts}}", "drafts")]
    if columns.phase:
        line += [("  ", ""), (f"{phase:<{columns.phase}}", phase_style(phase))]
    if columns.strip:
        line += [("  ", ""), *_strip(scene, number, columns.strip)]
    return line


def _strip(scene: Scene, number: int, width: int) -> Line:
    """Return the last cells of a slot's strip: they grow to the right, then scroll."""
    cells, line = scene.strips.cells[number][-width:], list[Part]()
    for same in _RUNS.finditer(cells):
        glyph, style = scene.strips.parts[same.group(1)]
        line.append((glyph * len(same.group()), style))
    return [*line, (" " * (width - len(cells)), "")]


def titles(scene: Scene, columns: Columns) -> Line:
    """Return what the columns are called."""
    text = f"{'#':>{columns.slot}} {'request':<{columns.request}} "
    tokens = columns.bar + (columns.tokens + 1 if columns.tokens else 0)
    text += f"{'tokens'[:tokens]:<{tokens}}"
    if columns.drafts:
        text += f"  {'drafts':>{columns.drafts}}"
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


class Map(NamedTuple):
    """How slots are put into cells.

    label: the width of the number before a row, 0 for none.  per_row: cells in a row.
    size: the width of a cell.  num_slots: how many slots share a cell.
    """

    label: int
    per_row: int
    size: int
    num_slots: int

    @property
    def width(self) -> int:
        """How wide it is."""
        return self.label + self.per_row * self.size

    def height(self, num_slots: int) -> int:
        """Return how many rows so many slots take."""
        return -(-num_slots // (self.per_row * self.num_slots))


def plan_map(num_slots: int, width: int, num_rows: int) -> Map:
    """Return the map of so many slots that fills the room, and leaves some for rows beside it."""
    label = len(str(num_slots - 1)) + 1 if width >= MIN_LABELLED else 0
    for room in (width - max(MIN_PANEL, width // 2) - GAP, width):
        for size in range(MAX_CELL, 0, -1):
            for per_row in PER_ROW:
                found = Map(label, per_row, size, 1)
                if found.width <= room and found.height(num_slots) <= num_rows:
                    return found
    per_row = width - label
    if per_row * num_rows >= num_slots:
        return Map(label, per_row, 1, 1)
    shared = -(-num_slots // (per_row * num_rows))
    return Map(label, per_row, 1, shared)


def heat_map(scene: Scene, longest: Longest, width: int, num_rows: int) -> list[Line]:
    """Return the map and what is beside or below it, in at most `num_rows` lines."""
    num_slots = len(scene.run.slots)
    has_title = num_rows >= MANY
    shape = plan_map(num_slots, width, num_rows - has_title)
    lines = [_title(scene, shape, width)] if has_title else []
    lines += _cells(scene, shape)
    panel_width = width - shape.width - GAP
    if panel_width >= MIN_PANEL:
        beside = worth_seeing(scene, longest, panel_width, num_rows)
        return _beside(lines, beside, shape.width)
    below = num_rows - len(lines)
    if below <= MANY or width < MIN_CELL:
        return lines
    return [*lines, *worth_seeing(scene, longest, width, below)]


def _title(scene: Scene, shape: Map, width: int) -> Line:
    """Return what a cell stands for."""
    num_slots = len(scene.run.slots)
    if shape.num_slots == 1:
        what = "a cell a slot"
    elif shape.num_slots <= DOTS and scene.has_unicode:
        what = f"a dot a busy slot, {shape.num_slots} a cell"
    else:
        what = f"{shape.num_slots} slots a cell"
    short = f"{shape.num_slots} slots a cell" if shape.num_slots > 1 else what
    texts = (f"{counted(num_slots, 'slot')}, {what}", what, short, short[:width])
    room = max(shape.width, min(width, MIN_PANEL)) if width >= MIN_LABELLED else width
    return [(next(text for text in texts if len(text) <= room), LABEL)]


def _cells(scene: Scene, shape: Map) -> list[Line]:
    """Return the map, row by row."""
    num_slots, lines = len(scene.run.slots), []
    for first in range(0, num_slots, shape.per_row * shape.num_slots):
        line: Line = [(f"{first:>{shape.label - 1}} ", LABEL)] if shape.label else []
        stop = min(first + shape.per_row * shape.num_slots, num_slots)
        for start in range(first, stop, shape.num_slots):
            if shape.num_slots == 1:
                line += _cell(scene, start, shape.size)
            else:
                numbers = range(start, min(start + shape.num_slots, num_slots))
                draw = _dots if shape.num_slots <= DOTS and scene.has_unicode else _shade
                line.append(draw(scene, numbers))
        lines.append(joined(line))
    return lines


def _cell(scene: Scene, number: int, size: int) -> Line:
    """Return the cell of one slot: how far its sequence is, in the colour of what it does.

    Who was preempted or failed there is marked, but hides nobody who has come since.
    """
    slot, mark, glyphs = scene.run.slots[number], scene.marks[number], scene.glyphs
    is_marked = mark in ("preempted", "failed")
    width = size - (size > 1)
    gap: Line = [(" " * (size - width), "")]
    if not scene.is_busy(slot):
        cell = (glyphs.marks[mark], mark) if is_marked else (glyphs.nothing, "idle")
        return [(cell[0].ljust(width), cell[1]), *gap]
    style = hue_of(slot.request.id)
    share = max(scene.share(slot), 1 - ALL)  # who has just come is there, too
    if width == 1:
        return [(level(share, glyphs), mark if is_marked else style), *gap]
    if is_marked:
        return [(glyphs.marks[mark], mark), *bar(share, width - 1, glyphs, style), *gap]
    return [*bar(share, width, glyphs, style), *gap]


def _dots(scene: Scene, numbers: Sequence[int]) -> tuple[str, str]:
    """Return a cell with a dot for each of up to eight slots that is busy."""
    slots, dots = scene.run.slots, 0
    for number, dot in zip(numbers, scene.glyphs.dots, strict=False):
        if scene.is_busy(slots[number]):
            dots |= dot
    return (chr(BRAILLE + dots), _worst(scene, numbers)) if dots else (scene.glyphs.nothing, "idle")


def _shade(scene: Scene, numbers: Sequence[int]) -> tuple[str, str]:
    """Return a cell that is the darker the more of its slots are busy; solid if all are."""
    glyphs = scene.glyphs
    share = sum(scene.is_busy(scene.run.slots[number]) for number in numbers) / len(numbers)
    return (shade(share, glyphs), _worst(scene, numbers)) if share else (glyphs.nothing, "idle")


def _worst(scene: Scene, numbers: Sequence[int]) -> str:
    """Return the style of what nobody should miss in these slots."""
    marks = {scene.marks[number] for number in numbers}
    return next((mark for mark in ("failed", "preempted") if mark in marks), "bar")


def worth_seeing(scene: Scene, longest: Longest, width: int, num_lines: int) -> list[Line]:
    """Return what went wrong, who is about to end and who runs for the longest."""
    lines: list[Line] = []
    if scene.notes and num_lines > 2 * MANY:
        shown = scene.notes[: max(num_lines // 4, 1)]
        lines = [[("preempted or failed", LABEL)]]
        for text, style in (note_text(scene, note) for note in shown):
            lines.append([(cut_middle(text, width, scene.glyphs.cut), style)])
    step = scene.moment.step
    slots = scene.run.slots
    running = [n for n, slot in enumerate(slots) if slot.end is None and slot.request.max_tokens]
    room = num_lines - len(lines)
    each = max(room // 2 - 1, 1)
    left = {n: slots[n].request.max_tokens - slots[n].tokens_after(step) for n in running}
    ending = nsmallest(each, running, key=left.__getitem__)
    longest_first = nsmallest(each, running, key=lambda n: -slots[n].tokens_after(step))
    for title, numbers in (("about to end", ending), ("longest", longest_first)):
        if not numbers:
            continue
        longest.see(scene, numbers)
        columns = plan_columns(width, _slot_width(scene), longest)
        lines.append([(title, LABEL)])
        lines += [row(scene, number, columns) for number in numbers]
    return lines[:num_lines]


def _beside(left: Sequence[Line], right: Sequence[Line], width: int) -> list[Line]:
    """Return both next to each other, `left` in `width`."""
    lines: list[Line] = []
    for number in range(max(len(left), len(right))):
        line = list(left[number]) if number < len(left) else []
        if number < len(right):
            spare = width + GAP - sum(len(text) for text, _ in line)  # no ids are in the map
            line += [(" " * spare, ""), *right[number]]
        lines.append(line)
    return lines
