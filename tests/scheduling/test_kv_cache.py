"""Block tables: what is shared, what is copied, what is found again, and by whom."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.errors import InvariantError
from batcher.scheduling.kv_cache import KVCache, Match
from batcher.scheduling.sequence import ScheduledSequence
from batcher.settings import SchedulingSettings

SIZE = 4


class Cache(KVCache):
    """A cache that knows the tokens of its sequences, and lets steps be taken one by one."""

    def __init__(self, num_blocks: int | None = 20, *, prefix_cache: bool = True) -> None:
        fields = {"kv_blocks": num_blocks, "block_size": SIZE, "prefix_cache": prefix_cache}
        super().__init__(SchedulingSettings(**fields), self.contents)
        self.tokens: dict[str, list[int]] = {}
        self.sequences: list[ScheduledSequence] = []

    def contents(
        self, sequence: ScheduledSequence, start: int, stop: int, size: int
    ) -> list[tuple[int, ...]]:
        tokens = self.tokens[sequence.id]
        assert stop <= len(tokens)
        return [tuple(tokens[at : min(at + size, stop)]) for at in range(start, stop, size)]

    def sequence(self, name: str, tokens: Any, **fields: Any) -> ScheduledSequence:
        self.tokens[name] = list(tokens)
        num_tokens = len(self.tokens[name])
        return ScheduledSequence(
            id=name,
            num_prompt_tokens=num_tokens,
            num_tokens=num_tokens,
            max_tokens=9,
            table=[],
            **fields,
        )

    def admit(self, sequence: ScheduledSequence, stop: int | None = None) -> Match:
        """Let `sequence` compute up to `stop` tokens, all of them if not told, in one step."""
        match = self.match(sequence)
        stop = sequence.num_tokens if stop is None else stop
        num_needed = self.num_blocks_to_take(match, stop)
        num_free = self.pool.num_free
        assert self.has_room(num_needed)
        self.attach(sequence, match)
        self.fill(sequence, match, stop)
        assert self.pool.num_free == num_free - num_needed, "not what was asked for"
        self.go_on(sequence, stop)
        self.sequences.append(sequence)
        return match

    def go_on(self, sequence: ScheduledSequence, stop: int) -> None:
        self.extend(sequence, stop)
        self.compute(sequence, sequence.num_computed, stop)
        sequence.num_computed = stop

    def leave(self, sequence: ScheduledSequence) -> None:
        self.close(sequence, sequence.num_computed)
        self.sequences.remove(sequence)
        assert sequence.table == []

    def check_all(self) -> None:
        self.check(self.sequences)


def test_a_prefix_is_found_block_by_block_from_the_first_on() -> None:
    cache = Cache()
    cache.admit(first := cache.sequence("a", range(12)))
    for same in (0, 3, 4, 7, 8, 11, 12):
        other = cache.sequence("b", [*range(same), *range(50, 63 - same)])
        assert cache.match(other).num_tokens == same // SIZE * SIZE
        assert cache.match(other).blocks == first.table[: same // SIZE]
    middle = cache.sequence("b", [9, 9, 9, 9, *range(4, 12)])
    assert cache.match(middle).num_tokens == 0, "a chain begins at the first block"


@pytest.mark.parametrize(("length", "num_found"), [(4, 0), (5, 4), (8, 4), (9, 8), (0, 0), (1, 0)])
def test_at_least_one_token_is_left_to_compute(length: int, num_found: int) -> None:
    cache = Cache()
    cache.admit(cache.sequence("a", range(12)))
    assert cache.match(cache.sequence("b", range(length))).num_tokens == num_found


def test_sequences_share_blocks_with_those_of_their_salt() -> None:
    cache = Cache()
    cache.admit(cache.sequence("a", range(9), cache_salt="x"))
    assert cache.match(cache.sequence("b", range(9), cache_salt="x")).num_tokens == 8
    assert cache.match(cache.sequence("b", range(9), cache_salt="y")).num_tokens == 0
    assert cache.match(cache.sequence("b", range(9))).num_tokens == 0
    cache.admit(cache.sequence("c", range(9)))
    assert cache.match(cache.sequence("b", range(9))).num_tokens == 8


def test_whole_blocks_are_found_in_the_step_that_computes_them() -> None:
    cache = Cache()
    cache.admit(first := cache.sequence("a", range(11)), 7)
    cache.admit(second := cache.sequence("b", range(11)))
    assert second.num_cached == 4
    assert second.table[:1] == first.table[:1]
    assert set(second.table[1:]).isdisjoint(first.table)
    cache.check_all()


def test_without_a_prefix_cache_nothing_is_found() -> None:
    cache = Cache(prefix_cache=False)
    cache.admit(first := cache.sequence("a", range(9), ranks=((6, 1), (9, 0))))
    cache.end_step()
    cache.leave(first)
    assert cache.match(cache.sequence("b", range(9))).num_tokens == 0
    assert cache.pool.found == {}


def test_what_a_sequence_has_computed_is_found_after_it_has_left() -> None:
    cache = Cache()
    cache.admit(first := cache.sequence("a", range(4)))
    cache.tokens["a"] += range(4, 20)
    cache.grow(first, 5)
    cache.grow(first, 9)
    first.num_computed = 11
    cache.leave(first)
    assert cache.pool.num_used == 0
    assert cache.match(cache.sequence("b", range(15))).num_tokens == 8, "two blocks are full"


def test_the_output_of_a_beam_is_not_found_as_nobody_knows_it() -> None:
    cache = Cache()
    cache.admit(first := cache.sequence("a", range(5), role="beam"))
    cache.tokens["a"] += range(5, 20)
    cache.grow(first, 9)
    first.num_computed = 9
    cache.leave(first)
    assert cache.match(cache.sequence("b", range(15))).num_tokens == 4


def test_an_evicted_block_is_found_no_longer_but_those_before_it_are() -> None:
    cache = Cache(4)
    cache.admit(first := cache.sequence("a", range(16)))
    cache.leave(first)
    cache.admit(other := cache.sequence("c", range(90, 98)))
    cache.leave(other)
    assert cache.match(cache.sequence("b", range(17))).num_tokens == 8


def test_a_hit_refreshes() -> None:
    cache = Cache(2)
    for name, start in (("a", 0), ("b", 50)):
        cache.admit(sequence := cache.sequence(name, range(start, start + 4)))
        cache.leave(sequence)
    cache.admit(again := cache.sequence("c", range(5)), 4)
    cache.leave(again)
    cache.admit(cache.sequence("d", range(70, 74)))
    assert cache.match(cache.sequence("e", range(5))).num_tokens == 4
    assert cache.match(cache.sequence("e", range(50, 55))).num_tokens == 0


def test_looking_does_not_refresh() -> None:
    cache = Cache(2)
    for name, start in (("a", 0), ("b", 50)):
        cache.admit(sequence := cache.sequence(name, range(start, start + 4)))
        cache.leave(sequence)
    assert cache.match(cache.sequence("c", range(5))).num_tokens == 4
    cache.admit(cache.sequence("d", range(70, 74)))
    assert cache.match(cache.sequence("e", range(5))).num_tokens == 0


def test_what_is_found_cannot_be_taken_from_whom_it_was_found_for() -> None:
    cache = Cache(3)
    cache.admit(first := cache.sequence("a", range(8)))
    cache.leave(first)
    cache.admit(second := cache.sequence("b", range(9)))
    assert second.num_cached == 8
    assert cache.pool.num_free == 0
    assert len(set(second.table)) == 3
    cache.check_all()


# -- segments --------------------------------------------------------------------------------------


def test_a_segment_border_inside_a_block_is_found_from_the_next_step_on_by_copy() -> None:
    cache = Cache()
    cache.admit(first := cache.sequence("a", range(10), ranks=((6, 1), (10, 0))))
    other = cache.sequence("b", [*range(6), 90, 91, 92], ranks=((6, 1), (9, 0)))
    assert cache.match(other).num_tokens == 4, "not in the same step"
    cache.end_step()
    match = cache.match(other)
    assert (match.num_tokens, match.source) == (6, first.table[1])
    cache.admit(other)
    assert cache.take_copies() == [(first.table[1], other.table[1])]
    assert cache.take_copies() == []
    assert other.table[1] not in first.table
    cache.check_all()


def test_a_border_is_found_only_where_a_border_is_looked_for() -> None:
    cache = Cache()
    cache.admit(cache.sequence("a", range(10), ranks=((6, 1), (10, 0))))
    cache.end_step()
    assert cache.match(cache.sequence("b", range(10))).num_tokens == 8
    assert cache.match(cache.sequence("b", range(7), ranks=((5, 0), (7, 0)))).num_tokens == 4
    assert cache.match(cache.sequence("b", range(7), ranks=((6, 0), (7, 0)))).num_tokens == 6


def test_the_longest_of_several_borders_in_a_block_is_found() -> None:
    cache = Cache()
    ranks = ((1, 0), (2, 0), (3, 0), (9, 0))
    cache.admit(cache.sequence("a", range(9), ranks=ranks))
    cache.end_step()
    for same in (1, 2, 3):
        other = cache.sequence("b", [*range(same), *range(90, 99)], ranks=ranks)
        assert cache.match(other).num_tokens == same


def test_a_border_at_the_end_of_a_prompt_leaves_a_token_to_compute() -> None:
    cache = Cache()
    cache.admit(cache.sequence("a", range(6), ranks=((6, 0),)))
    cache.end_step()
    assert cache.match(cache.sequence("b", range(6), ranks=((6, 0),))).num_tokens == 4
    assert cache.match(cache.sequence("b", range(7), ranks=((6, 0), (7, 0)))).num_tokens == 6


def test_a_border_is_named_when_the_chunk_that_crosses_it_is_computed() -> None:
    cache = Cache()
    ranks = ((2, 0), (6, 0), (11, 0))
    cache.admit(first := cache.sequence("a", range(11), ranks=ranks), 5)
    cache.end_step()
    other = cache.sequence("b", [*range(6), 99], ranks=((6, 0), (7, 0)))
    assert cache.match(other).num_tokens == 4
    cache.go_on(first, 11)
    cache.end_step()
    assert cache.match(other).num_tokens == 6


def test_a_border_is_found_after_an_equal_block_of_another_one_is_gone() -> None:
    cache = Cache(8)
    first = cache.sequence("a", range(12))
    second = cache.sequence("b", range(12), ranks=((6, 1), (12, 0)))
    for sequence in (first, second):
        cache.admit(sequence, 3)
    for sequence in (first, second):
        cache.go_on(sequence, 4)
    cache.leave(first)
    cache.admit(third := cache.sequence("c", range(50, 78)))
    cache.leave(third)
    cache.go_on(second, 12)
    cache.end_step()
    cache.check_all()


def test_system_goes_after_user_after_assistant_and_what_is_pinned_last() -> None:
    cache = Cache(4)
    for name, rank in (("pin", 3), ("system", 2), ("user", 1), ("rest", 0)):
        tokens = [rank * 10 + place for place in range(4)]
        cache.admit(sequence := cache.sequence(name, tokens, ranks=((4, rank),)))
        cache.leave(sequence)
    left = [3, 2, 1, 0]
    for number in range(4):
        cache.admit(cache.sequence(f"new{number}", range(900 + 4 * number, 904 + 4 * number)))
        left.pop()
        found = [
            rank
            for rank in (3, 2, 1, 0)
            if cache.match(cache.sequence("x", [*range(rank * 10, rank * 10 + 4), 5])).num_tokens
        ]
        assert found == left


def test_a_block_is_worth_as_much_as_the_best_segment_that_reaches_into_it() -> None:
    cache = Cache(3)
    cache.admit(first := cache.sequence("a", range(8), ranks=((5, 2), (8, 0))))
    cache.leave(first)
    cache.admit(second := cache.sequence("b", range(50, 54), ranks=((4, 1),)))
    cache.leave(second)
    cache.admit(cache.sequence("c", range(70, 74)))
    assert cache.match(cache.sequence("x", range(9))).num_tokens == 8
    assert cache.match(cache.sequence("x", range(50, 55))).num_tokens == 0


# -- copies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_computed", [1, 3, 4, 5, 8])
def test_a_fork_shares_full_blocks_and_has_a_last_one_of_its_own(num_computed: int) -> None:
    cache = Cache()
    parent = cache.sequence("p", range(num_computed), role="beam")
    child = cache.sequence("c", range(50, 50 + num_computed), role="beam")
    cache.admit(parent)
    cache.admit(child)
    own = child.table[num_computed // SIZE :]
    cache.fork(parent, child, num_computed)
    num_full = num_computed // SIZE
    assert child.table[:num_full] == parent.table[:num_full]
    assert child.table[num_full:] == own
    copies = [(parent.table[num_full], own[0])] if num_computed % SIZE else []
    assert cache.take_copies() == copies
    cache.check_all()


def test_a_fork_without_a_block_of_its_own_shares_the_last_one_until_it_writes() -> None:
    cache = Cache()
    parent = cache.sequence("p", range(6), role="beam")
    child = cache.sequence("c", (), role="beam")
    cache.admit(parent)
    cache.sequences.append(child)
    cache.fork(parent, child, 6)
    assert child.table == parent.table
    assert cache.take_copies() == []
    assert [cache.num_blocks_to_grow(row, 7) for row in (parent, child)] == [1, 1]
    cache.copy_shared_end(child)
    assert cache.take_copies() == [(parent.table[1], child.table[1])]
    assert child.table[1] != parent.table[1]
    assert [cache.num_blocks_to_grow(row, 7) for row in (parent, child)] == [0, 0]
    cache.copy_shared_end(parent)
    assert cache.take_copies() == []
    cache.check_all()


def test_forks_of_one_parent_give_their_blocks_back_one_by_one() -> None:
    cache = Cache()
    rows = [cache.sequence(name, range(6), role="beam") for name in "abc"]
    for row in rows:
        cache.admit(row)
    for child in rows[1:]:
        cache.fork(rows[0], child, 6)
    cache.check_all()
    for row in rows:
        cache.leave(row)
        cache.check_all()
    assert cache.pool.num_used == 0


@pytest.mark.parametrize(("length", "num_found"), [(3, 2), (4, 3), (8, 7), (9, 8), (1, 0)])
def test_a_sample_starts_from_what_its_sibling_has_computed(length: int, num_found: int) -> None:
    cache = Cache(prefix_cache=False)
    cache.admit(first := cache.sequence("a", range(length)))
    second = cache.sequence("a", range(length), index=1)
    assert cache.match(second).num_tokens == 0, "not before the step is over"
    cache.note_sibling(first)
    cache.admit(second)
    assert second.num_cached == num_found
    whole = num_found // SIZE
    assert second.table[:whole] == first.table[:whole]
    assert second.table[whole:] != first.table[whole:]
    copies = [(first.table[whole], second.table[whole])] if num_found % SIZE else []
    assert cache.take_copies() == copies
    cache.check_all()
    cache.leave(first)
    cache.check_all()
    assert cache.match(cache.sequence("a", range(length), index=2)).num_tokens == 0


def test_a_sample_that_was_preempted_starts_from_the_whole_prompt_of_its_sibling() -> None:
    cache = Cache(prefix_cache=False)
    cache.admit(first := cache.sequence("a", range(6)))
    cache.note_sibling(first)
    second = cache.sequence("a", range(6), index=1)
    second.num_tokens = 9  # it has generated three
    cache.tokens["a"] += [7, 8, 9]
    cache.admit(second)
    assert second.num_cached == 6
    cache.check_all()


def test_what_another_request_has_computed_is_no_siblings() -> None:
    cache = Cache(prefix_cache=False)
    cache.admit(first := cache.sequence("a", range(6)))
    cache.note_sibling(first)
    assert cache.match(cache.sequence("b", range(6))).num_tokens == 0
    assert cache.match(cache.sequence("a", range(6), role="negative")).num_tokens == 0


# -- what went wrong -------------------------------------------------------------------------------


def test_what_was_not_computed_after_all_is_not_found() -> None:
    cache = Cache()
    cache.admit(cache.sequence("a", range(4)))
    cache.admit(other := cache.sequence("b", range(12), ranks=((6, 0), (12, 0))))
    cache.forget(other)
    cache.end_step()
    other.num_computed = 0
    cache.leave(other)
    assert cache.match(cache.sequence("c", range(13))).num_tokens == 4, "what was there before is"
    assert cache.match(cache.sequence("c", range(7), ranks=((6, 0), (7, 0)))).num_tokens == 4
    cache.check_all()


def test_sequences_that_are_not_told_of_are_found_out() -> None:
    cache = Cache()
    cache.admit(cache.sequence("a", range(9)))
    with pytest.raises(InvariantError):
        cache.check([])


# -- all of it -------------------------------------------------------------------------------------

PROMPTS = st.builds(
    lambda shared, own: [*range(shared), *own],
    st.integers(0, 14),
    st.lists(st.integers(50, 51), max_size=4),
)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_what_is_read_is_always_what_was_written(data: Any) -> None:
    """Every position of every running sequence holds its own prefix, or a cell is garbage."""
    cache = Cache(data.draw(st.integers(6, 14)))
    cells: dict[tuple[int, int], tuple[int, ...]] = {}  # block, place -> the prefix up to there
    running: list[ScheduledSequence] = []
    for number in range(data.draw(st.integers(1, 25))):
        planned: list[tuple[ScheduledSequence, int]] = []
        for sequence in running:
            more = data.draw(st.integers(0, sequence.num_tokens - sequence.num_computed))
            stop = sequence.num_computed + more
            if cache.has_room(cache.num_blocks_to_grow(sequence, stop)):
                planned.append((sequence, sequence.num_computed))
                cache.go_on(sequence, stop)
        tokens = data.draw(PROMPTS)
        ends = sorted(data.draw(st.sets(st.integers(1, max(len(tokens), 1)), max_size=3)))
        ranks = tuple((end, end % 4) for end in ends) if tokens else ()
        sequence = cache.sequence(f"s{number}", tokens, ranks=ranks)
        match = cache.match(sequence)
        stop = data.draw(st.integers(min(match.num_tokens + 1, len(tokens)), len(tokens)))
        if cache.has_room(cache.num_blocks_to_take(match, stop)):
            cache.admit(sequence, stop)
            planned.append((sequence, sequence.num_cached))
            running.append(sequence)
        for source, target in cache.take_copies():
            for place in range(SIZE):
                cells[target, place] = cells.get((source, place), ())
        for sequence, start in planned:
            for place in range(start, sequence.num_computed):
                cell = (sequence.table[place // SIZE], place % SIZE)
                cells[cell] = tuple(cache.tokens[sequence.id][: place + 1])
        cache.end_step()
        for sequence in running:
            for place in range(sequence.num_computed):
                cell = cells[sequence.table[place // SIZE], place % SIZE]
                assert cell == tuple(cache.tokens[sequence.id][: place + 1])
        cache.check_all()
        for sequence in running.copy():
            if data.draw(st.booleans()):
                cache.leave(sequence)
                running.remove(sequence)
        cache.check_all()
