"""Views of a timeline as bytes: spans, steps and CSV, and a Chrome trace for Perfetto.

The Chrome trace has the times of the engine's clock, in microseconds.  A worker is a process, and
its thread `slot + 1` is a slot: on it a sequence encloses its prefill, the steps up to its first
token; nothing else on a thread overlaps.  A preemption is an instant where its slice ends, what was
found in the prefix cache one where it begins, and a replaced worker one of its process.  Flows tie
the slices of one sequence, a beam to the one that it forks from, and a sequence to the one whose
blocks it found.  Waits are asynchronous events.  No two workers have flows or waits of one number.
"""

import csv
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import merge
from io import StringIO
from itertools import chain, groupby, takewhile
from operator import attrgetter, itemgetter
from typing import Any

import msgspec

from batcher.events import SequenceName
from batcher.trace.run import SequenceKey, SlotSpan, key_of, label_of_name
from batcher.trace.timeline import (
    EVERYTHING,
    Selection,
    SortedRecords,
    Stretch,
    Timeline,
    clip,
    cut,
)

_encoder = msgspec.json.Encoder()
_CSV_FIELDS = ("slot", "id", "index", "start", "end", "outcome", "role", "jumped", "dropped")
_CSV_DRAFT_FIELDS = ("drafted", "accepted")
_CSV_WORKER_FIELDS = ("worker",)
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
_CSV_MEMORY_FIELDS = ("prefill", "cached", "generated", "resumed")


def encode_spans(timeline: Timeline, selection: Selection = EVERYTHING) -> Iterator[bytes]:
    for span in timeline.select_spans(selection):
        yield _encoder.encode(span) + b"\n"


def encode_steps(timeline: Timeline, selection: Selection = EVERYTHING) -> Iterator[bytes]:
    """Yield a JSON line for each step, with the label in each slot; an empty one is null."""
    for row in timeline.select_steps(selection):
        yield _encoder.encode(row) + b"\n"


def encode_csv(timeline: Timeline, selection: Selection = EVERYTHING) -> Iterator[bytes]:
    """Yield a header and a line for each span, as RFC 4180 but ended by a newline alone.

    There are columns on memory, drafts and workers if the run has any of these.
    """
    fields = _CSV_FIELDS + (_CSV_MEMORY_FIELDS if timeline.has_memory else ())
    fields += _CSV_DRAFT_FIELDS if timeline.has_drafts else ()
    fields += _CSV_WORKER_FIELDS if timeline.run.workers > 1 else ()
    buffer = StringIO()
    writer = csv.writer(buffer)  # it quotes what has a character of the end of its lines, "\r\n"
    writer.writerow(fields)
    yield buffer.getvalue()[:-2].encode() + b"\n"
    for span in timeline.select_spans(selection):
        buffer.seek(0)
        buffer.truncate()
        writer.writerow(_cell(getattr(span, field)) for field in fields)
        yield buffer.getvalue()[:-2].encode() + b"\n"


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value


MICROSECONDS = 10**6
MAX_NUMBERS = 2**32  # more than a worker has flows, or waits
_SAID = ["jumped", "drafted", "accepted", "dropped", "forks"]
_SAID += ["cached", "cached_from", "generated", "resumed"]

TraceEvent = dict[str, Any]
Flow = tuple[str, tuple[int, int], tuple[int, int]]
"""What a flow is called, and from which (step, slot) to which one, no earlier, it leads."""


def encode_chrome(timeline: Timeline, selection: Selection = EVERYTHING) -> Iterator[bytes]:
    processes = list(_processes(timeline, selection))
    names = chain.from_iterable(process.names() for process in processes)
    events = merge(*(process.events() for process in processes), key=itemgetter("ts"))
    separator = b'{"displayTimeUnit":"ms","traceEvents":[\n'
    for event in chain(names, events):
        yield separator + _encoder.encode(event)
        separator = b",\n"
    yield b"\n]}\n"


def _processes(timeline: Timeline, selection: Selection) -> Iterator["_Process"]:
    window = timeline.window(selection)
    for number, part in enumerate(timeline.workers):
        slots = selection.slots.intersection(part.slots)
        if slots or not selection.slots:
            own = replace(selection, start=window.start, stop=window.stop, slots=slots)
            whose = f"worker {number}, " if timeline.parts else ""
            yield _Process(part, own, number, f"batchdecode ({whose}{timeline.run.model})")


class _Process:
    """A worker, or the run if that is the only one; first_number: that of its flows and waits."""

    def __init__(self, timeline: Timeline, selection: Selection, number: int, name: str) -> None:
        self._timeline, self._selection, self._name = timeline, selection, name
        self.pid, self.first_number = number + 1, number * MAX_NUMBERS

    def names(self) -> Iterator[TraceEvent]:
        yield {"ph": "M", "name": "process_name", "pid": self.pid, "args": {"name": self._name}}
        for slot in self._timeline.columns(self._selection):
            thread = {"ph": "M", "pid": self.pid, "tid": slot + 1}
            yield thread | {"name": "thread_name", "args": {"name": f"slot {slot}"}}
            yield thread | {"name": "thread_sort_index", "args": {"sort_index": slot + 1}}

    def events(self) -> Iterator[TraceEvent]:
        timeline = self._timeline
        counters = {"occupied slots": timeline.occupied(), "waiting": timeline.waiting()}
        for name in ("tokens", "blocks") if timeline.has_figures else ():
            counted = enumerate(getattr(timeline.figures, name)[: timeline.num_steps])
            counters[name] = (Stretch(step, step + 1, count) for step, count in counted)
        yield from merge(
            self._slices(),
            self._preemptions(),
            self._cache_hits(),
            self._restarts(),
            self._flow_ends("preemption", self._resumptions()),
            self._flow_ends("fork", self._forks()),
            self._flow_ends("cache", self._shared_prefixes()),
            self._waits(),
            *(self._counter(name, counts) for name, counts in counters.items()),
            key=itemgetter("ts"),
        )

    def start_of(self, step: int) -> int:
        return round(self._timeline.figures.start_of(step) * MICROSECONDS)

    def _end_before(self, step: int) -> int:
        """Return when the step before `step` ends: before it begins, if the clock jumped there."""
        return round(self._timeline.figures.end_before(step) * MICROSECONDS)

    def _spans(self) -> Iterator[SlotSpan]:
        return self._timeline.select_spans(self._selection)

    def _slices(self) -> Iterator[TraceEvent]:
        """Yield each sequence in its slot, and after it the prefill it encloses."""
        for span in self._spans():
            start = self.start_of(span.start)
            place = {"ph": "X", "pid": self.pid, "tid": span.slot + 1, "ts": start}
            arguments: dict[str, Any] = {"index": span.index, "outcome": span.outcome}
            if span.role != "sample":
                arguments["role"] = span.role
            arguments |= {name: said for name in _SAID if (said := getattr(span, name))}
            yield place | {
                "name": span.label,
                "cat": "request",
                "dur": self._end_before(span.end) - start,
                "args": arguments,
            }
            duration = self._end_before(span.start + span.prefill) - start
            yield place | {"name": "prefill", "cat": "prefill", "dur": duration}

    def _preemptions(self) -> Iterator[TraceEvent]:
        spans = SortedRecords[SlotSpan](SlotSpan)
        for span in self._spans():
            if span.preemption is not None:
                spans.add((span.end, span.slot), span)
        for span in spans:
            time, name = self._end_before(span.end), f"preempted: {span.label}"
            yield self._instant(name, "preemption", span, time, span.preemption)

    def _cache_hits(self) -> Iterator[TraceEvent]:
        for span in self._spans():
            if span.cached:
                time, told = self.start_of(span.start), dict[str, int | str](tokens=span.cached)
                if span.cached_from is not None:
                    told["from"] = label_of_name(span.cached_from)
                yield self._instant(f"cached: {span.label}", "cache", span, time, told)

    def _instant(
        self, name: str, category: str, span: SlotSpan, time: int, told: object
    ) -> TraceEvent:
        place = {"ph": "i", "s": "t", "pid": self.pid, "tid": span.slot + 1, "ts": time}
        return place | {"name": name, "cat": category, "args": told}

    def _restarts(self) -> Iterator[TraceEvent]:
        window = self._timeline.window(self._selection)
        for restart in self._timeline.restarts:
            if restart.last_step in window:
                yield {
                    "ph": "i",
                    "s": "p",
                    "pid": self.pid,
                    "tid": 0,
                    "ts": self._end_before(restart.step),
                    "name": "worker replaced",
                    "cat": "restart",
                    "args": {"reason": restart.reason, "code": restart.code, "step": restart.step},
                }

    def _resumptions(self) -> Iterator[Flow]:
        """Yield a flow from each preempted slice to where its sequence resumes."""
        preempted = dict[SequenceKey, SlotSpan]()
        for span in self._spans():
            key = _key_of(span)
            before = preempted.pop(key, None)
            if before is not None:
                begin, end = (before.end - 1, before.slot), (span.start, span.slot)
                yield f"resumed: {span.label}", begin, end
            if span.preemption is not None:
                preempted[key] = span

    def _forks(self) -> Iterator[Flow]:
        for _, together in groupby(self._spans(), key=attrgetter("start")):
            beams = {(span.id, span.index): span for span in together if span.role == "beam"}
            for span in beams.values():
                for fork in span.forks:
                    parent = beams.get((span.id, fork.parent))
                    if parent is not None and fork.step < parent.end and fork.step + 1 < span.end:
                        begin, end = (fork.step, parent.slot), (fork.step + 1, span.slot)
                        yield f"fork: {span.label}", begin, end

    def _shared_prefixes(self) -> Iterator[Flow]:
        """Yield a flow to each sequence that found tokens of another which is shown."""
        found = (span.cached_from for span in self._spans())
        sources = {_key_of(name) for name in found if name is not None}
        last: dict[SequenceKey, SlotSpan] = {}  # of the sources, the one that began last
        spans = self._spans() if sources else ()
        for step, together in groupby(spans, key=attrgetter("start")):
            admitted = {_key_of(span): span for span in together}
            last.update((key, span) for key, span in admitted.items() if key in sources)
            for key, span in admitted.items():
                source_key = None if span.cached_from is None else _key_of(span.cached_from)
                if source_key is not None and source_key != key and source_key in last:
                    source = last[source_key]
                    begin = min(source.end - 1, step), source.slot
                    yield f"cached: {span.label}", begin, (step, span.slot)

    def _flow_ends(self, category: str, flows: Iterable[Flow]) -> Iterator[TraceEvent]:
        """Yield both ends of each flow, by time.

        All are pairs of "s" and "f": flows by `bind_id` have numbers that Perfetto does not tell
        from those it gives to pairs.
        """
        ends = SortedRecords[TraceEvent](TraceEvent)
        for number, (name, *places) in enumerate(flows, self.first_number):
            for order, (step, slot) in enumerate(places):
                told = {
                    "ph": "sf"[order],
                    "bp": "e",  # it belongs to the slice around it, not to the next one
                    "pid": self.pid,
                    "tid": slot + 1,
                    "ts": self.start_of(step),
                    "name": name,
                    "cat": category,
                    "id": number,
                }
                ends.add((step, number, order), told)
        return iter(ends)

    def _waits(self) -> Iterator[TraceEvent]:
        """Yield both ends of each wait, by time."""
        ends = SortedRecords[TraceEvent](TraceEvent)
        waits = self._timeline.select_waits(self._selection)
        for number, wait in enumerate(waits, self.first_number):
            for order, step in enumerate((wait.start, wait.end)):
                time = self.start_of(step)
                place = {"ph": "be"[order], "pid": self.pid, "tid": 0, "ts": time}
                told = place | {"name": wait.label, "cat": "queue", "id": number}
                ends.add((time, order, step, number), told)
        return iter(ends)

    def _counter(self, name: str, counts: Iterator[Stretch]) -> Iterator[TraceEvent]:
        """Yield a count where it changes; it is 0 after the last step and where the clock jumps."""
        window = self._timeline.window(self._selection)
        steps = range(window.start, window.stop + 1)
        place, end, last = {"ph": "C", "pid": self.pid}, steps.start, None
        # The steps before which the clock may have jumped, ascending.
        figures = self._timeline.figures
        num_told, known = len(figures.ends) + 1, figures.known_steps
        beyond = known[bisect_left(known, max(steps.start, num_told)) :]
        told = range(steps.start, min(steps.stop, num_told))
        points = chain(told, takewhile(lambda step: step < steps.stop, beyond))
        for first, stop, count in cut(clip(counts, steps), points):
            end_before, start, end = self._end_before(first), self.start_of(first), stop
            if end_before < start and last:
                yield place | {"ts": end_before, "name": name, "args": {name: 0}}
                last = 0
            if count != last:
                yield place | {"ts": start, "name": name, "args": {name: count}}
            last = count
        if end < steps.stop and last != 0:
            yield place | {"ts": self._end_before(end), "name": name, "args": {name: 0}}


def _key_of(sequence: SlotSpan | SequenceName) -> SequenceKey:
    return key_of(sequence.id, sequence.index, sequence.role)
