import gzip
import io
import json
import os
import zlib
from threading import Thread
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from process import batchdecode

from batcher.events import EndEvent, TokenEvent
from batcher.formats.trace import encode_event
from cli.running.answers import Answer
from cli.running.files import check_distinct, check_writable
from cli.running.input_order import InputOrder
from cli.running.output import (
    FileSink,
    GzipSink,
    OutputError,
    ResultWriter,
    TraceWriter,
    WriteError,
    open_sink,
)


@given(st.permutations(range(25)), st.integers(0, 25), st.sampled_from([0, 12, 50, 10**6]))
def test_lines_come_out_in_order_however_little_is_held_in_memory(order, num_put, max_held_bytes):
    lines = {index: b"%d" % index * (index % 4 + 1) + b"\n" for index in order}
    put = order[:num_put]
    held = InputOrder(0, max_held_bytes)
    out = [line for index in put for line in held.put(index, lines[index])]
    first_missing = min(set(range(26)) - set(put))
    assert out == [lines[index] for index in range(first_missing)]
    out += held.rest()
    held.close()
    assert out == [lines[index] for index in sorted(put)]


def test_the_order_can_begin_later():
    held = InputOrder(3)
    assert held.put(4, b"4") == []
    assert held.put(3, b"3") == [b"3", b"4"]


class FullDisk(io.FileIO):
    """A file with room for 25 bytes."""

    def write(self, data):
        room = 25 - self.tell()
        if room <= 0:
            raise OSError(28, "No space left on device")
        return super().write(data[:room])


def part(place, index=0, *, is_last=True):
    """Return an answer that stands for a result with this index."""
    return Answer(place, [SimpleNamespace(index=index)], rank=index, is_last=is_last)


def encode(answer):
    """Return the place and the index of an answer, in 10 characters and a newline."""
    return b"%9d%d\n" % (answer.place, answer.results[0].index)


def test_results_are_in_the_file_as_soon_as_they_are_written(tmp_path):
    path = tmp_path / "out"
    writer = ResultWriter(open_sink(str(path)), encode)
    for place in (1, 0):
        writer.write([part(place)])
        assert path.read_bytes().endswith(encode(part(place)))
    writer.close()
    assert (path.read_bytes(), writer.num_written) == (encode(part(1)) + encode(part(0)), 2)


def test_in_the_order_of_the_input_a_request_is_written_when_it_is_complete():
    log = Log()
    writer = ResultWriter(log, encode, InputOrder())
    writer.write([part(1), part(0, 2, is_last=False), part(2, 0, is_last=False)])
    writer.write([part(0, 0, is_last=False)])
    assert log.writes == []
    writer.write([part(0, 1)])
    first = [part(0, 0), part(0, 1), part(0, 2), part(1)]
    assert log.writes == [b"".join(map(encode, first))]
    assert writer.num_written == 4
    writer.write([part(2, 1)])
    assert log.writes[1:] == [encode(part(2, 0)) + encode(part(2, 1))]


def test_what_is_held_back_at_the_end_is_written_in_order_too():
    log = Log()
    writer = ResultWriter(log, encode, InputOrder())
    parts = [part(4), part(0, 1, is_last=False), part(2, 1, is_last=False), part(3)]
    writer.write([*parts, part(2, 0, is_last=False)])
    assert log.writes == []
    writer.finish()
    rest = [part(0, 1), part(2, 0), part(2, 1), part(3), part(4)]
    assert b"".join(log.writes) == b"".join(map(encode, rest))
    assert writer.num_written == 5
    writer.close()


def test_token_events_are_written_at_once_and_are_no_results():
    log = Log()
    writer = ResultWriter(log, encode)
    writer.write_tokens([TokenEvent(3, "a", 0, [5], "x"), TokenEvent(3, "b", 1, [], "", "normal")])
    assert b"".join(log.writes) == (
        b'{"event":"token","step":3,"id":"a","index":0,"tokens":[5],"text":"x"}\n'
        b'{"event":"token","step":3,"id":"b","index":1,"tokens":[],"text":"","state":"normal"}\n'
    )
    assert (writer.num_written, writer.num_token_events) == (0, 2)


def test_results_go_into_a_pipe_at_once():
    written = []

    class Pipe:
        def write(self, lines):
            written.append(lines)

    writer = ResultWriter(Pipe(), encode)
    for place in range(2):
        writer.write([part(place)])
    assert written == [encode(part(0)), encode(part(1))]


def test_a_full_disk_takes_the_results_there_is_room_for(tmp_path):
    path = tmp_path / "out"
    writer = ResultWriter(FileSink(FullDisk(path, "w"), "out"), encode)
    with pytest.raises(WriteError, match="No space left"):
        writer.write([part(0), part(1), part(2)])
    assert path.read_bytes() == encode(part(0)) + encode(part(1))
    assert writer.num_written == 2
    writer.close()
    assert path.read_bytes() == encode(part(0)) + encode(part(1))


def test_a_full_disk_takes_all_results_of_a_request_or_none(tmp_path):
    path = tmp_path / "out"
    writer = ResultWriter(FileSink(FullDisk(path, "w"), "out"), encode, InputOrder())
    with pytest.raises(WriteError, match="No space left"):
        writer.write([part(1, 1, is_last=False), part(1, 0), part(0, 1, is_last=False), part(0)])
    assert path.read_bytes() == encode(part(0, 0)) + encode(part(0, 1))
    assert writer.num_written == 2
    writer.close()


def test_a_file_on_a_full_disk_ends_with_a_whole_line(tmp_path):
    path = tmp_path / "out"
    sink = FileSink(FullDisk(path, "w"), "out")
    sink.write(b"0123456789\n")
    sink.write(b"abc\n")
    with pytest.raises(WriteError, match="cannot write out: No space left on device"):
        sink.write(b"0123456789\nx\n")
    sink.close()
    assert path.read_bytes() == b"0123456789\nabc\n"


def test_a_pipe_that_takes_little_at_a_time_gets_everything():
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    sink = FileSink(io.FileIO(write_end, "w"), "pipe")
    pieces = []

    def read():
        while piece := os.read(read_end, 10_000):
            pieces.append(piece)

    reader = Thread(target=read)
    reader.start()
    sink.write(b"x" * 300_000)
    sink.close()
    reader.join()
    os.close(read_end)
    assert b"".join(pieces) == b"x" * 300_000


def test_compressed_lines_can_be_read_as_soon_as_they_are_written(tmp_path):
    path = tmp_path / "out.gz"
    sink = open_sink(str(path))
    sink.write(b"one\n")
    assert zlib.decompressobj(31).decompress(path.read_bytes()) == b"one\n"
    sink.write(b"two\n")
    sink.close()
    assert gzip.decompress(path.read_bytes()) == b"one\ntwo\n"


def test_appending_nothing_to_a_compressed_file_leaves_it_as_it_is(tmp_path):
    path = tmp_path / "out.gz"
    path.write_bytes(gzip.compress(b"one\n"))
    before = path.read_bytes()
    open_sink(str(path), append=True).close()
    assert path.read_bytes() == before
    sink = open_sink(str(path), append=True)
    assert isinstance(sink, GzipSink)
    sink.write(b"two\n")
    sink.close()
    assert gzip.decompress(path.read_bytes()) == b"one\ntwo\n"


@pytest.mark.parametrize("name", ["missing/out", "."])
def test_what_cannot_be_opened_is_an_error(tmp_path, name):
    with pytest.raises(OutputError, match="cannot write"):
        open_sink(str(tmp_path / name))


class Log:
    """A sink that remembers its writes."""

    def __init__(self):
        self.writes = []

    def write(self, lines):
        self.writes.append(lines)

    def close(self):
        self.writes.append(None)


def test_a_trace_is_written_five_times_a_second():
    now, log = 0.0, Log()
    event = EndEvent(1, 1.0, 1, 1)
    line = encode_event(event)
    writer = TraceWriter(log, clock=lambda: now)
    writer.write([event])
    now = 0.1
    writer.write([event, event])
    assert log.writes == []
    now = 0.25
    writer.write([event])
    assert log.writes == [line * 4]
    writer.write([event])
    writer.flush()
    writer.flush()
    writer.close()
    assert log.writes == [line * 4, line, None]


def test_a_trace_does_not_wait_with_many_events():
    log = Log()
    writer = TraceWriter(log, clock=lambda: 0.0)
    for _ in range(1000):
        writer.write([EndEvent(1, 1.0, 1, 1)])
    assert len(log.writes) == 1


def test_no_two_files_of_a_run_are_one(tmp_path):
    file, other = tmp_path / "a", tmp_path / "b"
    file.touch()
    other.touch()
    status = file.stat()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "new")
    check_distinct(status, [("a", str(other)), ("b", None), ("c", "/dev/null")])
    check_distinct(status, [("a", "/dev/null"), ("b", "/dev/null")])
    for paths in (
        (file,),
        (other, other),
        (tmp_path / "new", tmp_path / "new"),
        (tmp_path / "folder" / ".." / "new", tmp_path / "new"),
        (tmp_path / "link", tmp_path / "new"),
    ):
        with pytest.raises(OutputError, match="they must be different files"):
            check_distinct(status, [(f"file {path}", str(path)) for path in paths])


def test_what_can_be_written_is_left_as_it_is(tmp_path):
    (tmp_path / "a").write_text("x")
    for name in ("a", "new", "/dev/full"):
        check_writable(str(tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "x"
    for name in ("a/b", "folder/b", ".", "\0"):
        with pytest.raises(OutputError, match="cannot write"):
            check_writable(str(tmp_path / name))


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1"])
def test_stdout_by_its_name_in_the_file_system_is_stdout(name):
    requests = b'{"prompt": [1], "max_tokens": 3}\n'
    plain = batchdecode("run", "-q", stdin=requests)
    assert batchdecode("run", "-q", "-o", name, stdin=requests).stdout == plain.stdout != b""
    summary = batchdecode("run", "-q", "-o", "/dev/null", "--summary-json", name, stdin=requests)
    assert json.loads(summary.stdout)["steps"] == 3
    trace = batchdecode("run", "-q", "-o", "/dev/null", "--trace", name, stdin=requests)
    assert trace.stdout.startswith(b'{"event":"run"')
