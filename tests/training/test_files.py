"""There is always a whole file: the old one, or the new one."""

import errno
import os
import resource
from pathlib import Path

import pytest

from batcher.training.data import write_whole


def test_a_file_is_written_and_nothing_beside_it(tmp_path):
    for content in (b"old", b"new"):
        write_whole(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_disk_without_room_leaves_the_old_file(tmp_path):
    write_whole(tmp_path / "file", b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="too large") as caught:
            write_whole(tmp_path / "file", bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(tmp_path / "file")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}


def test_a_new_file_has_its_name_only_when_it_is_on_the_disk(tmp_path, monkeypatch):
    write_whole(tmp_path / "file", b"old")
    on_disk = []

    def fsync(descriptor):
        place = Path(f"/proc/self/fd/{descriptor}").resolve()
        on_disk.append((place == tmp_path, (tmp_path / "file").read_bytes()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_whole(tmp_path / "file", b"new")
    assert on_disk == [(False, b"old"), (True, b"new")]
