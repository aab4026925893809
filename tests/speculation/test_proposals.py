"""Drafts as a line and as a tree, against the plainest means, and the settings for them."""

from random import Random

import pytest
from drafted_trees import lines_of, random_parents
from hypothesis import given
from hypothesis import strategies as st

from batcher.errors import BatchdecodeError
from batcher.speculation.settings import (
    LINE,
    CheckedDrafter,
    Proposal,
    TreeShape,
    expected_speedup,
    expected_tokens,
    merged,
    parse_draft,
    parse_tree,
    proposal_of,
    simple_return,
)


@given(st.integers(0, 12), st.integers(0, 99), st.integers(2, 3))
def test_drafts_follow_what_they_follow(num_drafts, seed, num_tokens):
    random = Random(seed)
    parents = [parent + 1 for parent in random_parents(random, num_drafts)]
    tokens = [random.randrange(num_tokens) for _ in range(num_drafts)]
    proposal = proposal_of(tokens, parents)
    assert proposal == Proposal(tokens, () if parents == [*range(num_drafts)] else tuple(parents))
    for number in range(num_drafts + 1):
        following = [draft for draft, parent in enumerate(parents, 1) if parent == number]
        for token in range(num_tokens):
            right = [draft for draft in following if tokens[draft - 1] == token]
            assert proposal.child(number, token) == next(iter(right), 0)
    lines = lines_of(proposal)
    kept = [draft for draft, line in enumerate(lines, 1) if len(line) < 3]
    assert lines_of(proposal.only(kept)) == [line for line in lines if len(line) < 3]


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=5), st.integers(0, 20))
def test_branches_are_merged_where_they_begin_alike(branches, number):
    begun = [tuple(b[:length]) for b in branches for length in range(1, len(b) + 1)]
    found = lines_of(merged(branches, number))
    assert len(found) == min(number, len({*begun}))
    assert len({*map(tuple, found)}) == len(found)
    assert {*map(tuple, found)} <= {*begun}
    assert found == sorted(found, key=len)


class Fixed:
    """A drafter that proposes the same, whatever is wanted."""

    open = extend = close = None

    def __init__(self, proposal):
        self.propose = lambda _: {0: proposal}


def first_of(proposal, number):
    return CheckedDrafter(Fixed(proposal), takes_trees=True).propose({0: number})[0]


def test_no_more_drafts_are_taken_than_are_wanted():
    deep = Proposal([7, 8, 9, 10, 11], (0, 1, 2, 0, 3))
    assert first_of(deep, 9) == deep
    assert first_of(deep, 4) == Proposal([7, 8, 9, 10], (0, 1, 2, 0))
    assert first_of(deep, 3) == Proposal([7, 8, 9])
    assert first_of(Proposal([7, 8, 9]), 2) == Proposal([7, 8])


@pytest.mark.parametrize("parents", [(0, 1), (0, 0, 3), (0, -1, 0), (1, 0, 0)])
def test_what_is_no_tree_is_refused(parents):
    with pytest.raises(ValueError, match="draft"):
        first_of(Proposal([7, 8, 9], parents), 9)


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ("ngram", 4),
        ("ngram:16", 16),
        ("simulated", "simulated"),
        ("smollm2", "smollm2"),
        ("small.gguf", "small.gguf"),
        ("my.models:Small", "my.models:Small"),
    ],
)
def test_a_text_names_a_draft(text, draft):
    assert parse_draft(text) == draft


def test_a_folder_is_a_model(tmp_path):
    assert parse_draft(str(tmp_path)) == str(tmp_path)


ALLOWED = "(use ngram, ngram:N (N from 1 to 16), simulated:RATE or a MODEL)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ALLOWED),
        ("ngrams", "did you mean ngram?"),
        ("smollm", "did you mean smollm2?"),
        *((f"ngram:{n}", "1 to 16") for n in ("", 0, 17, -1, "\N{SUPERSCRIPT TWO}", "9" * 10_000)),
        (":name", ALLOWED),
        *((text, ALLOWED) for text in ("suffix", "lookup:texts.jsonl", "lookup:x", "layers:8")),
    ],
)
def test_what_names_none_is_refused(text, words):
    with pytest.raises(BatchdecodeError, match="--draft") as error:
        parse_draft(text)
    assert words in str(error.value)


def test_a_shape_is_read():
    assert parse_tree("3x4") == TreeShape(3, 4)
    assert parse_tree("64x1").size == LINE.size == 64


@pytest.mark.parametrize(
    "text", ["", "3", "x", "0x3", "3x0", "-1x2", "9x8", "3x4x5", "65x1", "٣x٤"]
)
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(BatchdecodeError, match=f"^--draft-tree {text}: expected WxD, such as 3x4"):
        parse_tree(text)


def test_by_hand():
    assert expected_tokens(0.5, 2) == 1.75
    assert expected_tokens(0.0, 5) == 1
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.7, 0) == 1
    assert expected_speedup(0.5, 2, 0.0) == 1.75
    assert expected_speedup(0.5, 2, 0.25) == pytest.approx(1.75 / 1.5)
    assert simple_return(0.5, 4, 0.25) == pytest.approx(1.6)
