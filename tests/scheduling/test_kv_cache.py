"""What is found of a sequence in the cache: whole blocks, and parts of them where segments end."""

import pytest
from cached_tokens import Cache


def test_no_key_is_built_for_what_nobody_has_looked_for():
    cache = Cache(60)
    cache.begin(first := cache.sequence("a", range(100)), 40)
    assert cache.built == [0], "one is missed, and then registered"
    cache.go_on(first, 100)
    assert cache.built == [0], "nobody has looked behind it"
    cache.built.clear()
    assert cache.match(cache.sequence("b", [*range(40), *range(500, 560)])).num_tokens == 40
    assert sorted(cache.built) == sorted([*range(11), *range(1, 25)]), (
        "once it is looked behind, a chain has keys"
    )
    cache.built.clear()
    assert cache.match(cache.sequence("c", range(36))).num_tokens == 32
    assert cache.built == [*range(8)], "they have keys already"


def test_what_is_remembered_of_a_waiting_sequence_is_not_built_again():
    cache = Cache(60)
    cache.begin(first := cache.sequence("a", range(100)), 40)
    waiting = cache.sequence("b", range(101))
    assert cache.num_found(waiting) == 40
    cache.built.clear()
    for _ in range(5):
        assert cache.num_found(waiting) == 40
    assert cache.built == []
    cache.go_on(first, 100)
    assert cache.match(waiting).blocks == first.block_table
    assert cache.num_found(waiting) == 100
    cache.leave(first)
    cache.begin(cache.sequence("c", range(500, 680)))
    assert cache.match(waiting).blocks == waiting.prefix.blocks[:15], "the others are evicted"


# -- segments --------------------------------------------------------------------------------------


def test_a_segment_boundary_inside_a_block_is_found_from_the_next_step_on_by_copy():
    cache = Cache()
    cache.begin(first := cache.sequence("a", range(10), segment_ends=((6, 1), (10, 0))))
    other = cache.sequence("b", [*range(6), 90, 91, 92], segment_ends=((6, 1), (9, 0)))
    assert cache.match(other).num_tokens == 4, "not in the same step"
    cache.end_step()
    match = cache.match(other)
    assert (match.num_tokens, match.source) == (6, first.block_table[1])
    cache.begin(other)
    assert cache.take_copies() == [(first.block_table[1], other.block_table[1])]
    assert cache.take_copies() == []
    assert other.block_table[1] not in first.block_table
    cache.check_all()


SEVERAL = ((1, 0), (2, 0), (3, 0), (9, 0))
BOUNDARIES = [
    # Only where a boundary is looked for.
    (10, ((6, 1), (10, 0)), [*range(10)], (), 8),
    (10, ((6, 1), (10, 0)), [*range(7)], ((5, 0), (7, 0)), 4),
    (10, ((6, 1), (10, 0)), [*range(7)], ((6, 0), (7, 0)), 6),
    # The longest of several in a block.
    *((9, SEVERAL, [*range(same), *range(90, 99)], SEVERAL, same) for same in (1, 2, 3)),
    # A token is left to compute.
    (6, ((6, 0),), [*range(6)], ((6, 0),), 4),
    (6, ((6, 0),), [*range(7)], ((6, 0), (7, 0)), 6),
]


@pytest.mark.parametrize(("length", "ends", "tokens", "its_ends", "num_found"), BOUNDARIES)
def test_a_boundary_is_found(length, ends, tokens, its_ends, num_found):
    cache = Cache()
    cache.begin(cache.sequence("a", range(length), segment_ends=ends))
    cache.end_step()
    assert cache.match(cache.sequence("b", tokens, segment_ends=its_ends)).num_tokens == num_found


def test_a_boundary_is_named_when_the_chunk_that_crosses_it_is_computed():
    cache = Cache()
    ranks = ((2, 0), (6, 0), (11, 0))
    cache.begin(first := cache.sequence("a", range(11), segment_ends=ranks), 5)
    cache.end_step()
    other = cache.sequence("b", [*range(6), 99], segment_ends=((6, 0), (7, 0)))
    assert cache.match(other).num_tokens == 4
    cache.go_on(first, 11)
    cache.end_step()
    assert cache.match(other).num_tokens == 6


def test_a_boundary_is_found_after_an_equal_block_of_another_one_is_gone():
    cache = Cache(8)
    first = cache.sequence("a", range(12))
    second = cache.sequence("b", range(12), segment_ends=((6, 1), (12, 0)))
    for sequence in (first, second):
        cache.begin(sequence, 3)
    for sequence in (first, second):
        cache.go_on(sequence, 4)
    cache.leave(first)
    cache.begin(third := cache.sequence("c", range(50, 78)))
    cache.leave(third)
    cache.go_on(second, 12)
    cache.end_step()
    cache.check_all()


def test_system_goes_after_user_after_assistant_and_what_is_pinned_last():
    cache = Cache(4)
    for name, rank in (("pin", 3), ("system", 2), ("user", 1), ("rest", 0)):
        tokens = [rank * 10 + place for place in range(4)]
        cache.begin(sequence := cache.sequence(name, tokens, segment_ends=((4, rank),)))
        cache.leave(sequence)
    left = [3, 2, 1, 0]
    for number in range(4):
        cache.begin(cache.sequence(f"new{number}", range(900 + 4 * number, 904 + 4 * number)))
        left.pop()
        found = [
            rank
            for rank in (3, 2, 1, 0)
            if cache.match(cache.sequence("x", [*range(rank * 10, rank * 10 + 4), 5])).num_tokens
        ]
        assert found == left


def test_a_block_is_worth_as_much_as_the_best_segment_that_reaches_into_it():
    cache = Cache(3)
    cache.begin(first := cache.sequence("a", range(8), segment_ends=((5, 2), (8, 0))))
    cache.leave(first)
    cache.begin(second := cache.sequence("b", range(50, 54), segment_ends=((4, 1),)))
    cache.leave(second)
    cache.begin(cache.sequence("c", range(70, 74)))
    assert cache.match(cache.sequence("x", range(9))).num_tokens == 8
    assert cache.match(cache.sequence("x", range(50, 55))).num_tokens == 0


def test_a_part_is_found_no_longer_once_the_block_is_evicted_that_was_filled_behind_it():
    cache = Cache(4)
    cache.begin(first := cache.sequence("a", range(10), segment_ends=((10, 0),)))
    cache.end_step()
    cache.tokens["a"] += range(10, 13)
    first.num_computed_tokens = 12
    cache.leave(first)
    assert cache.match(cache.sequence("b", range(13))).num_tokens == 12
    part = cache.sequence("c", [*range(10), 99], segment_ends=((10, 0), (11, 0)))
    assert cache.match(part).num_tokens == 10
    cache.begin(cache.sequence("d", range(50, 58)))
    assert cache.match(part).num_tokens == 8
