"""The gantt of a run as lines of text: all of it as shades, then the part worth a look as bars."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from batcher.events import RestartEvent
from batcher.trace.run import SlotSpan, StepDrafts
from batcher.trace.timeline import EVERYTHING, Selection, Stretch, Timeline

from ..screen.terminal import cell_width, counted, cut_middle, fill, printable
from . import gantt_chart as chart
from .gantt_chart import Scale
from .gantt_zoom import choose_zoom, readable_steps, usual_length
from .headline import headline, percent_of
from .slot_rows import ShownSlots, choose_slots, group_name, has_failed, in_groups

if TYPE_CHECKING:
    from ..screen.theme import Line

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

    Steps or requests of `selection` choose what is drawn as bars, its slots what has a row.

    height: how many lines there are to fill with rows of slots; None for as many as are usual.
    queue: how long it was, where others know more of it than the timeline.
    known_from: where the timeline does not know of all before this step, the last steps are drawn.
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
        page.narrow(zoom)
        page.make_groups(height, num_charts=1)
        return [*page.title(), *page.explained(zoom, [])]
    overview = [[], *page.overview(zoom)] if page.has_overview(height) else []
    return [
        *page.title(),
        *overview,
        *page.explained(zoom, [f"steps {zoom.start}:{zoom.stop}", *reasons]),
    ]


class _Held(NamedTuple):
    """What is drawn as bars: by slot, in how many steps each is busy, and which have a row."""

    spans: list[SlotSpan]
    by_slot: dict[int, list[SlotSpan]]
    busy: dict[int, int]
    choice: ShownSlots


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
        self.glyphs = chart.ASCII if ascii_only else chart.UNICODE
        self.make_groups(height, num_charts=2)
        names = ["queue", self._name([self.slots[-1]]), *map(self._name, self.groups)]
        self.name_width = max(map(len, names))
        peak = max((stretch.num for stretch in queue or timeline.waiting()), default=0)
        figures = ["busy", "100%", f"max {peak}"]
        self.num_cells = width - self.name_width - 1 - 2 - max(map(len, figures))

    def make_groups(self, height: int | None, num_charts: int) -> None:
        """Find out how many rows each of `num_charts` has, and so which slots share one."""
        room = None if height is None else height - OTHER_LINES[num_charts]
        self.max_rows = MAX_ROWS if room is None else max(room // num_charts, MIN_ROWS)
        self.groups = in_groups(self.slots, self.max_rows)

    def has_overview(self, height: int | None) -> bool:
        """Return whether to draw the whole run above a close-up.

        Not where slots would share rows for it, and have one each without it.
        """
        if len(self.groups) < len(self.slots):
            self.make_groups(height, num_charts=1)
            if len(self.groups) == len(self.slots):
                return False
            self.make_groups(height, num_charts=2)
        return self.timeline.num_steps > self.num_cells

    def title(self) -> list["Line"]:
        """Return what run it is."""
        lines = fill(headline(self.timeline, self.slots), f" {self.glyphs.dot} ", self.page_width)
        return [[(line, "title")] for line in lines]

    def narrow(self, steps: range) -> None:
        """Leave no more cells than a close-up of `steps` fills."""
        num_cells = chart.Scale.fit(steps, self.num_cells, MAX_CELLS_PER_STEP).num_cells
        self.chart_width -= self.num_cells - num_cells
        self.num_cells = num_cells

    def overview(self, zoom: range) -> list["Line"]:
        """Return the whole run as shades, a row for each slot or group of them, and mark `zoom`."""
        timeline = self.timeline
        scale = chart.Scale.fit(range(timeline.num_steps), self.num_cells, MAX_CELLS_PER_STEP)
        first, last = scale.first_cell(zoom[0]), scale.last_cell(zoom[-1])
        brace = self.glyphs.brace
        mark = brace[0] + brace[1] * (last - first - 1) + brace[2]
        return [
            *self._axis(scale),
            *self._shades(scale),
            *self._restarts(scale),
            self._queue(scale),
            self._row("", " " * min(first, scale.num_cells - 2) + mark),
        ]

    def held_in(self, zoom: range) -> _Held | None:
        """Return what a close-up of `zoom` draws as bars; None where there is too much for that."""
        if len(zoom) > self.num_cells:  # is the usual request more than a speck as a bar?
            usual = usual_length(self._spans_in(zoom)) or len(zoom)
            if usual * self.num_cells < MIN_CELLS_PER_BAR * len(zoom):
                return None
        spans = list(self._spans_in(zoom))
        by_slot: dict[int, list[SlotSpan]] = {slot: [] for slot in self.slots}
        for span in spans:
            by_slot[span.slot].append(span)
        scale = self._scale(zoom)
        busy = {slot: sum(len(scale.clip(span)) for span in held) for slot, held in by_slot.items()}
        choice = choose_slots(by_slot, busy, self.max_rows, self.request_ids)
        return _Held(spans, by_slot, busy, choice)

    def caption(self, zoom: range, what: list[str], held: _Held | None) -> list["Line"]:
        """Return `what` the close-up of `zoom` shows, and on the right how to read it."""
        if held is None:
            return _labels(fill(what, ", ", self.page_width))
        frame = chart.id_frame({span.id for span in held.spans})
        if any(frame):
            ends = self.glyphs.cut.join(map(self._printable, frame))
            what = [*what, "ids " + cut_middle(ends, 24, self.glyphs.cut)]
        what = [*what, *filter(None, [held.choice.reason])]
        legend = self._legend(held.spans, zoom)
        *lines, last = fill(what, ", ", self.page_width)
        gap = self.chart_width - cell_width(last) - len("  ".join(legend))
        if gap > 1:
            return _labels([*lines, f"{last}{' ' * gap}{'  '.join(legend)}"])
        legend_lines = fill(legend, "  ", self.page_width)
        return _labels([*filter(None, [*lines, last]), *legend_lines])

    def _legend(self, spans: Collection[SlotSpan], zoom: range) -> list[str]:
        """Return what the marks in the bars of `spans` mean."""
        glyphs = self.glyphs
        most_drafted = max((one.drafted for one in self._drafts_in(zoom)), default=0)
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
            legend_of(self._scale(zoom), most_drafted): most_drafted > 0,
            "~ negative prompt": any(span.role == "negative" for span in spans),
        }
        return [entry for entry, is_there in entries.items() if is_there]

    def explained(self, zoom: range, what: list[str]) -> list["Line"]:
        """Return a close-up of `zoom` with a caption: `what` it shows, and how to read it."""
        held = self.held_in(zoom)
        return [*self.caption(zoom, what, held), *self.close_up(zoom, held)]

    def close_up(self, zoom: range, held: _Held | None) -> list["Line"]:
        """Return the steps of `zoom` as bars of what is `held` in them; as shades for None."""
        scale = self._scale(zoom)
        rows = self._shades(scale) if held is None else self._bars(scale, held)
        return [*self._axis(scale), *rows, *self._restarts(scale), self._queue(scale)]

    def _scale(self, zoom: range) -> chart.Scale:
        """Return how the steps of `zoom` fill the cells of a row."""
        return chart.Scale.fit(zoom, self.num_cells, MAX_CELLS_PER_STEP)

    def _spans_in(self, steps: range) -> Iterator[SlotSpan]:
        """Yield the spans of the slots that have rows."""
        slots = frozenset(self.slots)
        chosen = Selection(start=steps.start, stop=steps.stop, slots=slots)
        return self.timeline.select_spans(chosen)

    def _drafts_in(self, steps: range) -> Iterator[StepDrafts]:
        """Yield the drafts of the slots that have rows."""
        slots = frozenset(self.slots)
        return (drafts for drafts in self.timeline.drafts_in(steps) if drafts.slot in slots)

    def _printable(self, text: str) -> str:
        return printable(text, ascii_only=self.ascii_only)

    def _bars(self, scale: chart.Scale, held: _Held) -> list["Line"]:
        """Return a row for each slot, or for those that were chosen."""
        short = chart.short_labels(held.spans)  # without what all ids have in common
        labels = {label: self._printable(text) for label, text in short.items()}
        marks = draft_marks(self._drafts_in(scale.steps), scale)
        shown = held.choice.slots
        rows = [
            self._row(
                self._name([slot]),
                chart.bar_row(held.by_slot[slot], labels, scale, self.glyphs, marks.get(slot, {})),
                percent_of(held.busy[slot], len(scale.steps)),
                chart.bar_styles(held.by_slot[slot], scale),
            )
            for slot in shown
        ]
        num_hidden = len(self.slots) - len(shown)
        if num_hidden:
            num_busy = sum(held.busy.values()) - sum(held.busy[slot] for slot in shown)
            share = percent_of(num_busy, num_hidden * len(scale.steps))
            rows.append(self._row("", f"+{counted(num_hidden, 'more slot')}", share))
        return rows

    def _shades(self, scale: chart.Scale) -> list["Line"]:
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
                self._name(slots),
                chart.shaded_row(chart.busy_shares(in_cells, scale, len(slots)), self.glyphs),
                percent_of(in_all, len(slots) * len(scale.steps)),
                ["bar"] * scale.num_cells,
            )
            for slots, in_cells, in_all in zip(self.groups, busy, num_busy, strict=True)
        ]

    def _name(self, slots: Sequence[int]) -> str:
        return group_name(slots, self.timeline.run)

    def _restarts_in(self, steps: range) -> list[RestartEvent]:
        """Return which workers were replaced in `steps`."""
        return [each for each in self.timeline.restarts if each.last_step in steps]

    def _restarts(self, scale: chart.Scale) -> list["Line"]:
        """Return the row of where workers were replaced, if any was."""
        restarts = self._restarts_in(scale.steps)
        if not restarts:
            return []
        row = chart.restart_row(restarts, scale, self.glyphs)
        return [self._row("died", row, str(len(restarts)), ["failed"] * scale.num_cells)]

    def _queue(self, scale: chart.Scale) -> "Line":
        """Return the row of how many requests wait."""
        lengths = self._queue_lengths or self.timeline.waiting()
        highest = chart.highest_counts(lengths, scale)
        peak = max(highest)
        levels = chart.level_row(highest, peak, self.glyphs)
        return self._row("queue", levels, f"max {peak}", ["queue"] * scale.num_cells)

    def _axis(self, scale: chart.Scale) -> list["Line"]:
        numbers, line = chart.axis(scale, self.glyphs)
        return [self._row("step", numbers), self._row("", line, "busy")]

    def _row(self, name: str, cells: str, figure: str = "", styles: Sequence[str] = ()) -> "Line":
        """Return a row; styles: those of its cells, which are labels where there are none."""
        width = self.num_cells - (cell_width(cells) - len(cells))
        padded = f"{cells:<{width}}" if figure else cells.rstrip()
        parts = chart.styled(padded, styles or ["label"] * self.num_cells)
        return [
            (f"{name:>{self.name_width}} ", "label"),
            *parts,
            (f"  {figure:>4}" if figure else "", "figure"),
        ]


def _labels(texts: Iterable[str]) -> list["Line"]:
    """Return lines of what is said about a chart."""
    return [[(text, "label")] for text in texts]


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
