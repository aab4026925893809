"""The smallest setting, or the largest rate, under which enough requests meet an SLO."""

from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.planning.deployments import Deployment, Value
from batcher.planning.drafting import Gain, gain_of
from batcher.planning.limits import Limit
from batcher.planning.measure import Outcome, Question, good_share, measure, problem_of, score_of
from batcher.planning.relief import Analysis, Edge, Relief, Removal
from batcher.planning.search import Ladder, LeastSearch, Score, Searched, likely
from batcher.planning.simulations import SMALL, MeasureAll, Simulations

OnTried = Callable[[int, Value, float], object]


class Trial(Struct, frozen=True, kw_only=True):
    """A value that was tried; share: see good_share.

    tokens_per_s, tails: see Outcome.
    """

    value: Value
    share: float
    tokens_per_s: float
    tails: dict[str, float | None]


class Plan(Struct, frozen=True, kw_only=True):
    """What a search came to.

    searched, asked: what for, and which share of the requests, of each class, was to meet the SLO.
    limits: of all classes, see Slo.
    is_met: whether `value` does, which is then the best that was found; else it is the nearest.
    file_rate: the mean rate of the arrivals in the file, requests a second; None if all arrive at
    once.
    is_last: no better value could be tried.
    next_value, next_outcome: the value after it that was tried and is not enough, None for none.
    binding_classes: those, if there are several, of which too few meet their SLO with the next
    value, or the nearest.
    binding, reliefs, removal: see batcher.planning.relief; of the same value.
    contradictions: values tried that are easier than `value`, and yet not enough.
    trials: all that were tried, in the order of their values.
    gain: what drafts gain `deployment`, None if it has none.
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
    binding_classes: list[str]
    binding: list[Limit | Literal["compute"]] = []
    reliefs: list[Relief] = []
    removal: Removal | None = None
    contradictions: list[Trial]
    trials: list[Trial]
    gain: Gain | None = None


def find_plan(
    question: Question,
    base: Deployment,
    searched: Searched,
    on_tried: OnTried = lambda _num_tried, _value, _share: None,
    on_relief: Callable[[float], object] = lambda _: None,
    on_found: Callable[["Plan"], object] = lambda _: None,
    on_trial: Callable[[Trial], object] = lambda _: None,
    *,
    num_jobs: int = 1,
    small: int = SMALL,
) -> Plan:
    """Return the best value of what is `searched`, all else as in `base`.

    The answer does not depend on `num_jobs`, the processes that work on it.

    on_tried: called again and again with how many values were tried, with the one that is tried
    next, and which share of that, and of others that are tried at once, is done.
    on_relief: called with how many simulations were done then to see what would help, a part of one
    counted as such.
    on_found: called before that with the plan, but for what binds, what helps and the gain.
    on_trial: called with each value that the search has tried, as soon as it is known.
    small: below so many samples no process is started.

    Raises:
        BatchdecodeError: the settings make no sense, or there is nothing to search.
    """
    if question.slo is None:
        raise BatchdecodeError("a plan needs an SLO")
    ladder = Ladder(question.workload, base, searched)
    problem = problem_of(ladder.deployment_of(ladder.rungs[ladder.start]))
    if problem is not None:
        raise BatchdecodeError(problem)
    with Simulations(question, num_jobs, small) as simulations:
        trials = _Trials(question, ladder, simulations, on_tried, on_trial)
        found, edge = _search(question, ladder, trials, _counted(simulations, on_relief))
        on_found(found)
        analysis = Analysis(binding=[], reliefs=[]) if edge is None else edge.analyse()
    gain = gain_of(
        found.deployment,
        question.workload.num_samples,
        lambda deployment: measure(question, deployment).tokens_per_s,
    )
    return replace(
        found,
        binding=analysis.binding,
        reliefs=analysis.reliefs,
        removal=analysis.removal,
        gain=gain,
    )


def _search(
    question: Question, ladder: Ladder, trials: "_Trials", measure_all: MeasureAll
) -> tuple[Plan, Edge | None]:
    """Return the plan for an SLO, and where its search ended; None if all were enough."""
    search = LeastSearch(trials.score, question.asked, ladder.rungs)
    search.run(ladder.start)
    is_met = search.least is not None
    best = search.nearest if search.least is None else search.least
    after = max((number for number in search.scores if number < best and is_met), default=None)
    ends = after if is_met else best
    edge = None
    if ends is not None:
        edge = Edge(
            question=question,
            ladder=ladder,
            number=ends,
            outcome=trials.outcomes[ends],
            enough=search.least,
            measure_all=measure_all,
        )
    found = Plan(
        searched=ladder.searched,
        asked=question.asked,
        limits={} if question.slo is None else question.slo.all_limits,
        is_met=is_met,
        value=ladder.value_of(best),
        deployment=ladder.deployment_of(best),
        outcome=trials.outcomes[best],
        file_rate=question.workload.mean_rate,
        is_last=best == ladder.rungs[0],
        next_value=None if after is None else ladder.value_of(after),
        next_outcome=None if after is None else trials.outcomes[after],
        binding_classes=[] if ends is None else _too_few(question, trials.outcomes[ends]),
        contradictions=[trials.trial_of(number) for number in search.contradictions],
        trials=[trials.trial_of(number) for number in sorted(search.scores)],
    )
    return found, edge


def _too_few(question: Question, outcome: Outcome) -> list[str]:
    """Return the classes of which fewer than the asked share met their SLO."""
    goodputs = {name: each.goodput for name, each in outcome.classes.items()}
    return [
        name
        for name, each in goodputs.items()
        if each.requests and each.good / each.requests < question.asked
    ]


class _Trials:
    """Simulates numbers of a ladder, and keeps what they come to."""

    def __init__(
        self,
        question: Question,
        ladder: Ladder,
        simulations: Simulations,
        on_tried: OnTried,
        on_trial: Callable[[Trial], object],
    ) -> None:
        self._question, self._ladder = question, ladder
        self._on_tried, self._on_trial = on_tried, on_trial
        self._simulations = simulations
        self._ahead: dict[int, Outcome] = {}  # of those that were not asked for by now
        self.outcomes: dict[int, Outcome] = {}

    def score(self, number: int) -> Score:
        """Return the share of the requests that meet the SLO, and how near the others are to it."""
        if number not in self._ahead:
            self._measure_ahead()
        self.outcomes[number] = outcome = self._ahead.pop(number)
        self._on_trial(self.trial_of(number))
        return score_of(self._question, outcome)

    def _measure_ahead(self) -> None:
        """Measure what is asked for now, and what may be next where processes are free."""
        known = {
            number: score_of(self._question, outcome)
            for number, outcome in (self.outcomes | self._ahead).items()
        }
        ladder, num_tried = self._ladder, len(self.outcomes)
        numbers = likely(
            known, self._question.asked, ladder.rungs, ladder.start, self._simulations.num_jobs
        )
        deployments = [ladder.deployment_of(number) for number in numbers]
        value = ladder.value_of(numbers[0])
        outcomes = self._simulations.measure(
            deployments, lambda done: self._on_tried(num_tried, value, done / len(numbers))
        )
        self._ahead.update(zip(numbers, outcomes, strict=True))

    def trial_of(self, number: int) -> Trial:
        """Return a number that was tried, for a report."""
        outcome = self.outcomes[number]
        return Trial(
            value=self._ladder.value_of(number),
            share=good_share(outcome),
            tokens_per_s=outcome.tokens_per_s,
            tails=outcome.tails,
        )


def _counted(simulations: Simulations, on_simulated: Callable[[float], object]) -> MeasureAll:
    """Return what measures deployments, and tells how many it has."""
    num_before = 0

    def measure_all(deployments: Sequence[Deployment]) -> list[Outcome]:
        nonlocal num_before
        found = simulations.measure(deployments, lambda done: on_simulated(num_before + done))
        num_before += len(deployments)
        return found

    return measure_all
