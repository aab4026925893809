"""Under the name of a file is what was there before, or all that is new."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from batcher.whole_files import WholeFile


@pytest.fixture(params=["nameless", "named"])
def file_system(request, monkeypatch):
    if request.param == "named":
        monkeypatch.setattr("os.O_TMPFILE", os.O_DIRECTORY)  # an older one reads it like this
    return request.param


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def write(path, text):
    with WholeFile(str(path)) as file:
        file.raw.write(text.encode())
        file.put()


@pytest.mark.usefixtures("file_system")
def test_a_file_is_there_when_it_is_put_there(tmp_path):
    for text in ("the first", "another"):
        with WholeFile(str(tmp_path / "file")) as file:
            before = (tmp_path / "file").read_text() if (tmp_path / "file").exists() else None
            file.raw.write(text.encode())
            assert before == {"the first": None, "another": "the first"}[text]
            file.put()
        assert contents(tmp_path) == {"file": text}


@pytest.mark.usefixtures("file_system")
def test_after_an_error_all_is_as_it_was(tmp_path):
    write(tmp_path / "old", "old")
    for name in ("old", "new"):
        with suppress(KeyboardInterrupt), WholeFile(str(tmp_path / name)) as file:
            file.raw.write(b"half of")
            raise KeyboardInterrupt
        assert contents(tmp_path) == {"old": "old"}


@pytest.mark.usefixtures("file_system")
def test_no_file_is_put_where_a_disk_lost_some_of_it(tmp_path, monkeypatch):
    write(tmp_path / "file", "old")

    def fsync(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file", "new")
    assert contents(tmp_path) == {"file": "old"}


def test_a_kill_leaves_nothing_beside_it(tmp_path):
    write(tmp_path / "file", "old")
    code = (
        "import os, signal\n"
        "from batcher.whole_files import WholeFile\n"
        "with WholeFile('file') as file:\n"
        "    file.raw.write(b'half of')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert contents(tmp_path) == {"file": "old"}


@pytest.mark.usefixtures("file_system")
def test_permissions_stay_and_new_files_have_the_usual_ones(tmp_path):
    before = os.umask(0o027)
    try:
        write(tmp_path / "file", "old")
        assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
        (tmp_path / "file").chmod(0o664)
        write(tmp_path / "file", "new")
        assert (tmp_path / "file").stat().st_mode & 0o777 == 0o664
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.usefixtures("file_system")
def test_the_owner_stays(tmp_path):
    write(tmp_path / "file", "old")
    os.chown(tmp_path / "file", 4321, 1234)
    write(tmp_path / "file", "new")
    status = (tmp_path / "file").stat()
    assert (status.st_uid, status.st_gid) == (4321, 1234)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_is_followed(tmp_path, is_there):
    (tmp_path / "deep").mkdir()
    if is_there:
        write(tmp_path / "deep" / "file", "old")
    (tmp_path / "link").symlink_to("deep/file")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "deep") == {"file": "new"}


def test_pipes_and_descriptors_are_written_to_as_they_are(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with WholeFile(str(tmp_path / "pipe")) as file:
        file.raw.write(b"at once")
        assert os.read(reader, 100) == b"at once"
        file.put()
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    with (tmp_path / "file").open("wb") as opened:
        write(f"/dev/fd/{opened.fileno()}", "into what is open")
        assert os.fstat(opened.fileno()).st_size == len("into what is open")
        assert os.fstat(opened.fileno()).st_nlink == 1


@pytest.mark.parametrize(
    ("reason", "after"), [(errno.EACCES, "new"), (errno.ENOSPC, "old"), (errno.EDQUOT, "old")]
)
def test_a_file_is_written_in_place_where_the_folder_is_not_ours_to_write(
    tmp_path, monkeypatch, reason, after
):
    write(tmp_path / "file", "old")
    real = os.open

    def refusing(path, flags, mode=0o777, *, dir_fd=None):
        if dir_fd is not None:
            raise OSError(reason, os.strerror(reason))
        return real(path, flags, mode)

    monkeypatch.setattr("os.open", refusing)
    with suppress(OSError) if after == "old" else nullcontext():
        write(tmp_path / "file", "new")
    assert contents(tmp_path) == {"file": after}


def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path, monkeypatch):
    write(tmp_path / "file", "old")
    inode = (tmp_path / "file").stat().st_ino
    monkeypatch.setattr("os.access", lambda *_: False)  # as it is for all but root
    write(tmp_path / "file", "by root")
    assert (tmp_path / "file").stat().st_ino == inode


@pytest.mark.parametrize(
    ("name", "reason"), [("missing/file", errno.ENOENT), (".", errno.EISDIR), ("loop", errno.ELOOP)]
)
def test_what_cannot_be_written_says_why(tmp_path, name, reason):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match=os.strerror(reason)):
        WholeFile(str(tmp_path / name))
