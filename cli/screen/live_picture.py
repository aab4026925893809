"""The picture of a run, for a terminal of any size.

Every slot is in the picture, in a row, a cell or a share of a cell.  A picture is a function of one
`Scene`.  A cell of a strip stands for all steps since the previous frame.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from itertools import chain, islice, pairwise, repeat, zip_longest
from typing import NamedTuple

import msgspec

from batcher.events import FinishEvent, RunEvent
from batcher.trace.run import FAILURES, RequestTimeline, label_of, label_of_name

from .live_state import (
    GAP,
    Fact,
    Moment,
    Note,
    QueueDepths,
    Row,
    RunState,
    Stay,
    block_facts,
    count_facts,
    kept,
    next_up,
    progress,
    rate_facts,
    short,
)
from .terminal import (
    InputLine,
    cell_width,
    clock,
    counted,
    cut_middle,
    fit,
    folded,
    number,
    pad,
    printable,
    whole_percent,
)
from .theme import (
    ALL,
    LABEL,
    Glyphs,
    Line,
    Part,
    bar,
    hue_of,
    joined,
    level,
    levels,
    line_width,
    shade,
)
from .view import MAX_LISTED, GaugeReading, RunPlan

STYLES = dict.fromkeys(("beam", "partner"), "decode")
STYLES |= dict.fromkeys(("error", "aborted", "lost"), "failed")
STYLES |= dict.fromkeys(("length", "unused"), "stop")
"""Styles of phases and finish reasons without a style of their own name."""
EMPTY = "-"
MAX_CELLS = 256  # of a strip
MAX_ALL_CELLS = 2**18  # of all strips together
MANY = 2  # admissions in a cell, which is then shaded by how busy it was

MAX_BAR, MIN_BAR, MAX_TREND, MIN_TREND, MAX_QUEUE = 60, 8, 30, 8, 20  # cells of the header
TREND_WIDTH = 60  # from this width on the trend has its place
MIN_TITLE, MAX_NAME = 6, 20

COLUMN_GAP = 2  # between columns of slots, and beside a map
MIN_CELL = 16
MIN_REQUEST, MAX_REQUEST = 7, 36
MIN_ROW_BAR, MAX_ROW_BAR = 5, 24
PHASE, MIN_STRIP = len("prefill"), 10
MIN_PANEL = 34
MIN_LABELLED = 30
MAX_CELL = 12
PER_ROW = (8, 16, 32, 64, 128, 256, 512)

SHOWN_SECONDS = {"admitted": 0.5, "preempted": 3.0, "failed": 5.0, "note": 10.0}
"""How long marks of slots and notes are shown."""

MAX_CELLS_PER_STEP = 4
MIN_WIDTH, MIN_HEIGHT = 20, 3
MIN_GANTT = 6  # spare lines
MIN_LISTS, MIN_QUEUE, MIN_BESIDE = 6, 41, 76  # lines of the lists; columns of one, of both
PROMPT, TEXT = "prompt: ", "text: "
MINOR = ("computed ", "generated ", "in all ")  # sentences of a life that are left out first
MIN_DETAIL_ROOM = 8  # lines for rows and the details of a request
ROOMY = 16  # lines; with fewer none is blank
HEADER_SHARE = 4  # the header has 1 / 4 of the lines
MANY_SLOTS = 256  # are always a map


def strip_cell(stays: Sequence[Stay], steps: range, glyphs: Glyphs) -> Part:
    """Return the cell for `steps` of a slot."""
    busy = num_admitted = 0
    newest: Stay | None = None
    for stay in reversed(stays):
        if stay.start >= steps.stop:
            continue
        end = steps.stop if stay.end is None else min(stay.end, steps.stop)
        if end < steps.start:
            break
        newest = newest or stay
        busy += end - max(stay.start, steps.start)
        num_admitted += stay.start >= steps.start
        # The step of a preemption does not belong to the stay.
        if stay.kind and stay.end is not None and stay.end - (stay.kind == "failed") in steps:
            return glyphs.marks[stay.kind], stay.kind
    is_held = newest is not None and newest.end is None
    share = busy / len(steps) if steps else float(is_held)
    if num_admitted:
        is_one = num_admitted < MANY
        return (glyphs.admitted, "admitted") if is_one else (shade(share, glyphs), "bar")
    if 2 * share < 1 or newest is None:
        return glyphs.nothing, "idle"
    first = newest.first_token  # of a prompt that takes several steps, steps up to it are prefill
    is_prefill = first is None or (newest.start < first and steps.stop - 1 <= first)
    return glyphs.prefill if is_prefill else glyphs.running, hue_of(newest.request_id)


class Strips:
    """The cells of all slots, one for the steps between two frames."""

    def __init__(self, run: RunState, glyphs: Glyphs) -> None:
        self._run, self._glyphs = run, glyphs
        most = max(1, min(MAX_CELLS, MAX_ALL_CELLS // run.num_slots))
        self._ends = deque([0], maxlen=most + 1)
        self._cells = [deque[Part](maxlen=most) for _ in range(run.num_slots)]

    def extend(self, step: int) -> None:
        """Add a cell for the steps up to `step`."""
        run, first = self._run, self._ends[-1]
        for slot, cells in enumerate(self._cells):
            steps = range(run.own_step(slot, first - 1) + 1, run.own_step(slot, step) + 1)
            cells.append(strip_cell(run.stays(slot), steps, self._glyphs))
        self._ends.append(step + 1)
        run.forget(first)  # the next cells do not need what has ended before

    def last(self, number: int, width: int) -> Line:
        return list(self._cells[number])[-width:]

    def ends(self, width: int) -> list[int]:
        """Return the first step of each of the last `width` cells, and the one after them."""
        return list(self._ends)[-width - 1 :]


class StepStrips(Strips):
    """Strips with a cell for each step, made from recent stays on demand."""

    def __init__(self, run: RunState, glyphs: Glyphs, step: int) -> None:
        self._run, self._glyphs, self._step = run, glyphs, step

    def last(self, number: int, width: int) -> Line:
        stays, (first, *_, stop) = self._run.stays(number), self.ends(width)
        changes = {first}
        for stay in stays:
            after_prefill = stop if stay.first_token is None else stay.first_token + 1
            end = stop if stay.end is None else stay.end
            changes.update((stay.start, stay.start + 1, after_prefill, end - 1, end, end + 1))
        points = [*sorted(step for step in changes if first <= step < stop), stop]
        cells = (
            [strip_cell(stays, range(a, a + 1), self._glyphs)] * (b - a)
            for a, b in pairwise(points)
        )
        return list(chain.from_iterable(cells))

    def ends(self, width: int) -> list[int]:
        return list(range(max(self._step + 1 - min(width, MAX_CELLS), 0), self._step + 2))


class Longest:
    """The widest request, progress and drafts so far; columns never shrink."""

    def __init__(self) -> None:
        self.request, self.tokens, self.drafts = MIN_REQUEST, len("tokens"), 0

    def see(self, scene: "Scene", rows: Iterable[Row]) -> None:
        for row in rows:
            self.request = max(self.request, min(cell_width(scene.request(row)), MAX_REQUEST))
            self.tokens = max(self.tokens, len(row.progress))
            if scene.run.fold.drafts.num_drafted:
                self.drafts = max(self.drafts, len("drafts"), len(drafts_of(row)))


@dataclass
class Scene:
    """The contents of a picture.

    since: for each mark and note, the first step that still shows it.  ends: the newest.  busy,
    queued: the share of busy slots and the length of the queue, by frame.  depths: the queue over
    the whole run.  found: the slot that the user found or selected.  texts: of the newest results,
    by label.  peeked: the prompt and the text so far of the selected request, by label.  story: its
    life in sentences, if it is recorded.
    """

    run: RunState
    plan: RunPlan
    gauges: GaugeReading
    glyphs: Glyphs
    strips: Strips
    moment: Moment
    since: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(SHOWN_SECONDS, 0))
    ends: Sequence[FinishEvent] = ()
    busy: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TREND))
    queued: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_TREND))
    depths: QueueDepths = field(default_factory=QueueDepths)
    found: int | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    peeked: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    story: Callable[[RequestTimeline], list[str]] | None = None
    longest: Longest = field(default_factory=Longest)

    def read_ends(self) -> None:
        ends = (found.finish for found in reversed(self.run.ends) if found.finish is not None)
        shown = (end for end in ends if end.reason != "unused" and end.role != "negative")
        self.ends = list(islice(shown, MAX_LISTED))

    @property
    def notes(self) -> list[Note]:
        return [note for note in reversed(self.run.notes) if note.step >= self.since["note"]]

    def row(self, number: int) -> Row:
        return self.run.row(number, self.moment.step, self.moment.slot_step)

    def is_busy(self, number: int) -> bool:
        return self.run.is_busy(number, self.moment.slot_step)

    def mark(self, number: int) -> str:
        """Return the newest event in a slot, or ""."""
        kind, step = self.run.marks.get(number, ("failed", -1))
        if step >= self.since[kind]:
            return kind
        return "admitted" if self.run.admitted(number) >= self.since["admitted"] else ""

    @property
    def has_unicode(self) -> bool:
        return not self.glyphs.cut.isascii()

    def name(self, text: str) -> str:
        name = printable(text)
        return name if self.has_unicode else name.encode("ascii", "replace").decode("ascii")

    def cut(self, text: str, width: int) -> str:
        return cut_middle(text, width, self.glyphs.cut)

    def request(self, row: Row) -> str:
        return EMPTY if row.request is None else self.name(row.label)

    def note(self, note: Note) -> Part:
        name = self.cut(self.name(note.label), MAX_NAME)
        return f"{self.glyphs.marks[note.kind]} {name} {self.name(note.text)}", note.kind


# -- the header -----------------------------------------------------------------------------------


def header(scene: Scene, width: int, max_lines: int) -> list[Line]:
    """Return the header in 1 to `max_lines` lines of `width`, the most important ones."""
    about = scene.run, scene.plan, scene.gauges, scene.moment
    found, speeds = count_facts(*about, scene.glyphs.separator), rate_facts(*about)
    if max_lines == 1:
        return [_facts(kept([*found, speeds[0]._replace(rank=3)], width)) or [(" ", "")]]
    seconds = scene.moment.seconds
    time = "" if seconds is None else clock(seconds)
    first = _facts(kept(found, width - len(GAP) - len(time)))
    room = width - line_width(first) - len(time) - 2 * len(GAP)
    title = scene.name(scene.plan.title)
    if room >= min(MIN_TITLE, cell_width(title)):
        first = [(scene.cut(title, room), "title"), (GAP, ""), *first]
    first = _apart(first, [(time, LABEL)], width)
    lines = [first, _progress(scene, width), _rates(scene, speeds, width)]
    lines += [_memory(scene, width), _queue(scene, width)]
    by_rank = (lines[0], lines[2], lines[4], lines[1], lines[3])
    wanted = [line for line in by_rank if line is not None][:max_lines]
    return [line for line in lines if line is not None and line in wanted]


def _progress(scene: Scene, width: int) -> Line | None:
    found = progress(scene.run, scene.plan, scene.gauges, scene.moment)
    if found is None:
        return None
    share, left = found
    parts = [(f"{f'{int(share * 100)}%':>4}", "figure")]
    eta = "" if left is None else f"{GAP}eta {clock(left)}"
    if len(eta) + 4 + MIN_BAR <= width:
        parts.append((eta, LABEL))
    num_tokens = scene.moment.num_tokens
    tokens = f"{GAP}{short(num_tokens)} token{'' if num_tokens == 1 else 's'}"
    room = width - line_width(parts)
    if room - len(tokens) >= MAX_BAR // 2:
        parts.append((tokens, LABEL))
        room -= len(tokens)
    return [*bar(share, room - 1, scene.glyphs, "progress"), (" ", ""), *parts]


def _rates(scene: Scene, found: list[Fact], width: int) -> Line:
    around = len(GAP) + len("busy ") + len(" 100%")
    line = _facts(kept(found, width - (around + MIN_TREND if width >= TREND_WIDTH else 0)))
    room = width - line_width(line) - around
    if room < MIN_TREND or not scene.busy:
        return line
    trend = list(scene.busy)[-min(room, MAX_TREND) :]
    share = f" {int(sum(trend) / len(trend) * 100)}%"
    cells = "".join(level(of, scene.glyphs) for of in trend)
    return _apart(line, [("busy ", LABEL), (cells, "bar"), (share, "figure")], width)


def _memory(scene: Scene, width: int) -> Line | None:
    use, facts = scene.gauges.block_use, block_facts(scene.run, scene.gauges)
    if use is None:
        return None
    title: Line = [("KV ", LABEL)]
    if use.free is None:
        return [*title, *_facts(kept(facts, width - line_width(title)))]
    around = line_width(title) + len(GAP)
    line = _facts(kept(facts, width - MIN_BAR - around))
    room = max(min(width - line_width(line) - around, MAX_BAR), 1)
    num_held = use.used + (use.cached or 0)
    first, second = (round(n * room / max(num_held + use.free, 1)) for n in (use.used, num_held))
    widths = (first, second - first, room - second)
    blocks = zip(scene.glyphs.bars, widths, ("used", "cached", "free"), strict=True)
    return [*title, *((glyph * cells, style) for glyph, cells, style in blocks), (GAP, ""), *line]


def _queue(scene: Scene, width: int) -> Line | None:
    first, why = next_up(scene.run, scene.gauges)
    text = scene.name(f"{first}: {why}")
    trend = list(scene.queued)[-min(width // MIN_TREND, MAX_QUEUE) :]
    line: Line = [("queue ", LABEL), (levels(trend, scene.glyphs), "queue")]
    line.append((f" {scene.gauges.num_queued:,}", "figure"))
    if line_width(line) > width:
        return None
    notes = scene.notes
    news = [scene.note(note) for note in notes]
    # In a recorded run, the note of the step itself comes first.
    if scene.story is not None and notes and notes[0].step == scene.moment.step:
        part = news.pop(0)
        if line_width(line) + len(GAP) + cell_width(part[0]) <= width:
            line += [(GAP, ""), part]
    if text != ": ":
        style = "blocked" if why.startswith("blocked") else ""
        room = width - line_width(line) - len(GAP) - len("next ")
        if room < MIN_TITLE:
            return line
        line += [(GAP, ""), ("next ", LABEL), (scene.cut(text, room), style)]
    for end in scene.ends:
        if end.reason in FAILURES:
            continue  # a note shows it
        name = scene.cut(scene.name(label_of(end.id, end.index, end.role)), MAX_NAME)
        news.append((f"{scene.glyphs.ended} {name} {end.reason} {end.tokens}", "stop"))
    for part in news:
        if line_width(line) + len(GAP) + cell_width(part[0]) > width:
            break
        line += [(GAP, ""), part]
    return line


def _facts(found: list[Fact]) -> Line:
    line: Line = []
    for fact in found:
        line += [(GAP, ""), (fact.text, fact.style)] if line else [(fact.text, fact.style)]
    return line


def _apart(left: Line, right: Line, width: int) -> Line:
    spare = width - line_width(left) - line_width(right)
    return [*left, (" " * spare, ""), *right] if spare > 0 else left


# -- slots as rows of a table, in one column or several -------------------------------------------


class Columns(NamedTuple):
    """The widths of the columns of a row; 0 for a column that does not fit."""

    slot: int
    request: int
    bar: int
    tokens: int
    drafts: int
    phase: int
    strip: int

    @property
    def width(self) -> int:
        gaps = 2 + bool(self.tokens) + sum(2 * bool(width) for width in self[4:])
        return sum(self) + gaps


def plan_columns(width: int, slot: int, longest: Longest) -> Columns:
    """Return the widths of the columns, of which names and bars come first."""
    request = min(longest.request, max(MIN_REQUEST, width // 5))
    bar = MIN_ROW_BAR if width < 2 * MIN_CELL else MIN_ROW_BAR + 3
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
        bar += min(room - more, MAX_ROW_BAR)
    return Columns(slot, request, bar, tokens, drafts, phase, strip)


def grid(
    scene: Scene, width: int, num_rows: int, numbers: Sequence[int], *, has_titles: bool
) -> list[Line]:
    """Return slots in at most `num_rows`, down the first column, then down the next."""
    shown = {number: scene.row(number) for number in numbers}
    scene.longest.see(scene, shown.values())
    num_columns = -(-len(numbers) // num_rows)
    height = -(-len(numbers) // num_columns)
    column = (width + COLUMN_GAP) // num_columns - COLUMN_GAP
    columns = plan_columns(column, slot_width(scene), scene.longest)
    rows = [[_titles(scene, columns)] * num_columns] if has_titles else []
    rows += [
        [_row(scene, number, shown[number], columns) for number in numbers[first::height]]
        for first in range(height)
    ]
    gap = (" " * COLUMN_GAP, "")
    return [[part for cell in cells for part in (gap, *cell)][1:] for cells in rows]


def slot_width(scene: Scene) -> int:
    return len(scene.run.name_of(scene.run.num_slots - 1))


def drafts_of(row: Row) -> str:
    return "" if row.drafts is None else f"{row.drafts.accepted}/{row.drafts.drafted}"


def _row(scene: Scene, number: int, row: Row, columns: Columns) -> Line:
    mark, is_found = scene.mark(number), number == scene.found
    name = scene.cut(scene.request(row), columns.request)
    line: Line = [
        (f"{scene.run.name_of(number):>{columns.slot}}", LABEL),
        (scene.glyphs.marks[mark], mark),
        (pad(name, columns.request), "found" if is_found else ""),
        (scene.glyphs.found if is_found else " ", ""),
    ]
    if row.request is not None:
        line += bar(row.share, columns.bar, scene.glyphs, hue_of(row.request.id))
    else:
        line.append((" " * columns.bar, ""))
    if columns.tokens:
        line.append((f" {row.progress:>{columns.tokens}}", ""))
    if columns.drafts:
        line += [("  ", ""), (f"{drafts_of(row):>{columns.drafts}}", "drafts")]
    if columns.phase:
        style = STYLES.get(row.phase, row.phase)
        line += [("  ", ""), (f"{row.phase:<{columns.phase}}", style)]
    if columns.strip:  # it grows to the right, then scrolls
        cells = scene.strips.last(number, columns.strip)
        line += [("  ", ""), *joined(cells), (" " * (columns.strip - len(cells)), "")]
    return line


def _titles(scene: Scene, columns: Columns) -> Line:
    text = f"{'#':>{columns.slot}} {'request':<{columns.request}} "
    tokens = columns.bar + (columns.tokens + 1 if columns.tokens else 0)
    text += f"{'tokens'[:tokens]:<{tokens}}"
    if columns.drafts:
        text += f"  {'drafts':>{columns.drafts}}"
    if columns.phase:
        text += f"  {'phase':<{columns.phase}}"
    if columns.strip:
        steps = scene.strips.ends(columns.strip)
        num_steps, num_cells = steps[-1] - steps[0], max(len(steps) - 1, 1)
        each = -(-num_steps // num_cells)
        shown = f"last {counted(num_steps, 'step')}"
        shown += f", about {each:,} a cell" if each > 1 else ""
        texts = (f"{shown}  {scene.glyphs.admitted} admitted", shown)
        fitting = (each for each in texts if len(each) <= columns.strip)
        text += f"  {next(fitting, 'steps'[: columns.strip])}"
    return [(text.ljust(columns.width), LABEL)]


# -- many slots as cells of a map -----------------------------------------------------------------


class Map(NamedTuple):
    """The layout of a map.

    label: the width of the number before a row.  per_row: cells in a row.  size: the width of a
    cell.  num_slots: slots that share a cell.
    """

    label: int
    per_row: int
    size: int
    num_slots: int

    @property
    def width(self) -> int:
        return self.label + self.per_row * self.size

    def height(self, num_slots: int) -> int:
        return -(-num_slots // (self.per_row * self.num_slots))


def plan_map(num_slots: int, width: int, num_rows: int) -> Map:
    label = len(str(num_slots - 1)) + 1 if width >= MIN_LABELLED else 0
    for room in (width - max(MIN_PANEL, width // 2) - COLUMN_GAP, width):
        for size in range(MAX_CELL, 0, -1):
            for per_row in PER_ROW:
                found = Map(label, per_row, size, 1)
                if found.width <= room and found.height(num_slots) <= num_rows:
                    return found
    per_row = width - label
    return Map(label, per_row, 1, max(-(-num_slots // (per_row * num_rows)), 1))


def heat_map(scene: Scene, width: int, num_rows: int) -> list[Line]:
    num_slots, lines = scene.run.num_slots, list[Line]()
    has_title = num_rows > 1
    shape = plan_map(num_slots, width, num_rows - has_title)
    if has_title:
        what = f"{shape.num_slots} slots a cell" if shape.num_slots > 1 else "a cell a slot"
        texts = (f"{counted(num_slots, 'slot')}, {what}", what, what[:width])
        room = max(shape.width, min(width, MIN_PANEL)) if width >= MIN_LABELLED else width
        lines.append([(next(text for text in texts if len(text) <= room), LABEL)])
    for first in range(0, num_slots, shape.per_row * shape.num_slots):
        line: Line = [(f"{first:>{shape.label - 1}} ", LABEL)] if shape.label else []
        stop = min(first + shape.per_row * shape.num_slots, num_slots)
        for start in range(first, stop, shape.num_slots):
            if shape.num_slots == 1:
                line += _cell(scene, start, shape.size)
            else:
                numbers = range(start, min(start + shape.num_slots, num_slots))
                line.append(_shared_cell(scene, numbers))
        lines.append(joined(line))
    panel_width, below = width - shape.width - COLUMN_GAP, num_rows - len(lines)
    if panel_width < MIN_PANEL:
        if below <= MANY or width < MIN_CELL:
            return lines
        return [*lines, *worth_seeing(scene, width, below)]
    beside = worth_seeing(scene, panel_width, num_rows)
    lines += [[]] * (len(beside) - len(lines))
    for place, right in enumerate(beside):
        spare = shape.width + COLUMN_GAP - line_width(lines[place])
        lines[place] = [*lines[place], (" " * spare, ""), *right]
    return lines


def _cell(scene: Scene, number: int, size: int) -> Line:
    """Return the cell of one slot: the progress of its sequence, or its mark."""
    mark, glyphs, row = scene.mark(number), scene.glyphs, scene.row(number)
    is_marked = mark in ("preempted", "failed")
    width = size - (size > 1)
    gap: Line = [(" " * (size - width), "")]
    if row.request is None:
        text, style = (glyphs.marks[mark], mark) if is_marked else (glyphs.nothing, "idle")
        return [(text.ljust(width), style), *gap]
    style = hue_of(row.request.id)
    share = max(row.share, 1 - ALL)  # a new sequence is visible as well
    if width == 1:
        return [(level(share, glyphs), mark if is_marked else style), *gap]
    if is_marked:
        return [(glyphs.marks[mark], mark), *bar(share, width - 1, glyphs, style), *gap]
    return [*bar(share, width, glyphs, style), *gap]


def _shared_cell(scene: Scene, numbers: Sequence[int]) -> Part:
    """Return the shade of several slots, solid if all are busy."""
    busy, glyphs = sum(map(scene.is_busy, numbers)), scene.glyphs
    if not busy:
        return glyphs.nothing, "idle"
    marks = set(map(scene.mark, numbers))
    style = next((mark for mark in ("failed", "preempted") if mark in marks), "bar")
    return shade(busy / len(numbers), glyphs), style


def worth_seeing(scene: Scene, width: int, num_lines: int) -> list[Line]:
    lines: list[Line] = []
    notes = scene.notes[: max(num_lines // 4, 1)]
    if notes and num_lines > 2 * MANY:
        lines = [[("preempted or failed", LABEL)]]
        lines += [[(scene.cut(text, width), style)] for text, style in map(scene.note, notes)]
    rows = {number: scene.row(number) for number in range(scene.run.num_slots)}
    running = [
        n for n, row in rows.items() if row.max_tokens and row.request and not row.request.finish
    ]
    each = max((num_lines - len(lines)) // 2 - 1, 1)
    ending = nsmallest(each, running, key=lambda n: rows[n].max_tokens - rows[n].num_tokens)
    longest = nsmallest(each, running, key=lambda n: -rows[n].num_tokens)
    for title, numbers in (("about to end", ending), ("longest", longest)):
        if not numbers:
            continue
        scene.longest.see(scene, [rows[number] for number in numbers])
        columns = plan_columns(width, slot_width(scene), scene.longest)
        lines.append([(title, LABEL)])
        lines += [_row(scene, number, rows[number], columns) for number in numbers]
    return lines[:num_lines]


# -- scrolling and finding ------------------------------------------------------------------------

Found = RequestTimeline | str  # a sequence, or the id of an unread request

BROWSING_KEYS = (
    ("up, down", "select a slot, and show its request"),
    ("page up, page down", "select a slot a page away"),
    ("home, end", "select the first, last slot"),
    ("/", "find a request by its id or a part of it"),
    ("n, N", "next, previous slot with such a request"),
    ("escape", "show all slots"),
    ("?", "show keys and signs, or hide them"),
)
MAX_SHOWN = 40  # cells of an id in the last line


class Browser:
    """The visible slots, the request to follow and the line of input, as keys change them.

    upcoming, knows_upcoming: see Gauges.  selected: a slot, whose request has a panel.
    help_page: the page of help that is shown, from 1, or 0.
    """

    def __init__(
        self,
        upcoming: Callable[[str], str | None] = lambda _: None,
        knows_upcoming: Callable[[], bool] = lambda: False,
    ) -> None:
        self.found: Found | None = None
        self.selected: int | None = None
        self.help_page = 0
        self._upcoming, self._knows_upcoming = upcoming, knows_upcoming
        self._first_slot: int | None = None  # None for all slots
        self._num_rows = 1
        self._wanted = ""
        self._prompt: InputLine | None = None
        self.message = ""
        self._followed: int | None = None  # the last slot of `found`

    def press(self, key: str, scene: Scene) -> bool:
        """Process a key; return whether it means something here."""
        if self._prompt is not None:
            if not self._prompt.press(key):
                self._prompt = None
        elif key == "?":
            self.help_page += 1
        elif key == "escape":
            self._first_slot = self.selected = self.found = None
            self.help_page, self.message = 0, ""
        elif key == "/":
            self.ask(InputLine("find ", partial(self._find, scene)))
        elif key in ("n", "N") and self._wanted:
            held = [request for request in _holding(scene) if self._wanted in request.label]
            if not held:
                self._look_for(self._wanted, scene)
                return True
            slots, here = [slot_of(request) or 0 for request in held], slot_of(self.found)
            place = 0 if key == "n" else -1
            if here is not None:
                place = bisect_right(slots, here) if key == "n" else bisect_left(slots, here) - 1
            self.found, self._followed, self.selected = held[place % len(held)], None, None
        else:
            num_slots, page = scene.run.num_slots, max(self._num_rows - 1, 1)
            steps = {"up": -1, "down": 1, "page-up": -page, "page-down": page}
            steps |= {"left": -page, "right": page, "home": -num_slots, "end": num_slots}
            if key not in steps:
                return False
            at = slot_of(self.found) if self.selected is None else self.selected
            if at is None:
                at = num_slots - 1 if key == "end" else self._first_slot or 0
            else:
                at = min(max(at + steps[key], 0), num_slots - 1)
            self.selected, self.found, self.message, self.help_page = at, None, "", 0
        return True

    def ask(self, prompt: InputLine) -> None:
        """Read a line from the keyboard."""
        self._prompt, self.message, self.help_page = prompt, "", 0

    def paste(self, text: str) -> None:
        if self._prompt is not None:
            self._prompt.paste(text)

    @property
    def is_typing(self) -> bool:
        return self._prompt is not None

    @property
    def is_used(self) -> bool:
        is_elsewhere = (self._first_slot, self.selected, self.found) != (None, None, None)
        return is_elsewhere or self._prompt is not None or bool(self.message)

    def subject(self, scene: Scene) -> RequestTimeline | None:
        """Return the request that has a panel."""
        if isinstance(self.found, RequestTimeline):
            return self.found
        return None if self.selected is None else scene.row(self.selected).request

    @property
    def has_panel(self) -> bool:
        return self.selected is not None or isinstance(self.found, RequestTimeline)

    def rows(self, num_slots: int, num_rows: int) -> range | None:
        at, first = self.selected, self._first_slot
        is_whole = num_rows >= num_slots
        if num_rows < 1 or (at is None and (first is None or is_whole) and not self.has_panel):
            self._first_slot = None
            return None
        if is_whole:
            self._first_slot = None
            return range(num_slots)
        first = first or 0
        if at is not None:
            first = min(max(first, at - num_rows + 1), at)
        self._num_rows, self._first_slot = num_rows, min(first, num_slots - num_rows)
        return range(self._first_slot, self._first_slot + num_rows)

    def help(
        self, keys: Sequence[tuple[str, str]], glyphs: Glyphs, width: int, room: int
    ) -> Sequence[Line]:
        """Return the keys and the signs, on one page if they fit, or nothing."""
        if not self.help_page:
            return ()
        found, signs = help_lines(keys, width), legend(glyphs, width)
        pages = [found, signs]
        if len(found) + 1 + len(signs) <= room:
            pages = [[*found, [], *signs]]
        if self.help_page > len(pages):
            self.help_page = 0
        return pages[self.help_page - 1] if self.help_page else ()

    def follow(self, scene: Scene) -> None:
        if isinstance(self.found, str):  # it may have arrived
            self._look_for(self.found, scene, is_part=False)
        slot, first = slot_of(self.found), self._first_slot
        is_shown = first is not None and first <= (slot or 0) < first + self._num_rows
        if slot is not None and slot != self._followed and not is_shown:
            self._first_slot = max(slot - self._num_rows // 2, 0)
        self._followed = slot
        self.selected = self.selected if self.found is None else None
        scene.found = self.selected if self.found is None else slot

    def line(self, scene: Scene, width: int) -> Line:
        """Return the prompt, the place of the request, or the visible slots, in one line."""
        if self._prompt is not None:
            title = self._prompt.title
            typed = scene.cut(scene.name(self._prompt.typed), max(width - len(title) - 1, 1))
            return [(title, LABEL), (typed, ""), ("_", "")]
        if self.found is not None:
            text = whereabouts(scene, self.found)
        elif self.message:
            text = self.message
        elif self._first_slot is not None:
            last = min(self._first_slot + self._num_rows, scene.run.num_slots) - 1
            text = f"slots {self._first_slot:,} to {last:,} of {scene.run.num_slots:,}"
        else:
            return []
        return [(scene.cut(text, width), "found")]

    def _find(self, scene: Scene, typed: str) -> None:
        self._wanted, self.found, self._followed, self.selected = typed, None, None, None
        if typed:
            self._look_for(typed, scene)

    def _look_for(self, wanted: str, scene: Scene, *, is_part: bool = True) -> None:
        """Find the sequence called `wanted`, or else the first whose name contains it."""
        waiting = (found for found in scene.run.fold.open if found.admission is None)
        upcoming = filter(None, [self._upcoming(wanted)])
        known: list[Found] = [*_holding(scene), *waiting, *upcoming, *reversed(scene.run.ends)]
        whole = (found for found in known if name_of(found) == wanted)
        parts = (found for found in known if is_part and wanted in name_of(found))
        self.found = next(chain(whole, parts), None)
        if self.found is None:
            name = scene.cut(scene.name(wanted), MAX_SHOWN)
            self.message = f"unknown: {name}; it was not read yet, or ended long ago"
            ends = scene.run.ends
            if self._knows_upcoming() and len(ends) != ends.maxlen:
                self.message = f"no request has {name} in its id"


def slot_of(found: Found | None) -> int | None:
    if not isinstance(found, RequestTimeline) or found.finish is not None:
        return None
    return None if found.admission is None else found.admission.event.slot


def name_of(found: Found) -> str:
    return found if isinstance(found, str) else found.label


def whereabouts(scene: Scene, found: Found) -> str:
    name = scene.cut(scene.name(name_of(found)), MAX_SHOWN)
    if isinstance(found, str):
        gauges = scene.gauges
        if not gauges.num_coming or found in {each.id for each in gauges.waiting}:
            return f"{name} waits in the queue: its line is not read yet"
        knows_queue = gauges.num_queued <= len(gauges.waiting)
        return f"{name} has not arrived" if knows_queue else f"{name}: its line is not read yet"
    if (end := found.finish) is not None:
        tokens = counted(end.tokens, "token")
        return f"{name} ended in step {end.step:,}: {end.reason}, {tokens}"
    if found.admission is not None:
        return f"{name} is in slot {found.admission.event.slot:,}"
    waits = "was preempted and waits" if found.admissions else "waits"
    return f"{name} {waits} since step {found.waits_from:,}"


def help_lines(keys: Sequence[tuple[str, str]], width: int) -> list[Line]:
    column = max(cell_width(key) for key, _ in keys) + 2
    lines: list[Line] = []
    for key, what in keys:
        line = [(pad(key, column), "figure"), (what, "")]
        lines.append(line if line_width(line) <= width else [(f"{key}  {what}"[:width], "")])
    return lines


def legend(glyphs: Glyphs, width: int) -> list[Line]:
    """Return the signs of a picture with their meanings, in two columns if they fit."""
    signs = [
        (glyphs.marks["admitted"], "admitted just now"),
        (glyphs.marks["preempted"], "preempted"),
        (glyphs.marks["failed"], "failed"),
        (glyphs.ended, "finished"),
        (glyphs.found, "found or selected"),
        (glyphs.blocks[-1] * 2 + glyphs.nothing, "tokens of max_tokens"),
        (glyphs.bars, "KV blocks: used, cached, free"),
        (glyphs.admitted, "admission: a request begins"),
        (glyphs.running, "running"),
        (glyphs.prefill, "part of a prefill"),
        (glyphs.nothing, "idle, or still to come"),
        (glyphs.shades, "several: the darker, the busier"),
        (glyphs.levels[::3], "from nothing to the maximum"),
    ]
    half = -(-len(signs) // 2)
    left, right = help_lines(signs[:half], width), help_lines(signs[half:], width)
    column = max(map(line_width, left)) + 2 * COLUMN_GAP
    if column + max(map(line_width, right)) > width:
        return [*left, *right]
    rows = zip_longest(left, right, fillvalue=())
    return [[*a, (" " * (column - line_width(list(a))), ""), *b] for a, b in rows]


def _holding(scene: Scene) -> list[RequestTimeline]:
    held = sorted(scene.run.fold.slots.items())
    return [request for slot, request in held if slot_of(request) == slot]


# -- the whole picture ----------------------------------------------------------------------------


def picture(
    scene: Scene,
    width: int,
    height: int,
    *,
    has_gantt: bool,
    browser: Browser | None = None,
    overlay: Callable[[int], Sequence[Line]] = lambda _: (),
    footer: Callable[[], Line] | None = None,
) -> list[Line]:
    """Return the picture in at most `height` lines of at most `width`.

    The first line is blank if there is room, for the cursor.  has_gantt: spare lines show a gantt,
    the queue and the newest results.  browser: chooses the slots.  overlay: returns what replaces
    them, in at most so many lines.  footer: returns the last line.
    """
    if footer is not None and height > 1:
        lines = picture(
            scene, width, height - 1, has_gantt=has_gantt, browser=browser, overlay=overlay
        )
        spare = height - 1 - len(lines) if has_gantt else 0
        return [*lines, *[[]] * spare, footer()]
    blank: list[Line] = [[]] if height >= ROOMY else []
    over = overlay(height - 2 * len(blank) - 1)
    if over:
        return [*blank, *header(scene, width, 1), *blank, *over][:height]
    top = [*blank, *header(scene, width, max(1, height // HEADER_SHARE))][:height]
    room, num_slots = height - len(top), scene.run.num_slots
    if room < 1:
        return top
    num_rows, num_details = room - len(blank) - 1 if width >= MIN_CELL else 0, 0
    if browser is not None and browser.has_panel and num_rows >= MIN_DETAIL_ROOM:
        num_details = max(num_rows * 3 // 5, num_rows - num_slots)
        num_rows -= num_details
    wanted = None if browser is None else browser.rows(num_slots, num_rows)
    if browser is not None and wanted is not None:
        rows = grid(scene, width, num_rows, wanted, has_titles=True)
        num_lists = num_details // 2 if has_gantt and num_details >= 3 * MIN_LISTS else 0
        if num_details:
            known = details(scene, browser, width, num_details - num_lists - 1)
            rows += [[], *known]
        if num_lists:
            rows += [[]] * (num_details - num_lists - len(known))
            rows += lists(scene, width, num_lists - 1)
        return [*top, *blank, *rows]
    num_columns = -(-num_slots // room)  # at least; the blank line and titles make way
    if num_slots >= MANY_SLOTS or (width + COLUMN_GAP) // num_columns - COLUMN_GAP < MIN_CELL:
        return top + heat_map(scene, width, room)
    spare = room - -(-num_slots // num_columns)
    has_titles = spare > 0
    blank = blank if spare > 1 else []
    num_rows = room - len(blank) - has_titles
    rows = grid(scene, width, num_rows, range(num_slots), has_titles=has_titles)
    spare = num_rows + has_titles - len(rows)
    if has_gantt:
        room_for_gantt = spare - 1 - MIN_LISTS
        gantt = small_gantt(scene, width, room_for_gantt) if room_for_gantt >= MIN_GANTT else []
        rows += [[], *gantt] if gantt else []
        spare -= len(gantt) + bool(gantt)
        rows += [[], *lists(scene, width, spare - 1)] if spare > MANY else []
    return [*top, *blank, *rows]


def lists(scene: Scene, width: int, height: int) -> list[Line]:
    """Return the newest results, and the queue beside them if there is room."""
    left = max(MIN_QUEUE, width * 2 // 5) if width >= MIN_BESIDE else 0
    found = results(scene, width - left - COLUMN_GAP if left else width, height)
    if not left:
        return found
    pairs = zip_longest(queue(scene, left, height), found, fillvalue=list[Part]())
    gap = left + COLUMN_GAP
    return [[*one, (" " * (gap - line_width(one)), ""), *other] for one, other in pairs]


def queue(scene: Scene, width: int, height: int) -> list[Line]:
    """Return the waiting requests in order, and why the first one waits."""
    run, gauges = scene.run, scene.gauges
    lines: list[Line] = [[("queue ", LABEL), (f"{gauges.num_queued:,}", "figure")]]
    _, why = next_up(run, gauges)
    style = "blocked" if why.startswith("blocked") else ""
    lines[0] += [(GAP, ""), (scene.cut(why, width - line_width(lines[0]) - len(GAP)), style)]
    names = gauges.waiting[: max(height - 2, 1)]
    labels = [scene.cut(scene.name(label_of_name(each)), MAX_NAME) for each in names]
    column = max(map(cell_width, labels), default=0)
    for each, label in zip(names, labels, strict=True):
        found, text = run.fold.find(each), ""
        if found is not None:
            waited = max(scene.moment.step + 1 - found.waits_from, 0)
            preempted = f"preempted{GAP}" if found.admissions else ""
            text = f"{preempted}waits {counted(waited, 'step')}"
        lines.append([(f"{pad(label, column)}{GAP}{text[: width - column - len(GAP)]}", "")])
    num_more = gauges.num_queued - len(names)
    if num_more > 0 and len(lines) < height:
        lines.append([(f"{scene.glyphs.cut} {num_more:,} more", LABEL)])
    return lines


def results(scene: Scene, width: int, height: int) -> list[Line]:
    """Return the newest finished requests with the beginnings of their texts."""
    lines: list[Line] = [[("results", LABEL)]]
    ends = scene.ends[: max(height - 1, 0)]
    labels = [label_of(end.id, end.index, end.role) for end in ends]
    names = [scene.cut(scene.name(label), MAX_NAME) for label in labels]
    column = max(map(cell_width, names), default=0)
    tokens = max((len(f"{end.tokens:,}") for end in ends), default=0)
    for end, label, name in zip(ends, labels, names, strict=True):
        has_failed = end.reason in FAILURES
        mark = scene.glyphs.marks["failed"] if has_failed else scene.glyphs.ended
        style = STYLES.get(end.reason, end.reason)
        text = scene.texts.get(label, "")
        if end.error is not None:
            text = end.error.message
        text = scene.name(" ".join(text[:width].split()))
        facts = f"{end.reason:<7} {end.tokens:>{tokens},}"
        line = [(f"{mark} ", style), (f"{pad(name, column)}{GAP}{facts}{GAP}", "")]
        room = width - line_width(line)
        if room < 1:
            line = [(f"{mark} ", style), (scene.cut(name, max(width - 2, 1)), "")]
        elif cell_width(text) > room:
            text = fit(text, room - 1) + scene.glyphs.cut
        lines.append([*line, (text if room > 0 else "", style if has_failed else "")])
    return lines


def details(scene: Scene, browser: Browser, width: int, height: int) -> list[Line]:
    """Return what is known of the selected request: its life, then its prompt and its text."""
    request = browser.subject(scene)
    if request is None:
        return [[(f"slot {scene.run.name_of(browser.selected or 0)} is empty", LABEL)]]
    step, name = scene.moment.step, scene.name(request.label)
    life = life_of(scene, request) if scene.story is None else scene.story(request)
    title: Line = [(scene.cut(name, width), "title")]
    if request.max_tokens:
        tokens = f"{GAP}{request.tokens_after(step):,} of {counted(request.max_tokens, 'token')}"
        title += [(tokens, "")] if line_width(title) + len(tokens) <= width else []
    prompt, text = scene.peeked.get(request.label, ("", ""))
    text = scene.texts.get(request.label, text) if request.finish is not None else text
    sentences = [folded(scene.name(each), width) for each in life]
    room, cut = height - 1 - bool(prompt) - bool(text), list[str]()
    while len(sentences) > 1 and sum(map(len, sentences)) + len(cut) > room:
        minor = (n for n, lines in enumerate(sentences) if lines[0].startswith(MINOR))
        del sentences[next(minor, 0)]  # the oldest one
        cut = [scene.glyphs.cut]
    found: list[Line] = [title, *([(line, "")] for line in chain(cut, *sentences))]
    asked = folded(scene.name(f"{PROMPT}{' '.join(prompt.split())}"), width) if prompt else []
    room = max(width - len(TEXT), 1)
    answer = folded(scene.name(" ".join(text.split())), room) if text else []
    num_left = height - len(found)
    asked = asked[: max(num_left - len(answer), num_left // 3, 1)]
    found += [[(line, LABEL)] for line in asked]
    last = answer[-max(num_left - len(asked), 1) :]
    if len(last) < len(answer):
        last[0] = scene.glyphs.cut + fit(last[0], room - 1)
    labels = chain([TEXT], repeat(" " * len(TEXT)))
    found += [[(label, LABEL), (line, "")] for label, line in zip(labels, last, strict=False)]
    return found[:height]


def life_of(scene: Scene, request: RequestTimeline) -> list[str]:
    """Return the life of a request so far: waits, slots, chunks, cache hits and preemptions."""
    lines: list[str] = []
    arrive, end = request.arrive, request.finish
    num_prompt = 0 if arrive is None else arrive.prompt_tokens
    if arrive is not None:
        lines.append(f"arrived in step {arrive.step:,} with {counted(num_prompt, 'prompt token')}")
    waits_from = 0 if arrive is None else arrive.step
    for admission in request.admissions:
        admit, lost = admission.event, admission.preempt
        if admit.step > admission.waits_from:
            lines.append(f"waited {counted(admit.step - admission.waits_from, 'step')}")
        text = f"slot {admit.slot} from step {admit.step:,}"
        if admit.cached:
            known = num_prompt + admit.generated
            text += f": {admit.cached:,} of {counted(known, 'token')} from the cache"
            if admit.cached_from is not None:
                text += f" (of {label_of_name(admit.cached_from)})"
        chunks = 1 + len(admission.chunks or ())
        if chunks > 1:
            text += f", prefill in {chunks:,} chunks"
        if admission.num_drafted:
            text += f", {admission.num_accepted:,} of {admission.num_drafted:,} drafts accepted"
        lines.append(text)
        if lost is not None:
            other = label_of(lost.for_id, lost.for_index, "sample")
            why = "no KV block was left" if other == request.label else f"for {other}"
            again = counted(lost.tokens, "token")
            lines.append(f"preempted before step {lost.step:,} ({why}): {again} to compute again")
            waits_from = lost.step
    if end is not None:
        lines.append(f"ended in step {end.step:,}: {end.reason}")
        if end.error is not None:
            lines.append(f"{end.error.code}: {end.error.message}")
    elif request.admission is None:
        name, why = next_up(scene.run, scene.gauges)
        reason = why if name == request.label else "others are before it in the queue"
        lines.append(f"waits since step {waits_from:,}: {reason}")
    return lines


def texts_of(results: Iterable[bytes]) -> dict[str, str]:
    """Return the texts of lines of results by label; each item may hold several lines."""
    found: dict[str, str] = {}
    for lines in results:
        for line in lines.strip().rsplit(b"\n", MAX_LISTED):
            with suppress(msgspec.DecodeError, TypeError, AttributeError):  # a cut line
                row = msgspec.json.decode(line)
                name, choices = row.get("id"), [row]
                if "custom_id" in row:
                    body = (row.get("response") or {}).get("body") or {}
                    name, choices = row["custom_id"], body.get("choices", ())
                for choice in choices:
                    message = choice.get("message") or {}
                    text = choice.get("text") or message.get("content") or ""
                    found[label_of(name, choice.get("index", 0), "sample")] = text
    return found


def small_gantt(scene: Scene, width: int, height: int) -> list[Line]:
    """Return how busy the slots were over the run, in `height` lines; [] if they do not fit."""
    history, plan, glyphs = scene.run.history, scene.plan, scene.glyphs
    num_steps, rows = scene.moment.step + 1, history.rows
    if width < MIN_WIDTH or height < max(len(rows) + 2, MIN_HEIGHT) or num_steps < 1:
        return []
    names = [f"slot {row[0]}" if len(row) == 1 else f"{row[0]}-{row[-1]}" for row in rows]
    label = max(map(len, names))
    peak = f" {scene.depths.highest(num_steps, 1)[0]:>4,}"
    room = width - label - 1 - max(len(" 100%"), len(peak))
    num_cells = min(room, num_steps * max(1, min(room // num_steps, MAX_CELLS_PER_STEP)))
    title = scene.cut(scene.name(plan.title), max(width // 3, 8))
    parts = [f"steps 0-{num_steps - 1:,}" if num_steps > 1 else "step 0"]
    parts += [counted(plan.batch_size, "slot"), plan.policy]
    if num_steps > num_cells:
        per_cell = number(num_steps / num_cells)
        parts.append(f"{per_cell} step{'' if per_cell == '1' else 's'} a cell")
    text = glyphs.separator.join(parts)
    lines: list[Line] = [[(title, "title"), ("  ", ""), (text[: width - len(title) - 2], LABEL)]]
    used = history.used(num_steps, num_cells, scene.run.open_spans())
    for row, slots in enumerate(rows):
        shares = used[row] / len(slots)
        cells = [
            (glyphs.nothing, "idle") if share <= 1 - ALL else (shade(share, glyphs), "bar")
            for share in shares
        ]
        busy = f" {whole_percent(min(float(shares.mean()), 1.0)):>4}"
        lines.append([(f"{names[row]:>{label}} ", LABEL), *joined(cells), (busy, "figure")])
    lengths = levels(scene.depths.highest(num_steps, num_cells), glyphs)
    return [*lines, [(f"{'queue':>{label}} ", LABEL), (lengths, "queue"), (peak, "figure")]]


def last_picture(scene: Scene, width: int, height: int) -> list[Line]:
    """Return the gantt that stays on the terminal, in fewer than `height` lines.

    If not all sequences were kept, it shows the last steps below a small gantt of the whole run.
    If that does not fit, only the small one.  The events of a stopped run lack requests that have
    arrived and were not read, so the queue is the one that was observed.
    """
    from ..views.gantt import MIN_WIDTH, render_gantt  # noqa: PLC0415 - only at the end

    run, plan, num_steps = scene.run, scene.plan, scene.moment.step + 1
    if num_steps < 1 or width < MIN_WIDTH:
        return small_gantt(scene, width, height)
    batch_size = plan.batch_size // plan.num_workers
    began = RunEvent(batch=batch_size, model="", settings={}, workers=plan.num_workers)
    oldest = run.ends[0].finish if len(run.ends) == run.ends.maxlen else None
    known_from = 0 if oldest is None else oldest.step + 1
    lines = render_gantt(
        run.timeline(began, num_steps),
        width=width,
        height=height,
        ascii_only=not scene.has_unicode,
        queue=scene.depths.stretches(num_steps) if scene.gauges.num_queued else (),
        known_from=known_from,
    )
    above = small_gantt(scene, width, height - len(lines) - 1) if known_from else []
    lines = [*above, [], *lines] if above else lines
    return lines if len(lines) <= height else small_gantt(scene, width, height)
