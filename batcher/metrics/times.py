"""When things happened: whole steps, latencies, their distributions, and a run over time.

Rule: a step belongs to the interval in which it ended, its end included; an interval in which
nothing began or ended has no row.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from math import ceil
from typing import Any, ClassVar, NamedTuple, get_args

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
MICROSECONDS = 10**6  # of a second
SECONDS_DIGITS = 6  # of seconds, after the point


class Distribution(Struct, frozen=True):
    """The distribution of steps, or of times in seconds; percentiles are by nearest rank.

    Steps are exact below 4,096, times are known to a microsecond; percentiles above are at most
    0.05 % low, and those of times are times that there were.
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


class Histogram(Totals):
    """Counts of whole numbers >= 0, in buckets as in HdrHistogram (Tene): by their first 12 bits.

    counts: by the least number of a bucket.  sum_inexact, max_inexact: of numbers of over 12 bits.
    """

    LARGEST: ClassVar = frozenset({"max_inexact"})

    counts: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    sum_inexact: int = 0
    max_inexact: int = 0

    def add(self, value: int, count: int = 1) -> None:
        """Count `value`, `count` times over; called three times a request, so it does little."""
        if value >= EXACT_BELOW:
            self.sum_inexact += value * count
            if value > self.max_inexact:  # noqa: PLR1730 - max() takes twice as long
                self.max_inexact = value
            value = bucket_of(value)
        self.counts[value] += count

    def percentiles(self, percents: tuple[int, ...]) -> list[int]:
        """Return for each of `percents`, ascending, the least number that so many do not exceed."""
        found: list[int] = []
        seen, total = 0, sum(self.counts.values())
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
        count = self.count
        if not count:
            return None
        mean = round(self.sum / count, 3)
        p50, p90, p95, p99 = self.percentiles(PERCENTS)
        return Distribution(count, mean, p50, p90, p95, p99, self.max)


class SecondsHistogram(Histogram):
    """Counts of times, in microseconds; a percentile is a time that was counted.

    least: the least number that was counted in a bucket, where that is not the number itself.
    """

    LEAST: ClassVar = frozenset({"least"})

    least: dict[int, int] = field(default_factory=dict)

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a time, `count` times over; one below 0, which rounding can make, is 0."""
        value = max(0, microseconds(seconds))
        super().add(value, count)
        if value >= EXACT_BELOW:
            bucket = bucket_of(value)
            least = self.least.get(bucket)
            if least is None or value < least:
                self.least[bucket] = value

    def distribution(self) -> Distribution | None:
        count, least = self.count, self.least
        if not count:
            return None
        percentiles = [least.get(bucket, bucket) for bucket in self.percentiles(PERCENTS)]
        return seconds_distribution(count, self.sum / count, percentiles, self.max)


def bucket_of(value: int) -> int:
    """Return the least number of the bucket of `value`, which is at least EXACT_BELOW."""
    dropped_bits = value.bit_length() - KEPT_BITS
    return value >> dropped_bits << dropped_bits


def seconds_distribution(
    count: int, mean: float, percentiles: list[int], largest: int
) -> Distribution:
    p50, p90, p95, p99 = (value / MICROSECONDS for value in percentiles)
    mean_seconds = round(mean / MICROSECONDS, SECONDS_DIGITS)
    return Distribution(count, mean_seconds, p50, p90, p95, p99, largest / MICROSECONDS)


# Steps: each with its events, its start and its end, once all of these are known, and in order.

UNTIMED_STEP_SECONDS = 1.0

EventOfRequest = tuple[SequenceEvent, RequestTimeline]
SEQUENCE_EVENTS = get_args(SequenceEvent)


class WholeStep(NamedTuple):
    """A step that is over.

    start, end: in seconds of the engine's clock.  decodes ... drafts: as in a StepsEvent; blocks
    and paddings are 0 in an untimed run.  events: those of this step, each with its
    sequence, and with a smaller `step` those that came too late: an abort between two steps.
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


_COUNTS = WholeStep._fields[3:-2]  # which a StepsEvent has, too, as lists


class StepFeed:
    """Takes events one by one and gives back the steps that are whole, of a run that tells of each.

    Of the last step that was told of there may be more events, until something later is told.
    """

    def __init__(self) -> None:
        self._events: deque[EventOfRequest] = deque()  # of steps that are not over
        self._told: deque[WholeStep] = deque()  # still without their events and starts
        self._end = 0.0  # of the step before

    def take(self, event: Event, found: RequestTimeline | None) -> Iterator[WholeStep]:
        """Take in `event`, which tells of `found`; yield the steps that are known by it."""
        if isinstance(event, SEQUENCE_EVENTS) and found is not None:
            yield from self._told_by(event)
            self._events.append((event, found))
        elif isinstance(event, StepsEvent):
            yield from self._tell(event)
        elif isinstance(event, EndEvent):
            yield from self.catch_up(event.steps)

    def go_on_from(self, step: int, time: float) -> None:  # noqa: ARG002 - each is told of
        """Let the first step be `step`, which starts at `time`; before there was any."""
        self._end = time

    def catch_up(self, num_steps: int) -> Iterator[WholeStep]:
        """Yield the steps before `num_steps`, of which no more events come, if they are known."""
        while self._told and self._told[0].step < num_steps:
            told = self._told.popleft()
            events = self.take_events(told.step)
            # Or later than the step before, if the clock has jumped; someone is admitted then.
            admitted = (e.time for e, _ in events if type(e) is AdmitEvent and e.step == told.step)
            start = max(self._end, next(admitted, self._end))
            self._end = told.end
            yield told._replace(start=start, events=events)

    def take_events(self, last_step: int | None = None) -> list[EventOfRequest]:
        """Return and forget the events up to those of `last_step`; without it, all."""
        events, taken = self._events, []
        while events and (last_step is None or events[0][0].step <= last_step):
            taken.append(events.popleft())
        return taken

    def _told_by(self, event: SequenceEvent) -> Iterator[WholeStep]:
        return self.catch_up(event.step)

    def _tell(self, told: StepsEvent) -> Iterator[WholeStep]:
        """Take in what steps computed; yield those that are over by it, or raise."""
        counts = [getattr(told, name) for name in _COUNTS]
        counts.append([0] * len(told.ends) if told.drafts is None else told.drafts)
        if {len(column) for column in counts} != {len(told.ends)}:
            raise BatchdecodeError(
                f"the steps event of step {told.step}: its lists differ in length"
            )
        for step, (end, *of_step) in enumerate(zip(told.ends, *counts, strict=True), told.step):
            self._told.append(WholeStep._make((step, end, end, *of_step, [])))
        return self.catch_up(told.step + len(told.ends) - 1)


class _UntimedFeed(StepFeed):
    """The steps of a run that tells of none: each lasts 1.0, and all rows go on in it."""

    def __init__(self) -> None:
        super().__init__()
        self._step, self._start = 0, 0.0  # the first that is not told of
        self._num_rows = 0  # that go on in it

    def go_on_from(self, step: int, time: float) -> None:
        self._step, self._start = step, time

    def catch_up(self, num_steps: int) -> Iterator[WholeStep]:
        while self._step < num_steps:
            step, start = self._step, self._start
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
            self._step, self._start = step + 1, start + UNTIMED_STEP_SECONDS
            counts = (num_decodes, num_prefills + num_drafts, 0, 0, 0, num_drafts)
            yield WholeStep(step, start, self._start, *counts, events)

    def _told_by(self, event: SequenceEvent) -> Iterator[WholeStep]:
        is_end = isinstance(event, FinishEvent)
        if isinstance(event, ArriveEvent) or (is_end and event.slot is None):
            return
        yield from self.catch_up(event.step)
        if event.step == self._step and not is_end:
            self._start = max(self._start, event.time)

    def _tell(self, told: StepsEvent) -> Iterator[WholeStep]:  # noqa: ARG002 - as go_on_from
        return iter(())


def is_untimed(run: RunEvent) -> bool:
    """Return whether all steps last 1.0 and compute all there is, so the trace omits them."""
    return not run.step_time and not run.scheduling and run.policy == DEFAULT_SCHEDULING.policy


def open_feed(run: RunEvent) -> StepFeed:
    return _UntimedFeed() if is_untimed(run) else StepFeed()


# Latencies: queue time, TTFT, TPOT, ITL and E2E, as docs/metrics.md defines them.  Rows that go on
# in lockstep share the gaps between their tokens, so a gap is counted once for all of them: nothing
# is done per row per step.


class Latencies(Struct, frozen=True, kw_only=True):
    """How long requests waited and took, in seconds; None for what there was none of."""

    queue: Distribution | None
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None


class GivenTokens(NamedTuple):
    """What a step gave: tokens, how many of them were first ones, and the sum of their TTFTs."""

    num_tokens: int
    num_first: int
    sum_ttft: float


class EndedRequest(NamedTuple):
    """A sample or all beams of a request that ended; queue, ttft: None if it had none."""

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
        """The mean time of a token after the first; None if there is none after it."""
        num_tokens = self.finish.tokens
        if self.ttft is None or num_tokens < 2:  # noqa: PLR2004 - the first, and one more
            return None
        return (self.e2e - self.ttft) / (num_tokens - 1)


class TokenTimes:
    """Follows all sequences from step to step; times: distributions by name of Latencies."""

    def __init__(self) -> None:
        self.times = {name: SecondsHistogram() for name in Latencies.__struct_fields__}
        self._last_advance = 0.0  # when decoding rows were last given a token, all at once
        # Of the decoding rows: how many were given their last token when.
        self._decoding: dict[float, int] = {}

    def observe(self, step: WholeStep) -> tuple[GivenTokens, list[EndedRequest]]:
        """Take in the next step; return what it gave, and who has ended in it."""
        ended, itl, end = self.interrupt(step.events, step), self.times["itl"], step.end
        num_tokens = num_first = 0
        sum_ttft = 0.0
        if step.decodes:  # all rows that decode are given a token, at once
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
                is_received = isinstance(event, ReceiveEvent)
                num = event.tokens if isinstance(event, ReceiveEvent) else int(not event.left)
                if not num:
                    continue  # only its prompt is computed, at most
                num_tokens += num
                if found.ttft is None:
                    found.ttft = end - arrive.time
                    self.times["ttft"].add(found.ttft)
                    num_first += 1
                    sum_ttft += found.ttft
                else:
                    itl.add(end - found.last_token)
                found.last_token = end
                if is_received:
                    itl.add(0, num - 1)
                else:
                    found.is_decoding = True
                    self._decoding[end] = self._decoding.get(end, 0) + 1
        return GivenTokens(num_tokens, num_first, sum_ttft), ended

    def interrupt(
        self, events: list[EventOfRequest], step: WholeStep | None = None
    ) -> list[EndedRequest]:
        """Take in what happens before the rows of `step`, or after all; return who ends by that."""
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
                if not is_before and event.reason == "error":  # unless a server has sent some
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


FIRST_INTERVAL = 1.0  # seconds, if none is given
MAX_ROWS = 1000  # if no interval is given: beyond, it is doubled


class SeriesRow(Struct, frozen=True):
    """An interval, which ends at `time`, in seconds; None for what cannot be told of it."""

    time: float
    steps: int
    running: int
    waiting: int
    blocks: int
    kv_share: float | None
    prompt_tokens: int
    output_tokens: int
    tokens_per_s: float
    arrived: int
    admitted: int
    finished: int
    preemptions: int
    ttft_mean: float | None
    drafted: int = 0
    accepted: int = 0


DRAFT_COLUMNS = ("drafted", "accepted")
"""The last columns, which a run without drafts does not have."""


_COUNTED = [  # summed up over an interval, but for `blocks`: the most
    *("steps", "blocks", "prompt_tokens", "output_tokens", "arrived", "admitted", "finished"),
    *("preemptions", *DRAFT_COLUMNS),
]


class TimeSeries:
    """Takes in whole steps, and gives rows as soon as nothing that is still to come changes them.

    interval: in seconds; None: a second, doubled whenever there are more than a thousand rows. Then
    all rows are given at the end of the run.  Otherwise those are kept whose `waiting` is not known
    yet, since a request is read only when a slot may be free for it.
    total_blocks: how many the run has; None for no limit.  has_drafts: whether it is to speculate.
    """

    def __init__(self, interval: float | None = None) -> None:
        self.total_blocks: int | None = None
        self.has_drafts = False
        self.interval = FIRST_INTERVAL if interval is None else interval
        self._is_fixed = interval is not None
        self._bins: defaultdict[int, defaultdict[str, Any]] = defaultdict(lambda: defaultdict(int))
        self._first_open = 0  # the first interval that was not given
        self._num_running = self._num_waiting = 0  # at the end of the last that was
        self._known_arrivals = self._known_steps = 0.0  # up to when all is known
        self._done: list[SeriesRow] = []

    def rows(self) -> list[SeriesRow]:
        rows, self._done = self._done, []
        return rows

    def finish(self) -> list[SeriesRow]:
        self._done += self._rows(sorted(self._bins))
        return self.rows()

    def take(self, step: WholeStep, given: GivenTokens) -> None:
        for event, found in step.events:
            self._count(event, found, step)
        at = self._bin(step.end)
        at["steps"] += 1
        at["blocks"] = max(at["blocks"], step.blocks)
        at["prompt_tokens"] += step.prefills - step.drafts
        at["drafted"] += step.drafts
        at["output_tokens"] += given.num_tokens
        at["num_first"] += given.num_first
        at["sum_ttft"] += given.sum_ttft
        self._known_steps = step.end
        if not self._is_fixed:
            if len(self._bins) > MAX_ROWS:
                self._double()
            return
        known = min(self._known_arrivals, self._known_steps)  # nothing to come is before that
        first_open = max(ceil(known / self.interval) - 1, self._first_open, 0)
        if first_open > self._first_open:
            self._done += self._rows(sorted(n for n in self._bins if n < first_open))
            self._first_open = first_open

    def take_rest(self, events: list[EventOfRequest]) -> None:
        for event, found in events:
            self._count(event, found, None)

    def _count(self, event: SequenceEvent, found: RequestTimeline, step: WholeStep | None) -> None:
        """Count one event; `step` is the one that it is part of, None after the last."""
        is_first, time = not is_follower(found), event.time
        if isinstance(event, ArriveEvent):
            self._add(time, arrived=1, joined_queue=1)
            self._known_arrivals = max(self._known_arrivals, time)
        elif isinstance(event, AdmitEvent):  # first time or again; only those that arrived count
            self._add(time, joined_slots=1, admitted=is_first, joined_queue=-is_first)
        elif isinstance(event, PreemptEvent):
            self._add(time, joined_slots=-1, preemptions=is_first, joined_queue=is_first)
        elif isinstance(event, AcceptEvent) and step is not None:
            self._add(step.end, accepted=event.tokens)
        elif isinstance(event, FinishEvent):
            has_arrived = found.arrive is not None
            is_counted = has_arrived and event.reason != "lost"
            if event.slot is not None:  # it may be told of late: it ended with the step before
                is_of_step = step is not None and event.step >= step.step
                time = step.end if step is not None and is_of_step else self._known_steps
                self._add(time, joined_slots=-1, finished=is_counted)
            elif has_arrived:
                self._add(time, joined_queue=-1, finished=is_counted)

    def _add(self, time: float, **counts: int) -> None:
        at = self._bin(time)
        for name, count in counts.items():
            at[name] += count

    def _bin(self, time: float) -> dict[str, Any]:
        return self._bins[max(ceil(time / self.interval) - 1, self._first_open, 0)]

    def _double(self) -> None:
        bins, self._bins = self._bins, defaultdict(lambda: defaultdict(int))
        self.interval *= 2
        for index, found in sorted(bins.items()):
            at = self._bins[index // 2]
            blocks = max(at["blocks"], found["blocks"])
            for name, count in found.items():
                at[name] += count
            at["blocks"] = blocks

    def _rows(self, indexes: list[int]) -> Iterator[SeriesRow]:
        for index in indexes:
            found = self._bins.pop(index)
            self._num_running += found["joined_slots"]  # sequences admitted, less those that left
            self._num_waiting += found["joined_queue"]
            total, num_first = self.total_blocks, found["num_first"]
            yield SeriesRow(
                **{name: found[name] for name in _COUNTED},
                time=(index + 1) * self.interval,
                running=self._num_running,
                waiting=self._num_waiting,
                kv_share=None if total is None else round(found["blocks"] / total, 6),
                tokens_per_s=round(found["output_tokens"] / self.interval, 3),
                ttft_mean=round(found["sum_ttft"] / num_first, 6) if num_first else None,
            )


def with_one_interval(all_series: Collection[TimeSeries]) -> None:
    """Make the intervals of several as long as the longest, before rows are given at the end."""
    widest = max(series.interval for series in all_series)
    for series in all_series:
        while series.interval < widest:
            series._double()  # noqa: SLF001 - of this file
