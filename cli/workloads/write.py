"""`batchdecode workload`: rows from their source, into the output, and a summary of them."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import islice

from batcher.workloads.rows import DEFAULT_NAME, WorkloadRow, encode_rows
from batcher.workloads.summary import LengthCounts, WorkloadSummary
from batcher.workloads.trace_checks import (
    NumberedLine,
    TraceChecks,
    factor_for_rate,
    scale_times,
)
from batcher.workloads.traces import TRACES

from ..running.files import check_distinct, check_replaceable
from ..running.intake import InputError, OpenInput, open_input
from ..running.output import Sink, open_sink, stdout_sink
from ..running.problems import say
from ..screen.cells import counted
from .options import (
    MAX_RATE,
    MAX_SCALE,
    MIN_RATE,
    MIN_SCALE,
    WorkloadOptions,
    check_options,
    check_range,
)

LARGE_RATE = 100  # from here on, nobody reads digits after the point


def write_workload(options: WorkloadOptions) -> None:
    """Carry out `batchdecode workload`.

    Raises:
        BatchdecodeError: an option or the trace is not right.
        WriteError: the output takes no more.
    """
    check_options(options)
    if options.source in TRACES:
        with open_input(options.file, nullcontext) as trace:
            _write_trace(options, trace)
        return
    _check_replaceable(options)
    from .synthetic import make_rows  # noqa: PLC0415 - numpy, which traces do not need

    _write(make_rows(options, read_lines), options)


def read_lines(path: str) -> Iterator[NumberedLine]:
    """Yield the lines of a file that are not blank."""
    with open_input(path, nullcontext) as file:
        yield from _numbered(file)


def _numbered(file: OpenInput) -> Iterator[NumberedLine]:
    lines = file.lines()
    while (line := lines.read()) is not None:
        yield lines.number, line


def _write_trace(options: WorkloadOptions, trace: OpenInput) -> None:
    """Write what the trace holds, at the times that were asked for."""
    check_distinct(trace.status, [("--output", options.output)])
    _check_replaceable(options)

    def read_rows(checks: TraceChecks) -> Iterable[WorkloadRow]:
        name = DEFAULT_NAME if options.name is None else options.name
        return islice(TRACES[options.source](_numbered(trace), checks, name), options.requests)

    factor = None
    if options.scale is not None:
        factor = check_range(options.scale, "--scale", MIN_SCALE, MAX_SCALE)
    if options.rate is not None:
        rate = check_range(options.rate, "--rate", MIN_RATE, MAX_RATE)
        if not trace.is_file:
            raise InputError(
                f"--rate needs to read {trace.name} twice, which is a pipe: give a file, or --scale"
            )
        factor = factor_for_rate(read_rows(TraceChecks(trace.name)), rate, trace.name)
    checks = TraceChecks(trace.name)
    rows = read_rows(checks)
    _write(rows if factor is None else scale_times(rows, factor), options)
    say(trace.take_notes())
    if checks.num_raised and not options.quiet:
        say(f"  {counted(checks.num_raised, 'length')} of 0 written as 1\n")


def _check_replaceable(options: WorkloadOptions) -> None:
    if options.output is not None and not options.force:
        check_replaceable("--output", options.output)


def _write(rows: Iterable[WorkloadRow], options: WorkloadOptions) -> None:
    """Write `rows`, then say what they were."""
    summary = WorkloadSummary()
    sink: Sink | None = None
    for block in encode_rows(summary.observe(rows)):
        sink = sink or _open(options)  # only now: nothing is overwritten by an empty workload
        sink.write(block)
    (sink or _open(options)).close()
    if not options.quiet:
        say(render_summary(summary))


def _open(options: WorkloadOptions) -> Sink:
    return stdout_sink() if options.output is None else open_sink(options.output)


def render_summary(summary: WorkloadSummary) -> str:
    """Return what a person should know of a workload, as lines of text."""
    if not summary.num_requests:
        return "no requests\n"
    headline = counted(summary.num_requests, "request")
    if summary.num_sessions:
        headline += f" in {counted(summary.num_sessions, 'session')}"
    if summary.mean_rate is None:
        headline += ", which begin at once" if summary.num_arrivals > 1 else ""
    else:
        headline += f" over {summary.span:,.1f} s, {_rate(summary.mean_rate)} a second"
    prompts = _lengths("in", summary.prompt_lengths)
    return f"{headline}\n{prompts}{_lengths('out', summary.output_lengths)}"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= LARGE_RATE else f"{rate:.3g}"


def _lengths(name: str, lengths: LengthCounts) -> str:
    p50, p99 = lengths.percentile(50), lengths.percentile(99)
    return f"  {name:<3}  {counted(lengths.total, 'token')}, p50 {p50:,}, p99 {p99:,}\n"
