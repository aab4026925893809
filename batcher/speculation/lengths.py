"""Number of drafts per row: as many as pay for their time.

The k drafts of a row bring a + a^2 + ... + a^k tokens on average, where a is the probability that a
draft is accepted if those before it are. They cost the time by which they lengthen the step of all
rows. So the drafts of all rows are sorted, the likeliest first, and as many are used as give the
most tokens per second. For equal rows that is the k with the most (1 - a^(k+1)) / (1 - a) /
time(k).
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from math import log
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from batcher.events import SpeculateReason

PROBE_SHARE = 0.02  # of the time, for drafts that do not pay as far as is known
_REVIEW_STEPS = 8  # most steps between reviews of which drafts pay
_MEMORY = 0.97  # weight of a row's history after another step with drafts
_SHARED_MEMORY = 0.99
_PRIOR, _PRIOR_DRAFTS = 0.6, 4.0  # before any draft: a probability, and its weight in drafts
_ROW_PRIOR_DRAFTS = 16.0  # weight of all rows' history in each row, in drafts
_MARGIN = 0.25  # hysteresis while the plan stays; see AutoLengths._best
_LEAST, _MOST = 1e-3, 0.999  # of an acceptance, so that its logarithm is finite
_ALIKE = 8  # equal plans differ by at most an eighth of the drafts
_NUM_CANDIDATES = 32  # numbers of drafts to compare
_ROUNDING = 1e-9
_LEAST_GAIN = 1.02  # of tokens per second: less is measurement noise


class LengthChange(NamedTuple):
    """The row in `slot` gets `tokens` drafts from now on: more ("gain") or fewer ("cost")."""

    slot: int
    tokens: int
    reason: SpeculateReason


class AutoLengths:
    """Chooses numbers of drafts by acceptance and by the costs of steps and drafts.

    Rows without drafts teach nothing, and the cost of a longer step is only known after one. So now
    and then one row gets twice as many, in turn, for at most PROBE_SHARE of the time.

    step_seconds: of a step, by its rows and tokens.
    draft_seconds: of one more draft of each row, by the rows.
    """

    def __init__(
        self,
        max_drafts: int,
        step_seconds: Callable[[int, int], float],
        draft_seconds: Callable[[int], float] = lambda _num_rows: 0.0,
    ) -> None:
        self._max_drafts = max_drafts
        self._step_seconds, self._draft_seconds = step_seconds, draft_seconds
        self._rows: dict[int, _Shown] = {}
        self._shared = _Shown(_PRIOR * _PRIOR_DRAFTS, _PRIOR_DRAFTS)
        self._changes: list[LengthChange] = []
        self._plan = _Plan(log_threshold=0.0, most_of_row=0, most_of_all=0)
        self._num_reviewed, self._steps_left = 0, 0
        self._interval = 1  # steps from one review to the next
        self._credit = 0.0  # seconds that probes may use
        self._last_probed = -1

    def open(self, slot: int) -> None:
        """Begin a row with as many drafts as others are likely to get."""
        self._rows[slot] = row = _Shown()
        self._look_at(row)
        row.num_drafts = self._best(row, 0.0)

    def close(self, slot: int) -> None:
        del self._rows[slot]

    def wanted(self, slots: Iterable[int]) -> dict[int, int]:
        """Return the drafts of decoding rows in the next step, without rows that get none."""
        decoding = list(slots)
        if not decoding:
            return {}
        self._steps_left -= 1
        if self._steps_left <= 0 or abs(len(decoding) - self._num_reviewed) * 8 > len(decoding):
            self._review(decoding)
        wanted = {slot: self._rows[slot].num_drafts for slot in decoding}
        self._trim(wanted)
        num_rows, num_tokens = len(wanted), len(wanted) + sum(wanted.values())
        slot = min((s for s in wanted if s > self._last_probed), default=min(wanted))
        number = min(max(2 * wanted[slot], 1), self._max_drafts)
        num_more = number - wanted[slot]
        seconds = self._step_seconds(num_rows, num_tokens)
        longer = self._step_seconds(num_rows, num_tokens + num_more)
        cost = max(longer - seconds, 0.0) + num_more * self._draft_seconds(1)
        if self._credit >= cost:
            self._credit -= cost
            self._last_probed, wanted[slot] = slot, number
        self._credit = min(self._credit + PROBE_SHARE * seconds, max(cost, seconds))
        return {slot: number for slot, number in wanted.items() if number}

    def learn(self, drafts: Iterable[tuple[int, int, int]]) -> None:
        """Record drafts: (slot, number of drafts, number of accepted ones)."""
        for slot, num_drafts, num_accepted in drafts:
            if num_drafts:
                row = self._rows[slot]
                row.add(num_drafts, num_accepted, _MEMORY)
                self._shared.add(num_drafts, num_accepted, _SHARED_MEMORY)
                self._look_at(row)
                self._settle(slot, row, _MARGIN)

    def take_changes(self) -> list[LengthChange]:
        changes, self._changes = self._changes, []
        return changes

    def _review(self, slots: list[int]) -> None:
        num_rows = self._num_reviewed = len(slots)
        rows = [self._rows[slot] for slot in slots]
        for row in rows:
            self._look_at(row)
        acceptances = np.array([row.acceptance for row in rows])
        gains = acceptances[:, None] ** np.arange(1, self._max_drafts + 1)
        order = np.argsort(-gains, axis=None, kind="stable")
        likely = gains.take(order)
        tokens = likely.cumsum()
        is_place = order[:, None] % self._max_drafts == np.arange(self._max_drafts)
        counts = is_place.cumsum(axis=0)  # [drafts used, place]: the number of rows with that place
        plan, most = _Plan(log(likely[0]) / 2, 0, 0), _LEAST_GAIN * self._rate(num_rows, [], 0.0)
        for number in _candidates(num_rows, len(likely)):
            by_place = counts[number - 1].tolist()
            rate = self._rate(num_rows, by_place, tokens.item(number - 1))
            if rate > most:
                last = likely.item(number - 1)
                less = likely[likely < last * (1 - _ROUNDING)].max(initial=last * _LEAST)
                most_of_row = sum(count > 0 for count in by_place)
                plan, most = _Plan(log(last * less) / 2, most_of_row, number), rate
        is_as_before = (  # except for small differences between steps
            abs(plan.most_of_all - self._plan.most_of_all) * _ALIKE <= plan.most_of_all
            and abs(plan.most_of_row - self._plan.most_of_row) <= 1
        )
        self._interval = min(2 * self._interval, _REVIEW_STEPS) if is_as_before else 1
        self._plan, self._steps_left = plan, self._interval
        for slot, row in zip(slots, rows, strict=True):
            self._settle(slot, row, _MARGIN if is_as_before else 0.0)

    def _rate(self, num_rows: int, counts: list[int], num_accepted: float) -> float:
        """Return the tokens per second of a step."""
        seconds = self._step_seconds(num_rows, num_rows + sum(counts))
        seconds += sum(self._draft_seconds(count) for count in counts if count)
        return (num_rows + num_accepted) / seconds if seconds else 0.0

    def _trim(self, wanted: dict[int, int]) -> None:
        """Remove the least likely drafts beyond the planned total.

        Between reviews rows may want a few more each, together enough to make a step far longer.
        """
        too_many = sum(wanted.values()) - self._plan.most_of_all
        if too_many <= 0:
            return
        rows = self._rows
        last = [(rows[slot].acceptance ** k, slot) for slot, k in wanted.items() if k]
        heapify(last)
        for _ in range(too_many):
            _, slot = last[0]
            wanted[slot] -= 1
            if wanted[slot]:
                heapreplace(last, (rows[slot].acceptance ** wanted[slot], slot))
            else:
                heappop(last)

    def _look_at(self, row: "_Shown") -> None:
        shared = self._shared
        prior = _ROW_PRIOR_DRAFTS * shared.accepted / shared.tried
        acceptance = (row.accepted + prior) / (row.tried + _ROW_PRIOR_DRAFTS)
        row.acceptance = min(max(acceptance, _LEAST), _MOST)

    def _best(self, row: "_Shown", margin: float) -> int:
        """Return how many drafts of the row pay for their time."""
        number = self._plan.log_threshold / log(row.acceptance)
        is_near = row.num_drafts - margin <= number < row.num_drafts + 1 + margin
        return min(row.num_drafts if is_near else int(number), self._plan.most_of_row)

    def _settle(self, slot: int, row: "_Shown", margin: float) -> None:
        before, row.num_drafts = row.num_drafts, self._best(row, margin)
        if row.num_drafts != before:
            reason: SpeculateReason = "gain" if row.num_drafts > before else "cost"
            self._changes.append(LengthChange(slot, row.num_drafts, reason))


def _candidates(num_rows: int, most: int) -> Iterator[int]:
    """Yield numbers of drafts up to `most`: all, or those with round numbers of tokens.

    There a step that is computed in tiles becomes longer.
    """
    unit = 1
    while unit * _NUM_CANDIDATES < most:
        unit *= 2
    yield from range(unit - num_rows % unit, most, unit)
    yield most


class _Plan(NamedTuple):
    """The drafts that pay: those whose probability of use is at least the threshold.

    most_of_row, most_of_all: limits per row, and of all.
    """

    log_threshold: float
    most_of_row: int
    most_of_all: int


class _Shown(Struct, gc=False):
    """Numbers of tried and accepted drafts, recent ones weighted most.

    A draft after a rejected one was not tried.
    acceptance, num_drafts: the resulting estimate and number of drafts of a row.
    """

    accepted: float = 0.0
    tried: float = 0.0
    acceptance: float = _PRIOR
    num_drafts: int = 0

    def add(self, num_drafts: int, num_accepted: int, memory: float) -> None:
        self.accepted = memory * self.accepted + num_accepted
        self.tried = memory * self.tried + num_accepted + (num_accepted < num_drafts)


# -- what steps cost -------------------------------------------------------------------------------

_EXACT = 64  # tokens up to which each number has its own steps: a model may compute in tiles
_KEPT = 5  # steps kept of each number; the median ignores outliers
_REACH = 2  # how far beyond the largest number the line continues
_OPTIMISM = 2  # exponent of the interpolation between two numbers of tokens


class StepCosts:
    """Estimates the seconds of steps by their tokens, from the steps seen; O(1) per step.

    A row under verification counts as longer, not as more rows. Between seen numbers of tokens the
    seconds rise late, as if more were free, so that larger steps are tried. Beyond the largest they
    continue linearly for some distance; from there on, and below the smallest, they are
    proportional.
    """

    def __init__(self) -> None:
        self._steps: dict[
            int, deque[tuple[float, float]]
        ] = {}  # (tokens, seconds), by rounded tokens
        self._numbers: list[int] = []  # rounded, ascending
        self._points: list[tuple[float, float]] = []  # (mean tokens, median seconds) of each

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Record the seconds of a step of at least one token."""
        number = num_tokens
        if number > _EXACT:
            unit = 1 << number.bit_length() - 4  # eight per octave
            number = -(-number // unit) * unit
        place = bisect_left(self._numbers, number)
        if number not in self._steps:
            self._steps[number] = deque(maxlen=_KEPT)
            insort(self._numbers, number)
            self._points.insert(place, (0, 0))
        steps = self._steps[number]
        steps.append((num_tokens, seconds))
        self._points[place] = fmean(tokens for tokens, _ in steps), median(s for _, s in steps)

    def estimate(self, num_rows: int, num_tokens: int) -> float:  # noqa: ARG002 - see the class
        """Return the seconds of a step; 0 before any was seen."""
        points = self._points
        if not points:
            return 0.0
        (least, first), (most, last) = points[0], points[-1]
        place = bisect_left(points, (num_tokens,))
        if place == 0 or len(points) == 1:
            return first * num_tokens / least
        if place < len(points):
            (low, sooner), (high, later) = points[place - 1], points[place]
            way = (num_tokens - low) / (high - low)
            return sooner + (later - sooner) * way**_OPTIMISM
        slope = max(last - first, 0.0) / (most - least)
        end = most + _REACH * (most - least)
        seconds = last + slope * (min(num_tokens, end) - most)
        return seconds * max(num_tokens / end, 1.0)


class MeasuredCosts:
    """Wall-clock seconds of steps and drafts; those of a step exclude its drafts.

    steps: by their tokens. drafts: of one draft of each row, by the rows.
    """

    def __init__(self) -> None:
        self.steps, self.drafts = StepCosts(), StepCosts()
        self._seconds = 0.0  # of this step's drafts

    def note_drafts(self, num_rows: int, most_drafts: int, seconds: float) -> None:
        self._seconds = seconds
        if most_drafts:
            self.drafts.learn(num_rows, seconds / most_drafts)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        if num_tokens:
            self.steps.learn(num_tokens, max(seconds - self._seconds, 0.0))
        self._seconds = 0.0

    def draft_seconds(self, num_rows: int) -> float:
        return self.drafts.estimate(num_rows, num_rows)
