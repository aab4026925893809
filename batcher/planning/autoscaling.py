"""Autoscaling: how many replicas there are to be, decided now and then by what they report.

Rule: a policy is a function of a FleetState; how fast its wishes are followed is the same for all.
"""

from collections import deque
from collections.abc import Callable
from math import ceil
from typing import Annotated

from msgspec import Meta, Struct

from batcher.errors import BatchdecodeError
from batcher.foreign import calling, import_object
from batcher.metrics.slo import parse_slo
from batcher.timing.catalog import Amount, Count, OptionalPositive, OptionalText, Text, hint_at

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

    policy: one of POLICIES, or module:function.  target: what it aims at.
    min, max: how many replicas there are.  interval: seconds from each decision to the next.
    delay: seconds by which what is decided by is old then.  startup: seconds that a new replica
    takes to serve.  cooldown: replicas go only if nothing has asked for them for so many seconds.
    tolerance: the share by which the target may be missed without a change.
    slo: what the policy slo goes by, as in --slo.
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
        """The limits of its SLO, none without one; raises a BatchdecodeError if it is none."""
        return {} if self.slo is None else parse_slo(self.slo).limits


class FleetState(Struct, frozen=True, kw_only=True):
    """What is known of a fleet at `time`.

    serving, starting: replicas that do, those that have failed and will be back among the latter.
    slots: of a replica.  running, waiting: requests in all that serve; waiting also at the router.
    ended, good, refused: requests since the last decision: that ended, that ended and met the SLO
    of the policy, that the router refused.
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
    """Return how many replicas have a mean of `target` each of a `load`.

    As Kubernetes' HorizontalPodAutoscaler: nothing changes while the mean of those that serve is
    near to the target; those that start count as idle where more are asked for, and as on target
    where fewer are.
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


def policy_of(settings: Autoscale) -> Callable[[FleetState], int]:
    """Return the function that decides.

    Raises:
        BatchdecodeError: there is no such policy, or it lacks a target or an SLO.
    """
    name, target = settings.policy, settings.target
    if ":" in name:
        return _own_policy(name)
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
        return lambda state: proportional(state.waiting, target, settings.tolerance, state)
    return lambda state: proportional(
        state.running / state.slots, target, settings.tolerance, state
    )


POLICIES = {
    "target-utilisation": "the share of slots that is to be used",
    "queue": "how many requests are to wait for each replica",
    SLO: "the share of requests that is to meet the SLO, up to 1",
}


def _own_policy(name: str) -> Callable[[FleetState], int]:
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


class Autoscaler:
    """Decides how many replicas there are to be; see `policy_of` for what it raises."""

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
