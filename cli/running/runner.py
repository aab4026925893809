"""One run, from the files it reads to the files it writes and what is said about it."""

import gc
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

from batcher.errors import BatchdecodeError
from batcher.events import Event
from batcher.formats.trace import is_trace_start
from batcher.metrics import encode_summary
from batcher.models.simulated import SimulatedModel
from batcher.raised import RaisedError

from ..errors import WriteError
from ..options import RunOptions
from ..scheduling_options import SchedulingOptions
from ..screen.cells import counted, printable, printable_lines
from ..screen.choice import open_view
from ..screen.live.facts import Plan
from ..screen.summary import RunFiles, render_summary
from ..screen.terminal import is_pipe, is_same_terminal, wants_color
from ..screen.view import View
from .ending import Ending
from .files import check_distinct, check_replaceable, check_writable, side_files
from .gauges import RunGauges
from .intake import InputError
from .job import Job
from .lock import OutputLock
from .loop import Loop
from .output import OutputError, ResumeError, open_sink
from .problems import InvalidInput, say
from .recorder import Recorder
from .resume import Resumption, prepare
from .signals import Interrupted, StopSignals
from .stdout import stdout_descriptor
from .step_watch import StepWatch
from .tracebacks import ModelTracebacks

_WRITTEN_ANEW: dict[str, Callable[[bytes], object]] = {  # what tells ours from other files
    "--trace": is_trace_start,
    "--summary-json": re.compile(rb'\{\s*"requests":').match,
    "--timeseries": re.compile(b"time,steps,running,").match,
}


BAD_INPUT = 2  # an exit status


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
        view.still_computing,
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
        RunGauges(loop),
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
        from ..memory_note import memory_note  # noqa: PLC0415 - with it comes yaml

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
