"""One run, from the files it reads to the files it writes and what is said about it."""

import gc
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from batcher.errors import BatchdecodeError
from batcher.events import Event
from batcher.foreign import RaisedError
from batcher.garbage import look_seldom
from batcher.models.base import number_of
from batcher.models.simulated import SimulatedModel
from batcher.remote.loading import RemoteModel
from batcher.requests.lines import RequestParser

from ..errors import WriteError
from ..options import STDOUT
from ..screen.progress import open_view
from ..screen.terminal import Pace, counted, is_pipe, is_same_terminal, printable_lines
from ..screen.view import RunPlan, View
from ..signals import Interrupted, StepWatch, StopSignals
from .answers import Answers, InputOrder, Replaying
from .ending import refuse_rest, settle_files, tell_ending, tell_summary
from .engine_setup import EngineSetup
from .files import locked_files
from .intake import InputError, OpenInput, Waiting, open_input
from .loop import Loop
from .observing import close_spans, opened_exposition, opened_spans
from .out_file import OutFile
from .output import NAMES_OF_STDOUT, OutputError, ResumeError
from .problems import ModelTracebacks, ProblemReport, say
from .recorder import RunRecorder
from .resume import ResultsFile, Resumption, conclude_finished, find_leftover, prepare, results_file
from .run_options import RunOptions
from .sources import open_source
from .stdout import stdout_descriptor

if TYPE_CHECKING:
    from batcher.metrics.summary import RunMetrics

    from .earlier_results import EarlierResults
    from .exposing import Exposition
    from .spans import SpanSender

BAD_INPUT = 2  # an exit status


class RunSetup(EngineSetup):
    """What is decoded, and by what.

    Raises:
        BatchdecodeError: there is no such model, or it cannot have such a batch.
    """

    def __init__(
        self, options: RunOptions, requests: OpenInput, waiting: Waiting = nullcontext
    ) -> None:
        self.requests = requests
        super().__init__(options, waiting, is_shown=_has_picture(options))
        self.report = ProblemReport(self.requests.name, options.color)
        if isinstance(self.model, RemoteModel):
            self.model.report = lambda text: self.report.tell(printable_lines(text))

    @property
    def _is_followed(self) -> bool:
        """Whether nobody asks for it, but a pipe is not waited for: a server's time goes on."""
        return isinstance(self.model, RemoteModel) and not self.requests.is_file

    @property
    def replaying(self) -> Replaying:
        """What becomes of the results of an earlier run; see Answers."""
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
        try:
            source = open_source(
                self.requests,
                self.parser(self.report.tell),
                self.report,
                keep_going=keep_going,
                follow=options.follow or self._is_followed,
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
    """Yield the events of a run; nothing is written but problems of the input, to stderr.

    Raises:
        BatchdecodeError: the input or the model is not right.
    """
    with open_input(options.input, nullcontext) as requests:
        setup = RunSetup(options, requests)
        with closing(setup.engine):
            loop = setup.loop()
            yield loop.engine.run_event()
            for events, results, _ in loop:
                loop.answers.take(results)
                yield from events
            say(setup.report.closing())
            refuse_rest(setup.report, loop)
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
        from ..notes import say_of_slo  # noqa: PLC0415 - few runs have an SLO

        say_of_slo([options.slo])
    if options.workers is not None:
        from .workers import run_by_workers  # noqa: PLC0415 - few runs have some

        return run_by_workers(options, options.workers, stop, command)
    with (
        open_input(options.input, stop.waiting) as requests,
        locked_files(options, requests.status) as files,
    ):
        spans = opened_spans(options)
        with (
            results_file(options, stop.waiting) as file,
            opened_exposition(options, files.get("--metrics-file")) as exposition,
        ):
            options = replace(options, output=file.path)
            leftover = find_leftover(options, requests, file)  # a model may take minutes to load
            setup = RunSetup(options, requests, stop.waiting)
            with (
                closing(setup.engine),
                prepare(setup.options, requests, leftover, setup.engine.run_event()) as resumption,
            ):
                if resumption.has_finished:
                    parser = RequestParser(setup.capabilities)
                    status = conclude_finished(
                        resumption, requests, parser, setup.options, stop.waiting
                    )
                    if status is not None:
                        return status
                try:
                    run = Run(setup, file, files, resumption, stop, command, exposition, spans)
                    return run.carry_out()
                except Interrupted:  # before the first step, or after the last one
                    remark, what_now = f"stopped by {stop.name}", f"continue with: {command}"
                    tell_ending(options, None, file, resumption, remark, what_now)
                    return stop.exit_status


class Run:
    """A run that is ready to begin.

    files: see locked_files.  command: what continues it if it ends early.
    exposition: what tells Prometheus of it.  spans: what sends its requests as traces.

    Raises:
        BatchdecodeError: the input is not right, or a file cannot be opened.
    """

    def __init__(
        self,
        setup: RunSetup,
        file: ResultsFile,
        files: Mapping[str, OutFile],
        resumption: Resumption,
        stop: StopSignals,
        command: str,
        exposition: "Exposition | None",
        spans: "SpanSender | None",
    ) -> None:
        look_seldom()
        self._started = time.monotonic()
        self._setup, self._options = setup, setup.options
        self._file, self._files, self._resumption = file, files, resumption
        self._stop, self._command = stop, command
        self._loop = setup.loop(resumption.earlier)
        if not setup.options.quiet:
            again = setup.replaying == "never"
            told = resumption.describe(self._loop.source.total, is_decoded_again=again)
            say(printable_lines(told))
        gc.freeze()  # nor among the requests that are read already
        pace = Pace(setup.options.step_delay)
        self._view = _open_view(setup, self._loop, pace)
        self._recorder = RunRecorder(
            setup.options, self._loop, resumption, self._view, pace, files, exposition, spans
        )
        self._spans = spans

    def carry_out(self) -> int:
        """Run to the end, and say how that went; return the exit status."""
        setup, loop, resumption, stop = self._setup, self._loop, self._resumption, self._stop
        tracebacks = ModelTracebacks(setup.report, is_quiet=self._options.quiet)
        watch = StepWatch(
            lambda: None if stop.has_broken_off else loop.current_step,
            self._view.still_computing,
            self._say_waiting,
            self._end_now,
        )
        status, remark, is_over = 0, None, False
        try:
            with self._view, self._recorder, watch, tracebacks:
                resumption.begin()
                self._recorder.record(setup.report, stop)
            stop.before_wait = None
            settle_files(self._files, self._file)
            if loop.is_complete:
                resumption.finish()
        except KeyboardInterrupt as error:
            is_over = not isinstance(error, Interrupted)  # at once
            status, remark = stop.exit_status, f"stopped by {stop.name}"
        except (OutputError, ResumeError):  # there is no run yet, or none to go on with
            raise
        except (WriteError, BatchdecodeError) as error:
            is_over, remark = True, f"error: {error}"
            status = BAD_INPUT if isinstance(error, InputError) else 1
            if isinstance(error, RaisedError):
                tracebacks.show(error.raised)
        tracebacks.close()
        say(setup.requests.take_notes() + setup.report.closing())
        if not is_over:
            self._conclude()
        if loop.first_failure is not None:
            say(printable_lines(f"first failure: {loop.first_failure}\n"))
        refuse_rest(setup.report, loop)
        if remark is not None:
            self._tell(remark, f"continue with: {self._command}")
        elif loop.has_given_up:
            remark = f"stopped after {counted(loop.num_failed, 'failed request')}"
            self._tell(remark, "to go on, add --resume and raise --max-errors")
        return status or (1 if loop.num_failed else 0)

    def _summarize(self, metrics: "RunMetrics") -> None:
        """Say what happened, to the person and to the programs that want to know."""
        from ..screen.summary import BytesPerToken  # noqa: PLC0415 - a quiet run does without

        options, engine, model = self._options, self._loop.engine, self._setup.model
        metrics.note_constraints(*engine.constraint_counts)
        timeline, kv_bytes, remark = self._recorder.timeline, None, ""
        if not isinstance(model, RemoteModel):
            of_drafts = options.scheduling.draft_bytes_per_token(model)
            kv_bytes = BytesPerToken(number_of(model, "kv_bytes_per_token"), of_drafts)
        elif model.replaced:
            names = ", ".join(model.replaced)
            remark = f"  model {model.served_model} was used instead of {names}\n"
        failures = tell_summary(
            options,
            metrics.summary(engine.num_steps),
            engine.run_event(),
            self._setup.requests.name,
            None if timeline is None else [timeline],
            self._files,
            self._file.name,
            elapsed=time.monotonic() - self._started,
            is_complete=self._loop.is_complete,
            num_unread=self._loop.num_unread or 0,
            kv_bytes=kv_bytes,
            constraint_times=engine.constraint_times,
            remark=remark,
        )
        scheduling = options.scheduling
        if scheduling.profile is not None and not options.quiet:
            from ..notes import say_of_memory  # noqa: PLC0415 - with it comes yaml

            say_of_memory([(scheduling.profile, scheduling.settings())])
        for failure in failures.values():
            raise failure

    def _conclude(self) -> None:
        """Say what happened, and of the requests as traces what became of them."""
        metrics, num_steps = self._recorder.metrics, self._loop.engine.num_steps
        if metrics is not None:
            self._summarize(metrics)
        close_spans(self._spans, [num_steps], is_quiet=self._options.quiet)
        model = self._setup.model
        if isinstance(model, RemoteModel) and model.has_refused_waits:
            remark = "requests failed that were to wait longer than --max-wait"
            self._tell(remark, f"continue later with: {self._command} --retry-failed")

    def _tell(self, remark: str, what_now: str) -> None:
        """Say why the run ends, where its results are if there are any, and how to go on."""
        results, file = self._recorder.results, self._file
        tell_ending(self._options, results, file, self._resumption, remark, what_now)

    def _say_waiting(self, received: signal.Signals) -> None:
        """Say what a signal waits for: a step of a model that cannot be broken off."""
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
                self._recorder.write_rest()
                self._recorder.close()
            self._view.close()
            self._tell(f"stopped by {stop.name}", f"continue with: {self._command}")
        finally:
            os._exit(stop.exit_status)


def _has_picture(options: RunOptions) -> bool:
    """Return whether a picture may be drawn before there is a view."""
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
