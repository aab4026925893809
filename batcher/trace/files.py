"""Traces, one event per line: writing them, and reading them back whatever happened to the file.

Rule: a reader takes what it knows.  Unknown kinds and fields are skipped, and a line that a crash
cut off is the end.
"""

import csv
from collections.abc import Callable, Iterable, Iterator
from io import StringIO
from itertools import chain
from typing import Any, get_args

import msgspec
from msgspec import Struct

from batcher.errors import BatchdecodeError
from batcher.events import (
    TRACE_VERSION,
    AcceptEvent,
    AdmitEvent,
    ArriveEvent,
    Event,
    FinishEvent,
    JumpEvent,
    PreemptEvent,
    RunEvent,
)
from batcher.trace.run import is_follower, label_of
from batcher.trace.timeline import EVERYTHING, Selection, Timeline


class _Kind(msgspec.Struct):
    """As much of a line as says whether, and how, to read the rest."""

    event: str | None = None
    version: object = TRACE_VERSION


_BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_KNOWN_KINDS = {kind.__struct_config__.tag for kind in get_args(Event)}

_encoder = msgspec.json.Encoder()

_event_decoder = msgspec.json.Decoder(Event)

_kind_decoder = msgspec.json.Decoder(_Kind)


def encode_events(events: Iterable[Event]) -> bytes:
    """Return `events`, of which only the first may be the start of a run, as lines of a trace."""
    lines: list[Event | dict[str, Any]] = list(events)
    if lines and isinstance(lines[0], RunEvent):
        lines[0] = _as_written(lines[0])
    return _encoder.encode_lines(lines)


def _as_written(event: RunEvent) -> dict[str, Any]:
    """Return what stands for the start of a run: sections that say nothing are left out."""
    fields = msgspec.structs.asdict(event)
    left_out = {
        name for name in ("scheduling", "step_time", "speculation", "defaults") if not fields[name]
    }
    if event.layout == "ragged":
        left_out.add("layout")
    if event.workers == 1:
        left_out.add("workers")
    return {"event": "run"} | {k: v for k, v in fields.items() if k not in left_out}


def is_trace(first_line: bytes) -> bool:
    """Return whether a file that begins with `first_line` is a trace."""
    return _kind_of(first_line) == "run"


def _kind_of(line: bytes) -> str | None:
    """Return the kind of event that a line says it is; None if it says none."""
    try:
        return _kind_decoder.decode(line).event
    except _BAD_JSON:
        return None


def is_trace_start(start: bytes) -> bool:
    """Return whether a file that begins with `start`, a line or more of it, is a trace."""
    return is_trace(start.partition(b"\n")[0])


def read_trace(
    lines: Iterable[bytes],
    name: str = "trace",
    complaint: Callable[[Event], str | None] = lambda _: None,
) -> Iterator[Event]:
    """Yield the events of a trace, its run event first; `name` is the file's, for messages.

    complaint: tells what is wrong with the next event, see TraceChecks; None for nothing.

    Raises:
        BatchdecodeError: not a trace, another version of it, a damaged line before the last, or
            one that is wrong.
    """
    return read_numbered_trace(enumerate(lines, start=1), name, complaint)


def read_numbered_trace(
    lines: Iterable[tuple[int, bytes]], name: str, complaint: Callable[[Event], str | None]
) -> Iterator[Event]:
    """Yield the events of a trace as `read_trace` does, of lines with their numbers."""
    numbered = iter(lines)
    first_line = next((line for _, line in numbered), b"")
    _check_header(first_line, name)
    for number, line in chain([(1, first_line)], numbered):
        if line.isspace():
            continue
        try:
            event = _event_decoder.decode(line)
        except _BAD_JSON as error:
            if not _is_json(line) and all(rest.isspace() for _, rest in numbered):
                return
            if _kind_of(line) not in {None, *_KNOWN_KINDS}:
                continue
            raise BatchdecodeError(f"{name}:{number}: not a line of a trace: {error}") from error
        if isinstance(event, RunEvent) and number > 1:
            raise BatchdecodeError(f"{name}:{number}: a second run starts here; a trace holds one")
        wrong = complaint(event)
        if wrong is not None:
            raise BatchdecodeError(f"{name}:{number}: {wrong}")
        yield event


def _check_header(first_line: bytes, name: str) -> None:
    """Make sure that `first_line` begins a trace of our version, or raise a BatchdecodeError."""
    if not is_trace(first_line):
        raise BatchdecodeError(f'{name}: not a trace: its first line is not {{"event":"run",...}}')
    version = _kind_decoder.decode(first_line).version
    if version != TRACE_VERSION:
        raise BatchdecodeError(
            f"{name}: a trace of version {version}; this batchdecode reads {TRACE_VERSION}"
        )


def _is_json(line: bytes) -> bool:
    """Return whether `line` is whole, whatever it says."""
    try:
        msgspec.json.decode(line)
    except _BAD_JSON:
        return False
    return True


_Key = tuple[int | None, str, int]  # the worker, the id and the index


class _Sample(Struct):
    """One that has arrived.

    step: the one that admitted it, if it has a slot; each from that on may have given it a token.
    num_tokens: how many it had by then, or has without a slot, and was given beside those.
    """

    max_tokens: int
    step: int | None = None
    num_tokens: int = 0


class TraceChecks:
    """Takes in the events of a trace, and keeps of open samples what they asked for.

    A beam is told of otherwise: what it passes on is not what it was given.
    """

    def __init__(self) -> None:
        self._open: dict[_Key, _Sample] = {}
        self._is_remote = False

    def complaint(self, event: Event) -> str | None:
        """Return what is wrong with the next event; None for nothing."""
        match event:
            case RunEvent():
                self._is_remote = event.layout == "remote"
            case ArriveEvent():
                self._open[event.worker, event.id, event.index] = _Sample(event.max_tokens)
            case AdmitEvent():
                return self._admit(event)
            case JumpEvent() | AcceptEvent():
                sample = self._open.get((event.worker, event.id, event.index))
                if sample is not None:
                    sample.num_tokens += event.tokens
            case PreemptEvent():
                sample = self._open.get((event.worker, event.id, event.index))
                if sample is not None and event.role == "sample":
                    sample.step, sample.num_tokens = None, event.generated
            case FinishEvent():
                return self._finish(event)
        return None

    def _admit(self, event: AdmitEvent) -> str | None:
        if is_follower(event):
            return None
        sample = self._open.get((event.worker, event.id, event.index))
        if sample is None:
            label = label_of(event.id, event.index, event.role)
            return f"{label!r} is admitted, and has not arrived"
        sample.step, sample.num_tokens = event.step, event.generated
        return None

    def _finish(self, event: FinishEvent) -> str | None:
        if event.role != "sample":
            return None
        sample = self._open.pop((event.worker, event.id, event.index), None)
        if self._is_remote or not event.tokens:
            return None
        most = 0
        if sample is not None:
            num_steps = 0 if sample.step is None else event.step + 1 - sample.step
            most = min(sample.max_tokens, sample.num_tokens + num_steps)
        if event.tokens <= most:
            return None
        label = label_of(event.id, event.index, event.role)
        why = "has not arrived" if sample is None else f"can have {most:,} at most"
        return f"{label!r} ends with {event.tokens:,} tokens, and {why}"


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
