"""Runs `batchdecode trace`, `trace why` and `trace diff`: from inputs to views.

Rule: the first line decides whether an input is a trace, a log or requests, which are run.  An
input is opened so that it can always be read again.
"""

import io
import os
import re
import shlex
import stat
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from batcher.errors import BatchdecodeError, InvariantError
from batcher.events import EndEvent, Event, RunEvent
from batcher.explaining.differences import compare
from batcher.explaining.story import answer_of, read_requests
from batcher.fields import read_number
from batcher.page import START as PAGE_START
from batcher.page import is_page_start
from batcher.trace.files import is_trace, read_numbered_trace
from batcher.trace.logs import events_of_log, kind_of_log, read_log
from batcher.trace.run import TraceChecks
from batcher.trace.timeline import Selection, Timeline
from batcher.trace.views import encode_chrome, encode_csv, encode_spans, encode_steps
from batcher.transformer.config import LOADING_SETTINGS

from ..config import OF_ROWS, OF_SCHEDULING, model_settings
from ..options import SchedulingOptions
from ..run.files import (
    OutFile,
    check_can_open,
    check_distinct,
    check_no_terminal,
    check_replaceable,
    output_sink,
    print_json,
    print_text,
    write_lines,
)
from ..run.input import (
    CHUNK_BYTES,
    MAX_SKIPPED_BYTES,
    CutOffError,
    InputError,
    OpenInput,
    PatientPipe,
    open_input,
)
from ..run.problems import why_no_lines
from ..screen.terminal import (
    can_animate,
    can_print,
    columns_of,
    counted,
    encoding_of,
    listed,
    printable,
    printable_json,
    terminal_size,
    wants_color,
    wrapped,
)
from ..signals import user_code_prints_to_stderr
from ..views.story_text import PAGE_WORDS, SHORT, WHOLE, describe, results_of, tell, tell_reject

if TYPE_CHECKING:
    from batcher.metrics.summary import RunMetrics, Summary
    from batcher.page.page import PageTimeline

    from ..views.player import InteractiveTerminal, Player
    from .trace import DiffOptions, TraceOptions, WhyOptions

STDIN = "-"
FEW_NAMES = 8  # which a message lists all
_REQUEST_KEYS = ("prompt", "prompt_tokens", "messages", "body", "max_tokens")
_REQUEST_KEY = re.compile(rb'"(prompt|prompt_tokens|messages|body)"')
_RESULT_KEYS = {"finish_reason", "response"}


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
    rb'<svg xmlns="http://www.w3.org/2000/svg" class="batchdecode-|\{\n  "requests":|'
    rb"(\x1b\[\d+m)?(\xe2\x9c.|\xe2\x96\xa0|[*x!])(\x1b\[0m)? [\d,]+ [a-z]|" + re.escape(PAGE_START)
)
MAX_IDS_COMPARED = 20_000


def show_trace(options: "TraceOptions") -> int:
    """Run `batchdecode trace`; return its exit status."""
    if options.play:
        return _play(options)
    for name, value in (("speed", options.speed), ("from", options.from_step)):
        if value is not None:
            raise BatchdecodeError(f"--{name} needs --play")
    if options.open and options.format != "html":
        raise BatchdecodeError("--open needs --format html")
    kind: type[Timeline] = Timeline
    if options.format == "html":
        if options.open:
            check_can_open(options.output)
        else:
            check_no_terminal("--format html", options.output)
        from batcher.page.page import PageTimeline  # noqa: PLC0415 - other formats start faster

        kind = PageTimeline
    path, source = open_twice(options.input)
    with source:
        check_distinct(source.statuses, [("--output", options.output)], [options.input])
        if options.output is not None and not options.force:
            check_replaceable("--output", options.output, _VIEW_START.match)
        with user_code_prints_to_stderr():
            events = events_of(path, source, options.run_options, options.preset)
            if options.format in {"summary", "summary-json"}:
                with _contradictions_named(source.name):
                    lines = _summary_lines(events, options)
                with output_sink(options.output) as sink:
                    write_lines(lines, sink)
                return 0
            metrics: RunMetrics | None = None
            with _contradictions_named(source.name):
                if options.format == "html":
                    _, metrics, events = _observed(events)
                timeline = kind.from_events(events)
                timeline.check_integrity()
        selection = _selection_of(timeline, options)
        summary = None if metrics is None else metrics.summary()
        output = options.output
        if options.open and output is None:
            import tempfile  # noqa: PLC0415 - for --open only

            handle, output = tempfile.mkstemp(prefix="batchdecode-", suffix=".html")
            os.close(handle)
            sys.stderr.write(f"page: {output}\n")
        view = _view_lines(timeline, selection, options, source.name, summary)
        with output_sink(output) as sink:
            write_lines(view, sink)
    if options.open:
        OutFile(output).show_in_browser()
    return 0


def _observed(events: Iterator[Event]) -> tuple[RunEvent, "RunMetrics", Iterator[Event]]:
    """Return a run, its numbers, and its events, which add to the numbers when iterated."""
    from batcher.metrics.summary import RunMetrics  # noqa: PLC0415 - seldom

    run = cast(RunEvent, next(events))
    metrics = RunMetrics(worker_series=(None,) * run.workers if run.workers > 1 else ())

    def observe(event: Event) -> Event:
        metrics.observe((event,))
        return event

    return run, metrics, map(observe, chain([run], events))


def _summary_lines(events: Iterator[Event], options: "TraceOptions") -> list[bytes]:
    """Return the summary that ended the run of a trace, without wall times."""
    from batcher.metrics.summary import encode_summary  # noqa: PLC0415 - seldom

    from ..screen.summary import RunFiles, advice, render_summary  # noqa: PLC0415 - as above

    for name in ("steps", "request", "slot"):
        if getattr(options, name) is not None:
            raise BatchdecodeError(f"--{name} does not work with --format {options.format}")
    run, metrics, events = _observed(events)
    num_left, end = run.workers, 0.0
    for event in events:
        if isinstance(event, EndEvent):
            num_left, end = num_left - 1, max(end, event.time)
    summary = metrics.summary()
    if options.format == "summary-json":
        return [encode_summary(summary)]
    text = render_summary(
        summary,
        RunFiles(),
        is_complete=num_left == 0,
        elapsed=end,
        encoding=encoding_of(sys.stdout.encoding),
        has_color=wants_color(options.color, 1),
        is_timed=bool(run.step_time),
        columns=columns_of(1),
    )
    hint = advice(summary)
    return [text.encode(), f"{hint}\n".encode()] if hint is not None else [text.encode()]


def parse_steps(text: str) -> tuple[int | None, int | None]:
    """Return start and stop of `text`, A:B or a step, or raise BatchdecodeError."""
    start, colon, stop = text.partition(":")
    try:
        first = read_number(start, int) if start or not colon else None
        last = read_number(stop, int) if stop else None
    except ValueError:
        raise BatchdecodeError(
            f"--steps {text}: expected A:B, steps A up to but not including B; you can omit either"
        ) from None
    if first is not None and not colon:
        return first, first + 1 or None  # -1 is the last step, up to the end
    return first, last


def _selection_of(timeline: Timeline, options: "TraceOptions") -> Selection:
    """Return the selected steps, slots and requests; all must be in the run."""
    start, stop = parse_steps(options.steps) if options.steps is not None else (None, None)
    selection = Selection(
        start=start,
        stop=stop,
        request_ids=frozenset(options.request or ()),
        slots=frozenset(options.slot or ()),
    )
    if options.steps is not None and not timeline.window(selection):
        raise BatchdecodeError(
            f"--steps {options.steps} is out of range (0-{timeline.num_steps - 1})"
        )
    for slot in options.slot or ():
        if not 0 <= slot < timeline.num_slots:
            raise BatchdecodeError(f"--slot {slot} is out of range (0-{timeline.num_slots - 1})")
    missing, others = set(selection.request_ids), set[str]()
    known = chain((s.id for s in timeline.spans), (w.id for w in timeline.waits))
    for name in known if missing else ():
        missing.discard(name)
        if len(others) < MAX_IDS_COMPARED:
            others.add(name)
    if missing:
        hint = _alike_names(min(missing), others, options.input)
        raise BatchdecodeError(f"--request {min(missing)}: no such request took a slot{hint}")
    return selection


def _view_lines(
    timeline: Timeline,
    selection: Selection,
    options: "TraceOptions",
    source_name: str,
    summary: "Summary | None",
) -> Iterable[bytes]:
    """Return the lines of a view; summary: the numbers of a page."""
    to_terminal = options.output is None and os.isatty(1)
    name = options.format or ("gantt" if to_terminal else "spans")
    if summary is not None:
        from batcher.metrics.summary import unit_of  # noqa: PLC0415 - as for a gantt, below
        from batcher.page.page import Opening, PageFacts, encode_run  # noqa: PLC0415 - as above
        from batcher.page.report import render_key_numbers  # noqa: PLC0415 - as above

        from ..screen.summary import key_numbers  # noqa: PLC0415 - as above

        window = timeline.window(selection)
        steps = None if options.steps is None else (window.start, window.stop)
        facts = PageFacts(Opening(steps, options.request or None, options.slot or None))
        pages = cast("Sequence[PageTimeline]", timeline.workers)  # see show_trace
        unit = unit_of(summary, is_timed=bool(timeline.run.step_time))
        numbers = render_key_numbers(key_numbers(summary, unit))
        return encode_run(source_name, pages, facts, PAGE_WORDS, numbers)
    if name == "gantt":
        return _gantt(timeline, selection, options, to_terminal=to_terminal)
    if name == "svg":
        from ..views.svg import DEFAULT_WIDTH, WIDTHS, render_svg  # noqa: PLC0415 - as below

        width = options.width or DEFAULT_WIDTH
        if width not in WIDTHS:
            raise BatchdecodeError(
                f"--width {width}: an svg is {WIDTHS[0]} to {WIDTHS[-1]:,} pixels wide"
            )
        picture = render_svg(timeline, selection, width=width)
        lines: Iterable[bytes] = picture.splitlines(keepends=True)
    else:
        lines = ENCODERS[name](timeline, selection)
    if not to_terminal:
        return lines
    texts = (line.decode() for line in lines)
    if name in {"csv", "svg"}:  # a row is one line of a terminal
        return (f"{printable(text[:-1])}\n".encode() for text in texts)
    return (printable_json(text).encode() for text in texts)


def _gantt(
    timeline: Timeline, selection: Selection, options: "TraceOptions", *, to_terminal: bool
) -> list[bytes]:
    from ..views.gantt import render_gantt  # noqa: PLC0415 - the other formats start faster without

    encoding = "utf-8"
    if options.output is None:
        encoding = encoding_of(sys.stdout.encoding)
    size = terminal_size(1)
    gantt = render_gantt(
        timeline,
        selection,
        width=options.width or size.columns,
        height=size.lines if to_terminal else None,
        ascii_only=not can_print(encoding),
    )
    lines = ["".join(text for text, _ in line) for line in gantt]
    may_color = to_terminal or options.color == "always"  # FORCE_COLOR does not count for a pipe
    if may_color and wants_color(options.color, 1):
        from ..screen.theme import colored  # noqa: PLC0415 - with it comes rich

        lines = colored(gantt)
    return [f"{line}\n".encode(encoding, "backslashreplace") for line in lines]


def _play(options: "TraceOptions") -> int:
    for name in ("format", "width", "slot", "output", "force", "open"):
        if getattr(options, name):
            raise BatchdecodeError(f"--{name} does not work with --play, which shows every slot")
    path, source = open_twice(options.input)
    if not can_animate(1):
        raise BatchdecodeError("--play needs a terminal; use --format gantt or steps instead")
    from ..views.player import play  # noqa: PLC0415 - as above

    with source:
        return play(options.color, lambda terminal: _player(options, path, source, terminal))


def _player(
    options: "TraceOptions", path: str, source: OpenInput, terminal: "InteractiveTerminal"
) -> "Player":
    from ..views.player import DEFAULT_SPEED, Player, StepRange  # noqa: PLC0415 - as above
    from ..views.recording import Recording  # noqa: PLC0415 - as above

    events = events_of(path, source, options.run_options, options.preset)
    with _contradictions_named(source.name):
        recording = Recording.from_events(terminal.with_progress(events, source.name))
    window = recording.timeline.window(_selection_of(recording.timeline, options))
    found = recording.admissions_of(options.request or ())
    first = options.from_step
    if first is None:
        point = recording.first_point
        first = min(found, default=window[0] if point not in window or point is None else point)
    elif first not in window:
        raise BatchdecodeError(
            f"--from {first}: the steps to play are {window[0]:,} to {window[-1]:,}"
        )
    return Player(
        recording,
        source.name.rpartition("/")[2],
        terminal,
        span=StepRange(window[0], window[-1]),
        step=first,
        speed=options.speed or DEFAULT_SPEED,
        found=found,
    )


@dataclass(frozen=True, slots=True)
class _Events:
    """The events of an input, which can be iterated repeatedly."""

    path: str
    source: OpenInput

    def __iter__(self) -> Iterator[Event]:
        return events_of(self.path, self.source, {})


def show_why(options: "WhyOptions") -> None:
    """Run `batchdecode trace why`; with a longest one the input is the first argument."""
    request_id, path = options.request_id, options.input
    longest, longest_wait = options.longest, options.longest_wait
    if longest and longest_wait:
        raise BatchdecodeError("--longest cannot be used with --longest-wait")
    if longest or longest_wait:
        if path is not None:
            flag = "--longest" if longest else "--longest-wait"
            raise BatchdecodeError(f"{flag} cannot be used with an ID: drop {request_id} or {flag}")
        request_id, path = None, request_id
    elif request_id is None:
        raise BatchdecodeError("trace why needs the ID of a request, or --longest")
    elif path is None and os.isatty(0):
        hint = _missing_input(request_id)
        raise BatchdecodeError(f"trace why {request_id} needs an INPUT, - for stdin{hint}")
    try:
        again, source = open_twice(path)
    except InputError as error:
        if request_id is not None and path is not None and os.path.isfile(request_id):  # noqa: PTH113 - raises nothing
            swapped = shlex.join([path, request_id])
            raise InputError(f"{error}; did you mean: batchdecode trace why {swapped}?") from None
        raise
    title: list[str] = []
    with source, user_code_prints_to_stderr():
        events = events_of(again, source, options.run_options, options.preset)
        with _contradictions_named(source.name):
            kept = read_requests(events, request_id)
            if request_id is None:
                slowest = kept.longest_wait if longest_wait else kept.longest
                num_outputs, what = len(kept.all), "longest wait" if longest_wait else "longest"
                if slowest is None:
                    raise BatchdecodeError(f"{source.name} has no request")
                kept.only(slowest.id)
                title = [f"{what} of {counted(num_outputs, 'output')}: {slowest.label}"]
            elif not kept.is_known:
                hint, known = "", kept.ids
                if path is None:
                    hint = _missing_id(request_id) if known else _missing_input(request_id)
                hint = hint or _alike_names(request_id, known, path)
                raise BatchdecodeError(f"{source.name} has no request {request_id}{hint}")
            answer = answer_of(kept)
    if options.json:
        print_json(answer)
        return
    length = WHOLE if options.all else SHORT
    stories = [tell(story, length) for story in answer.stories]
    stories += map(tell_reject, answer.rejects)
    _print_lines(_in_columns([*title, *(line for story in stories for line in story)]))


def _missing_input(request_id: str) -> str:
    line = shlex.join([request_id, "FILE"])
    return _missing_id(request_id) or (
        f": run batchdecode trace why {line}, where FILE is a requests file or a trace from "
        "`batchdecode run --trace FILE`"
    )


def _missing_id(argument: str) -> str:
    if not os.path.isfile(argument):  # noqa: PTH113 - this one raises nothing
        return ""
    return f"; put the ID of a request, or --longest, before the file {argument}"


def show_diff(options: "DiffOptions") -> int:
    """Run `batchdecode trace diff`; return its exit status."""
    path_a, path_b, output = options.a, options.b, options.output
    if path_a == path_b == STDIN:
        raise BatchdecodeError("A and B are both stdin: use a file for one of them")
    (again_a, source_a), (again_b, source_b) = open_twice(path_a), open_twice(path_b)
    with source_a, source_b:
        if options.html and options.json:
            raise BatchdecodeError("--html cannot be used with --json")
        if options.html:
            check_no_terminal("--html", output)
            for source, path in ((source_a, path_a), (source_b, path_b)):
                check_distinct(source.statuses, [("--output", output)], [path])
            if output is not None and not options.force:
                check_replaceable("--output", output, is_page_start)
        elif output is not None:
            raise BatchdecodeError("--output needs --html")
        events_a, events_b = _Events(again_a, source_a), _Events(again_b, source_b)
        for source in (source_a, source_b):
            first = next(_lines(source), (1, b""))
            begun = read_numbered_trace([first], source.name) if is_trace(first[1]) else ()
            run = next(iter(begun), None)
            if isinstance(run, RunEvent) and run.workers > 1:
                raise BatchdecodeError(
                    "trace diff cannot compare runs with several workers, and "
                    f"{source.name} has {run.workers}; compare the results of the runs, or their "
                    "--summary-json"
                )
        names = f"{source_a.name} or {source_b.name}"
        with user_code_prints_to_stderr(), _contradictions_named(names, "events"):
            comparison = compare(events_a, events_b)
        told = list(describe(comparison, source_a.name, source_b.name))
        width = None if options.html else columns_of(1)
        results = results_of(comparison, options.top, width)
        if options.json:
            print_json(comparison)
        elif options.html:
            from batcher.page.page import (  # noqa: PLC0415 - the text starts faster without
                PageDifference,
                PageFacts,
                PageRun,
                PageTimeline,
                encode_page,
            )

            step = None if comparison.parting is None else comparison.parting.step
            changed = [change.label for change in comparison.changes[: options.top]]
            facts = PageFacts(diff=PageDifference(step, [*told, *results], changed))
            with user_code_prints_to_stderr():
                runs = [
                    PageRun(name.rpartition("/")[2], PageTimeline.from_events(events))
                    for name, events in ((source_a.name, events_a), (source_b.name, events_b))
                ]
                title = " and ".join(run.name for run in runs)
                page = encode_page(runs, facts, PAGE_WORDS, title)
                with output_sink(output) as sink:
                    write_lines(page, sink)
        else:
            _print_lines([*_in_columns(told), *results])
    return 0 if comparison.is_equal else 1


def _in_columns(lines: list[str]) -> list[str]:
    width = terminal_size(1).columns
    return [part for line in lines for part in wrapped(printable(line), width)]


def _print_lines(lines: Iterable[str]) -> None:
    print_text("".join(f"{printable(line)}\n" for line in lines))


def open_twice(path: str | None) -> tuple[str, OpenInput]:
    """Return the input and a path to open it again; a pipe is spooled as stdin."""
    path = path or STDIN
    if _is_pipe(path):
        _keep_as_stdin(path)
        path = STDIN
    return path, open_input(path, nullcontext)


def events_of(
    path: str, source: OpenInput, run_options: Mapping[str, Any], preset: Collection[str] = ()
) -> Iterator[Event]:
    """Yield the events of a trace, a log or requests; raise BatchdecodeError for anything else.

    run_options: the options given for running requests.  preset: those that are no mistake for a
    trace.
    """
    _, first_line = next(_lines(source), (0, b""))
    is_log = kind_of_log(first_line) is not None
    if is_log or is_trace(first_line):
        for option in (name for name in run_options if name not in preset):
            name, held = option.replace("_", "-"), "log" if is_log else "trace"
            raise BatchdecodeError(f"--{name} needs requests, but {source.name} is a {held}")
        if is_log:
            log = read_log(_lines(source), source.name)
            missing = [
                "which slot each request held (here the lowest free one)",
                *sorted(log.missing),
            ]
            sys.stderr.write(f"{printable(source.name)} does not record {listed(missing)}\n")
            return events_of_log(log)
        return read_numbered_trace(_lines(source), source.name, TraceChecks().complaint)
    if not run_options.get("keep_going"):  # or else it may be any bad line
        _check_is_request(first_line, source.name)
    if path == STDIN:
        os.lseek(0, 0, os.SEEK_SET)
    from ..run.run import run_events  # noqa: PLC0415 - as above
    from ..run.run_options import RunOptions  # noqa: PLC0415 - with the engine comes numpy

    options = dict(run_options)
    config = options.pop("config", None)
    if config is not None:
        options |= model_settings(config)
    given = {name: options.pop(name) for name in OF_SCHEDULING & options.keys()}
    checkpoint = {n: options.pop(n) for n in LOADING_SETTINGS if n in options}
    defaults = {n: options.pop(n) for n in OF_ROWS if n in options}
    scheduling = SchedulingOptions(**given)
    return run_events(
        RunOptions(
            input=[path], scheduling=scheduling, checkpoint=checkpoint, defaults=defaults, **options
        )
    )


@contextmanager
def _contradictions_named(name: str, events: str = "its events") -> Iterator[None]:
    """Add the name of the input to errors about contradicting events."""
    try:
        yield
    except InvariantError as error:
        raise BatchdecodeError(f"{name}: {events} contradict each other: {error}") from error


def _alike_names(request_id: str, known: Collection[str], path: str | None) -> str:
    """Return the end of a message on an unknown request: similar ids, or all if they are few."""
    names = sorted(known)
    if 0 < len(names) <= FEW_NAMES:
        return f"; known: {listed(names, 'and')}"
    near = get_close_matches(request_id, names)
    hint = f"; did you mean {listed(near)}?" if near else ""
    if path is None or path == STDIN:
        return hint
    return f"{hint} (batchdecode trace {shlex.quote(path)} --format spans lists all)"


def _check_is_request(first_line: bytes, name: str) -> None:
    try:
        fields = msgspec.json.decode(first_line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if first_line.isspace() or not first_line or _REQUEST_KEY.search(first_line):
            return
        fields = None
    if not isinstance(fields, dict):
        found = why_no_lines(first_line, name) or "is neither a trace nor requests"
        raise BatchdecodeError(f"{name} {found}")
    is_stream = fields.get("event") == "token"
    if is_stream or _RESULT_KEYS & fields.keys():
        held = "a stream" if is_stream else "results"
        raise BatchdecodeError(
            f"{name} contains {held}: pass the trace of that run (--trace FILE), or its requests"
        )
    if "event" in fields:
        raise BatchdecodeError(
            f'{name}: the first line of the trace, {{"event":"run",...}}, is missing'
        )
    if not any(get_close_matches(key, _REQUEST_KEYS) for key in fields):
        raise BatchdecodeError(
            f"{name} is neither a trace nor requests: its first line has no prompt"
        )


def _is_pipe(path: str) -> bool:
    if path == STDIN:
        return not stat.S_ISREG(os.fstat(0).st_mode) or os.lseek(0, 0, os.SEEK_CUR) > 0
    try:
        mode = Path(path).stat().st_mode
    except OSError:  # opening it reports the error
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def _keep_as_stdin(path: str) -> None:
    import tempfile  # noqa: PLC0415 - for a pipe only

    name = "<stdin>" if path == STDIN else path
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - it lives on as stdin
    try:
        with io.FileIO(0 if path == STDIN else path, closefd=path != STDIN) as raw:
            pipe, num_bytes = PatientPipe(raw, nullcontext), 0  # of the last line
            while chunk := pipe.read(CHUNK_BYTES):
                copy.write(chunk)
                num_bytes = len(chunk) + (-chunk.rfind(b"\n") - 1 if b"\n" in chunk else num_bytes)
                if num_bytes > MAX_SKIPPED_BYTES:
                    copy.close()
                    limit = f"{MAX_SKIPPED_BYTES >> 30} GiB"
                    raise InputError(f"cannot read {name}: a line does not end within {limit}")
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror}") from error
    copy.seek(0)
    os.dup2(copy.fileno(), 0)


def _lines(source: OpenInput) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of the input; a truncated gzip file has those before the cut."""
    with suppress(CutOffError):
        yield from source.lines()
