"""The KV cache: block tables that grow, are shared, and are copied before a write.

Full blocks are found by their tokens, as a chain from the first block (vLLM's prefix cache, with
the tokens themselves as the hash).  Where a segment of a prompt ends inside a block, the part up to
there is found as well, and copied.

Layers with different attention windows have one block table per cache group, over one pool, all of
one length (vLLM's hybrid allocator).  A group with a window frees the blocks behind it and leaves
NO_BLOCK in the table.  A prefix is found by the blocks of the first group; the blocks of the other
groups are stored with its node.  A prefix counts as cached as far as every group has all that the
next token reads.  A recurrent state counts as a window: a block holds the state after its last
token, so every full block is a checkpoint.

Rule: check `has_room` before taking blocks; nothing here takes more than that.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Generic, NamedTuple, NoReturn

from batcher.errors import InvariantError
from batcher.events import SequenceName
from batcher.scheduling.blocks import (
    NO_BLOCK,
    ROOT,
    BlockPool,
    CountedPool,
    Node,
    PrefixMatch,
    ends_between,
    eviction_priorities,
    held,
)
from batcher.scheduling.sequence import S
from batcher.settings import ONE_GROUP, CacheWindows, SchedulingSettings

MAX_GROWN_BLOCKS = 2**21
MAX_GROWN_TOKENS = 2**25
MAX_GROWN_BYTES = 2**30

Contents = Callable[[S, int, int, int], Iterator[Hashable]]
"""Return what stands for the tokens start..stop of a sequence, prompt and output in one, for every
`size` of them: contents(sequence, start, stop, size).  Each is made when it is asked for."""


class GroupLimits(NamedTuple):
    """The limits of a cache group: layers that share a block table.

    window_blocks: blocks read before the current one; None: all.
    most_held: the largest number of blocks a sequence holds; None: one for each of its blocks.
    """

    window_blocks: int | None = None
    most_held: int | None = None


class _Boundary(NamedTuple, Generic[S]):
    """The end of a segment inside a block; node: of the previous block."""

    sequence: S
    end: int
    priority: int
    node: Node


class KVCache(Generic[S]):
    """The block tables of sequences over one pool.

    contents: of blocks; None if blocks are never shared or found, and are only counted.
    windows: of each cache group; prefixes are found by the first, preferably one without a window.
    block_bytes: the size of a block, if known.
    num_spare: blocks that `watermark` keeps free for running sequences at admission.
    max_blocks: the limit; None grows as needed.  Without a limit up to 2^21 blocks, 2^25 tokens and
    2^30 bytes, or twice as many, are kept for prefix hits.
    sure_tokens: a sequence up to this length fits alone, whatever its table is like.
    has_windows: whether blocks are freed while their sequence runs.
    """

    def __init__(
        self,
        settings: SchedulingSettings,
        contents: Contents[S] | None,
        windows: CacheWindows = ONE_GROUP,
        block_bytes: int | None = None,
    ) -> None:
        self.block_size, self.max_blocks = settings.block_size, settings.kv_blocks
        size, most = self.block_size, settings.max_batch_tokens
        max_grown = min(MAX_GROWN_BLOCKS, MAX_GROWN_TOKENS // size)
        if block_bytes is not None:
            max_grown = min(max_grown, MAX_GROWN_BYTES // block_bytes)
        self.pool = (CountedPool if contents is None else BlockPool)(self.max_blocks, max_grown)
        self.has_room = self.pool.has_room
        self.num_groups, self._is_grouped = len(windows), windows != ONE_GROUP
        self.has_windows = any(window is not None for window in windows)
        self._groups: list[GroupLimits] = []
        for window in windows:
            window_blocks = None if window is None else -(-(window - 1) // size)
            most_held = None
            if window_blocks is not None and most is not None and settings.capacity != "no-evict":
                most_held = window_blocks + -(-(most + size - 1) // size)
            self._groups.append(GroupLimits(window_blocks, most_held))
        self.sure_tokens = (self.max_blocks or 0) // self.num_groups * size
        self._capacity = settings.capacity
        self.num_spare = int(settings.watermark * (self.max_blocks or 0))
        self._has_prefix_cache = settings.has_prefix_cache
        self._contents: Contents[S] = contents or _no_contents
        self._copies: list[tuple[int, int]] = []
        self._boundaries: list[_Boundary[S]] = []  # computed in this step
        self._siblings: dict[str, S] = {}

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def held_blocks(self, sequence: S) -> list[int]:
        return held([*chain.from_iterable(tables_of(sequence))])

    # -- what is there, and how many blocks are needed ---------------------------------------------

    def match(self, sequence: S) -> PrefixMatch:
        """Return the cached prefix of `sequence`, leaving at least one token to compute.

        A lookup does not change the order of eviction.
        """
        pool, size, num_tokens = self.pool, self.block_size, sequence.num_tokens
        root: Node = ROOT if sequence.cache_salt is None else sequence.cache_salt
        match = PrefixMatch([], 0, num_tokens, root)
        if self._has_prefix_cache and not sequence.skips_prefix_cache:
            blocks, node, missed, known = match.blocks, root, None, sequence.prefix
            if known is not None:
                blocks += known.blocks[: pool.num_same(known)]
                if blocks:
                    node = pool.nodes[blocks[-1]]
                if len(blocks) == len(known.blocks):
                    missed = known.missed
            num_more = (num_tokens - 1) // size - len(blocks)
            if num_more > 0 and (missed is None or pool.find(node, missed) != NO_BLOCK):
                stop = num_tokens - num_tokens % size
                contents = self._contents(sequence, len(blocks) * size, stop, size)
                more, node, missed = pool.find_all(node, islice(contents, num_more))
                blocks += more
                if missed is not None:
                    contents = chain((missed,), contents)
                match.contents = contents
            match.num_tokens, match.node, match.missed = len(blocks) * size, node, missed
            if sequence.segment_ends and not self._is_grouped:
                self._match_part(sequence, match)
        if self._is_grouped:
            self._match_groups(match, root)
        elif self._siblings and sequence.role == "sample":
            sibling = self._siblings.get(sequence.id)
            num_shared = min(sequence.num_prompt_tokens, num_tokens - 1)
            if sibling is not None and num_shared > match.num_tokens:
                blocks = sibling.block_table[: self.num_blocks(num_shared)]
                return PrefixMatch(blocks, num_shared, num_tokens, root, sibling=sibling.name)
        return match

    def _match_part(self, sequence: S, match: PrefixMatch) -> None:
        """Extend a match to the last segment end inside the next block."""
        start = match.num_tokens
        last = min(start + self.block_size, sequence.num_tokens) - 1
        for end, _ in reversed(ends_between(sequence.segment_ends, start, last)):
            source = self.pool.find(match.node, self._part(sequence, start, end))
            if source != NO_BLOCK:
                match.num_tokens, match.source = end, source
                break

    def _match_groups(self, match: PrefixMatch, root: Node) -> None:
        """Shorten a match to where every group has all that the next token reads."""
        nodes, groups = self.pool.nodes_of(match.blocks), self._groups[1:]
        match.group_blocks = tables = tuple(
            [self.pool.find(node, group) for node in nodes] for group in range(1, self.num_groups)
        )
        ends = {*range(len(nodes) + 1)}
        for table, (window_blocks, _) in zip(tables, groups, strict=True):
            num_there = 0  # consecutive blocks
            for number, block in enumerate(table, 1):
                num_there = 0 if block == NO_BLOCK else num_there + 1
                if num_there < (number if window_blocks is None else min(number, window_blocks)):
                    ends.discard(number)
        num_blocks = max(ends)
        for table, (window_blocks, _) in zip(tables, groups, strict=True):
            del table[num_blocks:]
            if window_blocks is not None:
                num_passed = max(num_blocks - window_blocks, 0)
                table[:num_passed] = [NO_BLOCK] * num_passed
        if num_blocks < len(nodes):
            del match.blocks[num_blocks:]
            match.num_tokens = num_blocks * self.block_size
            match.node = nodes[num_blocks - 1] if num_blocks else root
            match.missed = match.contents = None

    def remember(self, matches: Mapping[S, PrefixMatch]) -> None:
        """Keep the matches of waiting sequences, to avoid another lookup."""
        for sequence, match in matches.items():
            match.contents = None  # they can be as large as the prompt
            match.nodes = self.pool.nodes_of(match.blocks)
            match.num_lost = self.pool.num_lost
            sequence.prefix = None if match.sibling is not None else match

    def num_found(self, sequence: S) -> int:
        match = self.match(sequence)
        self.remember({sequence: match})
        return match.num_tokens

    def matches_of(self, first: S) -> dict[S, PrefixMatch]:
        """Return the matches of a group's rows, which are admitted together."""
        if not first.others:
            return {first: self.match(first)}
        matches = {row: self.match(row) for row in first.computed_group}
        for row, match in matches.items():
            if row is not first and match.source != NO_BLOCK:
                # The first row may take the block that this row would copy.
                match.num_tokens, match.source = len(match.blocks) * self.block_size, NO_BLOCK
        return matches

    def num_needed(self, matches: Mapping[S, PrefixMatch], *, is_alone: bool) -> int:
        """Return the number of free blocks required to admit a group.

        is_alone: whether nothing else runs.
        """
        size, capacity, num_needed = self.block_size, self._capacity, 0
        if capacity == "watermark" and not is_alone:  # otherwise all would wait
            num_needed = self.num_spare
        for row, match in matches.items():
            num_tokens = row.num_tokens if capacity == "watermark" else match.stop
            if capacity == "no-evict" and row.others:  # each of its beams reserves as much
                num_own = self.num_blocks(num_tokens) - row.num_prompt_tokens // size
                num_needed += num_own * self.num_groups * len(row.beams_to_fork)
            num_new = -(-num_tokens // size) - len(match.blocks)
            if not (match.blocks or self._is_grouped):
                num_needed += num_new
                continue
            if match.num_tokens % size and match.source == NO_BLOCK:
                num_needed += 1  # a copy of the shared last block, which is written to
            tables = (match.blocks, *match.group_blocks)
            for table, (window_blocks, most) in zip(tables, self._groups, strict=True):
                num_read = len(table) if window_blocks is None else window_blocks
                kept = held(table[max(len(table) - num_read, 0) :])
                num_held = num_new + len(kept)
                if most is not None:
                    num_held = min(num_held, most)
                num_needed += num_held - len(kept) + self.pool.num_idle(kept)
        if len(matches) > 1:
            found = [block for match in matches.values() for block in match.found]
            num_needed -= self.pool.num_idle(found) - self.pool.num_idle({*found})  # each once
        return num_needed

    def num_blocks_to_grow(self, sequence: S, num_tokens: int) -> int:
        """Return the number of free blocks required for a running sequence to hold `num_tokens`."""
        num_new = self.num_blocks(num_tokens) - len(sequence.block_table)
        if num_new > 0:
            return num_new * self.num_groups
        return sum(map(self._has_shared_end, tables_of(sequence)))  # copied before a write

    def most_blocks(self, num_tokens: int) -> int:
        """Return the most blocks a sequence holds until it has computed `num_tokens`."""
        num_all = self.num_blocks(num_tokens)
        return sum([num_all if most is None else min(most, num_all) for _, most in self._groups])

    # -- a sequence comes, grows and goes --------------------------------------------------------

    def admit(self, matches: Mapping[S, PrefixMatch]) -> None:
        """Give a group's rows their matches, and new blocks for the rest of their tokens.

        Tokens that the step is to compute can be found from now on.
        """
        pool, size = self.pool, self.block_size
        for match in matches.values():
            if match.blocks:
                pool.share(match.found)  # share all matches before taking blocks
        for row, match in matches.items():
            blocks, num_tokens, source = match.blocks, match.num_tokens, match.source
            row.block_table, row.num_cached_tokens, row.cached_from = blocks, num_tokens, None
            row.parent, row.num_cached_blocks, row.prefix = match.node, 0, None
            if match.sibling is not None:
                row.cached_from = match.sibling
            elif num_tokens:
                row.num_cached_blocks = len(blocks)
                row.cached_from = pool.fillers[blocks[-1] if source == NO_BLOCK else source]
            if self._is_grouped:
                row.group_tables = match.group_blocks
                self.slide(row, num_tokens)
            if source == NO_BLOCK and num_tokens % size:
                self._copy_last(blocks)
            self.extend(row, match.stop)
            if source != NO_BLOCK:
                self._copies.append((source, blocks[row.num_cached_blocks]))
            if row.others and self._capacity == "no-evict":  # its beams reserve all their blocks
                num_shared = row.num_prompt_tokens // size * size
                for beam in row.beams_to_fork:
                    self.fork(row, beam, num_shared)
                    self.extend(beam, beam.most_tokens)
        if self._has_prefix_cache:
            for row, match in matches.items():
                if match.num_planned:
                    stop = match.num_tokens + match.num_planned
                    self.register_planned(row, match.num_tokens, stop, match.contents)

    def slide(self, sequence: S, position: int) -> None:
        """Free the blocks before the window of the token at `position`.

        A row may continue from the start of its block, which therefore stays readable.
        """
        num_full = position // self.block_size
        for table, (window_blocks, _) in zip(tables_of(sequence), self._groups, strict=True):
            if window_blocks is None:
                continue
            start = stop = max(num_full - window_blocks, 0)
            while start and table[start - 1] != NO_BLOCK:
                start -= 1
            if start == stop:
                continue
            if table is sequence.block_table and self._has_prefix_cache:
                self._register(sequence, stop)  # before the blocks are freed
            self.pool.give_back(table[start:stop])
            table[start:stop] = [NO_BLOCK] * (stop - start)

    def extend(self, sequence: S, num_tokens: int) -> None:
        num_new = -(-num_tokens // self.block_size) - len(sequence.block_table)
        if num_new > 0:
            sequence.block_table += self.pool.take(num_new)
            for table in sequence.group_tables:
                table.extend(self.pool.take(num_new))

    def grow_all(self, rows: Sequence[S]) -> None:
        """Give each decoding row the block that it begins in this step."""
        if self._capacity == "no-evict":
            return  # the table is shared already
        blocks = self.pool.take(len(rows) * self.num_groups)
        if not self._is_grouped:
            for row, block in zip(rows, blocks, strict=True):
                row.block_table.append(block)
            return
        tables = [table for row in rows for table in tables_of(row)]
        for table, block in zip(tables, blocks, strict=True):
            table.append(block)

    def extend_for_drafts(self, sequence: S, num_tokens: int, num_wanted: int) -> int:
        """Add blocks for the drafts of a decoding row, until `truncate`.

        Returns the number of drafts that fit; no sequence is preempted for drafts.
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
        """Free each row's blocks after so many tokens, except reserved ones.

        Returns the number of freed blocks by row, without zeros.
        """
        num_behind: dict[S, int] = {}
        is_promised = self._capacity == "no-evict"
        for row, num in num_tokens.items():
            num_kept = self.num_blocks(max(num, row.most_tokens) if is_promised else num)
            if len(row.block_table) > num_kept:
                blocks = []
                for table in tables_of(row):
                    blocks += table[num_kept:]
                    del table[num_kept:]
                num_behind[row] = len(blocks)
                self.pool.give_back(blocks)
        return num_behind

    def register_planned(
        self, sequence: S, start: int, stop: int, contents: Iterator[Hashable] | None = None
    ) -> None:
        """Register the tokens start..stop, which the step is to compute.

        `forget` undoes it if the model fails.

        A later sequence of the same step may start from whole blocks.  From a part of one it can
        start only in the next step, since blocks are copied before anything is computed.

        contents: of the blocks that are not registered yet, if known.
        """
        if not self._has_prefix_cache:
            return
        size = self.block_size
        if sequence.segment_ends and not self._is_grouped:
            for end, priority in ends_between(sequence.segment_ends, start, stop):
                if end % size:
                    self._register(sequence, end // size)
                    self._boundaries.append(_Boundary(sequence, end, priority, sequence.parent))
                    contents = None
        self._register(sequence, stop // size, contents)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the (source, target) copies that precede the step, in order."""
        copies, self._copies = self._copies, []
        return copies

    def end_step(self) -> None:
        """Register the computed segment ends inside blocks."""
        size = self.block_size
        for sequence, end, priority, node in self._boundaries:
            place = end // size
            part = self._part(sequence, place * size, end)
            name = SequenceName(sequence.id, sequence.index, sequence.role)
            block = sequence.block_table[place]
            self.pool.register([block], node, iter([part]), priority, name)
        self._boundaries.clear()

    def fork(self, parent: S, child: S, num_computed_tokens: int) -> None:
        """Share the blocks of `parent`, which has computed `num_tokens`, with `child`.

        The last block, if not full, is copied to the child's own one, or shared if it has none.
        """
        child.block_table = self._forked(parent.block_table, child.block_table, num_computed_tokens)
        child.num_cached_blocks, child.parent = parent.num_cached_blocks, parent.parent
        own = child.group_tables or ([],) * len(parent.group_tables)
        child.group_tables = tuple(
            self._forked(table, mine, num_computed_tokens)
            for table, mine in zip(parent.group_tables, own, strict=True)
        )

    def _forked(self, table: list[int], own: list[int], num_computed_tokens: int) -> list[int]:
        """Return the new table of a child from its `own` and its parent's."""
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

    def copy_shared_end(self, sequence: S) -> None:
        for table in tables_of(sequence):
            if self._has_shared_end(table):
                self._copy_last(table)

    def note_sibling(self, sequence: S) -> None:
        """Let other samples of its request start from what it has computed.

        With cache groups, they find everything by its tokens instead.
        """
        if not self._is_grouped:
            self._siblings.setdefault(sequence.id, sequence)

    def close(self, sequence: S, num_computed_tokens: int) -> None:
        """Free the blocks of `sequence`; those filled by its computed tokens stay registered.

        So its prompt can be found from the start, and its output once it has left.
        """
        if self._has_prefix_cache:
            self._register(sequence, num_computed_tokens // self.block_size)
        if self._siblings and self._siblings.get(sequence.id) is sequence:
            del self._siblings[sequence.id]
        for table in tables_of(sequence):
            self.pool.give_back(held(table) if self.has_windows else table)
        sequence.block_table, sequence.group_tables = [], ()

    def forget(self, sequence: S) -> None:
        """Drop the registered blocks that `sequence` was to compute and has not."""
        first = sequence.num_cached_tokens // self.block_size
        for table in tables_of(sequence):
            for block in held(table[first:]):
                self.pool.lose(block)
        self._boundaries = [end for end in self._boundaries if end.sequence is not sequence]

    def check(self, sequences: Iterable[S]) -> None:
        """Check that no block is lost, and that each has the holders it should have.

        sequences: all that hold blocks.
        """
        self.pool.check(map(self.held_blocks, sequences))

    # -- by content ------------------------------------------------------------------------------

    def _register(
        self, sequence: S, num_blocks: int, contents: Iterator[Hashable] | None = None
    ) -> None:
        """Register the first `num_blocks` blocks of `sequence` by content.

        contents: of the blocks that are not registered yet, if known.
        """
        size, first, node = self.block_size, sequence.num_cached_blocks, sequence.parent
        if sequence.role != "sample":  # of beams and negative prompts only the prompt is cached
            num_blocks = min(num_blocks, sequence.num_prompt_tokens // size)
        if num_blocks <= first:
            return
        sequence.num_cached_blocks = num_blocks
        if contents is None:
            contents = self._contents(sequence, first * size, num_blocks * size, size)
        pool, table, ends = self.pool, sequence.block_table, sequence.segment_ends
        blocks, groups = table[first:num_blocks], sequence.group_tables
        name = SequenceName(sequence.id, sequence.index, sequence.role)
        if groups:
            known = [*islice(contents, num_blocks - first)]
            contents = iter(known)
        if ends and any(map(itemgetter(1), ends)):
            ranked = zip(blocks, eviction_priorities(ends, first, num_blocks, size), strict=True)
            for priority, alike in groupby(ranked, itemgetter(1)):
                some = [block for block, _ in alike]
                own = iter([*islice(contents, len(some))])
                sequence.parent = pool.register(some, sequence.parent, own, priority, name)
        else:
            before = table[first - 1] if first else NO_BLOCK
            sequence.parent = pool.register(blocks, node, contents, 0, name, before)
        if not groups:
            return
        for place, content in enumerate(known, first):
            neighbour = pool.find(node, content)
            node = pool.nodes[neighbour]
            for group, beside in enumerate(groups, 1):
                if beside[place] != NO_BLOCK:
                    pool.register_beside(beside[place], neighbour, group)

    def _part(self, sequence: S, start: int, end: int) -> Hashable:
        """Return the content of the tokens start..end, the beginning of a block."""
        return ("part", *self._contents(sequence, start, end, self.block_size))

    def _has_shared_end(self, table: list[int]) -> bool:
        return bool(table) and self.pool.is_shared(table[-1])

    def _copy_last(self, table: list[int]) -> None:
        shared = table.pop()
        (own,) = self.pool.take(1)
        self.pool.give_back([shared])
        table.append(own)
        self._copies.append((shared, own))


def tables_of(sequence: S) -> tuple[list[int], ...]:
    return (sequence.block_table, *sequence.group_tables)


def _no_contents(sequence: S, start: int, stop: int, size: int) -> NoReturn:  # noqa: ARG001
    raise InvariantError("nothing is to be found by its tokens")
