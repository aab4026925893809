"""Drafts from texts: the search is that of a reader, and files are read or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from drafting import Drafting
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batcher.errors import BatchdecodeError, InvariantError
from batcher.models.tokenizers import ByteTokenizer, WordTokenizer
from batcher.speculation import datastore, texts
from batcher.speculation.datastore import Datastore
from batcher.speculation.loading import make_text_drafter
from batcher.speculation.lookup import LookupDrafter
from batcher.speculation.proposal import Proposal
from batcher.speculation.spec import LookupDraft, NgramDraft, SuffixDraft
from batcher.speculation.suffix import SuffixDrafter
from batcher.speculation.texts import read_texts

TEXTS = [[0, 1, 2, 3, 0, 1, 2, 2, 1, 0], [2], [3, 3, 3, 1, 2, 3, 0, 0], [1, 2, 0, 3] * 6]


def search(store: list[list[int]], tokens: list[int], number: int) -> list[int]:
    """Return what follows the longest end of `tokens` most often, by looking everywhere."""
    for length in range(min(16, len(tokens)), 0, -1):
        end = tokens[-length:]
        rests = [
            text[place:]
            for text in store
            for place in range(length, len(text))
            if text[place - length : place] == end
        ]
        if rests:
            break
    else:
        return []
    draft: list[int] = []
    while len(draft) < number and (rests := [rest for rest in rests if rest]):
        heads = [rest[0] for rest in rests]
        draft.append(max(heads, key=lambda token: (heads.count(token), -heads.index(token))))
        rests = [rest[1:] for rest in rests if rest[0] == draft[-1]]
    return draft


class LookupDrafting(Drafting):
    def make_drafter(self) -> LookupDrafter:
        return LookupDrafter(Datastore(TEXTS))

    def expected(self, slot: int, number: int) -> list[int]:
        return search(TEXTS, self.rows[slot], number)


TestLookupDrafting = LookupDrafting.TestCase
TestLookupDrafting.settings = examples(45)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), max_size=30),
    st.integers(1, 9),
)
@examples(200)
def test_it_finds_what_a_reader_finds(
    store: list[list[int]], tokens: list[int], number: int
) -> None:
    assert Datastore(store).continuation(tokens, number) == search(store, tokens, number)


def test_a_long_end_is_looked_for_as_far_as_sixteen_tokens() -> None:
    end = list(range(100, 116))
    store = Datastore([[7, *end, 1, 2], [8, *end, 3, 4], [9, *end[1:], 5], [9, *end[1:], 5]])
    assert store.continuation(end, 2) == [1, 2]
    assert store.continuation([8, *end], 2) == [1, 2], "the token before is not looked at"
    assert store.continuation([0, *end[1:]], 2) == [5]
    assert store.continuation([], 3) == []


def test_of_many_places_some_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datastore, "_MAX_PLACES", 8)
    often, seldom = [[1, 2]] * 80, [[1, 3]] * 20
    assert Datastore(often + seldom).continuation([1], 1) == [2]
    assert len(Datastore(often)._find([1])) <= 8


def test_a_slot_has_one_row() -> None:
    drafter = LookupDrafter(Datastore([[1]]))
    drafter.open(0, [1])
    with pytest.raises(InvariantError):
        drafter.open(0, [2])


def texts_of(path: Path, content: bytes, vocab_size: int | None = 256) -> list[list[int]]:
    path.write_bytes(content)
    return [list(tokens) for tokens in read_texts(str(path), ByteTokenizer(), vocab_size)]


def lines_of(*lines: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def test_a_file_is_one_text_however_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_PART", 10)
    content = "one\ntwo three four five six seven\neight\n\N{SNOWMAN}".encode()
    assert texts_of(tmp_path / "text.txt", content) == [list(content)]


def test_lines_of_json_are_texts_each(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = (
        {"id": "a", "text": "no", "tokens": [5, 6], "usage": {"prompt_tokens": 3}},
        {"text": "hi", "prompt": "no"},
        {"prompt": "go", "max_tokens": 9},
        {"prompt": [1, 2]},
        {"tokens": []},
    )
    content = lines_of(*lines) + b"\n  \n"
    assert texts_of(path, content) == [[5, 6], list(b"hi"), list(b"go"), [1, 2]]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b"", "there is no text in it"),
        ("empty.jsonl", b"\n\n", "there is no text in it"),
        ("odd.txt", b"a\xffb", "can't decode byte 0xff in position 1"),
        ("odd.jsonl", b'{"text": "\xc3"}', "can't decode byte 0xc3"),
        ("no.jsonl", lines_of({"text": "a"}) + b"hello", "line 2: JSON is malformed"),
        ("list.jsonl", lines_of([1, 2]), "line 1: Expected `object`"),
        ("other.jsonl", lines_of({"content": "a"}), "line 1: there is no tokens, text or prompt"),
        ("kind.jsonl", lines_of({"text": 5}), "line 1: Expected `str | null`"),
        ("segments.jsonl", lines_of({"prompt": [{"length": 3}]}), "line 1: Expected `int`"),
        ("low.jsonl", lines_of({"tokens": [-1]}), "line 1: Expected `int` >= 0"),
        ("high.jsonl", lines_of({"tokens": [2**31]}), "line 1: Expected `int` <= 2147483647"),
        ("vocab.jsonl", lines_of({"tokens": [256]}), "line 1: token 256 is none of the model"),
        ("deep.jsonl", b'{"text":' + b"[" * 10_000, "line 1"),
        ("lone.jsonl", rb'{"text": "\ud800"}', "line 1"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    with pytest.raises(BatchdecodeError) as error:
        texts_of(tmp_path / name, content)
    assert words in str(error.value)
    assert str(error.value).startswith(str(tmp_path / name))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.txt", tmp_path):
        with pytest.raises(BatchdecodeError, match="there is no such file"):
            read_texts(str(path), ByteTokenizer(), None)


def test_a_huge_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_TOKENS", 5)
    assert texts_of(tmp_path / "five.txt", b"12345") == [list(b"12345")]
    with pytest.raises(BatchdecodeError, match="more than 5 tokens"):
        texts_of(tmp_path / "six.jsonl", lines_of({"text": "123"}, {"text": "456"}))
    monkeypatch.setattr(texts, "MAX_BYTES", 4)
    with pytest.raises(BatchdecodeError, match="more than 4 bytes"):
        texts_of(tmp_path / "five.txt", b"12345")


def test_a_record_becomes_its_drafter(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("The brave cat found the river. ", encoding="utf-8")
    tokenizer = WordTokenizer()
    lookup = make_text_drafter(LookupDraft(str(path)), tokenizer, 512)
    lookup.open(0, tokenizer.encode("A cat found"))
    assert lookup.propose({0: 2}) == {0: Proposal(tokenizer.encode(" the river"))}
    ngram = make_text_drafter(NgramDraft(1), tokenizer, 512)
    ngram.open(0, [1, 2, 3, 2, 1, 2])
    assert ngram.propose({0: 1}) == {0: Proposal([1])}, "by the last token alone"
    assert isinstance(make_text_drafter(SuffixDraft(), tokenizer, 512), SuffixDrafter)
