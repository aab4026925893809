"""Charts in characters, by plotille."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from math import log10

from ...screen.cells import cell_width, number
from .points import Chart, limit_label

HEIGHT = 14  # lines of a chart
NAMES_WIDTH = 14  # cells left of it
MIN_WIDTH = 24
MARKERS = "ox+*#@%&"
COLORS = ("cyan", "green", "yellow", "magenta", "bright_blue")
LIMIT_COLOR = "red"
LINE = "⠤⠤"


def text_of_charts(charts: Sequence[Chart], width: int, *, has_color: bool) -> str:
    """Return the charts one below the other, `width` cells wide, or as wide as they have to be."""
    texts = (_text_of(chart, width, has_color=has_color) for chart in charts)
    return "".join(f"\n{text}\n" for text in texts)


def _text_of(chart: Chart, width: int, *, has_color: bool) -> str:
    """Return one chart: lines are frontier and limit, and each point is its marker and label."""
    from plotille import Figure  # noqa: PLC0415 - optional

    across = log10 if chart.is_log else float
    left, right = map(across, chart.span)
    figure = Figure()
    room = width - NAMES_WIDTH - len(chart.latency_title) - len("-> ()")
    figure.width, figure.height = max(room, MIN_WIDTH), HEIGHT
    figure.with_colors, figure.color_mode = has_color, "names"
    figure.set_x_limits(left, right)
    figure.set_y_limits(0, chart.top)
    figure.x_label, figure.y_label = chart.latency_title, "output tokens/s"
    # plotille asks for the names of x with `left`, and for those of y without
    figure.register_label_formatter(float, partial(_tick, is_log=chart.is_log))
    figure.register_label_formatter(int, partial(_tick, is_log=chart.is_log))
    stairs = [(across(latency), speed) for latency, speed in _stairs(chart)]
    figure.plot(*zip(*stairs, strict=True))
    legend = [f"{LINE} Pareto frontier"]
    if chart.limit is not None:
        figure.axvline((across(chart.limit) - left) / (right - left), lc=LIMIT_COLOR)
        legend.append(f"│ {limit_label(chart.limit)}")
    colors, markers = cycle(COLORS), cycle(MARKERS)
    looks = {line: (next(colors), next(markers)) for line in chart.lines}
    named, taken = chart.named, set[tuple[int, int]]()
    for line, point in chart.marked_first:
        color, marker = looks[line]
        x = across(point.latency)
        # plotille rounds to the dots of a cell, which are four by two
        row = round(point.tokens_per_s / chart.top * HEIGHT * 4) // 4
        cell = round((x - left) / (right - left) * figure.width * 2) // 2
        for text in (f"{marker}{point.label}" if point in named else marker, marker):
            cells = {(row, cell + offset) for offset in range(cell_width(text))}
            if not cells & taken:
                taken |= cells
                figure.text([x], [point.tokens_per_s], [text], lc=color)
                break
    legend += [f"{marker} {line or 'tried'}" for line, (_, marker) in looks.items()]
    lines = [chart.title, *figure.show().split("\n"), "   ".join(legend)]
    return "\n".join(line.rstrip(" \u2800") for line in lines)


def _stairs(chart: Chart) -> Iterator[tuple[float, float]]:
    """Yield the corners of the frontier: up to what is best there at each latency."""
    reached = None
    for point in chart.frontier:
        if reached is not None:
            yield point.latency, reached
        yield point.latency, point.tokens_per_s
        reached = point.tokens_per_s


def _tick(value: float, chars: int, delta: float, left: bool = False, *, is_log: bool) -> str:  # noqa: ARG001, FBT001, FBT002 - as plotille calls it
    """Return a number of an axis in `chars` cells; left: of the one from left to right."""
    if left:
        return number(10**value if is_log else value).ljust(chars)
    return number(value).rjust(chars)
