"""Where the nodes of a tree of drafts stand, and what is moved when a path is accepted."""

from batcher.models.base import Chunk, Pages, draft_parents, moves_along, node_paths

LINE = Chunk(1, [5, 6, 7, 8], 3, num_drafts=2)
#         7 - 10 - 11
# 5, 6 <      9
#         8 <
TREE = Chunk(1, [5, 6, 7, 8, 9, 10, 11], 3, num_drafts=5, draft_parents=(1, 1, 3, 2, 5))
PAGES = Pages(4, [[], [20, 9, 30]], [[[], [-1, 8, 31]]])


def test_each_node_has_a_way_from_the_last_known_token() -> None:
    assert draft_parents(LINE) == range(1, 3)
    assert node_paths(LINE) == [[2], [2, 3]]
    assert draft_parents(TREE) == (1, 1, 3, 2, 5)
    assert node_paths(TREE) == [[2], [3], [3, 4], [2, 5], [2, 5, 6]]


def test_what_is_accepted_is_moved_to_where_it_stands_in_every_group() -> None:
    assert moves_along([], TREE, PAGES) == []
    assert moves_along([2], TREE, PAGES) == []
    # The token at index i of the chunk is at position 3 + i.
    assert moves_along([3], TREE, PAGES) == [(9 * 4 + 2, 9 * 4 + 1), (8 * 4 + 2, 8 * 4 + 1)]
    assert moves_along([2, 5, 6], TREE, PAGES) == [
        (30 * 4, 9 * 4 + 2),
        (31 * 4, 8 * 4 + 2),
        (30 * 4 + 1, 9 * 4 + 3),
        (31 * 4 + 1, 8 * 4 + 3),
    ]
    assert moves_along([2, 3], LINE, PAGES) == []
