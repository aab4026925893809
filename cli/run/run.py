"""`batchdecode run`: an engine or workers, and the list of sinks that take what they yield.

A sink takes the events of each step: the trace, the numbers, the live view, spans, the run over
time and the report.  Results are written after the events of their step.
"""

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from batcher.errors import BatchdecodeError
from batcher.events import Event, RunEvent
from batcher.foreign import RaisedError
from batcher.garbage import look_seldom
from batcher.models.base import number_of
from batcher.models.simulated import SimulatedModel
from batcher.remote.model import RemoteModel

from ..errors import WriteError
from ..models import is_real
from ..options import STDOUT
from ..screen.progress import open_view
from ..screen.terminal import (
    Pace,
    columns_of,
    counted,
    encoding_of,
    is_pipe,
    is_same_terminal,
    printable_lines,
    shell_line,
    wants_color,
)
from ..screen.view import RunPlan, View
from ..signals import Interrupted, StepWatch, StopSignals, stdout_descriptor
from .engine_setup import EngineSetup
from .files import NAMES_OF_STDOUT, OutputError, ResumeError, UploadedResults, output_sink
from .input import InputError, OpenInput, Waiting, open_requests, open_source
from .loop import Loop
from .problems import InvalidInput, ModelTracebacks, ProblemReport, say, say_of_memory, say_of_slo
from .recording import OpenRun, ResultWriter, TraceWriter, opened_run, stdout_beside
from .results import Answers, InputOrder, Replaying, ResultText
from .resume import conclude_finished
from .run_options import RunOptions
from .urls import shown

if TYPE_CHECKING:
    from batcher.metrics.summary import RunMetrics, Summary
    from batcher.metrics.times import TimeSeries
    from batcher.page.page import PageTimeline

    from .resume import EarlierResults
    from .workers import InputLines, Transport, Workers

BAD_INPUT = 2  # an exit status

ContinuingCommand = Callable[..., list[str]]
"""Returns the words of the command that continues a run; its `resume` may be --resume=repair."""


class RunSetup(EngineSetup):
    """The model and the engine of a run, and its input."""

    def __init__(
        self, options: RunOptions, requests: OpenInput, waiting: Waiting = nullcontext
    ) -> None:
        self.requests = requests
        has_picture = not options.quiet and options.live == "always"
        if options.live == "auto" and not options.quiet:
            has_picture = options.output is not None or not is_pipe(stdout_descriptor())
        super().__init__(options, waiting, is_shown=has_picture)
        self.report = ProblemReport(requests.name, options.color, requests.place_of)
        if isinstance(self.model, RemoteModel):
            self.model.report = lambda text: self.report.tell(printable_lines(text))

    def run_event(self) -> RunEvent:
        return self.engine.run_event()

    @property
    def replaying(self) -> Replaying:
        if isinstance(self.model, RemoteModel):
            return "whole"
        return "steps" if self.options.scheduling.has_default_schedule else "never"

    def loop(self, earlier: "EarlierResults | None" = None) -> Loop:
        """Return the loop over the requests, after a first pass over a file.

        Raises:
            InvalidInput: the file has bad lines, and they are not to be skipped.
            InputError: the file cannot be read.
        """
        options = self.options
        keep_going = options.keep_going or options.max_errors is not None
        # The clock of a server never stops, so its run does not wait for a pipe.
        is_followed = isinstance(self.model, RemoteModel) and not self.requests.is_file
        try:
            source = open_source(
                self.requests,
                self.parser(self.report.tell),
                self.report,
                keep_going=keep_going,
                follow=options.follow or is_followed,
                waiting=self._waiting,
                wake=self.engine.wake,
            )
        finally:
            say(self.requests.take_notes() + self.report.closing())
        is_reported = keep_going and source.total is not None
        order = InputOrder() if options.keep_order and earlier is None else None
        return Loop(
            self.engine,
            source,
            Answers(self.model.name, self.bytes_of, earlier, order, replaying=self.replaying),
            keep_going=keep_going,
            max_errors=options.max_errors,
            on_bad_line=None if is_reported else self.report.add,
        )


def run_events(options: RunOptions) -> Iterator[Event]:
    """Yield the events of a run; write nothing but problems of the input, to stderr."""
    with open_requests(options, nullcontext) as requests:
        setup = RunSetup(options, requests)
        with closing(setup.engine):
            loop = setup.loop()
            yield loop.engine.run_event()
            for events, _, _ in loop:
                yield from events
            say(setup.report.closing())
            refuse_rest(setup.report, loop)
            yield loop.engine.end_event()


def refuse_rest(report: ProblemReport, read: "Loop | InputLines") -> None:
    """Raise if the reading has ended before the end of the input.

    Raises:
        InvalidInput: at a bad line.
        InputError: at a damaged or broken pipe.
    """
    if read.broken is not None:
        raise read.broken
    if read.has_refused:
        what_now = "reading stopped there. --keep-going to skip such lines."
        raise InvalidInput(report, read.num_read, what_now)


def run(
    options: RunOptions,
    stop: StopSignals,
    command: ContinuingCommand,
    workers: "AbstractContextManager[Transport] | None" = None,
) -> int:
    """Carry out `batchdecode run`; return its exit status.

    command: returns the words of the command that continues this run.
    workers: the transport of a run with --workers; None for processes, or for --on.

    Raises:
        BatchdecodeError: the input, an option or a file is wrong.
        BrokenPipeError: the reader of the output is gone.
        Interrupted: a signal came before the first step.
    """
    options.check()
    if options.output in NAMES_OF_STDOUT:  # so no files are written next to it
        options = replace(options, output=None)
    if options.summary_json == STDOUT and options.output is None:
        raise BatchdecodeError(
            "the results and --summary-json - cannot both go to stdout: write one of them to a file"
        )
    if options.slo is not None and options.scheduling.profile is not None and not options.quiet:
        say_of_slo([options.slo])
    with opened_run(options, stop) as files, ExitStack() as stack:
        setup: RunSetup | Workers
        if options.workers is None:
            setup = RunSetup(files.options, files.requests, stop.waiting)
            stack.callback(setup.engine.close)
        else:
            from . import workers as by_workers  # noqa: PLC0415 - few runs have some

            started = workers or by_workers.transport_of(options, stop.waiting)
            transport = stack.enter_context(started)
            setup = by_workers.Workers(files.options, files.requests, transport)
        opened = files._replace(options=setup.options)
        resumption = stack.enter_context(
            opened.resumption.prepare(setup.options, opened.requests, setup.run_event())
        )
        status = conclude_finished(resumption, setup.options)
        if status is not None:
            return status
        try:
            return Run(setup, opened, stop, command).carry_out()
        except Interrupted:  # before the first step, or after the last one
            tell_ending(opened, f"stopped by {stop.name}", "continue with: ", command)
            return stop.exit_status


EventSink = Callable[[Sequence[Event]], object]


def _with_lock(lock: AbstractContextManager[object], take: EventSink) -> EventSink:
    def take_locked(events: Sequence[Event]) -> None:
        with lock:
            take(events)

    return take_locked


def _one_by_one(take: Callable[[Event], object]) -> EventSink:
    def take_each(events: Sequence[Event]) -> None:
        for event in events:
            take(event)

    return take_each


class Run:
    """A run that is ready to begin: its loop, and the sinks of what the loop yields.

    command: returns the words of the command that continues it.

    Raises:
        BatchdecodeError: the input is wrong, or a file cannot be opened.
        Interrupted: a signal came while a FIFO had no reader.
    """

    _metrics: "RunMetrics | None" = None

    def __init__(
        self,
        setup: "RunSetup | Workers",
        opened: OpenRun,
        stop: StopSignals,
        command: ContinuingCommand,
    ) -> None:
        look_seldom()
        self._started = time.monotonic()
        self._setup, self._opened, self._stop, self._command = setup, opened, stop, command
        options, files, resumption = setup.options, opened.files, opened.resumption
        self._options, self._resumption = options, resumption
        loop = self._loop = setup.loop(resumption.earlier)
        if not options.quiet:
            text = resumption.describe(loop.total, is_decoded_again=setup.replaying == "never")
            if text and options.workers is not None:
                text += "the numbers and the trace of --workers cover only what is decoded now\n"
            say(printable_lines(text))
        gc.freeze()  # the requests that are read already are no garbage
        self._pace = Pace(options.step_delay)
        view = self._view = self._open_view()
        self._closing = closing = ExitStack()
        closing.callback(loop.close)
        sinks: list[EventSink] = []
        self._trace = None
        if options.trace:
            self._trace = TraceWriter(files["--trace"].open())
            sinks.append(self._trace.write)
        series, is_exposed = None, opened.exposition is not None
        all_series: list[TimeSeries | None] = [None] * len(loop.num_steps)
        if options.timeseries is not None:
            from .exporters import SeriesWriter  # noqa: PLC0415 - few runs need it

            sink = files["--timeseries"].open()
            series = SeriesWriter(sink, options.timeseries_interval, len(all_series))
            all_series = list(series.all_series)
        is_asked = not options.quiet or options.summary_json or options.report or series
        if is_exposed or is_asked:
            from batcher.metrics.summary import RunMetrics  # noqa: PLC0415 - a quiet run has none

            limits = options.limits
            if isinstance(loop, Loop):
                metrics = RunMetrics(limits, all_series[0], view.fold, is_watched=is_exposed)
            else:
                metrics = RunMetrics(limits, is_watched=is_exposed, worker_series=all_series)
                loop.metrics, loop.fold = metrics, view.fold
            self._metrics, observe = metrics, metrics.observe
            lock = view.lock if isinstance(loop, Loop) else nullcontext()
            if opened.exposition is not None:
                collector = loop.collector(metrics, options.model)
                opened.exposition.tell(collector)
                observe = collector.observe
                closing.callback(observe, ())  # counts the last steps
            sinks.append(_with_lock(lock, observe))
        if view.fold is not None and not isinstance(loop, Loop):
            sinks.append(_with_lock(view.lock, _one_by_one(view.fold.take)))
        if opened.spans is not None:
            sinks.append(opened.spans.take)
        if series is not None:
            write_known = series.write_known
            sinks.append(lambda _events: write_known())
            closing.callback(series.close)
            closing.callback(lambda: metrics.close(max(loop.num_steps)))
        self._timeline: PageTimeline | None = None
        if options.report is not None:
            from batcher.page import page  # noqa: PLC0415 - few runs need it

            self._timeline = page.PageTimeline()
            sinks.append(_one_by_one(self._timeline.add))
        if self._trace is not None:
            closing.callback(self._trace.close)
        self._sinks = sinks
        # Opening empties the results, so it comes last: other failures leave them as they are.
        path = options.output
        results = stdout_beside(view, options) if path is None else resumption.open_results(path)
        self._results = ResultWriter(results)
        self._texts = results if isinstance(results, ResultText) else None

    def _open_view(self) -> View:
        setup, loop, options = self._setup, self._loop, self._options
        run, is_shown = setup.run_event(), options.output is None
        is_one, num_engines = isinstance(loop, Loop), len(loop.num_steps)
        is_shared = is_shown and is_same_terminal(stdout_descriptor(), 2)
        return open_view(
            RunPlan(
                setup.requests.name.rpartition("/")[2],
                run.policy,
                options.batch * num_engines,
                loop.total,
                is_timed=bool(run.step_time),
                num_workers=num_engines,
            ),
            loop,
            live=options.live,
            is_quiet=options.quiet,
            color=options.color,
            pace=self._pace if is_one else None,
            is_piped=is_shown and is_pipe(stdout_descriptor()),
            has_others=is_shared or (is_one and not isinstance(setup.model, SimulatedModel)),
            has_stdin=is_one and not setup.requests.is_terminal,
        )

    def carry_out(self) -> int:
        """Run to the end and report how it went; return the exit status."""
        setup, loop, resumption, stop = self._setup, self._loop, self._resumption, self._stop
        opened, options = self._opened, self._options
        tracebacks = ModelTracebacks(setup.report, is_quiet=options.quiet)
        watch = StepWatch(
            lambda: None if stop.has_broken_off else loop.current_step,
            self._view.still_computing,
            self._say_waiting,
            self._end_now,
        )
        status, remark, is_over = 0, "", False  # is_over: some results were not written
        try:
            with self._view, closing(self), watch, tracebacks:
                resumption.begin()
                self._record()
            stop.before_wait = None
            for file in (*opened.files.values(), opened.results):  # the results last
                file.settle()
            if loop.is_complete:
                resumption.finish()
        except KeyboardInterrupt as error:
            status, remark = stop.exit_status, f"stopped by {stop.name}"
            is_over = not isinstance(error, Interrupted)
        except (OutputError, ResumeError):
            raise
        except (WriteError, BatchdecodeError) as error:
            status, remark, is_over = 1, f"error: {error}", True
            if isinstance(error, InputError):
                status = BAD_INPUT
            if isinstance(error, RaisedError):
                tracebacks.show(error.raised)
        tracebacks.close()
        say(setup.requests.take_notes() + setup.report.closing())
        hint = None if is_over else self._summarize()
        if not isinstance(loop, Loop) and loop.num_restarts and not options.quiet:
            say(f"  {counted(loop.num_restarts, 'worker')} replaced after dying\n")
        if loop.first_failure is not None and loop.first_failure not in (hint or ""):
            say(printable_lines(f"first failure: {loop.first_failure}\n"))
        if hint is not None:
            say(f"{hint}\n")
        refuse_rest(setup.report, loop if isinstance(loop, Loop) else loop.lines)
        if remark:
            self._tell(remark, "continue with: ", self._command)
        elif loop.has_given_up:
            remark = f"stopped after {counted(loop.num_failed, 'failed request')}"
            self._tell(remark, "to continue, add --resume and raise --max-errors")
        return status or (1 if loop.num_failed else 0)

    def _record(self) -> None:
        setup, loop, stop, view = self._setup, self._loop, self._stop, self._view
        report, pace = setup.report, self._pace
        results, is_one = self._results, isinstance(loop, Loop)
        stop.before_wait, stop.before_pause = self._show_all, view.step_aside
        self._note([setup.run_event()])
        num_shown = 0
        try:
            for events, lines_now, tokens in loop:
                if events:
                    self._note(events)
                if tokens:
                    results.write_tokens(tokens)
                if lines_now:
                    results.write(lines_now)
                    view.note_results(lines_now)
                if report.news:
                    view.write_message(report.take())
                if (num_steps := sum(loop.num_steps)) > num_shown:
                    num_shown = num_steps
                    if view.is_watched:
                        if not is_one:
                            with view.lock:
                                for number, taken in enumerate(loop.num_steps):
                                    view.paces[number] = max(taken - 1, 0)
                        view.after_step(max(loop.num_steps) - 1)
                    if pace.is_slow:
                        pace.begin(time.monotonic())
                        while (seconds := pace.time_left(time.monotonic())) > 0:
                            with stop.waiting():
                                view.wait(seconds)
                elif view.is_watched:
                    view.keep_up()
                if stop.received is not None:
                    raise Interrupted
        except (KeyboardInterrupt, BatchdecodeError) as error:
            if isinstance(error, Interrupted):
                self._note(loop.arrived())
            self._write_rest()
            metrics, texts = self._metrics, self._texts
            if isinstance(error, Interrupted) and isinstance(loop, Loop) and texts and metrics:
                texts.write_unfinished(loop.unfinished_texts(metrics.fold.open))
            raise
        self._write_rest()
        self._note(loop.end_events())

    def _note(self, events: Sequence[Event]) -> None:
        for take in self._sinks:
            take(events)

    def _show_all(self) -> float:
        self._results.flush()
        if self._trace is not None:
            self._trace.flush()
        return self._view.refresh()

    def _write_rest(self) -> None:
        for lines in self._loop.rest():
            self._results.write([lines])
        self._results.flush()

    def close(self) -> None:
        """Close all files, whichever of them raises."""
        try:
            self._closing.close()
        finally:
            self._results.close()

    def _summarize(self) -> str | None:
        """Write the numbers of the run, and show them; return the advice below them.

        Raises:
            WriteError, OutputError: one of the files cannot be written; the others are.
        """
        options, loop, opened, hint = self._options, self._loop, self._opened, None
        metrics, elapsed = self._metrics, time.monotonic() - self._started
        if metrics is not None:
            if isinstance(loop, Loop):
                metrics.note_constraints(*loop.engine.constraint_counts)
            summary = metrics.summary(max(loop.num_steps))
            if is_real(options.model):
                from batcher.metrics.summary import with_wall_clock  # noqa: PLC0415 - few need it

                summary = with_wall_clock(summary, elapsed)
            failures: dict[str, Exception] = {}
            for option, is_given, write in (
                ("--summary-json", options.summary_json is not None, self._write_summary),
                ("--report", self._timeline is not None, self._write_report),
            ):
                try:
                    if is_given:
                        write(summary)
                except (WriteError, OutputError) as error:
                    failures[option] = error
            if not options.quiet:
                hint = self._show_summary(summary, failures, elapsed)
            for failure in failures.values():
                raise failure
        if opened.spans is not None:
            opened.spans.close(loop.num_steps)
            if opened.spans.num_dropped or not options.quiet:
                say(printable_lines(f"{opened.spans.describe()}\n"))
        model = self._setup.model
        if isinstance(model, RemoteModel) and model.has_refused_waits:
            remark = "requests failed because they had to wait longer than --max-wait"
            command = partial(self._command, "--retry-failed")
            self._tell(remark, "continue later with: ", command)
        if options.open:
            opened.files["--report"].show_in_browser()
        return hint

    def _write_summary(self, summary: "Summary") -> None:
        from batcher.metrics.summary import encode_summary  # noqa: PLC0415 - few runs have one

        with output_sink(self._opened.files.get("--summary-json")) as sink:
            sink.write(encode_summary(summary))

    def _write_report(self, summary: "Summary") -> None:
        from .exporters import write_report  # noqa: PLC0415 - few runs need it

        timeline, opened = self._timeline, self._opened
        if timeline is not None:
            timelines = [timeline] if isinstance(self._loop, Loop) else timeline.workers
            run, name = self._setup.run_event(), opened.requests.name
            write_report(opened.files["--report"], timelines, summary, run, name)

    def _show_summary(
        self, summary: "Summary", failures: dict[str, Exception], elapsed: float
    ) -> str | None:
        from ..screen.summary import (  # noqa: PLC0415 - a quiet run does without
            NOT_TOLD,
            BytesPerToken,
            RunFiles,
            advice,
            render_stats,
            render_summary,
        )

        setup, loop, options = self._setup, self._loop, self._options
        run, constraint_times, kv_bytes, remark = setup.run_event(), None, NOT_TOLD, ""
        if isinstance(setup, RunSetup):
            model, constraint_times = setup.model, setup.engine.constraint_times
            if not isinstance(model, RemoteModel):
                of_drafts = options.scheduling.draft_bytes_per_token(model)
                kv_bytes = BytesPerToken(number_of(model, "kv_bytes_per_token"), of_drafts)
            elif model.replaced:
                names = ", ".join(model.replaced)
                remark = f"  model {model.served_model} was used instead of {names}\n"
        has_numbers = options.summary_json != STDOUT and "--summary-json" not in failures
        paths = (
            self._opened.results.name,
            options.trace,
            None if "--report" in failures else options.report,
            options.summary_json if has_numbers else None,
            options.timeseries,
            options.metrics_file,
        )
        text = render_summary(
            summary,
            RunFiles(*(path if path is None else shown(path) for path in paths)),
            is_complete=loop.is_complete,
            num_unread=loop.num_unread or 0,
            elapsed=elapsed,
            encoding=encoding_of(sys.stderr.encoding),
            has_color=wants_color(options.color, 2),
            is_timed=bool(run.step_time),
            columns=columns_of(2),
            kv_bytes=kv_bytes,
        )
        say(text + printable_lines(remark))
        if options.stats:
            say(render_stats(summary, constraint_times, is_timed=bool(run.step_time)))
        scheduling = options.scheduling
        if scheduling.profile is not None and options.workers is None:
            say_of_memory([(scheduling.profile, scheduling.settings())])
        return advice(summary)

    def _tell(self, remark: str, what_now: str, command: ContinuingCommand | None = None) -> None:
        tell_ending(self._opened, remark, what_now, command, self._results)

    def _say_waiting(self, received: signal.Signals) -> None:
        name = "q" if self._stop.is_by_key else received.name
        self._view.step_aside()
        step = max(self._loop.num_steps)
        say(
            f"{name}: the run stops when the model has computed step {step}; "
            "a second signal stops it at once\n"
        )

    def _end_now(self, received: signal.Signals) -> None:
        """Save what can be saved and exit, from another thread: the main thread is stuck."""
        stop = self._stop
        stop.note(received)  # its handler may not have run
        try:
            with suppress(WriteError, OSError, Interrupted):
                self._write_rest()
                self.close()
            self._view.close()
            self._tell(f"stopped by {stop.name}", "continue with: ", self._command)
        finally:
            os._exit(stop.exit_status)


def tell_ending(
    opened: OpenRun,
    remark: str,
    what_now: str,
    command: ContinuingCommand | None = None,
    results: ResultWriter | None = None,
) -> None:
    """Report why the run ends, where its results are, and how to continue.

    command: returns the words to print after `what_now`.
    results: None if the run has not begun.
    """
    file = opened.results
    if results is not None and (results.num_written or results.num_token_events):
        went = counted(results.num_written, "result")
        if opened.options.stream:
            went += f" and {counted(results.num_token_events, 'token event')}"
        remark += f"; {went} went to {file.whereabouts()}"
    say(printable_lines(f"{remark}\n"))
    if opened.resumption.is_possible and file.is_in_place:
        words = list[str]()
        if command is not None:
            words = command(resume="--resume=repair" if file.has_foreign_lines else "--resume")
        if isinstance(file, UploadedResults):
            words = file.resuming(words)
        say(printable_lines(f"{what_now}{shell_line(words)}\n"))
