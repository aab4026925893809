"""Searches the terms of a profile where a try is a whole simulation: requests have no step times.

The loss is anybody's: how far a simulated run is from the request times of a real one, say.
"""

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from batcher.timing.profiles import TERMS, Profile
from batcher.timing.roofline import GPU, ModelShape, roofline
from batcher.timing.step_time import TICKS_PER_SECOND

_FIRST_FACTOR = 1.5
_LAST_FACTOR = 1.005
_DIGITS = 6


class Search(Struct, frozen=True):
    """The best profile that was found, its loss, and how many were tried."""

    profile: Profile
    loss: float
    num_tries: int


def fit_profile(
    start: Profile, loss_of: Callable[[Profile], float], max_tries: int = 400
) -> Search:
    """Return the profile with the least loss that a search from `start` comes to.

    At first all terms are made larger, then smaller, together; then one after the other, and what
    is better is kept.  When a round changes nothing, the factor goes to its square root.  A term
    that is 0 stays 0.  It is deterministic if `loss_of` is.
    """
    found = Search(start, loss_of(start), 1)
    for groups in ((TERMS,), tuple((term,) for term in TERMS)):
        factor = _FIRST_FACTOR
        while factor > _LAST_FACTOR and found.num_tries < max_tries:
            better = _tried(found, loss_of, groups, factor, max_tries)
            if better.loss == found.loss:
                factor **= 0.5
            found = better
    return found


def _tried(
    found: Search,
    loss_of: Callable[[Profile], float],
    groups: tuple[tuple[str, ...], ...],
    factor: float,
    max_tries: int,
) -> Search:
    """Return what is best after each group of terms was multiplied, and divided, by `factor`."""
    best, least, num_tries = found.profile, found.loss, found.num_tries
    for terms in groups:
        if not any(getattr(best, term) for term in terms):
            continue
        for change in (factor, 1 / factor):
            if num_tries >= max_tries:
                break
            tried = _changed(best, terms, change)
            loss, num_tries = loss_of(tried), num_tries + 1
            if loss < least:
                best, least = tried, loss
                break
    return Search(best, least, num_tries)


def _changed(profile: Profile, terms: tuple[str, ...], factor: float) -> Profile:
    """Return `profile` with some of its terms multiplied by `factor`."""
    return replace(profile, **{term: _rounded(getattr(profile, term) * factor) for term in terms})


def roofline_profile(shape: ModelShape, gpu: GPU, tensor_parallel: int = 1) -> Profile:
    """Return a profile to start a search from: the roofline's costs, added up, each above 0."""
    best = roofline("start", shape, gpu, tensor_parallel)
    weights = best.memory_ticks(0, 0)
    token = best.compute_ticks(1, 0, 0, 0)
    kv = best.memory_ticks(0, 1) - weights
    return Profile(
        t0=_milliseconds(weights),
        w=_milliseconds(weights),
        f=_milliseconds(token),
        g=_milliseconds(best.compute_ticks(0, 1, 0, 0)),
        d=_milliseconds(kv),
        h=_milliseconds(kv),
        e=_milliseconds(2 * best.compute_ticks(0, 0, 0, 1)),
        tensor_parallel=tensor_parallel,
    )


def _milliseconds(ticks: int) -> float:
    return _rounded(ticks / TICKS_PER_SECOND * 1000)


def _rounded(amount: float) -> float:
    return float(f"{amount:.{_DIGITS}g}")
