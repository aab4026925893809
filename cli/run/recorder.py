"""What becomes of the outcomes of a run: results, trace, numbers and the picture."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from io import BytesIO
from typing import TYPE_CHECKING, Self

from batcher.errors import BatchdecodeError
from batcher.events import Event, TokenEvent
from batcher.requests.results import encode_tokens
from batcher.trace.files import encode_events

from ..errors import WriteError
from ..screen.terminal import Pace, is_same_terminal
from ..screen.view import View
from ..signals import Interrupted, StopSignals
from .loop import Loop
from .out_file import OutFile
from .output import Sink, TerminalJson, stdout_json_sink
from .problems import ProblemReport
from .resume import Resumption
from .run_options import RunOptions
from .stdout import stdout_descriptor

if TYPE_CHECKING:
    from ..screen.live import LiveView
    from .exposing import Exposition
    from .spans import SpanSender
RESULT_SECONDS, TRACE_SECONDS = 0.02, 0.2  # for which lines may be kept
MAX_EVENTS = 1000  # that are kept


class ResultWriter:
    """Writes lines of results, soon if they go to a file: at once would cost each step two calls.

    num_written: the lines of results that are out.  num_token_events: those of a stream.
    """

    def __init__(self, sink: Sink, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_written = self.num_token_events = 0
        self._sink, self._clock = sink, clock
        self._kept: list[bytes] = []
        self._last_flush = clock()

    def write(self, lines: Sequence[bytes]) -> None:
        """Write `lines`, of which one item may hold several, or keep them for a moment.

        Raises:
            WriteError, BrokenPipeError: see Sink.
        """
        self._kept += lines
        if not self._sink.is_file or self._clock() - self._last_flush > RESULT_SECONDS:
            self.flush()

    def write_tokens(self, tokens: Sequence[TokenEvent]) -> None:
        """Write the token events of a step, which go before its answers, at once.

        Raises:
            WriteError, BrokenPipeError: see Sink.
        """
        self.flush()
        self._sink.write(encode_tokens(tokens))
        self.num_token_events += len(tokens)

    def flush(self) -> None:
        """Write what was kept; if there is no room for all, the items there is room for.

        Raises:
            WriteError, BrokenPipeError: see Sink.
        """
        if self._kept:
            lines, self._kept = self._kept, []
            joined = b"".join(lines)
            try:
                self._sink.write(joined)
            except WriteError:
                if not self._sink.is_file:
                    raise
                for line in lines:
                    self._sink.write(line)
                    self.num_written += _num_lines(line)
            else:
                self.num_written += _num_lines(joined)
        self._last_flush = self._clock()

    def close(self) -> None:
        """Write everything and end the file."""
        try:
            self.flush()
        finally:
            self._sink.close()


class TraceWriter:
    """Writes events soon after they happen: at once would cost a system call for each step."""

    def __init__(self, sink: Sink, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink, self._clock = sink, clock
        self._buffer: list[Event] = []
        self._last_flush = clock()

    def write(self, events: Sequence[Event]) -> None:
        """Write `events`, or keep them for a moment."""
        self._buffer += events
        if len(self._buffer) >= MAX_EVENTS or self._clock() - self._last_flush > TRACE_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what was kept.

        Raises:
            WriteError, BrokenPipeError: see Sink.
        """
        if self._buffer:
            lines = encode_events(self._buffer)
            self._buffer.clear()
            self._sink.write(lines)
        self._last_flush = self._clock()

    def close(self) -> None:
        """Write everything and end the file."""
        self.flush()
        self._sink.close()


class RunRecorder:
    """Takes what a loop gives to the files and the view; closes the files when it is left.

    metrics: the numbers so far, if anybody will ask for them.  results: writes the results.
    timeline: what a report will show, if one is wanted.
    pace: how long the run stays after each step.  files: see locked_files.
    exposition: what tells Prometheus of the run.  spans: what sends its requests as traces.

    Raises:
        OutputError: a file cannot be opened.
        Interrupted: a signal came while a FIFO had no reader.
    """

    def __init__(
        self,
        options: RunOptions,
        loop: Loop,
        resumption: Resumption,
        view: View,
        pace: Pace,
        files: Mapping[str, OutFile],
        exposition: "Exposition | None" = None,
        spans: "SpanSender | None" = None,
    ) -> None:
        self._trace = TraceWriter(files["--trace"].open()) if options.trace else None
        self._series = None
        if options.timeseries is not None:
            from .series import SeriesWriter  # noqa: PLC0415 - few runs need it

            sink = files["--timeseries"].open()
            self._series = SeriesWriter(sink, options.timeseries_interval)
        told = None if self._series is None else self._series.only
        is_asked = not options.quiet or options.summary_json or options.report or told is not None
        self.metrics = self._collector = None
        if exposition is not None or is_asked:
            from batcher.metrics.summary import RunMetrics  # noqa: PLC0415 - if anybody asks

            is_watched = exposition is not None
            metrics = RunMetrics(options.limits, told, view.fold, is_watched=is_watched)
            self.metrics = metrics
        if exposition is not None:
            from batcher.metrics.prometheus import RunCollector  # noqa: PLC0415 - an extra

            labels = options.model, "0"
            self._collector = RunCollector(metrics, loop.engine, labels, lambda: loop.backlog)
            exposition.tell(self._collector)
        self.timeline = None
        if options.report is not None:
            from batcher.page.page import PageTimeline  # noqa: PLC0415 - as above

            self.timeline = PageTimeline()
        # Opening empties them, so the results come last: what else fails, fails before.
        path = options.output
        results = stdout_beside(view) if path is None else resumption.open_results(path)
        self.results = ResultWriter(results)
        self._spans = spans
        self._loop, self._view, self._pace = loop, view, pace
        self._earlier = resumption.earlier

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is kept for a moment, and end the files, whatever one of them raises."""
        with ExitStack() as closing:
            closing.callback(self.results.close)
            closing.callback(self._loop.answers.close)
            if self._collector is not None:
                closing.callback(self._collector.observe, ())  # and how many steps there were
            if self._series is not None and self.metrics is not None:
                closing.callback(self._series.close)
                closing.callback(self.metrics.close, self._loop.engine.num_steps)
            if self._trace is not None:
                self._trace.close()

    def record(self, report: ProblemReport, stop: StopSignals) -> None:
        """Run the loop to its end.

        Raises:
            Interrupted: a signal came; the step is complete, or as if it had not begun.
            KeyboardInterrupt: a second one came, or the model raised it.
            BatchdecodeError: the model, its tokenizer, the policy or the input cannot go on.
            WriteError, BrokenPipeError: a file or stdout takes no more.
        """
        stop.before_wait, stop.before_pause = self._show_all, self._view.step_aside
        loop = self._loop
        self._note([loop.engine.run_event()])
        for input_index, lines in self._earlier.kept() if self._earlier else ():
            self.results.write(loop.answers.put_back(input_index, lines))
        try:
            self._record_outcomes(report, stop)
        except (KeyboardInterrupt, BatchdecodeError) as error:
            if isinstance(error, Interrupted):
                self._note(loop.arrived())
            self.write_rest()
            raise
        self.write_rest()
        self._note([loop.engine.end_event()])

    def write_rest(self) -> None:
        """Write what is kept back for its turn; a run that goes on puts it in its place."""
        for lines in self._loop.answers.rest():
            self.results.write([lines])
        self.results.flush()

    def _record_outcomes(self, report: ProblemReport, stop: StopSignals) -> None:
        loop, view, answers = self._loop, self._view, self._loop.answers
        engine, num_shown = loop.engine, 0
        is_shown = view.is_watched or self._pace.is_slow
        for events, results, tokens in loop:
            if events:
                self._note(events)
            if tokens:
                self.results.write_tokens(tokens)
            if results or answers.rejected:
                self.results.write(answers.take(results))
            if report.news:
                view.write_message(report.take())
            if (num_steps := engine.num_steps) > num_shown:
                num_shown = num_steps
                if is_shown:
                    self._show_step(num_steps - 1, stop)
            elif view.is_watched:
                view.keep_up()
            if stop.received is not None:
                raise Interrupted

    def _show_step(self, step: int, stop: StopSignals) -> None:
        """Show how things stand after `step`, and let people look if they want to."""
        if self._view.is_watched:
            self._view.after_step(step)
        pace = self._pace
        if pace.is_slow:
            pace.begin(time.monotonic())
            while (seconds := pace.time_left(time.monotonic())) > 0:
                with stop.waiting():
                    self._view.wait(seconds)

    def _note(self, events: Sequence[Event]) -> None:
        """Pass `events` on to the trace and the numbers."""
        if self._trace is not None:
            self._trace.write(events)
        if self.metrics is not None:
            with self._view.lock:
                (self._collector or self.metrics).observe(events)
        if self._spans is not None:
            self._spans.take(events)
        if self._series is not None:
            self._series.write_known()
        if self.timeline is not None:
            for event in events:
                self.timeline.add(event)

    def _show_all(self) -> float:
        """Show what there is before the run waits; return when to do so again, see View."""
        self.results.flush()
        if self._trace is not None:
            self._trace.flush()
        return self._view.refresh()


class _ViewSink:
    """Prints results above the live view: stdout and stderr are one terminal."""

    is_file = False

    def __init__(self, view: "LiveView") -> None:
        self._view = view

    def write(self, lines: bytes) -> None:
        self._view.write_results(lines)

    def close(self) -> None:
        """Nothing: the view is closed by whoever opened it."""


def _num_lines(lines: bytes) -> int:
    """Return how many lines there are; bytes.count() takes many times as long."""
    return len(BytesIO(lines).readlines())


def stdout_beside(view: View) -> Sink:
    """Return where results go that have no file; above a picture on the same terminal."""
    if is_same_terminal(stdout_descriptor(), 2):
        from ..screen.live import LiveView  # noqa: PLC0415 - a run without a terminal starts faster

        if isinstance(view, LiveView):
            return TerminalJson(_ViewSink(view))
    return stdout_json_sink()
