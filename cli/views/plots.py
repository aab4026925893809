"""`--plot`: draw a comparison or a plan.

Each deployment is a point by its latency and throughput, in a plot for each metric of the SLO, or
else for ttft and tpot.  Deployments that differ in one setting are a line, labelled by its values.
The same charts give the same bytes.
"""

import io
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.planning.compare import GridCell, varied
from batcher.planning.deployments import AXES, show_value
from batcher.planning.measure import Outcome, Question
from batcher.planning.plan import Plan

from ..run.files import check_replaceable, check_writable, output_sink
from ..screen.terminal import duration, number, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

KINDS = ("svg", "png")
DEFAULT_METRICS = ("ttft", "tpot")
LOG_RATIO = 10
MAX_TOGETHER = 3  # labels at one place; of more, the first and the last
MAX_NAMED = 24  # points; of more, only the frontier and marked points have labels

Mark = Literal["", "knee", "plan"]
PANEL_WIDTH, HEIGHT = 5.2, 4.6  # inches
PIXELS_PER_INCH = 160
MARKERS = "osD^vPX*"  # in addition to colours
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
_LABEL_SIZE = 8  # typographic points


def check_plot(plot: str | None, *, force: bool) -> None:
    """Check that charts can be written to --plot."""
    if plot is None:
        return
    if Path(plot).suffix.removeprefix(".") not in KINDS:
        raise BatchdecodeError(f"--plot {plot}: expected FILE.svg or FILE.png")
    if find_spec("matplotlib") is None:
        raise BatchdecodeError(
            f"--plot {plot} needs matplotlib: install it with `pip install 'batchdecode[plots]'`"
        )
    check_writable(plot)
    if not force:
        check_replaceable(
            "--plot",
            plot,
            lambda start: start.startswith((b"<?xml", b"\x89PNG")) and b"batchdecode" in start,
        )


class Point(Struct, frozen=True):
    """A deployment, or several with equal results; latency in seconds.

    label: the value that differs on its line.  is_good: whether it meets the SLO.
    """

    latency: float
    tokens_per_s: float
    label: str
    is_good: bool
    mark: Mark = ""


class Chart(Struct, frozen=True):
    """A plot: lines of points by their common settings; limit: the SLO in seconds, or None."""

    title: str
    latency_title: str
    lines: dict[str, list[Point]]
    limit: float | None

    @property
    def points(self) -> list[Point]:
        return [point for line in self.lines.values() for point in line]

    @property
    def frontier(self) -> list[Point]:
        best: list[Point] = []
        for point in sorted(self.points, key=lambda p: (p.latency, -p.tokens_per_s)):
            if not best or point.tokens_per_s > best[-1].tokens_per_s:
                best.append(point)
        return best


def charts_of_cells(question: Question, cells: Sequence[GridCell]) -> list[Chart]:
    names = varied(cell.deployment for cell in cells)
    num_values = {
        name: len({str(AXES[name].value_of(cell.deployment)) for cell in cells}) for name in names
    }
    is_batch = "batch" in names or not names
    along = AXES["batch" if is_batch else max(names, key=num_values.__getitem__)]
    others = [AXES[name] for name in names if name != along.name]
    limits = {} if question.slo is None else question.slo.all_limits

    def points(name: str) -> Iterator[tuple[str, Point]]:
        for cell in cells:
            times = None if cell.outcome is None else cell.outcome.times(name)
            if cell.outcome is not None and times is not None:
                shown = {
                    axis.name: printable(show_value(axis, axis.value_of(cell.deployment)))
                    for axis in (along, *others)
                }
                line = ", ".join(f"{axis.title} {shown[axis.name]}" for axis in others)
                mark: Mark = "knee" if cell.is_knee else ""
                value = f"{shown[along.name]} {mark}".rstrip()
                is_good = _keeps(cell.outcome, limits)
                yield line, Point(times.p99, cell.outcome.tokens_per_s, value, is_good, mark)

    title = f"points: {along.title}"
    if others:
        title += f"; lines: {', '.join(axis.title for axis in others)}"
    return [
        Chart(title, _latency_title(name, "p99"), _lines(points(name)), limits.get(name))
        for name in limits or DEFAULT_METRICS
    ]


def charts_of_plan(plan: Plan) -> list[Chart]:
    def points(name: str) -> Iterator[tuple[str, Point]]:
        for trial in plan.trials:
            latency = trial.tails.get(name)
            if latency is not None:
                is_plan = plan.is_met and trial.value == plan.value
                is_factor = isinstance(trial.value, float)
                value = f"{trial.value:.3g}x" if is_factor else f"{trial.value:,}"
                value += " plan" if is_plan else ""
                is_good = (trial.share or 0.0) >= plan.asked
                mark: Mark = "plan" if is_plan else ""
                yield "", Point(latency, trial.tokens_per_s or 0.0, value, is_good, mark)

    title = f"points: {plan.searched.replace('_', '-')}"
    percent = f"p{plan.asked * 100:g}"
    return [
        Chart(title, _latency_title(name, percent), _lines(points(name)), limit)
        for name, limit in plan.limits.items()
    ]


def _latency_title(name: str, percent: str) -> str:
    of_class, _, metric = name.rpartition(":")
    return f"{metric.upper()} {percent} (s)" + f" of {of_class}" * bool(of_class)


def _lines(points: Iterator[tuple[str, Point]]) -> dict[str, list[Point]]:
    lines: dict[str, dict[tuple[float, float], list[Point]]] = {}
    for line, point in points:
        place = point.latency, point.tokens_per_s
        lines.setdefault(line, {}).setdefault(place, []).append(point)
    return {line: list(map(_as_one, found.values())) for line, found in lines.items()}


def _as_one(points: list[Point]) -> Point:
    if len(points) <= MAX_TOGETHER:
        label = ", ".join(point.label for point in points)
    else:
        first, *between, last = points
        kept = [first, *(point for point in between if point.mark), last]
        label = " ... ".join(point.label for point in kept)
    return replace(points[0], label=label, mark=max(point.mark for point in points))


def _keeps(outcome: Outcome, limits: dict[str, float]) -> bool:
    times = {name: outcome.times(name) for name in limits}
    return all(t is not None and t.p99 <= limits[name] for name, t in times.items())


def show_plot(plot: str, charts: Sequence[Chart]) -> None:
    charts = [chart for chart in charts if chart.lines]
    if not charts:
        raise BatchdecodeError(f"--plot {plot}: nothing to plot, because nothing was served")
    with output_sink(plot) as sink:
        sink.write(encode_picture(charts, Path(plot).suffix.removeprefix(".")))


def encode_picture(charts: Sequence[Chart], kind: str) -> bytes:
    from matplotlib import rc_context  # noqa: PLC0415 - optional, and slow to import
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
        figure.draw_without_rendering()  # places the points
        for chart, axes in zip(charts, panels, strict=True):
            _name_points(chart, axes)
        file = io.BytesIO()
        figure.savefig(file, format=kind, metadata=_METADATA[kind])
    return file.getvalue()


def _draw(chart: Chart, axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator  # noqa: PLC0415 - as above

    colors = (f"C{place}" for place in cycle(range(10)))  # those of matplotlib
    for (line, points), color, marker in zip(
        chart.lines.items(), colors, cycle(MARKERS), strict=False
    ):
        axes.plot(*_places(points), color=color, linewidth=1, alpha=0.5)
        axes.plot([], [], marker=marker, color=color, label=line or "tried")
        for point in points:
            axes.plot(
                *_places([point]),
                marker=marker,
                markersize=LARGE if point.mark else SMALL,
                markerfacecolor=color if point.is_good else "white",
                markeredgecolor=color,
                linestyle="none",
            )
    best = _places(chart.frontier)
    axes.step(*best, where="post", color="0.4", linestyle=":", label="Pareto frontier")
    if chart.limit is not None:
        axes.axvline(chart.limit, color="C3", linestyle="--", label="SLO")
        axes.plot(
            [], [], "o", markerfacecolor="white", markeredgecolor="0.4", label="misses the SLO"
        )
        label = f" SLO {duration(chart.limit)}"
        axes.text(chart.limit, 0.01, label, color="C3", transform=axes.get_xaxis_transform())
    axes.margins(x=0.2)  # for labels
    latencies = [*_places(chart.points)[0], *filter(None, [chart.limit])]
    is_log = min(latencies) > 0 and max(latencies) > LOG_RATIO * min(latencies)
    if is_log:
        axes.set_xscale("log", subs=())
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    left, right = axes.get_xlim()
    if chart.limit is not None:
        axes.axvspan(chart.limit, right, color="C3", alpha=0.06, linewidth=0)
    axes.set_xlim(left if is_log else 0, right)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(chart.latency_title)
    axes.set_ylabel("output tokens/s")


def _places(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.latency for point in points], [point.tokens_per_s for point in points]


def _name_points(chart: Chart, axes: "Axes") -> None:
    """Write labels next to their points, marked points first, where they do not overlap."""
    taken: list[Bbox] = []
    frontier = chart.frontier if len(chart.points) > MAX_NAMED else chart.points
    for point in sorted(chart.points, key=lambda point: not point.mark):
        if not point.mark and point not in frontier:
            continue
        for down, is_left in product((-4, 12), (False, True)):
            text = axes.annotate(
                point.label,
                (point.latency, point.tokens_per_s),
                xytext=(-6 if is_left else 6, -down),
                textcoords="offset points",
                horizontalalignment="right" if is_left else "left",
                fontsize=_LABEL_SIZE,
                fontweight="bold" if point.mark else "normal",
                in_layout=False,  # a long label does not squeeze the panel
            )
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()
