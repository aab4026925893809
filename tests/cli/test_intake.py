import gzip
import io
import os
import threading
from contextlib import ExitStack, nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.run import input as intake
from cli.run.input import InputError, LineReader, open_input


def read_all(data):
    notes = []
    reader = LineReader(io.BufferedReader(io.BytesIO(data)), "in", notes)
    lines = []
    while (line := reader.read()) is not None:
        lines.append((reader.number, reader.start, line))
    return lines, reader.num_blank, notes


@pytest.mark.parametrize(
    ("data", "lines", "num_blank"),
    [
        (b"", [], 0),
        (b"\n\n", [], 2),
        (b"a", [(1, 0, b"a")], 0),
        (b"a\nb\n", [(1, 0, b"a\n"), (2, 2, b"b\n")], 0),
        (b"\na\n \t\r\n\nb", [(2, 1, b"a\n"), (5, 8, b"b")], 3),
        (b"a\r\nb\r\n", [(1, 0, b"a\r\n"), (2, 3, b"b\r\n")], 0),
        (b"\xef\xbb\xbfa\nb", [(1, 3, b"a\n"), (2, 5, b"b")], 0),
        (b"\xef\xbb\xbf\nb", [(2, 4, b"b")], 1),
        (b"\xef\xbb\xbf", [], 1),
        (b"a\n\xef\xbb\xbfb", [(1, 0, b"a\n"), (2, 2, b"\xef\xbb\xbfb")], 0),
    ],
)
def test_lines_are_numbered_and_placed_and_blank_ones_skipped(data, lines, num_blank):
    assert read_all(data)[:2] == (lines, num_blank)


@given(
    pieces=st.lists(
        st.sampled_from([b"a\n", b"bb b\n", b"\n", b" \t\r\n", b"c\rc\r\n", b"\xef\xbb\xbf"])
    ),
    last=st.sampled_from([b"", b"z", b" "]),
    buffer_size=st.integers(1, 20),
    most=st.integers(1, 4),
)
def test_blocks_of_lines_are_the_lines(pieces, last, buffer_size, most):
    data, notes = b"".join(pieces) + last, []
    reader = LineReader(io.BufferedReader(io.BytesIO(data), buffer_size), "in", notes)
    found = []
    while (block := reader.read_block(most)).texts:
        assert len(block.texts) <= most
        found += zip(block.numbers, block.texts, strict=True)
    lines, num_blank, expected_notes = read_all(data)
    assert found == [(number, line) for number, _, line in lines]
    assert reader.number == len(io.BytesIO(data).readlines())
    assert (reader.num_blank, notes) == (num_blank, expected_notes)


def test_a_block_of_a_pipe_is_what_has_come():
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb", buffering=0) as pipe, os.fdopen(reader, "rb") as stream:
        lines = LineReader(stream, "in", [])
        pipe.write(b"1\n2\n3\n4")
        assert lines.read_block(9) == ([1], [b"1\n"])
        assert lines.read_block(9) == (range(2, 4), [b"2\n", b"3\n"])


def test_a_line_that_is_too_long_is_cut_and_the_next_one_is_found(monkeypatch):
    monkeypatch.setattr(intake, "MAX_LINE_BYTES", 5)
    monkeypatch.setattr(intake, "CHUNK_BYTES", 3)
    lines, _, _ = read_all(b"12345\n" + b"x" * 100 + b"\nb\n")
    assert [line for _, _, line in lines] == [b"12345\n", b"xxxxxx", b"b\n"]
    assert lines[-1][1] == 107


def test_the_rest_of_a_line_that_is_too_long_may_be_damaged(monkeypatch, tmp_path):
    monkeypatch.setattr(intake, "MAX_LINE_BYTES", 5)
    path = tmp_path / "in.gz"
    path.write_bytes(gzip.compress(os.urandom(10**6).hex().encode())[:-20])
    lines = opened(path).lines()
    lines.read()
    with pytest.raises(
        InputError, match=r"cannot read .* after line 1: the compressed data is cut"
    ):
        lines.read()


def test_a_pipe_that_does_not_block_is_waited_for():
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    threading.Timer(0.1, lambda: (os.write(write_end, b"a\n"), os.close(write_end))).start()
    reader = opened(f"/dev/fd/{read_end}").lines()
    assert (reader.read(), reader.read()) == (b"a\n", None)
    os.close(read_end)


@pytest.fixture(autouse=True)
def inputs():
    with ExitStack() as stack:
        OPEN.append(stack)
        yield
        OPEN.pop()


OPEN = []


def opened(path):
    return OPEN[-1].enter_context(open_input(str(path), nullcontext))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.symlink_to(path), "symbolic links"),
    ],
)
def test_what_cannot_be_opened_is_an_error_that_says_why(tmp_path, make, reason):
    path = tmp_path / "in.jsonl"
    make(path)
    with pytest.raises(InputError, match=f"cannot read {path}.*{reason}"):
        opened(path)


def test_what_is_no_file_but_a_workload_for_compare_and_plan_is_told_so():
    with pytest.raises(InputError, match="only compare and plan take synthetic:, whose requests"):
        open_input("synthetic:rate=5", nullcontext)
