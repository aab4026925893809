"""One run, from the files it reads to the files it writes and what is said about it."""

import gc
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

from batcher.engine import Engine
from batcher.errors import BatchdecodeError
from batcher.events import Event
from batcher.formats.requests import BadLine, RequestParser
from batcher.formats.trace import is_trace_start
from batcher.metrics import encode_summary
from batcher.models.base import Model
from batcher.models.llm import LLMModel
from batcher.models.loading import load_model
from batcher.models.simulated import SimulatedModel
from batcher.raised import RaisedError
from cli.errors import WriteError
from cli.options import RunOptions
from cli.running.answers import KnownResults
from cli.running.ending import Ending
from cli.running.files import check_distinct, check_replaceable, check_writable, side_files
from cli.running.gauges import RunGauges
from cli.running.intake import InputError, Waiting, open_input
from cli.running.lock import OutputLock
from cli.running.loop import Loop
from cli.running.output import OutputError, open_sink
from cli.running.problems import InvalidInput, ProblemReport, say
from cli.running.recorder import Recorder
from cli.running.result_lines import ResumeError
from cli.running.resume import Resumption, prepare
from cli.running.signals import Interrupted, StopSignals
from cli.running.sources import open_source
from cli.running.stdout import stdout_descriptor
from cli.running.step_watch import StepWatch
from cli.running.tracebacks import ModelTracebacks
from cli.scheduling_options import SchedulingOptions
from cli.screen.cells import counted, printable, printable_lines
from cli.screen.choice import open_view
from cli.screen.live.facts import Plan
from cli.screen.summary import RunFiles, render_summary
from cli.screen.terminal import is_pipe, is_same_terminal, wants_color
from cli.screen.view import View

_WRITTEN_ANEW: dict[str, Callable[[bytes], object]] = {  # what tells ours from other files
    "--trace": is_trace_start,
    "--summary-json": re.compile(rb'\{\s*"requests":').match,
    "--timeseries": re.compile(b"time,steps,running,").match,
}


BAD_INPUT = 2  # an exit status


class Job:
    """What is decoded, and by what.

    Raises:
        BatchdecodeError: there is no such input, or no such model, or it cannot have such a batch.
    """

    def __init__(self, options: RunOptions, waiting: Waiting = nullcontext) -> None:
        self.options = options
        self._waiting = waiting
        self.requests = open_input(options.input, waiting)
        with waiting():
            self.model = self._load_model()
            self.engine = self._make_engine()
        self.report = ProblemReport(self.requests.name, options.color)

    def _load_model(self) -> Model:
        """Return the model that the options name, and let its calls be broken off by a signal.

        Raises:
            BatchdecodeError: there is none, or it makes no calls for --call-timeout to limit.
        """
        options = self.options
        call_settings, limit = options.llm_settings, options.call_timeout
        if limit is not None:
            call_settings = {**call_settings, "call_timeout": limit}
        model = load_model(options.model, options.model_settings, options.seed, call_settings)
        if isinstance(model, LLMModel):
            model.calls.waiting = self._waiting
        if limit is not None and not (
            isinstance(model, LLMModel) and model.calls.settings.call_timeout == limit
        ):
            raise BatchdecodeError(
                f"--call-timeout is for an object with next_token_logits; {model.name} is none, "
                "or has settings of its own for its calls"
            )
        return model

    def _make_engine(self) -> Engine:
        """Return the engine that the options describe.

        Raises:
            BatchdecodeError: they contradict each other, name what there is not, or ask for more
            memory than there is.
        """
        options, scheduling = self.options, self.options.scheduling
        if scheduling.check and isinstance(self.model, SimulatedModel):
            self.model.is_attentive = True
        try:
            return Engine(
                self.model,
                options.batch,
                settings=scheduling.settings(),
                step_time=scheduling.step_time(),
                clock=scheduling.clock(self._sleep),
                is_streaming=options.stream,
                is_checked=bool(scheduling.check),
                grammar_timeout=options.grammar_timeout,
            )
        except MemoryError as error:
            raise BatchdecodeError(f"there is no memory for so many blocks: {error}") from error

    def _sleep(self, seconds: float) -> None:
        with self._waiting():
            time.sleep(seconds)

    def loop(self, known: KnownResults | None = None) -> Loop:
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
                RequestParser(target=self.engine.target),
                self.report,
                keep_going=keep_going,
                follow=options.follow,
                waiting=self._waiting,
            )
        finally:
            say(self.requests.take_notes() + self.report.closing())
        is_reported = keep_going and source.total is not None
        return Loop(
            self.engine,
            source,
            model=self.model,
            known=known,
            is_plain=options.scheduling.is_plain,
            keep_going=keep_going,
            max_errors=options.max_errors,
            on_bad_line=_ignore if is_reported else self.report.add,
        )


def run_events(options: RunOptions) -> Iterator[Event]:
    """Yield the events of a run; nothing is written but problems of the input, to stderr.

    Raises:
        BatchdecodeError: the input or the model is not right.
    """
    job = Job(options)
    with job.requests:
        loop = job.loop()
        yield loop.engine.run_event()
        for outcome in loop:
            yield from outcome.events
        say(job.report.closing())
        _refuse_bad_line(job, loop)
        yield loop.engine.end_event()


def run(options: RunOptions, stop: StopSignals, command: str) -> int:
    """Carry out `batchdecode run`; return its exit status.

    command: what continues this run if it ends early.

    Raises:
        BatchdecodeError: the input, an option or a file is not right.
        BrokenPipeError: whoever reads the output has gone.
        Interrupted: a signal came before the first step.
    """
    _check_options(options)
    job = Job(options, stop.waiting)
    with job.requests:
        _check_files(options, job)
        with (
            OutputLock(options.output) as lock,
            prepare(options, job.requests, job.engine.run_event()) as resumption,
        ):
            lock.renew()
            return _decode(job, lock, resumption, stop, command)


def _decode(
    job: Job, lock: OutputLock, resumption: Resumption, stop: StopSignals, command: str
) -> int:
    """Run what is ready to be run; return the exit status."""
    gc.freeze()  # not to look for garbage among the modules: 10 % less time for three requests
    started, options = time.monotonic(), job.options
    loop = job.loop(resumption.known)
    view = _open_view(options, job, loop)
    recorder = Recorder(options, loop, resumption, view)
    ending = Ending(options, loop, recorder, view, lock, resumption, command)
    watch = StepWatch(
        lambda: None if stop.has_broken_off else loop.current_step,
        ending.say_waiting,
        partial(ending.end_now, stop),
    )
    tracebacks = ModelTracebacks(job.report, is_quiet=options.quiet)
    status, remark, is_over = 0, None, False
    try:
        with view, recorder, watch, tracebacks:
            resumption.begin()
            recorder.record(job.report, stop)
        lock.settle()
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
    say(job.requests.take_notes() + job.report.closing())
    if not is_over:
        _summarize(options, loop, recorder, time.monotonic() - started)
    if loop.first_failure is not None:
        say(printable_lines(f"first failure: {loop.first_failure}\n"))
    _refuse_bad_line(job, loop)
    if remark is not None:
        ending.tell(remark)
    elif loop.has_given_up:
        remark = f"stopped after {counted(loop.num_failed, 'failed request')}"
        ending.tell(remark, "to go on, add --resume and raise --max-errors")
    return status or (1 if loop.num_failed else 0)


def _check_options(options: RunOptions) -> None:
    """Make sure that no option asks for what another one rules out.

    Raises:
        BatchdecodeError: one does.
    """
    if options.stream and options.keep_order:
        raise BatchdecodeError(
            "--stream and --keep-order exclude each other: a stream is in the order of the steps"
        )
    if options.stream and options.resume:
        raise BatchdecodeError(
            "--stream and --resume exclude each other: what was streamed is not repeated"
        )
    if options.force and options.resume:
        raise BatchdecodeError(
            "--force and --resume exclude each other: one starts over, the other goes on"
        )
    if options.retry_failed and not options.resume:
        raise BatchdecodeError("--retry-failed needs --resume: it is about results that are there")
    if options.timeseries_interval is not None and options.timeseries is None:
        raise BatchdecodeError("--timeseries-interval needs --timeseries FILE, which it is about")


def _check_files(options: RunOptions, job: Job) -> None:
    """Make sure that all files can be written, none is used twice, and nothing of others is lost.

    Results are looked after where it is known what run they are of, see `prepare`.

    Raises:
        OutputError: one cannot, or is, or would be.
    """
    outputs = [
        ("--output", options.output),
        *[("what stands beside --output,", path) for path in side_files(options.output)],
        ("--trace", options.trace),
        ("--summary-json", options.summary_json),
        ("--timeseries", options.timeseries),
    ]
    check_distinct(job.requests.status, outputs)
    for name, path in outputs:
        if path is not None:
            check_writable(path)
            if name in _WRITTEN_ANEW and not options.force:
                check_replaceable(name, path, _WRITTEN_ANEW[name])


def _open_view(options: RunOptions, job: Job, loop: Loop) -> View:
    run = job.engine.run_event()
    title = job.requests.name.rpartition("/")[2]
    is_shared = options.output is None and is_same_terminal(stdout_descriptor(), 2)
    return open_view(
        Plan(title, run.policy, options.batch, loop.source.total, bool(run.step_time)),
        RunGauges(job.engine, loop.source),
        live=options.live,
        is_quiet=options.quiet,
        color=options.color,
        every_step=options.step_delay > 0,
        is_piped=options.output is None and is_pipe(stdout_descriptor()),
        has_others=is_shared or not isinstance(job.model, SimulatedModel),
    )


def _summarize(options: RunOptions, loop: Loop, recorder: Recorder, seconds: float) -> None:
    """Say what happened, to the person and to the programs that want to know."""
    summary = recorder.summary()
    if not options.quiet:
        text = render_summary(
            summary,
            RunFiles(options.output, options.trace),
            is_complete=loop.is_complete,
            elapsed=seconds,
            encoding=sys.stderr.encoding,
            has_color=wants_color(options.color, 2, os.environ),
        )
        say(text)
        _say_of_memory(options.scheduling)
    if options.summary_json is not None:
        sink = open_sink(options.summary_json)
        sink.write(encode_summary(summary))
        sink.close()


def _say_of_memory(scheduling: SchedulingOptions) -> None:
    """Say so if memory is taken to be without limit, though the GPU of the profile has some."""
    if scheduling.profile is not None:
        from cli.memory_note import memory_note  # noqa: PLC0415 - with it comes yaml

        note = memory_note(scheduling.profile, scheduling.settings())
        if note is not None:
            say(f"{printable(note)}\n")


def _refuse_bad_line(job: Job, loop: Loop) -> None:
    """Report the bad line that has ended the reading, if one has.

    Raises:
        InvalidInput: one has.
    """
    if loop.has_refused:
        what_now = "reading stopped there. --keep-going to skip such lines."
        raise InvalidInput(job.report, loop.num_read, what_now)


def _ignore(bad: BadLine) -> None:
    """Do nothing: the line has been reported."""
