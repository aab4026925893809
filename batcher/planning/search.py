"""What is searched, as whole numbers, and the least of them that is enough, found with few tries.

Rule: the smaller the better; a rate is tried at steps of a 64th of a doubling, 1.1 %, all else at
every whole number.  It is assumed that what is enough stays enough for all that is larger; that is
checked around the answer, and whatever was seen against it is reported.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Literal

from msgspec.structs import replace

from batcher.errors import BatchdecodeError
from batcher.planning.deployments import (
    AXES,
    MAX_BATCH,
    MAX_REPLICAS,
    Deployment,
    Value,
    scaled_fleet,
)
from batcher.planning.streamed import AnyWorkload

Searched = Literal["batch", "kv_blocks", "max_batch_tokens", "replicas", "rate"]

STEPS_OF_DOUBLING = 64
MAX_DOUBLINGS = 10  # of a rate, up and down


class Ladder:
    """The values of what is `searched` in deployments that are as `base` otherwise.

    rungs: the numbers of the first tries, ascending; they are the bounds, too.
    start: the place of the very first.
    """

    def __init__(self, workload: AnyWorkload, base: Deployment, searched: Searched) -> None:
        self.base, self.searched = base, searched
        self.rungs, self.start = self._make_rungs(workload)

    def value_of(self, number: int) -> Value:
        if self.searched == "rate":
            return 2 ** (-number / STEPS_OF_DOUBLING)
        return number * self._num_replicas if self.searched == "replicas" else number

    @property
    def _num_replicas(self) -> int:
        fleet = self.base.fleet
        return 1 if fleet is None else scaled_fleet(fleet).num_replicas

    def step_at(self, number: int) -> int:
        """Return how far from `number` another one is that differs by about a hundredth."""
        return 1 if self.searched == "rate" else max(1, number // STEPS_OF_DOUBLING)

    def deployment_of(self, number: int, base: Deployment | None = None) -> Deployment:
        base, value = base or self.base, self.value_of(number)
        if self.searched == "rate":
            return replace(base, rate=value)
        if self.searched == "replicas" and base.fleet is not None:
            return AXES["fleet"].set(base, scaled_fleet(base.fleet, number))
        return AXES[self.searched].set(base, value)

    def _make_rungs(self, workload: AnyWorkload) -> tuple[Sequence[int], int]:
        scheduling, first = self.base.scheduling, 1
        if self.searched == "rate":
            if workload.mean_rate is None:
                raise BatchdecodeError("--search rate: all requests arrive at once")
            bound = STEPS_OF_DOUBLING * MAX_DOUBLINGS
            return range(-bound, bound + 1, STEPS_OF_DOUBLING), MAX_DOUBLINGS
        if self.searched == "batch":
            most = min(workload.num_samples, MAX_BATCH, scheduling.max_batch_tokens or MAX_BATCH)
        elif self.searched == "replicas":
            most = min(workload.num_samples, MAX_REPLICAS) // self._num_replicas
        elif self.searched == "max_batch_tokens":
            first = max(self.base.batch, scheduling.block_size if scheduling.is_paged else 1)
            most = workload.num_tokens
        else:
            most = workload.num_blocks(scheduling.block_size)
        return doublings(first, max(first, most)), 0


Score = tuple[float, float]  # what counts, and which of equal ones is nearer; the larger the better

NEAR = (1, 2, 4, 8)  # how far from the answer it is checked
NUM_PROBES = 8  # between rungs of which none is enough
MAX_ROUNDS = 8  # of finding a smaller one by a check


class LeastSearch:
    """Looks for the least number of whose score the first part reaches `asked`.

    rungs: ascending; the first is the least that may be tried, the last the largest.
    scores: of all that were tried; `asks` yields the numbers whose scores it needs next.
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

    def run(self, score: Callable[[int], Score], start: int = 0) -> None:
        """Search from the rung at place `start` on; `score` is asked for each number once."""
        for number in self.asks(start):
            self.scores[number] = score(number)

    def asks(self, place: int) -> Iterator[int]:
        """Yield each number whose score has to be in `scores` before the search goes on.

        From the rung at `place` on it goes up to the first that is enough, or down as long as they
        are.  If none is, it tries some numbers between the rungs around the best one.  Then, again
        and again, it halves the distance to the largest smaller number that is not enough, down to
        1, and tries numbers near the answer and the rung after it.
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
        """Yield a number if it is new; return whether it is enough."""
        if number not in self.scores:
            yield number
        return self._is_enough(number)

    def _is_enough(self, number: int) -> bool:
        return self.scores[number][0] >= self._asked


ENOUGH, TOO_FEW = (2.0, 0.0), (-1.0, 0.0)  # scores that are assumed


def likely(
    known: Mapping[int, Score], asked: float, rungs: Sequence[int], start: int, count: int
) -> list[int]:
    """Return up to `count` numbers whose scores a LeastSearch asks for next, or soon.

    The first is what it asks for next; then come those that it asks for after that, whether that
    is enough or not, and so on.  known: the scores of numbers that it may ask for.
    """
    found = dict[int, None]()
    branches: deque[dict[int, Score]] = deque([{}])
    while branches and len(found) < count:
        assumed = branches.popleft()
        scores, search = {**known, **assumed}, LeastSearch(asked, rungs)
        for number in search.asks(start):
            if number not in scores:
                found[number] = None
                branches += [{**assumed, number: TOO_FEW}, {**assumed, number: ENOUGH}]
                break
            search.scores[number] = scores[number]
    return list(found)


def doublings(first: int, last: int) -> list[int]:
    rungs = []
    while first < last:
        rungs.append(first)
        first *= 2
    return [*rungs, last]
