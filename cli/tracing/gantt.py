"""The gantt of a run as lines of text: all of it as shades, then the part worth a look as bars."""

from collections.abc import Collection, Iterator, Sequence

from batcher.timeline import EVERYTHING, Selection, Timeline
from batcher.timeline.drafts import StepDrafts
from batcher.timeline.records import SlotSpan, is_follower

from ..screen.cells import cell_width, counted, cut_middle, fill, printable, whole_percent
from . import gantt_chart as chart
from .gantt_drafts import draft_marks, legend_of
from .gantt_zoom import choose_zoom, usual_length

MIN_WIDTH = 40
MAX_ROWS = 16
MAX_CELLS_PER_STEP = 8
MIN_CELLS_PER_BAR = 2


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
        num_busy = num_requests = num_sequences = num_preemptions = num_drafted = num_accepted = 0
        running = set()
        for span in timeline.spans:
            num_busy += span.end - span.start
            num_sequences += not span.resumed
            num_requests += not (span.resumed or span.index or is_follower(span))
            num_preemptions += span.preemption is not None
            num_drafted += span.drafted
            num_accepted += span.accepted
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
        if num_drafted:
            parts.append(f"{num_accepted:,} of {counted(num_drafted, 'draft')} accepted")
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
        legend = self._legend(spans, zoom)
        *lines, last = fill(what, ", ", self.page_width)
        gap = self.chart_width - cell_width(last) - len("  ".join(legend))
        if gap > 1:
            return [*lines, f"{last}{' ' * gap}{'  '.join(legend)}"]
        return [*filter(None, [*lines, last]), *fill(legend, "  ", self.page_width)]

    def _legend(self, spans: Collection[SlotSpan], zoom: range) -> list[str]:
        """Return what the marks in the bars of `spans` mean."""
        glyphs = self.glyphs
        most_drafted = max((one.drafted for one in self._drafts_in(zoom)), default=0)
        entries = {
            f"{glyphs.admitted} admitted": True,
            f"{glyphs.broken} failed": any(chart.has_failed(span) for span in spans),
            f"{glyphs.dropped} dropped": any(span.dropped for span in spans),
            f"{glyphs.prefill} prefill": any(span.prefill > 1 for span in spans),
            f"{glyphs.preempted} preempted": any(span.preemption for span in spans),
            "#n sample or beam n": any(span.index for span in spans),
            f"{glyphs.forked}n goes on as beam n": any(span.forks for span in spans),
            legend_of(self._scale(zoom), most_drafted): most_drafted > 0,
            "~ negative prompt": any(span.role == "negative" for span in spans),
        }
        return [entry for entry, is_there in entries.items() if is_there]

    def close_up(self, zoom: range) -> list[str]:
        """Return the steps of `zoom` as bars, or as shades where there are too many for that."""
        scale = self._scale(zoom)
        rows = self._bars(scale) if self._has_bars(zoom) else self._shades(scale)
        return [*self._axis(scale), *rows, self._queue(scale)]

    def _scale(self, zoom: range) -> chart.Scale:
        """Return how the steps of `zoom` fill the cells of a row."""
        return chart.Scale.fit(zoom, self.num_cells, MAX_CELLS_PER_STEP)

    def _has_bars(self, zoom: range) -> bool:
        """Return whether the usual request of `zoom` is more than a speck as a bar."""
        if len(zoom) <= self.num_cells:
            return True
        usual = usual_length(self._spans_in(zoom)) or len(zoom)
        return usual * self.num_cells >= MIN_CELLS_PER_BAR * len(zoom)

    def _spans_in(self, steps: range) -> Iterator[SlotSpan]:
        """Yield the spans of the slots that have rows."""
        slots = frozenset(self.slots)
        chosen = Selection(start=steps.start, stop=steps.stop, slots=slots)
        return self.timeline.select_spans(chosen)

    def _drafts_in(self, steps: range) -> Iterator[StepDrafts]:
        """Yield the drafts of the slots that have rows."""
        slots = frozenset(self.slots)
        return (drafts for drafts in self.timeline.drafts_in(steps) if drafts.slot in slots)

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
        marks = draft_marks(self._drafts_in(scale.steps), scale)
        rows = [
            self._row(
                f"slot {slot}",
                chart.bar_row(by_slot[slot], labels, scale, self.glyphs, marks.get(slot, {})),
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
