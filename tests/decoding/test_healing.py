"""Healing: what is given back of a prompt, and which tokens its bytes leave, by brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.decoding.constraints import HealingRow, VocabularyIndex, allowed_tokens
from batcher.errors import InvariantError

EOS = 0
URLS = [
    b"",
    b"http",
    b":",
    b"://",
    b"/",
    b"s",
    b"x",
    b"",
    b":/",
    b"p:",
    b"ttp",
    b"\xc3",
    b"\xc3\xa9",
]
BEGIN = 7  # a second token without bytes


def index_of(vocabulary, ends=(EOS,)):
    return VocabularyIndex(vocabulary, len(vocabulary), ends)


def forced_token(row):
    return next(iter(row.forced_tokens(1)), None)


def ids_allowed(row, vocab_size):
    return set(allowed_tokens([row], vocab_size)[0].nonzero()[0].tolist())


@pytest.mark.parametrize(
    ("prompt", "kept", "forced"),
    [
        ([1, 2], [1], b":"),  # `://` may have been meant
        ([6, 1, 2], [6, 1], b":"),
        ([6, 1, 5], [6, 1, 5], b""),  # nothing goes on after "s"
        ([2], [2], b""),  # the first token stays
        ([], [], b""),
        ([6, 2, BEGIN], [6, 2, BEGIN], b""),  # a special token is never given back
        ([6, BEGIN, 2], [6, BEGIN], b":"),
        ([6, 11], [6], b"\xc3"),  # half of a character
        ([6, 99, 2], [6, 99], b":"),  # an id without known bytes is left alone
    ],
)
def test_the_end_of_a_prompt_is_given_back_to_where_a_longer_token_may_begin(prompt, kept, forced):
    given_prompt = list(prompt)
    assert index_of(URLS).heal(prompt) == (kept, forced)
    assert prompt == given_prompt


def test_eos_is_never_found_even_if_its_tokenizer_gives_it_text():
    vocabulary = [b":x", b":", b"a"]
    assert index_of(vocabulary, ends=()).heal([2, 1]) == ([2], b":")
    assert index_of(vocabulary).heal([2, 1]) == ([2, 1], b"")


def test_a_row_limits_nothing_past_the_prompt():
    row = HealingRow(index_of(URLS), b":")
    assert row.is_active
    assert ids_allowed(row, len(URLS)) == {2, 3, 8}
    fork = row.fork()
    row.advance(3)
    assert (row.remaining, row.is_active) == (b"", False)
    assert ids_allowed(row, len(URLS)) == set(range(len(URLS)))
    row.advance(5)
    assert forced_token(row) is None
    assert fork.remaining == b":"
    fork.advance(2)
    assert not fork.is_active


def test_a_token_that_does_not_go_on_with_the_prompt_is_a_bug_of_the_caller():
    for token in (EOS, 4, BEGIN, 99):
        with pytest.raises(InvariantError, match=f"token {token} "):
            HealingRow(index_of(URLS), b":").advance(token)


PIECES = st.text("abé", max_size=3).flatmap(
    lambda text: st.tuples(st.integers(0, 6), st.integers(0, 6)).map(
        lambda cut: text.encode()[min(cut) : max(cut)]
    )
)
VOCABULARIES = st.lists(PIECES, min_size=1, max_size=12).map(lambda pieces: [b"", *pieces])


@given(VOCABULARIES, st.data())
def test_healing_backs_up_as_far_as_brute_force_does(vocabulary, data):
    prompt = data.draw(st.lists(st.integers(0, len(vocabulary) - 1), max_size=6))
    expected = (prompt, b"")
    for place in range(len(prompt) - 1, 0, -1):
        tail = [vocabulary[token] for token in prompt[place:]]
        if b"" in tail:
            break
        text = b"".join(tail)
        if any(token.startswith(text) and token != text for token in vocabulary):
            expected = (prompt[:place], text)
    assert index_of(vocabulary).heal(prompt) == expected


@given(VOCABULARIES, PIECES, st.data())
def test_a_row_allows_what_brute_force_over_bytes_does(vocabulary, remaining, data):
    def can_write(text):
        return not text or any(
            token
            and (
                token.startswith(text) or (text.startswith(token) and can_write(text[len(token) :]))
            )
            for token in vocabulary
        )

    row = HealingRow(index_of(vocabulary), remaining)
    written = b""
    while row.is_active:
        rest = remaining[len(written) :]
        expected = {
            token_id
            for token_id, token in enumerate(vocabulary)
            if token
            and (
                token.startswith(rest) or (rest.startswith(token) and can_write(rest[len(token) :]))
            )
        }
        assert ids_allowed(row, len(vocabulary)) == expected
        assert forced_token(row) == (min(expected) if len(expected) == 1 else None)
        if not expected:
            return
        token = data.draw(st.sampled_from(sorted(expected)))
        row.advance(token)
        written += vocabulary[token]
    assert written.startswith(remaining)
