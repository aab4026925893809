"""Results that are complete are on the disk, in the file that was asked for, or the run fails."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from process import batchdecode, lines_of, start, wait_for, workload

from cli.errors import WriteError
from cli.run.files import OutFile
from cli.run.run import run
from cli.run.run_options import RunOptions
from cli.signals import StopSignals


@pytest.fixture
def running(tmp_path):
    (tmp_path / "in").write_bytes(lines_of(*workload(60)))
    files = ["-o", "out", "--trace", "trace", "--report", "report"]
    process = start("run", "in", *files, "-q", "--step-delay", "0.005", cwd=tmp_path)
    wait_for(lambda: (tmp_path / "out").exists() and (tmp_path / "out").stat().st_size)
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
    "written": (write_over, "another program wrote 13 bytes into it meanwhile"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_what_becomes_of_a_file_is_noticed(tmp_path, what):
    damage, reason = DAMAGES[what]
    with OutFile(str(tmp_path / "file")) as file:
        file.open().write(b"a line\n")
        file.settle()
        damage(tmp_path / "file")
        with pytest.raises(WriteError, match=reason):
            file.settle()
        assert file.is_in_place == (what in ("cut", "written"))
        assert file.has_foreign_lines == (what == "written")
        file.open(append=True).write(b"another\n")
    if what == "cut":
        assert (tmp_path / "file").read_bytes() == b"another\n"  # no hole


@pytest.mark.parametrize(
    ("name", "what"),
    [("out", "moved"), ("out", "written"), ("trace", "cut"), ("out.run.sums", "deleted")],
)
def test_a_run_tells_of_its_lost_files_and_how_to_go_on(tmp_path, running, name, what):
    damage, reason = DAMAGES[what]
    wait_for(lambda: (tmp_path / name).exists() and (tmp_path / name).stat().st_size)
    damage(tmp_path / name)
    stderr = running.communicate()[1].decode()
    assert running.returncode == 1, stderr
    assert f"error: cannot write {name}: " in stderr
    assert reason in stderr
    how = "--resume=repair" if what == "written" else "--resume"
    is_there = what != "moved"
    where = "out" if is_there else f"{tmp_path}/moved"
    assert f"; 60 results went to {where}\n" in stderr
    assert '"finished": false' in (tmp_path / "out.run.json").read_text()
    assert ("continue with: " in stderr) == is_there
    assert (f" {how} " in f"{stderr} ".replace("\n", " ")) == is_there
    if what == "written":
        again = ["-o", "out", "-q", how, "--trace", "new"]
        assert batchdecode("run", "in", *again, cwd=tmp_path).returncode == 0
        assert len((tmp_path / "out").read_bytes().splitlines()) == 60


def test_a_prompt_in_the_command_to_continue_stays_as_it_is(tmp_path):
    prompt = ["-p", "use --resume now,\nor 'later'"]
    run = ["run", *prompt, "-o", "out", "-q", "--max-tokens", "2", "-p", "last"]
    with start(*run, "--step-delay", "0.3", cwd=tmp_path) as process:
        wait_for((tmp_path / "out.run.json").exists)
        write_over(tmp_path / "out")
        stderr = process.communicate()[1].decode()
    told = re.search("continue with: batchdecode (.*)", stderr)[1]
    pasted = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {told}"], capture_output=True, check=True
    )
    words = pasted.stdout.decode().split("\0")
    assert words == [*run, "--step-delay", "0.3", "--resume=repair", ""]


def test_a_report_does_not_take_the_place_of_another_file(tmp_path, running):
    replace_by_another(tmp_path / "report")
    stderr = running.communicate()[1].decode()
    assert running.returncode == 1
    assert stderr == "error: cannot write report: another file has taken its place\n"
    assert (tmp_path / "report").read_text() == "another file"


def test_a_lock_ends_with_a_run_that_is_killed(tmp_path, running):
    running.kill()
    running.communicate()
    again = ["-o", "out", "-q", "--trace", "trace", "--report", "report", "--resume"]
    assert batchdecode("run", "in", *again, cwd=tmp_path).returncode == 0
    assert (tmp_path / "out").read_bytes().count(b"\n") == 60


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
        options = RunOptions(input=[f"{tmp_path}/in"], output=f"{tmp_path}/out", quiet=True)
        assert run(options, stop, lambda **_: ["continue"]) == 0
    assert synced[-1] == (f"{tmp_path}/out", 0)
    assert '"finished": true' in (tmp_path / "out.run.json").read_text()
