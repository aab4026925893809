"""`batchdecode workload`: make a requests file from an arrival pattern or a recorded trace."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Any

from batcher.errors import BatchdecodeError
from batcher.planning import synthetic
from batcher.planning.workload_traces import (
    DEFAULT_NAME,
    TRACES,
    LengthCounts,
    NumberedLine,
    Side,
    TraceEntryChecks,
    WorkloadEntry,
    WorkloadSummary,
    encode_entries,
    factor_for_rate,
    scale_times,
    trace_entries,
)
from batcher.request import MAX_LENGTH

from ..command import OUTPUT, REQUIRED, OptionGroup, argument, command, flag, option
from ..options import force_flag, output_option
from ..run.files import check_distinct, check_replaceable, output_sink
from ..run.input import InputError, open_input
from ..run.problems import say
from ..screen.terminal import counted

ARRIVALS, SIZES = "Arrivals", "Lengths (a number or a distribution)"
SESSIONS = "Prefixes and sessions"
DISTRIBUTIONS = (
    "Distributions: N, constant:N, uniform:LOW,HIGH, normal:MEAN,STD, lognormal:MEDIAN,SIGMA, "
    "exponential:MEAN, pareto:MIN,ALPHA, and for lengths also zipf:ALPHA,MAX and empirical:FILE."
)


def _options() -> OptionGroup:
    """Return the options of all sources; OPTIONS_OF lists those of each."""
    kinds: dict[str, Any] = {}

    def add(
        name: str, kind: Any, panel: str, text: str, value: str, *short: str, **more: Any
    ) -> None:
        kinds[name] = kind | None, option(panel, text, value, *short, **more)

    factor = {"min": 1e-6, "max": 1e6}
    text = "Number of requests.  [default: 1000; for a trace, all]"
    add("requests", int, ARRIVALS, text, "N", "-n", min=1, common=True)
    text = (
        "Mean rate: requests per second, or sessions per second with --turns.  "
        "[default: 1; for a trace, its own rate]"
    )
    add("rate", float, ARRIVALS, text, "R", **factor, common=True)
    text = "gamma: shape of the gaps; 1 is Poisson, smaller is burstier."
    add("burstiness", float, ARRIVALS, text, "B", min=1e-3, max=1e6)
    add("on", float, ARRIVALS, "bursty: length of a burst.", "SECONDS", **factor)
    add("off", float, ARRIVALS, "bursty: pause between bursts.", "SECONDS", min=0, max=1e6)
    text = "closed: number of users, each with one request at a time."
    add("users", int, ARRIVALS, text, "N", min=1)
    text = "Multiply the times of a trace; 0.5 is twice as fast."
    add("scale", float, ARRIVALS, text, "FACTOR", **factor)
    text = "Prompt lengths.  [default: 1024]"
    add("prompt_tokens", str, SIZES, text, "D", common=True)
    text = "Output lengths.  [default: 128]"
    add("output_tokens", str, SIZES, text, "D", common=True)
    add("max_prompt_tokens", int, SIZES, "Maximum prompt tokens.", "N", min=1)
    add("max_output_tokens", int, SIZES, "Maximum output tokens.", "N", min=1)
    text = "Begin prompts with N shared tokens, the same within each of G groups."
    add("shared_prefix", str, SESSIONS, text, "N[:G]", common=True)
    add("turns", str, SESSIONS, "Make sessions with this many turns.", "D", common=True)
    text = "Seconds from an answer to the next turn.  [default: 0]"
    add("think_time", str, SESSIONS, text, "D")
    text = "Priorities, each with its share of the requests."
    add("priority", str, SESSIONS, text, "N:SHARE,...")
    add("seed", int, OUTPUT, "Random seed.  [default: 0]", "N", min=0, common=True)
    text = "Prefix of request ids.  [default: r; a vLLM log keeps its own]"
    add("name", str, OUTPUT, text, "TEXT")
    return OptionGroup(kinds, dict)


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """The options of `batchdecode workload`; values: of the given options, by name."""

    source: str = argument(
        "constant, poisson, gamma, bursty, closed; or a trace: azure, mooncake, vllm.",
        "SOURCE",
        lambda _: OPTIONS_OF,
        default=REQUIRED,
    )
    file: str | None = argument("The trace: a file or - for stdin.", "FILE")
    values: dict[str, Any] = _options().as_field()
    output: str | None = output_option("Write the requests to FILE (gzipped if it ends in .gz).")
    force: bool = force_flag()
    quiet: bool = flag(OUTPUT, "Print no summary.", "-q")


DEFAULT_REQUESTS, DEFAULT_RATE = 1000, 1.0
DEFAULT_LENGTHS: dict[Side, str] = {"prompt": "1024", "output": "128"}  # as in vLLM's benchmark
LARGE_RATE = 100  # without decimals

_LENGTHS = (
    *("prompt_tokens", "output_tokens", "max_prompt_tokens", "max_output_tokens"),
    *("shared_prefix", "priority", "seed", "name"),
)
_OPEN = ("rate", "turns", "think_time", *_LENGTHS)
_TRACE = ("file", "rate", "scale")
# The options of each source, in addition to those of all.
OPTIONS_OF: dict[str, tuple[str, ...]] = {
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


def workload(options: WorkloadOptions) -> None:
    """Make a requests file from an arrival pattern or a trace."""
    _check(options)
    given = options.values
    replaced = None if options.force else options.output
    if options.source not in TRACES:
        if replaced is not None:
            check_replaceable("--output", replaced)
        _write(_synthetic(options), options)
        return
    with open_input(options.file, nullcontext) as trace:
        check_distinct(trace.statuses, [("--output", options.output)], [options.file])
        if replaced is not None:
            check_replaceable("--output", replaced)

        def read_entries(checks: TraceEntryChecks) -> Iterable[WorkloadEntry]:
            name = given.get("name", DEFAULT_NAME)
            entries = trace_entries(options.source, trace.lines(), checks, name)
            return islice(entries, given.get("requests"))

        factor, checks = given.get("scale"), TraceEntryChecks(trace.name)
        if "rate" in given:
            if not trace.is_file:
                raise InputError(
                    f"--rate reads {trace.name} twice, but it is a pipe: use a file, or --scale"
                )
            read_first = read_entries(TraceEntryChecks(trace.name))
            factor = factor_for_rate(read_first, given["rate"], trace.name)
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
    taken = OPTIONS_OF[source]
    given = [*(["file"] if options.file is not None else []), *options.values]

    def shown(name: str) -> str:
        return name.upper() if name == "file" else f"--{name.replace('_', '-')}"

    for name in given:
        if name not in (*taken, "requests"):
            takes = ", ".join(map(shown, taken))
            raise BatchdecodeError(f"{source} takes no {shown(name)} (known: {takes})")
    for name in NEEDED:
        if name in taken and name not in given:
            raise BatchdecodeError(f"{source} needs {shown(name)}")
    if "rate" in given and "scale" in given:
        raise BatchdecodeError("--rate cannot be used with --scale")
    if "think_time" in given and "turns" not in given and "turns" in taken:
        raise BatchdecodeError("--think-time needs --turns")


def _synthetic(options: WorkloadOptions) -> Iterable[WorkloadEntry]:
    def read_lines(path: str) -> Iterator[NumberedLine]:
        with open_input(path, nullcontext) as file:
            yield from file.lines()

    given = options.values

    def lengths(side: Side) -> synthetic.Distribution:
        text = given.get(f"{side}_tokens") or DEFAULT_LENGTHS[side]
        return synthetic.parse_lengths(text, f"--{side}-tokens", side, read_lines)

    made = synthetic.SyntheticWorkload(
        prompt_lengths=lengths("prompt"),
        output_lengths=lengths("output"),
        max_prompt_tokens=given.get("max_prompt_tokens", MAX_LENGTH),
        max_output_tokens=given.get("max_output_tokens", MAX_LENGTH),
        shared_prefix=synthetic.parse_shared_prefix(given["shared_prefix"], "--shared-prefix")
        if "shared_prefix" in given
        else None,
        priorities=synthetic.parse_priorities(given["priority"], "--priority")
        if "priority" in given
        else {},
        seed=given.get("seed", 0),
        name=given.get("name", DEFAULT_NAME),
    )
    num_requests, rate = given.get("requests", DEFAULT_REQUESTS), given.get("rate", DEFAULT_RATE)
    text = given.get("think_time") or "0"
    pause = synthetic.parse_distribution(text, "--think-time", synthetic.TIMES)
    if "users" in given:
        return islice(synthetic.closed_entries(made, given["users"], pause), num_requests)
    shape = [given[name] for name in ("burstiness", "on", "off") if name in given]
    patterns: dict[str, Callable[..., synthetic.Arrivals]] = {
        "constant": synthetic.constant,
        "poisson": synthetic.poisson,
        "gamma": synthetic.gamma,
        "bursty": synthetic.bursty,
    }
    arrivals = patterns[options.source](rate, *shape)
    if "turns" not in given:
        return islice(synthetic.open_entries(made, arrivals), num_requests)
    num_turns = synthetic.parse_distribution(given["turns"], "--turns", synthetic.LENGTHS)
    return islice(synthetic.session_entries(made, arrivals, num_turns, pause), num_requests)


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
        headline += ", all at once" if summary.num_arrivals > 1 else ""
    else:
        rate = f"{summary.mean_rate:{',.0f' if summary.mean_rate >= LARGE_RATE else '.3g'}}"
        headline += f" over {summary.span:,.1f} s, {rate} a second"
    prompts = _lengths("in", summary.prompt_lengths)
    return f"{headline}\n{prompts}{_lengths('out', summary.output_lengths)}"


def _lengths(name: str, lengths: LengthCounts) -> str:
    p50, p99 = lengths.percentile(50), lengths.percentile(99)
    return f"  {name:<3}  {counted(lengths.sum, 'token')}, p50 {p50:,}, p99 {p99:,}\n"


COMMANDS = {"workload": command(workload, WorkloadOptions, notes=(DISTRIBUTIONS,))}
