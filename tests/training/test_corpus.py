"""What is read as a corpus, what of it is held out, and what is refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.errors import BatchdecodeError
from batcher.training.data import read_corpus, split_text

LINES = st.lists(st.text("ab ", max_size=9).map("{}\n".format)).map("".join)


@given(LINES, st.floats(0.01, 0.5))
def test_a_text_is_its_pieces_and_what_is_held_out_are_whole_lines_in_its_middle(text, holdout):
    before, held_out, after = split_text(text, holdout)
    assert before + held_out + after == text
    if held_out:
        assert before.endswith("\n")
        assert held_out.endswith("\n")


@given(st.integers(200, 400), st.floats(0.05, 0.5))
def test_the_share_that_is_held_out_is_the_one_that_was_asked_for(num_lines, holdout):
    text = "".join(f"{number:04}\n" for number in range(num_lines))
    _, held_out, _ = split_text(text, holdout)
    assert 0 < len(held_out) - holdout * len(text) < 7  # a line has five characters


def test_a_text_of_one_line_holds_nothing_out():
    assert split_text("a long line, and no end", 0.5) == ("a long line, and no end", "", "")


def test_files_of_a_folder_are_texts_in_the_order_of_their_names(tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(f"{name}\n" * 20)
    corpus = read_corpus(tmp_path, 0.1)
    texts = [piece.text[:6] for piece in corpus.training]
    assert texts == ["a.txt\n", "a.txt\n", "b.txt\n", "b.txt\n"]
    assert [piece.is_end for piece in corpus.training] == [False, True] * 2
    assert [piece.text for piece in corpus.held_out] == ["a.txt\n" * 3, "b.txt\n" * 3]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "there is no such file"),
        ("empty.txt", b" \n\n", "it is empty"),
        ("latin.txt", "Grüße".encode("latin-1"), "can't decode byte 0xfc in position 2"),
        ("binary.txt", b"ab\0c", "it holds NUL: it is no text"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BatchdecodeError, match=re.escape(message)) as caught:
        read_corpus(tmp_path / name, 0.1)
    assert name in str(caught.value)


def test_a_folder_without_texts_is_refused(tmp_path):
    (tmp_path / "a.md").write_text("text")
    with pytest.raises(BatchdecodeError, match=r"no file in it that ends in \.txt"):
        read_corpus(tmp_path, 0.1)


def test_a_corpus_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("batcher.training.data.MAX_CORPUS", 10)
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("123456")
    with pytest.raises(BatchdecodeError, match="more than 10 characters"):
        read_corpus(tmp_path, 0.1)
