"""The gantt of a run as lines of text: all of it as shades, then the part worth a look as bars."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, takewhile
from operator import attrgetter
from os.path import commonprefix
from string import digits
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from batcher.events import RestartEvent, RunEvent
from batcher.trace.run import FAILURES, SlotSpan, StepDrafts, Wait
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
from ..screen.theme import hue_of, joined

if TYPE_CHECKING:
    from ..screen.theme import Line

# What run a picture of it shows, in figures.

MAX_NAMED = 3  # stretches of slots


def headline(timeline: Timeline, slots: Collection[int] = ()) -> list[str]:
    """Return the size and the outcome of a run, part by part; slots: those shown, () for all."""
    num_busy = num_preemptions = num_drafted = num_accepted = 0
    num_workers, running = timeline.run.workers, set()
    for span in timeline.spans:
        num_busy += span.end - span.start
        num_preemptions += span.preemption is not None
        num_drafted += span.drafted
        num_accepted += span.accepted
        if span.outcome is None:
            running.add(span.id)
    parts = [
        counted(timeline.num_steps, "step"),
        *([counted(num_workers, "worker")] if num_workers > 1 else []),
        counted(timeline.num_slots, "slot") + _shown(slots, timeline),
        f"{percent_of(num_busy, timeline.num_steps * timeline.num_slots)} busy",
        counted(timeline.num_requests, "request"),
    ]
    if timeline.num_outputs != timeline.num_requests:
        parts.append(counted(timeline.num_outputs, "output"))
    failures = timeline.failures
    if failures["error"]:
        parts.append(f"{failures['error']:,} failed")
    if failures["aborted"]:
        parts.append(f"{failures['aborted']:,} aborted")
    if num_preemptions:
        parts.append(counted(num_preemptions, "preemption"))
    if timeline.restarts:
        parts.append(counted(len(timeline.restarts), "restart"))
    if num_drafted:
        parts.append(f"{num_accepted:,} of {counted(num_drafted, 'draft')} accepted")
    if running:
        parts.append(f"{len(running):,} still running")
    return parts


def _shown(slots: Collection[int], timeline: Timeline) -> str:
    if not slots or len(slots) == timeline.num_slots:
        return ""
    stretches: list[list[int]] = []
    for slot in sorted(slots):
        if stretches and stretches[-1][-1] == slot - 1:
            stretches[-1].append(slot)
        else:
            stretches.append([slot])
    if len(stretches) > MAX_NAMED:
        return f", {len(slots):,} of them shown"
    names = [f"{s[0]}" if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in stretches]
    return f", {listed(names, 'and')} shown"


def percent_of(part: int, whole: int) -> str:
    return whole_percent(part / whole) if whole else "0%"


# Which slots a picture gives a row, where there are more slots than it has room for.


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


def has_failed(span: SlotSpan) -> bool:
    return span.outcome in FAILURES


class ChosenSlots(NamedTuple):
    """Slots with a row, by what each holds, the busy steps of all slots, and the reason, if any."""

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
    """Return the `num_rows` slots that tell the most of `steps`, which all `spans` touch.

    First those that held `request_ids`, then those with the most preemptions and failures, for half
    of the rows at most; the others are the idlest and the busiest.  A slot that was never used says
    nothing, and comes last; of equal ones the first is taken.
    """
    held: dict[int, list[SlotSpan]] = {slot: [] for slot in slots}
    busy = dict.fromkeys(slots, 0)
    for span in spans:
        held[span.slot].append(span)
        busy[span.slot] += min(span.end, steps.stop) - max(span.start, steps.start)
    if len(slots) <= num_rows:
        return ChosenSlots(held, busy, "")
    used = [slot for slot in slots if busy[slot]]
    if len(used) <= num_rows:
        unused = [slot for slot in slots if not busy[slot]]
        chosen = sorted([*used, *unused[: num_rows - len(used)]])
        reason = f"{counted(len(used), 'slot')} in use"
        return ChosenSlots({slot: held[slot] for slot in chosen}, busy, reason)
    wanted = {slot: sum(span.id in request_ids for span in held[slot]) for slot in used}
    trouble = {
        slot: sum(has_failed(span) or span.preemption is not None for span in held[slot])
        for slot in used
    }
    taken: list[int] = []
    words: list[str] = []

    def take(ranked: Sequence[int], most: int, what: str) -> None:
        found = [slot for slot in ranked if slot not in taken][:most]
        taken.extend(found)
        if found:
            words.append(f"{len(found)} {what}")

    take([slot for slot in used if wanted[slot]], num_rows, "asked for")
    troubled = sorted(filter(trouble.__getitem__, used), key=lambda slot: -trouble[slot])
    take(troubled, (num_rows - len(taken)) // 2, "with most preemptions or failures")
    if len({busy[slot] for slot in used if slot not in taken}) > 1:
        take(sorted(used, key=lambda slot: busy[slot]), (num_rows - len(taken)) // 2, "idlest")
        take(sorted(used, key=lambda slot: -busy[slot]), num_rows - len(taken), "busiest")
    else:
        take(used, num_rows - len(taken), "equally busy")
    reason = f"slots: {', '.join(words)}"
    return ChosenSlots({slot: held[slot] for slot in sorted(taken)}, busy, reason)


# Which steps of a run a gantt shows as bars: what was asked for, or the part worth a look.

MAX_LABEL_CELLS = 6
MAX_ZOOM_CELLS_PER_STEP = 4
LABEL_MARGIN = 2
MAX_SHARE = 2 / 3


def choose_zoom(
    timeline: Timeline, selection: Selection, num_cells: int
) -> tuple[range, list[str]]:
    """Return the steps to draw as bars in `num_cells`: what is asked for, else all or a part."""
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
    if bubble is not None:  # in the middle, or as much of it as these steps hold
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
    """Return how many steps to show in `num_cells` so that usual bars have room for a label."""
    length = usual_length(timeline.spans)
    widths = sorted(cell_width(span.label) for span in islice(timeline.spans, 1000))
    cells_per_bar = min(widths[len(widths) // 2], MAX_LABEL_CELLS) + LABEL_MARGIN
    if length >= cells_per_bar:
        return num_cells * (length // cells_per_bar)
    return num_cells // min(MAX_ZOOM_CELLS_PER_STEP, -(-cells_per_bar // length))


def usual_length(spans: Iterable[SlotSpan]) -> int:
    lengths = Counter(span.end - span.start for span in spans)
    middle = lengths.total() // 2
    for length, number in sorted(lengths.items()):
        middle -= number
        if middle < 0:
            return length
    return 0


# The rows of a gantt chart: steps onto cells, and cells into bars, shades, a queue and an axis.
#
# Rule: a row is a string of exactly as many terminal cells as its scale has.

MIN_CUT_CELLS = 6
MAX_ID_CELLS, MAX_FRAME_CELLS = 6, 24
MIN_TICK_CELLS = 10
MIN_TICK_GAP = 2


@dataclass(frozen=True)
class ChartGlyphs:
    """The characters of charts; bars: of successive sequences; shades, levels: from 0 to all."""

    admitted: str
    forked: str
    bars: str
    broken: str
    dropped: str
    lost: str
    prefill: str
    preempted: str
    shades: str
    levels: str
    tick: str
    line: str
    brace: str
    cut: str
    dot: str


UNICODE = ChartGlyphs(
    "┃", "╭", "━╌", "x", "o", "!", "▪", "«", " ░▒▓█", " ▁▂▃▄▅▆▇█", "┬", "─", "╰─╯", "…", "·"
)
ASCII = ChartGlyphs(
    "|", "/", "=-", "x", "o", "!", ":", "<", " .+*#", " 123456789", "+", "-", "^^^", "~", "-"
)


@dataclass(frozen=True)
class Scale:
    """Steps onto cells: several to a cell, or a whole number of cells to each."""

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
        return range(
            origin + first, origin + max(first + 1, (cell + 1) * num_steps // self.num_cells)
        )

    def first_cell(self, step: int) -> int:
        num_steps, offset = len(self.steps), step - self.steps.start
        if num_steps > self.num_cells:
            return self.last_cell(step)
        return offset * self.num_cells // num_steps

    def last_cell(self, step: int) -> int:
        offset = step - self.steps.start
        return ((offset + 1) * self.num_cells - 1) // len(self.steps)

    def clip(self, span: SlotSpan) -> range:
        return range(max(span.start, self.steps.start), min(span.end, self.steps.stop))


def add_busy(busy: list[int], span: SlotSpan, scale: Scale) -> None:
    """Add to `busy`, [num_cells], in how many steps of each cell `span` holds its slot."""
    steps = scale.clip(span)
    if steps:
        for cell in range(scale.first_cell(steps[0]), scale.last_cell(steps[-1]) + 1):
            shown = scale.steps_at(cell)
            busy[cell] += min(steps.stop, shown.stop) - max(steps.start, shown.start)


def busy_shares(busy: Sequence[int], scale: Scale, num_slots: int = 1) -> list[float]:
    """Return the busy share of `num_slots` slots by cell, [num_cells]; `busy`: see add_busy."""
    return [count / (num_slots * len(scale.steps_at(cell))) for cell, count in enumerate(busy)]


def shaded_row(shares: Sequence[float], glyphs: ChartGlyphs) -> str:
    partial = glyphs.shades[1:-1]
    shades = {0.0: glyphs.shades[0], 1.0: glyphs.shades[-1]}
    return "".join(shades.get(share) or partial[int(share * len(partial))] for share in shares)


def bar_row(
    spans: Sequence[SlotSpan],
    labels: Mapping[str, str],
    scale: Scale,
    glyphs: ChartGlyphs,
    marks: Mapping[int, str] = MappingProxyType({}),
) -> tuple[str, list[str]]:
    """Return the row of one slot, its sequences as bars with labels where these fit, and styles.

    spans: those of the slot that `scale` shows, by start.  labels: what to write for each label.
    marks: what to write over the bars, by cell; where that has no room, what comes before its `/`.
    """
    cells, busy = [" "] * scale.num_cells, [0] * scale.num_cells
    styles = [""] * scale.num_cells
    for span in spans:
        add_busy(busy, span, scale)
    shares = busy_shares(busy, scale)
    for number, span in enumerate(spans):
        steps = scale.clip(span)
        first, last = scale.first_cell(steps[0]), scale.last_cell(steps[-1])
        for cell in range(first, last + 1):
            cells[cell] = glyphs.bars[number % 2] if 2 * shares[cell] >= 1 else " "
        styles[first : last + 1] = [hue_of(span.id)] * (last + 1 - first)
        for cell in _prefill_cells(span, scale):
            cells[cell] = glyphs.prefill if cells[cell] != " " else " "
        mark = style = ""
        if has_failed(span):
            mark, style = glyphs.broken, "failed"
        elif span.outcome == "lost":
            mark, style = glyphs.lost, "failed"
        elif span.preemption is not None:
            mark, style = glyphs.preempted, "preempted"
        elif span.dropped:
            mark = glyphs.dropped
        if mark and span.end - 1 in steps:
            cells[last], styles[last] = mark, style
        if span.start in steps:
            cells[first], styles[first] = glyphs.admitted, "admitted"
    free: set[int] = set()  # where bars are still to see, but for the cell behind a label
    for number, span in enumerate(spans):
        bar, steps = glyphs.bars[number % 2], scale.clip(span)
        first, last = scale.first_cell(steps[0]) + 1, scale.last_cell(steps[-1])
        first = max([first, *(cell + 1 for cell in _prefill_cells(span, scale)[-1:])])
        room = sum(1 for _ in takewhile(bar.__eq__, cells[first : last + 1]))
        text = cut_to_room(labels[span.label], room, glyphs.cut)
        _write(cells, first, text)
        label_end = first + cell_width(text)
        for step, parent in ((fork.step + 1, fork.parent) for fork in span.forks):
            if step not in steps:
                continue
            cell, mark = scale.first_cell(step), f"{glyphs.forked}{parent}"
            if len(mark) > scale.last_cell(step) - cell + 1:  # there is no room for the number
                mark = glyphs.forked
            if cell >= label_end:
                room = sum(1 for _ in takewhile(bar.__eq__, cells[cell : cell + len(mark)]))
                _write(cells, cell, mark[:room])
        seen = range(label_end + bool(text), last + 1)
        free.update(cell for cell in seen if cells[cell] == bar)
    for cell, mark in marks.items():
        for text in (mark, mark.partition("/")[0]):
            if free.issuperset(range(cell, cell + len(text))):
                _write(cells, cell, text)
                break
    return "".join(cells), styles


def _prefill_cells(span: SlotSpan, scale: Scale) -> range:
    """Return the cells of a prefill of several steps, up to that of its first token."""
    first = max(span.start, scale.steps.start)
    stop = min(span.start + span.prefill, scale.steps.stop)
    if span.prefill == 1 or first >= stop:
        return range(0)
    return range(scale.first_cell(first), scale.last_cell(stop - 1) + 1)


def id_frame(ids: Collection[str]) -> tuple[str, str]:
    """Return the common start and end of several ids, without digits; empty for short ones."""
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
    before, after = map(len, id_frame({span.id for span in spans}))
    return {
        span.label: span.id[before : len(span.id) - after] + span.label[len(span.id) :]
        for span in spans
    }


def cut_to_room(label: str, room: int, cut: str) -> str:
    if cell_width(label) <= room:
        return label
    return cut_middle(label, room, cut) if room >= MIN_CUT_CELLS else ""


def _write(cells: list[str], start: int, text: str) -> None:
    """Put `text` into `cells` from `start` on; a wide character leaves the cell after it empty."""
    cell = start
    for char in text:
        width = cell_width(char)
        if width == 0:
            cells[cell - 1] += char
            continue
        cells[cell : cell + width] = [char] + [""] * (width - 1)
        cell += width


def restart_row(restarts: Iterable[RestartEvent], scale: Scale, glyphs: ChartGlyphs) -> str:
    """Return a row with a mark where each worker was replaced, and which one, if there is room."""
    cells = [" "] * scale.num_cells
    marks: dict[int, list[str]] = {}
    for restart in restarts:
        if restart.last_step in scale.steps:
            worker = "" if restart.worker is None else f"w{restart.worker}"
            marks.setdefault(scale.last_cell(restart.last_step), []).append(worker)
    free = scale.num_cells
    for cell, workers in sorted(marks.items(), reverse=True):
        texts = [glyphs.lost + ",".join(workers), f"{glyphs.lost}{len(workers)}", glyphs.lost]
        text = next(text for text in texts if len(text) <= free - cell or text == glyphs.lost)
        _write(cells, cell, text)
        free = cell - 1
    return "".join(cells)


def axis(scale: Scale, glyphs: ChartGlyphs) -> tuple[str, str]:
    """Return the first and round steps as numbers, and below them the line with their ticks."""
    numbers = [" "] * scale.num_cells
    line = [glyphs.line] * scale.num_cells
    widest = len(str(scale.steps.stop)) + MIN_TICK_GAP
    fewest_steps = max(MIN_TICK_CELLS, widest) * len(scale.steps) / scale.num_cells
    interval = next(
        base * 10**exponent
        for exponent in count()
        for base in (1, 2, 5)
        if base * 10**exponent >= fewest_steps
    )
    first, free = scale.steps.start, 0
    for step in (first, *range(first - first % interval + interval, scale.steps.stop, interval)):
        cell, number = scale.first_cell(step), str(step)
        if free <= cell <= scale.num_cells - len(number):
            numbers[cell : cell + len(number)] = number
            line[cell] = glyphs.tick
            free = cell + len(number) + MIN_TICK_GAP
    return "".join(numbers), "".join(line)


MIN_WIDTH = 40
MAX_ROWS, MIN_ROWS = 16, 4
OTHER_LINES = {1: 8, 2: 14}  # by how many charts: lines beside their rows, the shell's prompt too
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
) -> list["Line"]:
    """Return the gantt of `timeline` in lines of at most `width` cells, 40 at least.

    selection: its steps or requests are drawn as bars, its slots have rows.  height: lines to fill,
    None for the usual.  queue: its length, if the timeline does not know it.  known_from: draw the
    last steps, from here at the earliest.
    """
    width = max(width, MIN_WIDTH)
    page = _Page(timeline, selection, width, height, ascii_only=ascii_only, queue=queue)
    if not timeline.spans:
        return page.title()
    if known_from:
        page.make_groups(height, num_charts=1)
        start = timeline.num_steps - readable_steps(timeline, page.num_cells)
        start = min(max(known_from, start), timeline.num_steps - 1)
        zoom = range(start, timeline.num_steps)
        return page.explained(zoom, [f"steps {zoom.start}:{zoom.stop}", "the last"])
    zoom, reasons = choose_zoom(timeline, selection, page.num_cells)
    is_whole = zoom == range(timeline.num_steps)
    if is_whole:
        num_cells = Scale.fit(zoom, page.num_cells, MAX_CELLS_PER_STEP).num_cells
        page.chart_width -= page.num_cells - num_cells
        page.num_cells = num_cells
        page.make_groups(height, num_charts=1)
        return [*page.title(), *page.explained(zoom, [])]
    overview = [[], *page.overview(zoom)] if page.has_overview(height) else []
    return [
        *page.title(),
        *overview,
        *page.explained(zoom, [f"steps {zoom.start}:{zoom.stop}", *reasons]),
    ]


class _Page:
    """Lays out rows: a name, the cells, and a figure."""

    def __init__(
        self,
        timeline: Timeline,
        selection: Selection,
        width: int,
        height: int | None,
        *,
        ascii_only: bool,
        queue: Sequence[Stretch],
    ) -> None:
        self.timeline, self._queue_lengths = timeline, queue
        self.page_width = self.chart_width = width
        self.slots = timeline.columns(selection)
        self.request_ids = selection.request_ids
        self.ascii_only = ascii_only
        self.glyphs = ASCII if ascii_only else UNICODE
        self.make_groups(height, num_charts=2)
        names = ["queue", self._name([self.slots[-1]]), *map(self._name, self.groups)]
        self.name_width = max(map(len, names))
        peak = max((stretch.num for stretch in queue or timeline.waiting()), default=0)
        figures = ["busy", "100%", f"max {peak}"]
        self.num_cells = width - self.name_width - 1 - 2 - max(map(len, figures))

    def make_groups(self, height: int | None, num_charts: int) -> None:
        room = None if height is None else height - OTHER_LINES[num_charts]
        self.max_rows = MAX_ROWS if room is None else max(room // num_charts, MIN_ROWS)
        self.groups = in_groups(self.slots, self.max_rows)

    def has_overview(self, height: int | None) -> bool:
        """Return whether to draw all of the run above, unless slots get own rows without."""
        if len(self.groups) < len(self.slots):
            self.make_groups(height, num_charts=1)
            if len(self.groups) == len(self.slots):
                return False
            self.make_groups(height, num_charts=2)
        return self.timeline.num_steps > self.num_cells

    def title(self) -> list["Line"]:
        lines = fill(headline(self.timeline, self.slots), f" {self.glyphs.dot} ", self.page_width)
        return [[(line, "title")] for line in lines]

    def overview(self, zoom: range) -> list["Line"]:
        timeline = self.timeline
        scale = self._scale(range(timeline.num_steps))
        first, last = scale.first_cell(zoom[0]), scale.last_cell(zoom[-1])
        brace = self.glyphs.brace
        mark = brace[0] + brace[1] * (last - first - 1) + brace[2]
        pointer = self._row("", " " * min(first, scale.num_cells - 2) + mark)
        return [*self._chart(scale, self._shades(scale)), pointer]

    def explained(self, zoom: range, what: list[str]) -> list["Line"]:
        """Return a close-up of `zoom`, as bars or shades, with a caption and a legend."""
        scale = self._scale(zoom)
        if len(zoom) > self.num_cells:  # is the usual request more than a speck as a bar?
            usual = usual_length(self._spans_in(zoom)) or len(zoom)
            if usual * self.num_cells < MIN_CELLS_PER_BAR * len(zoom):
                caption = _labels(fill(what, ", ", self.page_width))
                return [*caption, *self._chart(scale, self._shades(scale))]
        spans = list(self._spans_in(zoom))
        shown, busy, reason = choose_slots(spans, self.slots, zoom, self.max_rows, self.request_ids)
        what = [*what, *id_words(spans, self.glyphs.cut, ascii_only=self.ascii_only)]
        legend = self._legend(spans, zoom)
        *lines, last = fill([*what, *filter(None, [reason])], ", ", self.page_width)
        gap = self.chart_width - cell_width(last) - len("  ".join(legend))
        if gap > 1:  # room for the legend on the right
            lines.append(f"{last}{' ' * gap}{'  '.join(legend)}")
        else:
            lines = [*filter(None, [*lines, last]), *fill(legend, "  ", self.page_width)]
        short = short_labels(spans)  # without what all ids have in common
        labels = {label: self._printable(text) for label, text in short.items()}
        marks = draft_marks(self._drafts_in(zoom), scale)
        rows = []
        for slot, held in shown.items():
            bars, styles = bar_row(held, labels, scale, self.glyphs, marks.get(slot, {}))
            share = percent_of(busy[slot], len(zoom))
            rows.append(self._row(self._name([slot]), bars, share, styles))
        num_hidden = len(self.slots) - len(shown)
        if num_hidden:
            num_busy = sum(busy.values()) - sum(busy[slot] for slot in shown)
            share = percent_of(num_busy, num_hidden * len(zoom))
            rows.append(self._row("", f"+{counted(num_hidden, 'more slot')}", share))
        return [*_labels(lines), *self._chart(scale, rows)]

    def _legend(self, spans: Collection[SlotSpan], zoom: range) -> list[str]:
        glyphs = self.glyphs
        most_drafted = max((one.drafted for one in self._drafts_in(zoom)), default=0)
        room = self._scale(zoom).cells_per_step
        drafts = "n drafts accepted" if room else "n drafts accepted a step"
        if len(f"{most_drafted}/{most_drafted}") + GAP <= room:
            drafts = "n/m drafts accepted"
        entries = {
            f"{glyphs.admitted} admitted": True,
            f"{glyphs.broken} failed": any(has_failed(span) for span in spans),
            f"{glyphs.lost} worker replaced": any(span.outcome == "lost" for span in spans)
            or bool(self._restarts_in(zoom)),
            f"{glyphs.dropped} dropped": any(span.dropped for span in spans),
            f"{glyphs.prefill} prefill": any(span.prefill > 1 for span in spans),
            f"{glyphs.preempted} preempted": any(span.preemption for span in spans),
            "#n sample or beam n": any(span.index for span in spans),
            f"{glyphs.forked}n goes on as beam n": any(span.forks for span in spans),
            drafts: most_drafted > 0,
            "~ negative prompt": any(span.role == "negative" for span in spans),
        }
        return [entry for entry, is_there in entries.items() if is_there]

    def _chart(self, scale: Scale, rows: list["Line"]) -> list["Line"]:
        numbers, line = axis(scale, self.glyphs)
        chart = [self._row("step", numbers), self._row("", line, "busy"), *rows]
        restarts = self._restarts_in(scale.steps)
        if restarts:
            row, styles = restart_row(restarts, scale, self.glyphs), ["failed"] * scale.num_cells
            chart.append(self._row("died", row, str(len(restarts)), styles))
        highest = [0] * scale.num_cells  # of the queue, in the steps of each cell
        for start, stop, num in clip(self._queue_lengths or self.timeline.waiting(), scale.steps):
            for cell in range(scale.first_cell(start), scale.last_cell(stop - 1) + 1):
                highest[cell] = max(highest[cell], num)
        levels, peak = self.glyphs.levels, max(highest)
        cells = "".join(
            levels[-(-num * (len(levels) - 1) // peak) if peak else 0] for num in highest
        )
        return [*chart, self._row("queue", cells, f"max {peak}", ["queue"] * scale.num_cells)]

    def _scale(self, zoom: range) -> Scale:
        return Scale.fit(zoom, self.num_cells, MAX_CELLS_PER_STEP)

    def _spans_in(self, steps: range) -> Iterator[SlotSpan]:
        slots = frozenset(self.slots)
        chosen = Selection(start=steps.start, stop=steps.stop, slots=slots)
        return self.timeline.select_spans(chosen)

    def _drafts_in(self, steps: range) -> Iterator[StepDrafts]:
        slots = frozenset(self.slots)
        return (drafts for drafts in self.timeline.drafts_in(steps) if drafts.slot in slots)

    def _printable(self, text: str) -> str:
        return printable(text, ascii_only=self.ascii_only)

    def _shades(self, scale: Scale) -> list["Line"]:
        group_of = {slot: number for number, group in enumerate(self.groups) for slot in group}
        busy = [[0] * scale.num_cells for _ in self.groups]
        num_busy = [0] * len(self.groups)
        for span in self._spans_in(scale.steps):
            group = group_of[span.slot]
            add_busy(busy[group], span, scale)
            num_busy[group] += len(scale.clip(span))
        return [
            self._row(
                self._name(slots),
                shaded_row(busy_shares(in_cells, scale, len(slots)), self.glyphs),
                percent_of(in_all, len(slots) * len(scale.steps)),
                ["bar"] * scale.num_cells,
            )
            for slots, in_cells, in_all in zip(self.groups, busy, num_busy, strict=True)
        ]

    def _name(self, slots: Sequence[int]) -> str:
        return group_name(slots, self.timeline.run)

    def _restarts_in(self, steps: range) -> list[RestartEvent]:
        return [each for each in self.timeline.restarts if each.last_step in steps]

    def _row(self, name: str, cells: str, figure: str = "", styles: Sequence[str] = ()) -> "Line":
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


def _labels(texts: Iterable[str]) -> list["Line"]:
    return [[(text, "label")] for text in texts]


MANY = "+"  # stands for a number that a cell has no room for
GAP = 1  # so that one mark is told from the next


def draft_marks(drafts: Iterable[StepDrafts], scale: Scale) -> dict[int, dict[int, str]]:
    """Return the marks of each slot, by their cells: accepted drafts, and of how many if that fits.

    Of several steps it is the mean number.  drafts: those of the steps of `scale`.
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
