"""When replicas fail, for how long they are away, and when the router notices.

Rule: when a replica fails depends on its own time alone, so what is routed where changes no
failure.
"""

from collections.abc import Iterator
from math import floor, inf
from random import Random
from typing import Annotated

from msgspec import Meta, Struct

from batcher.timing import catalog

MAX_RETRIES = 1000

_Seconds = Annotated[float, Meta(ge=1e-3, le=1e9)]
Seconds = Annotated[_Seconds, Meta(description="seconds, from 0.001 to 1e9")]
OptionalSeconds = Annotated[
    _Seconds | None, Meta(description="seconds, from 0.001 to 1e9, or null")
]
Number = Annotated[
    Annotated[int, Meta(ge=0, le=2**40)], Meta(description="a whole number of at least 0")
]
Retries = Annotated[
    Annotated[int, Meta(ge=0, le=MAX_RETRIES)],
    Meta(description=f"a whole number from 0 to {MAX_RETRIES}"),
]


class PlannedFailure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica, counted from 0, that fails at a time if it serves then.

    back_after: after how many seconds it serves again; None: never.
    """

    replica: Number
    at: catalog.Amount
    back_after: OptionalSeconds = None


Planned = Annotated[
    tuple[PlannedFailure, ...],
    Meta(
        description="a list of failures, each with a replica, counted from 0, at, in seconds, and "
        "perhaps back_after, in seconds, at least 0.001"
    ),
]


class Failures(Struct, frozen=True, kw_only=True):
    """How replicas fail.

    mtbf: the mean time between failures of a replica, in seconds that it serves; the times are
    exponential.  restart: how many seconds one of them takes to serve again.  seed: of these times.
    planned: failures at known times.
    health_check: seconds from each look at all replicas to the next, by which the router notices.
    retries: how often a request that was lost is sent anew.
    """

    mtbf: OptionalSeconds = None
    restart: Seconds = 60.0
    seed: Number = 0
    planned: Planned = ()
    health_check: Seconds = 10.0
    retries: Retries = 3

    def times_of(self, replica: int) -> Iterator[float]:
        """Yield for how many seconds a replica serves each time until it fails."""
        draw = Random(f"{self.seed}:{replica}").expovariate  # noqa: S311 - chance, not secrets
        while True:
            yield inf if self.mtbf is None else draw(1 / self.mtbf)

    def noticed_at(self, time: float) -> float:
        """Return when a failure at `time` is noticed: at the next look."""
        return (floor(time / self.health_check) + 1) * self.health_check
