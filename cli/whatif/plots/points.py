"""What is plotted: deployments as points, by how long requests take and how much is served.

Rule: a plot for each metric that is promised, or of ttft and tpot; in each, deployments that differ
in one setting alone are a line, and are named by its value.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from batcher.planning.compare import GridCell, varied
from batcher.planning.deployments import AXES, Axis, show_value
from batcher.planning.measure import Outcome, Question, times_of
from batcher.planning.plan import Plan, Trial

from ...screen.terminal import duration, printable

DEFAULT_METRICS = ("ttft", "tpot")
LOG_RATIO = 10
HEADROOM, LABEL_SHARE = 1.1, 0.25  # so that no point is on the edge, and its label has room
MAX_TOGETHER = 3  # labels of points that come to the same; of more, the first and the last
MAX_NAMED = 24  # points: of more, those on the frontier and those that are marked have a name

Mark = Literal["", "knee", "plan"]


class Point(Struct, frozen=True):
    """A deployment, or several that come to the same.

    latency: in seconds.  label: what tells it from the others of its line, and what it is.
    is_good: whether it keeps what is promised.  mark: what it is, beside a value that was tried.
    """

    latency: float
    tokens_per_s: float
    label: str
    is_good: bool
    mark: Mark = ""


class Chart(Struct, frozen=True):
    """One plot: lines of points, by what they have in common, "" where there is one.

    limit: what is promised of the metric, in seconds; None for nothing.
    """

    title: str
    latency_title: str
    lines: dict[str, list[Point]]
    limit: float | None

    @property
    def points(self) -> list[Point]:
        """The points of all lines."""
        return [point for line in self.lines.values() for point in line]

    @property
    def marked_first(self) -> list[tuple[str, Point]]:
        """The lines and points in the order in which their labels get the room there is."""
        found = [(line, point) for line, points in self.lines.items() for point in points]
        return sorted(found, key=lambda pair: not pair[1].mark)

    @property
    def is_log(self) -> bool:
        """Whether latencies differ so much that their logarithms are what is shown."""
        shortest, longest = self._range()
        return shortest > 0 and longest > LOG_RATIO * shortest

    @property
    def span(self) -> tuple[float, float]:
        """The latencies at the left and right edge; there is room for the labels of points."""
        shortest, longest = self._range()
        if not self.is_log:
            return 0.0, (longest or 1.0) * (1 + LABEL_SHARE)
        margin = (longest / shortest) ** LABEL_SHARE
        return shortest / margin**0.2, longest * margin

    def _range(self) -> tuple[float, float]:
        """Return the shortest and the longest latency, that of the limit included."""
        latencies = [point.latency for point in self.points]
        latencies += [] if self.limit is None else [self.limit]
        return min(latencies), max(latencies)

    @property
    def top(self) -> float:
        """The throughput at the upper edge: a bit more than the highest, and more than 0."""
        return (max(point.tokens_per_s for point in self.points) or 1.0) * HEADROOM

    @property
    def frontier(self) -> list[Point]:
        """The points that none beats, neither in latency nor in throughput: by their latency."""
        best: list[Point] = []
        for point in sorted(self.points, key=lambda p: (p.latency, -p.tokens_per_s)):
            if not best or point.tokens_per_s > best[-1].tokens_per_s:
                best.append(point)
        return best

    @property
    def named(self) -> list[Point]:
        """The points that have their label beside them."""
        points, frontier = self.points, self.frontier
        if len(points) <= MAX_NAMED:
            return points
        return [point for point in points if point.mark or point in frontier]


def charts_of_cells(question: Question, cells: Sequence[GridCell]) -> list[Chart]:
    """Return the charts of a comparison."""
    names = varied(cell.deployment for cell in cells)
    along = AXES["batch" if "batch" in names or not names else _most_varied(cells, names)]
    others = [AXES[name] for name in names if name != along.name]
    limits = {} if question.slo is None else question.slo.all_limits

    def points(name: str) -> Iterator[tuple[str, Point]]:
        for cell in cells:
            times = None if cell.outcome is None else times_of(cell.outcome, name)
            if cell.outcome is not None and times is not None:
                line = ", ".join(_setting(axis, cell) for axis in others)
                value = printable(show_value(along, along.value_of(cell.deployment)))
                yield (
                    line,
                    Point(
                        times.p99,
                        cell.outcome.tokens_per_s,
                        f"{value} knee" if cell.is_knee else value,
                        _keeps(cell.outcome, limits),
                        "knee" if cell.is_knee else "",
                    ),
                )

    title = f"points: {along.title}" + f"; lines: {', '.join(a.title for a in others)}" * bool(
        others
    )
    return [
        Chart(title, _latency_title(name, "p99"), _lines(points(name)), limits.get(name))
        for name in limits or DEFAULT_METRICS
    ]


def charts_of_plan(plan: Plan) -> list[Chart]:
    """Return the charts of what a plan has tried."""

    def points(name: str) -> Iterator[tuple[str, Point]]:
        for trial in plan.trials:
            latency = trial.tails[name]
            if latency is not None:
                is_plan = plan.is_met and trial.value == plan.value
                value = f"{_value(trial)} plan" if is_plan else _value(trial)
                is_good = trial.share >= plan.asked
                mark: Mark = "plan" if is_plan else ""
                yield "", Point(latency, trial.tokens_per_s, value, is_good, mark)

    title = f"points: {plan.searched.replace('_', '-')}"
    percent = f"p{plan.asked * 100:g}"
    return [
        Chart(title, _latency_title(name, percent), _lines(points(name)), limit)
        for name, limit in plan.limits.items()
    ]


def _latency_title(name: str, percent: str) -> str:
    """Return what is along the axis of a limit, of which one of a class tells which."""
    of_class, _, metric = name.rpartition(":")
    return f"{metric.upper()} {percent} (s)" + f" of {of_class}" * bool(of_class)


def limit_label(limit: float) -> str:
    """Return what stands beside the line of a limit."""
    return f"SLO {duration(limit)}"


def _lines(points: Iterator[tuple[str, Point]]) -> dict[str, list[Point]]:
    """Return `points` by their lines; those that come to the same are one with all their names."""
    lines: dict[str, dict[tuple[float, float], list[Point]]] = {}
    for line, point in points:
        place = point.latency, point.tokens_per_s
        lines.setdefault(line, {}).setdefault(place, []).append(point)
    return {line: list(map(_as_one, found.values())) for line, found in lines.items()}


def _as_one(points: list[Point]) -> Point:
    """Return a point for those that come to the same: of many, few have their names in it."""
    if len(points) <= MAX_TOGETHER:
        label = ", ".join(point.label for point in points)
    else:
        first, *between, last = points
        kept = [first, *(point for point in between if point.mark), last]
        label = " ... ".join(point.label for point in kept)
    return replace(points[0], label=label, mark=max(point.mark for point in points))


def _most_varied(cells: Sequence[GridCell], names: Sequence[str]) -> str:
    """Return the setting with the most values, of equal ones the first."""
    return max(names, key=lambda name: len({str(AXES[name].value_of(c.deployment)) for c in cells}))


def _setting(axis: Axis, cell: GridCell) -> str:
    return f"{axis.title} {printable(show_value(axis, axis.value_of(cell.deployment)))}"


def _keeps(outcome: Outcome, limits: dict[str, float]) -> bool:
    """Return whether 99 % of the requests keep every limit."""
    times = {name: times_of(outcome, name) for name in limits}
    return all(t is not None and t.p99 <= limits[name] for name, t in times.items())


def _value(trial: Trial) -> str:
    return f"{trial.value:.3g}x" if isinstance(trial.value, float) else f"{trial.value:,}"
