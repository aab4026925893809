import gzip
import io
import json
import os
import subprocess
from pathlib import Path
from threading import Thread

import pytest
from process import batchdecode, start

from cli.errors import WriteError
from cli.run.files import FileSink, OutputError, check_distinct, check_writable, open_sink
from cli.run.recording import ResultWriter


class FullDisk(io.FileIO):
    """A file with room for 25 bytes."""

    def write(self, data):
        room = 25 - self.tell()
        if room <= 0:
            raise OSError(28, "No space left on device")
        return super().write(data[:room])


def item(number, index=0):
    return b"%9d%d\n" % (number, index)


def test_results_are_in_the_file_soon_after_they_are_written(tmp_path):
    path, now = tmp_path / "out", 0.0
    writer = ResultWriter(open_sink(str(path)), clock=lambda: now)
    now = 0.01
    writer.write([item(0), item(1)])
    writer.write([item(2)])
    assert path.read_bytes() == b""
    now = 0.03
    writer.write([item(3)])
    assert path.read_bytes() == b"".join(map(item, range(4)))
    writer.write([item(4)])
    writer.flush()
    assert path.read_bytes().endswith(item(4))
    writer.write([item(5)])
    writer.close()
    assert path.read_bytes() == b"".join(map(item, range(6)))
    assert writer.num_written == 6


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_full_disk_takes_the_results_there_is_room_for(tmp_path, is_closed):
    path = tmp_path / "out"
    writer = ResultWriter(FileSink(FullDisk(path, "w"), "out"), clock=lambda: 0.0)
    writer.write([item(0), item(1), item(2)])
    with pytest.raises(WriteError, match="No space left"):
        writer.close() if is_closed else writer.flush()
    assert path.read_bytes() == item(0) + item(1)
    assert writer.num_written == 2
    if not is_closed:
        writer.close()
    assert path.read_bytes() == item(0) + item(1)


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


def test_appending_nothing_to_a_compressed_file_leaves_it_as_it_is(tmp_path):
    path = tmp_path / "out.gz"
    path.write_bytes(gzip.compress(b"one\n"))
    before = path.read_bytes()
    open_sink(str(path), append=True).close()
    assert path.read_bytes() == before
    sink = open_sink(str(path), append=True)
    assert not sink.is_file
    sink.write(b"two\n")
    sink.close()
    assert gzip.decompress(path.read_bytes()) == b"one\ntwo\n"


@pytest.mark.parametrize("name", ["missing/out", "."])
def test_what_cannot_be_opened_is_an_error(tmp_path, name):
    with pytest.raises(OutputError, match="cannot write"):
        open_sink(str(tmp_path / name))


def test_no_two_files_of_a_run_are_one(tmp_path):
    file, other = tmp_path / "a", tmp_path / "b"
    file.touch()
    other.touch()
    status = [file.stat()]
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


def test_stdout_by_its_name_in_the_file_system_is_stdout():
    requests, name = b'{"prompt": [1], "max_tokens": 3}\n', "/dev/stdout"
    summary = batchdecode("run", "-q", "-o", "/dev/null", "--summary-json", name, stdin=requests)
    assert json.loads(summary.stdout)["steps"] == 3
    trace = batchdecode("run", "-q", "-o", "/dev/null", "--trace", name, stdin=requests)
    assert trace.stdout.startswith(b'{"event":"run"')


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_results_on_a_pipe_have_no_files_beside_them_whatever_stderr_is(tmp_path, name):
    requests = b'{"prompt": [1], "max_tokens": 2}\n'
    with (tmp_path / "log").open("wb") as log:
        process = start("run", "-q", "-o", name, stdin=subprocess.PIPE, stderr=log)
        out, _ = process.communicate(requests, timeout=60)
    assert (process.returncode, out.count(b"\n")) == (0, 1), (tmp_path / "log").read_text()
    assert not list(Path("/dev").glob("stdout.*"))
