"""A grid of simulated deployments, with the knees, beyond which more slots gain little.

Rule: nothing is fitted.  The knee is the smallest batch size that no larger one beats, by the
`growth` of throughput for each doubling or, where arrivals bind, by a shorter tail of TTFT.  Where
arrivals bind, throughput is the arrival rate for any size (job flow balance: Denning and Buzen, The
Operational Analysis of Queueing Network Models, ACM Computing Surveys 10(3), 1978), so only times
differ; the knee has high throughput and still short response times (Jain, The Art of Computer
Systems Performance Analysis, 1991, section 3.3).
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf, log2

from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.planning.deployments import AXES, Deployment, Value, without_drafts
from batcher.planning.measure import Outcome, Question, measure, problem_of
from batcher.planning.workers import WorkerProcesses

DEFAULT_GROWTH = 0.1  # for each doubling of the batch


class Size(Struct, frozen=True, kw_only=True):
    """A batch size: served per second, p99 of TTFT, and whether it serves all that arrives."""

    batch: int
    served: float
    ttft: float | None = None
    is_fed: bool = False


def knee_of(sizes: Sequence[Size], growth: float) -> int | None:
    """Return the index of the knee among ascending `sizes`, or None.

    The last one is not a knee, as larger ones are unknown.
    """
    if not any(size.served for size in sizes):
        return None
    for place, size in enumerate(sizes[:-1]):
        if not any(_beats(larger, size, growth) for larger in sizes[place + 1 :]):
            return place
    return None


def _beats(larger: Size, size: Size, growth: float) -> bool:
    if larger.served >= size.served * (1 + growth) ** log2(larger.batch / size.batch):
        return True
    if not (larger.is_fed or size.is_fed) or larger.ttft is None or size.ttft is None:
        return False
    return larger.ttft < size.ttft


def knees_of(cells: Sequence[tuple[Deployment, Size | None]], growth: float) -> set[int]:
    """Return the indices of the knees, each among cells that differ in batch only."""
    batch = AXES["batch"]
    families: dict[Deployment, list[tuple[Size, int]]] = {}
    for place, (deployment, size) in enumerate(cells):
        if size is not None:
            families.setdefault(batch.set(deployment, 1), []).append((size, place))
    knees = set()
    for family in families.values():
        family.sort(key=lambda found: found[0].batch)
        found = knee_of([size for size, _ in family], growth)
        if found is not None:
            knees.add(family[found][1])
    return knees


SMALL = 2_000  # samples over all cells: fewer are simulated before a process has started


class GridCell(Struct, frozen=True, kw_only=True):
    """A deployment of a grid with its outcome, or the problem of its settings.

    speedup: over the same deployment without drafts, if that is in the grid.
    """

    deployment: Deployment
    outcome: Outcome | None = None
    problem: str | None = None
    is_knee: bool = False
    speedup: float | None = None


def compare(
    question: Question,
    grid: Sequence[Deployment],
    *,
    growth: float,
    num_jobs: int = 1,
    on_done: Callable[[float], object] = lambda _: None,
) -> list[GridCell]:
    """Return the outcome of each deployment of `grid`, in its order.

    The answer does not depend on `num_jobs`, the number of processes.
    growth: minimum gain of a doubled batch before the knee.  on_done: called with the number of
    deployments done.

    Raises:
        BatchdecodeError: all settings contradict, or a process was killed.
    """
    problems = [problem_of(deployment) for deployment in grid]
    places = [place for place, problem in enumerate(problems) if problem is None]
    if not places:
        raise BatchdecodeError(f"no combination of settings is valid: {problems[0]}")
    if question.workload.num_samples * len(places) < SMALL:
        num_jobs = 1
    with WorkerProcesses(measure, question, num_jobs) as workers:
        measured = workers.answers([grid[place] for place in places], on_done)
    outcomes = dict(zip(places, measured, strict=True))
    sizes = [
        None if place not in outcomes else _size(question, deployment, outcomes[place], growth)
        for place, deployment in enumerate(grid)
    ]
    knees = knees_of(list(zip(grid, sizes, strict=True)), growth)
    undrafted = {
        without_drafts(grid[place]): outcome.tokens_per_s
        for place, outcome in outcomes.items()
        if grid[place].draft_tokens is None
    }
    cells = []
    for place, deployment in enumerate(grid):
        outcome, speedup = outcomes.get(place), None
        base = undrafted.get(without_drafts(deployment), 0.0)
        if outcome is not None and deployment.draft_tokens is not None and base > 0:
            speedup = outcome.tokens_per_s / base
        cells.append(
            GridCell(
                deployment=deployment,
                outcome=outcome,
                problem=problems[place],
                is_knee=place in knees,
                speedup=speedup,
            )
        )
    return cells


def settings_of(deployment: Deployment) -> dict[str, Value]:
    return {name: axis.value_of(deployment) for name, axis in AXES.items()}


def varied(deployments: Iterable[Deployment]) -> list[str]:
    values = [settings_of(deployment) for deployment in deployments]
    return [name for name in AXES if any(each[name] != values[0][name] for each in values)]


def _size(question: Question, deployment: Deployment, outcome: Outcome, growth: float) -> Size:
    workload, ttft = question.workload, outcome.latencies.ttft
    served = outcome.tokens_per_s if outcome.goodput is None else outcome.goodput.per_second
    most = workload.num_output_tokens if question.slo is None else workload.num_samples
    arriving = most / workload.span if workload.span else inf  # served by an infinitely fast engine
    has_no_wait = outcome.binding.constraint == "arrivals"
    return Size(
        batch=deployment.batch,
        served=served,
        ttft=None if ttft is None else ttft.p99,
        is_fed=has_no_wait or served * (1 + growth) >= arriving,
    )
