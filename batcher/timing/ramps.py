"""Sums of steps of which each takes so many ticks more than the one before, exactly.

A ramp is `first`, what its first step takes, and `slope`, what each one adds; both are whole ticks.
"""

from math import isqrt


def sum_of_ramp(first: int, slope: int, num_steps: int) -> int:
    """Return what the first `num_steps` steps of a ramp take together."""
    return num_steps * first + slope * (num_steps * (num_steps - 1) >> 1)


def least_steps(first: int, slope: int, ticks: int) -> int:
    """Return the least number of steps of a ramp that take `ticks` together; both at least 1."""
    if not slope:
        return -(-ticks // first)
    # 2 * sum = slope * k**2 + linear * k.  The floor of the root it reaches 2 * ticks at is exact,
    # since rounding the square root down before the division changes no floor.
    linear = first + first - slope
    below = (isqrt(linear * linear + 8 * slope * ticks) - linear) // (slope + slope)
    return below + (below * (linear + slope * below) < ticks + ticks)
