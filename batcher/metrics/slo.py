"""Latency targets (SLOs) for all requests or by priority, and goodput."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf, isfinite
from typing import ClassVar, Self

from msgspec import Struct, field

from batcher.errors import BatchdecodeError
from batcher.metrics.times import EndedRequest, microseconds, share_of
from batcher.request import MAX_INT
from batcher.trace.run import Totals

METRICS = {
    "queue": "from arrival to admission",
    "ttft": "from arrival to the first token",
    "tpot": "the mean time of a token after the first",
    "e2e": "from arrival to the last token",
}
UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}

OTHERS = "others"  # the class of requests without a class of their own

_DOUBTFUL = {"ttft": 100.0, "tpot": 1.0}  # seconds that were probably meant as milliseconds

_LIMIT = re.compile(r"([^=]*)=([^=]*)")
_CLASS = re.compile(r"\s*priority\s*=([^:]*):(.*)", re.DOTALL)
_TIME = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?) ?([^\d\s]*)", re.ASCII)
_BARE = re.compile(r"(\w+)\s*=\s*([\d.eE+]+)\s*(?=,|$)")


class Slo(Struct, frozen=True):
    """Limits in seconds by metric; classes: the limits of some priorities, which replace them."""

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
        """Return the limits that `request` exceeds, compared in microseconds."""
        return [
            name
            for name, limit in self.limits.items()
            if (value := getattr(request, name)) is not None
            and microseconds(value) > microseconds(limit)
        ]


def class_name(priority: int) -> str:
    return f"priority={priority}"


class Goodput(Totals, kw_only=True):
    """Requests that met their limits (seconds by metric); missed: requests by exceeded limit.

    Counts every request that asks for a token; without an SLO, those with a deadline.  A sample, or
    all beams of a request, is one.
    """

    LARGEST: ClassVar = frozenset({"limits"})

    limits: dict[str, float] = field(default_factory=dict)
    requests: int = 0
    good: int = 0
    share: float = 0.0
    per_second: float = 0.0
    missed: dict[str, int] = field(default_factory=Counter)

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
            share=share_of(good, requests),
            per_second=share_of(good, makespan),
            missed=dict(sorted(missed.items())),
        )

    def add(self, request: EndedRequest, slo: Slo | None) -> None:
        deadline = request.arrive.deadline
        if not request.arrive.max_tokens or (slo is None and deadline is None):
            return
        if request.finish.reason == "lost":  # it is decoded again
            return
        missed = [] if slo is None else slo.missed(request)
        if deadline is not None and microseconds(request.end - deadline) > 0:
            missed.append("deadline")
        if not request.is_ok:
            missed = ["failed"]
        self.requests += 1
        self.good += not missed
        for name in missed:
            self.missed[name] += 1


def parse_slo(text: str) -> Slo:
    """Return the SLO in `text`, in seconds unless it has a unit: `ttft=0.5,tpot=50ms`."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        match = _LIMIT.fullmatch(part.strip())
        if match is None:
            raise BatchdecodeError(f"SLO {text!r}: {part!r} is not a limit such as ttft=0.5")
        name, value = (group.strip() for group in match.groups())
        if name not in METRICS:
            known = ", ".join(METRICS)
            raise BatchdecodeError(f"SLO {text!r}: unknown metric {name!r}; known: {known}")
        if name in limits:
            raise BatchdecodeError(f"SLO {text!r}: {name} is given twice")
        place, match = f"SLO {text!r}: {name}", _TIME.fullmatch(value)
        if match is None:
            raise BatchdecodeError(f"{place}: {value!r} is not a time such as 0.5 or 500ms")
        number, unit = match.groups()
        if unit not in UNITS:
            known = ", ".join(name for name in UNITS if name)
            raise BatchdecodeError(
                f"{place}: unknown unit {unit!r}; known: {known}, or none for seconds"
            )
        seconds = limits[name] = float(number) * UNITS[unit]
        if not (isfinite(seconds) and microseconds(seconds)):
            raise BatchdecodeError(f"{place}: {value} is shorter than 1 us, or not a time")
    return Slo(limits)


def parse_slos(texts: Sequence[str]) -> Slo | None:
    """Return the SLO of `texts`: one for all, and one per class such as `priority=1:ttft=0.3`.

    Raises a BatchdecodeError if a text is not a list of limits, or a class has two.
    """
    slos: dict[int | None, Slo] = {}
    for text in texts:
        match, priority = _CLASS.fullmatch(text), None
        if match is not None:
            given = match[1].strip()
            if not re.fullmatch(r"[+-]?[0-9]{1,10}", given) or abs(int(given)) > MAX_INT:
                raise BatchdecodeError(
                    f"SLO {text!r}: priority {given!r}: expected a whole number from "
                    f"{-MAX_INT:,} to {MAX_INT:,}"
                )
            priority = int(given)
        if priority in slos:
            requests = "all requests" if priority is None else class_name(priority)
            raise BatchdecodeError(f"SLO {text!r}: a second SLO for {requests}")
        slos[priority] = parse_slo(text if match is None else match[2])
    if not slos:
        return None
    general = slos.pop(None, Slo({}))
    return Slo(general.limits, {p: slo for p, slo in slos.items() if p is not None})


def doubtful_limits(texts: Sequence[str]) -> list[str]:
    """Return a remark per limit of valid SLOs that is too many seconds to be meant."""
    return [
        f"{name}={number} is {number} seconds; for milliseconds: {name}={number}ms"
        for text in texts
        for name, number in _BARE.findall(text)
        if float(number) >= _DOUBTFUL.get(name, inf)
    ]
