"""`batchdecode workload`: makes a requests file, from a pattern or from a recorded trace."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Annotated, Any

from batcher.errors import BatchdecodeError
from batcher.planning.synthetic import (
    LENGTHS,
    TIMES,
    Arrivals,
    SyntheticWorkload,
    bursty,
    closed_entries,
    constant,
    gamma,
    open_entries,
    parse_distribution,
    parse_lengths,
    parse_priorities,
    parse_shared_prefix,
    poisson,
    session_entries,
)
from batcher.planning.workload_traces import (
    DEFAULT_NAME,
    MAX_LENGTH,
    TRACES,
    LengthCounts,
    NumberedLine,
    TraceEntryChecks,
    WorkloadEntry,
    WorkloadSummary,
    encode_entries,
    factor_for_rate,
    scale_times,
    trace_entries,
)

from ..command import OUTPUT, argument, command, flag, option
from ..options import Force, output_option
from ..run.files import check_distinct, check_replaceable, output_sink
from ..run.input import InputError, open_input
from ..run.problems import say
from ..screen.terminal import counted

ARRIVALS, SIZES = "Arrivals", "Lengths: a number or a distribution"
SESSIONS = "Prefixes and sessions"
DISTRIBUTIONS = (
    "Distributions: N, constant:N, uniform:LOW,HIGH, normal:MEAN,STD, lognormal:MEDIAN,SIGMA, "
    "exponential:MEAN, pareto:MIN,ALPHA, and for lengths also zipf:ALPHA,MAX and empirical:FILE."
)
_FACTOR: dict[str, Any] = {"min": 1e-6, "max": 1e6}


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """The options of `batchdecode workload`, None where not given; see docs/workloads.md."""

    source: Annotated[
        str,
        argument(
            "constant, poisson, gamma, bursty, closed; or a trace: azure, mooncake, vllm.",
            "SOURCE",
            lambda _: OPTIONS_OF,
        ),
    ]
    file: Annotated[str | None, argument("The trace: a file or - for stdin.", "FILE")] = None
    requests: Annotated[
        int | None,
        option(
            ARRIVALS,
            "Number of requests.  [default: 1000, all of a trace]",
            "N",
            "-n",
            min=1,
            common=True,
        ),
    ] = None
    rate: Annotated[
        float | None,
        option(
            ARRIVALS,
            "Mean rate: requests per second, with --turns sessions per second.  "
            "[default: 1, a trace's own]",
            "R",
            **_FACTOR,
            common=True,
        ),
    ] = None
    burstiness: Annotated[
        float | None,
        option(
            ARRIVALS,
            "gamma: shape of the gaps; 1 is poisson, less is burstier.",
            "B",
            min=1e-3,
            max=1e6,
        ),
    ] = None
    on: Annotated[
        float | None, option(ARRIVALS, "bursty: length of a burst.", "SECONDS", **_FACTOR)
    ] = None
    off: Annotated[
        float | None, option(ARRIVALS, "bursty: pause between bursts.", "SECONDS", min=0, max=1e6)
    ] = None
    users: Annotated[
        int | None, option(ARRIVALS, "closed: users, each with one request at a time.", "N", min=1)
    ] = None
    scale: Annotated[
        float | None,
        option(
            ARRIVALS, "Multiply the times of a trace; 0.5 is twice as fast.", "FACTOR", **_FACTOR
        ),
    ] = None
    prompt_tokens: Annotated[
        str | None, option(SIZES, "Prompt lengths.  [default: 1024]", "D", common=True)
    ] = None
    output_tokens: Annotated[
        str | None, option(SIZES, "Output lengths.  [default: 128]", "D", common=True)
    ] = None
    max_prompt_tokens: Annotated[int | None, option(SIZES, "Longest prompt.", "N", min=1)] = None
    max_output_tokens: Annotated[int | None, option(SIZES, "Longest output.", "N", min=1)] = None
    shared_prefix: Annotated[
        str | None,
        option(
            SESSIONS,
            "Begin prompts with N common tokens, those of one of G groups.",
            "N[:G]",
            common=True,
        ),
    ] = None
    turns: Annotated[
        str | None, option(SESSIONS, "Make sessions with this many turns.", "D", common=True)
    ] = None
    think_time: Annotated[
        str | None, option(SESSIONS, "Seconds from an answer to the next turn.  [default: 0]", "D")
    ] = None
    priority: Annotated[
        str | None,
        option(SESSIONS, "Priorities, each with its share of the requests.", "N:SHARE,..."),
    ] = None
    seed: Annotated[
        int | None, option(OUTPUT, "Random seed.  [default: 0]", "N", min=0, common=True)
    ] = None
    name: Annotated[
        str | None,
        option(OUTPUT, "Prefix of ids.  [default: r; a vLLM log has its own ids]", "TEXT"),
    ] = None
    output: Annotated[
        str | None, output_option("Write the requests to FILE (gzipped if it ends in .gz).")
    ] = None
    force: Force = False
    quiet: Annotated[bool, flag(OUTPUT, "Print no summary.", "-q")] = False


DEFAULT_REQUESTS, DEFAULT_RATE = 1000, 1.0
DEFAULT_PROMPT_TOKENS, DEFAULT_OUTPUT_TOKENS = "1024", "128"  # as vLLM's benchmark has them
DEFAULT_THINK_TIME = "0"
LARGE_RATE = 100  # from here on, digits after the point are noise

_LENGTHS = (
    *("prompt_tokens", "output_tokens", "max_prompt_tokens", "max_output_tokens"),
    *("shared_prefix", "priority", "seed", "name"),
)
_OPEN = ("rate", "turns", "think_time", *_LENGTHS)
_TRACE = ("file", "rate", "scale")
# The options of each source, in addition to those of all.
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


def workload(options: WorkloadOptions) -> None:
    """Make a requests file from an arrival pattern or a trace."""
    _check(options)
    if options.source not in TRACES:
        _check_replaceable(options)
        _write(_synthetic(options), options)
        return
    with open_input(options.file, nullcontext) as trace:
        check_distinct(trace.status, [("--output", options.output)], options.file)
        _check_replaceable(options)

        def read_entries(checks: TraceEntryChecks) -> Iterable[WorkloadEntry]:
            name = DEFAULT_NAME if options.name is None else options.name
            entries = trace_entries(options.source, trace.lines(), checks, name)
            return islice(entries, options.requests)

        factor, checks = options.scale, TraceEntryChecks(trace.name)
        if options.rate is not None:
            if not trace.is_file:
                raise InputError(
                    f"--rate needs to read {trace.name} twice, which is a pipe: give a file, or "
                    "--scale"
                )
            read_first = read_entries(TraceEntryChecks(trace.name))
            factor = factor_for_rate(read_first, options.rate, trace.name)
        entries = read_entries(checks)
        _write(entries if factor is None else scale_times(entries, factor), options)
        say(trace.take_notes())
        if checks.num_raised and not options.quiet:
            say(f"  {counted(checks.num_raised, 'length')} of 0 written as 1\n")


def _check(options: WorkloadOptions) -> None:
    source = options.source
    if source not in OPTIONS_OF:
        near = get_close_matches(source, OPTIONS_OF, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BatchdecodeError(f"unknown source {source!r}{hint} (known: {', '.join(OPTIONS_OF)})")
    taken, values = OPTIONS_OF[source], asdict(options).items()
    given = [name for name, value in values if name not in _FOR_ALL and value is not None]

    def shown(name: str) -> str:
        return name.upper() if name == "file" else f"--{name.replace('_', '-')}"

    for name in given:
        if name not in taken:
            takes = ", ".join(map(shown, taken))
            raise BatchdecodeError(f"{source} takes no {shown(name)} (it takes: {takes})")
    for name in NEEDED:
        if name in taken and name not in given:
            raise BatchdecodeError(f"{source} needs {shown(name)}")
    if options.rate is not None and options.scale is not None:
        raise BatchdecodeError("--rate and --scale both set the times: give one of them")
    if options.think_time is not None and options.turns is None and "turns" in taken:
        raise BatchdecodeError("--think-time is a pause between turns: give --turns too")


def _synthetic(options: WorkloadOptions) -> Iterable[WorkloadEntry]:
    def read_lines(path: str) -> Iterator[NumberedLine]:
        with open_input(path, nullcontext) as file:
            yield from file.lines()

    prompts, outputs = options.prompt_tokens, options.output_tokens
    prefix, priority = options.shared_prefix, options.priority
    made = SyntheticWorkload(
        prompt_lengths=parse_lengths(
            prompts or DEFAULT_PROMPT_TOKENS, "--prompt-tokens", "prompt", read_lines
        ),
        output_lengths=parse_lengths(
            outputs or DEFAULT_OUTPUT_TOKENS, "--output-tokens", "output", read_lines
        ),
        max_prompt_tokens=options.max_prompt_tokens or MAX_LENGTH,
        max_output_tokens=options.max_output_tokens or MAX_LENGTH,
        shared_prefix=None if prefix is None else parse_shared_prefix(prefix, "--shared-prefix"),
        priorities={} if priority is None else parse_priorities(priority, "--priority"),
        seed=options.seed or 0,
        name=DEFAULT_NAME if options.name is None else options.name,
    )
    num_requests = DEFAULT_REQUESTS if options.requests is None else options.requests
    pause = parse_distribution(options.think_time or DEFAULT_THINK_TIME, "--think-time", TIMES)
    if options.users is not None:
        return islice(closed_entries(made, options.users, pause), num_requests)
    rate = DEFAULT_RATE if options.rate is None else options.rate
    arrivals: Arrivals
    match options.source:
        case "constant":
            arrivals = constant(rate)
        case "poisson":
            arrivals = poisson(rate)
        case "gamma":
            arrivals = gamma(rate, options.burstiness or 0.0)
        case _:
            arrivals = bursty(rate, options.on or 0.0, options.off or 0.0)
    if options.turns is None:
        return islice(open_entries(made, arrivals), num_requests)
    num_turns = parse_distribution(options.turns, "--turns", LENGTHS)
    return islice(session_entries(made, arrivals, num_turns, pause), num_requests)


def _check_replaceable(options: WorkloadOptions) -> None:
    if options.output is not None and not options.force:
        check_replaceable("--output", options.output)


def _write(entries: Iterable[WorkloadEntry], options: WorkloadOptions) -> None:
    summary = WorkloadSummary()
    with output_sink(options.output) as sink:
        for block in encode_entries(summary.observe(entries)):
            sink.write(block)
    if not options.quiet:
        say(render_summary(summary))


def render_summary(summary: WorkloadSummary) -> str:
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


COMMANDS = {"workload": command(workload, WorkloadOptions, notes=(DISTRIBUTIONS,))}
