"""The smallest setting, or the largest rate, under which enough requests meet an SLO."""

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
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

# -- the search ------------------------------------------------------------------------------------
#
# Searched numbers are whole, the smaller the better.  A rate is tried in steps of a 64th of a
# doubling (1.1 %), everything else at every whole number.  The search assumes that if a number is
# enough, all larger ones are; it checks this around the answer and reports contradictions.

Searched = Literal["batch", "kv_blocks", "max_batch_tokens", "replicas", "rate"]

STEPS_OF_DOUBLING = 64
MAX_DOUBLINGS = 10  # of a rate, up and down


class Ladder:
    """The deployments that a search tries: `base` with different values of `searched`.

    rungs: the numbers to try first, ascending, with the bounds; start: the index of the first.
    """

    def __init__(self, workload: AnyWorkload, base: Deployment, searched: Searched) -> None:
        self.base, self.searched, self.start = base, searched, 0
        scheduling, first, most = base.scheduling, 1, 0
        self._num_replicas = 1 if base.fleet is None else scaled_fleet(base.fleet).num_replicas
        if searched == "rate":
            if workload.mean_rate is None:
                raise BatchdecodeError("--search rate has no effect: all requests arrive at once")
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
        """Return the distance to the next number that differs by about a hundredth."""
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


Score = tuple[float, float]  # the good share, and a tie-break; larger is better

NEAR = (1, 2, 4, 8)  # distances from the answer at which it is checked
NUM_PROBES = 8  # between rungs of which none is enough
MAX_ROUNDS = 8  # of smaller answers found by a check


class LeastSearch:
    """A search for the least number whose score[0] reaches `asked`.

    rungs: ascending, from the least to the largest number allowed.  scores: of the numbers tried.
    """

    def __init__(self, asked: float, rungs: Sequence[int]) -> None:
        self._asked, self._rungs = asked, rungs
        self.scores: dict[int, Score] = {}

    @property
    def least(self) -> int | None:
        return min((number for number in self.scores if self._is_enough(number)), default=None)

    @property
    def contradictions(self) -> list[int]:
        """The numbers tried that are larger than the least but not enough, ascending."""
        least = self.least
        larger = [number for number in self.scores if least is not None and number > least]
        return sorted(number for number in larger if not self._is_enough(number))

    @property
    def nearest(self) -> int:
        return max(self.scores, key=lambda number: (self.scores[number], -number))

    def asks(self, place: int) -> Iterator[int]:
        """Yield each number whose score must be in `scores` before the search continues.

        It climbs from the rung at `place` to the first that is enough, or descends while they are.
        If none is, it tries numbers between the rungs around the best one.  Then it repeatedly
        halves the distance to the largest smaller number that is not enough, down to 1, and tries
        numbers near the answer and the next rung.
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
    """Return up to `count` numbers that a LeastSearch may ask for next, the surest first.

    The first is the next one; then those after it in either case, and so on.
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


# -- limits, and deployments with other limits -----------------------------------------------------

Limit = Literal["slots", "kv", "tokens", "threshold", "static"]

SETTING_OF: dict[Limit, str] = {
    "slots": "batch",
    "kv": "kv_blocks",
    "tokens": "max_batch_tokens",
    "threshold": "long_prefill_threshold",
    "static": "batching",
}
FIRST_BUDGET = 2048  # tokens, tried where a step has no token budget

# Doublings or halvings of a limit; more of a token budget, as several may change nothing before one
# separates prompts from decoding rows.
MAX_CHANGES: dict[Limit, int] = {"slots": 3, "kv": 3, "tokens": 5, "threshold": 3, "static": 1}
MIN_GAIN = 0.5  # of the share of requests that is lacking: a change that gains less does not bind
MAX_REACHES = 4  # directions that are followed to the best value they reach


def value_at(deployment: Deployment, limit: Limit) -> Value:
    """Return the setting of `limit`, or the list of those of all groups if they differ."""
    axis = AXES[SETTING_OF[limit]]
    values = [axis.value_of(engine) for engine in engines_of([deployment])]
    return values if any(value != values[0] for value in values) else values[0]


def changed_limit(deployment: Deployment, limit: Limit, *, is_wider: bool) -> Deployment:
    """Return `deployment` with `limit` doubled or halved in each group, unchanged if impossible.

    Wider static batching is continuous.  A token budget has at least one token per slot; a step
    without one gets a budget if it is to be narrower.
    """
    axis = AXES[SETTING_OF[limit]]

    def change(engine: Deployment) -> Deployment:
        value, budget = axis.value_of(engine), engine.scheduling.max_batch_tokens
        if limit == "tokens" and value is None and not is_wider:
            value = 2 * max(FIRST_BUDGET, engine.batch)
        if value in (None, "continuous") or (limit == "static" and not is_wider):
            return engine
        if limit == "static":
            return axis.set(engine, "continuous")
        if is_wider:
            engine = axis.set(engine, min(2 * value, MAX_BATCH if limit == "slots" else MAX_COUNT))
            if budget is None or limit == "tokens":
                return engine
            return AXES["max_batch_tokens"].set(engine, max(budget, engine.batch))
        return axis.set(engine, max(value // 2, 1))

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


class Tried(Struct, frozen=True, kw_only=True):
    """The outcome of a deployment, None if it was given up, and its use of limits if `is_known`.

    slots, blocks, tokens: the most of any step of a replica.  request: the tokens of the longest
    request.  lacking: what kept the head of a waiting queue out.
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
        """Return whether `changed`, which differs in `limit`, may have another outcome.

        It cannot if no step reached the limit, before or after.  A custom router may look at
        limits, and more blocks keep more prefixes.
        """
        base, scheduling = self.deployment, changed.scheduling
        if not self.is_known or base.fleet is not None or base.router not in ROUTERS:
            return True
        if scheduling.preempt_for:
            return True
        if limit == "slots":
            is_same_otherwise = base.scheduling == scheduling
            return not (is_same_otherwise and self.slots < min(base.batch, changed.batch + 1))
        if limit == "tokens":  # the rest of a budget may be too small for a block
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
    """Simulate the deployment of `task`, (deployment, give up if it cannot be enough)."""
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


# -- binding limits, and changes that help ---------------------------------------------------------

Found = TypeVar("Found")
Chain = Generator[Deployment, Outcome, Found]
"""Yields deployments, receives the outcome of each, returns a result."""


class Relief(Struct, frozen=True, kw_only=True):
    """A changed setting.

    share: of the requests that meet the SLO with it where the search ended.  reached: the best
    searched value that meets the SLO with it, if it is beyond that.
    """

    constraint: Limit
    setting: str
    value: Value
    share: float
    reached: Value | None = None


class _Attempt(Struct, frozen=True, kw_only=True):
    limit: Limit
    base: Deployment
    score: Score
    reached: int | None = None


class Edge(Struct, frozen=True, kw_only=True):
    """The end of a search: `number` has the `outcome`, which is not enough.

    enough: the least number that is enough, or None.  drive: runs chains, whose deployments may be
    simulated in any order.  tried: the use of limits at `number`, if known.
    """

    question: Question
    ladder: Ladder
    number: int
    outcome: Outcome
    enough: int | None
    drive: Callable[[Sequence[Chain[Any]]], list[Any]]
    tried: Tried | None = None

    def analyse(self) -> tuple[list[Limit | Literal["compute"]], list[Relief]]:
        """Return the binding limits, which keep more requests from meeting the SLO, and reliefs.

        A searched setting binds: one more is enough.  Otherwise it is the limit whose change
        reaches furthest; if none reaches further, the one whose change lets most requests meet the
        SLO, if it gains MIN_GAIN; else compute.  KV binds if too many requests can never run.
        """
        asked, ladder, enough = self.question.asked, self.ladder, self.enough
        before = self.outcome.good_share
        chains = [
            self._changes(limit, is_wider=is_wider)
            for limit, setting in SETTING_OF.items()
            for is_wider in (True, False)
            if setting != ladder.searched
        ]
        directions: list[list[_Attempt]] = self.drive(chains)
        attempts = [attempt for tried in directions for attempt in tried]
        if enough is not None:
            directions = [
                [each for each in tried if each.score[0] >= asked] for tried in directions
            ]
            directions = [tried for tried in directions if tried]
            directions.sort(key=lambda tried: max(each.score for each in tried))  # furthest last
            reaching = [self._furthest(tried) for tried in directions[-MAX_REACHES:]]
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
        binding = set[Limit]()
        if enough is not None and ladder.searched in SETTING_OF.values():
            binding = {limit for limit, setting in SETTING_OF.items() if setting == ladder.searched}
        elif best is not None:
            gain = best.score[0] - before
            if gain > 0 and gain >= MIN_GAIN * (asked - before):
                binding = {best.limit}
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
        return [limit for limit in SETTING_OF if limit in binding] or ["compute"], reliefs

    def _changes(self, limit: Limit, *, is_wider: bool) -> Chain[list[_Attempt]]:
        """Change one limit further and further; return the score of each change.

        A limit that changes nothing when it is wider was not reached: it is not widened further.
        """
        attempts: list[_Attempt] = []
        base, before = self.ladder.base, self.outcome
        limits = {} if self.question.slo is None else self.question.slo.all_limits
        # Shares of limits differ even if nothing else does.
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
            attempts.append(_Attempt(limit=limit, base=base, score=outcome.score(limits)))
            if is_wider and replace(outcome, **unused) == replace(before, **unused):
                break
            before = outcome
        return attempts

    def _furthest(self, tried: list[_Attempt]) -> Chain[tuple[Deployment, int]]:
        """Return the base that reaches furthest, and the least number enough with it.

        Only attempts that are enough beyond the reach of an earlier one are followed.
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
        """Return the least number found to be enough with `base`, starting from `enough`.

        The distance is doubled until a number is not enough, then halved to about a hundredth.
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


# -- the plan --------------------------------------------------------------------------------------

SMALL = 2_000  # samples: fewer are simulated before a process has started


class Trial(Struct, frozen=True, kw_only=True):
    """A value that was tried, with numbers of its outcome; without them if it was given up."""

    value: Value
    share: float | None = None
    tokens_per_s: float | None = None
    tails: dict[str, float | None] = {}


class Plan(Struct, frozen=True, kw_only=True):
    """The result of a search; docs/guide/plan.md explains its fields.

    is_met: `value` meets the SLO and is the best found; else it is the nearest.  file_rate: mean
    arrivals per second, None if all arrive at once.  is_last: no better value could be tried.
    next_value, next_outcome: the next better value, which is not enough, or None.
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
    contradictions: list[Trial]
    trials: list[Trial]


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
    """Return the best value of `searched`, everything else as in `base`.

    The answer does not depend on `num_jobs`, the number of processes.
    on_tried: called repeatedly with the number of values tried, the next value, and the share of
    its simulation done.  on_relief: called with the number of relief simulations done.  on_found:
    called with the plan before reliefs are known.  on_trial: called with each value tried.
    small: with fewer samples no process is started.  has_all_trials: simulate values that cannot be
    enough to their end.

    Raises:
        BatchdecodeError: the settings contradict, or there is nothing to search.
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
    tried: dict[int, Tried] = {}  # numbers asked for, and some that may be next
    search, may_give_up = LeastSearch(asked, rungs), not has_all_trials
    running, ahead = set[int](), list[int]()  # ahead: of the search, until the next answer
    asks = search.asks(ladder.start)
    wanted = next(asks, None)

    def is_done(number: int) -> bool:
        return number in tried and (may_give_up or tried[number].outcome is not None)

    def trial_of(number: int) -> Trial:
        outcome, value = tried[number].outcome, ladder.value_of(number)
        if outcome is None:
            return Trial(value=value)
        share, tokens_per_s = outcome.good_share, outcome.tokens_per_s
        return Trial(value=value, share=share, tokens_per_s=tokens_per_s, tails=outcome.tails)

    def numbers_of_search() -> list[int]:
        """Continue the search; return the numbers to simulate, [] if there are none."""
        nonlocal wanted
        while wanted is not None and is_done(wanted) and wanted not in search.scores:
            search.scores[wanted] = tried[wanted].score(limits)
            on_trial(trial_of(wanted))
            if wanted == rungs[-1] and search.least is None:
                break  # the nearest has to be known first
            wanted = next(asks, None)
        if wanted is None or wanted in search.scores:
            return []
        if not ahead:
            known = {each: one.score(limits) for each, one in tried.items() if is_done(each)}
            ahead.extend(likely(known, asked, rungs, ladder.start, num_jobs))
        return ahead

    def simulate(find_numbers: Callable[[], list[int]], most: int) -> None:
        def choose() -> tuple[int, tuple[Deployment, bool]] | None:
            numbers = find_numbers()
            if not numbers:
                raise StopIteration
            number = next((number for number in numbers if number not in running), None)
            if number is None:
                return None
            running.add(number)
            gives_up = may_give_up and number + 1 != search.least  # else it is the edge
            return number, (ladder.deployment_of(number), gives_up)

        def take(number: int, answer: Tried) -> None:
            running.remove(number)
            tried[number] = answer
            ahead.clear()

        def note(number: int, share: float) -> None:
            if number == wanted:
                on_tried(len(search.scores), ladder.value_of(number), share)

        workers.compute(choose, take, note, most)

    def complete(numbers: Collection[int]) -> None:
        """Simulate `numbers` to their end, even those that were given up."""
        nonlocal may_give_up
        may_give_up = False
        ahead.clear()
        simulate(lambda: [number for number in numbers if not is_done(number)], len(numbers))
        for number in search.scores:
            search.scores[number] = tried[number].score(limits)

    with WorkerProcesses(try_deployment, question, num_jobs) as workers:
        simulate(numbers_of_search, num_jobs)
        if wanted is not None:  # nothing is enough: look for the nearest
            complete([*search.scores])
            wanted = next(asks, None)
            simulate(numbers_of_search, num_jobs)
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
            binding, reliefs = Edge(
                question=question,
                ladder=ladder,
                number=edge,
                outcome=at_edge,
                enough=search.least,
                drive=lambda chains: others.drive(chains, on_relief),
                tried=tried[edge],
            ).analyse()
        plan = replace(plan, binding=binding, reliefs=reliefs)
    return plan
