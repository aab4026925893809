"""Charts as an SVG or a PNG, by matplotlib: the same charts give the same bytes."""

import io
from collections.abc import Sequence
from itertools import cycle, product
from typing import TYPE_CHECKING, Any

from ...screen.terminal import number
from .points import Chart, Point, limit_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL_WIDTH, HEIGHT = 5.2, 4.6  # inches
PIXELS_PER_INCH = 160
MARKERS = "osD^vPX*"  # beside colours, so that nobody needs these
SMALL, LARGE = 5, 9  # points
CREATOR = "batchdecode"
_STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": CREATOR,
}
_METADATA = {"svg": {"Creator": CREATOR, "Date": None}, "png": {"Software": CREATOR}}
_LABEL_SIZE, _CHARACTER_WIDTH = 8, 5.4  # typographic points


def encode_picture(charts: Sequence[Chart], kind: str) -> bytes:
    """Return the charts side by side in one picture; kind: svg or png."""
    from matplotlib import rc_context  # noqa: PLC0415 - optional, and takes long
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    with rc_context(_STYLE):
        size = (PANEL_WIDTH * len(charts), HEIGHT)
        figure = Figure(figsize=size, dpi=PIXELS_PER_INCH, layout="constrained")
        panels = figure.subplots(1, len(charts), squeeze=False)[0]
        for chart, axes in zip(charts, panels, strict=True):
            _draw(chart, axes)
        figure.suptitle(charts[0].title, fontsize=9)
        legend = panels[0].get_legend_handles_labels()
        figure.legend(*legend, loc="outside lower center", ncols=3 * len(charts))
        figure.draw_without_rendering()  # which says where the points are
        for chart, axes in zip(charts, panels, strict=True):
            _name_points(chart, axes)
        file = io.BytesIO()
        figure.savefig(file, format=kind, metadata=_METADATA[kind])
    return file.getvalue()


def _draw(chart: Chart, axes: "Axes") -> None:
    """Draw one chart, but for the labels of its points."""
    from matplotlib.ticker import LogLocator  # noqa: PLC0415 - as above

    colors = (f"C{place}" for place in cycle(range(10)))  # those of matplotlib
    for (line, points), color, marker in zip(
        chart.lines.items(), colors, cycle(MARKERS), strict=False
    ):
        axes.plot(*_places(points), color=color, linewidth=1, alpha=0.5)
        axes.plot([], [], marker=marker, color=color, label=line or "tried")
        for point in points:
            axes.plot(
                point.latency,
                point.tokens_per_s,
                marker=marker,
                markersize=LARGE if point.mark else SMALL,
                markerfacecolor=color if point.is_good else "white",
                markeredgecolor=color,
                linestyle="none",
            )
    best = _places(chart.frontier)
    axes.step(*best, where="post", color="0.4", linestyle=":", label="Pareto frontier")
    if chart.is_log:
        axes.set_xscale("log", subs=())
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    axes.set_xlim(*chart.span)
    axes.set_ylim(0, chart.top)
    if chart.limit is not None:
        axes.axvline(chart.limit, color="C3", linestyle="--", label="SLO")
        axes.axvspan(chart.limit, chart.span[1], color="C3", alpha=0.06, linewidth=0)
        axes.plot(
            [], [], "o", markerfacecolor="white", markeredgecolor="0.4", label="misses the SLO"
        )
        label = f" {limit_label(chart.limit)}"
        axes.text(chart.limit, 0.01, label, color="C3", transform=axes.get_xaxis_transform())
    axes.set_xlabel(chart.latency_title)
    axes.set_ylabel("output tokens/s")


def _places(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.latency for point in points], [point.tokens_per_s for point in points]


def _name_points(chart: Chart, axes: "Axes") -> None:
    """Write labels beside their points, those of what is marked first, as far as none meet."""
    per_point = PIXELS_PER_INCH / 72
    taken: list[tuple[float, float, float, float]] = []
    named = chart.named
    for point in (point for _, point in chart.marked_first if point in named):
        x, y = axes.transData.transform((point.latency, point.tokens_per_s)) / per_point
        width = len(point.label) * _CHARACTER_WIDTH
        boxes = []
        for down, is_left in product((-4, 12), (False, True)):
            left = x - 6 - width if is_left else x + 6
            boxes.append((left, y - down, left + width, y - down + _LABEL_SIZE))
        free = [box for box in boxes if not any(_meet(box, other) for other in taken)]
        if not free:
            continue
        box = free[0]
        taken.append(box)
        axes.annotate(
            point.label,
            (point.latency, point.tokens_per_s),
            xytext=(box[0] - x, box[1] - y),
            textcoords="offset points",
            fontsize=_LABEL_SIZE,
            fontweight="bold" if point.mark else "normal",
            in_layout=False,  # a long label may leave the panel, but not squeeze it
        )


def _meet(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Return whether two boxes, each its left, lower, right and upper edge, have a common part."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
