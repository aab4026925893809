"""Everything a run reads, writes and says, held open from its start to its end.

One engine and a group of workers use the same files, in the same order.
"""

import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from batcher.errors import BatchdecodeError
from batcher.events import Event, RunEvent, TokenEvent
from batcher.page import is_page_start
from batcher.requests.results import encode_tokens
from batcher.trace.files import encode_events, is_trace_start

from ..errors import WriteError
from ..models import is_real
from ..options import STDOUT
from ..screen.terminal import (
    columns_of,
    counted,
    encoding_of,
    is_same_terminal,
    printable_lines,
    wants_color,
)
from ..screen.view import View
from ..signals import Interrupted, StopSignals, stdout_descriptor
from .files import (
    BESIDE_RESULTS,
    OutFile,
    OutputError,
    ResumeError,
    Sink,
    TerminalJson,
    UploadedResults,
    check_distinct,
    check_replaceable,
    check_writable,
    is_alone,
    may_be_file,
    output_sink,
    stdout_json_sink,
)
from .input import InputError, OpenInput, open_input
from .problems import InvalidInput, ProblemReport, say, say_of_memory
from .resume import Resumption
from .run_options import RunOptions
from .urls import is_url, shown

if TYPE_CHECKING:
    from batcher.decoding.constraints import ConstraintTimes
    from batcher.metrics.prometheus import RunCollector
    from batcher.metrics.summary import RunMetrics, RunSummary
    from batcher.page.page import PageTimeline

    from ..screen.live import LiveView
    from ..screen.summary import BytesPerToken
    from .exporters import Exposition
    from .loop import Loop
    from .spans import SpanSender
    from .workers import InputLines

BAD_INPUT = 2  # an exit status
RESULT_SECONDS, TRACE_SECONDS = 0.02, 0.2  # for which lines may be kept
MAX_EVENTS = 1000  # that are kept
_WRITTEN_ANEW: dict[str, Callable[[bytes], object]] = {  # what tells ours from other files
    "--trace": is_trace_start,
    "--summary-json": re.compile(rb'\{\s*"requests":').match,
    "--report": is_page_start,
    "--metrics-file": re.compile(b"# HELP (vllm:|batchdecode_)").match,
    "--timeseries": re.compile(b"(worker,)?time,steps,running,").match,
}
_RESUME = re.compile(r"(?<= )--resume(?= |$)")


Item = TypeVar("Item")


class BufferedWriter(Generic[Item]):
    """Writes items soon, not at once: that would cost each step a system call or two."""

    def __init__(
        self,
        sink: Sink,
        encode: Callable[[list[Item]], bytes],
        max_seconds: float,
        max_items: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink, self._encode, self._clock = sink, encode, clock
        self._max_seconds, self._max_items = max_seconds, max_items
        self._kept: list[Item] = []
        self._last_flush = clock()

    def write(self, items: Sequence[Item]) -> None:
        self._kept += items
        waited = self._clock() - self._last_flush
        if waited > self._max_seconds or len(self._kept) >= self._max_items:
            self.flush()

    def flush(self) -> None:
        if self._kept:
            kept, self._kept = self._kept, []
            self._write_out(kept)
        self._last_flush = self._clock()

    def _write_out(self, items: list[Item]) -> None:
        self._sink.write(self._encode(items))

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._sink.close()


class TraceWriter(BufferedWriter[Event]):
    """Writes the events of a trace."""

    def __init__(self, sink: Sink, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(sink, encode_events, TRACE_SECONDS, MAX_EVENTS, clock)


class ResultWriter(BufferedWriter[bytes]):
    """Writes lines of results, at once unless they go to a file; an item may hold several lines.

    num_written: the lines of results that are out.  num_token_events: those of a stream.
    """

    def __init__(self, sink: Sink, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_written = self.num_token_events = 0
        max_items = float("inf") if sink.is_file else 0
        super().__init__(sink, b"".join, RESULT_SECONDS, max_items, clock)

    def write_tokens(self, tokens: Sequence[TokenEvent]) -> None:
        """Write the token events of a step, which go before its answers, at once."""
        self.flush()
        self._sink.write(encode_tokens(tokens))
        self.num_token_events += len(tokens)

    def _write_out(self, items: list[bytes]) -> None:
        """Write the items; if the disk is too full for all of them, the first ones that fit."""
        try:
            super()._write_out(items)
        except WriteError:
            if not self._sink.is_file:
                raise
            for item in items:
                self._sink.write(item)
                self._count(item)
        else:
            self._count(b"".join(items))

    def _count(self, lines: bytes) -> None:
        self.num_written += len(BytesIO(lines).readlines())  # bytes.count() takes much longer


class _ViewSink:
    """Prints results above the live view: stdout and stderr are one terminal."""

    is_file = False

    def __init__(self, view: "LiveView") -> None:
        self._view = view

    def write(self, lines: bytes) -> None:
        self._view.write_results(lines)

    def close(self) -> None:
        """Leave the view open."""


def stdout_beside(view: View) -> Sink:
    """Return where results go that have no file; above a picture on the same terminal."""
    if is_same_terminal(stdout_descriptor(), 2):
        from ..screen.live import LiveView  # noqa: PLC0415 - a run without a terminal starts faster

        if isinstance(view, LiveView):
            return TerminalJson(_ViewSink(view))
    return stdout_json_sink()


# -- what a run opens


class OpenRun(NamedTuple):
    """The files of a run, which are held until it has ended.

    options: as given, and --output as a file here.  files: those beside the results, by option.
    """

    options: RunOptions
    requests: OpenInput
    files: Mapping[str, OutFile]
    results: OutFile
    resumption: Resumption
    exposition: "Exposition | None"
    spans: "SpanSender | None"


@contextmanager
def opened_run(options: RunOptions, stop: StopSignals, num_workers: int = 1) -> Iterator[OpenRun]:
    """Open and lock all that a run reads and writes; a model may take minutes to load after that.

    Raises:
        BatchdecodeError: the input cannot be read, or a file cannot be written; see locked_files.
        ResumeError: there are results which are not to be resumed, or cannot be.
    """
    with (
        open_input(options.input, stop.waiting) as requests,
        locked_files(options, requests.status) as files,
    ):
        spans, output = None, options.output
        if options.otel is not None:
            try:
                from .spans import SpanSender  # noqa: PLC0415 - an extra
            except ModuleNotFoundError as error:
                raise BatchdecodeError(
                    "--otel needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http: "
                    "install them with `pip install 'batchdecode[otel]'`"
                ) from error
            endpoint = None if options.otel == "env" else options.otel
            spans = SpanSender(endpoint, options.model, num_workers)
        file = OutFile(output)
        if output is not None and is_url(output):
            if options.resume:
                raise ResumeError(
                    f"--resume needs a local --output: download {shown(output)} with its "
                    ".run.json and .run.sums, resume there, and upload it when it is complete"
                )
            file = UploadedResults(output, stop.waiting)
        with file as results, ExitStack() as exposed:
            exposition = None
            if options.is_exposed:
                from .exporters import Exposition  # noqa: PLC0415 - few runs are asked for it

                served = Exposition(options.metrics_address, files.get("--metrics-file"))
                if served.url is not None and not options.quiet:
                    say(f"metrics at {served.url}\n")
                exposition = exposed.enter_context(served)
            options = replace(options, output=results.path)
            resumption = Resumption(options, requests, results)
            yield OpenRun(options, requests, files, results, resumption, exposition, spans)


def close_spans(spans: "SpanSender | None", num_steps: list[int], *, is_quiet: bool) -> None:
    if spans is not None:
        spans.close(num_steps)
        if spans.num_dropped or not is_quiet:
            say(printable_lines(f"{spans.describe()}\n"))


@contextmanager
def locked_files(
    options: RunOptions, input_status: os.stat_result
) -> Iterator[Mapping[str, OutFile]]:
    """Give the files that a run writes besides its results, by option: locked, as they were.

    Results are looked after where it is known what run they are of, see `prepare`.

    Raises:
        OutputError: one of all files cannot be written, or is used twice, or holds something that
        would be lost.
    """
    named = {
        "--trace": options.trace,
        "--summary-json": None if options.summary_json == STDOUT else options.summary_json,
        "--report": options.report,
        "--metrics-file": options.metrics_file,
        "--timeseries": options.timeseries,
    }
    beside = []
    if options.output is not None and may_be_file(options.output):
        beside = [f"{shown(options.output)}{ending}" for ending in BESIDE_RESULTS]
    outputs = [
        ("--output", options.output),
        *[("what stands beside --output,", path) for path in beside],
        *named.items(),
    ]
    check_distinct(input_status, outputs, options.input)
    if options.metrics_file is not None and is_url(options.metrics_file):
        raise OutputError(
            f"--metrics-file {shown(options.metrics_file)}: it is for the node exporter of this "
            "machine, and so a file of it"
        )
    for name, path in outputs:
        if path is not None and path not in beside:
            check_writable(path)
            if name in _WRITTEN_ANEW and not options.force:
                check_replaceable(name, path, _WRITTEN_ANEW[name])
    if options.output is not None and is_url(options.output) and not options.force:
        check_replaceable("--output", options.output)
    for path in beside:  # which no option names: links are not followed
        try:
            status = Path(path).lstat()
        except OSError:
            check_writable(path)
            continue
        if stat.S_ISDIR(status.st_mode) or not (options.force or is_alone(status)):
            raise OutputError(
                f"{path} is a link, or no file: a run with this --output writes there. Remove it, "
                "or give another --output"
            )
    with ExitStack() as locked:
        yield {
            name: locked.enter_context(OutFile(path))
            for name, path in named.items()
            if path is not None
        }


# -- what reads the events of a run


class EventReaders:
    """Passes the events of a run on to its trace, numbers, series, report and spans.

    metrics: its numbers, if they are asked for.  observer: takes events for them, with `lock`.
    """

    def __init__(self, opened: OpenRun, num_workers: int = 1) -> None:
        options, files = opened.options, opened.files
        self.trace = TraceWriter(files["--trace"].open()) if options.trace else None
        self.series = None
        if options.timeseries is not None:
            from .exporters import SeriesWriter  # noqa: PLC0415 - few runs need it

            sink = files["--timeseries"].open()
            self.series = SeriesWriter(sink, options.timeseries_interval, num_workers)
        self.timeline = None
        if options.report is not None:
            from batcher.page.page import PageTimeline  # noqa: PLC0415 - as above

            self.timeline = PageTimeline()
        self.spans = opened.spans
        self.metrics: RunMetrics | None = None
        self.observer: RunMetrics | RunCollector | None = None
        self.lock: AbstractContextManager[object] = nullcontext()

    def take(self, events: Sequence[Event]) -> None:
        if self.trace is not None:
            self.trace.write(events)
        if self.observer is not None:
            with self.lock:
                self.observer.observe(events)
        if self.spans is not None:
            self.spans.take(events)
        if self.series is not None:
            self.series.write_known()
        if self.timeline is not None:
            for event in events:
                self.timeline.add(event)

    def flush(self) -> None:
        if self.trace is not None:
            self.trace.flush()

    def close(self, num_steps: int) -> None:
        """End the files, whatever one of them raises; num_steps: see RunMetrics.close."""
        with ExitStack() as files:
            if self.series is not None and self.metrics is not None:
                files.callback(self.series.close)
                files.callback(self.metrics.close, num_steps)
            if self.trace is not None:
                self.trace.close()


# -- what a run says at its end


def how_it_ended(error: BaseException, stop: StopSignals) -> tuple[int, str, bool]:
    """Return the exit status of a run that `error` ends, why it ends, and whether at once.

    Raises:
        OutputError, ResumeError: the error, if there is no run yet, or none to go on with.
    """
    if isinstance(error, KeyboardInterrupt):
        return stop.exit_status, f"stopped by {stop.name}", not isinstance(error, Interrupted)
    if isinstance(error, OutputError | ResumeError):
        raise error
    return BAD_INPUT if isinstance(error, InputError) else 1, f"error: {error}", True


def settle_files(opened: OpenRun) -> None:
    """Make sure that all that a run has written is on the disk, the results last.

    Raises:
        WriteError: some of it is not, or a file is gone.
        Interrupted: a signal came.
    """
    for file in (*opened.files.values(), opened.results):
        file.settle()


def tell_ending(
    opened: OpenRun,
    results: ResultWriter | None,
    resumption: Resumption,
    remark: str,
    what_now: str,
) -> None:
    """Report why the run ends, where its results are if there are any, and how to go on.

    results: None if the run has not begun.
    """
    file = opened.results
    if results is not None and (results.num_written or results.num_token_events):
        went = counted(results.num_written, "result")
        if opened.options.stream:
            went += f" and {counted(results.num_token_events, 'token event')}"
        remark += f"; {went} went to {file.whereabouts()}"
    say(printable_lines(f"{remark}\n"))
    if resumption.is_possible and file.is_in_place:
        if isinstance(file, UploadedResults):
            what_now = file.resuming(what_now)
        if file.has_foreign_lines:
            what_now = _RESUME.sub("--resume=repair", what_now, count=1)
        say(printable_lines(f"{what_now}\n"))


def tell_summary(
    opened: OpenRun,
    summary: "RunSummary",
    run: RunEvent,
    timelines: "Sequence[PageTimeline] | None",
    *,
    elapsed: float,
    is_complete: bool,
    num_unread: int = 0,
    kv_bytes: "BytesPerToken | None" = None,
    constraint_times: "ConstraintTimes | None" = None,
    remark: str = "",
) -> None:
    """Write the numbers of a run, and show them.

    run: how its trace begins.  timelines: of its workers, for a report.
    remark: a line that follows the summary.

    Raises:
        WriteError, OutputError: one of the files cannot be written; the others are.
    """
    options = opened.options
    if is_real(options.model):
        from batcher.metrics.summary import with_wall_clock  # noqa: PLC0415 - few runs need it

        summary = with_wall_clock(summary, elapsed)
    failures: dict[str, Exception] = {}
    if options.summary_json is not None or options.report is not None:
        from batcher.metrics.summary import encode_summary  # noqa: PLC0415 - few runs have one

        from .exporters import write_report  # noqa: PLC0415 - as above

        for name, path in (("--summary-json", options.summary_json), ("--report", options.report)):
            file = opened.files.get(name)
            try:
                if name == "--summary-json" and path is not None:
                    with output_sink(file) as sink:
                        sink.write(encode_summary(summary))
                elif file is not None and timelines is not None:
                    write_report(file, timelines, summary, run, opened.requests.name)
            except (WriteError, OutputError) as error:
                failures[name] = error
    if not options.quiet:
        from ..screen.summary import NOT_TOLD, RunFiles, render_summary  # noqa: PLC0415 - as above

        has_numbers = options.summary_json != STDOUT and "--summary-json" not in failures
        paths = (
            opened.results.name,
            options.trace,
            None if "--report" in failures else options.report,
            options.summary_json if has_numbers else None,
            options.timeseries,
            options.metrics_file,
        )
        text = render_summary(
            summary,
            RunFiles(*(path if path is None else shown(path) for path in paths)),
            is_complete=is_complete,
            num_unread=num_unread,
            elapsed=elapsed,
            encoding=encoding_of(sys.stderr.encoding, os.environ),
            has_color=wants_color(options.color, 2, os.environ),
            is_timed=bool(run.step_time),
            columns=columns_of(2, os.environ),
            kv_bytes=kv_bytes or NOT_TOLD,
        )
        say(text + printable_lines(remark))
        if options.stats:
            from ..screen.summary import render_stats  # noqa: PLC0415 - few runs tell so much

            say(render_stats(summary, constraint_times, is_timed=bool(run.step_time)))
        scheduling = options.scheduling
        if scheduling.profile is not None and options.workers is None:
            say_of_memory([(scheduling.profile, scheduling.settings())])
    for failure in failures.values():
        raise failure


def refuse_rest(report: ProblemReport, read: "Loop | InputLines") -> None:
    """Report what has ended the reading before the end of the input, if anything has.

    Raises:
        InvalidInput: a bad line has.
        InputError: the pipe has, which was damaged or cut off there.
    """
    if read.broken is not None:
        raise read.broken
    if read.has_refused:
        what_now = "reading stopped there. --keep-going to skip such lines."
        raise InvalidInput(report, read.num_read, what_now)
