"""Simulated sequences: their lengths, contents and times.

In the prefix cache, known tokens stand for themselves.  A piece of which only the symbol is known
has a negative number, the same for equal symbols at the same position; the keys of the cache
include the tokens before it.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterator
from itertools import accumulate, repeat
from typing import NamedTuple

from msgspec.structs import replace

from batcher.models.base import Context
from batcher.scheduling.sequence import NEVER, Schedulable
from batcher.timing.step_time import TICKS_PER_SECOND


class Piece(NamedTuple):
    """`length` tokens of a prompt or an output: those listed, or those that `symbol` stands for.

    Equal symbols are equal tokens or, for GREEDY, equal tokens after equal ones.
    """

    length: int
    symbol: tuple[int | str, ...] = ()
    tokens: tuple[int, ...] | None = None


GREEDY: tuple[int | str, ...] = ("greedy",)


class SimulatedSequence(Schedulable, eq=False, gc=False, kw_only=True):
    """One sample of a request; a workload lists them, and each simulation runs copies.

    prompt: None if it shares nothing.  num_lasting: first tokens that stay in a session when this
    turn is dropped.  draft_tokens: drafts per step, None for the default.  history: the earlier
    tokens of its session.  pieces, ends: prompt and output, with the end of each piece; empty until
    needed.  admitted_ticks: of its first admission.  first_token_ticks, end_ticks: the ends of the
    steps of its first and last token.  has_failed: it, or a turn before it, can never run.  fits:
    its prompt fits into the context.  came: its arrival at the fleet, if earlier than at the
    replica.  num_cached_at_first: tokens found at its first admission.  num_lost_tokens: by the
    last preemption.
    """

    prompt: tuple[Piece, ...] | None = None
    output: Piece
    session: str | None = None
    think_time: float = 0.0
    num_lasting: int = 0
    draft_tokens: int | None = None
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
    def own_prompt(self) -> tuple[Piece, ...]:
        if self.prompt is not None:
            return self.prompt
        return (Piece(self.num_prompt_tokens, ("prompt", self.input_index)),)

    @property
    def own_output(self) -> Piece:
        """The output, cut to max_tokens."""
        length, symbol, tokens = self.output
        if length <= self.max_tokens:
            return self.output
        return Piece(self.max_tokens, symbol, None if tokens is None else tokens[: self.max_tokens])

    @property
    def first_arrival(self) -> float:
        return self.arrival_time if self.came is None else self.came

    @property
    def admitted(self) -> float | None:
        return _seconds(self.admitted_ticks)

    @property
    def first_token(self) -> float | None:
        return _seconds(self.first_token_ticks)

    @property
    def end(self) -> float | None:
        return _seconds(self.end_ticks)

    @property
    def num_output_tokens(self) -> int:
        return 0 if self.has_failed else min(self.output.length, self.max_tokens)

    def copy_behind(self, history: tuple[Piece, ...], context: Context) -> "SimulatedSequence":
        """Return a fresh copy behind the earlier tokens of its session."""
        start = sum(piece.length for piece in history) if history else 0
        num_tokens, max_tokens, fits = start + self.num_prompt_tokens, self.max_tokens, True
        if not context.holds(num_tokens, max_tokens):
            is_computed, prompts = max_tokens > 0, {"prompt": num_tokens}
            fits = context.why_never(prompts, max_tokens, is_computed=is_computed) is None
            max_tokens = max(min(max_tokens, context.max_context - num_tokens), 0)
        ends = self.segment_ends
        if start and ends:
            ends = ((start, 0), *((start + end, priority) for end, priority in ends))
        return replace(
            self,
            num_prompt_tokens=num_tokens,
            num_tokens=num_tokens,
            max_tokens=max_tokens,
            segment_ends=ends,
            history=history,
            fits=fits,
            block_table=[],
        )

    def anew(self) -> "SimulatedSequence":
        """Return a fresh copy that keeps only its arrival at the fleet."""
        return SimulatedSequence(
            **{name: getattr(self, name) for name in _GIVEN},
            num_tokens=self.num_prompt_tokens,
            came=self.first_arrival,
        )

    def cut_to(self, room: int) -> bool:
        """Limit its output to `room` tokens; return whether the whole output fits.

        A request with explicit max_tokens must have room for all of them.
        """
        if room < self.max_tokens and not self.has_default_limit:
            return False
        self.max_tokens = min(self.max_tokens, room)
        return self.output.length <= room

    def send(self, now: float) -> None:
        """Set its arrival at a replica to `now`."""
        self.came, self.arrival_time = self.first_arrival, now

    def lay_out(self) -> tuple[Piece, ...]:
        if not self.ends:
            pieces = (*self.history, *self.own_prompt, self.own_output)
            self.pieces = tuple(piece for piece in pieces if piece.length) or (self.own_output,)
            self.ends = tuple(accumulate(piece.length for piece in self.pieces))
        return self.pieces


# The fields that a fresh copy keeps.
_GIVEN = (
    *("id", "index", "input_index", "arrival_time", "num_prompt_tokens", "max_tokens"),
    *("has_default_limit", "priority", "deadline", "cache_salt", "segment_ends", "has_siblings"),
    *("prompt", "output", "session", "think_time", "num_lasting", "draft_tokens"),
    *("history", "fits"),
)


def _seconds(ticks: int) -> float | None:
    return None if ticks == NEVER else ticks / TICKS_PER_SECOND


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
            num_whole = (min(end, stop) - start) // size  # blocks within this piece
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
        """Return the content of a block that begins in the piece at `place` and spans more."""
        parts: list[tuple[int, ...]] = []  # tokens, or (number of a piece, its length here)
        while start < stop:
            piece, end = sequence.pieces[place], sequence.ends[place]
            last, begin = min(stop, end), end - piece.length
            if piece.tokens is None:
                parts.append((self._number(piece, end), last - start))
            elif parts and parts[-1][0] >= 0:  # tokens continue
                parts[-1] += piece.tokens[start - begin : last - begin]
            else:
                parts.append(piece.tokens[start - begin : last - begin])
            start, place = last, place + 1
        return parts[0] if len(parts) == 1 and parts[0][0] >= 0 else tuple(parts)

    def _number(self, piece: Piece, end: int) -> int:
        return self._numbers.setdefault((piece.symbol, end - piece.length), ~len(self._numbers))
