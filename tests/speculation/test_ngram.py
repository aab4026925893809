"""Prompt lookup finds what a search from the end of the row finds."""

from array import array

import pytest
from drafting import Drafting
from examples import examples

from batcher.errors import InvariantError
from batcher.speculation import ngram
from batcher.speculation.ngram import NgramDrafter
from batcher.speculation.proposal import Proposal

LENGTH = 5


def search(tokens: list[int], number: int, max_length: int) -> list[int]:
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


class NgramDrafting(Drafting):
    def make_drafter(self) -> NgramDrafter:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(ngram, "MAX_PLACES", 3)
        return NgramDrafter(LENGTH)

    def teardown(self) -> None:
        self.patch.undo()

    def expected(self, slot: int, number: int) -> list[int]:
        return search(self.rows[slot], number, LENGTH)


TestNgramDrafting = NgramDrafting.TestCase
TestNgramDrafting.settings = examples(60)


def proposed(tokens: list[int], number: int, max_length: int = 4) -> list[int]:
    drafter = NgramDrafter(max_length)
    drafter.open(0, tokens)
    return drafter.propose({0: number}).get(0, Proposal([])).tokens


def test_the_longest_ngram_wins_and_then_the_latest_place() -> None:
    assert proposed([1, 2, 3, 9, 2, 3, 8, 3, 7, 1, 2, 3], 1) == [9]
    assert proposed([1, 2, 3, 9, 2, 3, 8, 3, 7, 1, 2, 3], 1, max_length=2) == [8]
    assert proposed([1, 2, 3, 9, 2, 3, 8, 3, 7, 1, 2, 3], 1, max_length=1) == [7]


def test_a_row_that_repeats_itself_is_drafted_as_far_as_wanted() -> None:
    assert proposed([5, 5], 6) == [5] * 6
    assert proposed([1, 2, 3, 1, 2], 8) == [3, 1, 2, 3, 1, 2, 3, 1]


def test_a_token_that_is_new_to_its_row_has_no_draft() -> None:
    assert proposed([], 4) == []
    assert proposed([1], 4) == []
    assert proposed([1, 2, 1, 3], 4) == []


def test_a_prompt_may_be_an_array() -> None:
    drafter = NgramDrafter()
    drafter.open(0, array("H", [1, 2, 3, 1]))
    drafter.extend({0: array("H", [2])})
    assert drafter.propose({0: 2}) == {0: Proposal([3, 1])}


def test_a_long_row_forgets_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_slot_has_one_row() -> None:
    drafter = NgramDrafter()
    drafter.open(0, [1])
    with pytest.raises(InvariantError):
        drafter.open(0, [2])
