"""Prompt lookup finds what a search from the end of the row finds."""

from array import array

import pytest
from drafted_trees import lines_of
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batcher.speculation import ngram
from batcher.speculation.ngram import NgramDrafter
from batcher.speculation.settings import Proposal

LENGTH = 5
SLOTS = st.integers(0, 3)
MANY = st.lists(st.integers(0, 3), min_size=1, max_size=40)
TOKENS = st.lists(st.integers(0, 3), max_size=12)  # so few that everything comes again


def search(tokens, number, max_length):
    """Return what followed the longest end of `tokens` where it stood last, copied as it grows.

    After two tokens that stood before only the latest MAX_PLACES count.
    """
    for length in range(max_length, 0, -1):
        nearer = 0
        for place in range(len(tokens) - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[-length:]:
                grown = tokens.copy()
                for offset in range(number):
                    grown.append(grown[place + offset])
                return grown[len(tokens) :]
            nearer += place > 1 and tokens[place - 2 : place] == tokens[-2:]
            if nearer == ngram.MAX_PLACES:
                break
    return []


class NgramDrafting(RuleBasedStateMachine):
    """Rows come, are given tokens, are preempted and come back elsewhere, and end."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(ngram, "MAX_PLACES", 3)
        self.drafter = NgramDrafter(LENGTH)
        self.rows = {}
        self.preempted = []

    def teardown(self):
        self.patch.undo()

    @rule(slot=SLOTS, tokens=TOKENS)
    def open(self, slot, tokens):
        if slot in self.rows:
            return
        self.rows[slot] = tokens.copy()
        self.drafter.open(slot, tokens)

    @rule(given=st.dictionaries(SLOTS, TOKENS))
    def extend(self, given):
        given = {slot: tokens for slot, tokens in given.items() if slot in self.rows}
        self.drafter.extend(given)
        for slot, tokens in given.items():
            self.rows[slot] += tokens

    @rule(slot=SLOTS, has_ended=st.booleans())
    def close(self, slot, *, has_ended):
        if slot in self.rows:
            row = self.rows.pop(slot)
            self.preempted += [] if has_ended else [row]
            self.drafter.close(slot, has_ended=has_ended)

    @precondition(lambda self: self.preempted)
    @rule(slot=SLOTS)
    def come_back(self, slot):
        if slot not in self.rows:
            self.open(slot, self.preempted.pop())

    @invariant()
    def proposes_what_it_should(self):
        for number in (1, 2, 7):
            drafts = self.drafter.propose(dict.fromkeys(self.rows, number))
            assert drafts.keys() <= self.rows.keys()
            for slot, row in self.rows.items():
                draft = drafts.get(slot, Proposal([]))
                assert draft == Proposal(search(row, number, LENGTH))


TestNgramDrafting = NgramDrafting.TestCase
TestNgramDrafting.settings = examples(60)


def test_branches_are_what_followed_last_and_a_prompt_may_be_an_array():
    drafter = NgramDrafter()
    drafter.open(0, array("H", [1, 2, 3, 1]))
    drafter.extend({0: array("H", [2])})
    assert drafter.propose({0: 2}) == {0: Proposal([3, 1])}
    drafter = NgramDrafter(2, 2)
    drafter.open(0, [5, 6, 1, 2, 5, 6, 3, 4, 5, 6, 1, 9, 5, 6])
    assert drafter.propose({0: 4}) == {0: Proposal([1, 3, 9, 4], (0, 0, 1, 2))}
    drafter = NgramDrafter(3, 2)
    drafter.open(0, [9, 5, 6, 1, 5, 6, 1, 5, 6, 3, 9, 5, 6])
    assert drafter.propose({0: 2}) == {0: Proposal([1, 3], (0, 0))}, "after 9 5 6, then the latest"


def test_a_long_row_forgets_its_beginning(monkeypatch):
    monkeypatch.setattr(ngram, "WINDOW", 8)
    drafter = NgramDrafter()
    drafter.open(0, [50, 51, *range(8)])
    drafter.extend({0: [50]})
    assert drafter.propose({0: 1}) == {}, "51 came before the last eight tokens"
    drafter.extend({0: [3]})
    assert drafter.propose({0: 1}) == {0: Proposal([4])}
    for token in range(100, 1000):
        drafter.extend({0: [token]})
    assert len(drafter._rows[0].tokens) < 16
    assert len(drafter._rows[0]._of_pairs) < 16
    drafter.extend({0: [998]})
    assert drafter.propose({0: 3}) == {0: Proposal([999, 998, 999])}


@given(prompt=MANY, given_tokens=MANY, shape=st.tuples(st.integers(2, 4), st.integers(1, 4)))
def test_a_tree_has_the_line_and_others_beside_it(prompt, given_tokens, shape):
    num_branches, depth = shape
    line, tree = NgramDrafter(4), NgramDrafter(4, num_branches)
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
