"""How much slots held, as areas: what is drawn where there are too many sequences for bars."""

from collections.abc import Iterable, Sequence

from batcher.timeline.records import SlotSpan

from ..slot_rows import in_groups
from .bars import MAX_ROWS
from .drawing import Drawing, Row, px
from .time_axis import TimeAxis

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
