"""A timeline as a Chrome trace, the JSON that Perfetto and chrome://tracing open.

Rule: all times are those of the engine's clock, in microseconds.  A worker is a process, and its
thread `slot + 1` is a slot: on it a sequence encloses its prefill, the steps up to its first token;
nothing else on a thread overlaps.  A preemption is an instant where its slice ends, what was found
in the prefix cache one where it begins, and that its worker was replaced one of the process.  The
slices of one sequence are a flow, and so is a fork, from the beam that goes on in another to that
one, and what was found of another sequence, from the last step in which that had its slot by then.
Waits are asynchronous events.  Flows and waits are told apart by numbers, of which no two workers
have the same.
"""

import csv
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import merge
from io import StringIO
from itertools import chain, groupby, takewhile
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import msgspec

from batcher.events import SequenceName
from batcher.trace.run import SequenceKey, SlotSpan, Wait, key_of, label_of_name
from batcher.trace.timeline import (
    EVERYTHING,
    Selection,
    SortedRecords,
    StepFigures,
    Stretch,
    Timeline,
    clip,
)

_encoder = msgspec.json.Encoder()

_CSV_FIELDS = ("slot", "id", "index", "start", "end", "outcome", "role", "jumped", "dropped")

_CSV_DRAFT_FIELDS = ("drafted", "accepted")

_CSV_WORKER_FIELDS = ("worker",)

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")

_CSV_MEMORY_FIELDS = ("prefill", "cached", "generated", "resumed")


def encode_spans(timeline: Timeline, selection: Selection = EVERYTHING) -> Iterator[bytes]:
    """Yield a JSON line for each span."""
    for span in timeline.select_spans(selection):
        yield _encoder.encode(span) + b"\n"


def encode_steps(timeline: Timeline, selection: Selection = EVERYTHING) -> Iterator[bytes]:
    """Yield a JSON line for each step, with the label in each slot; an empty one is null."""
    for row in timeline.select_steps(selection):
        yield _encoder.encode(row) + b"\n"


def encode_csv(timeline: Timeline, selection: Selection = EVERYTHING) -> Iterator[bytes]:
    """Yield a header and a CSV line for each span, as RFC 4180 but ended by a newline alone.

    There are columns about what was computed and preempted, and about drafts, if that happened
    anywhere in the run, and one for the worker if there are several.
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
    """Return a value as a cell; a text that a spreadsheet would run as a formula gets a `'`."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value


MICROSECONDS = 10**6

MAX_NUMBERS = 2**32
"""More than a worker has flows, or waits."""

_SAID = (
    "jumped",
    "drafted",
    "accepted",
    "dropped",
    "forks",
    "cached",
    "cached_from",
    "generated",
    "resumed",
)

TraceEvent = dict[str, Any]


def encode_chrome(timeline: Timeline, selection: Selection = EVERYTHING) -> Iterator[bytes]:
    """Yield the file piece by piece, an event a line, in order of time."""
    separator = b'{"displayTimeUnit":"ms","traceEvents":[\n'
    for event in _trace_events(timeline, selection):
        yield separator + _encoder.encode(event)
        separator = b",\n"
    yield b"\n]}\n"


def _trace_events(timeline: Timeline, selection: Selection) -> Iterator[TraceEvent]:
    """Yield the names of what is shown, then every event by time."""
    processes = list(_processes(timeline, selection))
    for process in processes:
        yield from _names(process, num_workers=timeline.run.workers)
    yield from merge(*map(_events_of, processes), key=itemgetter("ts"))


class _Process(NamedTuple):
    """A worker, or the run if that is the only one, and what is shown of it.

    number: of the worker.
    """

    timeline: Timeline
    selection: Selection
    scale: "_Scale"
    number: int = 0

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self.number + 1

    @property
    def first_number(self) -> int:
        """From which on it numbers its flows and waits."""
        return self.number * MAX_NUMBERS


def _processes(timeline: Timeline, selection: Selection) -> Iterator[_Process]:
    """Yield each worker of which something is shown, in the steps that are selected of all."""
    start, stop, _ = slice(selection.start, selection.stop).indices(timeline.num_steps)
    for number, part in enumerate(timeline.workers):
        slots = selection.slots.intersection(part.slots)
        if slots or not selection.slots:
            own = replace(selection, start=start, stop=stop, slots=slots)
            yield _Process(part, own, _Scale(part.figures), number)


def _events_of(process: _Process) -> Iterator[TraceEvent]:
    """Yield every event of a process by time."""
    timeline, selection = process.timeline, process.selection
    window = timeline.window(selection)
    counters = {"occupied slots": timeline.occupied(), "waiting": timeline.waiting()}
    if timeline.has_figures:
        figures, num_steps = timeline.figures, timeline.num_steps  # one may be ahead of the other
        counters["tokens"] = _stretches(figures.tokens, num_steps)
        counters["blocks"] = _stretches(figures.blocks, num_steps)
    yield from merge(
        _slices(process),
        _preemptions(process),
        _cache_hits(process),
        _restarts(process),
        _resumptions(process),
        _forks(process),
        _shared_prefixes(process),
        _wait_starts(process),
        _wait_ends(process),
        *(_counter(name, counts, window, process) for name, counts in counters.items()),
        key=itemgetter("ts"),
    )


class _Scale:
    """Steps onto the microseconds of the engine's clock."""

    def __init__(self, figures: StepFigures) -> None:
        self._figures = figures

    def start_of(self, step: int) -> int:
        """Return when `step` begins."""
        return round(self._figures.start_of(step) * MICROSECONDS)

    def end_before(self, step: int) -> int:
        """Return when the step before `step` ends: before it begins, if the clock jumped there."""
        return round(self._figures.end_before(step) * MICROSECONDS)

    def turning_points(self, steps: range) -> Iterator[int]:
        """Yield, ascending, those of `steps` before which the clock may have jumped."""
        num_told = len(self._figures.ends) + 1
        known = self._figures.known_steps
        beyond = known[bisect_left(known, max(steps.start, num_told)) :]
        told = range(steps.start, min(steps.stop, num_told))
        return chain(told, takewhile(lambda step: step < steps.stop, beyond))


def _stretches(by_step: Sequence[int], num_steps: int) -> Iterator[Stretch]:
    """Yield the counts of at most `num_steps` steps, one by one."""
    for step in range(min(len(by_step), num_steps)):
        yield Stretch(step, step + 1, by_step[step])


def _names(process: _Process, *, num_workers: int) -> Iterator[TraceEvent]:
    """Yield the names of the process and of each slot, and their order."""
    timeline, selection, _, number = process
    whose = f"worker {number}, " if num_workers > 1 else ""
    name = f"batchdecode ({whose}{timeline.run.model})"
    yield {"ph": "M", "name": "process_name", "pid": process.pid, "args": {"name": name}}
    for slot in timeline.columns(selection):
        thread = {"ph": "M", "pid": process.pid, "tid": slot + 1}
        yield thread | {"name": "thread_name", "args": {"name": f"slot {slot}"}}
        yield thread | {"name": "thread_sort_index", "args": {"sort_index": slot + 1}}


def _key_of(sequence: SlotSpan | SequenceName) -> SequenceKey:
    return key_of(sequence.id, sequence.index, sequence.role)


def _slices(process: _Process) -> Iterator[TraceEvent]:
    """Yield each sequence in its slot, and after it the prefill it encloses."""
    timeline, selection, scale, _ = process
    for span in timeline.select_spans(selection):
        start = scale.start_of(span.start)
        place = {"ph": "X", "pid": process.pid, "tid": span.slot + 1, "ts": start}
        yield place | {
            "name": span.label,
            "cat": "request",
            "dur": scale.end_before(span.end) - start,
            "args": _arguments(span),
        }
        duration = scale.end_before(span.start + span.prefill) - start
        yield place | {"name": "prefill", "cat": "prefill", "dur": duration}


def _preemptions(process: _Process) -> Iterator[TraceEvent]:
    """Yield an instant for each sequence that lost its slot, by time."""
    timeline, selection, scale, _ = process
    spans = SortedRecords[SlotSpan](SlotSpan)
    for span in timeline.select_spans(selection):
        if span.preemption is not None:
            spans.add((span.end, span.slot), span)
    for span in spans:
        time, told = scale.end_before(span.end), span.preemption
        yield _instant(f"preempted: {span.label}", "preemption", span, time, told, process.pid)


def _cache_hits(process: _Process) -> Iterator[TraceEvent]:
    """Yield an instant for each sequence that found some of its tokens in the prefix cache."""
    timeline, selection, scale, _ = process
    for span in timeline.select_spans(selection):
        if span.cached:
            time, told = scale.start_of(span.start), dict[str, int | str](tokens=span.cached)
            if span.cached_from is not None:
                told["from"] = label_of_name(span.cached_from)
            yield _instant(f"cached: {span.label}", "cache", span, time, told, process.pid)


def _restarts(process: _Process) -> Iterator[TraceEvent]:
    """Yield an instant of the whole process wherever the worker was replaced."""
    timeline, selection, scale, _ = process
    window = timeline.window(selection)
    for restart in timeline.restarts:
        if restart.last_step in window:
            yield {
                "ph": "i",
                "s": "p",
                "pid": process.pid,
                "tid": 0,
                "ts": scale.end_before(restart.step),
                "name": "worker replaced",
                "cat": "restart",
                "args": {"reason": restart.reason, "code": restart.code, "step": restart.step},
            }


def _instant(
    name: str, category: str, span: SlotSpan, time: int, told: object, pid: int
) -> TraceEvent:
    """Return a moment of the slot that `span` held."""
    place = {"ph": "i", "s": "t", "pid": pid, "tid": span.slot + 1, "ts": time}
    return place | {"name": name, "cat": category, "args": told}


class _FlowEnd(msgspec.Struct, frozen=True):
    """One end of a flow: where it begins (phase "s"), or where it leads to (phase "f")."""

    phase: str
    number: int
    slot: int
    step: int
    name: str


class _Flows:
    """Flows of one category from slot to slot, which may come in any order.

    All are pairs of "s" and "f": flows by `bind_id` have numbers that Perfetto does not tell from
    those it gives to pairs.
    """

    def __init__(self, process: _Process, category: str) -> None:
        self._process, self._category = process, category
        self._number = process.first_number
        self._ends = SortedRecords[_FlowEnd](_FlowEnd)

    def add(self, name: str, begin: tuple[int, int], end: tuple[int, int]) -> None:
        """Let a flow lead from one (step, slot) to another, which is no earlier."""
        for order, (phase, (step, slot)) in enumerate((("s", begin), ("f", end))):
            told = _FlowEnd(phase, self._number, slot, step, name)
            self._ends.add((step, self._number, order), told)
        self._number += 1

    def events(self) -> Iterator[TraceEvent]:
        """Yield both ends of each, by time."""
        process = self._process
        for end in self._ends:
            yield {
                "ph": end.phase,
                "bp": "e",  # it belongs to the slice around it, not to the next one
                "pid": process.pid,
                "tid": end.slot + 1,
                "ts": process.scale.start_of(end.step),
                "name": end.name,
                "cat": self._category,
                "id": end.number,
            }


def _resumptions(process: _Process) -> Iterator[TraceEvent]:
    """Yield both ends of a flow from each preempted slice to where its sequence resumes."""
    flows, preempted = _Flows(process, "preemption"), dict[SequenceKey, SlotSpan]()
    for span in process.timeline.select_spans(process.selection):
        key = _key_of(span)
        before = preempted.pop(key, None)
        if before is not None:
            begin, end = (before.end - 1, before.slot), (span.start, span.slot)
            flows.add(f"resumed: {span.label}", begin, end)
        if span.preemption is not None:
            preempted[key] = span
    yield from flows.events()


def _forks(process: _Process) -> Iterator[TraceEvent]:
    """Yield both ends of each fork of which both beams are shown, by time."""
    flows, spans = _Flows(process, "fork"), process.timeline.select_spans(process.selection)
    for _, together in groupby(spans, key=attrgetter("start")):
        beams = {(span.id, span.index): span for span in together if span.role == "beam"}
        for span in beams.values():
            for fork in span.forks:
                parent = beams.get((span.id, fork.parent))
                if parent is not None and fork.step < parent.end and fork.step + 1 < span.end:
                    begin, end = (fork.step, parent.slot), (fork.step + 1, span.slot)
                    flows.add(f"fork: {span.label}", begin, end)
    yield from flows.events()


def _shared_prefixes(process: _Process) -> Iterator[TraceEvent]:
    """Yield both ends of a flow to each sequence that found tokens of another which is shown.

    One that finds its own again is tied to what it was by `_resumptions`.
    """
    flows, (timeline, selection, *_) = _Flows(process, "cache"), process
    found = (span.cached_from for span in timeline.select_spans(selection))
    sources = {_key_of(name) for name in found if name is not None}
    last: dict[SequenceKey, SlotSpan] = {}  # of the sources, the one that began last
    spans = timeline.select_spans(selection) if sources else ()
    for step, together in groupby(spans, key=attrgetter("start")):
        admitted = {_key_of(span): span for span in together}
        last.update((key, span) for key, span in admitted.items() if key in sources)
        for key, span in admitted.items():
            source_key = None if span.cached_from is None else _key_of(span.cached_from)
            if source_key is not None and source_key != key and source_key in last:
                source = last[source_key]
                begin = min(source.end - 1, step), source.slot
                flows.add(f"cached: {span.label}", begin, (step, span.slot))
    yield from flows.events()


def _arguments(span: SlotSpan) -> dict[str, Any]:
    """Return what is shown of a sequence that is chosen; that of most is short."""
    arguments: dict[str, Any] = {"index": span.index, "outcome": span.outcome}
    if span.role != "sample":
        arguments["role"] = span.role
    for name in _SAID:
        if getattr(span, name):
            arguments[name] = getattr(span, name)
    return arguments


def _wait_starts(process: _Process) -> Iterator[TraceEvent]:
    """Yield where each wait begins, by time."""
    waits = process.timeline.select_waits(process.selection)
    for number, wait in enumerate(waits, process.first_number):
        yield _queue_event("b", number, wait, process.scale.start_of(wait.start), process.pid)


def _wait_ends(process: _Process) -> Iterator[TraceEvent]:
    """Yield where each wait ends, by time."""
    ends = SortedRecords[tuple[int, Wait]](tuple[int, Wait])
    waits = process.timeline.select_waits(process.selection)
    for number, wait in enumerate(waits, process.first_number):
        ends.add((wait.end,), (number, wait))
    for number, wait in ends:
        yield _queue_event("e", number, wait, process.scale.start_of(wait.end), process.pid)


def _queue_event(phase: str, number: int, wait: Wait, time: int, pid: int) -> TraceEvent:
    """Return one end of `wait`, which is at `time`."""
    return {
        "ph": phase,
        "pid": pid,
        "tid": 0,
        "ts": time,
        "name": wait.label,
        "cat": "queue",
        "id": number,
    }


def _counter(
    name: str, counts: Iterator[Stretch], window: range, process: _Process
) -> Iterator[TraceEvent]:
    """Yield a count where `window` begins and wherever it changes.

    It is 0 after the last step, and wherever the clock jumps over a time without a step.
    """
    steps, scale = range(window.start, window.stop + 1), process.scale
    last = None
    for step, count, is_over in _cut(clip(counts, steps), scale.turning_points(steps), steps):
        end_before, start = scale.end_before(step), scale.start_of(step)
        if end_before < start and last:
            yield _count(name, end_before, 0, process.pid)
            last = 0
        if count != last:
            yield _count(name, end_before if is_over else start, count, process.pid)
        last = count


def _cut(
    stretches: Iterator[Stretch], points: Iterator[int], steps: range
) -> Iterator[tuple[int, int, bool]]:
    """Yield, ascending, the steps in which a stretch begins, and `points`, with their counts.

    Last comes whether that is after all stretches, which are in `steps`.
    """
    end, point = steps.start, next(points, None)
    for start, stop, count in stretches:
        yield start, count, False
        while point is not None and point < stop:
            if point > start:
                yield point, count, False
            point = next(points, None)
        end = stop
    if end < steps.stop:
        yield end, 0, True
        yield from ((later, 0, True) for later in chain([point or 0], points) if later > end)


def _count(name: str, time: int, count: int, pid: int) -> TraceEvent:
    return {"ph": "C", "pid": pid, "ts": time, "name": name, "args": {name: count}}
