"""What becomes of what workers tell beside their answers: a trace, a picture and numbers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from batcher.events import Event, RestartEvent, RunEvent
from batcher.metrics.slo import Slo
from batcher.metrics.summary import (
    EngineState,
    RunSummary,
    RunTotals,
    decode_totals,
    in_turn,
    nothing_done,
    of_the_dead,
    summarize_workers,
)
from batcher.request import NOTHING_UNREAD, Unread
from batcher.trace.run import is_follower
from batcher.trace.workers import ByWorker

from ...screen.terminal import is_pipe, is_same_terminal
from ...screen.view import GaugeReading, Gauges, RunPlan, View, open_view
from ..ending import tell_summary
from ..observing import close_spans
from ..out_file import OutFile
from ..recorder import TraceWriter
from ..run_options import RunOptions
from ..stdout import stdout_descriptor
from .lines import InputLines
from .messages import Answered
from .telling import Wanted, has_picture

if TYPE_CHECKING:
    from batcher.page.records import PageTimeline
    from batcher.trace.run import RequestFold
    from batcher.trace.worker_folds import WorkerFolds

    from ..exposing import Exposition
    from ..spans import SpanSender


class _Told(NamedTuple):
    """What is known of a worker.  It is replaced as a whole: any thread may read it.

    totals: its own, see decode_totals; b"" before it has told any.  earlier: of those in its place
    that have died.  num_answered: lines, by all of them.  num_begun: those that are in its engine.
    now: when its next step starts.
    """

    totals: bytes
    earlier: RunTotals | None
    state: EngineState
    num_answered: int
    num_begun: int
    now: float = 0.0


class Standings:
    """Takes in what workers tell of themselves.

    run: how the trace of one begins.  lines: what is to be answered.
    """

    def __init__(self, run: RunEvent, num_workers: int, lines: InputLines) -> None:
        self._run, self._lines, self._num_to_answer = run, lines, lines.num_to_answer
        self._idle = EngineState(run.batch)
        self._told = [_Told(b"", None, self._idle, 0, 0)] * num_workers

    def take(self, number: int, answered: Answered) -> None:
        """Take in what a worker has told."""
        known = self._told[number]
        self._told[number] = _Told(
            answered.totals or known.totals,
            known.earlier,
            answered.state or known.state,
            known.num_answered + len(answered.indexes),
            answered.num_begun,
            answered.now,
        )

    def lose(self, number: int) -> None:
        """Take note that a worker has died, and that there is another one in its place."""
        known = self._told[number]
        earlier = of_the_dead(self._totals(known)) if known.totals else known.earlier
        self._told[number] = _Told(b"", earlier, self._idle, known.num_answered, 0, known.now)

    @property
    def num_begun(self) -> int:
        """How many lines are in an engine."""
        return sum(told.num_begun for told in self._told)

    @property
    def backlog(self) -> Unread:
        """Lines that no engine has begun, by what has arrived for the worker that is furthest."""
        if self._num_to_answer is None:
            return NOTHING_UNREAD
        num_left = self._num_to_answer - sum(t.num_answered + t.num_begun for t in self._told)
        now = max(told.now for told in self._told)
        coming = min(num_left, self._lines.arrivals.left(now).coming)
        return Unread(num_left - coming, coming)

    def engines(self) -> list[tuple[EngineState, RunTotals]]:
        """Return, by worker, how it stands and what it has done."""
        return [(told.state, self._totals(told)) for told in list(self._told)]

    def summary(self, slo: Slo | None) -> RunSummary:
        """Return the numbers of all workers."""
        return summarize_workers([self._totals(told) for told in self._told], self._run, slo)

    def _totals(self, told: _Told) -> RunTotals:
        """Return what a worker has done, with all that were in its place before it."""
        earlier = told.earlier
        if not told.totals:
            return nothing_done(self._run) if earlier is None else earlier
        totals = decode_totals(told.totals)
        return totals if earlier is None else in_turn(earlier, totals)


class WorkersRecord(Gauges):
    """Takes what workers tell to the trace, the view and the numbers.

    run: how the trace of one begins.  files: see locked_files.
    exposition, spans: what tells others of it.

    Raises:
        OutputError: the file of the trace cannot be opened.
    """

    def __init__(
        self,
        options: RunOptions,
        run: RunEvent,
        num_workers: int,
        lines: InputLines,
        title: str,
        files: Mapping[str, OutFile],
        exposition: "Exposition | None",
        spans: "SpanSender | None",
    ) -> None:
        self._options, self._run, self._title, self.files = options, run, title, files
        self._trace = TraceWriter(files["--trace"].open()) if options.trace else None
        self._standings = Standings(run, num_workers, lines)
        self._num_steps = [0] * num_workers
        self._fold: RequestFold | WorkerFolds | None = None
        self.view = _open_view(options, run, num_workers, lines.total, title, self)
        self._fold = self.view.workers or self.view.fold
        self._timelines = ByWorker(_new_timeline) if options.report is not None else None
        self._series = None
        if options.timeseries is not None:
            from ..series import WorkersSeriesWriter  # noqa: PLC0415 - few runs need it

            sink, interval = files["--timeseries"].open(), options.timeseries_interval
            self._series = WorkersSeriesWriter(sink, interval, run, num_workers)
        self._spans = spans
        whole = replace(run, workers=num_workers)
        if self._trace is not None:
            self._trace.write([whole])
        if self._timelines is not None:
            self._timelines.add(whole)
        if spans is not None:
            for number in range(num_workers):
                spans.take([run], number)
        if exposition is not None:
            from batcher.metrics.prometheus import WorkersCollector  # noqa: PLC0415 - an extra

            engines = self._standings.engines
            told = WorkersCollector(run, options.model, engines, lambda: self._standings.backlog)
            exposition.tell(told)

    def take(self, number: int, told: Answered) -> None:
        """Take in what a worker has told."""
        self._standings.take(number, told)
        self._num_steps[number] = told.num_steps
        events = self._named(told.events)
        self._keep(number, events)
        if self._spans is not None:
            self._spans.take(events, number)
        view, fold = self.view, self._fold
        if fold is not None:
            with view.lock:
                for event in events:
                    fold.take(event)
                view.paces[number].step = max(told.num_steps - 1, 0)
            view.after_step(max(self._num_steps) - 1)

    def _named(self, events: list[Event]) -> list[Event]:
        """Return the events of a worker as the run has them; one alone has no number."""
        if len(self._num_steps) > 1:
            return events
        return [replace(event, worker=None) for event in events if not isinstance(event, RunEvent)]

    def _keep(self, number: int, events: list[Event]) -> None:
        """Pass events of a worker on to the files."""
        if self._series is not None:
            self._series.take(number, events)
        if self._trace is not None:
            self._trace.write(events)
        if self._timelines is not None:
            for event in events:
                self._timelines.add(event)

    def restart(self, number: int, restart: RestartEvent) -> None:
        """Take note that a worker has died, and that there is another one in its place."""
        self._standings.lose(number)
        events = self._named([restart])
        self._keep(number, events)
        if self._spans is not None:
            self._spans.take(events, number)
        fold = self._fold
        if fold is not None:
            with self.view.lock:
                for event in events:
                    fold.take(event)

    def flush(self) -> None:
        """Write what the trace has kept.

        Raises:
            WriteError, BrokenPipeError: its file takes no more.
        """
        if self._trace is not None:
            self._trace.flush()

    @property
    def has_events(self) -> bool:
        """Whether it is to be told of all that happens."""
        kept = (self._trace, self._timelines, self._series, self._spans)
        return any(each is not None for each in kept)

    def read_gauges(self) -> GaugeReading:
        """Return how things stand; see Gauges."""
        queued, coming = self._standings.backlog
        fold = self._fold
        own = [] if fold is None else [found for found in fold.open if not is_follower(found)]
        queued += sum(found.admission is None for found in own)
        coming += max(self._standings.num_begun - sum(not found.index for found in own), 0)
        return GaugeReading(0.0, 0, None, None, queued, coming)

    def close(self) -> None:
        """End the picture and the trace."""
        self.view.close()
        try:
            if self._trace is not None:
                self._trace.close()
        finally:
            if self._series is not None:
                self._series.close(self._num_steps)

    def conclude(self, results: str | None, *, is_complete: bool, elapsed: float) -> None:
        """Say what happened, to the person and to the programs that want to know.

        results: what messages call the file of results, if there is one.
        """
        options, run, timelines = self._options, self._run, None
        failures: dict[str, Exception] = {}
        if Wanted.by(options).numbers:
            if (recorded := self._timelines) is not None:
                timelines, run = recorded.close(), recorded.run
            failures = tell_summary(
                options,
                self._standings.summary(options.limits),
                run,
                self._title,
                timelines,
                self.files,
                results,
                elapsed=elapsed,
                is_complete=is_complete,
            )
        for failure in failures.values():
            raise failure
        close_spans(self._spans, self._num_steps, is_quiet=options.quiet)


def _new_timeline() -> "PageTimeline":
    from batcher.page.records import PageTimeline  # noqa: PLC0415 - as above

    return PageTimeline()


def _open_view(
    options: RunOptions,
    run: RunEvent,
    num_workers: int,
    total: int | None,
    title: str,
    gauges: WorkersRecord,
) -> View:
    return open_view(
        RunPlan(
            title,
            run.policy,
            num_workers * options.batch,
            total,
            is_timed=bool(run.step_time),
            num_workers=num_workers,
        ),
        gauges,
        live="always" if has_picture(options) else "never",
        is_quiet=options.quiet,
        color=options.color,
        pace=None,
        is_piped=options.output is None and is_pipe(stdout_descriptor()),
        has_others=options.output is None and is_same_terminal(stdout_descriptor(), 2),
        has_stdin=False,
    )
