"""Management of a fleet: admission at the router, failures of replicas, and autoscaling.

docs/guide/fleets.md explains the settings, which are sections of a fleet file.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import Enum
from itertools import pairwise
from math import ceil, floor, inf
from random import Random
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from batcher.errors import BatchdecodeError, InvariantError
from batcher.foreign import calling, import_function
from batcher.metrics.slo import parse_slo
from batcher.timing.catalog import Amount, CatalogError, Count, Place, Positive, Text

_EDGE = 1e-9  # of a replica: a sum of shares is rounded

Seconds = Annotated[float, Meta(ge=1e-3, le=1e9, description="seconds, from 0.001 to 1e9")]
Share = Annotated[float, Meta(ge=0, lt=1, description="a share from 0 to less than 1")]
Number = Annotated[int, Meta(ge=0, le=2**40, description="a whole number of at least 0")]
Retries = Annotated[int, Meta(ge=0, le=1000, description="a whole number from 0 to 1000")]


class AdmissionControl(Struct, frozen=True, kw_only=True):
    """Limits of requests in flight per replica, and of the queue at the router."""

    max_in_flight: Count
    max_queue: Number = 0
    max_wait: Positive | None = None


class PlannedFailure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A failure of a replica, counted from 0; back_after: seconds until it serves again."""

    replica: Number
    at: Amount
    back_after: Seconds | None = None


Planned = Annotated[
    tuple[PlannedFailure, ...],
    Meta(
        description="a list of failures, each with replica (from 0), at (seconds) and optionally "
        "back_after (seconds, at least 0.001)"
    ),
]


class Failures(Struct, frozen=True, kw_only=True):
    """Failures of replicas: random with the mean time between failures `mtbf`, and planned."""

    mtbf: Seconds | None = None
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


class Autoscale(Struct, frozen=True, kw_only=True):
    """Growth and shrinkage of a fleet; policy: one of POLICIES, or module:function."""

    policy: Text
    target: Positive | None = None
    min: Count = 1
    max: Count
    interval: Seconds = 15.0
    delay: Amount = 0.0
    startup: Amount = 60.0
    cooldown: Amount = 300.0
    tolerance: Share = 0.1
    slo: Text | None = None

    @property
    def limits(self) -> dict[str, float]:
        return {} if self.slo is None else parse_slo(self.slo).limits


class Management(Struct, frozen=True, kw_only=True):
    """The managed aspects of a fleet."""

    admission: AdmissionControl | None = None
    failures: Failures | None = None
    autoscale: Autoscale | None = None


def check_management(management: Management, num_replicas: int, path: str) -> None:
    """Raise a CatalogError if a section of the file at `path` has no effect, or contradicts."""
    failures, autoscale = management.failures, management.autoscale
    place = Place(path, "failures", "failures")
    if failures is not None and failures.mtbf is None and not failures.planned:
        raise CatalogError(f"{place}: set mtbf or planned")
    for failure in failures.planned if failures is not None and autoscale is None else ():
        if failure.replica >= num_replicas:
            last = num_replicas - 1
            raise CatalogError(
                f"{place}: planned: replica {failure.replica} is out of range (0-{last})"
            )
    if autoscale is None:
        return
    place = Place(path, "autoscale", "autoscale")
    if not autoscale.min <= num_replicas <= autoscale.max:
        raise CatalogError(
            f"{place}: the fleet starts with {num_replicas} replicas; expected min "
            f"{autoscale.min} to max {autoscale.max}"
        )
    if autoscale.slo is not None and autoscale.policy in POLICIES and autoscale.policy != "slo":
        raise CatalogError(f"{place}: slo has no effect on {autoscale.policy}")
    try:
        policy_of(autoscale)
        _ = autoscale.limits
    except BatchdecodeError as error:
        raise CatalogError(f"{place}: {error}") from None


# -- autoscaling -----------------------------------------------------------------------------------
#
# A policy is a function of a FleetState to the number of replicas that it wants.  All policies are
# followed in the same way, see Autoscaler.


class FleetState(Struct, frozen=True, kw_only=True):
    """The state of a fleet at `time`, as a policy sees it.

    serving, starting: replicas; failed ones that will return are starting.  slots: of a replica.
    running, waiting: requests at serving replicas and at the router.  ended, good, refused:
    requests since the last decision; good ones met the SLO of the policy.
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
    starting replicas count as idle when scaling up, and as on target when scaling down.
    """
    wanted = ceil(load / target - _EDGE)
    if load > target * state.replicas * (1 + tolerance):
        return wanted
    if load < target * state.serving * (1 - tolerance):
        return wanted + state.starting
    return state.replicas


def by_attainment(target: float, state: FleetState) -> int:
    """Return one replica less if enough requests met the SLO, else more by the factor missed.

    At most twice as many, and no more while replicas are starting, whose effect is not visible yet.
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


POLICIES = {  # with the meaning of their target
    "target-utilisation": "the share of slots to use",
    "queue": "the number of waiting requests per replica",
    "slo": "the share of requests that must meet the SLO, up to 1",
}


def policy_of(settings: Autoscale) -> Callable[[FleetState], int]:
    """Return the policy of `settings`, or raise a BatchdecodeError if they do not fit it."""
    name, target, tolerance = settings.policy, settings.target, settings.tolerance
    if name not in POLICIES:
        function = import_function(name, "autoscaling policy", ", ".join(POLICIES))

        def decide(state: FleetState) -> int:
            with calling(f"the autoscaling policy {name} raised"):
                number = function(state)
            if not isinstance(number, int):
                raise BatchdecodeError(
                    f"the autoscaling policy {name} returned {number!r}, not a number of replicas"
                )
            return number

        return decide
    if target is None:
        raise BatchdecodeError(f"policy {name} needs a target: {POLICIES[name]}")
    if name == "slo":
        if target > 1 or settings.slo is None:
            raise BatchdecodeError(f"policy slo needs an slo, and a target: {POLICIES[name]}")
        return lambda state: by_attainment(target, state)
    if name == "queue":
        return lambda state: proportional(state.waiting, target, tolerance, state)
    return lambda state: proportional(state.running / state.slots, target, tolerance, state)


class Autoscaler:
    """Follows a policy within min and max; scales down to the most wanted during the cooldown."""

    def __init__(self, settings: Autoscale) -> None:
        self._settings, self._policy = settings, policy_of(settings)
        self._wanted: deque[tuple[float, int]] = deque()  # within the cooldown

    def decide(self, state: FleetState) -> int:
        settings, recent = self._settings, self._wanted
        wanted = min(max(self._policy(state), settings.min), settings.max)
        if not recent:
            recent.append((state.time, state.replicas))
        recent.append((state.time, wanted))
        while recent[0][0] < state.time - settings.cooldown:
            recent.popleft()
        if wanted >= state.replicas:
            return wanted
        return min(state.replicas, max(number for _, number in recent))


# -- the life of a replica -------------------------------------------------------------------------


class ReplicaState(Enum):
    """The state of a replica; it is paid for unless it is down."""

    STARTING = "starting"
    SERVING = "serving"
    FAILED = "failed"
    DRAINING = "draining"
    DOWN = "down"


MOVES: dict[ReplicaState, set[ReplicaState]] = {
    ReplicaState.STARTING: {ReplicaState.SERVING, ReplicaState.DOWN},
    ReplicaState.SERVING: {ReplicaState.FAILED, ReplicaState.DRAINING},
    ReplicaState.FAILED: {ReplicaState.SERVING, ReplicaState.DOWN},
    ReplicaState.DRAINING: {ReplicaState.DOWN},
    ReplicaState.DOWN: set(),
}
PAID = frozenset(ReplicaState) - {ReplicaState.DOWN}


class Life:
    """The moves of one replica, each with its time in seconds; the first is its initial state."""

    def __init__(self, state: ReplicaState, time: float) -> None:
        self.moves = [(time, state)]

    @property
    def state(self) -> ReplicaState:
        return self.moves[-1][1]

    def move(self, state: ReplicaState, time: float) -> None:
        if state not in MOVES[self.state] or time < self.moves[-1][0]:
            raise InvariantError(f"a replica that is {self.moves[-1]} cannot be {state} at {time}")
        self.moves.append((time, state))

    def seconds(self, states: Collection[ReplicaState], begin: float, end: float) -> float:
        """Return the time in any of `states` from `begin` to `end`."""
        return sum(
            max(min(until, end) - max(since, begin), 0.0)
            for (since, state), (until, _) in pairwise([*self.moves, (inf, self.state)])
            if state in states
        )


def timeline_of(lives: Iterable[Life], end: float) -> list[tuple[float, int, int]]:
    """Return (time, serving replicas, replicas paid for) at each change up to `end`."""
    serving, paid = Counter[float](), Counter[float]()  # changes, by time
    for life in lives:
        was_serving = was_paid = False
        for time, state in life.moves:
            is_serving, is_paid = state is ReplicaState.SERVING, state in PAID
            serving[time] += is_serving - was_serving
            paid[time] += is_paid - was_paid
            was_serving, was_paid = is_serving, is_paid
    timeline: list[tuple[float, int, int]] = []
    num_serving = num_paid = 0
    for time in sorted(time for time in serving if time <= end):
        num_serving += serving[time]
        num_paid += paid[time]
        if not timeline or timeline[-1][1:] != (num_serving, num_paid):
            timeline.append((time, num_serving, num_paid))
    return timeline


Refusal = Literal["queue_full", "max_wait", "deadline", "retries", "router", "no_replica"]


class FleetHistory(Struct):
    """The lives of all replicas of a managed fleet, and its failures.

    num_failures: of replicas.  num_lost: losses of sequences.  refusals: refused sequences, with
    the turns behind them, by reason.
    """

    lives: list[Life]
    refusals: Counter[Refusal] = field(default_factory=Counter)
    num_failures: int = 0
    num_lost: int = 0
