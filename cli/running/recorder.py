"""What becomes of the outcomes of a run: results, trace, numbers and the picture."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from batcher.errors import BatchdecodeError
from batcher.events import Event
from batcher.metrics import RunMetrics, RunSummary

from ..options import RunOptions
from ..screen.terminal import is_same_terminal
from ..screen.view import View
from .input_order import InputOrder
from .loop import Loop
from .output import (
    ResultWriter,
    Sink,
    TerminalJson,
    TraceWriter,
    open_sink,
    stdout_json_sink,
)
from .problems import ProblemReport
from .resume import Resumption
from .signals import Interrupted, StopSignals
from .stdout import stdout_descriptor

if TYPE_CHECKING:
    from ..screen.live.driver import LiveView
    from .timeseries import SeriesWriter


class Recorder:
    """Takes what a loop gives to the files and the view; closes the files when it is left.

    metrics: the numbers so far.  results: writes the results.

    Raises:
        OutputError: a file cannot be opened.
    """

    def __init__(self, options: RunOptions, loop: Loop, resumption: Resumption, view: View) -> None:
        known = resumption.known
        order = InputOrder(known.num_complete if known else 0) if options.keep_order else None
        self.metrics = RunMetrics(options.slo)
        self._trace = TraceWriter(open_sink(options.trace)) if options.trace else None
        path, interval = options.timeseries, options.timeseries_interval
        self._series = None if path is None else _series(path, interval)
        # Opening empties them, so the results come last: what else fails, fails before.
        sink = _stdout(view) if options.output is None else resumption.open_results(options.output)
        self.results = ResultWriter(sink, loop.encode, order)
        self._loop, self._view = loop, view
        self._step_delay = options.step_delay
        self._known, self._can_resume = known, resumption.is_possible

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is kept for a moment, and end the files."""
        try:
            if self._trace is not None:
                self._trace.close()
            if self._series is not None:
                self._series.close(self._loop.engine.num_steps)
        finally:
            self.results.close()

    def record(self, report: ProblemReport, stop: StopSignals) -> None:
        """Run the loop to its end.

        Raises:
            Interrupted: a signal came; the step is complete, or as if it had not begun.
            KeyboardInterrupt: a second one came, or the model raised it.
            BatchdecodeError: the model, its tokenizer, the policy or the input cannot go on.
            WriteError, BrokenPipeError: a file or stdout takes no more.
        """
        stop.before_wait, stop.before_pause = self._show_all, self._view.step_aside
        engine = self._loop.engine
        self._note([engine.run_event()])
        for place, lines in self._known.held() if self._known else ():
            self.results.put_back(place, lines)
        try:
            self._record_outcomes(report, stop)
        except (KeyboardInterrupt, BatchdecodeError):
            self.finish_early()
            raise
        self.results.finish()
        self._note([engine.end_event()])

    def finish_early(self) -> None:
        """Write what is held back for its turn, unless a run that goes on will write it then."""
        if not self._can_resume:
            self.results.finish()

    def summary(self) -> RunSummary:
        """Return the numbers of what was recorded."""
        self.metrics.note_constraints(*self._loop.engine.constraint_counts)
        return self.metrics.summary(self._loop.engine.num_steps)

    def _record_outcomes(self, report: ProblemReport, stop: StopSignals) -> None:
        loop, view, results_to, delay = self._loop, self._view, self.results, self._step_delay
        engine, total = loop.engine, loop.source.total
        num_queued, num_steps = None, 0
        for events, answers, tokens in loop:
            if events:
                self._note(events)
                view.observe(events)
            if tokens:
                results_to.write_tokens(tokens)
            if answers:
                results_to.write(answers)
            if report.has_news:
                view.write_message(report.take())
            if engine.num_steps > num_steps:
                num_steps = engine.num_steps
                if total is not None:
                    num_queued = total - loop.num_read + engine.num_waiting
                view.after_step(num_steps - 1, num_queued)
                if delay:
                    stop.sleep(delay)
            if stop.received is not None:
                raise Interrupted

    def _note(self, events: Sequence[Event]) -> None:
        """Pass `events` on to the trace and the numbers."""
        if self._trace is not None:
            self._trace.write(events)
        if self._series is not None:
            self._series.write(events)
        observe = self.metrics.observe
        for event in events:
            observe(event)

    def _show_all(self) -> float:
        """Show what there is before the run waits; return when to do so again, see View."""
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


def _stdout(view: View) -> Sink:
    if is_same_terminal(stdout_descriptor(), 2):
        from ..screen.live.driver import LiveView  # noqa: PLC0415 - a run without a terminal starts faster

        if isinstance(view, LiveView):
            return TerminalJson(_ViewSink(view))
    return stdout_json_sink()


def _series(path: str, interval: float | None) -> "SeriesWriter":
    from .timeseries import SeriesWriter  # noqa: PLC0415 - few runs have one

    return SeriesWriter(open_sink(path), interval)
