"""Draw the gantt of a run as lines of text: an overview as shades, and a close-up as bars.

The choice of slots, steps and labels below is shared with the SVG.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, takewhile
from operator import attrgetter
from os.path import commonprefix
from string import digits
from types import MappingProxyType
from typing import NamedTuple

from batcher.events import RestartEvent, RunEvent
from batcher.trace.run import SlotSpan, StepDrafts, Wait
from batcher.trace.timeline import EVERYTHING, Selection, Stretch, Timeline, clip, worst_bubble

from ..screen.terminal import (
    cell_width,
    counted,
    cut_middle,
    fill,
    listed,
    printable,
    whole_percent,
)
from ..screen.theme import Line, hue_of, joined

# -- numbers and names ---------------------------------------------------------------------------

MAX_RANGES = 3  # of slots in the title


def headline(timeline: Timeline, slots: Collection[int] = ()) -> list[str]:
    """Return the size and outcome of a run in parts; slots: the slots shown, () for all."""
    num_busy = num_preemptions = num_drafted = num_accepted = 0
    num_workers, running = timeline.run.workers, set()
    for span in timeline.spans:
        num_busy += span.end - span.start
        num_preemptions += span.preemption is not None
        num_drafted += span.drafted
        num_accepted += span.accepted
        if span.outcome is None:
            running.add(span.id)
    shown = ""
    if slots and len(slots) < timeline.num_slots:
        starts = [slot for slot in sorted(slots) if slot - 1 not in slots]
        ends = [slot for slot in sorted(slots) if slot + 1 not in slots]
        ranges = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
        shown = f", {listed(ranges, 'and')} shown"
        if len(ranges) > MAX_RANGES:
            shown = f", {len(slots):,} of them shown"
    failures, num_slots = timeline.failures, timeline.num_slots
    outputs = counted(timeline.num_outputs, "output")
    parts = {
        counted(timeline.num_steps, "step"): True,
        counted(num_workers, "worker"): num_workers > 1,
        counted(num_slots, "slot") + shown: True,
        f"{percent_of(num_busy, timeline.num_steps * num_slots)} busy": True,
        counted(timeline.num_requests, "request"): True,
        outputs: timeline.num_outputs != timeline.num_requests,
        f"{failures['error']:,} failed": failures["error"],
        f"{failures['aborted']:,} aborted": failures["aborted"],
        counted(num_preemptions, "preemption"): num_preemptions,
        counted(len(timeline.restarts), "restart"): timeline.restarts,
        f"{num_accepted:,} of {counted(num_drafted, 'draft')} accepted": num_drafted,
        f"{len(running):,} still running": running,
    }
    return [part for part, is_told in parts.items() if is_told]


def percent_of(part: int, whole: int) -> str:
    return whole_percent(part / whole) if whole else "0%"


def in_groups(slots: Sequence[int], max_groups: int) -> list[Sequence[int]]:
    size = -(-len(slots) // max_groups)
    return [slots[start : start + size] for start in range(0, len(slots), size)]


def group_name(group: Sequence[int], run: RunEvent) -> str:
    first, last = group[0], group[-1]
    slots = f"slot {first}" if len(group) == 1 else f"{first}-{last}"
    if run.workers == 1:
        return slots
    first_worker, last_worker = first // run.batch, last // run.batch
    others = "" if first_worker == last_worker else f"-{last_worker}"
    return f"w{first_worker}{others} {slots}"


MAX_ID_CELLS, MAX_FRAME_CELLS = 6, 24
MIN_CUT_CELLS = 6


def id_frame(ids: Collection[str]) -> tuple[str, str]:
    """Return the common start and end of several ids, without digits; empty for short ids."""
    if len(ids) <= 1 or max(map(cell_width, ids)) <= MAX_ID_CELLS:
        return "", ""
    before = commonprefix([*ids]).rstrip(digits)  # noqa: RUF071 - of texts, character by character
    rests = [name[len(before) :][::-1] for name in ids]
    return before, commonprefix(rests).rstrip(digits)[::-1]  # noqa: RUF071 - as above


def id_words(spans: Iterable[SlotSpan], cut: str, *, ascii_only: bool = False) -> list[str]:
    frame = id_frame({span.id for span in spans})
    ends = cut.join(printable(text, ascii_only=ascii_only) for text in frame)
    return ["ids " + cut_middle(ends, MAX_FRAME_CELLS, cut)] if any(frame) else []


def short_labels(spans: Collection[SlotSpan]) -> dict[str, str]:
    """Return the labels of `spans` without the part that all ids share."""
    before, after = map(len, id_frame({span.id for span in spans}))
    return {
        span.label: span.id[before : len(span.id) - after] + span.label[len(span.id) :]
        for span in spans
    }


def fitted_label(label: str, num_cells: int, cut: str) -> str:
    if cell_width(label) <= num_cells:
        return label
    return cut_middle(label, num_cells, cut) if num_cells >= MIN_CUT_CELLS else ""


def tick_interval(fewest: float) -> int:
    """Return the first of 1, 2, 5, 10, 20, ... that is at least `fewest`."""
    intervals: Iterator[int] = (base * 10**exponent for exponent in count() for base in (1, 2, 5))
    return next(interval for interval in intervals if interval >= fewest)


# -- which slots to show, where there are more slots than rows -----------------------------------


class ChosenSlots(NamedTuple):
    """The spans of each slot that has a row, the busy steps of all slots, and why these rows."""

    held: dict[int, list[SlotSpan]]
    busy: dict[int, int]
    reason: str


def choose_slots(
    spans: Iterable[SlotSpan],
    slots: Sequence[int],
    steps: range,
    num_rows: int,
    request_ids: Collection[str] = frozenset(),
) -> ChosenSlots:
    """Return the `num_rows` slots that say most about `steps`, which all `spans` touch.

    Slots that held `request_ids` come first.  Up to half of the other rows go to the slots with
    most preemptions and failures, and the rest to the idlest and busiest.  Unused slots come last.
    Ties go to the lower slot.
    """
    held: dict[int, list[SlotSpan]] = {slot: [] for slot in slots}
    busy = dict.fromkeys(slots, 0)
    for span in spans:
        held[span.slot].append(span)
        busy[span.slot] += len(span.clip(steps))
    if len(slots) <= num_rows:
        return ChosenSlots(held, busy, "")
    used = [slot for slot in slots if busy[slot]]
    taken: list[int] = []
    words: list[str] = []

    def take(ranked: Sequence[int], most: int, what: str) -> None:
        found = [slot for slot in ranked if slot not in taken][:most]
        taken.extend(found)
        if found:
            words.append(f"{len(found)} {what}")

    if len(used) <= num_rows:
        unused = [slot for slot in slots if not busy[slot]]
        taken = [*used, *unused[: num_rows - len(used)]]
        reason = f"{counted(len(used), 'slot')} in use"
    else:
        wanted = [slot for slot in used if any(span.id in request_ids for span in held[slot])]
        trouble = {
            slot: sum(span.ending in {"failed", "preempted"} for span in held[slot])
            for slot in used
        }
        take(wanted, num_rows, "asked for")
        troubled = sorted(filter(trouble.__getitem__, used), key=lambda slot: -trouble[slot])
        take(troubled, (num_rows - len(taken)) // 2, "with most preemptions or failures")
        if len({busy[slot] for slot in used if slot not in taken}) > 1:
            take(sorted(used, key=lambda slot: busy[slot]), (num_rows - len(taken)) // 2, "idlest")
            take(sorted(used, key=lambda slot: -busy[slot]), num_rows - len(taken), "busiest")
        else:
            take(used, num_rows - len(taken), "equally busy")
        reason = f"slots: {', '.join(words)}"
    return ChosenSlots({slot: held[slot] for slot in sorted(taken)}, busy, reason)


# -- which steps to show as bars -----------------------------------------------------------------

MAX_LABEL_CELLS = 6
MAX_ZOOM_CELLS_PER_STEP = 4
LABEL_MARGIN = 2
MAX_SHARE = 2 / 3


def choose_zoom(
    timeline: Timeline, selection: Selection, num_cells: int
) -> tuple[range, list[str]]:
    """Return the steps to draw as bars in `num_cells`, and why these, if not all or selected."""
    everything = range(timeline.num_steps)
    window = timeline.window(selection)
    if window and window != everything:
        return window, []
    if selection.request_ids:  # the steps in which they run, or else wait, and a little around
        chosen = Selection(request_ids=selection.request_ids)
        found: list[SlotSpan] | list[Wait] = list(timeline.select_spans(chosen))
        found = found or list(timeline.select_waits(chosen))
        first = min((span.start for span in found), default=0)
        stop = max((span.end for span in found), default=0)
        margin = (stop - first + 9) // 10
        around = range(max(0, first - margin), min(timeline.num_steps, stop + margin))
        if around:
            return around, []
    num_steps = readable_steps(timeline, num_cells)
    if len(everything) <= max(num_cells, num_steps / MAX_SHARE):
        return everything, []
    bubble = worst_bubble(timeline)
    if bubble is not None:  # centred, or its start if it is longer
        first = bubble.start - max(num_steps - (bubble.stop - bubble.start), 0) // 2
        idle = f"{bubble.num_idle:,} idle slot-step{'s' * (bubble.num_idle > 1)}"
        reasons = [f"worst bubble: steps {bubble.start}:{bubble.stop}", idle]
    else:
        longest = max(timeline.waiting(), key=attrgetter("num"))
        first = longest.start - num_steps // 2
        queue = f"longest queue: {longest.num:,} waiting"
        reasons = [queue if longest.num else "the start, as nothing ever waited"]
    start = min(max(first, 0), timeline.num_steps - num_steps)
    return range(start, start + num_steps), reasons


def readable_steps(timeline: Timeline, num_cells: int) -> int:
    """Return how many steps fit into `num_cells` if a usual bar has room for its label."""
    length = usual_length(timeline.spans)
    widths = sorted(cell_width(span.label) for span in islice(timeline.spans, 1000))
    cells_per_bar = min(widths[len(widths) // 2], MAX_LABEL_CELLS) + LABEL_MARGIN
    if length >= cells_per_bar:
        return num_cells * (length // cells_per_bar)
    return num_cells // min(MAX_ZOOM_CELLS_PER_STEP, -(-cells_per_bar // length))


def usual_length(spans: Iterable[SlotSpan]) -> int:
    """Return the median number of steps, or 0 without spans."""
    lengths = sorted(span.end - span.start for span in spans)
    return lengths[len(lengths) // 2] if lengths else 0


# -- rows of cells -------------------------------------------------------------------------------
#
# A row has exactly as many terminal cells as its scale.

MIN_TICK_CELLS = 10
MIN_TICK_GAP = 2


@dataclass(frozen=True)
class ChartGlyphs:
    """The characters of charts.

    endings: by SlotSpan.ending.  shades, levels: from 0 to full.
    """

    admitted: str
    forked: str
    bar: str
    prefill: str
    endings: Mapping[str, str]
    shades: str
    levels: str
    tick: str
    line: str
    brace: str
    cut: str
    dot: str


_ENDINGS = {"failed": "x", "dropped": "o", "lost": "!"}
UNICODE = ChartGlyphs(
    *("┃", "╭", "━", "▪", _ENDINGS | {"preempted": "«"}),
    *(" ░▒▓█", " ▁▂▃▄▅▆▇█", "┬", "─", "╰─╯", "…", "·"),
)
ASCII = ChartGlyphs(
    *("|", "/", "=", ":", _ENDINGS | {"preempted": "<"}),
    *(" .+*#", " 123456789", "+", "-", "^^^", "~", "-"),
)
_ENDING_STYLES = {"failed": "failed", "lost": "failed", "preempted": "preempted"}


@dataclass(frozen=True)
class Scale:
    """Steps in cells: several steps per cell, or a whole number of cells per step."""

    steps: range
    num_cells: int

    @classmethod
    def fit(cls, steps: range, max_cells: int, max_cells_per_step: int) -> "Scale":
        num_steps = len(steps)
        if num_steps > max_cells:
            return cls(steps, max_cells)
        return cls(steps, num_steps * min(max_cells // num_steps, max_cells_per_step))

    @property
    def cells_per_step(self) -> int:
        return self.num_cells // len(self.steps)

    def steps_at(self, cell: int) -> range:
        num_steps, origin = len(self.steps), self.steps.start
        first = cell * num_steps // self.num_cells
        stop = max(first + 1, (cell + 1) * num_steps // self.num_cells)
        return range(origin + first, origin + stop)

    def first_cell(self, step: int) -> int:
        num_steps, offset = len(self.steps), step - self.steps.start
        if num_steps > self.num_cells:
            return self.last_cell(step)
        return offset * self.num_cells // num_steps

    def last_cell(self, step: int) -> int:
        offset = step - self.steps.start
        return ((offset + 1) * self.num_cells - 1) // len(self.steps)

    def cells_of(self, steps: range) -> range:
        """Return the cells of `steps`, which the scale shows."""
        if not steps:
            return range(0)
        return range(self.first_cell(steps[0]), self.last_cell(steps[-1]) + 1)

    def add_busy(self, busy: list[int], span: SlotSpan) -> None:
        """Add to `busy` the number of steps of each cell in which `span` holds its slot."""
        steps = span.clip(self.steps)
        for cell in self.cells_of(steps):
            shown = self.steps_at(cell)
            busy[cell] += min(steps.stop, shown.stop) - max(steps.start, shown.start)


def bar_row(
    spans: Sequence[SlotSpan],
    labels: Mapping[str, str],
    scale: Scale,
    glyphs: ChartGlyphs,
    marks: Mapping[int, str] = MappingProxyType({}),
) -> tuple[str, list[str]]:
    """Return the row of a slot, with a bar for each sequence and its label if it fits, and styles.

    spans: the spans of the slot in `scale`, by start.  labels: the text for each label.  marks: the
    text over the bars, by cell.  A mark without room is cut at its `/`.
    """
    cells, busy = [" "] * scale.num_cells, [0] * scale.num_cells
    styles = [""] * scale.num_cells
    for span in spans:
        scale.add_busy(busy, span)
    prefills: list[range] = []  # of several steps, up to the first token
    for span in spans:
        steps = span.clip(scale.steps)
        shown = scale.cells_of(steps)
        prefill = range(steps.start, min(span.prefill_end, steps.stop))
        prefills.append(scale.cells_of(prefill) if span.prefill > 1 else range(0))
        for cell in shown:
            cells[cell] = " "
            if 2 * busy[cell] >= len(scale.steps_at(cell)):
                cells[cell] = glyphs.prefill if cell in prefills[-1] else glyphs.bar
        styles[shown.start : shown.stop] = [hue_of(span.id)] * len(shown)
        if span.ending and span.end - 1 in steps:
            cells[shown[-1]] = glyphs.endings[span.ending]
            styles[shown[-1]] = _ENDING_STYLES.get(span.ending, "")
        if span.start in steps:
            cells[shown[0]], styles[shown[0]] = glyphs.admitted, "admitted"
    free: set[int] = set()  # cells of bars with nothing on them, but the cell after a label
    for number, span in enumerate(spans):
        bar, steps = glyphs.bar, span.clip(scale.steps)
        shown = scale.cells_of(steps)
        first = max(shown[0] + 1, prefills[number].stop)
        num_free = sum(1 for _ in takewhile(bar.__eq__, cells[first : shown.stop]))
        text = fitted_label(labels[span.label], num_free, glyphs.cut)
        _write(cells, first, text)
        label_end = first + cell_width(text)
        for step, parent in ((fork.step + 1, fork.parent) for fork in span.forks):
            if step not in steps:
                continue
            cell, mark = scale.first_cell(step), f"{glyphs.forked}{parent}"
            if len(mark) > scale.last_cell(step) - cell + 1:  # the number does not fit
                mark = glyphs.forked
            if cell >= label_end:
                num_free = sum(1 for _ in takewhile(bar.__eq__, cells[cell : cell + len(mark)]))
                _write(cells, cell, mark[:num_free])
        rest = range(label_end + bool(text), shown.stop)
        free.update(cell for cell in rest if cells[cell] == bar)
    for cell, mark in marks.items():
        for text in (mark, mark.partition("/")[0]):
            if free.issuperset(range(cell, cell + len(text))):
                _write(cells, cell, text)
                break
    return "".join(cells), styles


def _write(cells: list[str], start: int, text: str) -> None:
    """Put `text` into `cells` from `start`; a wide character leaves the cell after it empty."""
    cell = start
    for char in text:
        width = cell_width(char)
        if width == 0:
            cells[cell - 1] += char
            continue
        cells[cell : cell + width] = [char] + [""] * (width - 1)
        cell += width


MANY = "+"  # a number without room
GAP = 1  # cells between two marks


def draft_marks(drafts: Iterable[StepDrafts], scale: Scale) -> dict[int, dict[int, str]]:
    """Return the marks of each slot by cell: accepted drafts, and of how many if that fits.

    A cell of several steps has their mean.  drafts: those of the steps of `scale`.
    """
    cells: dict[tuple[int, int], list[StepDrafts]] = {}
    for step in drafts:
        cells.setdefault((step.slot, scale.first_cell(step.step)), []).append(step)
    room, marks = scale.cells_per_step, dict[int, dict[int, str]]()
    for (slot, cell), steps in cells.items():
        accepted = sum(step.accepted for step in steps)
        mark = f"{accepted}/{sum(step.drafted for step in steps)}"
        if len(mark) + GAP > room:
            mark = str(round(accepted / len(steps)))
            mark = mark if len(mark) <= max(room - GAP, 1) else MANY
        marks.setdefault(slot, {})[cell] = mark
    return marks


def restart_row(restarts: Iterable[RestartEvent], scale: Scale, glyphs: ChartGlyphs) -> str:
    """Return a row with a mark where a worker was replaced, and its number if it fits."""
    cells = [" "] * scale.num_cells
    marks: dict[int, list[str]] = {}
    for restart in restarts:
        worker = "" if restart.worker is None else f"w{restart.worker}"
        marks.setdefault(scale.last_cell(restart.last_step), []).append(worker)
    free, lost = scale.num_cells, glyphs.endings["lost"]
    for cell, workers in sorted(marks.items(), reverse=True):
        texts = [lost + ",".join(workers), f"{lost}{len(workers)}", lost]
        _write(cells, cell, next(t for t in texts if len(t) <= free - cell or t == lost))
        free = cell - 1
    return "".join(cells)


def axis(scale: Scale, glyphs: ChartGlyphs) -> tuple[str, str]:
    """Return a row with the first and round steps as numbers, and a line with their ticks."""
    numbers = [" "] * scale.num_cells
    line = [glyphs.line] * scale.num_cells
    widest = len(str(scale.steps.stop)) + MIN_TICK_GAP
    fewest_steps = max(MIN_TICK_CELLS, widest) * len(scale.steps) / scale.num_cells
    interval = tick_interval(fewest_steps)
    first, free = scale.steps.start, 0
    for step in (first, *range(first - first % interval + interval, scale.steps.stop, interval)):
        cell, number = scale.first_cell(step), str(step)
        if free <= cell <= scale.num_cells - len(number):
            numbers[cell : cell + len(number)] = number
            line[cell] = glyphs.tick
            free = cell + len(number) + MIN_TICK_GAP
    return "".join(numbers), "".join(line)


# -- the page ------------------------------------------------------------------------------------

MIN_WIDTH = 40
MAX_ROWS, MIN_ROWS = 16, 4
OTHER_LINES = {1: 8, 2: 14}  # by the number of charts: lines without rows, and the shell's prompt
MAX_CELLS_PER_STEP = 8
MIN_CELLS_PER_BAR = 2


def render_gantt(
    timeline: Timeline,
    selection: Selection = EVERYTHING,
    *,
    width: int = 80,
    height: int | None = None,
    ascii_only: bool = False,
    queue: Sequence[Stretch] = (),
    known_from: int = 0,
) -> list[Line]:
    """Return the gantt of `timeline` in lines of at most `width` cells, 40 at least.

    selection: its steps or requests are drawn as bars, its slots have rows.  height: lines to fill,
    None for the usual.  queue: its length, if the timeline does not have it.  known_from: draw the
    last steps, from here at the earliest.
    """
    page = _Page(timeline, selection, max(width, MIN_WIDTH), height, queue, ascii_only=ascii_only)
    texts = fill(headline(timeline, page.slots), f" {page.glyphs.dot} ", page.page_width)
    title: list[Line] = [[(text, "title")] for text in texts]
    if not timeline.spans:
        return title
    if known_from:
        page.make_groups(num_charts=1)
        start = timeline.num_steps - readable_steps(timeline, page.num_cells)
        start = min(max(known_from, start), timeline.num_steps - 1)
        zoom = range(start, timeline.num_steps)
        return page.close_up(zoom, [f"steps {zoom.start}:{zoom.stop}", "the last"])
    zoom, reasons = choose_zoom(timeline, selection, page.num_cells)
    if zoom == range(timeline.num_steps):
        num_cells = Scale.fit(zoom, page.num_cells, MAX_CELLS_PER_STEP).num_cells
        page.chart_width -= page.num_cells - num_cells
        page.num_cells = num_cells
        page.make_groups(num_charts=1)
        return [*title, *page.close_up(zoom, [])]
    overview: list[Line] = [[], *page.overview(zoom)] if page.has_overview() else []
    reasons = [f"steps {zoom.start}:{zoom.stop}", *reasons]
    return [*title, *overview, *page.close_up(zoom, reasons)]


class _Page:
    """Lays out rows of a name, cells and a figure."""

    def __init__(
        self,
        timeline: Timeline,
        selection: Selection,
        width: int,
        height: int | None,
        queue: Sequence[Stretch],
        *,
        ascii_only: bool,
    ) -> None:
        self.timeline, self.queue, self.height = timeline, queue, height
        self.page_width = self.chart_width = width
        self.slots, self.request_ids = timeline.columns(selection), selection.request_ids
        self.ascii_only, self.glyphs = ascii_only, ASCII if ascii_only else UNICODE
        self.make_groups(num_charts=2)
        groups = [[self.slots[-1]], *self.groups]
        names = ["queue", *(group_name(group, timeline.run) for group in groups)]
        self.name_width = max(map(len, names))
        peak = max((stretch.num for stretch in queue or timeline.waiting()), default=0)
        figures = ["busy", "100%", f"max {peak}"]
        self.num_cells = width - self.name_width - 1 - 2 - max(map(len, figures))

    def make_groups(self, num_charts: int) -> None:
        self.max_rows = MAX_ROWS
        if self.height is not None:
            self.max_rows = max((self.height - OTHER_LINES[num_charts]) // num_charts, MIN_ROWS)
        self.groups = in_groups(self.slots, self.max_rows)

    def has_overview(self) -> bool:
        """Return whether to draw the whole run above; if not, perhaps each slot gets a row."""
        if len(self.groups) < len(self.slots):
            self.make_groups(num_charts=1)
            if len(self.groups) == len(self.slots):
                return False
            self.make_groups(num_charts=2)
        return self.timeline.num_steps > self.num_cells

    def overview(self, zoom: range) -> list[Line]:
        scale = self.scale(range(self.timeline.num_steps))
        first, last = scale.first_cell(zoom[0]), scale.last_cell(zoom[-1])
        brace = self.glyphs.brace
        mark = brace[0] + brace[1] * (last - first - 1) + brace[2]
        pointer = self.row("", " " * min(first, scale.num_cells - 2) + mark)
        return [*self.chart(scale, self.shades(scale)), pointer]

    def close_up(self, zoom: range, what: list[str]) -> list[Line]:
        """Return a chart of `zoom`, as bars or shades, with a caption and a legend."""
        scale = self.scale(zoom)
        if len(zoom) > self.num_cells:  # is the usual request more than a speck as a bar?
            usual = usual_length(self.spans_in(zoom)) or len(zoom)
            if usual * self.num_cells < MIN_CELLS_PER_BAR * len(zoom):
                caption = fill(what, ", ", self.page_width)
                return [*_labels(caption), *self.chart(scale, self.shades(scale))]
        spans = list(self.spans_in(zoom))
        shown, busy, reason = choose_slots(spans, self.slots, zoom, self.max_rows, self.request_ids)
        what = [*what, *id_words(spans, self.glyphs.cut, ascii_only=self.ascii_only)]
        slots = frozenset(self.slots)
        drafts = [one for one in self.timeline.drafts_in(zoom) if one.slot in slots]
        legend = self.legend(spans, scale, max((one.drafted for one in drafts), default=0))
        *lines, last = fill([*what, *filter(None, [reason])], ", ", self.page_width)
        gap = self.chart_width - cell_width(last) - len("  ".join(legend))
        if gap > 1:
            lines.append(f"{last}{' ' * gap}{'  '.join(legend)}")
        else:
            lines = [*filter(None, [*lines, last]), *fill(legend, "  ", self.page_width)]
        labels = {
            label: printable(text, ascii_only=self.ascii_only)
            for label, text in short_labels(spans).items()
        }
        marks, rows = draft_marks(drafts, scale), list[Line]()
        for slot, held in shown.items():
            bars, styles = bar_row(held, labels, scale, self.glyphs, marks.get(slot, {}))
            share = percent_of(busy[slot], len(zoom))
            rows.append(self.row(group_name([slot], self.timeline.run), bars, share, styles))
        num_hidden = len(self.slots) - len(shown)
        if num_hidden:
            num_busy = sum(busy.values()) - sum(busy[slot] for slot in shown)
            share = percent_of(num_busy, num_hidden * len(zoom))
            rows.append(self.row("", f"+{counted(num_hidden, 'more slot')}", share))
        return [*_labels(lines), *self.chart(scale, rows)]

    def legend(self, spans: Collection[SlotSpan], scale: Scale, most_drafted: int) -> list[str]:
        glyphs, num_cells = self.glyphs, scale.cells_per_step
        drafts = "n drafts accepted" if num_cells else "n drafts accepted a step"
        if len(f"{most_drafted}/{most_drafted}") + GAP <= num_cells:
            drafts = "n/m drafts accepted"
        endings = {span.ending for span in spans}
        endings |= {"lost"} if self.restarts_in(scale.steps) else set()
        entries = {
            f"{glyphs.admitted} admitted": True,
            f"{glyphs.endings['failed']} failed": "failed" in endings,
            f"{glyphs.endings['lost']} worker replaced": "lost" in endings,
            f"{glyphs.endings['dropped']} dropped": any(span.dropped for span in spans),
            f"{glyphs.prefill} prefill": any(span.prefill > 1 for span in spans),
            f"{glyphs.endings['preempted']} preempted": "preempted" in endings,
            "#n sample or beam n": any(span.index for span in spans),
            f"{glyphs.forked}n continues beam n": any(span.forks for span in spans),
            drafts: most_drafted > 0,
            "~ negative prompt": any(span.role == "negative" for span in spans),
        }
        return [entry for entry, is_shown in entries.items() if is_shown]

    def chart(self, scale: Scale, rows: list[Line]) -> list[Line]:
        numbers, line = axis(scale, self.glyphs)
        chart = [self.row("step", numbers), self.row("", line, "busy"), *rows]
        restarts = self.restarts_in(scale.steps)
        if restarts:
            cells, styles = restart_row(restarts, scale, self.glyphs), ["failed"] * scale.num_cells
            chart.append(self.row("died", cells, str(len(restarts)), styles))
        highest = [0] * scale.num_cells  # of the queue, in the steps of each cell
        for start, stop, num in clip(self.queue or self.timeline.waiting(), scale.steps):
            for cell in scale.cells_of(range(start, stop)):
                highest[cell] = max(highest[cell], num)
        levels, peak = self.glyphs.levels, max(highest)
        cells = "".join(levels[-(-num * (len(levels) - 1) // max(peak, 1))] for num in highest)
        return [*chart, self.row("queue", cells, f"max {peak}", ["queue"] * scale.num_cells)]

    def shades(self, scale: Scale) -> list[Line]:
        group_of = {slot: number for number, group in enumerate(self.groups) for slot in group}
        busy = [[0] * scale.num_cells for _ in self.groups]
        for span in self.spans_in(scale.steps):
            scale.add_busy(busy[group_of[span.slot]], span)
        rows, shades, partial = list[Line](), self.glyphs.shades, self.glyphs.shades[1:-1]
        for slots, in_cells in zip(self.groups, busy, strict=True):
            shares = [
                num / (len(slots) * len(scale.steps_at(cell))) for cell, num in enumerate(in_cells)
            ]
            ends = {0.0: shades[0], 1.0: shades[-1]}
            cells = "".join(ends.get(s) or partial[int(s * len(partial))] for s in shares)
            # Cells of several steps cover each step once; several cells of a step repeat it.
            num_busy = sum(in_cells) // max(scale.cells_per_step, 1)
            share = percent_of(num_busy, len(slots) * len(scale.steps))
            name = group_name(slots, self.timeline.run)
            rows.append(self.row(name, cells, share, ["bar"] * scale.num_cells))
        return rows

    def scale(self, zoom: range) -> Scale:
        return Scale.fit(zoom, self.num_cells, MAX_CELLS_PER_STEP)

    def spans_in(self, steps: range) -> Iterator[SlotSpan]:
        slots = frozenset(self.slots)
        chosen = Selection(start=steps.start, stop=steps.stop, slots=slots)
        return self.timeline.select_spans(chosen)

    def restarts_in(self, steps: range) -> list[RestartEvent]:
        return [each for each in self.timeline.restarts if each.last_step in steps]

    def row(self, name: str, cells: str, figure: str = "", styles: Sequence[str] = ()) -> "Line":
        width = self.num_cells - (cell_width(cells) - len(cells))
        padded = f"{cells:<{width}}" if figure else cells.rstrip()
        cell, parts, styles = 0, list[tuple[str, str]](), styles or ["label"] * self.num_cells
        for char in padded:
            width = cell_width(char)
            parts.append((char, styles[min(cell, len(styles) - 1)] if width else parts[-1][1]))
            cell += width
        return [
            (f"{name:>{self.name_width}} ", "label"),
            *joined(parts),
            (f"  {figure:>4}" if figure else "", "figure"),
        ]


def _labels(texts: Iterable[str]) -> list[Line]:
    return [[(text, "label")] for text in texts]
