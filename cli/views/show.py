"""`batchdecode trace`: from a trace, or requests that are run for it, to a view of the timeline."""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, cast

from batcher.errors import BatchdecodeError
from batcher.fields import read_number
from batcher.page import START as PAGE_START
from batcher.trace.merged import read_timeline, workers_of
from batcher.trace.timeline import Selection, Timeline
from batcher.trace.views import encode_chrome, encode_csv, encode_spans, encode_steps

from ..commands.trace import TraceOptions
from ..printing import check_no_terminal, output_sink, write_lines
from ..run.files import check_distinct, check_replaceable
from ..run.stdout import user_code_prints_to_stderr
from ..screen.terminal import (
    can_print,
    encoding_of,
    printable,
    printable_json,
    terminal_size,
    wants_color,
)
from .events import alike_names, contradictions_named, events_of, open_twice

if TYPE_CHECKING:
    from batcher.page.records import PageTimeline

ENCODERS = {
    "spans": encode_spans,
    "steps": encode_steps,
    "csv": encode_csv,
    "chrome": encode_chrome,
    "perfetto": encode_chrome,
}
_VIEW_START = re.compile(
    rb'slot,id,index,start,|\{"slot":\d+,"id":|\{"step":\d+,"slots":|'
    rb'\{"displayTimeUnit":"ms","traceEvents":|(\x1b\[\d+m)?[\d,]+ steps? \S+ [\d,]+ slots?|'
    rb'<svg xmlns="http://www.w3.org/2000/svg" class="batchdecode-|' + re.escape(PAGE_START)
)
MAX_IDS_COMPARED = 20_000


def show_trace(options: TraceOptions) -> None:
    """Carry out `batchdecode trace` without --play.

    Raises:
        BatchdecodeError: the input, an option or a file is not right.
        WriteError, BrokenPipeError: the output takes no more.
    """
    if options.axis is not None and options.format != "svg":
        raise BatchdecodeError("--axis is for --format svg")
    if options.format == "html":
        check_no_terminal("--format html", options.output)
    path, source = open_twice(options.input)
    with source:
        check_distinct(source.status, [("--output", options.output)], options.input)
        if options.output is not None and not options.force:
            check_replaceable("--output", options.output, _VIEW_START.match)
        with user_code_prints_to_stderr():
            events = events_of(path, source, options.run_options, options.preset)
            with contradictions_named(source.name):
                timeline = read_timeline(events, _kind_of_timeline(options))
                timeline.check_integrity()
        num_workers = timeline.run.workers
        if options.axis == "seconds" and num_workers > 1:
            raise BatchdecodeError(
                f"--axis seconds: the {num_workers} workers of {source.name} have a clock each; "
                "--format chrome shows each by its own"
            )
        selection = selection_of(timeline, options)
        with output_sink(options.output) as sink:
            write_lines(_lines(timeline, selection, options, source.name), sink)


def _kind_of_timeline(options: TraceOptions) -> type[Timeline]:
    if options.format != "html":
        return Timeline
    from batcher.page.records import PageTimeline  # noqa: PLC0415 - as for a gantt, below

    return PageTimeline


def parse_steps(text: str) -> tuple[int | None, int | None]:
    """Return the start and the stop that `text`, A:B or a single step, stands for.

    Raises:
        BatchdecodeError: it is neither.
    """
    start, colon, stop = text.partition(":")
    try:
        first = read_number(start, int) if start or not colon else None
        last = read_number(stop, int) if stop else None
    except ValueError:
        raise BatchdecodeError(
            f"--steps {text}: expected A:B, steps A up to but not including B; "
            "either may be left out"
        ) from None
    if first is not None and not colon:
        return first, first + 1 or None  # -1 is the last step, up to the end
    return first, last


def selection_of(timeline: Timeline, options: TraceOptions) -> Selection:
    """Return what is to be shown.

    Raises:
        BatchdecodeError: it is not in the run.
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
    missing, others = set(selection.request_ids), set[str]()
    known = chain((s.id for s in timeline.spans), (w.id for w in timeline.waits))
    for name in known if missing else ():
        missing.discard(name)
        if len(others) < MAX_IDS_COMPARED:
            others.add(name)
    if missing:
        hint = alike_names(min(missing), others, options.input)
        raise BatchdecodeError(f"--request {min(missing)}: no such request took a slot{hint}")
    return selection


def _lines(
    timeline: Timeline, selection: Selection, options: TraceOptions, source_name: str
) -> Iterable[bytes]:
    """Return the view that was asked for, or the one that suits where it goes."""
    to_terminal = options.output is None and os.isatty(1)
    name = options.format or ("gantt" if to_terminal else "spans")
    if name == "html":
        from .page import render_page  # noqa: PLC0415 - as for a gantt, below

        pages = cast("Sequence[PageTimeline]", workers_of(timeline))  # see _kind_of_timeline
        return render_page(pages, source_name, timeline.window(selection), options)
    if name != "gantt":
        lines = (
            _svg(timeline, selection, options)
            if name == "svg"
            else ENCODERS[name](timeline, selection)
        )
        if not to_terminal:
            return lines
        texts = (line.decode() for line in lines)
        if name in {"csv", "svg"}:  # a row is one line of a terminal
            return (f"{printable(text[:-1])}\n".encode() for text in texts)
        return (printable_json(text).encode() for text in texts)
    return _gantt(timeline, selection, options, to_terminal=to_terminal)


def _gantt(
    timeline: Timeline, selection: Selection, options: TraceOptions, *, to_terminal: bool
) -> list[bytes]:
    """Return the gantt: on a terminal as high as that is, and in its colours."""
    from .gantt import render_gantt  # noqa: PLC0415 - the other formats start faster without

    encoding = "utf-8"
    if options.output is None:
        encoding = encoding_of(sys.stdout.encoding, os.environ)
    size = terminal_size(1, os.environ)
    gantt = render_gantt(
        timeline,
        selection,
        width=options.width or size.columns,
        height=size.lines if to_terminal else None,
        ascii_only=not can_print(encoding),
    )
    lines = ["".join(text for text, _ in line) for line in gantt]
    may_color = to_terminal or options.color == "always"  # whatever FORCE_COLOR says of a pipe
    if may_color and wants_color(options.color, 1, os.environ):
        from ..screen.theme import colored  # noqa: PLC0415 - with it comes rich

        lines = colored(gantt)
    return [f"{line}\n".encode(encoding, "backslashreplace") for line in lines]


def _svg(timeline: Timeline, selection: Selection, options: TraceOptions) -> list[bytes]:
    """Return the picture, line by line; raise a BatchdecodeError if it cannot be so wide."""
    from .svg.page import DEFAULT_WIDTH, WIDTHS, render_svg  # noqa: PLC0415 - as above

    width = options.width or DEFAULT_WIDTH
    if width not in WIDTHS:
        raise BatchdecodeError(
            f"--width {width}: an svg is {WIDTHS[0]} to {WIDTHS[-1]:,} pixels wide"
        )
    picture = render_svg(timeline, selection, width=width, unit=options.axis or "steps")
    return picture.splitlines(keepends=True)
