"""What stands for the tokens of simulated sequences in the prefix cache, block by block.

It is the tokens themselves where they are known.  A piece of which only the symbol is known has a
number below 0, which no token is, the same for equal symbols that begin at the same place; what is
before them is in the keys of the cache.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain, repeat

from batcher.simulation.sequence import SimulatedSequence
from batcher.simulation.workload import Piece

Part = tuple[int, ...]
"""Tokens; or the number of a piece, and how many of its tokens."""


class SimulatedContents:
    """The contents of the sequences of one simulation."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Hashable, int], int] = {}

    def blocks(
        self, sequence: SimulatedSequence, start: int, stop: int, size: int
    ) -> Iterator[Hashable]:
        """Return what the KV cache asks for, see batcher.scheduling.kv_cache.Contents."""
        return chain.from_iterable(self._runs(sequence, start, stop, size))

    def _runs(
        self, sequence: SimulatedSequence, start: int, stop: int, size: int
    ) -> Iterator[Iterable[Hashable]]:
        """Yield contents of blocks: those of all that are in one piece, or of one in several."""
        pieces, ends = sequence.pieces, sequence.ends
        place = bisect_right(ends, start)
        while start < stop:
            while ends[place] <= start:
                place += 1
            num_whole = (min(ends[place], stop) - start) // size
            if num_whole:
                yield self._whole(pieces[place], ends[place], start, num_whole, size)
                start += num_whole * size
            else:
                end = min(start + size, stop)
                yield (self._mixed(sequence, place, start, end),)
                start = end

    def _whole(
        self, piece: Piece, end: int, start: int, num_blocks: int, size: int
    ) -> Iterable[Hashable]:
        """Return the contents of blocks from `start` on that one piece, up to `end`, fills."""
        tokens = piece.tokens
        if tokens is None:
            return repeat(self._number(piece, end), num_blocks)
        start -= end - piece.length
        return (tokens[at : at + size] for at in range(start, start + num_blocks * size, size))

    def _mixed(self, sequence: SimulatedSequence, place: int, start: int, stop: int) -> Hashable:
        """Return what stands for tokens that begin in the piece at `place` and may be in more."""
        parts: list[Part] = []
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
