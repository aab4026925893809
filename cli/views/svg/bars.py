"""What slots held as bars, one for each sequence, in rows of those slots that tell the most.

Rule: what differs in kind differs in shape, too, so that nobody needs colours: prefill is striped,
what was preempted ends torn, what failed is dashed and ends in a cross, a dropped sample in a ring,
what was lost with its worker in two lines.
"""

from collections.abc import Collection, Sequence
from typing import Literal

from batcher.trace.run import SlotSpan

from ...screen.terminal import printable
from ..gantt_chart import cut_to_room, short_labels
from ..slot_rows import choose_slots, has_failed
from .drawing import CELL_WIDTH, Drawing, Row, px, text_width
from .time_axis import TimeAxis

TOOTH = 3  # pixels: how deep a torn end is
PADDING = 3  # pixels before and behind a label
MAX_ROWS = 32
MAX_BARS = 4000
MIN_USUAL_WIDTH = 3  # pixels of the bar in the middle, by length

End = Literal["", "torn", "failed", "ring", "lost"]
"""What a bar ends in: nothing, the tear of a preemption, a cross, a ring, or two lines."""


class Bars:
    """The bars of `spans` in rows of slots, which are as many as there is room for.

    reason: why it is these slots, "" where it is all.  busy: in how many of the steps of the axis
    each slot was used.
    """

    def __init__(
        self,
        spans: Collection[SlotSpan],
        slots: Sequence[int],
        axis: TimeAxis,
        request_ids: Collection[str],
    ) -> None:
        self._axis = axis
        self._request_ids = request_ids
        held: dict[int, list[SlotSpan]] = {slot: [] for slot in slots}
        for span in spans:
            held[span.slot].append(span)
        busy = {slot: sum(map(axis.num_steps, held[slot])) for slot in slots}
        chosen, self.reason = choose_slots(held, busy, MAX_ROWS, request_ids)
        self._held = {slot: held[slot] for slot in chosen}
        self.busy = {(slot,): busy[slot] for slot in chosen}
        self.spans = [span for slot in chosen for span in held[slot]]

    @property
    def are_legible(self) -> bool:
        """Whether there are few enough of them, and most of them wide enough, to be told apart."""
        if len(self.spans) > MAX_BARS:
            return False
        ends = (self._axis.place(span.start, span.end) for span in self.spans)
        widths = sorted(right - left for left, right in ends)
        return not widths or widths[len(widths) // 2] >= MIN_USUAL_WIDTH

    @property
    def ends(self) -> set[End]:
        """What they end in."""
        stop = self._axis.steps.stop
        return {end_of(span) for span in self.spans if span.end <= stop}

    def draw(self, drawing: Drawing, rows: Sequence[Row]) -> None:
        """Draw the bars of each slot in its row."""
        labels = short_labels(self.spans)
        for row, held in zip(rows, self._held.values(), strict=True):
            for span in held:
                is_other = bool(self._request_ids) and span.id not in self._request_ids
                label = printable(labels[span.label])
                draw_bar(drawing, span, self._axis, row, label, is_other=is_other)


def draw_bar(
    drawing: Drawing, span: SlotSpan, axis: TimeAxis, row: Row, label: str, *, is_other: bool
) -> None:
    """Draw a sequence with its `label`, pale if it is another one than was asked for."""
    left, right = axis.place(span.start, span.end)
    right -= min(1, (right - left) / 4)  # a gap to the next
    drawing.open("g", "other" if is_other else "")
    drawing.add("title", "", printable(_told(span)))
    end = end_of(span) if span.end <= axis.steps.stop else ""
    label_right = right - draw_body(drawing, left, right, row, end) - PADDING
    prefilled = left
    first_token = min(span.start + span.prefill, span.end)
    if first_token > axis.steps.start:
        room = right - TOOTH * (end == "torn")  # or its stripes would hide the tear
        prefilled = max(min(axis.place(span.start, first_token)[1], room), left)
        width = prefilled - left
        drawing.add("rect", "striped", x=left, y=row.top, width=width, height=row.height)
    if span.start in axis.steps:
        drawing.add("path", "begin", d=f"M{px(left)} {px(row.top)}V{px(row.bottom)}")
    is_written = _draw_label(drawing, label, prefilled + PADDING, label_right, row)
    if not is_written and text_width(label) <= label_right - left - PADDING:
        place = {"x": left + PADDING, "y": row.top + 3, "height": row.height - 6}
        drawing.add("rect", "decode", width=text_width(label), **place)  # stripes are no ground
        _draw_label(drawing, label, left + PADDING, label_right, row)
    drawing.close()


def end_of(span: SlotSpan) -> End:
    """Return how the bar of `span` ends."""
    if has_failed(span):
        return "failed"
    if span.preemption is not None:
        return "torn"
    if span.outcome == "lost":
        return "lost"
    return "ring" if span.dropped else ""


def _told(span: SlotSpan) -> str:
    """Return what a reader sees who points at a bar."""
    parts = [f"{span.label}: slot {span.slot}, steps {span.start}-{span.end - 1}"]
    parts.append(f"prefill {span.prefill}")
    parts.append(span.outcome or "still running")
    if span.preemption is not None:
        parts.append(f"for {span.preemption.for_label} ({span.preemption.reason})")
    return ", ".join(parts)


def draw_body(drawing: Drawing, left: float, right: float, row: Row, end: End) -> float:
    """Draw a bar and what stands at its end, and return how wide that is."""
    tear = "".join(
        f"L{px(right - TOOTH * (number % 2))} {px(row.top + row.height / 4 * number)}"
        for number in range(1, 5)
    )
    edge = tear if end == "torn" else f"V{px(row.bottom)}"
    outline = f"M{px(left)} {px(row.top)}H{px(right)}{edge}H{px(left)}Z"
    drawing.add("path", "failed" if end == "failed" else "decode", d=outline)
    if not end:
        return 0
    if end == "torn":
        drawing.add("path", "torn", d=f"M{px(right)} {px(row.top)}{tear}")
        return TOOTH + 1
    if end == "lost":
        lines = (f"M{px(right - gap)} {px(row.top)}V{px(row.bottom)}" for gap in (1, 4))
        drawing.add("path", "cross", d="".join(lines))
        return 2 * TOOTH
    size = min(row.height - 6, 9)
    middle = row.top + row.height / 2
    if end == "ring":
        drawing.add("circle", "ring", cx=right - size / 2 - 2, cy=middle, r=size / 2)
    else:
        upper, lower = px(middle - size / 2), px(middle + size / 2)
        far, near = px(right - size - 2), px(right - 2)
        drawing.add(
            "path", "cross", d=f"M{far} {upper}L{near} {lower}M{far} {lower}L{near} {upper}"
        )
    return size + 2


def _draw_label(drawing: Drawing, label: str, left: float, right: float, row: Row) -> bool:
    """Write as much of a label as there is room for; return whether that says something."""
    text = cut_to_room(label, int((right - left) / CELL_WIDTH), "…")
    if text:
        drawing.text("text label", left, row.base_line, text)
    return bool(text)
