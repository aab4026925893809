"""What becomes of what workers tell beside their answers: a trace, a picture and a summary.

Rule: of a worker that has died the trace tells no more; its numbers go on with those of the next.
"""

import os
import sys

from msgspec.structs import replace

from batcher.events import RunEvent
from batcher.metrics.run_totals import (
    RunTotals,
    decode_totals,
    in_turn,
    nothing_done,
    of_the_dead,
    summarize_workers,
)
from batcher.metrics.summary import RunSummary, encode_summary

from ...commands.run import RunOptions
from ...options import STDOUT
from ...screen.opening import open_view
from ...screen.summary import RunFiles, render_summary
from ...screen.terminal import encoding_of, is_pipe, is_same_terminal, wants_color
from ...screen.view import GaugeReading, RunPlan, View
from ..output import open_sink, stdout_sink
from ..problems import say
from ..recorder import TraceWriter
from ..stdout import stdout_descriptor
from .messages import Answered
from .telling import has_picture


class WorkersRecord:
    """Takes what workers tell to the trace, the view and the sums.

    run: how the trace of one begins.  total: how many requests there are, None if nobody knows.

    Raises:
        OutputError: the file of the trace cannot be opened.
    """

    def __init__(
        self, options: RunOptions, run: RunEvent, num_workers: int, total: int | None, title: str
    ) -> None:
        self._options, self._run = options, run
        self._trace = TraceWriter(open_sink(options.trace)) if options.trace else None
        self._lost: set[int] = set()  # workers of which the trace tells no more
        self._earlier: dict[int, RunTotals] = {}  # what those before have done, by worker
        self._newest = [b""] * num_workers
        self._total, self._num_answered, self._num_steps = total, 0, 0
        self.view = _open_view(options, run, num_workers, total, title, self)
        if self._trace is not None:
            self._trace.write([replace(run, workers=num_workers)])

    def take(self, number: int, told: Answered) -> None:
        """Take in what a worker has told."""
        self._num_answered += len(told.indexes)
        if told.totals:
            self._newest[number] = told.totals
        if self._trace is not None and number not in self._lost:
            self._trace.write(told.events)
        view = self.view
        if view.workers is not None:
            with view.lock:
                for event in told.events:
                    view.workers.take(event)
                view.paces[number].step = max(told.num_steps - 1, 0)
            self._num_steps = max(self._num_steps, told.num_steps)
            view.after_step(self._num_steps - 1, self._num_queued)

    def lose(self, number: int) -> None:
        """Take note that a worker has died, and that there is another one in its place."""
        self._lost.add(number)
        if self._newest[number]:
            self._earlier[number] = of_the_dead(self._totals(number))
            self._newest[number] = b""
        if self.view.workers is not None:
            with self.view.lock:
                self.view.workers.workers[number].begin_again()

    def flush(self) -> None:
        """Write what the trace has kept.

        Raises:
            WriteError, BrokenPipeError: its file takes no more.
        """
        if self._trace is not None:
            self._trace.flush()

    @property
    def has_trace(self) -> bool:
        """Whether there is one."""
        return self._trace is not None

    @property
    def _num_queued(self) -> int | None:
        """How many requests wait, None if nobody knows."""
        if self._total is None or self.view.workers is None:
            return None
        running = sum(found.admission is not None for found in self.view.workers.open)
        return max(self._total - self._num_answered - running, 0)

    def read_gauges(self) -> GaugeReading:
        """Return how things stand; see Gauges."""
        return GaugeReading(0.0, 0, None, None)

    @property
    def current_step(self) -> None:
        """Nobody knows; see Gauges."""
        return

    def find_upcoming(self, _text: str) -> None:
        """Nobody knows; see Gauges."""
        return

    def close(self) -> None:
        """End the picture and the trace."""
        self.view.close()
        if self._trace is not None:
            self._trace.close()

    def summarize(self, *, is_complete: bool, elapsed: float) -> None:
        """Say what happened, to the person and to the programs that want to know."""
        options, summary = self._options, self._summary()
        if summary is None:
            return
        if not options.quiet:
            numbers = None if options.summary_json == STDOUT else options.summary_json
            text = render_summary(
                summary,
                RunFiles(options.output, options.trace, numbers=numbers),
                is_complete=is_complete,
                elapsed=elapsed,
                encoding=encoding_of(sys.stderr.encoding, os.environ),
                has_color=wants_color(options.color, 2, os.environ),
            )
            say(text)
            if options.stats:
                from ...screen.stats import render_stats  # noqa: PLC0415 - few runs tell so much

                say(render_stats(summary, None))
        if options.summary_json is not None:
            to_stdout = options.summary_json == STDOUT
            sink = stdout_sink() if to_stdout else open_sink(options.summary_json)
            sink.write(encode_summary(summary))
            sink.close()

    def _summary(self) -> RunSummary | None:
        """Return the numbers of all workers; None if nobody has counted."""
        options = self._options
        if options.quiet and options.summary_json is None:
            return None
        totals = [self._totals(number) for number in range(len(self._newest))]
        return summarize_workers(totals, self._run, options.limits)

    def _totals(self, number: int) -> RunTotals:
        """Return what a worker has done, with all that were in its place before it."""
        told, earlier = self._newest[number], self._earlier.get(number)
        if not told:
            return nothing_done(self._run) if earlier is None else earlier
        totals = decode_totals(told)
        return totals if earlier is None else in_turn(earlier, totals)


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
