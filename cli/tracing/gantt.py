"""The gantt of a run as lines of text: all of it as shades, then the part worth a look as bars."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter

from batcher.timeline import EVERYTHING, Selection, Timeline
from batcher.timeline.records import SlotSpan, Wait, is_follower
from batcher.timeline.step_counts import Stretch, clip

from ..screen.cells import cell_width, counted, cut_middle, fill, printable, whole_percent
from . import gantt_chart as chart

MIN_WIDTH = 40
MAX_ROWS = 16
MAX_CELLS_PER_STEP = 8
MIN_CELLS_PER_BAR = 2
MAX_LABEL_CELLS = 6
MAX_ZOOM_CELLS_PER_STEP = 4
LABEL_MARGIN = 2
MAX_SHARE = 2 / 3


def render_gantt(
    timeline: Timeline,
    selection: Selection = EVERYTHING,
    *,
    width: int = 80,
    ascii_only: bool = False,
) -> list[str]:
    """Return the gantt of `timeline` in lines of at most `width` cells, 40 at least.

    Steps or requests of `selection` choose what is drawn as bars, its slots what has a row.
    """
    page = _Page(timeline, sorted(selection.slots), max(width, MIN_WIDTH), ascii_only=ascii_only)
    if not timeline.spans:
        return page.title()
    zoom, reason = choose_zoom(timeline, selection, page.num_cells)
    if zoom == range(timeline.num_steps):
        page.narrow(zoom)
        return [*page.title(), *page.caption(zoom, []), *page.close_up(zoom)]
    overview = page.overview(zoom) if timeline.num_steps > page.num_cells else []
    what = [f"steps {zoom.start}:{zoom.stop}", *filter(None, [reason])]
    return [*page.title(), "", *overview, *page.caption(zoom, what), *page.close_up(zoom)]


class _Page:
    """Lays out rows: a name, the cells, and a figure."""

    def __init__(
        self, timeline: Timeline, slots: list[int], width: int, *, ascii_only: bool
    ) -> None:
        self.timeline = timeline
        self.page_width = self.chart_width = width
        self.slots = slots or list(range(timeline.num_slots))
        self.ascii_only = ascii_only
        self.glyphs = chart.ASCII if ascii_only else chart.UNICODE
        self.groups = _in_groups(self.slots)
        names = ["queue", f"slot {self.slots[-1]}", *map(_group_name, self.groups)]
        self.name_width = max(map(len, names))
        peak = max((stretch.num for stretch in timeline.waiting()), default=0)
        figures = ["busy", "100%", f"max {peak}"]
        self.num_cells = width - self.name_width - 1 - 2 - max(map(len, figures))

    def title(self) -> list[str]:
        """Return what run it is."""
        timeline = self.timeline
        num_busy = num_requests = num_sequences = num_preemptions = 0
        running = set()
        for span in timeline.spans:
            num_busy += span.end - span.start
            num_sequences += not span.resumed
            num_requests += not (span.resumed or span.index or is_follower(span))
            num_preemptions += span.preemption is not None
            if span.outcome is None:
                running.add(span.id)
        parts = [
            counted(timeline.num_steps, "step"),
            counted(timeline.num_slots, "slot"),
            f"{_percent(num_busy, timeline.num_steps * timeline.num_slots)} busy",
            counted(num_requests, "request"),
        ]
        if num_sequences > num_requests:
            parts.append(counted(num_sequences, "sequence"))
        if num_preemptions:
            parts.append(counted(num_preemptions, "preemption"))
        if running:
            parts.append(f"{len(running):,} still running")
        return fill(parts, f" {self.glyphs.dot} ", self.page_width)

    def narrow(self, steps: range) -> None:
        """Leave no more cells than a close-up of `steps` fills."""
        num_cells = chart.Scale.fit(steps, self.num_cells, MAX_CELLS_PER_STEP).num_cells
        self.chart_width -= self.num_cells - num_cells
        self.num_cells = num_cells

    def overview(self, zoom: range) -> list[str]:
        """Return the whole run as shades, a row for each slot or group of them, and mark `zoom`."""
        timeline = self.timeline
        scale = chart.Scale.fit(range(timeline.num_steps), self.num_cells, MAX_CELLS_PER_STEP)
        first, last = scale.first_cell(zoom[0]), scale.last_cell(zoom[-1])
        brace = self.glyphs.brace
        mark = brace[0] + brace[1] * (last - first - 1) + brace[2]
        return [
            *self._axis(scale),
            *self._shades(scale),
            self._queue(scale),
            self._row("", " " * min(first, scale.num_cells - 2) + mark),
        ]

    def caption(self, zoom: range, what: list[str]) -> list[str]:
        """Return `what` the close-up of `zoom` shows, and on the right how to read it."""
        if not self._has_bars(zoom):
            return fill(what, ", ", self.page_width)
        spans = list(self._spans_in(zoom))
        frame = chart.id_frame({span.id for span in spans})
        if any(frame):
            ends = self.glyphs.cut.join(map(self._printable, frame))
            what = [*what, "ids " + cut_middle(ends, 24, self.glyphs.cut)]
        legend = self._legend(spans)
        *lines, last = fill(what, ", ", self.page_width)
        gap = self.chart_width - cell_width(last) - len("  ".join(legend))
        if gap > 1:
            return [*lines, f"{last}{' ' * gap}{'  '.join(legend)}"]
        return [*filter(None, [*lines, last]), *fill(legend, "  ", self.page_width)]

    def _legend(self, spans: Collection[SlotSpan]) -> list[str]:
        """Return what the marks in the bars of `spans` mean."""
        glyphs = self.glyphs
        entries = {
            f"{glyphs.admitted} admitted": True,
            f"{glyphs.broken} failed": any(chart.has_failed(span) for span in spans),
            f"{glyphs.dropped} dropped": any(span.dropped for span in spans),
            f"{glyphs.prefill} prefill": any(span.prefill > 1 for span in spans),
            f"{glyphs.preempted} preempted": any(span.preemption for span in spans),
            "#n sample or beam n": any(span.index for span in spans),
            f"{glyphs.forked}n goes on as beam n": any(span.forks for span in spans),
            "~ negative prompt": any(span.role == "negative" for span in spans),
        }
        return [entry for entry, is_there in entries.items() if is_there]

    def close_up(self, zoom: range) -> list[str]:
        """Return the steps of `zoom` as bars, or as shades where there are too many for that."""
        scale = chart.Scale.fit(zoom, self.num_cells, MAX_CELLS_PER_STEP)
        rows = self._bars(scale) if self._has_bars(zoom) else self._shades(scale)
        return [*self._axis(scale), *rows, self._queue(scale)]

    def _has_bars(self, zoom: range) -> bool:
        """Return whether the usual request of `zoom` is more than a speck as a bar."""
        if len(zoom) <= self.num_cells:
            return True
        usual = _usual_length(self._spans_in(zoom)) or len(zoom)
        return usual * self.num_cells >= MIN_CELLS_PER_BAR * len(zoom)

    def _spans_in(self, steps: range) -> Iterator[SlotSpan]:
        """Yield the spans of the slots that have rows."""
        slots = frozenset(self.slots)
        chosen = Selection(start=steps.start, stop=steps.stop, slots=slots)
        return self.timeline.select_spans(chosen)

    def _labels_of(self, spans: Collection[SlotSpan]) -> dict[str, str]:
        """Return what to write for each label: it, without what all ids have in common."""
        before, after = map(len, chart.id_frame({span.id for span in spans}))
        return {
            span.label: self._printable(
                span.id[before : len(span.id) - after] + span.label[len(span.id) :]
            )
            for span in spans
        }

    def _printable(self, text: str) -> str:
        return printable(text, ascii_only=self.ascii_only)

    def _bars(self, scale: chart.Scale) -> list[str]:
        """Return a row for each slot, or the first of each group where there are too many."""
        spans = list(self._spans_in(scale.steps))
        labels = self._labels_of(spans)
        by_slot: dict[int, list[SlotSpan]] = {slot: [] for slot in self.slots}
        for span in spans:
            by_slot[span.slot].append(span)
        busy = {slot: sum(len(scale.clip(span)) for span in held) for slot, held in by_slot.items()}
        shown = self._shown(busy)
        rows = [
            self._row(
                f"slot {slot}",
                chart.bar_row(by_slot[slot], labels, scale, self.glyphs),
                _percent(busy[slot], len(scale.steps)),
            )
            for slot in shown
        ]
        hidden = [slot for slot in self.slots if slot not in shown]
        if hidden:
            num_busy = sum(busy[slot] for slot in hidden)
            share = _percent(num_busy, len(hidden) * len(scale.steps))
            rows.append(self._row("", f"+{counted(len(hidden), 'more slot')}", share))
        return rows

    def _shown(self, busy: dict[int, int]) -> list[int]:
        """Return the slots that get a bar: where there are too many, those that are used.

        busy: in how many steps each is.  Of slots that are all used, or none, the first of each
        group stands for it.
        """
        shown = [group[0] for group in self.groups]
        if len(shown) == len(self.slots):
            return shown
        used = [slot for slot in self.slots if busy[slot]]
        if len(used) > len(shown):
            return [group[0] for group in _in_groups(used)]
        idle = [slot for slot in [*shown, *self.slots] if not busy[slot]]
        filling = list(dict.fromkeys(idle))[: len(shown) - len(used)]
        return sorted([*used, *filling])

    def _shades(self, scale: chart.Scale) -> list[str]:
        """Return a row for each slot or group of slots."""
        group_of = {slot: number for number, group in enumerate(self.groups) for slot in group}
        busy = [[0] * scale.num_cells for _ in self.groups]
        num_busy = [0] * len(self.groups)
        for span in self._spans_in(scale.steps):
            group = group_of[span.slot]
            chart.add_busy(busy[group], span, scale)
            num_busy[group] += len(scale.clip(span))
        return [
            self._row(
                _group_name(slots),
                chart.shaded_row(chart.busy_shares(in_cells, scale, len(slots)), self.glyphs),
                _percent(in_all, len(slots) * len(scale.steps)),
            )
            for slots, in_cells, in_all in zip(self.groups, busy, num_busy, strict=True)
        ]

    def _queue(self, scale: chart.Scale) -> str:
        """Return the row of how many requests wait."""
        highest = chart.highest_counts(self.timeline.waiting(), scale)
        peak = max(highest)
        return self._row("queue", chart.level_row(highest, peak, self.glyphs), f"max {peak}")

    def _axis(self, scale: chart.Scale) -> list[str]:
        numbers, line = chart.axis(scale, self.glyphs)
        return [self._row("step", numbers), self._row("", line, "busy")]

    def _row(self, name: str, cells: str, figure: str = "") -> str:
        width = self.num_cells - (cell_width(cells) - len(cells))
        return f"{name:>{self.name_width}} {cells:<{width}}  {figure:>4}".rstrip()


def _in_groups(slots: Sequence[int]) -> list[Sequence[int]]:
    """Return `slots` in at most MAX_ROWS runs of the same size, the last one may be shorter."""
    size = -(-len(slots) // MAX_ROWS)
    return [slots[start : start + size] for start in range(0, len(slots), size)]


def _group_name(group: Sequence[int]) -> str:
    return f"slot {group[0]}" if len(group) == 1 else f"{group[0]}-{group[-1]}"


def _percent(part: int, whole: int) -> str:
    """Return a share such that 0% is nothing and 100% is all."""
    return whole_percent(part / whole) if whole else "0%"


def choose_zoom(timeline: Timeline, selection: Selection, num_cells: int) -> tuple[range, str]:
    """Return the steps to draw as bars in `num_cells`, and why these ("" where that is plain).

    What `selection` names goes first; a run that nearly fits is shown whole.
    """
    everything = range(timeline.num_steps)
    window = timeline.window(selection)
    if window and window != everything:
        return window, ""
    around = _around_requests(timeline, selection.request_ids)
    if around:
        return around, ""
    num_steps = _readable_steps(timeline, num_cells)
    if len(everything) <= max(num_cells, num_steps / MAX_SHARE):
        return everything, ""
    return _worst_bubble(timeline, num_steps) or _longest_queue(timeline, num_steps)


def _around_requests(timeline: Timeline, request_ids: frozenset[str]) -> range:
    """Return the steps in which the requests run, and a little around; none for none.

    Of requests that never ran, those in which they wait.
    """
    if not request_ids:
        return range(0)
    chosen = Selection(request_ids=request_ids)
    found: list[SlotSpan] | list[Wait] = list(timeline.select_spans(chosen))
    found = found or list(timeline.select_waits(chosen))
    first = min((span.start for span in found), default=0)
    stop = max((span.end for span in found), default=0)
    margin = (stop - first + 9) // 10
    return range(max(0, first - margin), min(timeline.num_steps, stop + margin))


def _readable_steps(timeline: Timeline, num_cells: int) -> int:
    """Return how many steps to show in `num_cells` so that usual bars have room for a label."""
    length = _usual_length(timeline.spans)
    widths = sorted(cell_width(span.label) for span in islice(timeline.spans, 1000))
    cells_per_bar = min(widths[len(widths) // 2], MAX_LABEL_CELLS) + LABEL_MARGIN
    if length >= cells_per_bar:
        return num_cells * (length // cells_per_bar)
    return num_cells // min(MAX_ZOOM_CELLS_PER_STEP, -(-cells_per_bar // length))


def _usual_length(spans: Iterable[SlotSpan]) -> int:
    """Return how many steps the one in the middle takes, by length; 0 if there is none."""
    lengths = Counter(span.end - span.start for span in spans)
    middle = lengths.total() // 2
    for length, number in sorted(lengths.items()):
        middle -= number
        if middle < 0:
            return length
    return 0


def _worst_bubble(timeline: Timeline, num_steps: int) -> tuple[range, str] | None:
    """Return the `num_steps` with the most idle slot-steps, the bubble in their middle.

    The end of the run, when nothing is left to admit, is not a bubble.
    """
    last_admission = max(span.start for span in timeline.spans)
    worst = first = last = 0
    start, num_idle = 0, sum(s.total for s in _idle(timeline, last_admission, range(num_steps)))
    for stop, change in _window_changes(timeline, last_admission, num_steps):
        if num_idle > worst:
            worst, first, last = num_idle, start, start
        if num_idle == worst and not change and last == start:
            last = stop
        start, num_idle = stop, num_idle + change * (stop - start)
    if num_idle > worst:
        worst, first, last = num_idle, start, start
    if not worst:
        return None
    middle = (first + last) // 2
    reason = f"worst bubble: {worst:,} idle slot-step{'s' * (worst > 1)}"
    return range(middle, middle + num_steps), reason


def _idle(timeline: Timeline, last_admission: int, steps: range) -> Iterator[Stretch]:
    """Yield how many slots are idle in `steps`, none from the last admission on."""
    for start, stop, occupied in clip(timeline.occupied(), steps):
        if start < last_admission:
            yield Stretch(start, min(stop, last_admission), timeline.num_slots - occupied)
        if stop > last_admission:
            yield Stretch(max(start, last_admission), stop, 0)


def _window_changes(
    timeline: Timeline, last_admission: int, num_steps: int
) -> Iterator[tuple[int, int]]:
    """Yield by how much each step changes what is idle in the window of `num_steps` it begins.

    It is the same for each step up to the one that is yielded with it.
    """
    end = timeline.num_steps
    leaving = _idle(timeline, last_admission, range(end - num_steps))
    coming = _idle(timeline, last_admission, range(num_steps, end))
    _, left_stop, left = next(leaving, (0, 0, 0))
    _, right_stop, right = next(coming, (0, 0, 0))
    start = 0
    while start < end - num_steps:
        stop = min(left_stop, right_stop - num_steps)
        yield stop, right - left
        start = stop
        if left_stop == stop:
            _, left_stop, left = next(leaving, (0, 0, 0))
        if right_stop == stop + num_steps:
            _, right_stop, right = next(coming, (0, 0, 0))


def _longest_queue(timeline: Timeline, num_steps: int) -> tuple[range, str]:
    """Return the `num_steps` around the step in which the most requests wait."""
    longest = max(timeline.waiting(), key=attrgetter("num"))
    peak = longest.num
    start = min(max(longest.start - num_steps // 2, 0), timeline.num_steps - num_steps)
    reason = f"longest queue: {peak:,} waiting" if peak else "the start, as nothing ever waited"
    return range(start, start + num_steps), reason
