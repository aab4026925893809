"""Synthetic workloads: who asks when, how much goes in and out, and what prompts share.

Rule: each kind of number has a stream of its own, so that another rate leaves the lengths as they
were, and the first entries of a longer workload are those of a shorter one.
"""

from collections.abc import Iterable, Iterator
from itertools import count

from msgspec import Struct

from batcher.fields import read_number
from batcher.planning.arrivals import Arrivals
from batcher.planning.distributions import Distribution, draw_lengths, draw_seconds, make_generator
from batcher.planning.entries import (
    DEFAULT_NAME,
    MAX_LENGTH,
    LengthSegment,
    WorkloadEntry,
    WorkloadError,
)
from batcher.planning.priorities import PriorityShares, draw_priorities

MAX_GROUPS = 2**20
# The streams of a seed.
ARRIVALS, PROMPTS, OUTPUTS, _TURNS, _THINKING, _GROUPS, PRIORITIES = range(7)


class SharedPrefix(Struct, frozen=True):
    """Each prompt begins with `length` tokens, which are those of one of `num_groups` groups."""

    length: int
    num_groups: int = 1


class SyntheticWorkload(Struct, frozen=True, kw_only=True):
    """What a workload is made from, but for who asks when.

    name: how ids, sessions and the seeds of prompts begin.
    """

    prompt_lengths: Distribution
    output_lengths: Distribution
    max_prompt_tokens: int = MAX_LENGTH
    max_output_tokens: int = MAX_LENGTH
    shared_prefix: SharedPrefix | None = None
    priorities: PriorityShares = {}
    seed: int = 0
    name: str = DEFAULT_NAME


class _Turn(Struct, frozen=True, gc=False):
    """One request as far as it is known who asks it, and when."""

    id: str
    arrival_time: float
    session: str | None = None
    think_time: float | None = None


def open_entries(workload: SyntheticWorkload, arrivals: Arrivals) -> Iterator[WorkloadEntry]:
    """Yield single requests without end, that arrive by a pattern."""
    times = arrivals.times(make_generator(workload.seed, ARRIVALS))
    turns = (_Turn(f"{workload.name}{number}", time) for number, time in enumerate(times))
    return _fill(workload, turns)


def session_entries(
    workload: SyntheticWorkload,
    arrivals: Arrivals,
    num_turns: Distribution,
    think_time: Distribution,
) -> Iterator[WorkloadEntry]:
    """Yield the turns of sessions without end; the sessions arrive by a pattern.

    The turns of a session follow each other; each waits for the one before it, and then for
    `think_time`.
    """

    def turns() -> Iterator[_Turn]:
        times = arrivals.times(make_generator(workload.seed, ARRIVALS))
        lengths = draw_lengths(num_turns, make_generator(workload.seed, _TURNS))
        pauses = draw_seconds(think_time, make_generator(workload.seed, _THINKING))
        for number, (time, length) in enumerate(zip(times, lengths, strict=False)):
            session = f"{workload.name}{number}"
            yield _Turn(f"{session}.0", time, session)
            for turn in range(1, length):
                yield _Turn(f"{session}.{turn}", time, session, next(pauses))

    return _fill(workload, turns())


def closed_entries(
    workload: SyntheticWorkload, num_users: int, think_time: Distribution
) -> Iterator[WorkloadEntry]:
    """Yield the requests of users, without end: first one of each, then another of each, and so on.

    Each user is a session, from 0 on, who asks again `think_time` after an answer.
    """

    def turns() -> Iterator[_Turn]:
        sessions = [f"{workload.name}{user}" for user in range(num_users)]
        pauses = draw_seconds(think_time, make_generator(workload.seed, _THINKING))
        yield from (_Turn(f"{session}.0", 0.0, session) for session in sessions)
        for turn in count(1):
            for session in sessions:
                yield _Turn(f"{session}.{turn}", 0.0, session, next(pauses))

    return _fill(workload, turns())


def parse_shared_prefix(text: str, option: str) -> SharedPrefix:
    """Return the prefix that `text`, TOKENS or TOKENS:GROUPS, stands for.

    Raises:
        WorkloadError: it is neither.
    """
    length, colon, groups = text.partition(":")
    try:
        prefix = SharedPrefix(read_number(length, int), read_number(groups, int) if colon else 1)
    except ValueError:
        prefix = SharedPrefix(0, 0)
    if not (1 <= prefix.length <= MAX_LENGTH and 1 <= prefix.num_groups <= MAX_GROUPS):
        raise WorkloadError(
            f"{option} {text}: expected TOKENS or TOKENS:GROUPS, whole numbers from 1 to "
            f"{MAX_LENGTH:,}"
        )
    return prefix


def _fill(workload: SyntheticWorkload, turns: Iterable[_Turn]) -> Iterator[WorkloadEntry]:
    """Yield the requests of `turns`, with their prompts and lengths."""
    prompts, outputs = (make_generator(workload.seed, stream) for stream in (PROMPTS, OUTPUTS))
    prompt_lengths = draw_lengths(workload.prompt_lengths, prompts, workload.max_prompt_tokens)
    output_lengths = draw_lengths(workload.output_lengths, outputs, workload.max_output_tokens)
    priorities = draw_priorities(workload.priorities, make_generator(workload.seed, PRIORITIES))
    prefixes = _draw_prefixes(workload)
    for turn in turns:
        prompt = [LengthSegment(length=next(prompt_lengths), seed=turn.id)]
        if turn.think_time is None:  # later turns have the prefix from the first
            prompt = [*next(prefixes), *prompt]
        yield WorkloadEntry(
            id=turn.id,
            session=turn.session,
            arrival_time=turn.arrival_time,
            priority=next(priorities),
            think_time=turn.think_time,
            prompt=prompt,
            max_tokens=next(output_lengths),
            ignore_eos=True,
        )


def _draw_prefixes(workload: SyntheticWorkload) -> Iterator[list[LengthSegment]]:
    """Yield what prompts begin with, without end: no segment at all, or that of a group."""
    prefix = workload.shared_prefix
    if prefix is None:
        while True:
            yield []
    generator = make_generator(workload.seed, _GROUPS)
    while True:
        for group in generator.integers(prefix.num_groups, size=1024).tolist():
            seed = f"prefix-{workload.name}{group}"
            yield [LengthSegment(length=prefix.length, seed=seed, type="system")]
