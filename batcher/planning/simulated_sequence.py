"""Sequences that are simulated: how they come from a workload, what they hold, and their times.

What stands for their tokens in the prefix cache is the tokens themselves where they are known.  A
piece of which only the symbol is known has a number below 0, which no token is, the same for equal
symbols that begin at the same place; what is before them is in the keys of the cache.
"""

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator
from functools import cached_property
from itertools import accumulate, repeat

from batcher.models.base import ANY_LENGTH, Context
from batcher.planning.workload import Job, Piece, Workload
from batcher.scheduling.queue import ARRIVAL_ORDER
from batcher.scheduling.sequence import NEVER, Schedulable
from batcher.timing.step_time import TICKS_PER_SECOND


class SimulatedSequence(Schedulable, eq=False, gc=False, kw_only=True):
    """A job on its way.

    history: the earlier tokens of its session.  pieces, ends: its tokens, prompt and output, and
    where each piece ends; empty until needed.  arrival_time: of a turn, when it may begin at last.
    admitted_ticks: the beginning of its first admission; first_token_ticks, end_ticks: the ends of
    the steps of its first and last token; NEVER if that did not happen.  has_failed: it, or a turn
    before it, could never run.  fits: its prompt leaves room for output in the context.  came: its
    arrival at the fleet, if that was before the one at its replica.  num_cached_at_first: tokens
    found in blocks at its first admission.  num_lost_tokens: computed, and lost by the last
    preemption.
    """

    job: Job
    history: tuple[Piece, ...] = ()
    pieces: tuple[Piece, ...] = ()
    ends: tuple[int, ...] = ()
    admitted_ticks: int = NEVER
    first_token_ticks: int = NEVER
    end_ticks: int = NEVER
    has_failed: bool = False
    fits: bool = True
    came: float | None = None
    num_cached_at_first: int = 0
    num_preemptions: int = 0
    num_lost_tokens: int = 0

    @property
    def first_arrival(self) -> float:
        """Its arrival at the engine, or at the router of the fleet."""
        return self.arrival_time if self.came is None else self.came

    @property
    def admitted(self) -> float | None:
        ticks = self.admitted_ticks
        return None if ticks == NEVER else ticks / TICKS_PER_SECOND

    @property
    def first_token(self) -> float | None:
        ticks = self.first_token_ticks
        return None if ticks == NEVER else ticks / TICKS_PER_SECOND

    @property
    def end(self) -> float | None:
        return None if self.end_ticks == NEVER else self.end_ticks / TICKS_PER_SECOND

    @property
    def num_output_tokens(self) -> int:
        if self.has_failed:
            return 0
        num_output, most = self.job.output.length, self.max_tokens
        return num_output if num_output < most else most  # noqa: FURB136 - min() takes twice as long

    @property
    def output(self) -> Piece:
        """What it generates, which ends where the context does."""
        output = self.job.output
        if output.length <= self.max_tokens:
            return output
        tokens = None if output.tokens is None else output.tokens[: self.max_tokens]
        return Piece(self.max_tokens, output.symbol, tokens)

    def cut_to(self, room: int) -> bool:
        """Limit its output to `room` tokens; return whether its whole output fits.

        A request that states max_tokens must have room for all of them.
        """
        if room < self.max_tokens and not self.has_default_limit:
            return False
        self.max_tokens = min(self.max_tokens, room)
        return self.job.output.length <= room

    def send(self, now: float) -> None:
        """Let it arrive at a replica at `now`, perhaps later than at the fleet."""
        self.came, self.arrival_time = self.first_arrival, now

    def anew(self) -> "SimulatedSequence":
        """Return a copy that no engine knows yet; only its arrival at the fleet is kept."""
        fresh = make_sequence(self.job, self.history)
        fresh.max_tokens, fresh.fits, fresh.came = self.max_tokens, self.fits, self.first_arrival
        return fresh

    def lay_out(self) -> tuple[Piece, ...]:
        if not self.ends:
            pieces = (*self.history, *self.job.pieces, self.output)
            self.pieces = tuple(piece for piece in pieces if piece.length) or (self.output,)
            self.ends = tuple(accumulate(piece.length for piece in self.pieces))
        return self.pieces


def make_sequence(
    job: Job, history: tuple[Piece, ...] = (), context: Context = ANY_LENGTH
) -> SimulatedSequence:
    """Return what waits in the queue for `job`; `history` is what its session has come to."""
    start = sum(piece.length for piece in history) if history else 0
    num_tokens = start + job.num_prompt_tokens
    max_tokens, fits = job.max_tokens, True
    if not context.holds(num_tokens, max_tokens):
        is_computed, prompts = max_tokens > 0, {"prompt": num_tokens}
        fits = context.why_never(prompts, max_tokens, is_computed=is_computed) is None
        max_tokens = max(min(max_tokens, context.max_context - num_tokens), 0)
    sequence = SimulatedSequence(
        id=job.id,
        index=job.index,
        input_index=job.input_index,
        arrival_time=job.arrival_time,
        num_prompt_tokens=num_tokens,
        num_tokens=num_tokens,
        max_tokens=max_tokens,
        has_default_limit=job.has_default_limit,
        priority=job.priority,
        deadline=job.deadline,
        cache_salt=job.cache_salt,
        segment_ends=job.segment_ends,
        has_siblings=job.has_siblings,
        job=job,
        history=history,
        fits=fits,
    )
    if start and job.segment_ends:
        sequence.segment_ends = (
            (start, 0),
            *((start + end, priority) for end, priority in job.segment_ends),
        )
    return sequence


class _History:
    """The turns of a session that have ended, and what has stayed of those dropped."""

    def __init__(self) -> None:
        self.kept: list[Piece] = []
        self.past: list[SimulatedSequence] = []

    @property
    def pieces(self) -> tuple[Piece, ...]:
        own = (piece for turn in self.past for piece in (*turn.job.pieces, turn.output))
        return tuple(piece for piece in (*self.kept, *own) if piece.length)

    def drop(self, num_more: int, context: Context) -> None:
        """Drop the oldest turns until `num_more` tokens fit behind the others, or none is left."""
        lengths = [
            (turn.job.num_prompt_tokens + turn.output.length, turn.job.num_lasting)
            for turn in self.past
        ]
        num_kept = sum(piece.length for piece in self.kept)
        for _ in range(context.num_dropped(lengths, num_kept + num_more)):
            job = self.past.pop(0).job
            num_left = job.num_lasting
            for piece in job.pieces:
                length = min(piece.length, num_left)
                if length:
                    tokens = None if piece.tokens is None else piece.tokens[:length]
                    self.kept.append(Piece(length, piece.symbol, tokens))
                num_left -= length


class Turns:
    """Makes the sequences of a workload; of one session at most one is on its way.

    sequences: one for each job; turns that have not begun have no history.
    """

    def __init__(self, workload: Workload) -> None:
        self._jobs, self._context = workload.jobs, workload.context
        self.sequences = [make_sequence(job, (), self._context) for job in workload.jobs]
        self._waiting: dict[str | None, deque[int]] = {}  # the places of turns, by their session
        self._histories: defaultdict[str, _History] = defaultdict(_History)

    @cached_property
    def has_siblings(self) -> bool:
        return any(job.has_siblings for job in self._jobs)

    @cached_property
    def longest(self) -> SimulatedSequence | None:
        """The sequence with the most tokens, without histories, or None."""
        return max(
            self.sequences,
            key=lambda sequence: sequence.num_prompt_tokens + sequence.max_tokens,
            default=None,
        )

    @cached_property
    def all_wait(self) -> bool:
        """Whether all jobs have to be admitted, and none waits for another one."""
        return all(
            turn.fits and turn.max_tokens and turn.job.session is None for turn in self.sequences
        )

    @cached_property
    def has_sessions(self) -> bool:
        return any(job.session is not None for job in self._jobs)

    def arrivals(self) -> Iterable[SimulatedSequence]:
        return sorted(self.begin(), key=ARRIVAL_ORDER)

    def begin(self) -> list[SimulatedSequence]:
        """Return the sequences that wait for no other one."""
        first = []
        for place, (job, sequence) in enumerate(zip(self._jobs, self.sequences, strict=True)):
            if job.session in self._waiting:
                self._waiting[job.session].append(place)
                continue
            if job.session is not None:
                self._waiting[job.session] = deque()
            first.append(sequence)
        return first

    def next_turn(self, ended: SimulatedSequence, now: float) -> SimulatedSequence | None:
        """Return the turn after one that has ended or failed, or None.

        It has failed if the one before it has.
        """
        name = ended.job.session
        if name is None or not self._waiting[name]:
            return None
        place, history = self._waiting[name].popleft(), self._histories[name]
        job = self._jobs[place]
        history.past.append(ended)
        if self._context.drops_oldest:
            num_output = self._context.num_reserved(job.max_tokens)
            history.drop(job.num_prompt_tokens + num_output, self._context)
        turn = make_sequence(job, history.pieces, self._context)
        turn.arrival_time = max(job.arrival_time, now + job.think_time)
        turn.has_failed = ended.has_failed
        self.sequences[place] = turn
        return turn


class SimulatedContents:
    """The contents of the sequences of one simulation."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Hashable, int], int] = {}

    def blocks(
        self, sequence: SimulatedSequence, start: int, stop: int, size: int
    ) -> Iterator[Hashable]:
        """Yield what the KV cache asks for, see batcher.scheduling.kv_cache.Contents."""
        pieces, ends = sequence.lay_out(), sequence.ends
        place = bisect_right(ends, start)
        while start < stop:
            while ends[place] <= start:
                place += 1
            piece, end = pieces[place], ends[place]
            num_whole = (min(end, stop) - start) // size  # of blocks in this piece alone
            if not num_whole:
                yield self._mixed(sequence, place, start, min(start + size, stop))
                start += size
                continue
            if piece.tokens is None:
                yield from repeat(self._number(piece, end), num_whole)
            else:
                first = start - (end - piece.length)
                for at in range(first, first + num_whole * size, size):
                    yield piece.tokens[at : at + size]
            start += num_whole * size

    def _mixed(self, sequence: SimulatedSequence, place: int, start: int, stop: int) -> Hashable:
        """Return what stands for tokens that begin in the piece at `place` and may be in more."""
        parts: list[tuple[int, ...]] = []  # tokens; or the number of a piece, and how many of it
        while start < stop:
            piece, end = sequence.pieces[place], sequence.ends[place]
            last, begin = min(stop, end), end - piece.length
            if piece.tokens is None:
                parts.append((self._number(piece, end), last - start))
            elif parts and parts[-1][0] >= 0:  # a list of tokens goes on
                parts[-1] += piece.tokens[start - begin : last - begin]
            else:
                parts.append(piece.tokens[start - begin : last - begin])
            start, place = last, place + 1
        return parts[0] if len(parts) == 1 and parts[0][0] >= 0 else tuple(parts)

    def _number(self, piece: Piece, end: int) -> int:
        return self._numbers.setdefault((piece.symbol, end - piece.length), ~len(self._numbers))
