"""Some steps of a run as a chart: a row for each slot, and below them the queue and the blocks."""

from collections.abc import Iterator
from itertools import islice

from batcher.timeline import Selection, Timeline
from batcher.timeline.step_counts import Stretch, clip

from ...screen.summary import RESTART_REASONS
from ..headline import percent_of
from ..slot_rows import group_name
from .areas import Areas
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
        rows = _rows_below(top + AXIS_HEIGHT, len(busy))
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


def _rows_below(top: float, num_rows: int) -> list[Row]:
    """Return where so many rows are."""
    height = next(height for most, height in ROW_HEIGHTS.items() if num_rows <= most)
    return [Row(top + number * (height + GAP), height) for number in range(num_rows)]
