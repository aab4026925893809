"""Draw the gantt of a run as an SVG: an overview, a close-up and a legend.

Elements have classes and no colours, so one style sheet suits light and dark pages.  Readers that
do not know `prefers-color-scheme` show the light colours, on their own ground.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple
from xml.etree import ElementTree as ET

from batcher.trace.run import SlotSpan, SpanEnding
from batcher.trace.timeline import EVERYTHING, Selection, Stretch, Timeline, clip

from ..screen.summary import RESTART_REASONS
from ..screen.terminal import cell_width, fill, printable
from .gantt import (
    choose_slots,
    choose_zoom,
    fitted_label,
    group_name,
    headline,
    id_words,
    in_groups,
    percent_of,
    short_labels,
    tick_interval,
)

SMALL, NORMAL = 11, 13  # pixels of text
CELL_WIDTH = 6.8  # pixels of a small character, a bit more than most monospaced fonts take

_COLORS = {  # on a light and a dark page
    "ground": ("fill:#ffffff", "fill:#0d1117"),
    "text": ("fill:#1f2328", "fill:#f0f6fc"),
    "quiet": ("fill:#59636e", "fill:#9198a1"),
    "grid": ("stroke:#d1d9e0", "stroke:#2f3742"),
    "link": ("fill:#d1d9e0", "fill:#2f3742"),
    "decode": ("fill:#9ec9f5", "fill:#1f5a9e"),
    "prefill": ("fill:#f0b429", "fill:#8f6410"),
    "stripe": ("stroke:#8a5a00", "stroke:#f0b429"),
    "failed": ("fill:#f8c9c5;stroke:#c62828", "fill:#5c1a1b;stroke:#ff7b72"),
    "cross": ("stroke:#b3151c", "stroke:#ff7b72"),
    "torn": ("stroke:#8e24aa", "stroke:#e58fff"),
    "ring": ("stroke:#1f2328", "stroke:#f0f6fc"),
    "restart": ("stroke:#b3151c", "stroke:#ff7b72"),
    "begin": ("stroke:#1b6ac9", "stroke:#79b8ff"),
    "queue": ("fill:#c0a5e4", "fill:#6e4fa3"),
    "blocks": ("fill:#8fc7a5", "fill:#2f7d4f"),
}
_ALWAYS = {
    "text": f"font:{SMALL}px sans-serif",
    "quiet": f"font:{SMALL}px sans-serif",
    "title": f"font-size:{NORMAL}px;font-weight:bold",
    "label": f"font:{SMALL}px monospace",
    "right": "text-anchor:end",
    "middle": "text-anchor:middle",
    "striped": "fill:url(#prefill)",
    "stripe": "stroke-width:2",
    "failed": "stroke-dasharray:3 2",
    "cross": "fill:none;stroke-width:2",
    "torn": "fill:none;stroke-width:2",
    "ring": "fill:none;stroke-width:1.5",
    "restart": "stroke-dasharray:4 3",
    "begin": "stroke-width:1.5",
    "other": "opacity:.3",
}
ROOT_CLASS = "batchdecode-gantt"
Number = float | str


class SvgRow(NamedTuple):
    """The upper edge and height of a row, in pixels."""

    top: float
    height: float

    @property
    def bottom(self) -> float:
        return self.top + self.height

    @property
    def base_line(self) -> float:
        return self.top + self.height / 2 + 4


class Drawing:
    """An SVG as it grows."""

    def __init__(self) -> None:
        self.root = ET.Element("svg", xmlns="http://www.w3.org/2000/svg")
        self.root.set("class", ROOT_CLASS)
        self._parents = [self.root]

    def add(self, tag: str, style: str = "", text: str = "", /, **numbers: Number) -> ET.Element:
        """Draw an element with classes and attributes, numbers in px; `_` in a name is a hyphen."""
        element = ET.SubElement(self._parents[-1], tag)
        if style:
            element.set("class", style)
        for name, number in numbers.items():
            element.set(name.replace("_", "-"), number if isinstance(number, str) else px(number))
        element.text = text or None
        return element

    @contextmanager
    def group(self, tag: str, style: str = "", /, **numbers: Number) -> Iterator[None]:
        """Put everything drawn in this context into an element."""
        self._parents.append(self.add(tag, style, **numbers))
        yield
        self._parents.pop()

    def label(self, label: str, left: float, right: float, row: SvgRow) -> bool:
        text = fitted_label(label, int((right - left) / CELL_WIDTH), "…")
        if text:
            self.add("text", "text label", text, x=left, y=row.base_line)
        return bool(text)


def px(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def text_width(text: str) -> float:
    return cell_width(text) * CELL_WIDTH


# -- steps onto pixels ---------------------------------------------------------------------------

MIN_TICK_WIDTH = 60  # pixels


class StepAxis:
    """Maps `steps` to pixels between left and right."""

    def __init__(self, steps: range, width: float) -> None:
        self.steps = steps
        self.left, self.right = NAME_WIDTH, width - FIGURE_WIDTH

    def place(self, start: int, end: int) -> tuple[float, float]:
        return self._at(max(start, self.steps.start)), self._at(min(end, self.steps.stop))

    def levels(self, stretches: Iterator[Stretch]) -> list[tuple[float, float, int]]:
        """Return (left, right, count) of stretches; those in one pixel keep the highest count."""
        levels: list[tuple[float, float, int]] = []
        for start, end, num in stretches:
            left, right = self.place(start, end)
            if levels and right < levels[-1][0] + 1:
                before, _, highest = levels.pop()
                levels.append((before, right, max(highest, num)))
            else:
                levels.append((left, right, num))
        return levels

    def ticks(self) -> Iterator[tuple[float, str]]:
        first, last = self.steps.start, self.steps.stop
        width = max(MIN_TICK_WIDTH, (len(f"{last:,}") + 2) * CELL_WIDTH)
        interval = tick_interval(len(self.steps) * width / (self.right - self.left))
        for step in range(-(-first // interval) * interval, last + 1, interval):
            yield self._at(step), f"{step:,}"

    def _at(self, step: int) -> float:
        share = (step - self.steps.start) / max(len(self.steps), 1)
        return self.left + share * (self.right - self.left)


# -- bars ----------------------------------------------------------------------------------------
#
# Kinds differ in shape as well as in colour: prefill is striped, a preempted bar ends torn, a
# failed one is dashed and ends in a cross, a dropped sample in a ring, and what was lost with its
# worker in two lines.

TOOTH = 3  # pixels: the depth of a torn end
PADDING = 3  # pixels before and after a label
ENDING_WORDS: dict[SpanEnding, str] = {
    "preempted": "preempted",
    "failed": "failed",
    "dropped": "dropped",
    "lost": "worker replaced",
}


def draw_bar(
    drawing: Drawing, axis: StepAxis, span: SlotSpan, row: SvgRow, label: str, style: str
) -> None:
    left, right = axis.place(span.start, span.end)
    right -= min(1, (right - left) / 4)  # a gap to the next
    title = f"{span.label}: slot {span.slot}, steps {span.start}-{span.end - 1}"
    title += f", prefill {span.prefill}, {span.outcome or 'still running'}"
    if span.preemption is not None:
        title += f", for {span.preemption.for_label} ({span.preemption.reason})"
    with drawing.group("g", style):
        drawing.add("title", "", printable(title))
        ending = span.ending if span.end <= axis.steps.stop else ""
        label_right = right - draw_body(drawing, left, right, row, ending) - PADDING
        prefilled = left
        if span.prefill_end > axis.steps.start:
            room = right - TOOTH * (ending == "preempted")  # the tear stays visible
            prefilled = max(min(axis.place(span.start, span.prefill_end)[1], room), left)
            width = prefilled - left
            drawing.add("rect", "striped", x=left, y=row.top, width=width, height=row.height)
        if span.start in axis.steps:
            drawing.add("path", "begin", d=f"M{px(left)} {px(row.top)}V{px(row.bottom)}")
        is_written = drawing.label(label, prefilled + PADDING, label_right, row)
        if not is_written and text_width(label) <= label_right - left - PADDING:
            place = {"x": left + PADDING, "y": row.top + 3, "height": row.height - 6}
            drawing.add("rect", "decode", width=text_width(label), **place)  # over the stripes
            drawing.label(label, left + PADDING, label_right, row)


def draw_body(
    drawing: Drawing, left: float, right: float, row: SvgRow, ending: SpanEnding
) -> float:
    """Draw a bar with its ending, and return the width of the ending."""
    tear = "".join(
        f"L{px(right - TOOTH * (number % 2))} {px(row.top + row.height / 4 * number)}"
        for number in range(1, 5)
    )
    edge = tear if ending == "preempted" else f"V{px(row.bottom)}"
    outline = f"M{px(left)} {px(row.top)}H{px(right)}{edge}H{px(left)}Z"
    drawing.add("path", "failed" if ending == "failed" else "decode", d=outline)
    if not ending:
        return 0
    if ending == "preempted":
        drawing.add("path", "torn", d=f"M{px(right)} {px(row.top)}{tear}")
        return TOOTH + 1
    if ending == "lost":
        strokes = (f"M{px(right - gap)} {px(row.top)}V{px(row.bottom)}" for gap in (1, 4))
        drawing.add("path", "cross", d="".join(strokes))
        return 2 * TOOTH
    size = min(row.height - 6, 9)
    middle = row.top + row.height / 2
    if ending == "dropped":
        drawing.add("circle", "ring", cx=right - size / 2 - 2, cy=middle, r=size / 2)
    else:
        upper, lower = px(middle - size / 2), px(middle + size / 2)
        far, near = px(right - size - 2), px(right - 2)
        lines = f"M{far} {upper}L{near} {lower}M{far} {lower}L{near} {upper}"
        drawing.add("path", "cross", d=lines)
    return size + 2


# -- a chart: a row for each slot, with the queue and the blocks below ---------------------------

NAME_WIDTH, FIGURE_WIDTH = 72, 72  # pixels
AXIS_HEIGHT, GAP, LANE_HEIGHT = 18, 3, 30
MAX_ROWS, MAX_BARS = 32, 4000
ROW_HEIGHTS = {8: 22, 16: 18, MAX_ROWS: 15}  # up to so many rows -> pixels of each
MIN_USUAL_WIDTH = 3  # pixels of the median bar
BUCKET = 2  # pixels of an area that share a height


class Panel:
    """The chart of `steps`: bars if allowed and few enough, else areas.

    busy: the busy steps of each row of slots.  reason: why these slots, "" for all.  bars: the
    spans of each slot; None for areas, which are full where all slots of a row are held.
    """

    def __init__(
        self,
        timeline: Timeline,
        selection: Selection,
        steps: range,
        width: int,
        *,
        may_have_bars: bool,
    ) -> None:
        self._timeline, self._request_ids = timeline, selection.request_ids
        self.axis = axis = StepAxis(steps, width)
        slots = timeline.columns(selection)
        shown = Selection(start=steps.start, stop=steps.stop, slots=frozenset(slots))
        most = MAX_BARS * -(-len(slots) // MAX_ROWS) if may_have_bars else 0
        self.bars: dict[int, list[SlotSpan]] | None = None
        self.busy: dict[tuple[int, ...], int]
        few = list(islice(timeline.select_spans(shown), most + 1))
        if len(few) <= most:
            bars, busy, self.reason = choose_slots(few, slots, steps, MAX_ROWS, self._request_ids)
            places = (axis.place(span.start, span.end) for held in bars.values() for span in held)
            widths = sorted(right - left for left, right in places)
            usual = widths[len(widths) // 2] if widths else MIN_USUAL_WIDTH
            if usual >= MIN_USUAL_WIDTH and len(widths) <= MAX_BARS:
                self.bars, self.busy = bars, {(slot,): busy[slot] for slot in bars}
                return
        self.busy = dict.fromkeys(map(tuple, in_groups(slots, MAX_ROWS)), 0)
        group_of = {slot: group for group in self.busy for slot in group}
        num_buckets = int((axis.right - axis.left) / BUCKET) + 2
        # The pixels of each bucket that the slots of a group cover.
        self._held = {group: [0.0] * num_buckets for group in self.busy}
        self._prefill = {group: [0.0] * num_buckets for group in self.busy}
        for span in timeline.select_spans(shown):
            group = group_of[span.slot]
            self.busy[group] += len(span.clip(steps))
            self._cover(self._held[group], span.start, span.end)
            self._cover(self._prefill[group], span.start, span.prefill_end)

    @property
    def spans(self) -> list[SlotSpan]:
        return [span for held in (self.bars or {}).values() for span in held]

    @property
    def endings(self) -> set[SpanEnding]:
        return {span.ending for span in self.spans if span.end <= self.axis.steps.stop}

    def draw(self, drawing: Drawing, top: float) -> float:
        """Draw the chart below `top`, and return its bottom."""
        timeline, axis, busy = self._timeline, self.axis, self.busy
        # By name: the class, the counts and their limit, 0 for none.
        lanes = {"queue": ("queue", clip(timeline.waiting(), axis.steps), 0)}
        blocks = timeline.figures.blocks
        if any(blocks):
            limit = timeline.run.scheduling.get("kv_blocks")
            shown = range(axis.steps.start, min(axis.steps.stop, len(blocks)))
            held = (Stretch(step, step + 1, blocks[step]) for step in shown)
            lanes["KV blocks"] = ("blocks", held, limit if isinstance(limit, int) else 0)
        height = next(height for most, height in ROW_HEIGHTS.items() if len(busy) <= most)
        tops = (top + AXIS_HEIGHT + number * (height + GAP) for number in range(len(busy)))
        rows = [SvgRow(row_top, height) for row_top in tops]
        bottom = rows[-1].bottom + len(lanes) * (LANE_HEIGHT + 2 * GAP)
        drawing.add("text", "quiet right", "step", x=NAME_WIDTH - 24, y=top + 11)
        drawing.add("text", "quiet", "busy", x=axis.right + 10, y=top + 11)
        for place, number in axis.ticks():
            drawing.add("path", "grid", d=f"M{px(place)} {px(top + 15)}V{px(bottom)}")
            if place < axis.right - text_width(number) / 2:
                drawing.add("text", "quiet middle", number, x=place, y=top + 11)
        for row, (slots, num_busy) in zip(rows, busy.items(), strict=True):
            figure = percent_of(num_busy, len(slots) * len(axis.steps))
            self._name(drawing, row, group_name(slots, timeline.run), figure)
        if self.bars is None:
            for group, row in zip(busy, rows, strict=True):
                for covered, kind in ((self._held, "decode"), (self._prefill, "striped")):
                    path = self._area(covered[group], BUCKET * len(group), row)
                    if path:
                        drawing.add("path", kind, d=path)
        else:
            labels = short_labels(self.spans)
            for row, spans in zip(rows, self.bars.values(), strict=True):
                for span in spans:
                    is_other = self._request_ids and span.id not in self._request_ids
                    label, style = printable(labels[span.label]), "other" if is_other else ""
                    draw_bar(drawing, axis, span, row, label, style)
        for restart in timeline.restarts:
            if restart.last_step not in axis.steps:
                continue
            at = px(axis.place(restart.last_step, restart.step)[1])
            worker = "the worker" if restart.worker is None else f"worker {restart.worker}"
            with drawing.group("g"):
                why = RESTART_REASONS[restart.reason]
                drawing.add("title", "", f"{worker} replaced: {why}")
                drawing.add("path", "restart", d=f"M{at} {px(top + AXIS_HEIGHT)}V{px(bottom)}")
        row = rows[-1]
        for name, (kind, stretches, most) in lanes.items():
            row = SvgRow(row.bottom + 2 * GAP, LANE_HEIGHT)
            levels = axis.levels(stretches)
            peak = max((num for _, _, num in levels), default=0)
            path = "".join(
                f"M{px(left)} {px(row.bottom)}V{px(row.bottom - num / (most or peak) * row.height)}"
                f"H{px(right)}V{px(row.bottom)}Z"
                for left, right, num in levels
                if num
            )
            if path:
                drawing.add("path", kind, d=path)
            line = f"M{px(axis.left)} {px(row.bottom)}H{px(axis.right)}"
            drawing.add("path", "grid", d=line)
            self._name(drawing, row, name, f"max {peak:,}")
            if most:
                below = row.base_line + SMALL
                drawing.add("text", "quiet", f"of {most:,}", x=axis.right + 10, y=below)
        return bottom

    def _name(self, drawing: Drawing, row: SvgRow, name: str, figure: str) -> None:
        drawing.add("text", "text right", name, x=NAME_WIDTH - 8, y=row.base_line)
        drawing.add("text", "quiet", figure, x=self.axis.right + 10, y=row.base_line)

    def _cover(self, covered: list[float], start: int, end: int) -> None:
        axis = self.axis
        if min(end, axis.steps.stop) <= max(start, axis.steps.start):
            return
        left, right = (place - axis.left for place in axis.place(start, end))
        first, last = int(left / BUCKET), int(right / BUCKET)
        covered[first] -= left - first * BUCKET
        covered[last] += right - last * BUCKET
        for bucket in range(first, last):
            covered[bucket] += BUCKET

    def _area(self, covered: Sequence[float], full: int, row: SvgRow) -> str:
        path, last = f"M{px(self.axis.left)} {px(row.bottom)}", px(0)
        is_empty = True
        for bucket, pixels in enumerate([*covered, 0.0]):
            height = min(1.0, pixels / full) * row.height
            if px(height) != last or bucket == len(covered):
                last, is_empty = px(height), is_empty and px(height) == px(0)
                at = px(min(self.axis.left + bucket * BUCKET, self.axis.right))
                path += f"H{at}V{px(row.bottom - height)}"
        return "" if is_empty else f"{path}Z"


# -- the picture ---------------------------------------------------------------------------------

DEFAULT_WIDTH = 900
WIDTHS = range(320, 8001)
MARGIN, LINE_HEIGHT, LINK_HEIGHT = 12, 16, 22
SWATCH = 26  # pixels
BAR_CELLS = 1.5  # more steps fit as bars than in a gantt of characters


def render_svg(
    timeline: Timeline, selection: Selection = EVERYTHING, *, width: int = DEFAULT_WIDTH
) -> bytes:
    """Return the gantt of `timeline` as an SVG, with an overview of a long run."""
    drawing = Drawing()
    dark = "".join(f"\n  .{ROOT_CLASS} .{name}{{{look}}}" for name, (_, look) in _COLORS.items())
    both = [*((name, look) for name, (look, _) in _COLORS.items()), *_ALWAYS.items()]
    light = "\n".join(f".{ROOT_CLASS} .{name}{{{look}}}" for name, look in both)
    sheet = f"\n{light}\n@media (prefers-color-scheme:dark){{{dark}\n}}\n"
    drawing.add("style", "", sheet)
    pattern: dict[str, Number] = {"id": "prefill", "width": 5, "height": 5}
    pattern |= {"patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    with drawing.group("pattern", **pattern):
        drawing.add("rect", "prefill", width=5, height=5)
        drawing.add("path", "stripe", d="M0 0V5")
    drawing.add("rect", "ground", width="100%", height="100%")
    title = " · ".join(headline(timeline, selection.slots))
    top = float(MARGIN + NORMAL)
    for line in fill(title.split(" · "), " · ", int((width - 2 * MARGIN) / CELL_WIDTH)):
        drawing.add("text", "text title", line, x=MARGIN, y=top)
        top += LINE_HEIGHT
    if timeline.spans:
        top = _draw_steps(drawing, timeline, selection, width, top)
    else:
        top -= LINE_HEIGHT
    size = px(width), px(top + MARGIN + LINE_HEIGHT / 2)
    names = ("role", "aria-label", "width", "height", "viewBox")
    for name, value in zip(names, ("img", title, *size, "0 0 " + " ".join(size)), strict=True):
        drawing.root.set(name, value)
    ET.indent(drawing.root, "")  # an element a line
    return f"{ET.tostring(drawing.root, encoding='unicode')}\n".encode()


def _draw_steps(
    drawing: Drawing, timeline: Timeline, selection: Selection, width: int, top: float
) -> float:
    """Draw the overview, the close-up and the legend below `top`, and return their bottom."""
    num_cells = int((width - NAME_WIDTH - FIGURE_WIDTH) / CELL_WIDTH * BAR_CELLS)
    zoom, reasons = choose_zoom(timeline, selection, num_cells)
    panel = Panel(timeline, selection, zoom, width, may_have_bars=True)
    whole = range(timeline.num_steps)
    what = [f"steps {zoom.start:,} to {zoom.stop - 1:,}"] if zoom != whole else []
    if zoom != whole and selection.start is None and selection.stop is None:
        overview = Panel(timeline, selection, whole, width, may_have_bars=False)
        bottom = overview.draw(drawing, top)
        left, right = overview.axis.place(zoom.start, zoom.stop)
        top = bottom + LINK_HEIGHT
        corners = [(left, bottom), (right, bottom), (width - FIGURE_WIDTH, top), (NAME_WIDTH, top)]
        path = "L".join(f"{px(x)} {px(y)}" for x, y in corners)
        drawing.add("path", "link", d=f"M{path}Z")
        what += reasons
    if panel.bars is None:
        what.append("how much of its time a slot was in use")
    else:
        what += [*filter(None, [panel.reason]), *id_words(panel.spans, "…")]
    for line in filter(None, fill(what, ", ", int((width - NAME_WIDTH - MARGIN) / CELL_WIDTH))):
        drawing.add("text", "quiet", line, x=NAME_WIDTH, y=top + LINE_HEIGHT - 4)
        top += LINE_HEIGHT
    top = panel.draw(drawing, top) + LINE_HEIGHT
    legend: list[tuple[str, str, SpanEnding]] = [("prefill", "striped", ""), ("decode", "", "")]
    endings = panel.endings
    legend += [(words, "", end) for end, words in ENDING_WORDS.items() if end in endings]
    x = float(NAME_WIDTH)
    for words, ground, ending in legend:
        entry_width = SWATCH + 6 + text_width(words) + 14
        if x + entry_width > width:
            x, top = float(NAME_WIDTH), top + LINE_HEIGHT + 4
        row = SvgRow(top - 6, 13)
        draw_body(drawing, x, x + SWATCH, row, ending)
        if ground:
            drawing.add("rect", ground, x=x, y=row.top, width=SWATCH, height=row.height)
        drawing.add("text", "text", words, x=x + SWATCH + 6, y=row.base_line)
        x += entry_width
    return top
