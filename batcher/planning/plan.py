"""The smallest setting, or the largest rate, under which enough requests meet an SLO."""

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from math import ceil, floor
from typing import Any, Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from batcher.errors import BatchdecodeError, InvariantError
from batcher.planning.deployments import (
    AXES,
    MAX_BATCH,
    MAX_COUNT,
    MAX_REPLICAS,
    OF_ENGINE,
    Deployment,
    Value,
    engines_of,
    groups_of,
    scaled_fleet,
    without_drafts,
)
from batcher.planning.measure import (
    GivenUp,
    Outcome,
    Question,
    measure,
    outcome_of,
    problem_of,
    run,
)
from batcher.planning.routers import ROUTERS
from batcher.planning.workers import OnPart, WorkerProcesses
from batcher.planning.workload import AnyWorkload
from batcher.speculation.settings import expected_speedup, simple_return

# -- what is searched ------------------------------------------------------------------------------
#
# The numbers that are searched are whole, the smaller the better; a rate is tried at steps of a
# 64th of a doubling, 1.1 %, all else at every whole number.  It is assumed that what is enough is
# enough for all that is larger, too; that is checked around the answer, and whatever was seen
# against it is reported.

Searched = Literal["batch", "kv_blocks", "max_batch_tokens", "replicas", "rate"]

STEPS_OF_DOUBLING = 64
MAX_DOUBLINGS = 10  # of a rate, up and down


class Ladder:
    """The values of what is `searched` in deployments that are as `base` otherwise.

    rungs: the numbers of the first tries, ascending, and the bounds; start: the place of the first.
    """

    def __init__(self, workload: AnyWorkload, base: Deployment, searched: Searched) -> None:
        self.base, self.searched, self.start = base, searched, 0
        scheduling, first, most = base.scheduling, 1, 0
        self._num_replicas = 1 if base.fleet is None else scaled_fleet(base.fleet).num_replicas
        if searched == "rate":
            if workload.mean_rate is None:
                raise BatchdecodeError("--search rate: all requests arrive at once")
            bound = STEPS_OF_DOUBLING * MAX_DOUBLINGS
            self.rungs: Sequence[int] = range(-bound, bound + 1, STEPS_OF_DOUBLING)
            self.start = MAX_DOUBLINGS
            return
        if searched == "batch":
            most = min(workload.num_samples, MAX_BATCH, scheduling.max_batch_tokens or MAX_BATCH)
        elif searched == "replicas":
            most = min(workload.num_samples, MAX_REPLICAS) // self._num_replicas
        elif searched == "max_batch_tokens":
            first = max(base.batch, scheduling.block_size if scheduling.is_paged else 1)
            most = workload.num_tokens
        else:
            most = workload.num_blocks(scheduling.block_size)
        self.rungs = doublings(first, max(first, most))

    def value_of(self, number: int) -> Value:
        if self.searched == "rate":
            return 2 ** (-number / STEPS_OF_DOUBLING)
        return number * self._num_replicas if self.searched == "replicas" else number

    def step_at(self, number: int) -> int:
        """Return how far away the next number is that differs by about a hundredth."""
        return 1 if self.searched == "rate" else max(1, number // STEPS_OF_DOUBLING)

    def deployment_of(self, number: int, base: Deployment | None = None) -> Deployment:
        base, value = base or self.base, self.value_of(number)
        if self.searched == "rate":
            return replace(base, rate=value)
        if self.searched == "replicas" and base.fleet is not None:
            return AXES["fleet"].set(base, scaled_fleet(base.fleet, number))
        return AXES[self.searched].set(base, value)


def doublings(first: int, last: int) -> list[int]:
    rungs = []
    while first < last:
        rungs.append(first)
        first *= 2
    return [*rungs, last]


Score = tuple[float, float]  # what counts, and which of equal ones is nearer; the larger the better

NEAR = (1, 2, 4, 8)  # how far from the answer it is checked
NUM_PROBES = 8  # between rungs of which none is enough
MAX_ROUNDS = 8  # of finding a smaller one by a check


class LeastSearch:
    """Looks for the least number of whose score the first part reaches `asked`.

    rungs: ascending; the first is the least that may be tried, the last the largest.  scores: of
    all that were tried.
    """

    def __init__(self, asked: float, rungs: Sequence[int]) -> None:
        self._asked, self._rungs = asked, rungs
        self.scores: dict[int, Score] = {}

    @property
    def least(self) -> int | None:
        return min((number for number in self.scores if self._is_enough(number)), default=None)

    @property
    def contradictions(self) -> list[int]:
        """The numbers tried that are larger than the least, and yet not enough, ascending."""
        least = self.least
        if least is None:
            return []
        return sorted(n for n in self.scores if n > least and not self._is_enough(n))

    @property
    def nearest(self) -> int:
        return max(self.scores, key=lambda number: (self.scores[number], -number))

    def asks(self, place: int) -> Iterator[int]:
        """Yield each number whose score must be in `scores` before the search goes on.

        From the rung at `place` on it climbs to the first that is enough, or descends as long as
        they are.  If none is, it tries some numbers between the rungs around the best one.  Then,
        again and again, it halves the distance to the largest smaller number that is not enough,
        down to 1, and tries numbers near the answer and the rung after it.
        """
        rungs = self._rungs
        if (yield from self._tries(rungs[place])):
            while place > 0 and (yield from self._tries(rungs[place - 1])):
                place -= 1
        else:
            while place + 1 < len(rungs) and not (yield from self._tries(rungs[place + 1])):
                place += 1
        if self.least is None:
            best = rungs.index(self.nearest)
            low, high = rungs[max(0, best - 1)], rungs[min(len(rungs) - 1, best + 1)]
            for part in range(1, NUM_PROBES + 1):
                yield from self._tries(low + (high - low) * part // (NUM_PROBES + 1))
        for _ in range(MAX_ROUNDS):
            least = self.least
            if least is None:
                return
            low = max((number for number in self.scores if number < least), default=least - 1)
            while least - low > 1:
                middle = (low + least) // 2
                if (yield from self._tries(middle)):
                    least = middle
                else:
                    low = middle
            after = next((rung for rung in rungs if rung > least), least)
            near = [least + sign * distance for distance in NEAR for sign in (-1, 1)]
            for number in (*near, after):
                if rungs[0] <= number <= rungs[-1]:
                    yield from self._tries(number)
            if self.least == least:
                return

    def _tries(self, number: int) -> Generator[int, None, bool]:
        if number not in self.scores:
            yield number
        return self._is_enough(number)

    def _is_enough(self, number: int) -> bool:
        return self.scores[number][0] >= self._asked


def likely(
    known: Mapping[int, Score], asked: float, rungs: Sequence[int], start: int, count: int
) -> list[int]:
    """Return up to `count` numbers whose scores a LeastSearch asks for next, or soon.

    The first is the next; then come those after it, whether it is enough or not, and so on.
    """
    found = dict[int, None]()
    branches: deque[dict[int, Score]] = deque([{}])
    while branches and len(found) < count:
        assumed = branches.popleft()
        scores, search = {**known, **assumed}, LeastSearch(asked, rungs)
        for number in search.asks(start):
            if number not in scores:
                found[number] = None
                branches += [{**assumed, number: (share, 0.0)} for share in (-1.0, 2.0)]
                break
            search.scores[number] = scores[number]
    return list(found)


# -- limits, and deployments in which they are changed ---------------------------------------------

Limit = Literal["slots", "kv", "tokens", "threshold", "static"]

SETTING_OF: dict[Limit, str] = {
    "slots": "batch",
    "kv": "kv_blocks",
    "tokens": "max_batch_tokens",
    "threshold": "long_prefill_threshold",
    "static": "batching",
}
FIRST_BUDGET = 2048  # tokens of a step: what is tried where there is no limit of them

# Doublings, or halvings, of a limit; of a token budget more, as several may change nothing before
# one sets prompts apart from those that decode.
MAX_CHANGES: dict[Limit, int] = {"slots": 3, "kv": 3, "tokens": 5, "threshold": 3, "static": 1}
MIN_GAIN = 0.5  # of the share of the requests that is lacking: what gives less does not bind
MAX_REACHES = 4  # limits, in a direction, of which it is found how far changing them reaches


def value_at(deployment: Deployment, limit: Limit) -> Value:
    """Return the setting of `limit`; a list with that of each group if they differ."""
    axis = AXES[SETTING_OF[limit]]
    values = [axis.value_of(engine) for engine in engines_of([deployment])]
    return values if any(value != values[0] for value in values) else values[0]


def _limits(limit: Limit, engine: Deployment) -> bool:
    return value_at(engine, limit) not in (None, "continuous")


def _in_each(deployment: Deployment, change: Callable[[Deployment], Deployment]) -> Deployment:
    fleet = deployment.fleet
    if fleet is None:
        return change(deployment)
    groups = []
    for group, of_file in zip(groups_of(deployment), fleet.groups, strict=True):
        changed = change(group.engine)
        values = {name: AXES[name].value_of(changed) for name in OF_ENGINE}
        news = {
            name: value
            for name, value in values.items()
            if value != AXES[name].value_of(group.engine)
        }
        groups.append(replace(of_file, settings=of_file.settings | news))
    return replace(deployment, fleet=replace(fleet, groups=tuple(groups)))


def changed_limit(deployment: Deployment, limit: Limit, *, is_wider: bool) -> Deployment:
    """Return `deployment` with twice, or half, of what `limit` limits, the same if it cannot be.

    Static batching is continuous when it is wider, and a token budget at least one token for each
    slot.  Steps without a token budget are given one that is narrower.
    """

    def change(engine: Deployment) -> Deployment:
        axis, value = AXES[SETTING_OF[limit]], value_at(engine, limit)
        if limit == "tokens" and value is None and not is_wider:
            value = 2 * max(FIRST_BUDGET, engine.batch)
        if value in (None, "continuous"):
            return engine
        if limit == "static":
            return axis.set(engine, "continuous") if is_wider else engine
        if not is_wider:
            return axis.set(engine, max(value // 2, 1))
        most = MAX_BATCH if limit == "slots" else MAX_COUNT
        return _with_a_token_for_each(axis.set(engine, min(2 * value, most)))

    return _in_each(deployment, change)


def without(deployment: Deployment, limits: Collection[Limit], workload: AnyWorkload) -> Deployment:
    """Return `deployment` with as much of what `limits` limit as `workload` can ever use."""

    def change(engine: Deployment) -> Deployment:
        bounds: dict[Limit, int] = {
            "slots": min(workload.num_samples, MAX_BATCH),
            "kv": workload.num_blocks(engine.scheduling.block_size),
            "tokens": workload.num_tokens,
        }
        for limit in limits:
            if _limits(limit, engine):
                free = "continuous" if limit == "static" else None
                if limit in bounds:
                    free = max(value_at(engine, limit), bounds[limit])
                engine = AXES[SETTING_OF[limit]].set(engine, free)
        return _with_a_token_for_each(engine)

    return _in_each(deployment, change)


def _with_a_token_for_each(deployment: Deployment) -> Deployment:
    budget = deployment.scheduling.max_batch_tokens
    if budget is None or budget >= deployment.batch:
        return deployment
    return AXES["max_batch_tokens"].set(deployment, deployment.batch)


class Tried(Struct, frozen=True, kw_only=True):
    """What a deployment came to, and how far it came to its limits.

    outcome: None: it was given up.  is_known: whether the rest is.  slots, blocks, tokens: the most
    of any step of a replica.  request: the tokens of the longest request.  lacking: what the first
    of a waiting queue lacked.
    """

    deployment: Deployment
    outcome: Outcome | None = None
    is_known: bool = False
    slots: int = 0
    blocks: int = 0
    tokens: int = 0
    request: int = 0
    lacking: set[str] = set()

    def score(self, limits: Mapping[str, float]) -> Score:
        return (-1.0, 0.0) if self.outcome is None else self.outcome.score(limits)

    def binds(self, limit: Limit, changed: Deployment) -> bool:
        """Return whether `changed`, the same but for `limit`, may come to something else.

        It cannot if neither keeps anything out that the other one does not.  A router of one's own
        may look at limits, and a prefix cache holds more in more blocks.
        """
        base, scheduling = self.deployment, changed.scheduling
        if not self.is_known or base.fleet is not None or base.router not in ROUTERS:
            return True
        if scheduling.preempt_for:
            return True
        if limit == "slots":
            is_same_otherwise = base.scheduling == scheduling
            return not (is_same_otherwise and self.slots < min(base.batch, changed.batch + 1))
        if limit == "tokens":  # what is left of a budget may be too little for a block
            num_tokens = self.tokens + scheduling.block_size
            budgets = base.scheduling.max_batch_tokens, scheduling.max_batch_tokens
            return "tokens" in self.lacking or num_tokens > min(filter(None, budgets))
        if limit != "kv" or scheduling.kv_blocks is None or scheduling.capacity == "no-evict":
            return True
        num_kept = ceil(scheduling.kv_blocks * scheduling.watermark)
        num_kept += ceil(self.request / scheduling.block_size)
        is_short = not self.lacking.isdisjoint(("kv", "preemption"))
        return is_short or self.blocks + num_kept > scheduling.kv_blocks


def try_deployment(
    question: Question, task: tuple[Deployment, bool], on_part: OnPart = lambda _: None
) -> Tried:
    """Simulate a deployment; the second of `task`: it is given up if it is surely not enough."""
    deployment, may_give_up = task
    workload, slo = question.workload, question.slo
    has_limit = may_give_up and slo is not None and not slo.classes
    try:
        result = run(workload, deployment, on_part, question if has_limit else None)
    except GivenUp:
        return Tried(deployment=deployment)
    outcome = outcome_of(question, deployment, result)
    return Tried(
        deployment=deployment,
        outcome=outcome,
        is_known=not (outcome.preemptions or outcome.failed) and workload.shares_nothing,
        slots=max(each.peak_slots for each in result.replicas),
        blocks=max(each.peak_blocks for each in result.replicas),
        tokens=max(each.peak_tokens for each in result.replicas),
        request=result.longest_request,
        lacking={name for name, ticks in result.totals.binding_ticks.items() if ticks},
    )


# -- what binds, and what would help ---------------------------------------------------------------

Found = TypeVar("Found")
Chain = Generator[Deployment, Outcome, Found]
"""Asks for one deployment after the other, is told what each comes to, returns what it found."""


class Relief(Struct, frozen=True, kw_only=True):
    """A setting that was changed to a value.

    share: of the requests that meet the SLO so, where the search ended.  reached: the best value of
    what is searched that meets the SLO so, if it is beyond.
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


class _Attempt(Struct, frozen=True, kw_only=True):
    """A limit, `base` with it wider or narrower, and the score of that at an edge."""

    limit: Limit
    is_wider: bool
    base: Deployment
    score: Score
    reached: int | None = None


class Edge(Struct, frozen=True, kw_only=True):
    """The end of a search: `number` comes to `outcome`, which is not enough.

    enough: the least number that is, the next larger one; None if nothing is enough.  drive:
    returns what chains find, whose deployments may be simulated in any order.  tried: how far
    `number` came to its limits, if known.
    """

    question: Question
    ladder: Ladder
    number: int
    outcome: Outcome
    enough: int | None
    drive: Callable[[Sequence[Chain[Any]]], list[Any]]
    tried: Tried | None = None

    def analyse(self) -> tuple[list[Limit | Literal["compute"]], list[Relief], Removal | None]:
        """Return what binds there, so that more do not meet the SLO, and what would help.

        Of a setting it is that setting: one more of it is enough.  Of a rate it is the limit whose
        change reaches furthest; if none reaches further, or nothing meets the SLO, the one whose
        change lets most requests meet it; if none lets more by MIN_GAIN, the fewest that together
        do if nobody meets them; if these do not either, the time that steps take.  Where too many
        requests can never run there are too few blocks, whatever else.
        """
        asked, ladder, enough = self.question.asked, self.ladder, self.enough
        chains = [
            self._changes(limit, is_wider=is_wider)
            for limit, setting in SETTING_OF.items()
            for is_wider in (True, False)
            if setting != ladder.searched
        ]
        attempts = [each for found in self.drive(chains) for each in found]
        if enough is not None:
            directions: dict[tuple[Limit, bool], list[_Attempt]] = {}
            for attempt in attempts:
                if attempt.score[0] >= asked:
                    directions.setdefault((attempt.limit, attempt.is_wider), []).append(attempt)
            furthest_last = sorted(
                directions.values(), key=lambda tried: max(each.score for each in tried)
            )
            reaching = [self._furthest(tried) for tried in furthest_last[-MAX_REACHES:]]
            reaches = dict(self.drive(reaching))
            most = enough - ladder.step_at(enough)
            attempts = [
                replace(attempt, reached=reaches[attempt.base])
                if reaches.get(attempt.base, enough) <= most
                else attempt
                for attempt in attempts
            ]
        furthest = min((one.reached for one in attempts if one.reached is not None), default=None)
        candidates = [one for one in attempts if one.reached == furthest]
        best = max(candidates, key=lambda one: one.score, default=None)
        searched = {limit for limit, setting in SETTING_OF.items() if setting == ladder.searched}
        removal, binding = None, set[Limit]()
        if enough is not None and searched:
            binding = searched
        elif best is not None and self._is_gain(best.score[0]):
            binding = {best.limit}
        else:
            (removal,) = self.drive([self._removal()])
            binding.update(removal.constraints if removal else ())
        num_samples = self.outcome.served + self.outcome.failed
        if self.outcome.failed > floor((1 - asked) * num_samples + 1e-9):
            binding.add("kv")
        reliefs = [
            Relief(
                constraint=one.limit,
                setting=SETTING_OF[one.limit],
                value=value_at(one.base, one.limit),
                share=one.score[0],
                reached=None if one.reached is None else ladder.value_of(one.reached),
            )
            for one in attempts
        ]
        return [limit for limit in SETTING_OF if limit in binding] or ["compute"], reliefs, removal

    def _is_gain(self, share: float) -> bool:
        before = self.outcome.good_share
        return share > before and share - before >= MIN_GAIN * (self.question.asked - before)

    def _changes(self, limit: Limit, *, is_wider: bool) -> Chain[list[_Attempt]]:
        """Yield one limit changed further and further; return what each change comes to.

        One that changes nothing when it is wider was not reached: it is not widened further.
        """
        attempts: list[_Attempt] = []
        base, before = self.ladder.base, self.outcome
        limits = {} if self.question.slo is None else self.question.slo.all_limits
        # The shares of limits differ where nothing else does.
        unused = {"slots_used": 0.0, "kv_used": None, "budget_used": None}
        for _ in range(MAX_CHANGES[limit]):
            changed = changed_limit(base, limit, is_wider=is_wider)
            deployment = self.ladder.deployment_of(self.number, changed)
            if changed == base or problem_of(deployment) is not None:
                break
            if self.tried is not None and not self.tried.binds(limit, changed):
                outcome = before
            else:
                outcome = yield deployment
            base = changed
            score = outcome.score(limits)
            attempts.append(_Attempt(limit=limit, is_wider=is_wider, base=base, score=score))
            if is_wider and replace(outcome, **unused) == replace(before, **unused):
                break
            before = outcome
        return attempts

    def _furthest(self, tried: list[_Attempt]) -> Chain[tuple[Deployment, int]]:
        """Return which of `tried` reaches furthest, and how far.

        Only attempts that are enough beyond the reach of one before are looked at.
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
        return (yield deployment).good_share >= self.question.asked

    def _removal(self) -> Chain[Removal | None]:
        """Return the fewest limits without which more meet the SLO, or None."""
        deployment, workload = self.ladder.deployment_of(self.number), self.question.workload
        engines = engines_of([deployment])
        limits = [limit for limit in SETTING_OF if any(_limits(limit, each) for each in engines)]
        reached = (yield without(deployment, limits, workload)).good_share
        if not self._is_gain(reached):
            return None
        for limit in list(limits):
            others = [other for other in limits if other != limit]
            if others and (yield without(deployment, others, workload)).good_share >= reached:
                limits = others
        return Removal(constraints=limits, share=reached)


# -- what drafts gain ------------------------------------------------------------------------------


class Gain(Struct, frozen=True, kw_only=True):
    """The gain of drafts in a deployment, measured by two simulations that differ in them alone.

    tokens_per_s, without: with and without drafts; speedup: their quotient.  expected, simple: by
    the formulas (1-a^(k+1))/((1-a)(1+ck)) and ka/(1+c) (Leviathan et al., "Fast Inference from
    Transformers via Speculative Decoding", 2023), which know neither what verifying costs nor that
    requests wait.  off_from: the least batch tried, each twice the one before, from which on drafts
    gain nothing; None if all gain.
    """

    tokens_per_s: float
    without: float
    speedup: float
    expected: float
    simple: float
    off_from: int | None


def off_from(gains: Iterable[tuple[int, float]]) -> int | None:
    """Return the least batch from which on no speedup is above 1; gains: (batch, speedup)."""
    least = None
    for batch, speedup in sorted(gains, reverse=True):
        if speedup > 1:
            break
        least = batch
    return least


def gain_of(
    deployment: Deployment, most_slots: int, tokens_per_s: Callable[[Deployment], float]
) -> Gain | None:
    """Return the gain of drafts in `deployment`, None without drafts or tokens, or for fleet files.

    most_slots: how many are of any use.  tokens_per_s: measures a deployment.
    """
    drafts = deployment.drafts
    if drafts is None or deployment.fleet is not None:
        return None

    def measured(batch: int) -> tuple[float, float]:
        sized = AXES["batch"].set(deployment, batch)
        return tokens_per_s(sized), tokens_per_s(without_drafts(sized))

    own = measured(deployment.batch)
    if not own[1]:
        return None
    gains = [(deployment.batch, own[0] / own[1])]
    batch, budget = deployment.batch, deployment.scheduling.max_batch_tokens
    most = min(most_slots, MAX_BATCH, MAX_BATCH if budget is None else budget)
    while gains[-1][1] > 1 and batch < most:
        batch = min(2 * batch, most)
        with_drafts, undrafted = measured(batch)
        gains.append((batch, with_drafts / undrafted if undrafted else 1.0))
    terms = (drafts.acceptance, drafts.num_tokens, drafts.cost)
    return Gain(
        tokens_per_s=own[0],
        without=own[1],
        speedup=own[0] / own[1],
        expected=expected_speedup(*terms),
        simple=simple_return(*terms),
        off_from=off_from(gains),
    )


# -- the plan --------------------------------------------------------------------------------------

SMALL = 2_000  # samples: fewer are simulated before a process has started


class Trial(Struct, frozen=True, kw_only=True):
    """A value that was tried; share: Outcome.good_share.  tokens_per_s, tails: see Outcome.

    If it was given up, as it cannot be enough, all of them are None or empty.
    """

    value: Value
    share: float | None = None
    tokens_per_s: float | None = None
    tails: dict[str, float | None] = {}


class Plan(Struct, frozen=True, kw_only=True):
    """The result of a search.

    asked: the share of the requests, of each class, that must meet the SLO.  is_met: `value` does,
    and is the best found; else it is the nearest.  file_rate: mean arrivals per second in the file,
    None if all come at once.  is_last: no better value could be tried.  next_value, next_outcome:
    the value after it that is not enough, or None.  binding_classes: of several, those of which too
    few meet their SLO there.  binding: what binds there, in the order of SETTING_OF; reliefs: what
    was tried against it; removal: the fewest limits that have to go together, None if changing one
    of them helps.  contradictions: values that are easier than `value`, and yet not enough.
    trials: all, in the order of their values.  gain: of drafts, or None.
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
    on_tried: Callable[[int, Value, float], object] = lambda _num_tried, _value, _share: None,
    on_relief: Callable[[float], object] = lambda _: None,
    on_found: Callable[[Plan], object] = lambda _: None,
    on_trial: Callable[[Trial], object] = lambda _: None,
    *,
    num_jobs: int = 1,
    small: int = SMALL,
    has_all_trials: bool = True,
) -> Plan:
    """Return the best value of what is `searched`, all else as in `base`.

    The answer does not depend on `num_jobs`, the processes that work on it.
    on_tried: called again and again with how many values were tried, the next value, and the share
    of its simulation that is done.  on_relief: called with how many simulations of reliefs are
    done.  on_found: called before that with the plan, without what binds, helps and gains.
    on_trial: called with each value that the search has tried.  small: below so many samples no
    process is started.  has_all_trials: what cannot be enough is simulated to its end, too.

    Raises:
        BatchdecodeError: the settings make no sense, or there is nothing to search.
    """
    if question.slo is None:
        raise BatchdecodeError("a plan needs an SLO")
    workload, asked, limits = question.workload, question.asked, question.slo.all_limits
    ladder = Ladder(workload, base, searched)
    rungs = ladder.rungs
    problem = problem_of(ladder.deployment_of(rungs[ladder.start]))
    if problem is not None:
        raise BatchdecodeError(problem)
    num_jobs = 1 if workload.num_samples < small else num_jobs
    tried: dict[int, Tried] = {}  # those that were asked for, and some of the next
    search, may_give_up = LeastSearch(asked, rungs), not has_all_trials

    def is_done(number: int) -> bool:
        return number in tried and (may_give_up or tried[number].outcome is not None)

    def trial_of(number: int) -> Trial:
        outcome, value = tried[number].outcome, ladder.value_of(number)
        if outcome is None:
            return Trial(value=value)
        share, tokens_per_s = outcome.good_share, outcome.tokens_per_s
        return Trial(value=value, share=share, tokens_per_s=tokens_per_s, tails=outcome.tails)

    with WorkerProcesses(try_deployment, question, num_jobs) as workers:
        asks, running = search.asks(ladder.start), set[int]()
        wanted = next(asks, None)
        coming: list[int] | None = None  # what may be asked for soon, until there is an answer

        def task_of(number: int) -> tuple[int, tuple[Deployment, bool]]:
            running.add(number)  # the one before the least is the edge
            gives_up = may_give_up and number + 1 != search.least
            return number, (ladder.deployment_of(number), gives_up)

        def choose() -> tuple[int, tuple[Deployment, bool]] | None:
            """Go on with the search; return what it asks for next, or soon."""
            nonlocal wanted, coming
            while wanted is not None and is_done(wanted) and wanted not in search.scores:
                search.scores[wanted] = tried[wanted].score(limits)
                on_trial(trial_of(wanted))
                if wanted == rungs[-1] and search.least is None:
                    break  # which is nearest, then?
                wanted = next(asks, None)
            if wanted is None or wanted in search.scores:
                raise StopIteration
            if coming is None:
                known = {each: one.score(limits) for each, one in tried.items() if is_done(each)}
                coming = likely(known, asked, rungs, ladder.start, num_jobs)
            return next((task_of(number) for number in coming if number not in running), None)

        def take(number: int, answer: Tried) -> None:
            nonlocal coming
            running.remove(number)
            tried[number], coming = answer, None

        def note(number: int, share: float) -> None:
            if number == wanted:
                on_tried(len(search.scores), ladder.value_of(number), share)

        def complete(numbers: Collection[int]) -> None:
            nonlocal may_give_up, coming
            may_give_up, coming = False, None

            def choose_left() -> tuple[int, tuple[Deployment, bool]] | None:
                left = [number for number in numbers if not is_done(number)]
                if not left:
                    raise StopIteration
                return next((task_of(number) for number in left if number not in running), None)

            workers.compute(choose_left, take, note, len(numbers))
            for number in search.scores:
                search.scores[number] = tried[number].score(limits)

        workers.compute(choose, take, note, num_jobs)
        if wanted is not None:  # nothing is enough: what is nearest is looked for
            complete([*search.scores])
            wanted = next(asks, None)
            workers.compute(choose, take, note, num_jobs)
        is_met = search.least is not None
        best = search.nearest if search.least is None else search.least
        after = max((number for number in search.scores if number < best and is_met), default=None)
        edge = after if is_met else best  # where the search ended; None if all were enough
        complete([*search.contradictions, *([] if edge is None else [edge])])
    found, at_edge = tried[best].outcome, None if edge is None else tried[edge].outcome
    if found is None:
        raise InvariantError(f"{searched} {best} was given up")
    plan = Plan(
        searched=searched,
        asked=asked,
        limits=limits,
        is_met=is_met,
        value=ladder.value_of(best),
        deployment=ladder.deployment_of(best),
        outcome=found,
        file_rate=workload.mean_rate,
        is_last=best == rungs[0],
        next_value=None if after is None else ladder.value_of(after),
        next_outcome=at_edge if is_met else None,
        binding_classes=[
            name
            for name, each in ({} if at_edge is None else at_edge.classes).items()
            if each.goodput.requests and each.goodput.good / each.goodput.requests < asked
        ],
        contradictions=[trial_of(number) for number in search.contradictions],
        trials=[trial_of(number) for number in sorted(search.scores)],
    )
    on_found(plan)
    if edge is not None and at_edge is not None:
        with WorkerProcesses(measure, question, num_jobs) as others:
            binding, reliefs, removal = Edge(
                question=question,
                ladder=ladder,
                number=edge,
                outcome=at_edge,
                enough=search.least,
                drive=lambda chains: others.drive(chains, on_relief),
                tried=tried[edge],
            ).analyse()
        plan = replace(plan, binding=binding, reliefs=reliefs, removal=removal)
    gain = gain_of(
        plan.deployment,
        workload.num_samples,
        lambda deployment: measure(question, deployment).tokens_per_s,
    )
    return replace(plan, gain=gain)
