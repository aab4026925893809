"""The duration of a step as a function of its work.

Rule: time is counted in whole ticks of a femtosecond, so that the closed-form sum over many steps
equals the sum of them one by one.  A ramp is a sequence of durations that starts at `first` ticks
and grows by `slope` ticks a step.
"""

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from decimal import Context, Decimal
from functools import lru_cache
from math import sqrt
from typing import Any, Generic, TypeVar

TICKS_PER_SECOND = 10**15


class StepTime:
    """The duration of a step: while the same rows decode, the highest of some ramps at each step.

    name: "constant", the name of a profile, ...  settings: its parameters, for JSON.
    """

    name: str  # declared here for the check that names what an object lacks
    settings: dict[str, Any]

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name, self.settings = name, settings

    def ticks(self, num_tokens: int, num_sequences: int, kv_read: int, prefill_work: int) -> int:
        """Return the duration of a step: at least one tick.

        num_tokens: all tokens the step computes.  num_sequences: the rows it computes.
        kv_read: the cached tokens that decoding rows read, summed over rows.
        prefill_work: the sum of P * (2 * context + P) over the rows that compute P prompt tokens
        behind `context` others; 0 in a step that only decodes.
        """
        raise NotImplementedError

    def _ramps(self, num_sequences: int, kv_read: int) -> list[tuple[int, int]]:
        """Return (first, slope) of each ramp of steps in which `num_sequences` rows decode."""
        raise NotImplementedError

    def ticks_of_decodes(self, num_sequences: int, kv_read: int, num_steps: int) -> int:
        """Return the duration of `num_steps` steps that only decode `num_sequences` rows.

        kv_read: of the first step; each step adds num_sequences to it.
        """
        ramps = self._ramps(num_sequences, kv_read)
        if len(ramps) == 1:  # nearly always
            return sum_of_ramp(*ramps[0], num_steps)
        total = 0
        for first, slope, length in highest_of(ramps):
            if length is None or num_steps <= length:
                return total + sum_of_ramp(first, slope, num_steps)
            total += sum_of_ramp(first, slope, length)
            num_steps -= length
        return total

    def num_decodes_until(self, num_sequences: int, kv_read: int, ticks: int) -> int:
        """Return the least number of such steps that last `ticks` (at least 1) together."""
        ramps = self._ramps(num_sequences, kv_read)
        if len(ramps) == 1:
            return least_steps(*ramps[0], ticks)
        num_steps = 0
        for first, slope, length in highest_of(ramps):
            there = ticks if length is None else sum_of_ramp(first, slope, length)
            if there >= ticks:
                return num_steps + least_steps(first, slope, ticks)
            ticks -= there
            num_steps += length or 0
        return num_steps


def sum_of_ramp(first: int, slope: int, num_steps: int) -> int:
    return num_steps * first + slope * (num_steps * (num_steps - 1) >> 1)


def least_steps(first: int, slope: int, ticks: int) -> int:
    """Return the least number of steps of a ramp that last `ticks` together; both at least 1."""
    if not slope:
        return -(-ticks // first)
    # 2 * sum = slope * k**2 + linear * k, which reaches 2 * ticks at about the root in floats.
    linear, twice = first + first - slope, ticks + ticks
    float_linear, float_twice = float(linear), float(twice)
    root = sqrt(float_linear * float_linear + 4.0 * slope * float_twice)
    number = int(2.0 * float_twice / (float_linear + root))
    while number * (linear + slope * number) < twice:
        number += 1
    while number > 1 and (number - 1) * (linear + slope * (number - 1)) >= twice:
        number -= 1
    return number


def highest_of(ramps: list[tuple[int, int]]) -> Iterator[tuple[int, int, int | None]]:
    """Yield (first, slope, steps) of the highest ramp, until the next one overtakes it.

    steps: None for the last one.
    """
    step = 0
    while ramps:
        first, slope = max(ramps, key=lambda ramp: (ramp[0] + ramp[1] * step, ramp[1]))
        ramps = [ramp for ramp in ramps if ramp[1] > slope]
        ends = [(first - begin) // (more - slope) + 1 for begin, more in ramps]
        end = min(ends, default=None)
        yield first + slope * step, slope, None if end is None else end - step
        step = end or 0


TICKS_PER_MILLISECOND = TICKS_PER_SECOND // 1000
_DIGITS = Context(prec=40)  # the same on all machines, unlike the powers of floats
_DIVIDED = ("f", "g", "d", "h", "c")
_MAX_KEPT = 2**12  # cached token counts; nearly all steps of a run have one of few


def whole_ticks(amount: float, ticks_per_unit: int) -> int:
    return round(Decimal(repr(amount)) * ticks_per_unit)


class ConstantStepTime(StepTime):
    """Every step takes `seconds`, at least a tick."""

    def __init__(self, seconds: float = 1.0) -> None:
        super().__init__("constant", {"seconds": seconds})
        self._ticks = max(whole_ticks(seconds, TICKS_PER_SECOND), 1)

    def ticks(self, num_tokens: int, num_sequences: int, kv_read: int, prefill_work: int) -> int:
        return self._ticks

    def _ramps(self, num_sequences: int, kv_read: int) -> list[tuple[int, int]]:
        return [(self._ticks, 0)]


def of_experts(
    num_experts: int, per_token: int, ticks: int, parts: int = 1
) -> Callable[[int], int]:
    """Return a function from a number of tokens to the ticks of reading the experts they hit.

    Each token hits `per_token` experts at random, so T tokens hit a share of
    1 - (1 - per_token/num_experts)**T on average.  ticks: to read all experts.  parts: microbatches
    that T is divided into.
    """
    missed = _DIGITS.divide(num_experts - per_token, num_experts)

    @lru_cache(_MAX_KEPT)
    def ticks_of(num_tokens: int) -> int:
        all_missed = _DIGITS.power(missed, -(-num_tokens // parts)) if num_tokens else 1
        return ticks - int(_DIGITS.multiply(ticks, all_missed))

    return ticks_of


class ProfileStepTime(StepTime):
    """A step takes t0 + max(w, f*T) + g*n + (d + h*[prefill])*kv_read + e/2*prefill_work + c*T.

    T: the tokens of the step.  n: its sequences.  terms: in milliseconds; c is optional.
    experts: (of a layer, per token); with them x is added times the share of experts hit, see
    of_experts.  parts: the time is that of one of `parts` equal parts.
    by_tokens: (T, milliseconds), T ascending, replaces max(w, f*T): w at T = 0, linear between
    points, f for each token beyond the last.
    """

    def __init__(
        self,
        name: str,
        terms: dict[str, float],
        by_tokens: Sequence[tuple[int, float]] = (),
        experts: tuple[int, int] | None = None,
        parts: int = 1,
    ) -> None:
        super().__init__(name, dict(terms))
        ticks = {term: whole_ticks(amount, TICKS_PER_MILLISECOND) for term, amount in terms.items()}
        ticks |= {term: ticks[term] // parts for term in _DIVIDED if term in ticks}
        self._base, self._least = ticks["t0"], ticks["t0"] + ticks["w"]
        self._per_token, self._per_sequence = ticks["f"], ticks["g"]
        # f*T <= w, without the product: true of most steps
        self._most_tokens_of_least = ticks["w"] // ticks["f"] if ticks["f"] else sys.maxsize
        self._of_tokens: Callable[[int], int] | None = None
        hit = of_experts(*experts, ticks["x"], parts) if experts else None
        if by_tokens:
            self.settings["by_tokens"] = [list(point) for point in by_tokens]
        if experts:
            self.settings |= dict(zip(("num_experts", "num_experts_per_tok"), experts, strict=True))
        sent, places = ticks.get("c", 0), [0, *(place * parts for place, _ in by_tokens)]
        heights = [ticks["w"], *(whole_ticks(ms, TICKS_PER_MILLISECOND) for _, ms in by_tokens)]

        @lru_cache(_MAX_KEPT)
        def ticks_of(num_tokens: int) -> int:
            """Return the ticks of t0, w, f, c and x; rounded down between points."""
            after = bisect_right(places, num_tokens)
            left, low = places[after - 1], heights[after - 1]
            if not by_tokens:
                alone = max(low, ticks["f"] * num_tokens)
            elif after == len(places):
                alone = low + (num_tokens - left) * ticks["f"]
            else:
                rise = (heights[after] - low) * (num_tokens - left)
                alone = low + rise // (places[after] - left)
            total = ticks["t0"] + alone + sent * num_tokens
            return total if hit is None else total + hit(num_tokens)

        if by_tokens or sent or experts:
            self._of_tokens, self._most_tokens_of_least = ticks_of, 0
        self._per_kv = ticks["d"]
        self._per_kv_with_prefill = ticks["d"] + ticks["h"]
        self._half_per_work = whole_ticks(terms["e"], TICKS_PER_MILLISECOND // 2) // parts

    def ticks(self, num_tokens: int, num_sequences: int, kv_read: int, prefill_work: int) -> int:
        if num_tokens <= self._most_tokens_of_least:
            common = self._least + num_sequences * self._per_sequence
        elif (of_tokens := self._of_tokens) is not None:
            common = of_tokens(num_tokens) + num_sequences * self._per_sequence
        else:
            common = self._base + num_tokens * self._per_token + num_sequences * self._per_sequence
        if prefill_work:
            return common + kv_read * self._per_kv_with_prefill + prefill_work * self._half_per_work
        return common + kv_read * self._per_kv

    def _ramps(self, num_sequences: int, kv_read: int) -> list[tuple[int, int]]:
        first = self.ticks(num_sequences, num_sequences, kv_read, 0)
        return [(first, num_sequences * self._per_kv)]


class RooflineStepTime(StepTime):
    """A step takes the time of its arithmetic or of its memory traffic, whichever is longer.

    compute: ticks per token, sequence, cached token read and unit of prefill_work.  memory: ticks
    for the weights (at least one), each token and each cached token read.  communication: ticks of
    a step and of each token, added to both.  experts: number of tokens -> ticks to read the experts
    they hit.
    """

    def __init__(
        self,
        name: str,
        settings: dict[str, Any],
        compute: tuple[int, int, int, int],
        memory: tuple[int, int, int],
        communication: tuple[int, int] = (0, 0),
        experts: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__(name, settings)
        self._experts = experts
        # communication is part of both sides of the maximum
        per_step, per_token = communication
        self._compute = per_step, compute[0] + per_token, *compute[1:]
        self._memory = memory[0] + per_step, memory[1] + per_token, memory[2]

    def compute_ticks(
        self, num_tokens: int, num_sequences: int, kv_read: int, prefill_work: int
    ) -> int:
        per_step, per_token, per_sequence, per_kv, per_work = self._compute
        common = per_step + num_tokens * per_token + num_sequences * per_sequence
        return common + kv_read * per_kv + prefill_work * per_work

    def memory_ticks(self, num_tokens: int, kv_read: int) -> int:
        weights, per_token, per_kv = self._memory
        dense = weights + num_tokens * per_token + kv_read * per_kv
        return dense if self._experts is None else dense + self._experts(num_tokens)

    def ticks(self, num_tokens: int, num_sequences: int, kv_read: int, prefill_work: int) -> int:
        compute = self.compute_ticks(num_tokens, num_sequences, kv_read, prefill_work)
        memory = self.memory_ticks(num_tokens, kv_read)
        return compute if compute > memory else memory  # noqa: FURB136 - max() takes twice as long

    def _ramps(self, num_sequences: int, kv_read: int) -> list[tuple[int, int]]:
        compute = self.compute_ticks(num_sequences, num_sequences, kv_read, 0)
        memory = self.memory_ticks(num_sequences, kv_read)
        return [
            (compute, num_sequences * self._compute[3]),
            (memory, num_sequences * self._memory[2]),
        ]


S = TypeVar("S", bound=StepTime)


class PipelineStepTime(StepTime, Generic[S]):
    """A step of a pipeline, whose stages each have some of the layers and compute one microbatch.

    All stages are busy with different microbatches, so a step takes as long as one microbatch
    takes through all stages.  There are as many microbatches as stages, or as rows if those are
    fewer; then stages idle.
    passes: the step times with one microbatch, with two, and so on.
    """

    def __init__(self, name: str, settings: dict[str, Any], passes: Sequence[S]) -> None:
        super().__init__(name, settings)
        self._passes = passes

    def pass_of(self, num_sequences: int) -> S:
        return self._passes[min(num_sequences, len(self._passes)) - 1]

    def ticks(self, num_tokens: int, num_sequences: int, kv_read: int, prefill_work: int) -> int:
        one = self.pass_of(num_sequences)
        return one.ticks(num_tokens, num_sequences, kv_read, prefill_work)

    def _ramps(self, num_sequences: int, kv_read: int) -> list[tuple[int, int]]:
        return self.pass_of(num_sequences)._ramps(num_sequences, kv_read)  # noqa: SLF001 - same class
