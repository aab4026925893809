"""Searches the terms of a profile where a try is a whole simulation: requests have no step times.

A coarse search for one factor on all terms, then Gauss-Newton steps over their logarithms, damped
(Marquardt 1963), with weights under which the sum of what is left over becomes small, and not that
of its squares.  From where that ends far off, it begins again nearby.
"""

from collections.abc import Callable
from math import exp, log
from operator import attrgetter
from random import Random
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from batcher.timing.hardware import GPU
from batcher.timing.model_shape import ModelShape
from batcher.timing.profiles import MORE_TERMS, TERMS, Profile
from batcher.timing.roofline import roofline_of_part
from batcher.timing.step_time import TICKS_PER_SECOND

Residuals = Callable[[Profile], Any]
"""What a profile leaves over: [residuals] float64; the loss is the sum of how large they are."""

_COARSE = 2.0  # the factor on all terms that is tried first
_PROBE = 1.1  # how much larger a term is made to see what that changes, more than chance does
_FARTHEST = 0.7  # logarithm of the largest factor of a step
_DAMPINGS = (0.003, 0.05, 1.0)  # as shares of what matters most: what hardly does stays
_LEAST_GAIN = 0.01  # as a share of the loss: a round with less is the last one
_FIRST_ROUNDS = 2  # from each start; the best goes on
_ENOUGH = 0.01  # a loss with which there is no need to begin again
_SHAKEN = 0.4  # spread of the logarithms of the factors with which it begins again
_SHARES_OF_T0 = (0.2, 0.8)  # of t0 + w, of which decoding tells only the sum
_DIGITS = 6
_TERMS = (*TERMS, *MORE_TERMS)


class Search(Struct, frozen=True):
    """The best profile that was found, its loss, and how many were tried."""

    profile: Profile
    loss: float
    num_tries: int


def starts_around(start: Profile) -> list[Profile]:
    """Return the terms of `start` alone, and others with which decoding takes as long."""
    start = replace(start, by_tokens=())  # a search moves terms, and these it could not
    both = start.t0 + start.w
    if not both:
        return [start]
    moved = [
        replace(start, t0=_rounded(share * both), w=_rounded((1 - share) * both))
        for share in _SHARES_OF_T0
    ]
    return [start, *moved]


def fit_profile(start: Profile, residuals_of: Residuals, max_tries: int) -> Search:
    """Return the profile with the least loss that searches around `start` come to.

    A term that is 0 at the start stays 0.  It is deterministic if `residuals_of` is.
    """
    descent = _Descent(residuals_of, max_tries)
    best = descent.scale(descent.attempt(replace(start, by_tokens=())))
    found = [descent.descend(best, _FIRST_ROUNDS)]
    found += [
        descent.descend(descent.attempt(other), _FIRST_ROUNDS)
        for other in starts_around(best.profile)[1:]
        if descent.num_left
    ]
    best = descent.descend(min(found, key=_loss_of), max_tries)
    chance = Random(0)  # noqa: S311 - it only has to be the same each time
    while descent.num_left and best.loss > _ENOUGH:
        shaken = _moved(best.profile, {term: chance.gauss(0, _SHAKEN) for term in _TERMS})
        again = descent.attempt(shaken)
        best = min(best, descent.descend(again, max_tries), key=_loss_of)
    return Search(best.profile, best.loss, max_tries - descent.num_left)


class _Tried(Struct, frozen=True):
    """A profile and what it leaves over."""

    profile: Profile
    rest: Any
    loss: float


_loss_of = attrgetter("loss")


class _Descent:
    """Goes down from profiles; num_left: how many may still be tried."""

    def __init__(self, residuals_of: Residuals, max_tries: int) -> None:
        self._residuals_of = residuals_of
        self.num_left = max_tries

    def attempt(self, profile: Profile) -> _Tried:
        """Return what a profile leaves over."""
        self.num_left -= 1
        rest = self._residuals_of(profile)
        return _Tried(profile, rest, float(np.abs(rest).sum()))

    def scale(self, now: _Tried) -> _Tried:
        """Return the best of all terms times one factor, a power of _COARSE."""
        for factor in (_COARSE, 1 / _COARSE):
            begun = now
            while self.num_left:
                change = dict.fromkeys(_TERMS, log(factor))
                tried = self.attempt(_moved(now.profile, change))
                if tried.loss >= now.loss:
                    break
                now = tried
            if now is not begun:
                break  # what is better larger is no better smaller
        return now

    def descend(self, now: _Tried, max_rounds: int) -> _Tried:
        """Return the best that so many rounds come to, or fewer when they gain little."""
        for _ in range(max_rounds):
            before = now.loss
            now = self._round(now)
            if now.loss >= before * (1 - _LEAST_GAIN) or not self.num_left:
                break
        return now

    def _round(self, now: _Tried) -> _Tried:
        """Return the best of what is tried on all sides of `now`, and from there on downhill."""
        free = [term for term in _TERMS if getattr(now.profile, term)]
        best, slopes = now, []
        for term in free:
            if not self.num_left:
                return best
            probe = self.attempt(_moved(now.profile, {term: log(_PROBE)}))
            slopes.append((probe.rest - now.rest) / log(_PROBE))
            best = min(best, probe, key=_loss_of)
        for damping in _DAMPINGS if slopes else ():
            if not self.num_left:
                return best
            step = _step(np.column_stack(slopes), now.rest, damping)
            tried = self.attempt(_moved(now.profile, dict(zip(free, step, strict=True))))
            if tried.loss < best.loss:
                return tried
        return best


def _step(slopes: Any, rest: Any, damping: float) -> list[float]:
    """Return how far to go on each term [terms], if `rest` changes by `slopes` [residuals, terms].

    What is left over is weighted by one over its size, but for what is next to nothing.
    """
    sizes = np.abs(rest)
    weights = 1 / np.maximum(sizes, 0.1 * max(float(sizes.mean()), 1e-12))
    weighted = slopes * weights[:, None]
    matrix = slopes.T @ weighted
    largest = max(float(np.diag(matrix).max()), 1e-12)
    matrix = matrix + damping * largest * np.eye(len(matrix))
    step = np.linalg.solve(matrix, -weighted.T @ rest)
    found: list[float] = np.clip(step, -_FARTHEST, _FARTHEST).tolist()
    return found


def _moved(profile: Profile, changes: dict[str, float]) -> Profile:
    """Return `profile` with some terms changed by factors, of which the logarithms are given."""
    moved = {term: getattr(profile, term) * exp(change) for term, change in changes.items()}
    return replace(profile, **{term: _rounded(value) for term, value in moved.items()})


def roofline_profile(shape: ModelShape, gpu: GPU, tensor_parallel: int = 1) -> Profile:
    """Return a profile to start a search from: the roofline's costs, added up, each above 0."""
    best = roofline_of_part("start", {}, shape, gpu, (tensor_parallel, 1))
    weights, nothing = best.memory_ticks(0, 0), best.compute_ticks(0, 0, 0, 0)
    experts = shape.expert_bytes / (gpu.bandwidth_gb_s * 1e9 * tensor_parallel)
    kv = best.memory_ticks(0, 1) - weights
    return Profile(
        t0=_milliseconds(weights),
        w=_milliseconds(weights),
        f=_milliseconds(best.compute_ticks(1, 0, 0, 0) - nothing),
        g=_milliseconds(best.compute_ticks(0, 1, 0, 0) - nothing),
        d=_milliseconds(kv),
        h=_milliseconds(kv),
        e=_milliseconds(2 * (best.compute_ticks(0, 0, 0, 1) - nothing)),
        x=_rounded(experts * 1000),
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.num_experts_per_tok,
        tensor_parallel=tensor_parallel,
    )


def _milliseconds(ticks: int) -> float:
    return _rounded(ticks / TICKS_PER_SECOND * 1000)


def _rounded(amount: float) -> float:
    return float(f"{amount:.{_DIGITS}g}")
