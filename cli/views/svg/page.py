"""Lays out the picture: what run it is, all of it, the part worth a look, and how to read it."""

from collections.abc import Collection

from batcher.trace.timeline import EVERYTHING, Selection, Timeline

from ...screen.terminal import cut_middle, fill, printable
from ..gantt_chart import id_frame
from ..gantt_zoom import choose_zoom
from ..headline import headline
from .bars import End, draw_body
from .drawing import CELL_WIDTH, NORMAL, Drawing, Row, begin_drawing, px, text_width
from .panel import FIGURE_WIDTH, NAME_WIDTH, Panel
from .time_axis import Axis

DEFAULT_WIDTH = 900
WIDTHS = range(320, 8001)
MARGIN, LINE_HEIGHT, LINK_HEIGHT = 12, 16, 22
SWATCH = 26  # pixels
MAX_FRAME_CELLS = 24
ENDS: dict[End, str] = {
    "torn": "preempted",
    "failed": "failed",
    "ring": "dropped",
    "lost": "worker replaced",
}
BAR_CELLS = 1.5  # more steps are shown as bars than in a gantt of characters, which are wider


def render_svg(
    timeline: Timeline,
    selection: Selection = EVERYTHING,
    *,
    width: int = DEFAULT_WIDTH,
    unit: Axis = "steps",
) -> bytes:
    """Return the gantt of `timeline` as an SVG of `width` pixels.

    Steps of `selection` are all that is drawn, its slots what has a row, and what its requests held
    stands out.  Of a long run it is all of it, and below that the part worth a look.
    """
    drawing = begin_drawing(width)
    title = " · ".join(headline(timeline, selection.slots))
    top = float(MARGIN + NORMAL)
    for line in fill(title.split(" · "), " · ", int((width - 2 * MARGIN) / CELL_WIDTH)):
        drawing.text("text title", MARGIN, top, line)
        top += LINE_HEIGHT
    if len(timeline.spans):
        top = _draw_charts(drawing, timeline, selection, unit, top)
    return drawing.encode(top + MARGIN - LINE_HEIGHT / 2, title)


def _draw_charts(
    drawing: Drawing, timeline: Timeline, selection: Selection, unit: Axis, top: float
) -> float:
    """Draw the panels that suit the run below `top`, and return where they end."""
    width = drawing.width
    num_cells = int((width - NAME_WIDTH - FIGURE_WIDTH) / CELL_WIDTH * BAR_CELLS)
    zoom, reasons = choose_zoom(timeline, selection, num_cells)
    panel = Panel(timeline, selection, zoom, width, unit, may_have_bars=True)
    whole = range(timeline.num_steps)
    what = [f"steps {zoom.start:,} to {zoom.stop - 1:,}"] if zoom != whole else []
    if zoom != whole and selection.start is None and selection.stop is None:
        overview = Panel(timeline, selection, whole, width, unit, may_have_bars=False)
        bottom = overview.draw(drawing, top)
        left, right = overview.place(zoom)
        top = bottom + LINK_HEIGHT
        corners = [(left, bottom), (right, bottom), (width - FIGURE_WIDTH, top), (NAME_WIDTH, top)]
        path = "L".join(f"{px(x)} {px(y)}" for x, y in corners)
        drawing.add("path", "link", d=f"M{path}Z")
        what += reasons
    return _draw_panel(drawing, panel, what, top)


def _draw_panel(drawing: Drawing, panel: Panel, what: list[str], top: float) -> float:
    """Draw a chart below `what` it shows, and above how to read it; return where that ends."""
    if panel.bars is None:
        what = [*what, "how much of its time a slot was in use"]
    else:
        what = [*what, *filter(None, [panel.bars.reason])]
        frame = id_frame({span.id for span in panel.bars.spans})
        if any(frame):
            ends = "…".join(map(printable, frame))
            what = [*what, "ids " + cut_middle(ends, MAX_FRAME_CELLS, "…")]
    num_cells = int((drawing.width - NAME_WIDTH - MARGIN) / CELL_WIDTH)
    for line in filter(None, fill(what, ", ", num_cells)):
        drawing.text("quiet", NAME_WIDTH, top + LINE_HEIGHT - 4, line)
        top += LINE_HEIGHT
    bottom = panel.draw(drawing, top)
    ends_of_bars = set[End]() if panel.bars is None else panel.bars.ends
    return _draw_legend(drawing, ends_of_bars, bottom + LINE_HEIGHT)


def _draw_legend(drawing: Drawing, ends: Collection[End], top: float) -> float:
    """Draw what the bars look like, with those of `ends` that there are; return where that ends."""
    entries: list[tuple[str, str, End]] = [("prefill", "striped", ""), ("decode", "", "")]
    entries += [(words, "", end) for end, words in ENDS.items() if end in ends]
    x = float(NAME_WIDTH)
    for words, ground, end in entries:
        entry_width = SWATCH + 6 + text_width(words) + 14
        if x + entry_width > drawing.width:
            x, top = float(NAME_WIDTH), top + LINE_HEIGHT + 4
        row = Row(top - 6, 13)
        draw_body(drawing, x, x + SWATCH, row, end)
        if ground:
            drawing.add("rect", ground, x=x, y=row.top, width=SWATCH, height=row.height)
        drawing.text("text", x + SWATCH + 6, row.base_line, words)
        x += entry_width
    return top + LINE_HEIGHT
