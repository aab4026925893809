"""Some steps of a run as a chart: a row for each slot, and below them the queue and the blocks."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from batcher.trace.run import SlotSpan
from batcher.trace.timeline import Selection, Stretch, Timeline, clip

from ...screen.summary import RESTART_REASONS
from ..headline import percent_of
from ..slot_rows import group_name, in_groups
from .bars import MAX_BARS, MAX_ROWS, Bars
from .drawing import SMALL, Drawing, Row, px, text_width
from .time_axis import Axis, TimeAxis

NAME_WIDTH, FIGURE_WIDTH = 72, 72  # pixels
AXIS_HEIGHT, GAP, LANE_HEIGHT = 18, 3, 30
ROW_HEIGHTS = {8: 22, 16: 18, MAX_ROWS: 15}  # up to so many rows -> pixels of each


class Panel:
    """The chart of `steps`; bars: what it draws as such, None where it shows areas.

    may_have_bars: whether it does if they are few enough.
    """

    def __init__(
        self,
        timeline: Timeline,
        selection: Selection,
        steps: range,
        width: int,
        unit: Axis,
        *,
        may_have_bars: bool,
    ) -> None:
        self._timeline = timeline
        self._axis = TimeAxis.of(timeline, steps, NAME_WIDTH, width - FIGURE_WIDTH, unit)
        slots = timeline.columns(selection)
        shown = Selection(start=steps.start, stop=steps.stop, slots=frozenset(slots))
        self.bars: Bars | None = None
        most = MAX_BARS * -(-len(slots) // MAX_ROWS) if may_have_bars else 0
        few = list(islice(timeline.select_spans(shown), most + 1))
        if len(few) <= most:
            bars = Bars(few, slots, self._axis, selection.request_ids)
            self.bars = bars if bars.are_legible else None
        self._chart = self.bars or Areas(timeline.select_spans(shown), slots, self._axis)

    def draw(self, drawing: Drawing, top: float) -> float:
        """Draw it below `top`, and return where it ends."""
        busy, lanes = self._chart.busy, self._lanes()
        height = next(height for most, height in ROW_HEIGHTS.items() if len(busy) <= most)
        tops = (top + AXIS_HEIGHT + number * (height + GAP) for number in range(len(busy)))
        rows = [Row(row_top, height) for row_top in tops]
        bottom = rows[-1].bottom + len(lanes) * (LANE_HEIGHT + 2 * GAP)
        self._draw_axis(drawing, top, bottom)
        num_steps = len(self._axis.steps)
        for row, (slots, num_busy) in zip(rows, busy.items(), strict=True):
            figure = percent_of(num_busy, len(slots) * num_steps)
            self._name(drawing, row, group_name(slots, self._timeline.run), figure)
        self._chart.draw(drawing, rows)
        self._draw_restarts(drawing, top, bottom)
        lane_top = rows[-1].bottom
        for name, (kind, stretches, most) in lanes.items():
            row = Row(lane_top + 2 * GAP, LANE_HEIGHT)
            self._draw_lane(drawing, row, name, kind, stretches, most)
            lane_top = row.bottom
        return bottom

    def place(self, steps: range) -> tuple[float, float]:
        """Return between which pixels `steps` are."""
        return self._axis.place(steps.start, steps.stop)

    def _draw_axis(self, drawing: Drawing, top: float, bottom: float) -> None:
        drawing.text("quiet right", NAME_WIDTH - 24, top + 11, self._axis.unit.removesuffix("s"))
        drawing.text("quiet", self._axis.right + 10, top + 11, "busy")
        for place, number in self._axis.ticks():
            drawing.add("path", "grid", d=f"M{px(place)} {px(top + 15)}V{px(bottom)}")
            if place < self._axis.right - text_width(number) / 2:  # or else it meets what is beside
                drawing.text("quiet middle", place, top + 11, number)

    def _draw_restarts(self, drawing: Drawing, top: float, bottom: float) -> None:
        """Draw a line where a worker was replaced."""
        for restart in self._timeline.restarts:
            if restart.last_step not in self._axis.steps:
                continue
            place = px(self._axis.place(restart.last_step, restart.step)[1])
            worker = "the worker" if restart.worker is None else f"worker {restart.worker}"
            drawing.open("g")
            drawing.add("title", "", f"{worker} replaced: {RESTART_REASONS[restart.reason]}")
            drawing.add("path", "restart", d=f"M{place} {px(top + AXIS_HEIGHT)}V{px(bottom)}")
            drawing.close()

    def _name(self, drawing: Drawing, row: Row, name: str, figure: str) -> None:
        drawing.text("text right", NAME_WIDTH - 8, row.base_line, name)
        drawing.text("quiet", self._axis.right + 10, row.base_line, figure)

    def _lanes(self) -> dict[str, tuple[str, Iterator[Stretch], int]]:
        """Return the lanes below the slots: a name -> class, counts and the most there can be.

        0 for what has no limit.
        """
        timeline = self._timeline
        lanes = {"queue": ("queue", clip(timeline.waiting(), self._axis.steps), 0)}
        if any(timeline.figures.blocks):
            limit = timeline.run.scheduling.get("kv_blocks")
            lanes["KV blocks"] = ("blocks", self._blocks(), limit if isinstance(limit, int) else 0)
        return lanes

    def _blocks(self) -> Iterator[Stretch]:
        """Yield how many blocks were held."""
        blocks = self._timeline.figures.blocks
        for step in range(self._axis.steps.start, min(self._axis.steps.stop, len(blocks))):
            yield Stretch(step, step + 1, blocks[step])

    def _draw_lane(
        self, drawing: Drawing, row: Row, name: str, kind: str, counts: Iterator[Stretch], most: int
    ) -> None:
        levels = self._axis.levels(counts)
        peak = max((num for _, _, num in levels), default=0)
        path = "".join(
            f"M{px(left)} {px(row.bottom)}V{px(row.bottom - num / (most or peak) * row.height)}"
            f"H{px(right)}V{px(row.bottom)}Z"
            for left, right, num in levels
            if num
        )
        if path:
            drawing.add("path", kind, d=path)
        line = f"M{px(self._axis.left)} {px(row.bottom)}H{px(self._axis.right)}"
        drawing.add("path", "grid", d=line)
        self._name(drawing, row, name, f"max {peak:,}")
        if most:
            drawing.text("quiet", self._axis.right + 10, row.base_line + SMALL, f"of {most:,}")


BUCKET = 2  # pixels that have one height


class Areas:
    """How much of its time each slot, or group of them, was held, and how much of that was prefill.

    A row that is full was never idle.
    busy: in how many of the steps of the axis the slots of each group were used, all together.
    """

    def __init__(self, spans: Iterable[SlotSpan], slots: Sequence[int], axis: TimeAxis) -> None:
        groups = [tuple(group) for group in in_groups(slots, MAX_ROWS)]
        group_of = {slot: group for group in groups for slot in group}
        self.busy = dict.fromkeys(groups, 0)
        self._held = {group: _Shares(axis, len(group)) for group in groups}
        self._prefill = {group: _Shares(axis, len(group)) for group in groups}
        for span in spans:
            group = group_of[span.slot]
            self.busy[group] += axis.num_steps(span)
            self._held[group].add(span.start, span.end)
            self._prefill[group].add(span.start, min(span.start + span.prefill, span.end))

    def draw(self, drawing: Drawing, rows: Sequence[Row]) -> None:
        """Draw each group of slots in its row."""
        for group, row in zip(self.busy, rows, strict=True):
            for shares, kind in ((self._held, "decode"), (self._prefill, "striped")):
                path = shares[group].path(row)
                if path:
                    drawing.add("path", kind, d=path)


class _Shares:
    """How much of each few pixels of a row is covered."""

    def __init__(self, axis: TimeAxis, num_slots: int) -> None:
        self._axis = axis
        self._full = BUCKET * num_slots
        self._covered = [0.0] * (int((axis.right - axis.left) / BUCKET) + 2)

    def add(self, start: int, end: int) -> None:
        """Cover the steps [start, end), as far as they are shown."""
        if min(end, self._axis.steps.stop) <= max(start, self._axis.steps.start):
            return
        left, right = (place - self._axis.left for place in self._axis.place(start, end))
        first, last = int(left / BUCKET), int(right / BUCKET)
        if first == last:
            self._covered[first] += right - left
            return
        self._covered[first] += (first + 1) * BUCKET - left
        for bucket in range(first + 1, last):
            self._covered[bucket] += BUCKET
        self._covered[last] += right - last * BUCKET

    def path(self, row: Row) -> str:
        """Return the outline of the covered part of `row`, "" for none."""
        heights = [min(1.0, covered / self._full) * row.height for covered in self._covered]
        path, last = [f"M{px(self._axis.left)} {px(row.bottom)}"], px(0)
        for bucket, height in enumerate(heights):
            if px(height) != last:
                last = px(height)
                path.append(f"H{px(self._x(bucket))}V{px(row.bottom - height)}")
        if len(path) == 1:
            return ""
        return "".join([*path, f"H{px(self._x(len(heights)))}V{px(row.bottom)}Z"])

    def _x(self, bucket: int) -> float:
        return min(self._axis.left + bucket * BUCKET, self._axis.right)
