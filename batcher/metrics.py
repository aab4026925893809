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
    EndEvent,
    Event,
    FinishEvent,
    RejectEvent,
    RunEvent,
)

KEPT_BITS = 12
EXACT_BELOW = 2**KEPT_BITS


class Distribution(Struct, frozen=True):
    """How a number of steps is distributed over requests; percentiles are by nearest rank.

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
    """Slot-steps without a request, by what would have filled them.

    tail: nothing, no later request needed a slot.  arrivals: the next one had its arrival time
    still to come.  empty_queue: the next one had not been sent yet.
    """

    tail: int
    arrivals: int
    empty_queue: int


class RunSummary(Struct, frozen=True, kw_only=True):
    """Every number of a run; times are steps, shares are of 1 with six digits, means have three.

    requests = ok + failed + aborted + unfinished.  `rejected` are those of the failed that were
    not valid requests.  wait: steps from arrival to admission, 0 for a request admitted in the step
    it arrived.  first_token, latency: steps from arrival up to and including the one that gave the
    first and the last token; latency is of ok requests that held a slot.  least_steps: what any
    schedule needs for these outputs, whenever they arrive.
    """

    requests: int
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
        self.sum = self.max = 0
        self.counts: defaultdict[int, int] = defaultdict(int)

    def add(self, value: int) -> None:
        """Count `value`."""
        self.sum += value
        if value > self.max:  # noqa: PLR1730 - max() takes twice as long, three times a request
            self.max = value
        if value >= EXACT_BELOW:
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
        mean = round(self.sum / count, 3)
        p50, p90, p95, p99 = self.percentiles((50, 90, 95, 99))
        return Distribution(count, mean, p50, p90, p95, p99, self.max)


class RunMetrics:
    """Takes in events, live or from a trace, and has the summary of them at any time."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.prompt_tokens = self.generated_tokens = self.longest_output = 0
        self.num_rejected = 0
        self.finish_reasons: Counter[str] = Counter()
        self.wait, self.first_token, self.latency = Histogram(), Histogram(), Histogram()
        self.slots = _SlotUse()
        self._arrivals: dict[int, ArriveEvent] = {}  # by request index, as is the next
        self._admit_steps: dict[int, int] = {}

    def observe(self, event: Event) -> None:
        """Take in the next event of the run."""
        if type(event) is ArriveEvent:  # isinstance() takes longer, up to three times a request
            self._arrivals[event.index] = event
            self.prompt_tokens += event.prompt_tokens
        elif type(event) is AdmitEvent:
            self._admit(event)
        elif type(event) is FinishEvent:
            self._finish(event)
        elif isinstance(event, RejectEvent):
            self.num_rejected += 1
        elif isinstance(event, RunEvent):
            self.slots.num_slots = event.batch
        elif isinstance(event, EndEvent):
            self.num_steps = event.steps

    def summary(self, num_steps: int = 0) -> RunSummary:
        """Return the numbers so far.

        `num_steps` is how many steps were taken, which the events of a run that is broken off may
        not tell.
        """
        reasons = self.finish_reasons
        steps = max(self.num_steps, num_steps)
        batch, tokens = self.slots.num_slots, self.generated_tokens
        busy, idle = self.slots.totals(steps)
        num_ok = reasons["stop"] + reasons["length"]
        num_failed = reasons["error"] + self.num_rejected
        num_unfinished = len(self._arrivals)
        return RunSummary(
            requests=num_ok + num_failed + reasons["aborted"] + num_unfinished,
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
            least_steps=max(-(-tokens // batch), self.longest_output) if tokens else 0,
            tokens_per_step=round(tokens / steps, 3) if steps else 0.0,
            busy_slot_steps=busy,
            idle_slot_steps=steps * batch - busy,
            busy_share=round(busy / (steps * batch), 6) if steps else 0.0,
            idle=idle,
            wait=self.wait.distribution(),
            first_token=self.first_token.distribution(),
            latency=self.latency.distribution(),
        )

    def _admit(self, event: AdmitEvent) -> None:
        arrive = self._arrivals[event.index]
        self.slots.take(event.step, arrive.reason)
        self.wait.add(event.step - arrive.step)
        self._admit_steps[event.index] = event.step
        self.num_steps = event.step + 1

    def _finish(self, event: FinishEvent) -> None:
        self.finish_reasons[event.reason] += 1
        arrive = self._arrivals.pop(event.index, None)  # None: aborted before it arrived
        if event.slot is None or arrive is None:
            return
        end = event.step + 1
        admit_step = self._admit_steps.pop(event.index)
        self.slots.leave(end)
        if end > self.num_steps:  # noqa: PLR1730 - as in Histogram.add
            self.num_steps = end
        self.generated_tokens += event.tokens
        if event.tokens:
            if event.tokens > self.longest_output:  # noqa: PLR1730 - as in Histogram.add
                self.longest_output = event.tokens
            self.first_token.add(admit_step + 1 - arrive.step)
        if event.reason in {"stop", "length"}:
            self.latency.add(end - arrive.step)


class _SlotUse:
    """Busy and idle slot-steps, integrated from one event to the next.

    A slot is idle only when every request that arrived has been admitted, so the next one admitted
    is the one the idle slots were waiting for; until it is known they are undecided.
    """

    def __init__(self) -> None:
        self.num_slots = self.num_occupied = 0
        self.integrated_steps = 0
        self.busy = self.undecided = 0
        self.idle: Counter[ArriveReason] = Counter()

    def take(self, step: int, reason: ArriveReason) -> None:
        """Occupy a slot from `step` on, with a request that arrived for `reason`."""
        if step != self.integrated_steps:
            self._integrate(step)
        if self.undecided:
            self.idle[reason] += self.undecided
            self.undecided = 0
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
        tail = self.undecided + (self.num_slots - self.num_occupied) * steps_since
        return busy, IdleCauses(tail, self.idle["input"], self.idle["follow"])

    def _integrate(self, step: int) -> None:
        """Add up the steps before `step`, in which nothing has changed since the last event."""
        elapsed = step - self.integrated_steps
        self.busy += self.num_occupied * elapsed
        self.undecided += (self.num_slots - self.num_occupied) * elapsed
        self.integrated_steps = step
