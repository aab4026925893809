"""`batchdecode workload`: entries from their source, into the output, and a summary of them."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from difflib import get_close_matches
from itertools import islice

from batcher.errors import BatchdecodeError
from batcher.planning.workload_traces import (
    DEFAULT_NAME,
    TRACES,
    LengthCounts,
    NumberedLine,
    TraceEntryChecks,
    WorkloadEntry,
    WorkloadSummary,
    encode_entries,
    factor_for_rate,
    scale_times,
)

from ..commands.workload import WorkloadOptions
from ..printing import output_sink
from ..run.files import check_distinct, check_replaceable
from ..run.intake import InputError, OpenInput, numbered, open_input
from ..run.problems import say
from ..screen.terminal import counted

LARGE_RATE = 100  # from here on, nobody reads digits after the point

_LENGTHS = (
    "prompt_tokens",
    "output_tokens",
    "max_prompt_tokens",
    "max_output_tokens",
    "shared_prefix",
    "priority",
    "seed",
    "name",
)
_OPEN = ("rate", "turns", "think_time", *_LENGTHS)
_TRACE = ("file", "rate", "scale")

# What each source takes beside what all take, and of that what it cannot do without.
OPTIONS_OF = {
    "constant": _OPEN,
    "poisson": _OPEN,
    "gamma": ("burstiness", *_OPEN),
    "bursty": ("on", "off", *_OPEN),
    "closed": ("users", "think_time", *_LENGTHS),
    "azure": (*_TRACE, "name"),
    "mooncake": (*_TRACE, "name"),
    "vllm": _TRACE,
}
NEEDED = ("burstiness", "on", "off", "users", "file")
_FOR_ALL = {"source", "requests", "output", "force", "quiet"}


def write_workload(options: WorkloadOptions) -> None:
    """Carry out `batchdecode workload`.

    Raises:
        BatchdecodeError: an option or the trace is not right.
        WriteError: the output takes no more.
    """
    _check(options)
    if options.source in TRACES:
        with open_input(options.file, nullcontext) as trace:
            _write_trace(options, trace)
        return
    _check_replaceable(options)
    from .synthetic import make_entries  # noqa: PLC0415 - numpy, which traces do not need

    _write(make_entries(options, read_lines), options)


def _check(options: WorkloadOptions) -> None:
    """Make sure that the options go together, or raise a BatchdecodeError."""
    source = options.source
    if source not in OPTIONS_OF:
        near = get_close_matches(source, OPTIONS_OF, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BatchdecodeError(f"unknown source {source!r}{hint} (known: {', '.join(OPTIONS_OF)})")
    taken = OPTIONS_OF[source]
    given = [
        name
        for name, value in asdict(options).items()
        if name not in _FOR_ALL and value is not None
    ]
    for name in given:
        if name not in taken:
            takes = ", ".join(map(_shown, taken))
            raise BatchdecodeError(f"{source} takes no {_shown(name)} (it takes: {takes})")
    for name in NEEDED:
        if name in taken and name not in given:
            raise BatchdecodeError(f"{source} needs {_shown(name)}")
    if options.rate is not None and options.scale is not None:
        raise BatchdecodeError("--rate and --scale both set the times: give one of them")
    if options.think_time is not None and options.turns is None and "turns" in taken:
        raise BatchdecodeError("--think-time is a pause between turns: give --turns too")


def _shown(name: str) -> str:
    """Return an option as a person gives it."""
    return name.upper() if name == "file" else f"--{name.replace('_', '-')}"


def read_lines(path: str) -> Iterator[NumberedLine]:
    """Yield the lines of a file that are not blank."""
    with open_input(path, nullcontext) as file:
        yield from numbered(file.lines())


def _write_trace(options: WorkloadOptions, trace: OpenInput) -> None:
    """Write what the trace holds, at the times that were asked for."""
    check_distinct(trace.status, [("--output", options.output)], options.file)
    _check_replaceable(options)

    def read_entries(checks: TraceEntryChecks) -> Iterable[WorkloadEntry]:
        name = DEFAULT_NAME if options.name is None else options.name
        return islice(
            TRACES[options.source](numbered(trace.lines()), checks, name), options.requests
        )

    factor = options.scale
    if options.rate is not None:
        if not trace.is_file:
            raise InputError(
                f"--rate needs to read {trace.name} twice, which is a pipe: give a file, or --scale"
            )
        factor = factor_for_rate(
            read_entries(TraceEntryChecks(trace.name)), options.rate, trace.name
        )
    checks = TraceEntryChecks(trace.name)
    entries = read_entries(checks)
    _write(entries if factor is None else scale_times(entries, factor), options)
    say(trace.take_notes())
    if checks.num_raised and not options.quiet:
        say(f"  {counted(checks.num_raised, 'length')} of 0 written as 1\n")


def _check_replaceable(options: WorkloadOptions) -> None:
    if options.output is not None and not options.force:
        check_replaceable("--output", options.output)


def _write(entries: Iterable[WorkloadEntry], options: WorkloadOptions) -> None:
    """Write `entries`, then say what they were."""
    summary = WorkloadSummary()
    with output_sink(options.output) as sink:
        for block in encode_entries(summary.observe(entries)):
            sink.write(block)
    if not options.quiet:
        say(render_summary(summary))


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
        rate = f"{summary.mean_rate:{',.0f' if summary.mean_rate >= LARGE_RATE else '.3g'}}"
        headline += f" over {summary.span:,.1f} s, {rate} a second"
    prompts = _lengths("in", summary.prompt_lengths)
    return f"{headline}\n{prompts}{_lengths('out', summary.output_lengths)}"


def _lengths(name: str, lengths: LengthCounts) -> str:
    p50, p99 = lengths.percentile(50), lengths.percentile(99)
    return f"  {name:<3}  {counted(lengths.sum, 'token')}, p50 {p50:,}, p99 {p99:,}\n"
