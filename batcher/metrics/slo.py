"""What a service promises of each request, or each class of them, and how many got it."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Self

from msgspec import Struct, field

from batcher.errors import BatchdecodeError
from batcher.metrics.times import EndedRequest, microseconds
from batcher.request import MAX_INT
from batcher.trace.run import Totals

METRICS = {
    "queue": "from arrival to admission",
    "ttft": "from arrival to the first token",
    "tpot": "the mean time of a token after the first",
    "e2e": "from arrival to the last token",
}
UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
NUM_DIGITS = 6

OTHERS = "others"  # the class of what is in no other

# Seconds from which on a number without a unit may have been meant in milliseconds.
_DOUBTFUL = {"ttft": 100.0, "tpot": 1.0}

_LIMIT = re.compile(r"([^=]*)=([^=]*)")
_CLASS = re.compile(r"\s*priority\s*=([^:]*):(.*)", re.DOTALL)
_PRIORITY = re.compile(r"[+-]?[0-9]{1,10}")
_TIME = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?) ?([^\d\s]*)", re.ASCII)
_BARE = re.compile(r"(\w+)\s*=\s*([\d.eE+]+)\s*(?=,|$)")


class Slo(Struct, frozen=True):
    """The most seconds that each of some METRICS may take.

    classes: what requests of these priorities are promised in place of that.  Without limits,
    requests of no class are promised nothing.
    """

    limits: dict[str, float]
    classes: dict[int, "Slo"] = {}

    @property
    def all_limits(self) -> dict[str, float]:
        return self.limits | {
            f"{class_name(priority)}:{metric}": limit
            for priority, slo in self.classes.items()
            for metric, limit in slo.limits.items()
        }

    def missed(self, request: EndedRequest) -> list[str]:
        """Return which limits the times of `request` exceed; times are compared in microseconds."""
        return [
            name
            for name, limit in self.limits.items()
            if (value := getattr(request, name)) is not None
            and microseconds(value) > microseconds(limit)
        ]


def class_name(priority: int) -> str:
    return f"priority={priority}"


class Goodput(Struct, frozen=True, kw_only=True):
    """How many requests kept their limits (seconds by metric); missed: how many exceeded which."""

    limits: dict[str, float]
    requests: int
    good: int
    share: float
    per_second: float
    missed: dict[str, int]

    @classmethod
    def of(
        cls,
        limits: dict[str, float],
        requests: int,
        good: int,
        makespan: float,
        missed: Mapping[str, int],
    ) -> Self:
        return cls(
            limits=limits,
            requests=requests,
            good=good,
            share=round(good / requests, NUM_DIGITS) if requests else 0.0,
            per_second=round(good / makespan, NUM_DIGITS) if makespan else 0.0,
            missed=dict(sorted(missed.items())),
        )


class GoodputCount(Totals):
    """Counts good requests: all that ask for a token, or without an SLO those that have a deadline.

    A sample, or all beams of a request, is one.  missed: as in Goodput.
    """

    num_requests: int = 0
    num_good: int = 0
    missed: Counter[str] = field(default_factory=Counter)

    def add(self, request: EndedRequest, slo: Slo | None) -> None:
        deadline = request.arrive.deadline
        if not request.arrive.max_tokens or (slo is None and deadline is None):
            return
        if request.finish.reason == "lost":  # it is decoded again
            return
        self.num_requests += 1
        if not request.is_ok:
            self.missed["failed"] += 1
            return
        missed = [] if slo is None else slo.missed(request)
        if deadline is not None and microseconds(request.end - deadline) > 0:
            missed.append("deadline")
        self.missed.update(missed)
        self.num_good += not missed

    def goodput(self, slo: Slo | None, makespan: float) -> Goodput | None:
        if slo is None and not self.num_requests:
            return None
        limits = {} if slo is None else slo.limits
        return Goodput.of(limits, self.num_requests, self.num_good, makespan, self.missed)


def parse_slo(text: str) -> Slo:
    """Return the SLO that `text` states, in seconds unless it has a unit: `ttft=0.5,tpot=50ms`."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        match = _LIMIT.fullmatch(part.strip())
        if match is None:
            raise BatchdecodeError(f"SLO {text!r}: {part!r} is no limit such as ttft=0.5")
        name, value = (group.strip() for group in match.groups())
        if name not in METRICS:
            known = ", ".join(METRICS)
            raise BatchdecodeError(f"SLO {text!r}: unknown metric {name!r}; known: {known}")
        if name in limits:
            raise BatchdecodeError(f"SLO {text!r}: {name} is there twice")
        limits[name] = _seconds(value, f"SLO {text!r}: {name}")
    return Slo(limits)


def parse_slos(texts: Sequence[str]) -> Slo | None:
    """Return the SLO of all `texts`: one of all, and `priority=1:ttft=0.3` of classes; or None.

    Raises a BatchdecodeError if one is no list of limits, or of the same class as another.
    """
    slos: dict[int | None, Slo] = {}
    for text in texts:
        match, priority = _CLASS.fullmatch(text), None
        if match is not None:
            given = match[1].strip()
            if not _PRIORITY.fullmatch(given) or abs(int(given)) > MAX_INT:
                raise BatchdecodeError(
                    f"SLO {text!r}: priority {given!r}: expected a whole number from "
                    f"{-MAX_INT:,} to {MAX_INT:,}"
                )
            priority = int(given)
        if priority in slos:
            whom = "all" if priority is None else class_name(priority)
            raise BatchdecodeError(f"SLO {text!r}: there is one of {whom} already")
        slos[priority] = parse_slo(text if match is None else match[2])
    if not slos:
        return None
    general = slos.pop(None, Slo({}))
    return Slo(general.limits, {p: slo for p, slo in slos.items() if p is not None})


def doubtful_limits(texts: Sequence[str]) -> list[str]:
    """Return remarks on limits of valid SLOs that are more seconds than anybody promises."""
    return [
        f"{name}={number} is {number} seconds; for milliseconds: {name}={number}ms"
        for text in texts
        for name, number in _BARE.findall(text)
        if float(number) >= _DOUBTFUL.get(name, float("inf"))
    ]


def _seconds(text: str, place: str) -> float:
    match = _TIME.fullmatch(text)
    if match is None:
        raise BatchdecodeError(f"{place}: {text!r} is no time such as 0.5 or 500ms")
    number, unit = match.groups()
    if unit not in UNITS:
        known = ", ".join(name for name in UNITS if name)
        raise BatchdecodeError(f"{place}: unknown unit {unit!r}; known: {known}, none for seconds")
    seconds = float(number) * UNITS[unit]
    if not (isfinite(seconds) and microseconds(seconds)):
        raise BatchdecodeError(f"{place}: {text} is not a time of at least a microsecond")
    return seconds
