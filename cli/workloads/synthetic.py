"""A synthetic workload, from the options of `batchdecode workload`."""

from collections.abc import Callable, Iterable
from itertools import islice

from batcher.planning.synthetic import (
    LENGTHS,
    TIMES,
    Arrivals,
    Bursty,
    Constant,
    Gamma,
    Poisson,
    PriorityShares,
    ReadLines,
    SyntheticWorkload,
    closed_entries,
    open_entries,
    parse_distribution,
    parse_lengths,
    parse_priorities,
    parse_shared_prefix,
    session_entries,
)
from batcher.planning.workload_traces import DEFAULT_NAME, MAX_LENGTH, WorkloadEntry

from ..commands.workload import WorkloadOptions

DEFAULT_REQUESTS = 1000
DEFAULT_RATE = 1.0
DEFAULT_PROMPT_TOKENS, DEFAULT_OUTPUT_TOKENS = "1024", "128"  # as vLLM's benchmark has them
DEFAULT_THINK_TIME = "0"


def make_entries(options: WorkloadOptions, read_lines: ReadLines) -> Iterable[WorkloadEntry]:
    """Return the entries that were asked for; `read_lines` gives the lines of a file.

    Raises:
        BatchdecodeError: an option is not right.
    """
    workload = _make_workload(options, read_lines)
    num_requests = DEFAULT_REQUESTS if options.requests is None else options.requests
    pause = parse_distribution(options.think_time or DEFAULT_THINK_TIME, "--think-time", TIMES)
    if options.users is not None:
        return islice(closed_entries(workload, options.users, pause), num_requests)
    rate = DEFAULT_RATE if options.rate is None else options.rate
    arrivals = PATTERNS[options.source](options, rate)
    if options.turns is None:
        return islice(open_entries(workload, arrivals), num_requests)
    num_turns = parse_distribution(options.turns, "--turns", LENGTHS)
    return islice(session_entries(workload, arrivals, num_turns, pause), num_requests)


def _make_workload(options: WorkloadOptions, read_lines: ReadLines) -> SyntheticWorkload:
    prompt_lengths = parse_lengths(
        options.prompt_tokens or DEFAULT_PROMPT_TOKENS, "--prompt-tokens", "prompt", read_lines
    )
    output_lengths = parse_lengths(
        options.output_tokens or DEFAULT_OUTPUT_TOKENS, "--output-tokens", "output", read_lines
    )
    prefix = options.shared_prefix
    return SyntheticWorkload(
        prompt_lengths=prompt_lengths,
        output_lengths=output_lengths,
        max_prompt_tokens=options.max_prompt_tokens or MAX_LENGTH,
        max_output_tokens=options.max_output_tokens or MAX_LENGTH,
        shared_prefix=None if prefix is None else parse_shared_prefix(prefix, "--shared-prefix"),
        priorities=_priorities(options.priority),
        seed=options.seed or 0,
        name=DEFAULT_NAME if options.name is None else options.name,
    )


def _priorities(text: str | None) -> PriorityShares:
    return {} if text is None else parse_priorities(text, "--priority")


PATTERNS: dict[str, Callable[[WorkloadOptions, float], Arrivals]] = {
    "constant": lambda _, rate: Constant(rate),
    "poisson": lambda _, rate: Poisson(rate),
    "gamma": lambda options, rate: Gamma(rate, options.burstiness or 0.0),
    "bursty": lambda options, rate: Bursty(rate, options.on or 0.0, options.off or 0.0),
}
