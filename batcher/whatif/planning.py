"""The smallest setting, or the largest rate, under which enough requests meet an SLO.

Rule: a rate is tried at steps of a 64th of a doubling, 1.1 %; all else at every whole number.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.simulation.workload import Workload
from batcher.whatif.binding import Constraint
from batcher.whatif.deployments import AXES, MAX_BATCH, Deployment, Value
from batcher.whatif.limits import num_blocks, num_tokens
from batcher.whatif.measuring import Outcome, Question, good_share, measure, problem_of
from batcher.whatif.relief import Analysis, Relief, Removal, analyse
from batcher.whatif.search import Score, Search, doublings

Searched = Literal["batch", "kv_blocks", "max_batch_tokens", "rate"]

STEPS_OF_DOUBLING = 64  # of a rate
MAX_DOUBLINGS = 10  # of a rate, up and down


class Trial(Struct, frozen=True, kw_only=True):
    """A value that was tried; share: of the requests that met the SLO."""

    value: Value
    share: float


class Plan(Struct, frozen=True, kw_only=True):
    """What a search came to.

    searched, asked: what for, and which share of the requests was to meet the SLO.
    is_met: whether `value` does, which is then the best that was found; else it is the nearest.
    file_rate: the mean rate of the arrivals in the file, requests a second; None if all arrive at
    once.
    is_last: no better value could be tried.
    next_value, next_outcome: the value after it that was tried and is not enough, None for none.
    binding, reliefs, removal: see batcher.whatif.relief; of the next value, or of the nearest.
    contradictions: values tried that are easier than `value`, and yet not enough.
    trials: all that were tried, in the order of their values.
    """

    searched: Searched
    asked: float
    limits: dict[str, float]
    is_met: bool
    value: Value
    deployment: Deployment
    outcome: Outcome
    file_rate: float | None
    is_last: bool
    next_value: Value
    next_outcome: Outcome | None
    binding: list[Constraint]
    reliefs: list[Relief]
    removal: Removal | None
    contradictions: list[Trial]
    trials: list[Trial]


def find_plan(
    question: Question,
    base: Deployment,
    searched: Searched,
    on_tried: Callable[[int], object] = lambda _: None,
) -> Plan:
    """Return the best value of what is `searched`, all else as in `base`.

    on_tried: called with how many values were tried, while one is, too.

    Raises:
        BatchdecodeError: the settings make no sense, or there is nothing to search.
    """
    if question.slo is None:
        raise BatchdecodeError("a plan needs an SLO")
    planner = _Planner(question, base, searched, on_tried)
    search = Search(planner.score, question.asked, planner.rungs)
    search.run(planner.start)
    best = search.nearest if search.least is None else search.least
    failing = [number for number in search.scores if number < best and search.least is not None]
    after = max(failing, default=None)
    binds = best if search.least is None else after
    analysis = Analysis(binding=[], reliefs=[])
    if binds is not None:
        analysis = analyse(question, planner.deployment_of(binds), planner.outcomes[binds])
    return Plan(
        searched=searched,
        asked=question.asked,
        limits=question.slo.limits,
        is_met=search.least is not None,
        value=planner.value_of(best),
        deployment=planner.deployment_of(best),
        outcome=planner.outcomes[best],
        file_rate=rate_of(question.workload),
        is_last=best == planner.rungs[0],
        next_value=None if after is None else planner.value_of(after),
        next_outcome=None if after is None else planner.outcomes[after],
        binding=analysis.binding,
        reliefs=analysis.reliefs,
        removal=analysis.removal,
        contradictions=[planner.trial_of(number) for number in search.contradictions],
        trials=[planner.trial_of(number) for number in sorted(search.scores)],
    )


class _Planner:
    """Turns what is searched into whole numbers, the smaller the better, and simulates them."""

    def __init__(
        self,
        question: Question,
        base: Deployment,
        searched: Searched,
        on_tried: Callable[[int], object],
    ) -> None:
        self._question, self._base, self._searched = question, base, searched
        self._on_tried = on_tried
        self.outcomes: dict[int, Outcome] = {}
        self.rungs, self.start = self._make_rungs()
        problem = problem_of(self.deployment_of(self.rungs[self.start]))
        if problem is not None:
            raise BatchdecodeError(problem)

    def value_of(self, number: int) -> Value:
        """Return what a whole number stands for."""
        return 2 ** (-number / STEPS_OF_DOUBLING) if self._searched == "rate" else number

    def deployment_of(self, number: int) -> Deployment:
        """Return the deployment with that value."""
        value = self.value_of(number)
        if self._searched == "rate":
            return replace(self._base, rate=value)
        return AXES[self._searched].set(self._base, value)

    def score(self, number: int) -> Score:
        """Return the share of the requests that meet the SLO, and how near the others are to it."""
        num_tried = len(self.outcomes)
        outcome = measure(
            self._question, self.deployment_of(number), lambda _: self._on_tried(num_tried)
        )
        self.outcomes[number] = outcome
        self._on_tried(len(self.outcomes))
        limits = {} if self._question.slo is None else self._question.slo.limits
        excesses = [
            inf if (tail := outcome.tails[metric]) is None else tail / limit
            for metric, limit in limits.items()
        ]
        return good_share(outcome), -max(excesses)

    def share_of(self, number: int) -> float:
        """Return the share of the requests that met the SLO with a number that was tried."""
        return good_share(self.outcomes[number])

    def trial_of(self, number: int) -> Trial:
        """Return a number that was tried, for a report."""
        return Trial(value=self.value_of(number), share=self.share_of(number))

    def _make_rungs(self) -> tuple[Sequence[int], int]:
        """Return the numbers of the first tries, and the place of the very first.

        Raises:
            BatchdecodeError: there is nothing to search.
        """
        workload, scheduling = self._question.workload, self._base.scheduling
        if self._searched == "rate":
            if rate_of(workload) is None:
                raise BatchdecodeError("--search rate: all requests arrive at once")
            bound = STEPS_OF_DOUBLING * MAX_DOUBLINGS
            return range(-bound, bound + 1, STEPS_OF_DOUBLING), MAX_DOUBLINGS
        if self._searched == "batch":
            most = min(len(workload.jobs), MAX_BATCH, scheduling.max_batch_tokens or MAX_BATCH)
            return doublings(1, max(1, most)), 0
        if self._searched == "max_batch_tokens":
            first = max(self._base.batch, scheduling.block_size if scheduling.is_paged else 1)
            most = num_tokens(workload)
            return doublings(first, max(first, most)), 0
        most = num_blocks(workload, scheduling.block_size)
        return doublings(1, max(1, most)), 0


def rate_of(workload: Workload) -> float | None:
    """Return the mean rate of arrivals, requests a second; None if all arrive at once."""
    arrivals = [job.arrival_time for job in workload.jobs if not job.index]
    first, last = min(arrivals, default=0.0), max(arrivals, default=0.0)
    return (len(arrivals) - 1) / (last - first) if last > first else None
