"""Stops: which one wins, what the text keeps, and that the table agrees with the definition."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ENGLISH, TINY, Decoded, decode_alone, tiny_model

from batcher import Request, decode
from batcher.decoding import stop_table
from batcher.decoding.stop_table import StopTable
from batcher.decoding.stops import StopSet, find_match, stop_set
from batcher.models.callable import ByteTokenizer, CallableModel

BYTES = ByteTokenizer()


class Pieces:
    """A tokenizer whose tokens are pieces of words and of characters; id 0 is EOS."""

    token_bytes = (b"", b"ab", b"a", b"b", b"c", b"abc", b"bca", b"\xc3", b"\xa9", b"xx", b"cab")

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError


def scripted(output: list[int], eos_token_id: int = 0, **fields: object) -> Decoded:
    """What a model that writes `output` is given for a request with these stops."""

    class Model(CallableModel):
        def __init__(self) -> None:
            super().__init__(lambda prefixes: [output[len(prefix)] for prefix in prefixes])
            self.tokenizer = Pieces()
            self.vocab_size, self.eos_token_id = len(Pieces.token_bytes), eos_token_id

    request = Request(prompt=[], **{"max_tokens": len(output), **fields})
    [result] = decode([request], model=Model(), batch_size=2)
    return Decoded(result.tokens, result.text, result.finish_reason, result.stop_reason)


CASES = [
    # output, stops, tokens kept, text, stop_reason (... if it ends by length)
    ([2, 3, 4], {"stop_token": 3}, 2, "a", 3),
    ([2, 3, 4], {"stop_token": [4, 3]}, 2, "a", 3),
    ([2, 2, 2, 3], {"stop_sequence": [2, 2, 3]}, 4, "a", [2, 2, 3]),
    ([2, 3, 4], {"stop_sequence": [[3, 4], [2, 3]]}, 2, "", [2, 3]),
    ([2, 3, 4], {"stop_sequence": [[2, 3, 4, 4], [5]]}, 3, "abc", ...),  # longer than the output
    ([2, 3, 4], {"stop_sequence": [3, 4]}, 3, "a", [3, 4]),  # with the last allowed token
    ([2, 3, 4], {"stop_token": 4, "stop_sequence": [3, 4]}, 3, "a", [3, 4]),  # the longest
    ([2, 3, 4], {"stop_token": 4, "stop": "c"}, 3, "ab", 4),  # equally long: stop_token first
    ([2, 3, 4], {"stop_sequence": ["c"], "stop": ["c"]}, 3, "ab", "c"),
    ([2, 3, 4], {"stop": ["c", "bc"]}, 3, "a", "bc"),
    (
        [2, 5, 4],
        {"stop": ["bc", "aab", "b"]},
        2,
        "",
        "aab",
    ),  # the earliest byte: "aab" and "b" end there
    ([2, 5, 4], {"stop": ["c", "b"]}, 2, "aa", "b"),
    (
        [2, 5, 4],
        {"stop_token": 5, "stop": "b"},
        2,
        "aa",
        "b",
    ),  # inside the token, so before its end
    ([4, 6, 3], {"stop": "cb"}, 2, "", "cb"),  # across a border
    ([10, 1, 4], {"stop": "babc"}, 3, "ca", "babc"),
    ([2, 7, 8, 3], {"stop": "é"}, 3, "a", "é"),  # a character in two tokens
    ([2, 7, 3, 8], {"stop": "é"}, 4, "a\ufffdb\ufffd", ...),
    ([2, 7, 8], {"stop_token": 8}, 3, "a\ufffd", 8),  # the stop cuts a character in two
    ([2, 0, 3], {}, 2, "a", None),
    ([2, 0, 3], {"ignore_eos": True}, 3, "ab", ...),
    ([2, 0, 3], {"stop_token": 0}, 2, "a", 0),  # what the request names goes before EOS
    ([2, 0, 3], {"stop_sequence": [2, 0]}, 2, "", [2, 0]),
    ([2, 0, 3], {"ignore_eos": True, "stop_token": [0]}, 2, "a", 0),
    ([2, 4, 3], {"eos_token_id": 4}, 2, "a", None),
    ([2, 4, 3], {"eos_token_id": 4, "stop": "c"}, 2, "a", "c"),
    ([2, 4, 3], {"eos_token_id": 4, "stop_sequence": ["c"]}, 2, "a", "c"),
    ([2, 4, 3], {"eos_token_id": 4, "stop": "ac"}, 2, "", "ac"),
    ([9, 9, 9], {"stop": "xxx"}, 2, "", "xxx"),
    ([2, 2, 3], {"stop": "aab", "stop_sequence": [2, 3]}, 3, "", "aab"),
]


@pytest.mark.parametrize(("output", "stops", "num_tokens", "text", "reason"), CASES)
def test_which_stop_wins(
    output: list[int], stops: dict, num_tokens: int, text: str, reason: object
) -> None:
    finish = "length" if reason is ... else "stop"
    expected = Decoded(output[:num_tokens], text, finish, None if reason is ... else reason)
    assert scripted(output, **stops) == expected


def test_a_stop_never_looks_into_the_prompt() -> None:
    request = Request(prompt=[97, 97], max_tokens=3, stop_sequence=[97, 97, 97])
    [result] = decode([request], model=lambda prefixes: [97 for _ in prefixes])
    assert (len(result.tokens), result.finish_reason) == (3, "stop")
    short = Request(prompt=[97, 97], max_tokens=2, stop_sequence=[97, 97, 97])
    assert (
        decode([short], model=lambda prefixes: [97 for _ in prefixes])[0].finish_reason == "length"
    )


def test_stop_sequence_in_all_its_forms() -> None:
    forms = [[1, 2], [[1, 2], [3]], "ab", ["ab", "c"]]
    sets = [stop_set(Request(prompt="", stop_sequence=form), None) for form in forms]
    assert [(stops.sequences, stops.texts) for stops in sets] == [
        (((1, 2),), ()),
        (((1, 2), (3,)), ()),
        ((), ("ab",)),
        ((), ("ab", "c")),
    ]


letters = st.sampled_from([97, 98, 99, 0xC3, 0xA9])
id_stops = st.lists(st.lists(letters, min_size=1, max_size=4), max_size=3)
text_stops = st.lists(st.text("abcé", min_size=1, max_size=4), max_size=3)
stop_sets = st.builds(
    lambda ids, texts, eos: StopSet((), tuple(map(tuple, ids)), tuple(texts), eos),
    id_stops,
    text_stops,
    st.sampled_from([None, 98, 500]),
)


@given(st.data(), st.sampled_from([None, 256, 600, 5000]))
@settings(max_examples=150, deadline=None)
def test_the_table_matches_when_the_definition_does(
    data: st.DataObject, vocab_size: int | None
) -> None:
    """Rows come and go, and in so small a table sets are dropped and moved under running rows."""
    with patch.object(stop_table, "MIN_LINES", 3):
        table = StopTable(3, vocab_size, BYTES)
    rows: list[tuple[StopSet, list[int]] | None] = [None] * 3
    large = st.sampled_from([97, 98, 255, 256, 599] if vocab_size != 256 else [97, 98, 255])
    for _ in range(data.draw(st.integers(1, 25))):
        for slot in range(3):
            if rows[slot] is None and data.draw(st.booleans()):
                stops = data.draw(stop_sets)
                if vocab_size == 256 and stops.eos_token_id == 500:
                    continue
                table.open(slot, stops)
                rows[slot] = (stops, [])
        tokens = [data.draw(letters | large) for _ in range(3)]
        matched = table.advance(np.array(tokens))
        expected = []
        for slot, row in enumerate(rows):
            if row is not None:
                row[1].append(tokens[slot])
                if find_match(row[0], row[1], BYTES) is not None:
                    expected.append(slot)
        assert sorted({slot for slot in matched if rows[slot]}) == expected
        for slot in expected:
            table.close(slot)
            rows[slot] = None


@pytest.mark.parametrize("vocab_size", [None, 256, 5000])
def test_a_row_keeps_its_state_when_the_table_moves_under_it(vocab_size: int | None) -> None:
    with patch.object(stop_table, "MIN_LINES", 3):
        table = StopTable(3, vocab_size, BYTES)
    table.open(0, StopSet(sequences=((9, 9),)))
    table.open(1, StopSet(sequences=((97, 98, 99),), texts=("xyz",)))
    assert table.advance(np.array([8, 97, 0])) == []
    assert table.advance(np.array([8, 98, 0])) == []
    table.close(0)
    table.open(0, StopSet(sequences=((1, 2, 3, 4, 5, 6, 7),), texts=("a" * 20,)))
    assert table.advance(np.array([8, 99, 0])) == [1]


@pytest.mark.parametrize("vocab_size", [None, 256, 5000])
def test_so_does_one_that_stops_at_text(vocab_size: int | None) -> None:
    with patch.object(stop_table, "MIN_LINES", 3):
        table = StopTable(2, vocab_size, BYTES)
    table.open(1, StopSet(texts=("abc",)))
    assert table.advance(np.array([0, 97])) == []
    assert table.advance(np.array([0, 98])) == []
    table.open(0, StopSet(texts=("a" * 20,)))
    assert table.advance(np.array([0, 99])) == [1]


def test_a_long_stream_of_distinct_sets_reuses_the_table() -> None:
    table = StopTable(4, 512, ENGLISH.tokenizer)
    for number in range(2000):
        slot = number % 4
        table.close(slot)
        table.open(slot, StopSet(sequences=((number % 500, number % 7, number % 11),)))
    assert len(table._ids._table) <= 128


def test_long_stops_of_both_kinds_take_room_for_each_and_not_for_every_pair() -> None:
    table = StopTable(1, 512, ENGLISH.tokenizer)
    table.open(0, StopSet(sequences=((99,) * 400,), texts=("a" * 400,)))
    assert len(table._ids._table) + len(table._texts._table) < 2000


@pytest.mark.parametrize("stop_token", [2**31 - 1, [5, 10_000_000]])
def test_a_huge_id_takes_no_more_room_than_a_small_one(stop_token: int | list[int]) -> None:
    request = Request(prompt="", max_tokens=2, stop_token=stop_token)
    [result] = decode([request], model=lambda prefixes: [[7, 10_000_000][len(p)] for p in prefixes])
    assert (result.finish_reason == "stop") == (stop_token != 2**31 - 1)


def test_an_id_larger_than_every_stop_matches_nothing() -> None:
    request = Request(prompt="", max_tokens=3, stop_token=[70_000, 98])
    [result] = decode(
        [request], model=lambda prefixes: [[99, 80_000, 70_000][len(p)] for p in prefixes]
    )
    assert (result.tokens, result.stop_reason) == ([99, 80_000, 70_000], 70_000)


def test_the_reference_itself_stops_early() -> None:
    """The brute force the other tests lean on does find stops."""
    request = Request(prompt="", max_tokens=30, stop="aa")
    alone = decode_alone(request, TINY)
    assert alone.finish_reason == "stop"
    assert decode([request], model=tiny_model())[0].text == alone.text
