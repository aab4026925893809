"""Streamed text: never taken back, never late, and in the end the text of the result."""

from itertools import product
from os.path import commonprefix

import pytest
from examples import mostly_heavy
from random_automata import IDS, LONE, NOTHING, PIECES, random_case
from slow_automaton import SlowReader

from batcher.decoding.stop_matcher import TextStream
from batcher.decoding.stops import END, Exit, StopAutomaton, StopProgress, StopReader
from batcher.errors import InvariantError
from batcher.models.tokenizers import ByteTokenizer

WAIT = [NOTHING] * 6  # until every min_tokens is reached
ENDINGS = [
    [*tokens[:-1], *waiting, *tokens[-1:]]
    for tokens in [
        (),
        *(tokens for size in (1, 2, 3) for tokens in product(LONE, repeat=size)),
        *(tokens for size in (1, 2) for tokens in product(IDS, repeat=size)),
    ]
    for waiting in ([], WAIT)
]


def decoded(text):
    return text.decode("utf-8", "replace")


def stops(*patterns):
    """An automaton that ends at these."""
    return StopAutomaton(
        (
            tuple(
                Exit(given.encode() if isinstance(given, str) else given, END, given)
                for given in patterns
            ),
        )
    )


class Told:
    """The text of a stream without segments."""

    def __init__(self, automaton, tokenizer, **settings):
        self.stream = TextStream(automaton, tokenizer, **settings)

    def push(self, token_id):
        return "".join(piece.text for piece in self.stream.push(token_id))

    def finish(self):
        return "".join(piece.text for piece in self.stream.finish())


class Futures:
    """What an output may still become, found by trying what may follow."""

    def __init__(self, case):
        self.min_tokens = case.min_tokens
        self.ending = StopReader(case.automaton, PIECES.token_bytes)
        self.endless = StopReader(case.automaton.endless, PIECES.token_bytes)
        self.progress = StopProgress(skip=case.skip)
        self.num_tokens = 0

    def read(self, token_id):
        self.num_tokens += 1
        reader = self.endless if self.num_tokens < self.min_tokens else self.ending
        self.progress = reader.read(self.progress, token_id).progress

    def certain(self, text, *, until_left):
        """What all texts that begin as `text` have in common; perhaps until the state is left."""
        return commonprefix(  # noqa: RUF071 - of texts, character by character
            [decoded(self.text_with(ending, text, until_left=until_left)) for ending in ENDINGS]
        )

    def text_with(self, tokens, text, *, until_left):
        progress = self.progress
        for number, token_id in enumerate(tokens, self.num_tokens + 1):
            reader = self.endless if number < self.min_tokens else self.ending
            token = reader.bytes_of(token_id)[progress.skip :]
            progress, matches = reader.read(progress, token_id)
            for match in matches:
                if until_left or match.exit.target == END:
                    end = len(text) + match.end
                    return (text + token)[: max(0, end - match.size)]
            text += token
        return text


@pytest.mark.parametrize("block", mostly_heavy(range(8), 0))
def test_exactly_what_is_certain_has_been_told_at_every_time(block):
    """What no continuation takes back is told; what one takes back is not."""
    for seed in range(block * 12, block * 12 + 12):
        case = random_case(seed)
        if case.automaton.names:
            continue
        slow = SlowReader(case.automaton, PIECES, case.skip, case.min_tokens)
        stream = Told(case.automaton, PIECES, skip=case.skip, min_tokens=case.min_tokens)
        futures = Futures(case)
        told = ""
        for token_id in case.tokens:
            slow.read(token_id)
            told += stream.push(token_id)
            futures.read(token_id)
            if slow.has_ended:
                break
            assert told == futures.certain(slow.text, until_left=False), (seed, slow.tokens)
        assert told + stream.finish() == decoded(slow.final_text())


@pytest.mark.parametrize("block", mostly_heavy(range(8), 0))
def test_so_it_is_with_each_segment(block):
    for seed in range(block * 12, block * 12 + 12):
        case = random_case(seed)
        if not case.automaton.names:
            continue
        slow = SlowReader(case.automaton, PIECES, case.skip, case.min_tokens)
        stream = TextStream(case.automaton, PIECES, skip=case.skip, min_tokens=case.min_tokens)
        futures = Futures(case)
        pieces = []
        for token_id in case.tokens:
            slow.read(token_id)
            pieces += stream.push(token_id)
            futures.read(token_id)
            if slow.has_ended:
                break
            told = "".join(piece.text for piece in pieces if piece.segment == len(slow.found))
            here = slow.text[slow.entered_at :]
            assert told == futures.certain(here, until_left=True), (seed, slow.tokens)
        assert_segments_told([*pieces, *stream.finish()], slow)


def assert_segments_told(pieces, slow):
    for stay, (state, text, _) in enumerate(slow.segments()):
        of_stay = [piece for piece in pieces if piece.segment == stay]
        assert "".join(piece.text for piece in of_stay) == decoded(text)
        assert {piece.state for piece in of_stay} <= {state}


BYTES = ByteTokenizer()


def test_a_bad_character_is_told_once_it_is_bad_either_way():
    stream = Told(stops("xy"), BYTES)
    assert [stream.push(byte) for byte in b"\xc3xz"] == ["", "\ufffd", "xz"]


def test_nothing_comes_after_the_end():
    stream = Told(stops("a"), BYTES)
    assert stream.push(97) + stream.finish() == ""
    with pytest.raises(InvariantError):
        stream.push(97)
