"""Distributions, whole steps, latencies, and a run as a time series.

A step belongs to the interval in which it ended, its end included.  An interval in which nothing
began or ended has no row.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from math import ceil
from typing import ClassVar, NamedTuple, get_args

from msgspec import Struct, field

from batcher.errors import BatchdecodeError
from batcher.events import (
    AcceptEvent,
    AdmitEvent,
    ArriveEvent,
    DraftEvent,
    EndEvent,
    Event,
    FinishEvent,
    JumpEvent,
    PreemptEvent,
    PrefillEvent,
    ReceiveEvent,
    RunEvent,
    SequenceEvent,
    StepsEvent,
)
from batcher.settings import DEFAULT_SCHEDULING
from batcher.trace.run import RequestTimeline, Totals, is_follower

# Distributions: whole numbers counted in bounded memory; seconds in whole microseconds.

KEPT_BITS = 12
EXACT_BELOW = 2**KEPT_BITS
PERCENTS = (50, 90, 95, 99)
MICROSECONDS = 10**6  # per second
NUM_DIGITS = 6  # of shares and seconds, after the point


class Distribution(Struct, frozen=True):
    """The distribution of steps, or of times in seconds; percentiles by nearest rank.

    Steps are exact below 4,096, times to a microsecond.  Percentiles above are at most 0.05% low.
    A percentile of times is always one of the times.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def microseconds(seconds: float) -> int:
    return round(seconds * MICROSECONDS)


def share_of(part: float, whole: float) -> float:
    return round(part / whole, NUM_DIGITS) if whole else 0.0


class Histogram(Totals):
    """Counts of whole numbers >= 0, in buckets by their first 12 bits, as in HdrHistogram (Tene).

    counts: by the least number of a bucket.  sum_inexact, max_inexact: of numbers of over 12 bits.
    """

    LARGEST: ClassVar = frozenset({"max_inexact"})

    counts: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    sum_inexact: int = 0
    max_inexact: int = 0

    def add(self, value: int, count: int = 1) -> None:
        """Count `value` `count` times; called three times per request, so it does little."""
        if value >= EXACT_BELOW:
            self.sum_inexact += value * count
            if value > self.max_inexact:  # noqa: PLR1730 - max() takes twice as long
                self.max_inexact = value
            value = bucket_of(value)
        self.counts[value] += count

    def percentiles(self, percents: tuple[int, ...]) -> list[int]:
        """Return the least number at or below which each of `percents`, ascending, lies."""
        found: list[int] = []
        seen, total = 0, self.count
        for value, count in sorted(self.counts.items()):
            seen += count
            while len(found) < len(percents) and seen * 100 >= percents[len(found)] * total:
                found.append(value)
        return found

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    @property
    def sum(self) -> int:
        exact = (value * count for value, count in self.counts.items() if value < EXACT_BELOW)
        return self.sum_inexact + sum(exact)

    @property
    def max(self) -> int:
        return self.max_inexact or max(self.counts)

    def distribution(self) -> Distribution | None:
        if not (count := self.count):
            return None
        mean = round(self.sum / count, 3)
        p50, p90, p95, p99 = self.percentiles(PERCENTS)
        return Distribution(count, mean, p50, p90, p95, p99, self.max)


class SecondsHistogram(Histogram):
    """Counts of times in microseconds; least: the least time in each inexact bucket."""

    LEAST: ClassVar = frozenset({"least"})

    least: dict[int, int] = field(default_factory=dict)

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a time `count` times; a negative one, which rounding can make, is 0."""
        value = max(0, microseconds(seconds))
        super().add(value, count)
        if value >= EXACT_BELOW:
            bucket = bucket_of(value)
            self.least[bucket] = min(value, self.least.get(bucket, value))

    def distribution(self) -> Distribution | None:
        if not (count := self.count):
            return None
        percentiles = [self.least.get(bucket, bucket) for bucket in self.percentiles(PERCENTS)]
        return seconds_distribution(count, self.sum / count, percentiles, self.max)


def bucket_of(value: int) -> int:
    """Return the least number of the bucket of `value`, which is at least EXACT_BELOW."""
    dropped_bits = value.bit_length() - KEPT_BITS
    return value >> dropped_bits << dropped_bits


def seconds_distribution(
    count: int, mean: float, percentiles: list[int], largest: int
) -> Distribution:
    seconds = [value / MICROSECONDS for value in (*percentiles, largest)]
    return Distribution(count, round(mean / MICROSECONDS, NUM_DIGITS), *seconds)


# Steps, in order, each with its start, its end and its events once all of these are known.

UNTIMED_STEP_SECONDS = 1.0

EventOfRequest = tuple[SequenceEvent, RequestTimeline]
SEQUENCE_EVENTS = get_args(SequenceEvent)


class WholeStep(NamedTuple):
    """A finished step; start, end: seconds of the engine's clock.

    decodes ... drafts: as in a StepsEvent.  In an untimed run blocks and paddings are 0.  events:
    each with its sequence.  An event that came late, an abort between two steps, has a smaller
    `step`.
    """

    step: int
    start: float
    end: float
    decodes: int
    prefills: int
    blocks: int
    prefill_padding: int
    decode_padding: int
    drafts: int
    events: list[EventOfRequest]


_COUNTS = WholeStep._fields[3:-2]  # lists of the same names in a StepsEvent


def is_untimed(run: RunEvent) -> bool:
    """Return whether every step lasts 1.0 and computes all it can, so the trace omits the steps."""
    return not run.step_time and not run.scheduling and run.policy == DEFAULT_SCHEDULING.policy


class StepFeed:
    """Turns events into whole steps.  A step is whole once a later event is known.

    An untimed run has no steps events: each step lasts 1.0 and advances every row.
    """

    def __init__(self, run: RunEvent) -> None:
        self._is_untimed = is_untimed(run)
        self._events: deque[EventOfRequest] = deque()  # of the steps that are not whole
        self._steps: deque[WholeStep] = deque()  # still without their events and starts
        self._num_steps, self._end = 0, 0.0  # the whole steps, and the end of the last one
        self._num_rows = 0  # after it, in an untimed run

    def take(self, event: Event, found: RequestTimeline | None) -> Iterator[WholeStep]:
        """Add the next event of request `found`; yield the steps it completes."""
        if isinstance(event, SEQUENCE_EVENTS) and found is not None:
            is_end = isinstance(event, FinishEvent)
            may_be_early = isinstance(event, ArriveEvent) or (is_end and event.slot is None)
            if not (self._is_untimed and may_be_early):
                yield from self.catch_up(event.step)
                if self._is_untimed and event.step == self._num_steps and not is_end:
                    self._end = max(self._end, event.time)
            self._events.append((event, found))
        elif isinstance(event, StepsEvent) and not self._is_untimed:
            counts = [getattr(event, name) for name in _COUNTS]
            counts.append([0] * len(event.ends) if event.drafts is None else event.drafts)
            if {len(column) for column in counts} != {len(event.ends)}:
                raise BatchdecodeError(
                    f"the steps event of step {event.step}: its lists differ in length"
                )
            for step, (end, *of_step) in enumerate(
                zip(event.ends, *counts, strict=True), event.step
            ):
                self._steps.append(WholeStep._make((step, end, end, *of_step, [])))
            yield from self.catch_up(event.step + len(event.ends) - 1)
        elif isinstance(event, EndEvent):
            yield from self.catch_up(event.steps)

    def start_at(self, step: int, time: float) -> None:
        """Let the first step be `step`, which starts at `time`; call it before any event."""
        self._num_steps, self._end = step, time

    def catch_up(self, num_steps: int) -> Iterator[WholeStep]:
        """Yield the known steps before `num_steps`, which have no more events to come."""
        while self._is_untimed and self._num_steps < num_steps:
            yield self._untimed_step()
        while self._steps and self._steps[0].step < num_steps:
            step = self._steps.popleft()
            events = self.take_events(step.step)
            # It starts later than the last one ended if the clock jumped to its first admission.
            admitted = (e.time for e, _ in events if type(e) is AdmitEvent and e.step == step.step)
            start = max(self._end, next(admitted, self._end))
            self._end = step.end
            yield step._replace(start=start, events=events)

    def take_events(self, last_step: int | None = None) -> list[EventOfRequest]:
        """Remove and return the events up to those of `last_step`; without it, all."""
        events, taken = self._events, []
        while events and (last_step is None or events[0][0].step <= last_step):
            taken.append(events.popleft())
        return taken

    def _untimed_step(self) -> WholeStep:
        step, start = self._num_steps, self._end
        events = self.take_events(step)
        num_prefills = num_admitted = num_gone = num_late = num_drafts = 0
        for event, found in events:
            if isinstance(event, AdmitEvent):
                num_admitted += 1
                num_prefills += 0 if found.arrive is None else found.arrive.prompt_tokens
            elif isinstance(event, DraftEvent):
                num_drafts += event.tokens
            elif isinstance(event, FinishEvent) and event.slot is not None:
                num_late += event.step < step
                num_gone += event.step >= step
        num_decodes = self._num_rows - num_late
        self._num_rows = num_decodes + num_admitted - num_gone
        self._num_steps, self._end = step + 1, start + UNTIMED_STEP_SECONDS
        counts = (num_decodes, num_prefills + num_drafts, 0, 0, 0, num_drafts)
        return WholeStep(step, start, self._end, *counts, events)


# Latencies as docs/reference/metrics.md defines them.  Rows that decode together share the gaps
# between their tokens, so a gap is counted once for all of them: no work per row and step.


class Latencies(Struct, frozen=True, kw_only=True):
    """Latencies of requests in seconds; None without data."""

    queue: Distribution | None
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None


class EndedRequest(NamedTuple):
    """A finished sample, or all beams of a request; queue, ttft: None if it had none."""

    finish: FinishEvent
    arrive: ArriveEvent
    end: float
    queue: float | None
    ttft: float | None

    @property
    def is_ok(self) -> bool:
        return self.finish.reason in {"stop", "length"} and self.ttft is not None

    @property
    def e2e(self) -> float:
        return self.end - self.arrive.time

    @property
    def tpot(self) -> float | None:
        """The mean time per token after the first; None without one."""
        num_tokens = self.finish.tokens
        if self.ttft is None or num_tokens < 2:  # noqa: PLR2004 - the first, and one more
            return None
        return (self.e2e - self.ttft) / (num_tokens - 1)


class TokenTimes:
    """Tracks the token times of all sequences. times: a histogram per field of Latencies."""

    def __init__(self) -> None:
        self.times = {name: SecondsHistogram() for name in Latencies.__struct_fields__}
        self._last_advance = 0.0  # the end of the last step with decoding rows
        self._decoding: dict[float, int] = {}  # decoding rows, by the time of their last token

    def observe(self, step: WholeStep) -> tuple[tuple[int, int, float], list[EndedRequest]]:
        """Add a step; return (tokens, first tokens, sum of their TTFTs), and the ended requests."""
        ended, itl, end = self.interrupt(step.events, step), self.times["itl"], step.end
        num_tokens = num_first = 0
        sum_ttft = 0.0
        if step.decodes:  # every decoding row gets a token at once
            for last, num_rows in self._decoding.items():
                itl.add(end - last, num_rows)
                num_tokens += num_rows
            self._decoding = {end: num_tokens} if num_tokens else {}
            self._last_advance = end
        for event, found in step.events:
            if isinstance(event, JumpEvent | AcceptEvent):
                itl.add(0, event.tokens)
                num_tokens += event.tokens
                continue
            arrive = found.arrive
            if arrive is None or found.ended is not None:
                continue
            if isinstance(event, FinishEvent):
                ended.append(self._end(event, found, arrive, end))
            elif isinstance(event, AdmitEvent | PrefillEvent | ReceiveEvent) and arrive.max_tokens:
                num = event.tokens if isinstance(event, ReceiveEvent) else int(not event.left)
                if not num:
                    continue  # part of its prompt only
                num_tokens += num
                if found.ttft is None:
                    found.ttft = end - arrive.time
                    self.times["ttft"].add(found.ttft)
                    num_first += 1
                    sum_ttft += found.ttft
                else:
                    itl.add(end - found.last_token)
                found.last_token = end
                if isinstance(event, ReceiveEvent):
                    itl.add(0, num - 1)
                else:
                    found.is_decoding = True
                    self._decoding[end] = self._decoding.get(end, 0) + 1
        return (num_tokens, num_first, sum_ttft), ended

    def interrupt(
        self, events: list[EventOfRequest], step: WholeStep | None = None
    ) -> list[EndedRequest]:
        """Handle the events before the rows of `step`, or after the last step.

        Return the requests that these events end.
        """
        ended: list[EndedRequest] = []
        for event, found in events:
            arrive = found.arrive
            if arrive is None or found.ended is not None:
                continue
            if isinstance(event, AdmitEvent):
                if found.queue is None:
                    found.queue = event.time - arrive.time
                    self.times["queue"].add(found.queue)
            elif isinstance(event, PrefillEvent | PreemptEvent):
                self._stop(found)
            elif isinstance(event, FinishEvent):
                is_before = step is None or event.step < step.step
                if not is_before and event.reason == "error":  # unless a server sent some tokens
                    admission = found.admission
                    is_before = admission is None or admission.num_received is None
                if is_before:
                    end = event.time if step is None else step.end
                    ended.append(self._end(event, found, arrive, end))
        return ended

    def _stop(self, found: RequestTimeline) -> None:
        if found.is_decoding:
            last = found.last_token = max(found.last_token, self._last_advance)
            found.is_decoding = False
            self._decoding[last] -= 1
            if not self._decoding[last]:
                del self._decoding[last]

    def _end(
        self, event: FinishEvent, found: RequestTimeline, arrive: ArriveEvent, end: float
    ) -> EndedRequest:
        self._stop(found)
        found.ended = end
        ended = EndedRequest(event, arrive, end, found.queue, found.ttft)
        if ended.is_ok:
            self.times["e2e"].add(ended.e2e)
            if ended.tpot is not None:
                self.times["tpot"].add(ended.tpot)
        return ended


# The time series.

FIRST_INTERVAL = 1.0  # seconds, if none is given
MAX_ROWS = 1000  # without a given interval, it is doubled beyond this


class SeriesRow(Totals):
    """An interval that ends at `time`, in seconds; None without data.

    While it is counted, running and waiting are changes.  num_first, sum_ttft: for ttft_mean, and
    not columns.
    """

    LARGEST: ClassVar = frozenset({"blocks"})

    time: float = 0.0
    steps: int = 0
    running: int = 0
    waiting: int = 0
    blocks: int = 0
    kv_share: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    tokens_per_s: float = 0.0
    arrived: int = 0
    admitted: int = 0
    finished: int = 0
    preemptions: int = 0
    ttft_mean: float | None = None
    drafted: int = 0
    accepted: int = 0
    num_first: int = 0
    sum_ttft: float = 0.0


COLUMNS = SeriesRow.__struct_fields__[:-2]


class TimeSeries:
    """Turns whole steps into rows, as soon as no later event can change them.

    interval: seconds.  None: one second, doubled whenever there are over a thousand rows, and all
    rows come at the end.  Otherwise a row is kept until its `waiting` is known: a request is read
    only when a slot may be free.  total_blocks: None without a limit.
    """

    def __init__(self, interval: float | None = None) -> None:
        self.total_blocks: int | None = None
        self.has_drafts = False
        self.interval = FIRST_INTERVAL if interval is None else interval
        self._is_fixed = interval is not None
        self._rows = defaultdict[int, SeriesRow](SeriesRow)  # by the number of their interval
        self._first_open = 0  # the first interval that is not done
        self._num_running = self._num_waiting = 0  # at the end of the last done interval
        self._known_arrivals = self._known_steps = 0.0  # times up to which all is known
        self._done: list[SeriesRow] = []

    @property
    def columns(self) -> tuple[str, ...]:
        return COLUMNS if self.has_drafts else COLUMNS[:-2]

    def rows(self) -> list[SeriesRow]:
        rows, self._done = self._done, []
        return rows

    def finish(self) -> list[SeriesRow]:
        self._close_before(None)
        return self.rows()

    def take(self, step: WholeStep, tokens: tuple[int, int, float]) -> None:
        num_tokens, num_first, sum_ttft = tokens  # as TokenTimes.observe returns them
        for event, found in step.events:
            self._count(event, found, step)
        row = self._row(step.end)
        row.steps += 1
        row.blocks = max(row.blocks, step.blocks)
        row.prompt_tokens += step.prefills - step.drafts
        row.drafted += step.drafts
        row.output_tokens += num_tokens
        row.num_first += num_first
        row.sum_ttft += sum_ttft
        self._known_steps = step.end
        if self._is_fixed:
            known = min(self._known_arrivals, self._known_steps)
            self._close_before(ceil(known / self.interval) - 1)
        elif len(self._rows) > MAX_ROWS:
            self.double_interval()

    def take_rest(self, events: list[EventOfRequest]) -> None:
        for event, found in events:
            self._count(event, found, None)

    def double_interval(self) -> None:
        rows, self._rows = self._rows, defaultdict(SeriesRow)
        self.interval *= 2
        for number, row in sorted(rows.items()):
            self._rows[number // 2].merge(row)

    def _count(self, event: SequenceEvent, found: RequestTimeline, step: WholeStep | None) -> None:
        """Count an event of `step`, or after the last step."""
        is_first = not is_follower(found)
        if isinstance(event, ArriveEvent):
            row = self._row(event.time)
            row.arrived += 1
            row.waiting += 1
            self._known_arrivals = max(self._known_arrivals, event.time)
        elif isinstance(event, AdmitEvent):  # only sequences that arrived were waiting
            row = self._row(event.time)
            row.running += 1
            row.admitted += is_first
            row.waiting -= is_first
        elif isinstance(event, PreemptEvent):
            row = self._row(event.time)
            row.running -= 1
            row.preemptions += is_first
            row.waiting += is_first
        elif isinstance(event, AcceptEvent) and step is not None:
            self._row(step.end).accepted += event.tokens
        elif isinstance(event, FinishEvent):
            has_arrived, time = found.arrive is not None, event.time
            if event.slot is not None:  # a late event: it ended with the step before
                is_of_step = step is not None and event.step >= step.step
                time = step.end if step is not None and is_of_step else self._known_steps
            elif not has_arrived:
                return
            row = self._row(time)
            row.finished += has_arrived and event.reason != "lost"
            if event.slot is not None:
                row.running -= 1
            else:
                row.waiting -= 1

    def _row(self, time: float) -> SeriesRow:
        return self._rows[max(ceil(time / self.interval) - 1, self._first_open, 0)]

    def _close_before(self, first_open: int | None) -> None:
        """Finish the rows before interval `first_open`, or all."""
        if first_open is not None:
            if first_open <= self._first_open:
                return
            self._first_open = first_open
        for number in sorted(n for n in self._rows if first_open is None or n < first_open):
            row = self._rows.pop(number)
            self._num_running += row.running
            self._num_waiting += row.waiting
            row.time = (number + 1) * self.interval
            row.running, row.waiting = self._num_running, self._num_waiting
            if self.total_blocks is not None:
                row.kv_share = share_of(row.blocks, self.total_blocks)
            row.tokens_per_s = round(row.output_tokens / self.interval, 3)
            if row.num_first:
                row.ttft_mean = round(row.sum_ttft / row.num_first, NUM_DIGITS)
            self._done.append(row)


def with_one_interval(all_series: Collection[TimeSeries]) -> None:
    """Double the intervals of several series to the longest of them, before any row is done."""
    widest = max(series.interval for series in all_series)
    for series in all_series:
        while series.interval < widest:
            series.double_interval()
