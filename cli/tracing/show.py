"""`batchdecode trace`: from a trace, or requests that are run for it, to a view of the timeline."""

import os
import re
import sys
from collections.abc import Iterable
from itertools import chain
from typing import Literal

from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import Event
from batcher.formats.chrome import encode_chrome
from batcher.formats.views import encode_csv, encode_spans, encode_steps
from batcher.timeline import Selection, Timeline

from ..commands.trace import TraceOptions
from ..running.files import check_distinct, check_replaceable
from ..running.output import Sink, open_sink, stdout_sink
from ..running.stdout import user_code_prints_to_stderr
from ..screen.cells import printable, printable_json
from ..screen.terminal import can_print_boxes, terminal_size
from .events import events_of, open_twice

TraceFormat = Literal["spans", "steps", "csv", "chrome", "gantt"]

ENCODERS = {
    "spans": encode_spans,
    "steps": encode_steps,
    "csv": encode_csv,
    "chrome": encode_chrome,
}
_VIEW_START = re.compile(
    rb'slot,id,index,start,|\{"slot":\d+,"id":|\{"step":\d+,"slots":|'
    rb'\{"displayTimeUnit":"ms","traceEvents":|[\d,]+ steps? \S+ [\d,]+ slots?'
)
BLOCK_BYTES = 2**16
MAX_IDS_COMPARED = 20_000


def show_trace(options: TraceOptions) -> None:
    """Carry out `batchdecode trace`.

    Raises:
        BatchdecodeError: the input, an option or a file is not right.
        WriteError, BrokenPipeError: the output takes no more.
    """
    path, source = open_twice(options.input)
    check_distinct(source.status, [("--output", options.output)])
    if options.output is not None and not options.force:
        check_replaceable("--output", options.output, _VIEW_START.match)
    with user_code_prints_to_stderr():
        events = events_of(path, source, options.run_options)
        timeline = _timeline_of(events, source.name)
    selection = _selection(timeline, options)
    lines = _lines(timeline, selection, options)
    sink = stdout_sink() if options.output is None else open_sink(options.output)
    _write(lines, sink)


def parse_steps(text: str) -> tuple[int | None, int | None]:
    """Return the start and the stop that `text`, A:B or a single step, stands for.

    Raises:
        BatchdecodeError: it is neither.
    """
    start, colon, stop = text.partition(":")
    try:
        if not colon:
            step = int(start)
            return step, step + 1 or None  # -1 is the last step, up to the end
        return int(start) if start else None, int(stop) if stop else None
    except ValueError:
        raise BatchdecodeError(
            f"--steps {text}: expected A:B, steps A up to but not including B; "
            "either may be left out"
        ) from None


def _timeline_of(events: Iterable[Event], name: str) -> Timeline:
    """Return the timeline of the events of the input `name`.

    Raises:
        BatchdecodeError: there is none in it.
    """
    try:
        timeline = Timeline.from_events(events)
        timeline.check_integrity()
    except InvariantError as error:
        raise BatchdecodeError(f"{name}: its events contradict each other: {error}") from error
    return timeline


def _selection(timeline: Timeline, options: TraceOptions) -> Selection:
    """Return what is to be shown.

    Raises:
        BatchdecodeError: there is no such thing in the run.
    """
    start, stop = parse_steps(options.steps) if options.steps is not None else (None, None)
    selection = Selection(
        start=start,
        stop=stop,
        request_ids=frozenset(options.request or ()),
        slots=frozenset(options.slot or ()),
    )
    if options.steps is not None and not timeline.window(selection):
        raise BatchdecodeError(
            f"--steps {options.steps} is none of the {timeline.num_steps:,} steps of this run"
        )
    for slot in options.slot or ():
        if not 0 <= slot < timeline.num_slots:
            raise BatchdecodeError(
                f"--slot {slot}: the slots of this run are 0 to {timeline.num_slots - 1}"
            )
    _check_requests(timeline, selection.request_ids)
    return selection


def _check_requests(timeline: Timeline, request_ids: frozenset[str]) -> None:
    """Make sure that the timeline has every one of the requests.

    Raises:
        BatchdecodeError: it has not; the message names some that look alike.
    """
    if not request_ids:
        return
    missing, others = set(request_ids), set[str]()
    for name in chain((s.id for s in timeline.spans), (w.id for w in timeline.waits)):
        missing.discard(name)
        if len(others) < MAX_IDS_COMPARED:
            others.add(name)
    for request_id in sorted(missing):
        from difflib import get_close_matches  # noqa: PLC0415 - for a mistake only

        near = get_close_matches(request_id, sorted(others))
        hint = f"; there is {', '.join(near)}" if near else ""
        raise BatchdecodeError(f"--request {request_id}: no such request took a slot{hint}")


def _lines(timeline: Timeline, selection: Selection, options: TraceOptions) -> Iterable[bytes]:
    """Return the view that was asked for, or the one that suits where it goes."""
    to_terminal = options.output is None and os.isatty(1)
    name = options.format or ("gantt" if to_terminal else "spans")
    if name != "gantt":
        lines = ENCODERS[name](timeline, selection)
        if not to_terminal:
            return lines
        shown = _printable_row if name == "csv" else printable_json
        return (shown(line.decode()).encode() for line in lines)
    from .gantt import render_gantt  # noqa: PLC0415 - the other formats start faster without

    encoding = sys.stdout.encoding if options.output is None else "utf-8"
    gantt = render_gantt(
        timeline,
        selection,
        width=options.width or terminal_size(1, os.environ).columns,
        ascii_only=not can_print_boxes(encoding),
    )
    return [f"{line}\n".encode(encoding, "backslashreplace") for line in gantt]


def _printable_row(row: str) -> str:
    """Return a row of CSV in one line of a terminal."""
    return printable(row.removesuffix("\n")) + "\n"


def _write(lines: Iterable[bytes], sink: Sink) -> None:
    """Write `lines` in blocks.

    Raises:
        WriteError, BrokenPipeError: see Sink.
    """
    block: list[bytes] = []
    size = 0
    for line in lines:
        block.append(line)
        size += len(line)
        if size >= BLOCK_BYTES:
            sink.write(b"".join(block))
            block.clear()
            size = 0
    sink.write(b"".join(block))
    sink.close()
