"""Results that are complete are on the disk, in the file that was asked for, or the run fails."""

import os
import time
from itertools import product
from pathlib import Path

import pytest
from examples import mostly_heavy
from process import batchdecode, lines_of, start, workload

from cli.run.run import run
from cli.run.run_options import RunOptions
from cli.signals import StopSignals


@pytest.fixture
def running(tmp_path):
    """A run to `out` that has written its first results and goes on for a moment."""
    (tmp_path / "in").write_bytes(lines_of(*workload(60)))
    files = ["-o", "out", "--trace", "trace", "--timeseries", "series", "--report", "report"]
    files += ["--timeseries-interval", "1"]
    process = start("run", "in", *files, "-q", "--step-delay", "0.01", cwd=tmp_path)
    while not (tmp_path / "out").exists() or not (tmp_path / "out").stat().st_size:
        time.sleep(0.005)
    yield process
    process.kill()
    process.communicate()


def replace_by_another(path):
    (path.parent / "other").write_text("another file")
    (path.parent / "other").rename(path)


def write_over(path):
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(b"another line\n")


DAMAGES = {
    "deleted": (Path.unlink, "it was deleted while it was written"),
    "replaced": (replace_by_another, "it was deleted while it was written"),
    "moved": (lambda path: path.rename(path.parent / "moved"), "it was moved while it was written"),
    "cut": (lambda path: os.truncate(path, 0), "bytes were cut off while it was written"),
    "written": (write_over, "others have written 13 bytes into it meanwhile"),
}
NAMES = ["out", "trace", "series", "out.run.sums"]
CASES = [case for case in product(NAMES, DAMAGES) if case != ("series", "cut")]
QUICK = [("out", "replaced"), ("out", "moved"), ("out", "cut"), ("series", "moved")]
QUICK += [("out", "written"), ("trace", "cut"), ("out.run.sums", "deleted")]
WHERE = {"deleted": "a file that has no name any more", "moved": "{}/moved"}
WHERE["replaced"] = WHERE["deleted"]


@pytest.mark.parametrize("case", mostly_heavy(CASES, *QUICK), ids=str)
def test_what_becomes_of_any_file_is_noticed(tmp_path, running, case):
    name, what = case
    damage, reason = DAMAGES[what]
    time.sleep(0.3)  # by then all of them hold something
    damage(tmp_path / name)
    stderr = running.communicate()[1].decode()
    assert running.returncode == 1, stderr
    assert f"error: cannot write {name}: " in stderr
    assert reason in stderr
    how = "--resume=repair" if case == ("out", "written") else "--resume"
    is_there = name != "out" or what in ("cut", "written")
    where = "out" if is_there else WHERE[what].format(tmp_path)
    assert f"; 60 results went to {where}\n" in stderr
    if (name, what) == ("out", "cut"):
        assert (tmp_path / "out").read_bytes().startswith(b'{"id":')  # no hole
    assert '"finished": false' in (tmp_path / "out.run.json").read_text()
    assert ("continue with: " in stderr) == is_there
    assert (f" {how} " in f"{stderr} ".replace("\n", " ")) == is_there
    again = [how, "--trace", "new"]
    if name != "out.run.sums":
        done = batchdecode("run", "in", "-o", "out", "-q", *again, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert len((tmp_path / "out").read_bytes().splitlines()) == 60


def test_a_report_does_not_take_the_place_of_another_file(tmp_path, running):
    replace_by_another(tmp_path / "report")
    stderr = running.communicate()[1].decode()
    assert running.returncode == 1
    assert stderr == "error: cannot write report: another file has taken its place\n"
    assert (tmp_path / "report").read_text() == "another file"


def test_results_are_on_the_disk_before_the_record_says_finished(tmp_path, monkeypatch):
    (tmp_path / "in").write_bytes(lines_of(*workload(5)))
    synced = []
    fsync = os.fsync

    def note(descriptor):
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        synced.append((path, (tmp_path / "out.run.json").read_text().count('"finished": true')))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    with StopSignals() as stop:
        options = RunOptions(input=f"{tmp_path}/in", output=f"{tmp_path}/out", quiet=True)
        assert run(options, stop, "continue") == 0
    assert synced[-1] == (f"{tmp_path}/out", 0)
    assert '"finished": true' in (tmp_path / "out.run.json").read_text()
