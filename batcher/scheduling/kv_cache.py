"""The KV cache of sequences: block tables that grow, are shared and are copied before a write.

Full blocks can be found again by their tokens, as a chain from the first on (vLLM's prefix cache,
with the tokens themselves for a hash); where a segment of a prompt ends inside a block, that much
of it can be found, too, and is copied.

Rule: ask first, then act: nothing here takes a block that `has_room` has not promised.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from itertools import chain, groupby, islice
from typing import Generic, NamedTuple

from batcher.events import SequenceName
from batcher.scheduling.blocks import (
    NO_BLOCK,
    NO_MATCH,
    ROOT,
    BlockHash,
    BlockPool,
    CachedPrefix,
    PrefixMatch,
    ends_between,
    eviction_priorities,
)
from batcher.scheduling.sequence import S
from batcher.settings import SchedulingSettings

MAX_GROWN_BLOCKS = 2**21
MAX_GROWN_TOKENS = 2**25
MAX_GROWN_BYTES = 2**30

Contents = Callable[[S, int, int, int], Iterator[Hashable]]
"""Return what stands for the tokens start..stop of a sequence, prompt and output in one, for every
`size` of them on end: contents(sequence, start, stop, size).  It is made as it is asked for."""


class _Boundary(NamedTuple, Generic[S]):
    """The end of a segment inside a block; parent: the hash of the block before that."""

    sequence: S
    end: int
    priority: int
    parent: BlockHash


class KVCache(Generic[S]):
    """Block tables of sequences over one pool.

    num_spare: how many blocks have to be left for those that run when somebody else comes.
    block_bytes: what a block takes, if that is known.
    max_blocks: how many blocks there can be, None for as many as are asked for.  Then up to 2^21
    blocks, 2^25 tokens and 2^30 bytes, or twice as many, are kept for the sake of what can be found
    again.
    sure_tokens: a sequence of so many may hold all of them, whatever its table is like.
    num_groups: how many tables a sequence has, all of one length; has_windows: whether blocks are
    freed while their sequence runs; see GroupedKVCache.
    """

    num_groups = 1
    has_windows = False

    def __init__(
        self, settings: SchedulingSettings, contents: Contents[S], block_bytes: int | None = None
    ) -> None:
        self.block_size, self.max_blocks = settings.block_size, settings.kv_blocks
        max_grown = min(MAX_GROWN_BLOCKS, MAX_GROWN_TOKENS // self.block_size)
        if block_bytes is not None:
            max_grown = min(max_grown, MAX_GROWN_BYTES // block_bytes)
        self.pool = BlockPool(self.max_blocks, max_grown)
        self.has_room = self.pool.has_room
        self._copies: list[tuple[int, int]] = []
        self._capacity = settings.capacity
        self.sure_tokens = (self.max_blocks or 0) // self.num_groups * self.block_size
        self.num_spare = int(settings.watermark * (self.max_blocks or 0))
        self._has_prefix_cache = settings.has_prefix_cache
        self._contents = contents
        self._boundaries: list[_Boundary[S]] = []  # computed in this step
        self._siblings: dict[str, S] = {}
        self._num_noted = 0  # siblings

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- what is there ---------------------------------------------------------------------------

    def match(self, sequence: S) -> PrefixMatch:
        """Return what of `sequence` stands in blocks: at least one token of it is left to compute.

        Looking does not change what is evicted next.
        """
        found = self._match_prefix(sequence) if self._has_prefix_cache else NO_MATCH
        if not self._siblings or sequence.role != "sample":
            return found
        sibling = self._siblings.get(sequence.id)
        num_tokens = min(sequence.num_prompt_tokens, sequence.num_tokens - 1)
        if sibling is None or num_tokens <= found.num_tokens:
            return found
        blocks = sibling.block_table[: self.num_blocks(num_tokens)]
        return PrefixMatch(blocks, num_tokens, parent=root_of(sequence), sibling=sibling.name)

    def outlook(self, sequence: S) -> tuple[int, ...]:
        """Return what changes whenever `match` would find something else than it did, or elsewhere.

        Where it has two numbers, these are how many tokens were found, and how many of their blocks
        can be evicted.
        """
        pool, prefix = self.pool, sequence.prefix
        if not (sequence.others or sequence.has_siblings):
            if prefix is None:
                return 0, 0
            parent = prefix.hashes[-1] if prefix.hashes else root_of(sequence)
            if pool.is_whole(prefix) and (
                prefix.missed is None or pool.find(parent, prefix.missed) == NO_BLOCK
            ):
                num_tokens, source = self._source(sequence, parent, len(prefix.blocks))
                return num_tokens, pool.num_idle(prefix.blocks) + (source != NO_BLOCK)
        return pool.num_cached, pool.num_lost, self._num_noted

    def num_blocks_to_take(self, match: PrefixMatch, num_tokens: int) -> int:
        """Return how many free blocks it takes to hold `num_tokens`, with what was found."""
        blocks, num_all = match.blocks, -(-num_tokens // self.block_size)
        if not blocks:
            return num_all
        # The last of them is written to, so it is copied.
        num_copied = match.num_tokens % self.block_size > 0 and match.source == NO_BLOCK
        return num_all - len(blocks) + num_copied + self.pool.num_idle(blocks)

    def num_blocks_to_grow(self, sequence: S, num_tokens: int) -> int:
        """Return how many free blocks it takes to let a running sequence hold `num_tokens`."""
        num_new = self.num_blocks(num_tokens) - len(sequence.block_table)
        if num_new <= 0:
            return int(self._has_shared_end(sequence.block_table))  # written to, so it is copied
        return num_new

    def most_blocks(self, num_tokens: int) -> int:
        """Return how many blocks a sequence holds at most until it has computed `num_tokens`."""
        return self.num_blocks(num_tokens)

    def held_blocks(self, sequence: S) -> list[int]:
        return sequence.block_table

    # -- a sequence comes, grows and goes --------------------------------------------------------

    def admit(self, sequence: S, stop: int, max_tokens: int, *, is_alone: bool) -> int:
        """Give a sequence without others what is found of it, and blocks to compute more.

        It is to compute its tokens up to `stop`, but `max_tokens` of them at most; these can be
        found from now on, see `compute`.
        Returns 0 then; if there is no room, how many blocks have to be free: it is given nothing.

        is_alone: whether nobody else runs.
        """
        match, capacity = self.match(sequence), self._capacity
        sequence.num_computed_tokens = start = match.num_tokens
        if stop > start + max_tokens or stop < start:
            stop = max(min(stop, start + max_tokens), start)
        num_held = stop
        if capacity == "no-evict":
            num_held = sequence.most_tokens
        elif stop == start:  # its last token, if any, may be computed in this very step
            num_held = sequence.num_tokens
        if capacity == "watermark":
            num_needed = self.num_blocks_to_take(match, sequence.num_tokens)
            num_needed += 0 if is_alone else self.num_spare
        else:
            num_needed = self.num_blocks_to_take(match, num_held)
        if not self.has_room(num_needed):
            return num_needed
        self.attach(sequence, match)
        if start:
            self.fill(sequence, match, num_held)
        else:
            self.extend(sequence, num_held)
        sequence.num_computed_tokens = stop
        self.compute(sequence, start, stop, match)
        return 0

    def attach(self, sequence: S, match: PrefixMatch) -> None:
        """Give `sequence` what was found for it, which nobody can take from it any more."""
        num_tokens, blocks = match.num_tokens, match.blocks.copy()
        if blocks:
            self.pool.share(blocks)
        sequence.block_table = blocks
        sequence.prefix = sequence.run = None
        sequence.num_cached_tokens = sequence.num_computed_tokens = num_tokens
        sequence.num_cached_blocks, sequence.parent = match.num_cached_blocks, match.parent
        sequence.cached_from = self._filler_of(match) if num_tokens else None

    def _filler_of(self, match: PrefixMatch) -> SequenceName | None:
        if match.source != NO_BLOCK:
            return self.pool.filler_of(match.source)
        if match.num_cached_blocks:
            return self.pool.filler_of(match.blocks[-1])
        return match.sibling

    def fill(self, sequence: S, match: PrefixMatch, num_tokens: int) -> None:
        """Give a sequence to which `match` is attached new blocks up to `num_tokens`."""
        if match.source == NO_BLOCK and match.num_tokens % self.block_size:
            self._copy_last(sequence.block_table)
        self.extend(sequence, num_tokens)
        if match.source != NO_BLOCK:
            self._copies.append((match.source, sequence.block_table[len(match.blocks)]))

    def slide(self, sequence: S, position: int) -> None:
        """Free what no token reads from `position` on: here all are read."""

    def extend(self, sequence: S, num_tokens: int) -> None:
        num_new = -(-num_tokens // self.block_size) - len(sequence.block_table)
        if num_new > 0:
            sequence.block_table += self.pool.take(num_new)

    def extend_for_drafts(self, sequence: S, num_tokens: int, num_wanted: int) -> int:
        """Let a decoding row hold drafts behind so many tokens, until it is truncated.

        Returns how many of those wanted there is room for: nobody gives way to a draft.
        """
        size, num_held = self.block_size, len(sequence.block_table)
        num_new = -(-(num_tokens + num_wanted) // size) - num_held
        if num_new <= 0:
            return num_wanted
        while num_new and not self.has_room(num_new * self.num_groups + self.num_spare):
            num_new -= 1
        num_drafts = min(num_wanted, (num_held + num_new) * size - num_tokens)
        self.extend(sequence, num_tokens + num_drafts)
        return num_drafts

    def truncate(self, num_tokens: Mapping[S, int]) -> dict[S, int]:
        """Take from rows the blocks behind so many tokens of each.

        Returns how many each gives back, of those that do: none of what is promised to it.
        """
        num_behind: dict[S, int] = {}
        size, is_promised = self.block_size, self._capacity == "no-evict"
        for row, num in num_tokens.items():
            num_kept = -(-(max(num, row.most_tokens) if is_promised else num) // size)
            if len(row.block_table) > num_kept:
                blocks = self._cut(row, num_kept)
                num_behind[row] = len(blocks)
                self.pool.give_back(blocks)
        return num_behind

    def _cut(self, sequence: S, num_kept: int) -> list[int]:
        blocks = sequence.block_table[num_kept:]
        del sequence.block_table[num_kept:]
        return blocks

    def compute(self, sequence: S, start: int, stop: int, match: PrefixMatch = NO_MATCH) -> None:
        """Let the tokens start..stop, which the step computes, be found from now on.

        A later sequence of the same step may start from whole blocks; from a part of one it may
        only in the next step, since blocks are copied before anything is computed.

        match: what was found of it, if these are the first that are computed.
        """
        if not self._has_prefix_cache:
            return
        size = self.block_size
        if sequence.segment_ends:
            for end, priority in ends_between(sequence.segment_ends, start, stop):
                if end % size:
                    self._cache(sequence, end // size, match)
                    match = NO_MATCH
                    self._boundaries.append(_Boundary(sequence, end, priority, sequence.parent))
        self._cache(sequence, stop // size, match)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the (source, target) blocks to copy, in order, before a step computes anything."""
        copies, self._copies = self._copies, []
        return copies

    def end_step(self) -> None:
        """Let what the step has computed be found where segments end inside blocks."""
        if not self._boundaries:
            return
        size = self.block_size
        for sequence, end, priority, parent in self._boundaries:
            place = end // size
            part = self._part(sequence, place * size, end)
            blocks, name = [sequence.block_table[place]], sequence.name
            self.pool.cache(blocks, parent, iter([part]), priority, filler=name)
            sequence.run = None
        self._boundaries.clear()

    def grow_all(self, rows: list[S]) -> None:
        """Give rows that decode, each by itself, the block that they begin in this step."""
        if self._capacity == "no-evict":
            return  # they have it already
        for row, block in zip(rows, self.pool.take(len(rows))):  # noqa: B905 - as many
            row.block_table.append(block)

    def grow_in_turn(self, growing: Iterable[Collection[S]], num_blocks: int) -> None:  # noqa: ARG002 - others only count
        """Give rows that decode the block that each begins, in so many steps in which all go on.

        growing: the rows of each of these steps.  num_blocks: how many they are in all.
        """
        self.grow_all([*chain.from_iterable(growing)])

    def fork(self, parent: S, child: S, num_computed_tokens: int) -> None:
        """Let `child` hold what `parent` does, of which so many tokens are computed.

        Full blocks are shared.  The last one is copied to the one that `child` has there, or shared
        as well, if it has none of its own.
        """
        child.block_table = self._forked(parent.block_table, child.block_table, num_computed_tokens)
        child.num_cached_blocks, child.parent, child.run = (
            parent.num_cached_blocks,
            parent.parent,
            None,
        )

    def _forked(self, table: list[int], own: list[int], num_computed_tokens: int) -> list[int]:
        """Return what becomes of `own`, the table of a child, with that of its parent."""
        pool, num_full = self.pool, num_computed_tokens // self.block_size
        shared, kept = table[:num_full], own[num_full:]
        if num_computed_tokens % self.block_size:
            end = table[num_full]
            if kept and not pool.is_shared(kept[0]):
                self._copies.append((end, kept[0]))
            else:
                shared.append(end)
                kept = kept[1:]
        pool.share(held(shared))
        pool.give_back(held(own[: len(own) - len(kept)]))
        return shared + kept

    def num_blocks_to_promise(self, first: S) -> int:
        if self._capacity != "no-evict":
            return 0
        num_own = self.num_blocks(first.most_tokens) - first.num_prompt_tokens // self.block_size
        return num_own * self.num_groups * len(first.beams_to_fork)

    def promise(self, first: S) -> None:
        """Give the beams that `first` is going to fork all they may ever need, where that is held.

        They share the blocks that the prompt fills with `first`.
        """
        if self._capacity != "no-evict":
            return
        num_shared = first.num_prompt_tokens // self.block_size * self.block_size
        for beam in first.beams_to_fork:
            self.fork(first, beam, num_shared)
            self.extend(beam, beam.most_tokens)

    def copy_shared_end(self, sequence: S) -> None:
        if self._has_shared_end(sequence.block_table):
            self._copy_last(sequence.block_table)

    def note_sibling(self, sequence: S) -> None:
        """Take note that other samples of its request may start from what it has computed."""
        self._siblings.setdefault(sequence.id, sequence)
        self._num_noted += 1

    def close(self, sequence: S, num_computed_tokens: int) -> None:
        """Take its blocks from `sequence`; what `num_computed_tokens` tokens fill can be found.

        So what a sequence generates is found once it has left, and its prompt from the outset.
        """
        if self._has_prefix_cache:
            self._cache(sequence, num_computed_tokens // self.block_size)
        if self._siblings and self._siblings.get(sequence.id) is sequence:
            del self._siblings[sequence.id]
        self.pool.give_back(sequence.block_table)
        sequence.block_table, sequence.run = [], None

    def forget(self, sequence: S) -> None:
        """Let nothing be found that `sequence` was to compute: it has not."""
        for block in sequence.block_table[sequence.num_cached_tokens // self.block_size :]:
            self.pool.forget(block)
        self._boundaries = [end for end in self._boundaries if end.sequence is not sequence]

    def check(self, sequences: Iterable[S]) -> None:
        """Make sure that no block is lost, and each is held by whom it should be.

        sequences: all that hold blocks.
        """
        self.pool.check(map(self.held_blocks, sequences))

    # -- by content ------------------------------------------------------------------------------

    def _match_prefix(self, sequence: S) -> PrefixMatch:
        size, pool, num_tokens = self.block_size, self.pool, sequence.num_tokens
        parent, prefix, start = root_of(sequence), sequence.prefix, 0
        if sequence.skips_prefix_cache:
            return PrefixMatch([], 0, parent=parent)
        if prefix is None:
            prefix = sequence.prefix = CachedPrefix(num_lost=pool.num_lost)
        else:
            pool.cut(prefix)
            start = len(prefix.blocks) * size
        contents = self._contents(sequence, start, num_tokens - num_tokens % size, size)
        num_more = (num_tokens - 1 - start) // size
        if num_more > 0:
            pool.follow(prefix, parent, islice(contents, num_more))
        blocks, source = prefix.blocks, NO_BLOCK
        if blocks:
            start, parent = len(blocks) * size, prefix.hashes[-1]
        if sequence.segment_ends:
            start, source = self._source(sequence, parent, len(blocks))
        return PrefixMatch(blocks, start, source, len(blocks), parent, prefix.missed, contents)

    def _source(self, sequence: S, parent: BlockHash, num_blocks: int) -> tuple[int, int]:
        """Return how many tokens are found with so many blocks, and who has those behind these."""
        first = num_blocks * self.block_size
        last = min(first + self.block_size, sequence.num_tokens) - 1
        for end, _ in reversed(ends_between(sequence.segment_ends, first, last)):
            source = self.pool.find(parent, self._part(sequence, first, end))
            if source != NO_BLOCK:
                return end, source
        return first, NO_BLOCK

    def _cache(self, sequence: S, num_blocks: int, match: PrefixMatch = NO_MATCH) -> None:
        """Let the first `num_blocks` blocks of `sequence` be found by their content.

        match: what was found of it, if none of its own can be found yet.
        """
        size, first, run = self.block_size, sequence.num_cached_blocks, sequence.run
        if sequence.role != "sample":  # of the others, only the prompt is told
            num_blocks = min(num_blocks, sequence.num_prompt_tokens // size)
        if first >= num_blocks:
            return
        sequence.num_cached_blocks, blocks = num_blocks, sequence.block_table[first:num_blocks]
        if run is not None and run.is_open and len(run.blocks) + len(blocks) <= run.size_limit:
            sequence.parent = self.pool.extend(run, blocks)
            num_missing = len(run.blocks) - run.num_contents
            if num_missing > 0:
                start = (num_blocks - num_missing) * size
                run.contents.append(self._contents(sequence, start, num_blocks * size, size))
                run.num_contents += num_missing
            return
        num_known, segment_ends = sequence.num_tokens // size, sequence.segment_ends
        missed, contents = match.missed, match.contents
        if contents is None:
            num_known = max(num_blocks, sequence.num_prompt_tokens // size)
            contents = self._contents(sequence, first * size, num_known * size, size)
        if segment_ends and any(priority for _, priority in segment_ends):
            unread = contents if missed is None else chain((missed,), contents)
            self._cache_by_priority(sequence, blocks, unread)
            return
        most = (sequence.num_prompt_tokens + sequence.max_tokens) // size
        room = num_known - first, most - first
        name = SequenceName(sequence.id, sequence.index, sequence.role)
        sequence.parent, sequence.run = self.pool.cache(
            blocks, sequence.parent, contents, 0, room, missed, name
        )

    def _cache_by_priority(
        self, sequence: S, blocks: list[int], contents: Iterator[Hashable]
    ) -> None:
        """Let the last `blocks` of those that can be found be kept as long as they are worth it."""
        place, stop = 0, sequence.num_cached_blocks
        for priority, alike in groupby(
            eviction_priorities(sequence.segment_ends, stop - len(blocks), stop, self.block_size)
        ):
            some = blocks[place : (place := place + len([*alike]))]
            known = iter([*islice(contents, len(some))])
            sequence.parent, _ = self.pool.cache(
                some, sequence.parent, known, priority, filler=sequence.name
            )

    def _part(self, sequence: S, start: int, end: int) -> Hashable:
        """Return what stands for the tokens start..end, the beginning of a block."""
        return ("part", *self._contents(sequence, start, end, self.block_size))

    def _has_shared_end(self, table: list[int]) -> bool:
        return bool(table) and self.pool.is_shared(table[-1])

    def _copy_last(self, table: list[int]) -> None:
        shared = table.pop()
        (own,) = self.pool.take(1)
        self.pool.give_back([shared])
        table.append(own)
        self._copies.append((shared, own))


def held(table: list[int]) -> list[int]:
    """Return the blocks of a table, or of a part of one, that have not been freed."""
    return table if NO_BLOCK not in table else [block for block in table if block != NO_BLOCK]


def root_of(sequence: S) -> BlockHash:
    """Return the parent of the first block of `sequence`: one for each salt."""
    return ROOT if sequence.cache_salt is None else sequence.cache_salt
