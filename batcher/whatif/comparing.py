"""A grid of deployments, each simulated, with the knees among them."""

from collections.abc import Callable, Iterable, Sequence
from math import inf

from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.whatif.deployments import AXES, Deployment, Value
from batcher.whatif.knee import Size, knees_of
from batcher.whatif.measuring import Outcome, Question, measure, problem_of
from batcher.whatif.workers import Workers

SMALL = 2_000  # samples to simulate, over all cells: fewer are done before a process has started


class Cell(Struct, frozen=True, kw_only=True):
    """A deployment of a grid and what it comes to.

    problem: why its settings make no sense; then there is no outcome.
    is_knee: see batcher.whatif.knee.
    """

    deployment: Deployment
    outcome: Outcome | None = None
    problem: str | None = None
    is_knee: bool = False


def compare(
    question: Question,
    grid: Sequence[Deployment],
    *,
    growth: float,
    num_jobs: int = 1,
    small: int = SMALL,
    on_done: Callable[[float], object] = lambda _: None,
) -> list[Cell]:
    """Return what each deployment of `grid` makes of the workload, in the order of the grid.

    The answer does not depend on `num_jobs`, the processes that work on it.

    growth: below so much more for a doubled batch, it is past its knee.
    small: below so many simulated samples no process is started.
    on_done: called with how many deployments are done, those that are not for what is done of them.

    Raises:
        BatchdecodeError: no deployment makes sense, or a process was killed.
    """
    problems = [problem_of(deployment) for deployment in grid]
    places = [place for place, problem in enumerate(problems) if problem is None]
    if not places:
        raise BatchdecodeError(f"no combination of settings makes sense: {problems[0]}")
    outcomes: dict[int, Outcome] = {}
    parts: dict[int, float] = {}

    def note_part(task: int, share: float) -> None:
        parts[task] = share
        on_done(len(outcomes) + sum(parts.values()))

    num_samples = len(question.workload.jobs) * len(places)
    with Workers(measure, question, 1 if num_samples < small else num_jobs) as workers:
        for task, outcome in workers.answers([grid[place] for place in places], note_part):
            outcomes[places[task]] = outcome
            parts.pop(task, None)
            on_done(len(outcomes) + sum(parts.values()))
    arriving = _arriving(question)
    sizes = [
        None if place not in outcomes else _size(deployment, outcomes[place], arriving, growth)
        for place, deployment in enumerate(grid)
    ]
    knees = knees_of(list(zip(grid, sizes, strict=True)), growth)
    return [
        Cell(
            deployment=deployment,
            outcome=outcomes.get(place),
            problem=problems[place],
            is_knee=place in knees,
        )
        for place, deployment in enumerate(grid)
    ]


def settings_of(deployment: Deployment) -> dict[str, Value]:
    """Return what `deployment` has on each of AXES, by name."""
    return {name: axis.value_of(deployment) for name, axis in AXES.items()}


def varied(deployments: Iterable[Deployment]) -> list[str]:
    """Return the names of the AXES on which the deployments differ."""
    values = [settings_of(deployment) for deployment in deployments]
    return [name for name in AXES if any(each[name] != values[0][name] for each in values)]


def _size(deployment: Deployment, outcome: Outcome, arriving: float, growth: float) -> Size:
    """Return what the knee is looked for by; `arriving`: what could be served at most."""
    served = outcome.tokens_per_s if outcome.goodput is None else outcome.goodput.per_second
    ttft = outcome.latencies.ttft
    has_no_wait = outcome.binding.constraint == "arrivals"
    return Size(
        batch=deployment.batch,
        served=served,
        ttft=None if ttft is None else ttft.p99,
        is_fed=has_no_wait or served * (1 + growth) >= arriving,
    )


def _arriving(question: Question) -> float:
    """Return what an engine that takes no time would serve: requests, or tokens, a second.

    With an SLO it is the requests, else their output tokens; what comes at once has no rate.
    """
    jobs = question.workload.jobs
    arrivals = [job.arrival_time for job in jobs]
    span = max(arrivals, default=0.0) - min(arrivals, default=0.0)
    if not span:
        return inf
    if question.slo is not None:
        return len(jobs) / span
    return sum(job.num_output_tokens for job in jobs) / span
