"""Input that gzip has packed: files and pipes, by what they hold and not by their names."""

import bz2
import gzip
import io
import json
import lzma
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from process import ROOT, batchdecode, lines_of, refused, start

from cli.run.input import Unpacked

REQUESTS = (ROOT / "samples/requests.jsonl").read_bytes()
PACKED = gzip.compress(REQUESTS)
COMMANDS = [
    ["run", "-q"],
    ["check"],
    ["trace", "--format", "spans"],
    ["verify", "--settings", "2"],
    ["compare", "--csv", "-q"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_every_command_reads_packed_stdin(command):
    done = batchdecode(*command, "-", stdin=PACKED)
    assert done.returncode == 0
    assert done.stdout == batchdecode(*command, "-", stdin=REQUESTS).stdout


@pytest.mark.parametrize("name", ["in.jsonl", "in.gz"])
@pytest.mark.parametrize("data", [REQUESTS, PACKED], ids=["plain", "packed"])
def test_the_content_of_a_file_tells_and_not_its_name(name, data, tmp_path):
    path = tmp_path / name
    path.write_bytes(data)
    done = batchdecode("run", "-q", path)
    assert done.stdout == batchdecode("run", "-q", "-", stdin=REQUESTS).stdout
    with path.open("rb") as file:  # which is stdin, and can be read again
        by_stdin, _ = start("run", "-q", stdin=file).communicate()
    assert by_stdin == done.stdout


class Trickle(io.RawIOBase):
    """Gives its bytes in pieces of the sizes that are drawn."""

    def __init__(self, data, sizes):
        self.rest, self.sizes = data, sizes

    def readable(self):
        return True

    def readinto(self, buffer):
        size = min(self.sizes.pop() if self.sizes else 1, len(buffer))
        piece, self.rest = self.rest[:size], self.rest[size:]
        buffer[: len(piece)] = piece
        return len(piece)


@given(
    members=st.lists(st.binary(max_size=300), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 40), max_size=60),
    padding=st.integers(0, 3),
)
def test_members_and_pieces_make_no_difference(members, sizes, padding):
    packed = b"".join(map(gzip.compress, members)) + bytes(padding)
    read = io.BufferedReader(Unpacked(Trickle(packed, sizes))).read()
    assert read == b"".join(members)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (PACKED[:-200], "the compressed data is cut off"),
        (PACKED[:300] + b"\xff" * 30 + PACKED[330:], "the compressed data is damaged"),
        (PACKED[:-8] + bytes(8), "the compressed data is damaged"),
        (gzip.compress(PACKED), "is compressed with gzip twice"),
        (
            bz2.compress(REQUESTS),
            "is compressed with bzip2; only gzip is supported. Decompress it with: bzcat",
        ),
        (lzma.compress(REQUESTS), "is compressed with xz"),
        (b"\x28\xb5\x2f\xfd\x04\x00", "is compressed with zstd"),
    ],
)
def test_what_cannot_be_unpacked_is_an_error_that_says_so(data, reason, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    for done in (batchdecode("run", "-q", path), batchdecode("check", "-", stdin=data)):
        assert done.returncode == 2
        assert reason in done.stderr


@pytest.mark.parametrize("follow", [[], ["--follow"]], ids=["read", "followed"])
def test_what_runs_when_a_pipe_breaks_is_finished(follow, tmp_path):
    packed = gzip.compress(b"".join(REQUESTS.splitlines(keepends=True)[:19]))
    results, summary = tmp_path / "out.jsonl", tmp_path / "summary.json"
    files = ["-o", results, "--summary-json", summary]
    said = refused("run", "-q", "-", *follow, *files, stdin=packed[:-5])
    assert "error: cannot read <stdin> after line 19: the compressed data is cut" in said
    assert len(results.read_bytes().splitlines()) == 19
    assert json.loads(summary.read_bytes())["unfinished"] == 0
    record = json.loads((tmp_path / "out.jsonl.run.json").read_bytes())
    assert not record["finished"]


def test_a_packed_pipe_is_followed_as_far_as_it_was_flushed():
    run = start("run", "-q", "--follow", "-", stdin=subprocess.PIPE)
    with gzip.GzipFile(fileobj=run.stdin, mode="wb") as packer:
        for number in range(3):
            packer.write(lines_of({"id": f"r{number}", "prompt": "x", "max_tokens": 1}))
            packer.flush()
            assert f'"id":"r{number}"'.encode() in run.stdout.readline()
    run.stdin.close()
    assert run.wait(10) == 0
    run.stdout.close()
    run.stderr.close()
