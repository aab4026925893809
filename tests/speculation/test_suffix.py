"""Drafts of suffix trees are those of counting everything in all texts anew."""

import pytest
from drafting import Drafting
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batcher.errors import InvariantError
from batcher.speculation import suffix
from batcher.speculation.proposal import Proposal
from batcher.speculation.suffix import SuffixDrafter
from batcher.speculation.suffix_tree import Node, SuffixTree, Text, count_of

DEPTH, LONGEST, LEAST, MAX_TOKENS = 7, 3, 0.3, 40


def places_after(sequence: list[int], texts: list[list[int]]) -> list[tuple[int, int]]:
    """Return where what followed `sequence` stands: text and place, in order."""
    length = len(sequence)
    return [
        (number, place)
        for number, text in enumerate(texts)
        for place in range(length, len(text))
        if text[place - length : place] == sequence
    ]


def count(sequence: list[int], texts: list[list[int]]) -> int:
    return len(places_after(sequence, [[*text, -1] for text in texts]))


def search(tokens: list[int], texts: list[list[int]], number: int) -> tuple[list[int], float]:
    """Return what most often follows the longest end of `tokens` in `texts`, and its score."""
    ends = [tokens[len(tokens) - length :] for length in range(1, min(LONGEST, len(tokens)) + 1)]
    path = next((end for end in reversed(ends) if places_after(end, texts)), None)
    if path is None:
        return [], 0.0
    draft: list[int] = []
    likely, score = 1.0, 0.0
    while len(draft) < number and len(path) < DEPTH:
        places = places_after(path, texts)
        followers = [texts[text][place] for text, place in places]
        if not followers:
            break
        latest = {token: place for place, token in enumerate(followers)}
        best = max(latest, key=lambda token: (followers.count(token), latest[token]))
        likely *= followers.count(best) / len(followers)
        if likely < LEAST:
            break
        score += likely
        draft.append(best)
        path = [*path, best]
    return draft, score


class SuffixDrafting(Drafting):
    def make_drafter(self) -> SuffixDrafter:
        self.patch = pytest.MonkeyPatch()
        constants = {"DEPTH": DEPTH, "LONGEST": LONGEST, "LEAST": LEAST, "MAX_TOKENS": MAX_TOKENS}
        for name, value in constants.items():
            self.patch.setattr(suffix, name, value)
        self.outputs: list[list[int]] = []
        self.lengths: dict[int, int] = {}
        return SuffixDrafter()

    def teardown(self) -> None:
        self.patch.undo()

    def opened(self, slot: int) -> None:
        self.lengths[slot] = len(self.rows[slot])

    def ended(self, slot: int) -> None:
        output = self.rows[slot][self.lengths[slot] :]
        self.outputs += [output] if output else []
        while sum(map(len, self.outputs)) > MAX_TOKENS:
            self.outputs.pop(0)

    def expected(self, slot: int, number: int) -> list[int]:
        row = self.rows[slot]
        own, others = search(row, [row], number), search(row, self.outputs, number)
        return max(own, others, key=lambda found: round(found[1], 9))[0]


TestSuffixDrafting = SuffixDrafting.TestCase
TestSuffixDrafting.settings = examples(60)


@given(st.lists(st.lists(st.integers(0, 2), max_size=20), max_size=6), st.data())
@examples(60)
def test_every_sequence_is_counted(texts: list[list[int]], data: st.DataObject) -> None:
    tree, kept = SuffixTree(4), []
    for tokens in texts:
        text = Text()
        tree.append(text, tokens)
        kept.append(text)
        if data.draw(st.booleans()):
            tree.remove(kept.pop(0))
    left = [text.tokens for text in kept]

    def check(node: Node, path: list[int]) -> None:
        assert node.num_continued == sum(map(count_of, node.children.values()))
        followers = [left[text][place] for text, place in places_after(path, left)]
        latest = {token: place for place, token in enumerate(followers)}
        if node.children and path:
            best = max(latest, key=lambda token: (followers.count(token), latest[token]))
            assert node.likeliest() == best
        for token, child in node.children.items():
            sequence = [*path, token]
            assert count_of(child) == count(sequence, left)
            if isinstance(child, Node):
                assert child.depth == len(sequence) <= 4
                if child.depth < 4:
                    assert child.num_continued == len(places_after(sequence, left))
                check(child, sequence)

    check(tree._root, [])
    assert tree._root.num_continued == sum(map(len, left))


def test_what_others_wrote_is_drafted_for_a_new_row() -> None:
    drafter = SuffixDrafter()
    drafter.open(0, [1, 2])
    drafter.extend({0: [7, 8, 9, 10]})
    drafter.close(0, has_ended=True)
    drafter.open(0, [3, 7])
    assert drafter.propose({0: 3}) == {0: Proposal([8, 9, 10])}
    drafter.close(0, has_ended=False)
    drafter.open(1, [1])
    assert drafter.propose({1: 3}) == {}, "a prompt is nobody's output"
    drafter.open(2, [4, 5, 4])
    assert drafter.propose({2: 3, 1: 1}) == {2: Proposal([5, 4])}


def test_a_preempted_row_is_not_learned_from() -> None:
    drafter = SuffixDrafter()
    drafter.open(0, [1])
    drafter.extend({0: [5, 6, 7]})
    drafter.close(0, has_ended=False)
    drafter.open(0, [5])
    assert drafter.propose({0: 3}) == {}


def test_of_long_rows_and_many_outputs_the_latest_tokens_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(suffix, "WINDOW", 16)
    monkeypatch.setattr(suffix, "MAX_TOKENS", 50)
    drafter = SuffixDrafter()
    for number in range(20):
        drafter.open(0, list(range(40)))
        assert len(drafter._rows[0].tokens) == 16
        drafter.extend({0: [100 + number, 1000 + number]})
        for token in range(90):
            drafter.extend({0: [2000 + token]})
            assert len(drafter._rows[0].tokens) < 32
        drafter.close(0, has_ended=True)
        assert drafter._num_kept == sum(len(text.tokens) for text in drafter._kept) <= 50
    assert drafter._outputs._root.num_continued == drafter._num_kept


def test_a_slot_has_one_row() -> None:
    drafter = SuffixDrafter()
    drafter.open(0, [1])
    with pytest.raises(InvariantError):
        drafter.open(0, [2])
