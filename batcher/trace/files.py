"""Write and read traces, with one event per line.

A reader skips unknown kinds of event and unknown fields.  A line cut off by a crash ends the trace.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import get_args

import msgspec

from batcher.errors import BatchdecodeError
from batcher.events import TRACE_VERSION, Event, RunEvent


class _Kind(msgspec.Struct):
    """The fields that decide how to read a line."""

    event: str | None = None
    version: object = TRACE_VERSION


_BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_KNOWN_KINDS = {kind.__struct_config__.tag for kind in get_args(Event)}
_encoder = msgspec.json.Encoder()
_event_decoder = msgspec.json.Decoder(Event)
_kind_decoder = msgspec.json.Decoder(_Kind)


def encode_events(events: Iterable[Event]) -> bytes:
    """Return `events` as lines of a trace."""
    return _encoder.encode_lines(events)


def is_trace(start: bytes) -> bool:
    """Return whether a file that starts with `start`, at least one line, is a trace."""
    return _kind_of(start.partition(b"\n")[0]) == "run"


def _kind_of(line: bytes) -> str | None:
    try:
        return _kind_decoder.decode(line).event
    except _BAD_JSON:
        return None


def read_numbered_trace(
    lines: Iterable[tuple[int, bytes]],
    name: str,
    complaint: Callable[[Event], str | None] = lambda _: None,
) -> Iterator[Event]:
    """Yield the events of a trace, its run event first.

    lines: (line number, line).  name: the file's name for errors.  complaint: returns what is wrong
    with the next event, or None; see TraceChecks.

    Raises:
        BatchdecodeError: it is not a trace, has another version, or a line is damaged or wrong.
    """
    numbered = iter(lines)
    first_line = next((line for _, line in numbered), b"")
    if not is_trace(first_line):
        raise BatchdecodeError(f'{name}: not a trace: its first line is not {{"event":"run",...}}')
    version = _kind_decoder.decode(first_line).version
    if version != TRACE_VERSION:
        raise BatchdecodeError(
            f"{name} has trace version {version}; this batchdecode reads version {TRACE_VERSION}"
        )
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
            raise BatchdecodeError(f"{name}:{number}: a second run starts; a trace has only one")
        wrong = complaint(event)
        if wrong is not None:
            raise BatchdecodeError(f"{name}:{number}: {wrong}")
        yield event


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except _BAD_JSON:
        return False
    return True
