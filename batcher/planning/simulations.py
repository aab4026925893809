"""Simulations of a plan, several at once where processes are free.

Rule: what a plan comes to never depends on how many there are.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Self, TypeVar

from batcher.planning.deployments import Deployment
from batcher.planning.measure import Outcome, Question, measure
from batcher.planning.workers import WorkerProcesses

SMALL = 2_000  # samples: fewer are simulated before a process has started

Found = TypeVar("Found")
Chain = Generator[Deployment, Outcome, Found]
"""Asks for one deployment after the other, is told what each comes to, returns what it found."""

MeasureAll = Callable[[Sequence[Deployment]], list[Outcome]]


class Simulations:
    """Measures deployments; a context manager.

    num_jobs: how many processes do, one if `question` is small.
    """

    def __init__(self, question: Question, num_jobs: int, small: int = SMALL) -> None:
        self.num_jobs = 1 if question.workload.num_samples < small else num_jobs
        self._workers = WorkerProcesses(measure, question, self.num_jobs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.__exit__()

    def measure(
        self, deployments: Sequence[Deployment], on_done: Callable[[float], object] = lambda _: None
    ) -> list[Outcome]:
        """Return what each of `deployments` comes to.

        on_done: called with how many of them are done, a part of one counted as such.
        """
        found: dict[int, Outcome] = {}
        done: dict[int, float] = {}

        def note_part(place: int, share: float) -> None:
            done[place] = share
            on_done(sum(done.values()))

        for place, outcome in self._workers.answers(deployments, note_part):
            found[place] = outcome
            note_part(place, 1.0)
        return [found[place] for place in range(len(deployments))]


def together(chains: Sequence[Chain[Found]], measure_all: MeasureAll) -> list[Found]:
    """Return what each of `chains` finds; what they ask for next is measured at once."""
    found: dict[int, Found] = {}
    asked: dict[int, Deployment] = {}

    def go_on(place: int, outcome: Outcome | None) -> None:
        try:
            chain = chains[place]
            asked[place] = next(chain) if outcome is None else chain.send(outcome)
        except StopIteration as stop:
            found[place] = stop.value

    for place in range(len(chains)):
        go_on(place, None)
    while asked:
        places = list(asked)
        outcomes = measure_all([asked.pop(place) for place in places])
        for place, outcome in zip(places, outcomes, strict=True):
            go_on(place, outcome)
    return [found[place] for place in range(len(chains))]
