"""Bad words: no text of any tokenisation has one, and no token is banned that completes none."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.decoding import filters
from batcher.decoding.filters import BadWords, SamplingParams, Vocabulary
from batcher.decoding.sampling import Sampler, SamplingRow

PIECES = (b"", b"a", b"b", b"c", b"ab", b"ba", b"abc", b"bca", b"\xc3", b"\xa9", b"x\xc3", b"cab")


class Pieces:
    token_bytes = PIECES


TEXTS = st.lists(st.sampled_from([*"abc", "é", "ab", "ca"]), min_size=1, max_size=4).map("".join)


def opened(bad_words: list[str], vocab_size: int = len(PIECES), num_slots: int = 1) -> Sampler:
    sampler = Sampler(num_slots, vocab_size, Pieces())
    params = SamplingParams(bad_words=tuple(bad_words))
    for slot in range(num_slots):
        sampler.open(slot, SamplingRow(params, 0, []))
    return sampler


@given(st.lists(TEXTS, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_no_text_ever_has_a_bad_word_and_nothing_else_is_banned(words, random) -> None:
    sampler = opened(words)
    text = b""
    for _ in range(12):
        order = random.sample(range(len(PIECES)), len(PIECES))  # the model likes the first best
        logits = np.empty((1, len(PIECES)), np.float32)
        logits[0, order] = -np.arange(len(PIECES))
        token = int(sampler.sample(logits).tokens[0])
        allowed = [t for t in order if not any(w.encode() in text + PIECES[t] for w in words)]
        assert token == allowed[0]
        text += PIECES[token]


def test_a_word_that_was_forced_does_not_end_the_watch() -> None:
    sampler = opened(["ab", "cc"])
    for token in (1, 2, 3):  # a, b: a grammar may write what is banned; then c
        sampler.extend({0: [token]})
    likes_c = np.array([[0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 8]], np.float32)
    assert sampler.sample(likes_c).tokens.tolist() == [0]  # neither c nor cab


def test_ids_beyond_the_tokenizer_show_as_a_replacement_character() -> None:
    sampler = opened(["\N{REPLACEMENT CHARACTER}"], vocab_size=len(PIECES) + 2)
    logits = np.zeros((1, len(PIECES) + 2), np.float32)
    logits[0, -2:], logits[0, 5] = 9, 1
    assert sampler.sample(logits).tokens.tolist() == [5]


def test_every_row_has_a_state_of_its_own() -> None:
    sampler = opened(["ab"], num_slots=3)
    for slot, token in enumerate((1, 2, 4)):
        sampler.extend({slot: [token]})
    likes_b = np.zeros((3, len(PIECES)), np.float32)
    likes_b[:, 2], likes_b[:, 3] = 9, 1
    assert sampler.sample(likes_b).tokens.tolist() == [3, 2, 2]
    sampler.extend({1: [1]})
    sampler.fork(1, 2)
    assert sampler.sample(likes_b).tokens.tolist() == [2, 3, 3]


@pytest.mark.parametrize("words", [["aa"], ["a", "aa"], ["é"], ["abab", "bb", "cé"]])
def test_the_automaton_is_that_of_a_search(words: list[str]) -> None:
    with patch.object(filters, "MAX_LINES", 2):
        automaton = BadWords(words, Vocabulary(PIECES, len(PIECES)))
    rng = np.random.default_rng(0)
    for _ in range(50):
        state, text = 0, b""
        for token in rng.integers(0, len(PIECES), 10).tolist():
            ends = range(len(text) + 1, len(text) + len(PIECES[token]) + 1)
            text += PIECES[token]
            found = any(text[:end].endswith(word.encode()) for end in ends for word in words)
            assert automaton.completes([state, 0])[0, token] == found
            assert automaton._line.cache_info().currsize <= 2
            state = automaton.next_state(state, token)
