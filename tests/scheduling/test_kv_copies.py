"""Blocks that are shared and copied: by forks, by samples of one request, and what went wrong."""

import pytest
from cached_tokens import SIZE, Cache
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batcher.errors import InvariantError


@pytest.mark.parametrize("num_computed_tokens", [1, 3, 4, 5, 8])
def test_a_fork_shares_full_blocks_and_has_a_last_one_of_its_own(num_computed_tokens):
    cache = Cache()
    parent = cache.sequence("p", range(num_computed_tokens), role="beam")
    child = cache.sequence("c", range(50, 50 + num_computed_tokens), role="beam")
    cache.begin(parent)
    cache.begin(child)
    own = child.block_table[num_computed_tokens // SIZE :]
    cache.fork(parent, child, num_computed_tokens)
    num_full = num_computed_tokens // SIZE
    assert child.block_table[:num_full] == parent.block_table[:num_full]
    assert child.block_table[num_full:] == own
    copies = [(parent.block_table[num_full], own[0])] if num_computed_tokens % SIZE else []
    assert cache.take_copies() == copies
    cache.check_all()


def test_a_fork_without_a_block_of_its_own_shares_the_last_one_until_it_writes():
    cache = Cache()
    parent = cache.sequence("p", range(6), role="beam")
    child = cache.sequence("c", (), role="beam")
    cache.begin(parent)
    cache.sequences.append(child)
    cache.fork(parent, child, 6)
    assert child.block_table == parent.block_table
    assert cache.take_copies() == []
    assert [cache.num_blocks_to_grow(row, 7) for row in (parent, child)] == [1, 1]
    cache.copy_shared_end(child)
    assert cache.take_copies() == [(parent.block_table[1], child.block_table[1])]
    assert child.block_table[1] != parent.block_table[1]
    assert [cache.num_blocks_to_grow(row, 7) for row in (parent, child)] == [0, 0]
    cache.copy_shared_end(parent)
    assert cache.take_copies() == []
    cache.check_all()


@pytest.mark.parametrize(("length", "num_found"), [(3, 2), (4, 3), (8, 7), (9, 8), (1, 0)])
def test_a_sample_starts_from_what_its_sibling_has_computed(length, num_found):
    cache = Cache(prefix_cache=False)
    cache.begin(first := cache.sequence("a", range(length)))
    second = cache.sequence("a", range(length), index=1)
    assert cache.match(second).num_tokens == 0, "not before the step is over"
    cache.note_sibling(first)
    for other in (
        cache.sequence("b", range(length)),
        cache.sequence("a", range(length), role="negative"),
    ):
        assert cache.match(other).num_tokens == 0, "it is no sibling"
    cache.begin(second)
    assert second.num_cached_tokens == num_found
    whole = num_found // SIZE
    assert second.block_table[:whole] == first.block_table[:whole]
    assert second.block_table[whole:] != first.block_table[whole:]
    copies = [(first.block_table[whole], second.block_table[whole])] if num_found % SIZE else []
    assert cache.take_copies() == copies
    cache.check_all()
    cache.leave(first)
    cache.check_all()
    assert cache.match(cache.sequence("a", range(length), index=2)).num_tokens == 0


def test_a_sample_that_was_preempted_starts_from_the_whole_prompt_of_its_sibling():
    cache = Cache(prefix_cache=False)
    cache.begin(first := cache.sequence("a", range(6)))
    cache.note_sibling(first)
    second = cache.sequence("a", range(6), index=1)
    second.num_tokens = 9  # it has generated three
    cache.tokens["a"] += [7, 8, 9]
    cache.begin(second)
    assert second.num_cached_tokens == 6
    cache.check_all()


# -- what went wrong -------------------------------------------------------------------------------


def test_what_was_not_computed_after_all_is_not_found():
    cache = Cache()
    cache.begin(cache.sequence("a", range(4)))
    cache.begin(other := cache.sequence("b", range(12), segment_ends=((6, 0), (12, 0))))
    cache.forget(other)
    cache.end_step()
    other.num_computed_tokens = 0
    cache.leave(other)
    assert cache.match(cache.sequence("c", range(13))).num_tokens == 4, "what was there before is"
    assert cache.match(cache.sequence("c", range(7), segment_ends=((6, 0), (7, 0)))).num_tokens == 4
    cache.check_all()


def test_sequences_that_are_not_told_of_are_found_out():
    cache = Cache()
    cache.begin(cache.sequence("a", range(9)))
    with pytest.raises(InvariantError):
        cache.check([])


# -- all of it -------------------------------------------------------------------------------------

PROMPTS = st.builds(
    lambda shared, own: [*range(shared), *own],
    st.integers(0, 14),
    st.lists(st.integers(50, 51), max_size=4),
)


class Cells:
    """What each cell of each block holds: the prefix of the row that computed it, up to there."""

    def __init__(self, cache):
        self.cache = cache
        self.cells = {}

    def compute(self, planned):
        """Copy blocks, then write what was planned: rows, each from a position on."""
        for source, target in self.cache.take_copies():
            for place in range(SIZE):
                self.cells[target, place] = self.cells.get((source, place), ())
        for sequence, start in planned:
            for place in range(start, sequence.num_computed_tokens):
                cell = (sequence.block_table[place // SIZE], place % SIZE)
                self.cells[cell] = tuple(self.cache.tokens[sequence.id][: place + 1])
        self.cache.end_step()

    def check(self):
        """Read all that is computed of those that run."""
        for sequence in self.cache.sequences:
            for place in range(sequence.num_computed_tokens):
                held = self.cells[sequence.block_table[place // SIZE], place % SIZE]
                assert held == tuple(self.cache.tokens[sequence.id][: place + 1])
        self.cache.check_all()


@given(st.data())
@examples(150)
def test_what_is_read_is_always_what_was_written(data):
    cache = Cache(data.draw(st.integers(6, 14)))
    cells = Cells(cache)
    for number in range(data.draw(st.integers(1, 25))):
        planned = []
        for sequence in cache.sequences:
            more = data.draw(st.integers(0, sequence.num_tokens - sequence.num_computed_tokens))
            stop = sequence.num_computed_tokens + more
            if cache.has_room(cache.num_blocks_to_grow(sequence, stop)):
                planned.append((sequence, sequence.num_computed_tokens))
                cache.go_on(sequence, stop)
        tokens = data.draw(PROMPTS)
        ends = sorted(data.draw(st.sets(st.integers(1, max(len(tokens), 1)), max_size=3)))
        ranks = tuple((end, end % 4) for end in ends) if tokens else ()
        sequence = cache.sequence(f"s{number}", tokens, segment_ends=ranks)
        match = cache.match(sequence)
        least = min(match.num_tokens + 1, len(tokens))
        match.stop = data.draw(st.integers(least, len(tokens)))
        if cache.has_room(cache.num_needed({sequence: match}, is_alone=True)):
            cache.begin(sequence, match.stop)
            planned.append((sequence, sequence.num_cached_tokens))
        cells.compute(planned)
        cells.check()
        for sequence in [row for row in cache.sequences if data.draw(st.booleans())]:
            cache.leave(sequence)
        cache.check_all()
