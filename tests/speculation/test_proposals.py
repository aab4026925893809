"""Drafts as a line and as a tree, against the plainest means; and the trees of what knows texts."""

from collections.abc import Callable
from random import Random

import pytest
from drafted_trees import random_parents, way_to
from hypothesis import given
from hypothesis import strategies as st

from batcher import BatchdecodeError
from batcher.speculation.branches import likeliest_branches
from batcher.speculation.datastore import Datastore
from batcher.speculation.drafter import Drafter
from batcher.speculation.lookup import LookupDrafter
from batcher.speculation.ngram import NgramDrafter
from batcher.speculation.proposal import Proposal, first_of, merged, proposal_of
from batcher.speculation.spec import LINE, TreeShape, parse_tree
from batcher.speculation.suffix import SuffixDrafter

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)  # so few that everything comes again
TEXTS = [[0, 1, 2, 3, 0, 1, 3, 2], [1, 2, 0, 1, 2, 1]]
DRAFTERS: dict[str, Callable[[int], Drafter]] = {
    "ngram": lambda num_branches: NgramDrafter(4, num_branches),
    "suffix": SuffixDrafter,
    "lookup": lambda num_branches: LookupDrafter(Datastore(TEXTS), num_branches),
}


def lines_of(proposal: Proposal) -> list[list[int]]:
    """Return the tokens on the way to each draft, itself included."""
    parents = [parent - 1 for parent in proposal.parents or range(len(proposal))]
    return [
        [proposal.tokens[number] for number in way_to(draft, parents)]
        for draft in range(len(proposal))
    ]


@given(st.integers(0, 12), st.integers(0, 99), st.integers(2, 3))
def test_a_row_goes_as_far_as_its_drafts_are_what_it_is_given(
    num_drafts: int, seed: int, num_tokens: int
) -> None:
    random = Random(seed)
    parents = [parent + 1 for parent in random_parents(random, num_drafts)]
    tokens = [random.randrange(num_tokens) for _ in range(num_drafts)]
    after = [random.randrange(num_tokens) for _ in range(num_drafts)]
    proposal = proposal_of(tokens, parents)
    assert proposal == Proposal(tokens, () if parents == [*range(num_drafts)] else tuple(parents))
    assert proposal.depths == [len(line) for line in lines_of(proposal)]
    way, expected, token = proposal.way(0, after), [0], 0
    while True:
        following = (d for d in range(1, num_drafts + 1) if parents[d - 1] == expected[-1])
        draft = next((d for d in following if tokens[d - 1] == token), None)
        if draft is None:
            break
        expected.append(draft)
        token = after[draft - 1]
    assert [0, *way] == expected
    kept = [d for d in range(1, num_drafts + 1) if proposal.depths[d - 1] < 3]
    assert lines_of(proposal.only(kept)) == [line for line in lines_of(proposal) if len(line) < 3]


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=5), st.integers(0, 20))
def test_branches_are_merged_where_they_begin_alike(branches: list[list[int]], number: int) -> None:
    begun = [tuple(b[:length]) for b in branches for length in range(1, len(b) + 1)]
    found = lines_of(merged(branches, number))
    assert len(found) == min(number, len({*begun}))
    assert len({*map(tuple, found)}) == len(found)
    assert {*map(tuple, found)} <= {*begun}
    assert found == sorted(found, key=len)


def test_no_more_drafts_are_taken_than_are_wanted() -> None:
    deep = Proposal([7, 8, 9, 10, 11], (0, 1, 2, 0, 3))
    assert first_of(deep, 9) == deep
    assert first_of(deep, 4) == Proposal([7, 8, 9, 10], (0, 1, 2, 0))
    assert first_of(deep, 3) == Proposal([7, 8, 9])
    assert first_of(Proposal([7, 8, 9]), 2) == Proposal([7, 8])


@pytest.mark.parametrize("parents", [(0, 1), (0, 0, 3), (0, -1, 0), (1, 0, 0)])
def test_what_is_no_tree_is_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="draft"):
        first_of(Proposal([7, 8, 9], parents), 9)


# -- trees of what knows texts ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", DRAFTERS)
@given(prompt=TOKENS, given_tokens=TOKENS, shape=st.tuples(st.integers(2, 4), st.integers(1, 4)))
def test_a_tree_has_the_line_and_others_beside_it(
    kind: str, prompt: list[int], given_tokens: list[int], shape: tuple[int, int]
) -> None:
    num_branches, depth = shape
    line, tree = DRAFTERS[kind](1), DRAFTERS[kind](num_branches)
    for drafter in (line, tree):
        drafter.open(0, prompt)
        drafter.extend({0: given_tokens})
    for size in range(1, num_branches * depth + 1):
        length = -(-size // num_branches)
        of_tree = tree.propose({0: size}).get(0, Proposal([]))
        of_line = line.propose({0: length}).get(0, Proposal([]))
        found = lines_of(of_tree)
        assert len(found) <= size
        assert max(map(len, found), default=0) <= length
        assert len({*map(tuple, found)}) == len(found)
        ends = [way for way in found if not any(way == other[:-1] for other in found)]
        assert len(ends) <= num_branches
        if size == num_branches * length:
            assert of_line.tokens in found or not of_line


def test_branches_of_an_ngram_are_what_followed_it_last() -> None:
    drafter = NgramDrafter(2, 2)
    drafter.open(0, [5, 6, 1, 2, 5, 6, 3, 4, 5, 6, 1, 9, 5, 6])
    assert drafter.propose({0: 4}) == {0: Proposal([1, 3, 9, 4], (0, 0, 1, 2))}
    drafter = NgramDrafter(3, 2)
    drafter.open(0, [9, 5, 6, 1, 5, 6, 1, 5, 6, 3, 9, 5, 6])
    assert drafter.propose({0: 2}) == {0: Proposal([1, 3], (0, 0))}, "after 9 5 6, then the latest"


def test_a_branch_leaves_the_tree_where_least_is_lost() -> None:
    tree = {"": "aab", "a": "cccccccccd", "b": "e", "ac": "f", "ad": "g"}

    def followers(prefix: str) -> list[tuple[float, int, str]]:
        known = tree.get(prefix, "")
        return [
            (known.count(letter) / len(known), ord(letter), prefix + letter)
            for letter in dict.fromkeys(known)
        ]

    def branches(num_branches: int, least: float = 0.0) -> list[str]:
        found = likeliest_branches("", num_branches, 3, followers, least)
        return ["".join(map(chr, branch)) for branch in found]

    assert branches(1) == ["acf"]
    assert branches(2) == ["acf", "be"]
    assert branches(9) == ["acf", "be", "adg"]
    assert branches(9, 0.3) == ["acf", "be"]
    assert branches(9, 0.7) == []


def test_a_shape_is_read() -> None:
    assert parse_tree("3x4") == TreeShape(3, 4)
    assert parse_tree("64x1").size == LINE.size == 64


@pytest.mark.parametrize(
    "text", ["", "3", "x", "0x3", "3x0", "-1x2", "9x8", "3x4x5", "65x1", "٣x٤"]
)
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(BatchdecodeError, match=f"^--draft-tree {text}: expected WxD, such as 3x4"):
        parse_tree(text)
