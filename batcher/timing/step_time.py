"""How long a step takes, as a function of what it computes.

Rule: time is counted in whole ticks of a femtosecond, so that the sum over many steps in closed
form is exactly the sum of them one by one.  A ramp is what steps take of which each takes so many
ticks more than the one before: `first`, what the first one takes, and `slope`, what each one adds.
"""

from collections.abc import Iterator
from math import sqrt
from typing import Any

TICKS_PER_SECOND = 10**15


class StepTime:
    """The duration of a step: while the same rows decode, the highest of some ramps at each step.

    name: "constant", the name of a profile, ...  settings: what beside it reproduces it, for JSON.
    """

    name: str
    settings: dict[str, Any]

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name, self.settings = name, settings

    def ticks(self, num_tokens: int, num_sequences: int, kv_read: int, prefill_work: int) -> int:
        """Return how long a step takes: at least one tick.

        num_tokens: all tokens the step computes.  num_sequences: the rows it computes.
        kv_read: the tokens before it that each decoding row reads, summed up; a decoding row
        computes one token after the first that it generated.
        prefill_work: the sum of P * (2 * context + P) over the rows that compute P tokens of a
        prompt after `context` others; 0 in a step that only decodes.
        """
        raise NotImplementedError

    def _ramps(self, num_sequences: int, kv_read: int) -> list[tuple[int, int]]:
        """Return (first, slope) of each ramp of steps in which so many rows decode."""
        raise NotImplementedError

    def ticks_of_decodes(self, num_sequences: int, kv_read: int, num_steps: int) -> int:
        """Return the sum over `num_steps` steps in which so many rows decode, and nothing else.

        kv_read: that of the first of them; each step adds num_sequences to it.
        """
        ramps, total = self._ramps(num_sequences, kv_read), 0
        first, slope = max(ramps)
        if len(ramps) == 1 or is_highest(first, slope, num_steps - 1, ramps):  # nearly always
            return sum_of_ramp(first, slope, num_steps)
        for first, slope, length in highest_of(ramps):
            if length is None or num_steps <= length:
                return total + sum_of_ramp(first, slope, num_steps)
            total += sum_of_ramp(first, slope, length)
            num_steps -= length
        return total

    def num_decodes_until(self, num_sequences: int, kv_read: int, ticks: int) -> int:
        """Return the least number of such steps that take `ticks` (at least one tick) together."""
        ramps = self._ramps(num_sequences, kv_read)
        first, slope = max(ramps)
        num_steps = least_steps(first, slope, ticks)
        if len(ramps) == 1 or is_highest(first, slope, num_steps - 1, ramps):
            return num_steps
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
    """Return the least number of steps of a ramp that take `ticks` together; both at least 1."""
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


def is_highest(first: int, slope: int, last: int, ramps: list[tuple[int, int]]) -> bool:
    """Return whether the ramp that is highest at first is so at step `last`, too."""
    end = first + slope * last
    for begin, more in ramps:  # noqa: SIM110 - all() takes twice as long
        if begin + more * last > end:
            return False
    return True


def highest_of(ramps: list[tuple[int, int]]) -> Iterator[tuple[int, int, int | None]]:
    """Yield (first, slope, steps) of the highest ramp, until the next one overtakes it.

    steps: None for the last one.
    """
    step = 0
    while len(ramps) > 1:
        first, slope = max(ramps, key=lambda ramp: (ramp[0] + ramp[1] * step, ramp[1]))
        steeper = [ramp for ramp in ramps if ramp[1] > slope]
        if not steeper:
            ramps = [(first, slope)]
            break
        end = min((first - begin) // (more - slope) + 1 for begin, more in steeper)
        yield first + slope * step, slope, end - step
        step, ramps = end, steeper
    ((first, slope),) = ramps
    yield first + slope * step, slope, None
