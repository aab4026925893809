"""How a fleet is managed: admission at the router, failures, and autoscaling.

An autoscaling policy is a function of a FleetState: it decides now and then how many replicas there
are to be, by what they report.  How fast its wishes are followed is the same for all policies.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import Enum
from heapq import merge
from itertools import pairwise
from math import ceil, floor, inf
from random import Random
from typing import Annotated, Literal

from msgspec import Meta, Struct

from batcher.errors import BatchdecodeError, InvariantError
from batcher.foreign import calling, import_object
from batcher.metrics.slo import parse_slo
from batcher.timing.catalog import (
    Amount,
    CatalogError,
    Count,
    OptionalPositive,
    OptionalText,
    Place,
    Text,
    hint_at,
)

SLO = "slo"
_EDGE = 1e-9  # of a replica: a sum of shares is rounded

Seconds = Annotated[float, Meta(ge=1e-3, le=1e9, description="seconds, from 0.001 to 1e9")]
OptionalSeconds = Annotated[
    Annotated[float, Meta(ge=1e-3, le=1e9)] | None,
    Meta(description="seconds, from 0.001 to 1e9, or null"),
]
Share = Annotated[float, Meta(ge=0, lt=1, description="a share from 0 to less than 1")]


class Autoscale(Struct, frozen=True, kw_only=True):
    """How a fleet grows and shrinks.

    policy: one of POLICIES, or module:function.  target: of the policy.  min, max: replicas.
    interval: seconds between decisions.  delay: age of the state that is decided by.  startup:
    seconds until a new replica serves.  cooldown: replicas go only if none was asked for within so
    many seconds.  tolerance: share by which the target may be missed.  slo: of the policy slo.
    """

    policy: Text
    target: OptionalPositive = None
    min: Count = 1
    max: Count
    interval: Seconds = 15.0
    delay: Amount = 0.0
    startup: Amount = 60.0
    cooldown: Amount = 300.0
    tolerance: Share = 0.1
    slo: OptionalText = None

    @property
    def limits(self) -> dict[str, float]:
        """The limits of its SLO, {} without one."""
        return {} if self.slo is None else parse_slo(self.slo).limits


class FleetState(Struct, frozen=True, kw_only=True):
    """What is known of a fleet at `time`.

    serving, starting: replicas; failed ones that come back are starting.  slots: of a replica.
    running, waiting: requests in all that serve, and at the router.  ended, good, refused: requests
    since the last decision; good ones met the SLO of the policy.
    """

    time: float
    serving: int
    starting: int
    slots: int
    running: int
    waiting: int
    ended: int
    good: int
    refused: int

    @property
    def replicas(self) -> int:
        return self.serving + self.starting


def proportional(load: float, target: float, tolerance: float, state: FleetState) -> int:
    """Return the number of replicas with a mean load of `target` each.

    Like Kubernetes' HorizontalPodAutoscaler: nothing changes while the mean is near the target;
    starting replicas count as idle where more are asked for, and as on target where fewer are.
    """
    wanted = ceil(load / target - _EDGE)
    if load > target * state.replicas * (1 + tolerance):
        return wanted
    if load < target * state.serving * (1 - tolerance):
        return wanted + state.starting
    return state.replicas


def by_attainment(target: float, state: FleetState) -> int:
    """Return more replicas if too few requests met the SLO, else one less.

    As many times more as the share that met it is below the target, at most twice as many; and
    none while others are still starting, whose effect cannot be seen yet.
    """
    num_ended = state.ended + state.refused
    if state.good >= target * num_ended:
        return state.replicas - 1
    if state.starting:
        return state.replicas
    most = 2 * state.replicas
    if not state.good:
        return most
    return min(ceil(state.replicas * target * num_ended / state.good), most)


POLICIES = {
    "target-utilisation": "the share of slots that is to be used",
    "queue": "how many requests are to wait for each replica",
    SLO: "the share of requests that is to meet the SLO, up to 1",
}


def policy_of(settings: Autoscale) -> Callable[[FleetState], int]:
    """Return the function that decides; raise a BatchdecodeError if settings do not fit it."""
    name, target, tolerance = settings.policy, settings.target, settings.tolerance
    if ":" in name:
        function = import_object(name, "autoscaling policy", ", ".join(POLICIES))
        if not callable(function):
            kind = type(function).__name__
            raise BatchdecodeError(f"the autoscaling policy {name} is no function, but a {kind}")

        def decide(state: FleetState) -> int:
            with calling(f"the autoscaling policy {name} raised"):
                number = function(state)
            if not isinstance(number, int):
                raise BatchdecodeError(
                    f"the autoscaling policy {name} returned {number!r}, not a number of replicas"
                )
            return number

        return decide
    if name not in POLICIES:
        known = ", ".join(POLICIES)
        hint = hint_at(name, POLICIES)
        raise BatchdecodeError(f"unknown policy {name}{hint}; known: {known}, module:function")
    if target is None:
        raise BatchdecodeError(f"policy {name} needs a target: {POLICIES[name]}")
    if name == SLO:
        if target > 1 or settings.slo is None:
            raise BatchdecodeError(f"policy slo needs a slo, and {POLICIES[name]}")
        return lambda state: by_attainment(target, state)
    if name == "queue":
        return lambda state: proportional(state.waiting, target, tolerance, state)
    return lambda state: proportional(state.running / state.slots, target, tolerance, state)


class Autoscaler:
    """Decides how many replicas there are to be."""

    def __init__(self, settings: Autoscale) -> None:
        self._settings, self._policy = settings, policy_of(settings)
        self._wished: deque[tuple[float, int]] = deque()  # within the cooldown

    def decide(self, state: FleetState) -> int:
        settings, wished = self._settings, self._wished
        wish = min(max(self._policy(state), settings.min), settings.max)
        if not wished:
            wished.append((state.time, state.replicas))
        wished.append((state.time, wish))
        while wished[0][0] < state.time - settings.cooldown:
            wished.popleft()
        if wish >= state.replicas:
            return wish
        return min(state.replicas, max(number for _, number in wished))


Number = Annotated[int, Meta(ge=0, le=2**40, description="a whole number of at least 0")]
Retries = Annotated[int, Meta(ge=0, le=1000, description="a whole number from 0 to 1000")]


class AdmissionControl(Struct, frozen=True, kw_only=True):
    """Limits on what a router admits.

    max_in_flight: requests sent to one replica that have not ended; samples of a request stay
    together.  max_queue: requests that wait at the router; one more, and the least urgent is
    refused.  max_wait: seconds in that queue; None: for ever.
    """

    max_in_flight: Count
    max_queue: Number = 0
    max_wait: OptionalPositive = None


class PlannedFailure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica, counted from 0, that fails at a time if it serves then.

    back_after: seconds until it serves again; None: never.
    """

    replica: Number
    at: Amount
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

    mtbf: mean serving seconds between failures of a replica, exponential.  restart: seconds until
    it serves again.  health_check: seconds between the looks by which the router notices.  retries:
    how often a lost request is sent anew.
    """

    mtbf: OptionalSeconds = None
    restart: Seconds = 60.0
    seed: Number = 0
    planned: Planned = ()
    health_check: Seconds = 10.0
    retries: Retries = 3

    def times_of(self, replica: int) -> Iterator[float]:
        draw = Random(f"{self.seed}:{replica}").expovariate  # noqa: S311 - chance, not secrets
        while True:
            yield inf if self.mtbf is None else draw(1 / self.mtbf)

    def noticed_at(self, time: float) -> float:
        return (floor(time / self.health_check) + 1) * self.health_check


class Management(Struct, frozen=True, kw_only=True):
    """The management of a fleet; None: none in this respect."""

    admission: AdmissionControl | None = None
    failures: Failures | None = None
    autoscale: Autoscale | None = None


def check_management(management: Management, num_replicas: int, path: str) -> None:
    """Raise a CatalogError where something in the file at `path` has no effect, or no meaning."""
    failures, autoscale = management.failures, management.autoscale
    place = Place(path, "failures", "failures")
    if failures is not None and failures.mtbf is None and not failures.planned:
        raise CatalogError(f"{place}: nothing fails without mtbf or planned")
    for failure in failures.planned if failures is not None and autoscale is None else ():
        if failure.replica >= num_replicas:
            raise CatalogError(
                f"{place}: planned: there is no replica {failure.replica}, the last is "
                f"{num_replicas - 1}"
            )
    if autoscale is not None:
        place = Place(path, "autoscale", "autoscale")
        if not autoscale.min <= num_replicas <= autoscale.max:
            raise CatalogError(
                f"{place}: it begins with {num_replicas} replicas, which is not from min "
                f"{autoscale.min} to max {autoscale.max}"
            )
        if autoscale.slo is not None and autoscale.policy in POLICIES and autoscale.policy != SLO:
            raise CatalogError(f"{place}: slo has no effect on {autoscale.policy}")
        try:
            policy_of(autoscale)
            _ = autoscale.limits
        except BatchdecodeError as error:
            raise CatalogError(f"{place}: {error}") from None


# -- the life of a replica -------------------------------------------------------------------------
#
# It starts, serves, fails and comes back, drains, and is down.  Failures and autoscaling make their
# moves through this table alone, and all numbers about a replica's time follow from them.


class ReplicaState(Enum):
    """The state of a replica; it is paid for unless it is down."""

    STARTING = "starting"
    SERVING = "serving"
    FAILED = "failed"
    DRAINING = "draining"
    DOWN = "down"


MOVES: dict[ReplicaState, frozenset[ReplicaState]] = {
    ReplicaState.STARTING: frozenset({ReplicaState.SERVING, ReplicaState.DOWN}),
    ReplicaState.SERVING: frozenset({ReplicaState.FAILED, ReplicaState.DRAINING}),
    ReplicaState.FAILED: frozenset({ReplicaState.SERVING, ReplicaState.DOWN}),
    ReplicaState.DRAINING: frozenset({ReplicaState.DOWN}),
    ReplicaState.DOWN: frozenset(),
}
PAID = frozenset(ReplicaState) - {ReplicaState.DOWN}


class Life:
    """The moves of one replica, each with its time in seconds; the first is what it begins as."""

    def __init__(self, state: ReplicaState, time: float) -> None:
        self.moves = [(time, state)]
        self.num_starts = int(state is ReplicaState.SERVING)

    @property
    def state(self) -> ReplicaState:
        return self.moves[-1][1]

    def move(self, state: ReplicaState, time: float) -> None:
        """Enter another state; raise an InvariantError if the table has no such move."""
        if state not in MOVES[self.state] or time < self.moves[-1][0]:
            raise InvariantError(f"a replica that is {self.moves[-1]} cannot be {state} at {time}")
        self.moves.append((time, state))
        self.num_starts += state is ReplicaState.SERVING

    def seconds(self, states: Collection[ReplicaState], begin: float, end: float) -> float:
        """Return how long it was in one of `states` from `begin` to `end`."""
        return sum(
            max(min(until, end) - max(since, begin), 0.0)
            for (since, state), (until, _) in pairwise([*self.moves, (inf, self.state)])
            if state in states
        )


def timeline_of(lives: Iterable[Life], end: float) -> list[tuple[float, int, int]]:
    """Return (time, replicas that serve, replicas paid for) at each change up to `end`."""

    def changes(life: Life) -> Iterator[tuple[float, int, int]]:
        was_serving = was_paid = False
        for time, state in life.moves:
            is_serving, is_paid = state is ReplicaState.SERVING, state in PAID
            yield time, is_serving - was_serving, is_paid - was_paid
            was_serving, was_paid = is_serving, is_paid

    timeline: list[tuple[float, int, int]] = []
    num_serving = num_paid = 0
    for time, serving, paid in merge(*map(changes, lives)):
        num_serving += serving
        num_paid += paid
        if time > end:
            break
        if timeline and timeline[-1][0] == time:
            timeline.pop()
        if not timeline or timeline[-1][1:] != (num_serving, num_paid):
            timeline.append((time, num_serving, num_paid))
    return timeline


Refusal = Literal["queue_full", "max_wait", "deadline", "retries", "router", "no_replica"]


class FleetHistory(Struct):
    """The lives of the replicas of a managed fleet.

    lives: of all there ever were, in the order of the results.  num_failures: of replicas.
    num_lost: how often a sequence was lost with one.  refusals: sequences refused, with the turns
    after them, by reason.
    """

    lives: list[Life]
    refusals: Counter[Refusal]
    num_failures: int = 0
    num_lost: int = 0
