"""A run over time: a row of numbers for each interval of the engine's clock, from events alone.

Rule: a step belongs to the interval in which it ended, its end included; an interval in which
nothing began or ended has no row.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from math import ceil

from msgspec import Struct

from batcher.events import (
    AcceptEvent,
    AdmitEvent,
    ArriveEvent,
    FinishEvent,
    PreemptEvent,
    SequenceEvent,
)
from batcher.metrics.latencies import GivenTokens
from batcher.metrics.steps import EventOfRequest, WholeStep
from batcher.trace.records import RequestTimeline, is_follower

FIRST_INTERVAL = 1.0  # seconds, if none is given
MAX_ROWS = 1000  # if no interval is given: beyond, it is doubled


class SeriesRow(Struct, frozen=True):
    """An interval; None for what cannot be told of it.

    time: its end, in seconds.  steps, prompt_tokens, output_tokens, finished, preemptions: in it;
    prompt_tokens are those computed, recomputed ones too, output_tokens those given to samples.
    running: sequences in slots, at its end.  waiting: arrived, without a slot, at its end.  blocks:
    the most that a step held; kv_share: of all.  tokens_per_s: output_tokens over its length.
    ttft_mean: of the first tokens given in it, in seconds.  drafted, accepted: drafts of its steps,
    and those of them that were accepted.
    """

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


@dataclass(slots=True)
class _Bin:
    """What happened in an interval."""

    steps: int = 0
    blocks: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    arrived: int = 0
    admitted: int = 0  # first time or again, those that arrived
    finished: int = 0
    preemptions: int = 0
    num_first: int = 0
    sum_ttft: float = 0.0
    joined_slots: int = 0  # sequences admitted, less those that left
    joined_queue: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, other: "_Bin") -> None:
        """Take in what happened in the next interval."""
        blocks = max(self.blocks, other.blocks)
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        self.blocks = blocks


_COUNTED = [field.name for field in fields(_Bin) if field.name in SeriesRow.__struct_fields__]


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
        self._interval = FIRST_INTERVAL if interval is None else interval
        self._is_fixed = interval is not None
        self._bins: dict[int, _Bin] = {}
        self._first_open = 0  # the first interval that was not given
        self._num_running = self._num_waiting = 0  # at the end of the last that was
        self._known_arrivals = self._known_steps = 0.0  # up to when all is known
        self._done: list[SeriesRow] = []

    def rows(self) -> list[SeriesRow]:
        """Return the rows that have become known since the last call."""
        rows, self._done = self._done, []
        return rows

    def finish(self) -> list[SeriesRow]:
        """Return all rows that were not returned yet, at the end of the run."""
        self._done += self._rows(sorted(self._bins))
        return self.rows()

    def take(self, step: WholeStep, given: GivenTokens) -> None:
        """Take in the next step, and what it gave."""
        for event, found in step.events:
            self._count(event, found, step)
        at = self._bin(step.end)
        at.steps += 1
        at.blocks = max(at.blocks, step.blocks)
        at.prompt_tokens += step.prefills - step.drafts
        at.drafted += step.drafts
        at.output_tokens += given.num_tokens
        at.num_first += given.num_first
        at.sum_ttft += given.sum_ttft
        self._known_steps = step.end
        if self._is_fixed:
            self._close_bins()
        elif len(self._bins) > MAX_ROWS:
            self._double()

    def take_rest(self, events: list[EventOfRequest]) -> None:
        """Take in what happened after the last step."""
        for event, found in events:
            self._count(event, found, None)

    def _count(self, event: SequenceEvent, found: RequestTimeline, step: WholeStep | None) -> None:
        """Count one event; `step` is the one that it is part of, None after the last."""
        is_first = not is_follower(found)
        if isinstance(event, ArriveEvent):
            at = self._bin(event.time)
            at.arrived += 1
            at.joined_queue += 1
            self._known_arrivals = max(self._known_arrivals, event.time)
        elif isinstance(event, AdmitEvent):
            at = self._bin(event.time)
            at.joined_slots += 1
            at.admitted += is_first
            at.joined_queue -= is_first
        elif isinstance(event, PreemptEvent):
            at = self._bin(event.time)
            at.joined_slots -= 1
            at.preemptions += is_first
            at.joined_queue += is_first
        elif isinstance(event, AcceptEvent) and step is not None:
            self._bin(step.end).accepted += event.tokens
        elif isinstance(event, FinishEvent):
            has_arrived = found.arrive is not None
            if event.slot is not None:
                is_late = step is None or event.step < step.step  # it ended with the step before
                at = self._bin(self._known_steps if is_late or step is None else step.end)
                at.joined_slots -= 1
                at.finished += has_arrived and event.reason != "lost"
            elif has_arrived:
                at = self._bin(event.time)
                at.joined_queue -= 1
                at.finished += event.reason != "lost"

    def _bin(self, time: float) -> _Bin:
        """Return the interval of `time`, or if its row was given already, the next one."""
        index = max(ceil(time / self._interval) - 1, self._first_open, 0)
        found = self._bins.get(index)
        if found is None:
            found = self._bins[index] = _Bin()
        return found

    @property
    def interval(self) -> float:
        """How long one is by now, in seconds."""
        return self._interval

    def widen(self, interval: float) -> None:
        """Make intervals as long as `interval`, to which theirs can be doubled."""
        while self._interval < interval:
            self._double()

    def _double(self) -> None:
        """Make one interval of each two."""
        bins, self._bins = self._bins, {}
        self._interval *= 2
        for index, found in sorted(bins.items()):
            if index // 2 in self._bins:
                self._bins[index // 2].add(found)
            else:
                self._bins[index // 2] = found

    def _close_bins(self) -> None:
        """Give the rows of intervals that nothing to come is part of."""
        known = min(self._known_arrivals, self._known_steps)
        first_open = max(ceil(known / self._interval) - 1, self._first_open, 0)
        if first_open > self._first_open:
            closed = sorted(index for index in self._bins if index < first_open)
            self._done += self._rows(closed)
            self._first_open = first_open

    def _rows(self, indexes: list[int]) -> Iterator[SeriesRow]:
        """Yield the rows of some intervals, and forget them."""
        for index in indexes:
            found = self._bins.pop(index)
            self._num_running += found.joined_slots
            self._num_waiting += found.joined_queue
            total, num_first = self.total_blocks, found.num_first
            yield SeriesRow(
                **{name: getattr(found, name) for name in _COUNTED},
                time=(index + 1) * self._interval,
                running=self._num_running,
                waiting=self._num_waiting,
                kv_share=None if total is None else round(found.blocks / total, 6),
                tokens_per_s=round(found.output_tokens / self._interval, 3),
                ttft_mean=round(found.sum_ttft / num_first, 6) if num_first else None,
            )


def with_one_interval(all_series: Collection[TimeSeries]) -> None:
    """Make the intervals of several as long as the longest, before rows are given at the end."""
    widest = max(series.interval for series in all_series)
    for series in all_series:
        series.widen(widest)
