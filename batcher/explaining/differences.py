"""Compares two runs of one workload: the first difference, its cause, and the effects.

Rule: two schedules are equal if they make the same decisions in the same steps, at any times.
Latency is from arrival to the end of the last step; a wait is all steps in the queue.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, zip_longest
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from batcher.events import (
    AdmitEvent,
    Decision,
    EndEvent,
    Event,
    FinishEvent,
    Role,
    RunEvent,
    StepsEvent,
)
from batcher.explaining.story import KeptRequests, Story, story_of
from batcher.metrics.times import Distribution, SecondsHistogram
from batcher.trace.run import RequestTimeline, label_of
from batcher.trace.timeline import Timeline

MAX_INVOLVED = 3
NUM_DIGITS = 6  # of means and seconds, after the point


class DifferentSetting(Struct, frozen=True):
    """A setting that differs between the first lines of two traces; None where one has none."""

    name: str
    a: Any
    b: Any


class Parting(Struct, frozen=True):
    """The first step whose decisions differ, and the decisions that only one run made in it."""

    step: int
    time_a: float
    time_b: float
    only_a: list[Decision]
    only_b: list[Decision]


class Involved(Struct, frozen=True):
    """A request whose schedule differs in that step, with its story in each run."""

    label: str
    a: Story | None
    b: Story | None


class RequestFigures(Struct, frozen=True, omit_defaults=True):
    """The figures of one sample in one run; times are in seconds, None if it did not end.

    admitted: its first step in a slot.  recomputed: tokens lost in preemptions.  ttft: None without
    a token.
    """

    admitted: int | None
    latency_steps: int | None
    latency: float | None
    wait_steps: int
    preemptions: int
    recomputed: int
    cached: int
    outcome: str | None
    tokens: int
    drafted: int = 0
    accepted: int = 0
    ttft: float | None = None

    @property
    def e2e(self) -> float | None:
        """The latency, if it ended with stop or length and has a token; else None."""
        is_ok = self.outcome in {"stop", "length"} and self.ttft is not None
        return self.latency if is_ok else None

    @property
    def tpot(self) -> float | None:
        """The mean time per token after the first, if it has an e2e; else None."""
        if self.e2e is None or self.ttft is None or self.tokens < 2:  # noqa: PLR2004 - one more
            return None
        return (self.e2e - self.ttft) / (self.tokens - 1)


class SampleChange(Struct, frozen=True):
    """A sample whose schedule differs between the runs."""

    id: str
    index: int
    a: RequestFigures
    b: RequestFigures

    @property
    def label(self) -> str:
        return label_of(self.id, self.index, "sample")

    @property
    def later(self) -> float:
        """The seconds it took longer in run B; negative if it was faster."""
        return (self.b.latency or 0.0) - (self.a.latency or 0.0)


class RunFigures(Struct, frozen=True, omit_defaults=True):
    """The sums of a run; latency and wait are means over samples with a slot, in seconds."""

    steps: int
    time: float
    ended: int
    tokens: int
    latency: float
    wait_steps: float
    preemptions: int
    recomputed: int
    cached: int
    drafted: int = 0
    accepted: int = 0
    ttft: Distribution | None = None
    tpot: Distribution | None = None
    e2e: Distribution | None = None


class RunComparison(Struct, frozen=True):
    """The differences of two runs.

    parting: None if their schedules are equal.  involved: the first few requests that differ there.
    only_a, only_b: labels that the other workload lacks.  altered: labels of requests with another
    arrival or limit.  changes: the samples with another schedule, most changed first, of the
    num_compared in both.  breaks_off_a, breaks_off_b: the step at which the trace breaks off, or
    None; only earlier steps are compared.  is_timed: whether times are seconds instead of steps.
    """

    settings: list[DifferentSetting]
    parting: Parting | None
    involved: list[Involved]
    only_a: list[str]
    only_b: list[str]
    altered: list[str]
    num_compared: int
    changes: list[SampleChange]
    totals_a: RunFigures
    totals_b: RunFigures
    breaks_off_a: int | None = None
    breaks_off_b: int | None = None
    is_timed: bool = False

    @property
    def is_equal(self) -> bool:
        """Whether schedules and workloads are equal, as far as the traces show."""
        return self.parting is None and not (self.only_a or self.only_b or self.altered)


class RunReader:
    """Reads a run step by step and keeps its requests; until: the steps to read, None for all.

    breaks_off: the step of the last decision so far; None once the run has ended.
    """

    def __init__(self, events: Iterable[Event], until: int | None = None) -> None:
        self._events = iter(events) if until is None else _before(events, until)
        self._until, self._kept = until, KeptRequests()
        self.breaks_off: int | None = 0

    def decisions(self) -> Iterator[tuple[int, list[Decision]]]:
        step, found = 0, list[Decision]()
        for event in self._events:
            self._kept.add(event)
            if isinstance(event, EndEvent):
                self.breaks_off = None
            if not isinstance(event, Decision):
                continue
            decision = replace(event, time=0.0)  # it is the same, whenever that was
            if isinstance(decision, FinishEvent):
                if decision.slot is None:  # the end of what never had a slot is told late
                    continue
                decision = replace(decision, error=None)
            if self.breaks_off is not None:
                self.breaks_off = max(self.breaks_off, event.step)
            if event.step > step:
                if found:
                    yield step, found
                step, found = event.step, []
            found.append(decision)
        if found:
            yield step, found

    def close(self) -> KeptRequests:
        for _ in self.decisions():
            pass
        timeline = self._kept.timeline
        if self._until is not None:
            timeline.go_on_to(self._until)
        timeline.close()
        timeline.check_integrity()
        return self._kept


def _before(events: Iterable[Event], until: int) -> Iterator[Event]:
    for event in events:
        if isinstance(event, RunEvent):
            yield event
        elif isinstance(event, StepsEvent):
            if event.step < until:
                columns = [(name, getattr(event, name)) for name in event.__struct_fields__[1:]]
                num_steps = until - event.step
                cut = {name: told[:num_steps] for name, told in columns if told is not None}
                yield replace(event, **cut)
        elif not isinstance(event, EndEvent) and event.step < until:
            yield event


def compare(events_a: Iterable[Event], events_b: Iterable[Event]) -> RunComparison:
    """Compare two runs of one worker; both are read again if one breaks off."""
    readers = RunReader(events_a), RunReader(events_b)
    parted = _first_difference(*readers)
    a, b = (reader.close() for reader in readers)
    breaks_a, breaks_b = (reader.breaks_off for reader in readers)
    until = min((step for step in (breaks_a, breaks_b) if step is not None), default=None)
    if until is not None:
        readers = RunReader(events_a, until), RunReader(events_b, until)
        parted = _first_difference(*readers)
        a, b = (reader.close() for reader in readers)
    parting, involved = None, list[Involved]()
    if parted is not None:
        step, found_a, found_b = parted
        time_a, time_b = (run.timeline.figures.start_of(step) for run in (a, b))
        parting = Parting(step, time_a, time_b, found_a, found_b)
        both = chain.from_iterable(zip_longest(found_a, found_b))
        labels = dict.fromkeys(
            label_of(one.id, 0 if role_of(one) == "beam" else one.index, "sample")
            for one in both
            if one is not None
        )
        for label in [*labels][:MAX_INVOLVED]:
            stories = (
                next((story_of(run.timeline, one) for one in run.all if one.label == label), None)
                for run in (a, b)
            )
            involved.append(Involved(label, *stories))
    named_a, named_b = _by_name(a.all), _by_name(b.all)
    pairs = [(request, named_b[name]) for name, request in named_a.items() if name in named_b]
    ended = [pair for pair in pairs if until is None or all(request.finish for request in pair)]
    only_a, only_b = list[str](), list[str]()
    if until is None:  # or else the other one may not have read them yet
        only_a = [request.label for name, request in named_a.items() if name not in named_b]
        only_b = [request.label for name, request in named_b.items() if name not in named_a]
    changes = []
    for of_a, of_b in ended:
        change = SampleChange(
            of_a.id, of_a.index, figures_of(a.timeline, of_a), figures_of(b.timeline, of_b)
        )
        if change.a != change.b:
            changes.append(change)
    changes.sort(
        key=lambda change: (
            -abs(change.later),
            -abs(change.b.wait_steps - change.a.wait_steps),
            -abs(change.b.preemptions - change.a.preemptions),
        )
    )
    in_a, in_b = dict[str, Any](), dict[str, Any]()
    for told, run in ((in_a, a.timeline.run), (in_b, b.timeline.run)):
        for name, value in asdict(run).items():
            if isinstance(value, dict):
                section = "" if name == "scheduling" else f"{name}."
                told |= {f"{section}{inner}": item for inner, item in value.items()}
            else:
                told[name] = value
    settings = [DifferentSetting(name, in_a.get(name), in_b.get(name)) for name in in_a | in_b]
    return RunComparison(
        settings=[setting for setting in settings if setting.a != setting.b],
        parting=parting,
        involved=involved,
        only_a=only_a,
        only_b=only_b,
        altered=[of_a.label for of_a, of_b in pairs if _asked(of_a) != _asked(of_b)],
        num_compared=len(ended),
        changes=changes,
        totals_a=_totals_of(a.timeline, a.all),
        totals_b=_totals_of(b.timeline, b.all),
        breaks_off_a=breaks_a,
        breaks_off_b=breaks_b,
        is_timed=any(run.timeline.run.step_time for run in (a, b)),
    )


def role_of(decision: Decision) -> Role:
    role: Role = getattr(decision, "role", "sample")  # some kinds have none
    return role


def _first_difference(
    a: RunReader, b: RunReader
) -> tuple[int, list[Decision], list[Decision]] | None:
    """Return the first step that differs, and the decisions that only one run made in it."""
    nothing: tuple[int, list[Decision]] = (-1, [])
    for (step_a, found_a), (step_b, found_b) in zip_longest(
        a.decisions(), b.decisions(), fillvalue=nothing
    ):
        step = min(step for step in (step_a, step_b) if step >= 0)
        in_a = found_a if step_a == step else []
        in_b = found_b if step_b == step else []
        only_a, only_b = _without(in_a, in_b), _without(in_b, in_a)
        if only_a or only_b:
            return step, only_a, only_b
    return None


def _without(decisions: list[Decision], others: list[Decision]) -> list[Decision]:
    num_others = Counter(map(_key_of, others))
    left = []
    for decision in decisions:
        key = _key_of(decision)
        if num_others[key]:
            num_others[key] -= 1
        else:
            left.append(decision)
    return left


def _key_of(decision: Decision) -> bytes:
    """Return a key that equal decisions share; the origin of cached blocks is no decision."""
    if type(decision) is AdmitEvent and decision.cached_from is not None:
        decision = replace(decision, cached_from=None)
    return msgspec.json.encode(decision)  # it may hold a list


def _asked(request: RequestTimeline) -> tuple[float, int, int] | None:
    """Return the part of a request that its arrival shows."""
    arrive = request.arrive
    return None if arrive is None else (arrive.time, arrive.prompt_tokens, arrive.max_tokens)


def _by_name(requests: list[RequestTimeline]) -> dict[tuple[str, int, int], RequestTimeline]:
    seen: Counter[tuple[str, int]] = Counter()
    named: dict[tuple[str, int, int], RequestTimeline] = {}
    for request in requests:
        named[request.id, request.index, seen[request.id, request.index]] = request
        seen[request.id, request.index] += 1
    return named


def figures_of(timeline: Timeline, request: RequestTimeline) -> RequestFigures:
    steps, end_of = request.steps(timeline.num_steps), timeline.figures.end_of
    arrive, finish, admissions = request.arrive, request.finish, request.admissions
    lost = [admission.preempt for admission in admissions if admission.preempt is not None]
    ends = [*(preempt.step for preempt in lost), request.end(timeline.num_steps)]
    in_slots = sum(
        until - admission.event.step for until, admission in zip(ends, admissions, strict=False)
    )
    latency = ttft = None
    has_ended, first = finish is not None and arrive is not None, request.first_token
    if arrive is not None and has_ended and request.admission is not None:
        latency = round(end_of(steps.stop - 1) - arrive.time, NUM_DIGITS)
    has_failed = finish is not None and finish.reason == "error" and not finish.tokens
    if arrive is not None and first is not None and arrive.max_tokens and not has_failed:
        ttft = round(end_of(first) - arrive.time, NUM_DIGITS)
    return RequestFigures(
        admitted=admissions[0].event.step if admissions else None,
        latency_steps=len(steps) if has_ended else None,
        latency=latency,
        wait_steps=len(steps) - in_slots if steps else 0,
        preemptions=len(lost),
        recomputed=sum(preempt.tokens for preempt in lost),
        cached=sum(admission.event.cached for admission in admissions),
        outcome=None if finish is None else finish.reason,
        tokens=0 if finish is None else finish.tokens,
        drafted=sum(admission.num_drafted for admission in admissions),
        accepted=sum(admission.num_accepted for admission in admissions),
        ttft=ttft,
    )


def _totals_of(timeline: Timeline, requests: list[RequestTimeline]) -> RunFigures:
    figures = [figures_of(timeline, request) for request in requests]
    ended = [found for found in figures if found.latency is not None]
    num_ended, num_steps = max(1, len(ended)), timeline.num_steps
    names = ("tokens", "preemptions", "recomputed", "cached", "drafted", "accepted")
    sums = {name: sum(getattr(found, name) for found in figures) for name in names}
    spreads: dict[str, Any] = {}
    for name in ("ttft", "tpot", "e2e"):
        histogram = SecondsHistogram()
        for found in figures:
            if (seconds := getattr(found, name)) is not None:
                histogram.add(seconds)
        spreads[name] = histogram.distribution()
    return RunFigures(
        steps=num_steps,
        time=round(timeline.figures.end_of(num_steps - 1), NUM_DIGITS) if num_steps else 0.0,
        ended=sum(found.outcome is not None for found in figures),
        latency=round(sum(found.latency or 0.0 for found in ended) / num_ended, NUM_DIGITS),
        wait_steps=round(sum(found.wait_steps for found in ended) / num_ended, NUM_DIGITS),
        **sums,
        **spreads,
    )
