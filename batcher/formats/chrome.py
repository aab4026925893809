"""A timeline as a Chrome trace, the JSON that Perfetto and chrome://tracing open.

Rule: a step is a millisecond; thread `slot + 1` is a slot, and on it a sequence encloses its
prefill, the first step; nothing else on a thread overlaps.  Waits are asynchronous events, told
apart by a number.  A fork, which is no event on a thread, is an argument of the beam it changed.
"""

from collections.abc import Iterator, Sequence
from heapq import merge
from operator import itemgetter
from typing import Any

import msgspec

from batcher.stays import Span, Wait
from batcher.timeline import EVERYTHING, Selection, Timeline

MICROSECONDS_PER_STEP = 1000
PROCESS_ID = 1

TraceEvent = dict[str, Any]

_encoder = msgspec.json.Encoder()


def encode_chrome(timeline: Timeline, selection: Selection = EVERYTHING) -> Iterator[bytes]:
    """Yield the file piece by piece, an event a line, in order of time."""
    separator = b'{"displayTimeUnit":"ms","traceEvents":[\n'
    for event in _trace_events(timeline, selection):
        yield separator + _encoder.encode(event)
        separator = b",\n"
    yield b"\n]}\n"


def _trace_events(timeline: Timeline, selection: Selection) -> Iterator[TraceEvent]:
    """Yield the names of what is shown, then every event by time."""
    yield from _names(timeline, selection)
    window = timeline.window(selection)
    yield from merge(
        _slices(timeline, selection),
        _wait_begins(timeline, selection),
        _wait_ends(timeline, selection),
        _counter("occupied slots", timeline.occupied, window),
        _counter("waiting", timeline.waiting, window),
        key=itemgetter("ts"),
    )


def _names(timeline: Timeline, selection: Selection) -> Iterator[TraceEvent]:
    """Yield the names of the process and of each slot, and their order."""
    name = f"batchdecode ({timeline.model})"
    yield {"ph": "M", "name": "process_name", "pid": PROCESS_ID, "args": {"name": name}}
    for slot in sorted(selection.slots) or range(timeline.num_slots):
        thread = {"ph": "M", "pid": PROCESS_ID, "tid": slot + 1}
        yield thread | {"name": "thread_name", "args": {"name": f"slot {slot}"}}
        yield thread | {"name": "thread_sort_index", "args": {"sort_index": slot + 1}}


def _slices(timeline: Timeline, selection: Selection) -> Iterator[TraceEvent]:
    """Yield each sequence in its slot, and after it the prefill it encloses."""
    for span in timeline.select_spans(selection):
        place = {
            "ph": "X",
            "pid": PROCESS_ID,
            "tid": span.slot + 1,
            "ts": span.start * MICROSECONDS_PER_STEP,
        }
        yield place | {
            "name": span.label,
            "cat": "request",
            "dur": (span.end - span.start) * MICROSECONDS_PER_STEP,
            "args": _arguments(span),
        }
        yield place | {"name": "prefill", "cat": "prefill", "dur": MICROSECONDS_PER_STEP}


def _arguments(span: Span) -> dict[str, Any]:
    """Return what is shown of a sequence that is chosen; that of most is short."""
    arguments: dict[str, Any] = {"index": span.index, "outcome": span.outcome}
    if span.role != "sample":
        arguments["role"] = span.role
    if span.jumped:
        arguments["jumped"] = span.jumped
    if span.dropped:
        arguments["dropped"] = True
    if span.forks:
        arguments["forks"] = span.forks
    return arguments


def _wait_begins(timeline: Timeline, selection: Selection) -> Iterator[TraceEvent]:
    """Yield where each wait begins, by time."""
    for number, wait in enumerate(timeline.select_waits(selection)):
        yield _queue_event("b", number, wait, wait.start)


def _wait_ends(timeline: Timeline, selection: Selection) -> Iterator[TraceEvent]:
    """Yield where each wait ends, by time."""
    numbered = enumerate(timeline.select_waits(selection))
    for number, wait in sorted(numbered, key=lambda item: item[1].end):
        yield _queue_event("e", number, wait, wait.end)


def _queue_event(phase: str, number: int, wait: Wait, step: int) -> TraceEvent:
    """Return one end of `wait`."""
    return {
        "ph": phase,
        "pid": PROCESS_ID,
        "tid": 0,
        "ts": step * MICROSECONDS_PER_STEP,
        "name": wait.label,
        "cat": "queue",
        "id": number,
    }


def _counter(name: str, by_step: Sequence[int], window: range) -> Iterator[TraceEvent]:
    """Yield a count where `window` begins and wherever it changes; after the last step it is 0."""
    last = None
    for step in range(window.start, window.stop + 1):
        count = by_step[step] if step < len(by_step) else 0
        if count != last:
            yield {
                "ph": "C",
                "pid": PROCESS_ID,
                "ts": step * MICROSECONDS_PER_STEP,
                "name": name,
                "args": {name: count},
            }
        last = count
