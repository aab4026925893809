"""The numbers of a run, folded from its events alone as they happen.

Rule: memory grows with the requests that are in the engine at once, never with all there were.
"""

from collections import Counter, defaultdict

import msgspec
from msgspec import Struct

from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    ArriveReason,
    DropEvent,
    EndEvent,
    Event,
    FinishEvent,
    ForkEvent,
    JumpEvent,
    RejectEvent,
    RunEvent,
)
from batcher.stays import SequenceKey, is_follower, key_of

KEPT_BITS = 12
EXACT_BELOW = 2**KEPT_BITS


class Distribution(Struct, frozen=True):
    """How a number of steps is distributed over samples; percentiles are by nearest rank.

    Percentiles are exact below 4,096 and at most 0.05 % low above.
    """

    count: int
    mean: float
    p50: int
    p90: int
    p95: int
    p99: int
    max: int


class FinishCounts(Struct, frozen=True):
    """How many results there are of each finish reason; rejected lines count as errors."""

    stop: int
    length: int
    error: int
    aborted: int


class IdleCauses(Struct, frozen=True):
    """Slot-steps without a sequence, by what would have filled them.

    tail: nothing, no later request needed a slot.  arrivals: the next one had its arrival time
    still to come.  empty_queue: the next one had not been sent yet.  too_few: the next one waited
    for more slots at once than were free.
    """

    tail: int
    arrivals: int
    empty_queue: int
    too_few: int


class ConstraintCounts(Struct, frozen=True):
    """How many grammars were compiled, and how often one was there already."""

    compiled: int
    cache_hits: int


class RunSummary(Struct, frozen=True, kw_only=True):
    """Every number of a run; times are steps, shares are of 1 with six digits, means have three.

    outputs = ok + failed + aborted + unfinished: a request has one for each result it gets, or is
    one while its beams run.  `rejected` are those of the failed that were not valid requests.
    prompt_tokens: of each request once.  wait: steps from arrival to admission, 0 for a sample
    admitted in the step it arrived.  first_token, latency: steps from arrival up to and including
    the one that gave the first and the last token; latency is of ok ones that held a slot.  All
    beams of a request are one in these.  least_steps: what any schedule needs for these outputs,
    whenever they arrive.  jumps, jumped_tokens: how often a constraint forced tokens, and how many.
    """

    requests: int
    outputs: int
    ok: int
    failed: int
    rejected: int
    aborted: int
    unfinished: int
    finish_reasons: FinishCounts
    prompt_tokens: int
    generated_tokens: int
    longest_output: int
    batch: int
    steps: int
    least_steps: int
    tokens_per_step: float
    busy_slot_steps: int
    idle_slot_steps: int
    busy_share: float
    idle: IdleCauses
    jumps: int
    jumped_tokens: int
    forks: int
    constraints: ConstraintCounts
    wait: Distribution | None
    first_token: Distribution | None
    latency: Distribution | None


def encode_summary(summary: RunSummary) -> bytes:
    """Return `summary` as indented JSON, newline included; equal runs give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"


class Histogram:
    """Counts of whole numbers >= 0 in at most 2,048 buckets for each doubling.

    Buckets as in HdrHistogram (Tene): a number of more than 12 bits is known by its first 12.
    """

    def __init__(self) -> None:
        self.counts: defaultdict[int, int] = defaultdict(int)
        self.sum_inexact = self.max_inexact = 0  # of the numbers that are not counted as they are

    def add(self, value: int) -> None:
        """Count `value`; called three times a request, so it does little."""
        if value >= EXACT_BELOW:
            self.sum_inexact += value
            if value > self.max_inexact:  # noqa: PLR1730 - max() takes twice as long
                self.max_inexact = value
            dropped_bits = value.bit_length() - KEPT_BITS
            value = value >> dropped_bits << dropped_bits
        self.counts[value] += 1

    def percentiles(self, percents: tuple[int, ...]) -> list[int]:
        """Return for each of `percents`, ascending, the least number that so many do not exceed."""
        found: list[int] = []
        seen, total = 0, sum(self.counts.values())
        for value, count in sorted(self.counts.items()):
            seen += count
            while len(found) < len(percents) and seen * 100 >= percents[len(found)] * total:
                found.append(value)
        return found

    def distribution(self) -> Distribution | None:
        """Return what was counted in short, None for nothing."""
        count = sum(self.counts.values())
        if not count:
            return None
        exact = (value * count for value, count in self.counts.items() if value < EXACT_BELOW)
        mean = round((self.sum_inexact + sum(exact)) / count, 3)
        p50, p90, p95, p99 = self.percentiles((50, 90, 95, 99))
        largest = self.max_inexact or max(self.counts)
        return Distribution(count, mean, p50, p90, p95, p99, largest)


class RunMetrics:
    """Takes in events, live or from a trace, and has the summary of them at any time."""

    def __init__(self) -> None:
        self.num_steps = self.num_requests = self.num_rejected = 0
        self.prompt_tokens = self.generated_tokens = 0
        self.longest_output = self.longest_stay = 0
        self.num_jumps = self.num_jumped_tokens = self.num_forks = 0
        self.constraints = ConstraintCounts(0, 0)
        self.finish_reasons: Counter[str] = Counter()
        self.wait, self.first_token, self.latency = Histogram(), Histogram(), Histogram()
        self.slots = _SlotUse()
        self._arrivals: dict[SequenceKey, ArriveEvent] = {}
        self._admit_steps: dict[SequenceKey, int] = {}  # of those that have an arrival

    def observe(self, event: Event) -> None:
        """Take in the next event of the run."""
        if type(event) is ArriveEvent:  # isinstance() takes longer, up to three times a request
            if event.index:
                self._arrivals[key_of(event.id, event.index, "sample")] = event
            else:
                self._arrivals[event.id] = event
                self.num_requests += 1
                self.prompt_tokens += event.prompt_tokens
        elif type(event) is AdmitEvent:
            self._admit(event)
        elif type(event) is FinishEvent:
            self._finish(event)
        elif isinstance(event, RunEvent):
            self.slots.num_slots = event.batch
        elif isinstance(event, EndEvent):
            self.num_steps = event.steps
        else:
            self._count(event)

    def _count(self, event: Event) -> None:
        """Take in an event of a kind that is rare."""
        if isinstance(event, JumpEvent):
            self.num_jumps += 1
            self.num_jumped_tokens += event.tokens
        elif isinstance(event, ForkEvent):
            self.num_forks += 1
        elif isinstance(event, DropEvent):
            self.finish_reasons[event.reason] -= 1
        elif isinstance(event, RejectEvent):
            self.num_rejected += 1

    def note_constraints(self, compiled: int, cache_hits: int) -> None:
        """Take note of the grammars of the whole run so far, which no event tells of."""
        self.constraints = ConstraintCounts(compiled, cache_hits)

    def summary(self, num_steps: int = 0) -> RunSummary:
        """Return the numbers so far.

        `num_steps` is how many steps were taken, which the events of a run that is broken off may
        not tell.
        """
        reasons = self.finish_reasons
        steps = max(self.num_steps, self.slots.integrated_steps, num_steps)
        batch, tokens = self.slots.num_slots, self.generated_tokens
        busy, idle = self.slots.totals(steps)
        num_ok = reasons["stop"] + reasons["length"]
        num_failed = reasons["error"] + self.num_rejected
        num_unfinished = len(self._arrivals)
        return RunSummary(
            requests=self.num_requests + self.num_rejected,
            outputs=num_ok + num_failed + reasons["aborted"] + num_unfinished,
            ok=num_ok,
            failed=num_failed,
            rejected=self.num_rejected,
            aborted=reasons["aborted"],
            unfinished=num_unfinished,
            finish_reasons=FinishCounts(
                reasons["stop"], reasons["length"], num_failed, reasons["aborted"]
            ),
            prompt_tokens=self.prompt_tokens,
            generated_tokens=tokens,
            longest_output=self.longest_output,
            batch=batch,
            steps=steps,
            least_steps=max(-(-busy // batch), self.longest_stay) if busy else 0,
            tokens_per_step=round(tokens / steps, 3) if steps else 0.0,
            busy_slot_steps=busy,
            idle_slot_steps=steps * batch - busy,
            busy_share=round(busy / (steps * batch), 6) if steps else 0.0,
            idle=idle,
            jumps=self.num_jumps,
            jumped_tokens=self.num_jumped_tokens,
            forks=self.num_forks,
            constraints=self.constraints,
            wait=self.wait.distribution(),
            first_token=self.first_token.distribution(),
            latency=self.latency.distribution(),
        )

    def _admit(self, event: AdmitEvent) -> None:
        key: SequenceKey = event.id
        if event.index or event.role != "sample":
            if is_follower(event):
                self.slots.join(event.step)
                return
            key = key_of(event.id, event.index, event.role)
        arrive = self._arrivals[key]
        self.slots.take(event.step, arrive)
        self.wait.add(event.step - arrive.step)
        self._admit_steps[key] = event.step
        self.num_steps = event.step + 1

    def _finish(self, event: FinishEvent) -> None:
        self.finish_reasons[event.reason] += 1  # of "unused" nothing is said
        if event.slot is not None:
            self.slots.leave(event.step + 1)
            self.generated_tokens += event.tokens
            if event.tokens > self.longest_output:  # noqa: PLR1730 - as in Histogram.add
                self.longest_output = event.tokens
        key: SequenceKey = event.id
        if event.index or event.role != "sample":
            if is_follower(event):
                return
            key = key_of(event.id, event.index, event.role)
        arrive = self._arrivals.pop(key, None)
        if arrive is None:  # aborted before it arrived
            self.num_requests += event.index == 0
        elif event.slot is not None:
            admit_step = self._admit_steps.pop(key)
            end = event.step + 1
            if end - admit_step > self.longest_stay:  # noqa: PLR1730 - max() takes twice as long
                self.longest_stay = end - admit_step
            if event.tokens:
                self.first_token.add(admit_step + 1 - arrive.step)
            if event.reason in {"stop", "length"}:
                self.latency.add(end - arrive.step)


class _SlotUse:
    """Busy and idle slot-steps, integrated from one event to the next.

    Which request the idle slots were waiting for is known when the next one is admitted: until then
    they are undecided.
    """

    def __init__(self) -> None:
        self.num_slots = self.num_occupied = 0
        self.integrated_steps = 0
        self.busy = self.num_too_few = 0
        self.idle: Counter[ArriveReason] = Counter()
        self.undecided: list[tuple[int, int, int]] = []  # (start, end, idle slots), of all steps

    def take(self, step: int, arrive: ArriveEvent) -> None:
        """Occupy a slot from `step` on, with a request that arrived as `arrive` says."""
        if step != self.integrated_steps:
            self._integrate(step)
        if self.undecided:
            self._decide(arrive)
        self.num_occupied += 1

    def join(self, step: int) -> None:
        """Occupy a slot from `step` on, with a sequence that comes along with its leader."""
        if step != self.integrated_steps:
            self._integrate(step)
        self.num_occupied += 1

    def leave(self, step: int) -> None:
        """Free a slot from `step` on."""
        if step != self.integrated_steps:
            self._integrate(step)
        self.num_occupied -= 1

    def totals(self, num_steps: int) -> tuple[int, IdleCauses]:
        """Return the busy slot-steps of a run of `num_steps`, and the idle ones by cause."""
        steps_since = num_steps - self.integrated_steps
        busy = self.busy + self.num_occupied * steps_since
        tail = (self.num_slots - self.num_occupied) * steps_since
        tail += sum((end - start) * num_idle for start, end, num_idle in self.undecided)
        return busy, IdleCauses(tail, self.idle["input"], self.idle["follow"], self.num_too_few)

    def _integrate(self, step: int) -> None:
        """Add up the steps before `step`, in which nothing has changed since the last event."""
        start, self.integrated_steps = self.integrated_steps, step
        self.busy += self.num_occupied * (step - start)
        if self.num_occupied < self.num_slots:
            self.undecided.append((start, step, self.num_slots - self.num_occupied))

    def _decide(self, arrive: ArriveEvent) -> None:
        """Say why slots were idle: first the request had not arrived, then it needed more slots."""
        for start, end, num_idle in self.undecided:
            arrived = min(max(start, arrive.step), end)
            self.idle[arrive.reason] += (arrived - start) * num_idle
            self.num_too_few += (end - arrived) * num_idle
        self.undecided.clear()
