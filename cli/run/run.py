"""One run, from the files it reads to the files it writes and what is said about it."""

import gc
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from batcher.errors import BatchdecodeError
from batcher.events import Event
from batcher.foreign import RaisedError
from batcher.garbage import look_seldom
from batcher.models.base import number_of
from batcher.models.simulated import SimulatedModel
from batcher.remote.model import RemoteModel
from batcher.requests.lines import RequestParser

from ..errors import WriteError
from ..options import STDOUT
from ..screen.progress import open_view
from ..screen.terminal import Pace, counted, is_pipe, is_same_terminal, printable_lines
from ..screen.view import RunPlan, View
from ..signals import Interrupted, StepWatch, StopSignals, stdout_descriptor
from . import recording
from .engine_setup import EngineSetup
from .files import NAMES_OF_STDOUT
from .input import OpenInput, Waiting, open_input, open_source
from .loop import Loop
from .problems import ModelTracebacks, ProblemReport, say, say_of_slo
from .results import Answers, InputOrder, Replaying
from .resume import Resumption, conclude_finished
from .run_options import RunOptions

if TYPE_CHECKING:
    from .resume import EarlierResults


class RunSetup(EngineSetup):
    """What is decoded, and by what."""

    def __init__(
        self, options: RunOptions, requests: OpenInput, waiting: Waiting = nullcontext
    ) -> None:
        self.requests = requests
        super().__init__(options, waiting, is_shown=_has_picture(options))
        self.report = ProblemReport(self.requests.name, options.color)
        if isinstance(self.model, RemoteModel):
            self.model.report = lambda text: self.report.tell(printable_lines(text))

    @property
    def replaying(self) -> Replaying:
        if isinstance(self.model, RemoteModel):
            return "whole"
        return "steps" if self.options.scheduling.has_default_schedule else "never"

    def loop(self, earlier: "EarlierResults | None" = None) -> Loop:
        """Return the loop over the requests; a file has been read through once by then.

        Raises:
            InvalidInput: the file has bad lines, and they are not to be skipped.
            InputError: the file cannot be read.
        """
        options = self.options
        keep_going = options.keep_going or options.max_errors is not None
        # a server's time goes on, so its run does not wait for a pipe
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
        order = InputOrder(earlier.num_complete if earlier else 0) if options.keep_order else None
        return Loop(
            self.engine,
            source,
            Answers(self.model.name, self.bytes_of, earlier, order, replaying=self.replaying),
            keep_going=keep_going,
            max_errors=options.max_errors,
            on_bad_line=None if is_reported else self.report.add,
        )


def run_events(options: RunOptions) -> Iterator[Event]:
    """Yield the events of a run; nothing is written but problems of the input, to stderr."""
    with open_input(options.input, nullcontext) as requests:
        setup = RunSetup(options, requests)
        with closing(setup.engine):
            loop = setup.loop()
            yield loop.engine.run_event()
            for events, results, _ in loop:
                loop.answers.take(results)
                yield from events
            say(setup.report.closing())
            recording.refuse_rest(setup.report, loop)
            yield loop.engine.end_event()


def run(options: RunOptions, stop: StopSignals, command: str) -> int:
    """Carry out `batchdecode run`; return its exit status.

    command: what continues this run if it ends early.

    Raises:
        BatchdecodeError: the input, an option or a file is not right.
        BrokenPipeError: whoever reads the output has gone.
        Interrupted: a signal came before the first step.
    """
    options.check()
    if options.output in NAMES_OF_STDOUT:  # which is no file of ours, and has none beside it
        options = replace(options, output=None)
    if options.summary_json == STDOUT and options.output is None:
        raise BatchdecodeError(
            "the results and --summary-json - cannot both go to stdout: give one of them a file"
        )
    if options.slo is not None and options.scheduling.profile is not None and not options.quiet:
        say_of_slo([options.slo])
    if options.workers is not None:
        from .workers import run_by_workers  # noqa: PLC0415 - few runs have some

        return run_by_workers(options, options.workers, stop, command)
    with recording.opened_run(options, stop) as files:
        setup = RunSetup(files.options, files.requests, stop.waiting)
        opened = files._replace(options=setup.options)
        start = setup.engine.run_event()
        with (
            closing(setup.engine),
            opened.resumption.prepare(setup.options, opened.requests, start) as resumption,
        ):
            parser = RequestParser(setup.capabilities)
            status = conclude_finished(
                resumption, opened.requests, parser, setup.options, stop.waiting
            )
            if status is not None:
                return status
            try:
                return Run(setup, opened, resumption, stop, command).carry_out()
            except Interrupted:  # before the first step, or after the last one
                remark, what_now = f"stopped by {stop.name}", f"continue with: {command}"
                recording.tell_ending(opened, None, resumption, remark, what_now)
                return stop.exit_status


class Run:
    """A run that is ready to begin: the loop, and what becomes of its outcomes.

    command: what continues it if it ends early.

    Raises:
        BatchdecodeError: the input is not right, or a file cannot be opened.
        Interrupted: a signal came while a FIFO had no reader.
    """

    def __init__(
        self,
        setup: RunSetup,
        opened: recording.OpenRun,
        resumption: Resumption,
        stop: StopSignals,
        command: str,
    ) -> None:
        look_seldom()
        self._started = time.monotonic()
        self._setup, self._opened, self._resumption = setup, opened, resumption
        self._stop, self._command = stop, command
        options, exposition = setup.options, opened.exposition
        self._options = options
        loop = self._loop = setup.loop(resumption.earlier)
        if not options.quiet:
            again = setup.replaying == "never"
            text = resumption.describe(loop.source.total, is_decoded_again=again)
            say(printable_lines(text))
        gc.freeze()  # nor among the requests that are read already
        self._pace = Pace(options.step_delay)
        view = self._view = _open_view(setup, loop, self._pace)
        readers = self._readers = recording.EventReaders(opened)
        readers.lock = view.lock
        series = None if readers.series is None else readers.series.all_series[0]
        is_asked = not options.quiet or options.summary_json or options.report or series is not None
        self._collector = None
        if exposition is not None or is_asked:
            from batcher.metrics.summary import RunMetrics  # noqa: PLC0415 - if anybody asks

            is_watched = exposition is not None
            metrics = RunMetrics(options.limits, series, view.fold, is_watched=is_watched)
            readers.metrics = readers.observer = metrics
        if exposition is not None:
            from batcher.metrics.prometheus import RunCollector  # noqa: PLC0415 - an extra

            labels = options.model, "0"
            self._collector = RunCollector(metrics, loop.engine, labels, lambda: loop.backlog)
            readers.observer = self._collector
            exposition.tell(self._collector)
        # Opening empties them, so the results come last: what else fails, fails before.
        path = options.output
        results = recording.stdout_beside(view) if path is None else resumption.open_results(path)
        self._results = recording.ResultWriter(results)

    def carry_out(self) -> int:
        """Run to the end, and report how that went; return the exit status."""
        setup, loop, resumption, stop = self._setup, self._loop, self._resumption, self._stop
        tracebacks = ModelTracebacks(setup.report, is_quiet=self._options.quiet)
        watch = StepWatch(
            lambda: None if stop.has_broken_off else loop.current_step,
            self._view.still_computing,
            self._say_waiting,
            self._end_now,
        )
        status, remark, is_over = 0, "", False
        try:
            with self._view, closing(self), watch, tracebacks:
                resumption.begin()
                self._record()
            stop.before_wait = None
            recording.settle_files(self._opened)
            if loop.is_complete:
                resumption.finish()
        except (KeyboardInterrupt, WriteError, BatchdecodeError) as error:
            status, remark, is_over = recording.how_it_ended(error, stop)
            if isinstance(error, RaisedError):
                tracebacks.show(error.raised)
        tracebacks.close()
        say(setup.requests.take_notes() + setup.report.closing())
        if not is_over:
            self._summarize()
        if loop.first_failure is not None:
            say(printable_lines(f"first failure: {loop.first_failure}\n"))
        recording.refuse_rest(setup.report, loop)
        if remark:
            self._tell(remark, f"continue with: {self._command}")
        elif loop.has_given_up:
            remark = f"stopped after {counted(loop.num_failed, 'failed request')}"
            self._tell(remark, "to go on, add --resume and raise --max-errors")
        return status or (1 if loop.num_failed else 0)

    def _record(self) -> None:
        loop, stop, view, report = self._loop, self._stop, self._view, self._setup.report
        answers, earlier = loop.answers, self._resumption.earlier
        engine, num_shown = loop.engine, 0
        pace = self._pace
        stop.before_wait, stop.before_pause = self._show_all, view.step_aside
        note = self._readers.take
        note([engine.run_event()])
        for input_index, lines in earlier.kept() if earlier else ():
            self._results.write(answers.put_back(input_index, lines))
        try:
            for events, results, tokens in loop:
                if events:
                    note(events)
                if tokens:
                    self._results.write_tokens(tokens)
                if results or answers.rejected:
                    self._results.write(answers.take(results))
                if report.news:
                    view.write_message(report.take())
                if (num_steps := engine.num_steps) > num_shown:
                    num_shown = num_steps
                    if view.is_watched:
                        view.after_step(num_steps - 1)
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
                note(loop.arrived())
            self._write_rest()
            raise
        self._write_rest()
        note([engine.end_event()])

    def _show_all(self) -> float:
        self._results.flush()
        self._readers.flush()
        return self._view.refresh()

    def _write_rest(self) -> None:
        for lines in self._loop.answers.rest():
            self._results.write([lines])
        self._results.flush()

    def close(self) -> None:
        with ExitStack() as files:
            files.callback(self._results.close)
            files.callback(self._loop.answers.close)
            if self._collector is not None:
                files.callback(self._collector.observe, ())  # and how many steps there were
            self._readers.close(self._loop.engine.num_steps)

    def _summarize(self) -> None:
        options, engine, model = self._options, self._loop.engine, self._setup.model
        metrics, timeline = self._readers.metrics, self._readers.timeline
        if metrics is not None:
            from ..screen.summary import BytesPerToken  # noqa: PLC0415 - a quiet run does without

            metrics.note_constraints(*engine.constraint_counts)
            kv_bytes, remark = None, ""
            if not isinstance(model, RemoteModel):
                of_drafts = options.scheduling.draft_bytes_per_token(model)
                kv_bytes = BytesPerToken(number_of(model, "kv_bytes_per_token"), of_drafts)
            elif model.replaced:
                names = ", ".join(model.replaced)
                remark = f"  model {model.served_model} was used instead of {names}\n"
            recording.tell_summary(
                self._opened,
                metrics.summary(engine.num_steps),
                engine.run_event(),
                None if timeline is None else [timeline],
                elapsed=time.monotonic() - self._started,
                is_complete=self._loop.is_complete,
                num_unread=self._loop.num_unread or 0,
                kv_bytes=kv_bytes,
                constraint_times=engine.constraint_times,
                remark=remark,
            )
        recording.close_spans(self._opened.spans, [engine.num_steps], is_quiet=options.quiet)
        if isinstance(model, RemoteModel) and model.has_refused_waits:
            remark = "requests failed that were to wait longer than --max-wait"
            self._tell(remark, f"continue later with: {self._command} --retry-failed")

    def _tell(self, remark: str, what_now: str) -> None:
        recording.tell_ending(self._opened, self._results, self._resumption, remark, what_now)

    def _say_waiting(self, received: signal.Signals) -> None:
        name = "q" if self._stop.is_by_key else received.name
        self._view.step_aside()
        step = self._loop.engine.num_steps
        say(
            f"{name}: the run stops when the model has ended step {step}, "
            "however long that takes; a second signal ends it at once\n"
        )

    def _end_now(self, received: signal.Signals) -> None:
        """Put in order what can be, and leave; the main thread does not answer any more."""
        stop = self._stop
        stop.note(received)  # its handler may not have been run
        try:
            with suppress(WriteError, OSError, Interrupted):
                self._write_rest()
                self.close()
            self._view.close()
            self._tell(f"stopped by {stop.name}", f"continue with: {self._command}")
        finally:
            os._exit(stop.exit_status)


def _has_picture(options: RunOptions) -> bool:
    if options.quiet or options.live == "always":
        return not options.quiet
    is_piped = options.output is None and is_pipe(stdout_descriptor())
    return options.live == "auto" and not is_piped


def _open_view(setup: RunSetup, loop: Loop, pace: Pace) -> View:
    options, run = setup.options, setup.engine.run_event()
    title = setup.requests.name.rpartition("/")[2]
    is_shared = options.output is None and is_same_terminal(stdout_descriptor(), 2)
    return open_view(
        RunPlan(title, run.policy, options.batch, loop.source.total, bool(run.step_time)),
        loop,
        live=options.live,
        is_quiet=options.quiet,
        color=options.color,
        pace=pace,
        is_piped=options.output is None and is_pipe(stdout_descriptor()),
        has_others=is_shared or not isinstance(setup.model, SimulatedModel),
        has_stdin=not setup.requests.is_terminal,
    )
