"""The KV cache of sequences: block tables that grow, are shared and are copied before a write.

Full blocks can be found again by their tokens, as a chain from the first on (vLLM's prefix cache,
with the tokens themselves for a hash); where a segment of a prompt ends inside a block, that much
of it can be found, too, and is copied.

Rule: ask first, then act: nothing here takes a block that `has_room` has not promised.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable
from itertools import groupby, islice
from operator import itemgetter
from typing import NamedTuple

from batcher.scheduling.blocks import ROOT, BlockPool, Node, Prefix
from batcher.scheduling.growing_pool import GrowingPool
from batcher.scheduling.sequence import ScheduledSequence
from batcher.settings import SchedulingSettings

Contents = Callable[[ScheduledSequence, int, int, int], Iterable[Hashable]]
"""Return what stands for the tokens start..stop of a sequence, prompt and output in one, for every
`size` of them on end: contents(sequence, start, stop, size).  It is made as it is asked for."""

_end_of = itemgetter(0)


class Match(NamedTuple):
    """What of a sequence stands in blocks already.

    blocks: held by others or idle, whole or up to where the sequence goes on.
    num_tokens: how many of its tokens they hold.
    source: a block that holds the last of these beside tokens of another sequence; -1: none.
    node: of the last of the whole blocks, if num_named of them were found by what they hold.
    """

    blocks: list[int]
    num_tokens: int
    source: int = -1
    num_named: int = 0
    node: Node = ROOT

    def without_source(self, block_size: int) -> "Match":
        """Return what of it can be shared without a copy."""
        if self.source < 0:
            return self
        return self._replace(num_tokens=len(self.blocks) * block_size, source=-1)


NO_MATCH = Match([], 0)


class _Border(NamedTuple):
    """The end of a segment inside a block; parent: the node of the block before that."""

    sequence: ScheduledSequence
    end: int
    rank: int
    parent: Node


class KVCache:
    """Block tables of sequences over one pool.

    max_blocks: how many blocks there can be, None for as many as are asked for.
    """

    def __init__(self, settings: SchedulingSettings, contents: Contents) -> None:
        self.block_size, self.max_blocks = settings.block_size, settings.kv_blocks
        is_growing = self.max_blocks is None
        self.pool = GrowingPool(self.block_size) if is_growing else BlockPool(self.max_blocks)
        self._copies: list[tuple[int, int]] = []
        self._has_prefix_cache = settings.has_prefix_cache
        self._contents = contents
        self._borders: list[_Border] = []  # computed in this step
        self._siblings: dict[str, ScheduledSequence] = {}
        self._num_noted = 0  # siblings

    @property
    def version(self) -> tuple[int, int, int]:
        """What changes whenever something else can be found."""
        return self.pool.num_named, self.pool.num_lost, self._num_noted

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    # -- what is there ---------------------------------------------------------------------------

    def match(self, sequence: ScheduledSequence) -> Match:
        """Return what of `sequence` stands in blocks: at least one token of it is left to compute.

        Looking does not change what is evicted next.
        """
        found = NO_MATCH
        if self._has_prefix_cache and sequence.skips_prefix_cache:
            found = Match([], 0, node=_root(sequence))
        elif self._has_prefix_cache:
            found = self._match_prefix(sequence)
        sibling = self._siblings.get(sequence.id)
        if sibling is None or sequence.role != "sample":
            return found
        num_tokens = min(sequence.num_prompt_tokens, sequence.num_tokens - 1)
        if num_tokens <= found.num_tokens:
            return found
        blocks = sibling.table[: self.num_blocks(num_tokens)]
        return Match(blocks, num_tokens, node=_root(sequence))

    def num_blocks_to_take(self, match: Match, num_tokens: int) -> int:
        """Return how many free blocks it takes to hold `num_tokens`, with what was found."""
        blocks, pool = match.blocks, self.pool
        num_new = self.num_blocks(num_tokens) - len(blocks)
        if blocks and match.num_tokens % self.block_size and match.source < 0:
            num_new += 1  # the last of them is written to, so it is copied
        return num_new + pool.num_idle(blocks)

    def num_blocks_to_grow(self, sequence: ScheduledSequence, num_tokens: int) -> int:
        """Return how many free blocks it takes to let a running sequence hold `num_tokens`."""
        num_new = self.num_blocks(num_tokens) - len(sequence.table)
        if num_new <= 0:
            return int(self._has_shared_end(sequence))  # which it writes to, so it is copied
        return num_new

    def has_room(self, num_blocks: int) -> bool:
        """Whether so many blocks can be taken."""
        return self.pool.has_room(num_blocks)

    # -- a sequence comes, grows and goes --------------------------------------------------------

    def attach(self, sequence: ScheduledSequence, match: Match) -> None:
        """Give `sequence` what was found for it, which nobody can take from it any more."""
        self.pool.share(match.blocks)
        sequence.table, sequence.prefix = match.blocks.copy(), None
        sequence.num_cached = sequence.num_computed = match.num_tokens
        sequence.num_named, sequence.node = match.num_named, match.node

    def fill(self, sequence: ScheduledSequence, match: Match, num_tokens: int) -> None:
        """Give a sequence to which `match` is attached new blocks up to `num_tokens`."""
        num_whole, num_rest = divmod(match.num_tokens, self.block_size)
        if match.source < 0 and num_rest:
            self._copy_last(sequence)
        self.extend(sequence, num_tokens)
        if match.source >= 0:
            self._copies.append((match.source, sequence.table[num_whole]))

    def extend(self, sequence: ScheduledSequence, num_tokens: int) -> None:
        """Let the table of `sequence` hold `num_tokens`."""
        num_new = self.num_blocks(num_tokens) - len(sequence.table)
        if num_new > 0:
            sequence.table += self.pool.take(num_new)

    def compute(self, sequence: ScheduledSequence, start: int, stop: int) -> None:
        """Let the tokens start..stop, which the step computes, be found from now on.

        A later sequence of the same step may start from whole blocks; from a part of one it may
        only in the next step, since blocks are copied before anything is computed.
        """
        if not self._has_prefix_cache:
            return
        size = self.block_size
        for end, rank in _borders(sequence, start, stop):
            if end % size:
                self._name(sequence, end // size)
                self._borders.append(_Border(sequence, end, rank, sequence.node))
        self._name(sequence, stop // size)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the (source, target) blocks to copy, in order, before a step computes anything."""
        copies, self._copies = self._copies, []
        return copies

    def end_step(self) -> None:
        """Let what the step has computed be found where segments end inside blocks."""
        size = self.block_size
        for sequence, end, rank, parent in self._borders:
            place = end // size
            part = self._part(sequence, place * size, end)
            self.pool.name([sequence.table[place]], parent, [part], rank)
        self._borders.clear()

    def grow(self, sequence: ScheduledSequence, num_tokens: int) -> None:
        """Give a row that decodes the block of its last token of `num_tokens`, which begins it."""
        self.extend(sequence, num_tokens)

    def grow_all(self, rows: Iterable[ScheduledSequence], decode_step: int) -> None:
        """Give rows that decode, each by itself, the block that they begin in `decode_step`."""
        size = self.block_size
        growing = [row for row in rows if len(row.table) <= (decode_step + row.offset) // size]
        for row, block in zip(growing, self.pool.take(len(growing)), strict=True):
            row.table.append(block)

    def fork(self, parent: ScheduledSequence, child: ScheduledSequence, num_computed: int) -> None:
        """Let `child` hold what `parent` does, of which so many tokens are computed.

        Full blocks are shared.  The last one is copied to the one that `child` has there, or shared
        as well, if it has none of its own.
        """
        pool, num_full = self.pool, num_computed // self.block_size
        shared, own = parent.table[:num_full], child.table[num_full:]
        if num_computed % self.block_size:
            end = parent.table[num_full]
            if own and not pool.is_shared(own[0]):
                self._copies.append((end, own[0]))
            else:
                shared.append(end)
                own = own[1:]
        pool.share(shared)
        pool.give_back(child.table[: len(child.table) - len(own)])
        child.table = shared + own
        child.num_named, child.node = parent.num_named, parent.node

    def copy_shared_end(self, sequence: ScheduledSequence) -> None:
        """Give `sequence` a last block of its own if it shares that with another one."""
        if self._has_shared_end(sequence):
            self._copy_last(sequence)

    def note_sibling(self, sequence: ScheduledSequence) -> None:
        """Take note that other samples of its request may start from what it has computed."""
        self._siblings.setdefault(sequence.id, sequence)
        self._num_noted += 1

    def close(self, sequence: ScheduledSequence, num_computed: int) -> None:
        """Take its blocks from `sequence`; what `num_computed` tokens fill can be found.

        So what a sequence generates is found once it has left, and its prompt from the outset.
        """
        if self._has_prefix_cache:
            self._name(sequence, num_computed // self.block_size)
        if self._siblings and self._siblings.get(sequence.id) is sequence:
            del self._siblings[sequence.id]
        self.pool.give_back(sequence.table)
        sequence.table = []

    def forget(self, sequence: ScheduledSequence) -> None:
        """Let nothing be found that `sequence` was to compute: it has not."""
        for block in sequence.table[sequence.num_cached // self.block_size :]:
            self.pool.forget(block)
        self._borders = [border for border in self._borders if border.sequence is not sequence]

    def check(self, sequences: Iterable[ScheduledSequence]) -> None:
        """Make sure that no block is lost, and each is held by whom it should be.

        sequences: all that hold blocks.

        Raises:
            InvariantError: that is not so.
        """
        self.pool.check(sequence.table for sequence in sequences)

    # -- names -----------------------------------------------------------------------------------

    def _match_prefix(self, sequence: ScheduledSequence) -> Match:
        size, pool = self.block_size, self.pool
        prefix = sequence.prefix
        if prefix is None:
            prefix = sequence.prefix = Prefix(num_lost=pool.num_lost)
        pool.cut(prefix)
        num_whole = max((sequence.num_tokens - 1) // size, 0)
        known = len(prefix.blocks) * size
        contents = self._contents(sequence, known, num_whole * size, size)
        pool.follow(prefix, _root(sequence), contents)
        blocks = prefix.blocks
        node = prefix.nodes[-1] if blocks else _root(sequence)
        first = len(blocks) * size
        last = min(first + size, sequence.num_tokens) - 1
        for end, _ in reversed(_borders(sequence, first, last)):
            source = pool.found.get((node, self._part(sequence, first, end)))
            if source is not None:
                return Match(blocks, end, source, len(blocks), node)
        return Match(blocks, first, -1, len(blocks), node)

    def _name(self, sequence: ScheduledSequence, num_blocks: int) -> None:
        """Let the first `num_blocks` blocks of `sequence` be found by what they hold."""
        size, first = self.block_size, sequence.num_named
        if sequence.role != "sample":  # of the others, only the prompt is told
            num_blocks = min(num_blocks, sequence.num_prompt_tokens // size)
        if first >= num_blocks:
            return
        contents = self._contents(sequence, first * size, num_blocks * size, size)
        blocks, sequence.num_named = sequence.table[first:num_blocks], num_blocks
        if not any(rank for _, rank in sequence.ranks):
            sequence.node = self.pool.name(blocks, sequence.node, contents)
            return
        every, place = iter(contents), 0
        for rank, alike in groupby(_ranks(sequence, first, num_blocks, size)):
            some = blocks[place : (place := place + len([*alike]))]
            known = [*islice(every, len(some))]
            sequence.node = self.pool.name(some, sequence.node, known, rank)

    def _part(self, sequence: ScheduledSequence, start: int, end: int) -> Hashable:
        """Return what stands for the tokens start..end, the beginning of a block."""
        return ("part", *self._contents(sequence, start, end, self.block_size))

    def _has_shared_end(self, sequence: ScheduledSequence) -> bool:
        return bool(sequence.table) and self.pool.is_shared(sequence.table[-1])

    def _copy_last(self, sequence: ScheduledSequence) -> None:
        """Replace the last block of `sequence` by a copy of it."""
        shared = sequence.table.pop()
        (own,) = self.pool.take(1)
        self.pool.give_back([shared])
        sequence.table.append(own)
        self._copies.append((shared, own))


def _root(sequence: ScheduledSequence) -> Node:
    """Return the node from which the chain of `sequence` starts: one for each salt."""
    return ROOT if sequence.cache_salt is None else sequence.cache_salt


def _borders(sequence: ScheduledSequence, start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """Return the ends of segments, with their ranks, that are after `start` and up to `stop`."""
    ranks = sequence.ranks
    if not ranks:
        return ()
    first = bisect_right(ranks, start, key=_end_of)
    return ranks[first : bisect_right(ranks, stop, first, key=_end_of)]


def _ranks(sequence: ScheduledSequence, first: int, stop: int, size: int) -> list[int]:
    """Return the ranks of the blocks first..stop: the highest of segments that reach into each."""
    highest = [0] * (stop - first)
    place = bisect_right(sequence.ranks, first * size, key=_end_of)
    begin = sequence.ranks[place - 1][0] if place else 0
    for end, rank in sequence.ranks[place:]:
        if begin >= stop * size:
            break
        if rank:
            for block in range(max(begin // size, first), min(-(-end // size), stop)):
                highest[block - first] = max(highest[block - first], rank)
        begin = end
    return highest
