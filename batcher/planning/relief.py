"""What would help a deployment that does not meet its SLO: each limit widened, and narrowed.

Rule: nothing is inferred but from requests that can never run; every relief is simulated.
"""

from collections.abc import Callable, Sequence
from math import floor
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from batcher.planning.deployments import Deployment, Value
from batcher.planning.limits import SETTING_OF, Limit, limits_of, narrower, value_at, wider, without
from batcher.planning.measure import Outcome, Question, good_share, problem_of, score_of
from batcher.planning.search import Ladder, Score
from batcher.planning.simulations import Chain, MeasureAll, together

# Doublings, or halvings, of a limit; of a token budget more, as several may change nothing before
# one sets prompts apart from those that decode.
MAX_CHANGES: dict[Limit, int] = {"slots": 3, "kv": 3, "tokens": 5, "threshold": 3, "static": 1}
Change = Callable[[Deployment, Limit], Deployment | None]
MIN_GAIN = 0.5  # of the share of the requests that is lacking: what gives less does not bind
MAX_REACHES = 4  # limits, in a direction, of which it is found how far changing them reaches


class Relief(Struct, frozen=True, kw_only=True):
    """A setting that was changed to a value.

    share: of the requests that meet the SLO so, where the search ended.
    reached: the best value of what is searched that meets the SLO so, None if that is none beyond.
    """

    constraint: Limit
    setting: str
    value: Value
    share: float
    reached: Value | None = None


class Removal(Struct, frozen=True, kw_only=True):
    """Limits that were out of the way together, and the share that meets the SLO so."""

    constraints: list[Limit]
    share: float


class Analysis(Struct, frozen=True, kw_only=True):
    """What binds a deployment, in the order of SETTING_OF, and what that rests on.

    removal: the fewest limits that have to go together, None if changing one of them helps.
    """

    binding: list[Limit | Literal["compute"]]
    reliefs: list[Relief]
    removal: Removal | None = None


class _Attempt(Struct, frozen=True, kw_only=True):
    """A limit, `base` with it wider or narrower, and what that comes to at an edge."""

    limit: Limit
    is_wider: bool
    base: Deployment
    share: float
    score: Score
    reached: int | None = None


def _without_uses(outcome: Outcome) -> Outcome:
    """Return `outcome` without the shares of limits, which differ where nothing else does."""
    return replace(outcome, slots_used=0.0, kv_used=None, budget_used=None)


def _rank(attempt: _Attempt) -> tuple[float, float, float]:
    """Return what is least for the change that helps most."""
    share, nearness = attempt.score
    reached = float("inf") if attempt.reached is None else attempt.reached
    return reached, -share, -nearness


def _relief(attempt: _Attempt, ladder: Ladder) -> Relief:
    return Relief(
        constraint=attempt.limit,
        setting=SETTING_OF[attempt.limit],
        value=value_at(attempt.base, attempt.limit),
        share=attempt.share,
        reached=None if attempt.reached is None else ladder.value_of(attempt.reached),
    )


class Edge(Struct, frozen=True, kw_only=True):
    """Where a search ended: `number` comes to `outcome`, which is not enough.

    measure_all: tells what deployments come to.
    enough: the least number that is, the next larger one; None if nothing is enough.
    """

    question: Question
    ladder: Ladder
    number: int
    outcome: Outcome
    enough: int | None
    measure_all: MeasureAll

    def analyse(self) -> Analysis:
        """Return what binds there, so that more do not meet the SLO, and what would help.

        Of a setting it is that setting: one more of it is enough.  Of a rate it is the limit whose
        change reaches furthest; if none reaches further, or nothing meets the SLO, the one whose
        change lets most requests meet it; if none lets more by MIN_GAIN, the fewest that together
        do if nobody meets them; if these do not either, the time that steps take.  Where too many
        requests can never run there are too few blocks, whatever else.
        """
        removal = None
        attempts = self._attempts()
        if self.enough is not None:
            attempts = self._with_reaches(attempts, self.enough)
        best = min(attempts, key=_rank, default=None)
        own = next(
            (limit for limit in SETTING_OF if SETTING_OF[limit] == self.ladder.searched), None
        )
        binding: set[Limit] = set()
        if self.enough is not None and own is not None:
            binding = {own}
        elif best is not None and self._is_gain(best.share):
            binding = {best.limit}
        else:
            removal = self._removal()
            binding.update(removal.constraints if removal else ())
        num_samples = self.outcome.served + self.outcome.failed
        if self.outcome.failed > floor((1 - self.question.asked) * num_samples + 1e-9):
            binding.add("kv")
        return Analysis(
            binding=[limit for limit in SETTING_OF if limit in binding] or ["compute"],
            reliefs=[_relief(attempt, self.ladder) for attempt in attempts],
            removal=removal,
        )

    def _is_gain(self, share: float) -> bool:
        """Return whether this share of the requests is more than without a change, by enough."""
        before = good_share(self.outcome)
        return share > before and share - before >= MIN_GAIN * (self.question.asked - before)

    def _attempts(self) -> list[_Attempt]:
        """Return what it comes to there to widen and to narrow each limit but the searched one."""
        chains = [
            self._changes(limit, change)
            for limit, setting in SETTING_OF.items()
            for change in (wider, narrower)
            if setting != self.ladder.searched
        ]
        return [attempt for found in together(chains, self.measure_all) for attempt in found]

    def _changes(self, limit: Limit, change: Change) -> Chain[list[_Attempt]]:
        """Return what it comes to there to change a limit, further and further.

        One that changes nothing when it is wider was not reached: it is not widened further.
        """
        attempts: list[_Attempt] = []
        base, before = self.ladder.base, self.outcome
        for _ in range(MAX_CHANGES[limit]):
            changed = change(base, limit)
            if changed is None or changed == base:
                break
            deployment = self.ladder.deployment_of(self.number, changed)
            if problem_of(deployment) is not None:
                break
            base, outcome = changed, (yield deployment)
            attempts.append(
                _Attempt(
                    limit=limit,
                    is_wider=change is wider,
                    base=base,
                    share=good_share(outcome),
                    score=score_of(self.question, outcome),
                )
            )
            if change is wider and _without_uses(outcome) == _without_uses(before):
                break
            before = outcome
        return attempts

    def _with_reaches(self, attempts: list[_Attempt], enough: int) -> list[_Attempt]:
        """Return `attempts`; the one of a limit and direction that reaches furthest says how far.

        It does if that is about a hundredth beyond `enough`.
        """
        directions: dict[tuple[Limit, bool], list[_Attempt]] = {}
        for attempt in attempts:
            if attempt.share >= self.question.asked:
                directions.setdefault((attempt.limit, attempt.is_wider), []).append(attempt)
        best = sorted(directions.values(), key=lambda tried: max(each.score for each in tried))
        chains = [self._furthest(tried) for tried in best[-MAX_REACHES:]]
        reaches = dict(together(chains, self.measure_all))
        most = enough - self.ladder.step_at(enough)
        return [
            replace(attempt, reached=reaches[attempt.base])
            if reaches.get(attempt.base, enough) <= most
            else attempt
            for attempt in attempts
        ]

    def _furthest(self, tried: list[_Attempt]) -> Chain[tuple[Deployment, int]]:
        """Return which of `tried`, all enough there, reaches furthest, and how far it does.

        It is looked for further only with those that are enough beyond where one before is.
        """
        step = self.ladder.step_at(self.number)
        best = tried[0].base
        reached = yield from self._reach(best, self.number)
        for attempt in tried[1:]:
            beyond = max(reached - step, self.ladder.rungs[0])
            if beyond < reached and (yield from self._is_enough(attempt.base, beyond)):
                best = attempt.base
                reached = yield from self._reach(best, beyond)
        return best, reached

    def _reach(self, base: Deployment, enough: int) -> Chain[int]:
        """Return the least number found to be enough with `base`, with which `enough` is.

        The distance is doubled until a number is not enough, and then halved, to about a hundredth.
        """
        bound, step = self.ladder.rungs[0], self.ladder.step_at(self.number)
        distance, too_small = step, bound - 1
        while enough > bound:
            number = max(enough - distance, bound)
            if not (yield from self._is_enough(base, number)):
                too_small = number
                break
            enough, distance = number, 2 * distance
        while enough - too_small > step:
            middle = (enough + too_small) // 2
            if (yield from self._is_enough(base, middle)):
                enough = middle
            else:
                too_small = middle
        return enough

    def _is_enough(self, base: Deployment, number: int) -> Chain[bool]:
        deployment = self.ladder.deployment_of(number, base)
        if problem_of(deployment) is not None:
            return False
        return good_share((yield deployment)) >= self.question.asked

    def _removal(self) -> Removal | None:
        """Return the fewest limits without which more meet the SLO, None for none."""
        deployment, workload = self.ladder.deployment_of(self.number), self.question.workload

        def share_without(limits: Sequence[Limit]) -> float:
            (outcome,) = self.measure_all([without(deployment, limits, workload)])
            return good_share(outcome)

        limits = limits_of(deployment)
        reached = share_without(limits)
        if not self._is_gain(reached):
            return None
        for limit in list(limits):
            others = [other for other in limits if other != limit]
            if others and share_without(others) >= reached:
                limits = others
        return Removal(constraints=limits, share=reached)
