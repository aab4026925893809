"""Encode a timeline as spans, steps or CSV, or as a Chrome trace for Perfetto."""

import csv
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import chain, groupby, takewhile
from operator import attrgetter
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
_CSV_MEMORY_FIELDS = ("prefill", "cached", "generated", "resumed")
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def encode_spans(timeline: Timeline, selection: Selection = EVERYTHING) -> Iterator[bytes]:
    for span in timeline.select_spans(selection):
        yield _encoder.encode(span) + b"\n"


def encode_steps(timeline: Timeline, selection: Selection = EVERYTHING) -> Iterator[bytes]:
    """Yield a JSON line for each step, with the label in each slot or null."""
    for row in timeline.select_steps(selection):
        yield _encoder.encode(row) + b"\n"


def encode_csv(timeline: Timeline, selection: Selection = EVERYTHING) -> Iterator[bytes]:
    """Yield a header and a line for each span, as in RFC 4180 but with plain newlines.

    Columns for memory, drafts and workers appear if the run has any.
    """
    fields = _CSV_FIELDS + (_CSV_MEMORY_FIELDS if timeline.has_memory else ())
    fields += ("drafted", "accepted") if timeline.has_drafts else ()
    fields += ("worker",) if timeline.run.workers > 1 else ()
    buffer = StringIO()
    writer = csv.writer(buffer)  # quotes every cell with a character of its line end, "\r\n"
    spans = timeline.select_spans(selection)
    for row in chain([fields], ([_cell(getattr(one, name)) for name in fields] for one in spans)):
        writer.writerow(row)
        yield buffer.getvalue()[:-2].encode() + b"\n"
        buffer.seek(0)
        buffer.truncate()


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value


MICROSECONDS = 10**6
MAX_NUMBERS = 2**32  # more than a worker has flows or waits
_ARGUMENTS = ["jumped", "drafted", "accepted", "dropped", "forks"]
_ARGUMENTS += ["cached", "cached_from", "generated", "resumed"]

SLICES, PREEMPTIONS, CACHE_HITS, RESTARTS, RESUMED, FORKED, SHARED, WAITS, COUNTERS = range(9)
"""The order of events with equal times; each counter has a number from COUNTERS on."""


def encode_chrome(timeline: Timeline, selection: Selection = EVERYTHING) -> Iterator[bytes]:
    """Yield a Chrome trace in microseconds of the engine's clock.

    A worker is a process and each slot a thread, numbered from 1.  On it a slice for the sequence
    encloses a slice for its prefill.  Preemptions, cache hits and restarts are instants, waits are
    asynchronous events, and flows connect the slices of a sequence, beams to the beams they fork
    from, and sequences to the owner of the blocks they reuse.  Flows and waits of all workers have
    different numbers.
    """
    window, processes = timeline.window(selection), list[_Process]()
    events = SortedRecords[msgspec.Raw](msgspec.Raw)
    for number, part in enumerate(timeline.workers):
        slots = selection.slots.intersection(part.slots)
        if slots or not selection.slots:
            own = replace(selection, start=window.start, stop=window.stop, slots=slots)
            processes.append(_Process(part, own, number, events))
    for process in processes:
        process.add_events()
    separator = b'{"displayTimeUnit":"ms","traceEvents":[\n'
    names = chain.from_iterable(process.names(timeline) for process in processes)
    for event in chain(map(_encoder.encode, names), map(bytes, events)):
        yield separator + event
        separator = b",\n"
    yield b"\n]}\n"


@dataclass
class _Process:
    """The events of a worker, added to `events` by time, worker and kind."""

    timeline: Timeline
    selection: Selection
    number: int
    events: SortedRecords[msgspec.Raw]
    num_flows: Counter[int] = field(default_factory=Counter)

    def start_of(self, step: int) -> int:
        return round(self.timeline.figures.start_of(step) * MICROSECONDS)

    def end_before(self, step: int) -> int:
        return round(self.timeline.figures.end_before(step) * MICROSECONDS)

    def names(self, run: Timeline) -> Iterator[dict[str, Any]]:
        worker = f"worker {self.number}, " if run.parts else ""
        arguments: dict[str, Any] = {"name": f"batchdecode ({worker}{run.run.model})"}
        process = {"ph": "M", "name": "process_name", "pid": self.number + 1}
        yield process | {"args": arguments}
        for slot in self.timeline.columns(self.selection):
            thread = {"ph": "M", "pid": self.number + 1, "tid": slot + 1}
            yield thread | {"name": "thread_name", "args": {"name": f"slot {slot}"}}
            yield thread | {"name": "thread_sort_index", "args": {"sort_index": slot + 1}}

    def add(
        self, kind: int, phase: dict[str, str], place: dict[str, int], *order: int, **fields: Any
    ) -> None:
        """Add an event; order: its place among events of one kind and time."""
        event = phase | {"pid": self.number + 1} | place | fields
        key = (place["ts"], self.number, kind, *order)
        self.events.add(key, msgspec.Raw(_encoder.encode(event)))

    def add_events(self) -> None:
        self.add_spans()
        timeline, window = self.timeline, self.timeline.window(self.selection)
        for restart in timeline.restarts:
            if restart.last_step in window:
                place = {"tid": 0, "ts": self.end_before(restart.step)}
                arguments = {"reason": restart.reason, "code": restart.code, "step": restart.step}
                about = {"name": "worker replaced", "cat": "restart", "args": arguments}
                self.add(RESTARTS, {"ph": "i", "s": "p"}, place, **about)
        for number, wait in enumerate(timeline.select_waits(self.selection)):
            wait_id = self.number * MAX_NUMBERS + number
            for order, step in enumerate((wait.start, wait.end)):
                place, key = {"tid": 0, "ts": self.start_of(step)}, (order, step, number)
                phase, name = {"ph": "be"[order]}, wait.label
                self.add(WAITS, phase, place, *key, name=name, cat="queue", id=wait_id)
        counters = {"occupied slots": timeline.occupied(), "waiting": timeline.waiting()}
        for name in ("tokens", "blocks") if timeline.has_figures else ():
            counted = enumerate(getattr(timeline.figures, name)[: timeline.num_steps])
            counters[name] = (Stretch(step, step + 1, count) for step, count in counted)
        for kind, (name, counts) in enumerate(counters.items(), COUNTERS):
            for time, count in self.changes(counts):
                self.add(kind, {"ph": "C"}, {"ts": time}, name=name, args={name: count})

    def add_spans(self) -> None:
        """Add the slices, with what happens where they begin and end, and the flows."""
        found = (span.cached_from for span in self.timeline.select_spans(self.selection))
        sources = {_key_of(name) for name in found if name is not None}
        last: dict[SequenceKey, SlotSpan] = {}  # the newest span of each source
        preempted: dict[SequenceKey, SlotSpan] = {}
        spans = self.timeline.select_spans(self.selection)
        for step, together in groupby(spans, key=attrgetter("start")):
            admitted = {_key_of(span): span for span in together}
            last.update((key, span) for key, span in admitted.items() if key in sources)
            for key, span in admitted.items():
                self.add_slices(span)
                if key in preempted:
                    before = preempted.pop(key)
                    begin = before.end - 1, before.slot
                    self.add_flow(RESUMED, "preemption", f"resumed: {span.label}", begin, span)
                if span.preemption is not None:
                    preempted[key] = span
                for fork in span.forks:
                    parent = admitted.get(key_of(span.id, fork.parent, "beam"))
                    if parent is not None and fork.step < parent.end and fork.step + 1 < span.end:
                        begin, name = (fork.step, parent.slot), f"fork: {span.label}"
                        self.add_flow(FORKED, "fork", name, begin, span, fork.step + 1)
                source = None if span.cached_from is None else last.get(_key_of(span.cached_from))
                if source is not None and _key_of(source) != key:
                    begin = min(source.end - 1, step), source.slot
                    self.add_flow(SHARED, "cache", f"cached: {span.label}", begin, span)

    def add_slices(self, span: SlotSpan) -> None:
        start, instant = self.start_of(span.start), {"ph": "i", "s": "t"}
        place = {"tid": span.slot + 1, "ts": start}
        arguments: dict[str, Any] = {"index": span.index, "outcome": span.outcome}
        if span.role != "sample":
            arguments["role"] = span.role
        arguments |= {name: value for name in _ARGUMENTS if (value := getattr(span, name))}
        duration, slice_name = self.end_before(span.end) - start, {"name": span.label}
        slice_name["cat"] = "request"
        self.add(SLICES, {"ph": "X"}, place, **slice_name, dur=duration, args=arguments)
        duration = self.end_before(span.start + span.prefill) - start
        self.add(SLICES, {"ph": "X"}, place, name="prefill", cat="prefill", dur=duration)
        if span.cached:
            told: dict[str, int | str] = {"tokens": span.cached}
            if span.cached_from is not None:
                told["from"] = label_of_name(span.cached_from)
            name = f"cached: {span.label}"
            self.add(CACHE_HITS, instant, place, name=name, cat="cache", args=told)
        if span.preemption is not None:
            place = {"tid": span.slot + 1, "ts": self.end_before(span.end)}
            order, name = (span.end, span.slot), f"preempted: {span.label}"
            about = {"name": name, "cat": "preemption", "args": span.preemption}
            self.add(PREEMPTIONS, instant, place, *order, **about)

    def add_flow(
        self,
        kind: int,
        category: str,
        name: str,
        begin: tuple[int, int],
        span: SlotSpan,
        step: int | None = None,
    ) -> None:
        """Add a flow from a (step, slot) to `span`, by default to its start.

        Flows are pairs of "s" and "f", because Perfetto does not tell the numbers of flows by
        `bind_id` from those it gives to pairs.
        """
        number = self.num_flows[kind]
        self.num_flows[kind] += 1
        end = span.start if step is None else step, span.slot
        for order, (at, slot) in enumerate((begin, end)):
            # "bp": bound to the slice around it, not to the next one.
            phase = {"ph": "sf"[order], "bp": "e"}
            place = {"tid": slot + 1, "ts": self.start_of(at)}
            flow_id = self.number * MAX_NUMBERS + number
            self.add(kind, phase, place, at, number, order, name=name, cat=category, id=flow_id)

    def changes(self, counts: Iterator[Stretch]) -> Iterator[tuple[int, int]]:
        """Yield (time, count) where a count changes.

        It is 0 after the last step and while the clock jumps.
        """
        window, last = self.timeline.window(self.selection), None
        steps, end = range(window.start, window.stop + 1), window.start
        # The steps before which the clock may have jumped, ascending.
        figures = self.timeline.figures
        num_known, known = len(figures.ends) + 1, figures.known_steps
        beyond = known[bisect_left(known, max(steps.start, num_known)) :]
        with_figures = range(steps.start, min(steps.stop, num_known))
        points = chain(with_figures, takewhile(lambda step: step < steps.stop, beyond))
        for first, stop, count in cut(clip(counts, steps), points):
            end_before, start, end = self.end_before(first), self.start_of(first), stop
            if end_before < start and last:
                yield end_before, 0
                last = 0
            if count != last:
                yield start, count
            last = count
        if end < steps.stop and last != 0:
            yield self.end_before(end), 0


def _key_of(sequence: SlotSpan | SequenceName) -> SequenceKey:
    return key_of(sequence.id, sequence.index, sequence.role)
