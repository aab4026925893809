import gzip
import io
import os
import tracemalloc
from contextlib import ExitStack, nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st
from process import lines_of, workload

from batcher.requests.lines import BadLine, RequestParser
from batcher.requests.validation import ModelCapabilities
from cli.commands import show
from cli.run import input as intake
from cli.run.input import (
    FileSource,
    InputError,
    LineReader,
    PipeSource,
    RequestReader,
    open_input,
    open_source,
)
from cli.run.problems import ProblemReport

OPEN = []


@pytest.fixture(autouse=True)
def inputs():
    with ExitStack() as stack:
        OPEN.append(stack)
        yield
        OPEN.pop()


def opened(path):
    return OPEN[-1].enter_context(open_input(str(path), nullcontext))


def source_of(path, *, keep_going=False, follow=False):
    report = ProblemReport(str(path))
    parser = RequestParser(ModelCapabilities(vocab_size=512))
    source = open_source(
        opened(path),
        parser,
        report,
        keep_going=keep_going,
        follow=follow,
        waiting=nullcontext,
        wake=lambda: None,
    )
    return source, report


def ids_of(source):
    entries = []
    while (line := source.next()) is not None:
        bad = isinstance(line, BadLine)
        entries.append((source.input_index, line.id if bad else line.request.id, bad))
    assert source.has_ended
    return entries


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
def test_a_file_is_read_in_order_of_arrival_whatever_its_order(tmp_path, name):
    requests = lines_of(
        {"id": "late", "prompt": "x", "arrival_time": 5},
        "",
        {"id": "first", "prompt": "x"},
        {"id": "also late", "prompt": "x", "arrival_time": 5},
        {"id": "middle", "prompt": "x", "arrival_time": 2.5},
    )
    path = tmp_path / name
    path.write_bytes(gzip.compress(requests) if name.endswith(".gz") else requests)
    source, _ = source_of(path)
    assert isinstance(source, FileSource)
    assert source.total == 4
    assert [entry[:2] for entry in ids_of(source)] == [
        (1, "first"),
        (3, "middle"),
        (0, "late"),
        (2, "also late"),
    ]


@pytest.mark.parametrize("num_kept_bytes", [0, 1, 150, 2**20])
@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
def test_a_file_in_order_is_read_as_it_stands(tmp_path, monkeypatch, name, num_kept_bytes):
    monkeypatch.setattr("cli.run.input._HEAD_BYTES", num_kept_bytes)
    requests = b"\xef\xbb\xbf\n" + lines_of(
        *workload(5, arrivals=lambda i: i // 2), "", {"prompt": "x", "arrival_time": 9}
    )
    path = tmp_path / name
    path.write_bytes(gzip.compress(requests) if name.endswith(".gz") else requests)
    source, _ = source_of(path)
    assert isinstance(source, FileSource)
    ids = ["r0", "r1", "r2", "r3", "r4", "8"]
    assert ids_of(source) == [(place, name, False) for place, name in enumerate(ids)]


def test_a_file_that_becomes_shorter_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("cli.run.input._HEAD_BYTES", 0)
    path = tmp_path / "in"
    path.write_bytes(lines_of(*workload(5)))
    source, _ = source_of(path)
    path.write_bytes(lines_of(*workload(3)))
    with pytest.raises(InputError, match="shorter"):
        list(iter(source.next, None))


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("in_order", [True, False])
def test_a_line_that_changes_after_the_survey_is_an_error(tmp_path, monkeypatch, index, in_order):
    monkeypatch.setattr("cli.run.input._HEAD_BYTES", 0)
    path = tmp_path / "in"
    rows = workload(5, arrivals=(lambda i: i) if in_order else (lambda i: 9 - i))
    path.write_bytes(lines_of(*rows))
    source, _ = source_of(path)
    rows[index] = rows[index] | {"id": "xx"}  # as many bytes
    path.write_bytes(lines_of(*rows))
    with pytest.raises(InputError, match=f"line {index + 1} of the input has changed"):
        list(iter(source.next, None))
    assert source.input_index == index


BAD_FILE = lines_of(
    {"id": "a", "prompt": "x"},
    "nonsense",
    {"id": "a", "prompt": "y"},
    {"id": "b", "prompt": "z", "bad": 1},
    {"prompt": "z"},
)
BAD_ENTRIES = [(0, "a", False), (1, "2", True), (2, "a", True), (3, "b", True), (4, "5", False)]


def test_a_survey_keeps_four_bytes_of_a_line_behind_the_head(tmp_path, monkeypatch):
    monkeypatch.setattr("cli.run.input._HEAD_BYTES", 0)
    path, held = tmp_path / "in", []
    for num_lines in (2000, 4000):
        path.write_bytes(b'{"prompt":"x"}\n' * num_lines)
        tracemalloc.start()
        source, _ = source_of(path)
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert source.total == num_lines
    assert held[1] - held[0] < 5 * 2000


@pytest.mark.parametrize("num_kept_bytes", [0, 30, 2**20])
@pytest.mark.parametrize("in_order", [True, False])
def test_bad_lines_are_skipped_in_place(tmp_path, monkeypatch, in_order, num_kept_bytes):
    monkeypatch.setattr("cli.run.input._HEAD_BYTES", num_kept_bytes)
    path = tmp_path / "in"
    extra = (
        b"" if in_order else lines_of({"id": "x", "prompt": "x", "arrival_time": 9}, *workload(1))
    )
    path.write_bytes(BAD_FILE + extra)
    source, report = source_of(path, keep_going=True)
    assert ids_of(source)[:5] == BAD_ENTRIES
    assert report.num_lines == 3


def pipe_of(data):
    read_end, write_end = os.pipe()
    OPEN[-1].callback(os.close, read_end)
    with os.fdopen(write_end, "wb") as pipe:
        pipe.write(data)
    return f"/dev/fd/{read_end}"


def test_a_pipe_is_read_as_a_file_is():
    source, _ = source_of(pipe_of(BAD_FILE))
    assert isinstance(source, PipeSource)
    assert source.total is None
    assert ids_of(source) == BAD_ENTRIES


def test_on_a_pipe_arrival_times_must_not_go_back():
    requests = [{"id": str(t), "prompt": "x", "arrival_time": t} for t in (0, 2, 1, 2, 3)]
    source, _ = source_of(pipe_of(lines_of(*requests)))
    lines = [source.next() for _ in requests]
    assert [isinstance(line, BadLine) for line in lines] == [False, False, True, True, False]
    problem = lines[2].problems[0]
    assert (problem.code, problem.line, problem.field) == ("arrival-order", 3, "arrival_time")
    assert "sort" in problem.hint


def test_following_a_pipe_gives_what_has_come_and_waits_only_when_told():
    read_end, write_end = os.pipe()
    OPEN[-1].callback(os.close, read_end)
    source, _ = source_of(f"/dev/fd/{read_end}", follow=True)
    assert source.reason == "follow"
    assert source.next() is None
    assert not source.has_ended
    os.write(write_end, lines_of({"id": "a", "prompt": "x"}))
    source.wait()
    assert source.next().request.id == "a"
    os.write(write_end, b'{"id":"b","prompt":"x"}')
    os.close(write_end)
    source.wait()
    assert source.next().request.id == "b"
    source.wait()
    assert source.next() is None
    assert source.has_ended


class Endless(io.RawIOBase):
    """A pipe that never sends the end of its first line."""

    def readable(self):
        return True

    def readinto(self, buffer):
        buffer[:] = b"x" * len(buffer)
        return len(buffer)


@pytest.mark.timeout(10)
def test_a_line_without_an_end_is_a_bad_line_and_then_an_error(monkeypatch):
    monkeypatch.setattr(intake, "MAX_SKIPPED_BYTES", 2**20)
    reader = LineReader([(io.BufferedReader(Endless()), "in", None)], [])
    assert len(reader.read()) == intake.MAX_LINE_BYTES + 1
    for read in (reader.read, lambda: reader.read_block(9)):
        with pytest.raises(InputError, match="line 1 does not end within"):
            read()


@pytest.mark.timeout(10)
def test_a_pipe_that_is_read_twice_may_not_have_a_line_without_an_end(monkeypatch):
    monkeypatch.setattr(show, "MAX_SKIPPED_BYTES", 2**20)
    with pytest.raises(InputError, match="/dev/zero: a line does not end within"):
        show.open_twice("/dev/zero")


def test_a_line_too_long_is_a_bad_line(monkeypatch):
    monkeypatch.setattr(intake, "MAX_LINE_BYTES", 30)
    monkeypatch.setattr("cli.run.input.MAX_LINE_BYTES", 30)
    data = lines_of({"prompt": "x"}, {"prompt": "x" * 100}, {"prompt": "y"})
    reader = LineReader([(io.BufferedReader(io.BytesIO(data)), "in", None)], [])
    requests = RequestReader(reader, RequestParser(ModelCapabilities(vocab_size=512)))
    _, (_, _, too_long), (_, _, last) = requests
    assert too_long.problems[0].code == "line-too-long"
    assert last.request.id == "3"


TURNS = lines_of(
    {"id": "a1", "prompt": "x", "session": "a", "arrival_time": 4},
    {"id": "b1", "prompt": "x", "session": "b", "arrival_time": 4},
    {"id": "a2", "prompt": "x", "session": "a"},
)


def test_the_turns_of_a_session_are_read_in_their_order_whenever_they_arrive(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(TURNS)
    source, _ = source_of(path)
    assert isinstance(source, FileSource)  # none arrives before the one in front of it
    path.write_bytes(TURNS + lines_of({"id": "early", "prompt": "x", "arrival_time": 1}))
    source, _ = source_of(path)
    assert isinstance(source, FileSource)
    assert [entry[1] for entry in ids_of(source)] == ["early", "a1", "b1", "a2"]
    parser = RequestParser(ModelCapabilities())
    stream = io.BufferedReader(io.BytesIO(TURNS))
    pipe = PipeSource(RequestReader(LineReader([(stream, "", None)], []), parser))
    assert [entry[1:] for entry in ids_of(pipe)] == [("a1", False), ("b1", False), ("a2", False)]


# -- lines -----------------------------------------------------------------------------------------


def read_all(data):
    notes = []
    reader = LineReader([(io.BufferedReader(io.BytesIO(data)), "in", None)], notes)
    lines = []
    while (line := reader.read()) is not None:
        lines.append((reader.number, reader.start, line))
    return lines, reader.num_blank, notes


@pytest.mark.parametrize(
    ("data", "lines", "num_blank"),
    [
        (b"", [], 0),
        (b"a", [(1, 0, b"a")], 0),
        (b"\na\n \t\r\n\nb", [(2, 1, b"a\n"), (5, 8, b"b")], 3),
        (b"a\r\nb\r\n", [(1, 0, b"a\r\n"), (2, 3, b"b\r\n")], 0),
        (b"\xef\xbb\xbfa\nb", [(1, 3, b"a\n"), (2, 5, b"b")], 0),
        (b"\xef\xbb\xbf\nb", [(2, 4, b"b")], 1),
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
    reader = LineReader([(io.BufferedReader(io.BytesIO(data), buffer_size), "in", None)], notes)
    found = []
    while (block := reader.read_block(most)).texts:
        assert len(block.texts) <= most
        found += zip(block.numbers, block.texts, strict=True)
    lines, num_blank, expected_notes = read_all(data)
    assert found == [(number, line) for number, _, line in lines]
    assert reader.number == len(io.BytesIO(data).readlines())
    assert (reader.num_blank, notes) == (num_blank, expected_notes)


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
