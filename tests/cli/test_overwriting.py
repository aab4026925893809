"""What a file holds is not lost without --force, unless it is ours and can be made again."""

import fcntl
import gzip
import os
import shutil

import pytest
from examples import rest_heavy
from process import ROOT, batchdecode, lines_of, start, workload

REQUESTS = lines_of(*workload(5))
OPTIONS = [
    ("--trace", "t.jsonl.gz"),
    ("--report", "r.html"),
    ("--summary-json", "s.json"),
    ("--timeseries", "series.csv"),
]


@pytest.fixture
def run(tmp_path):
    (tmp_path / "in").write_bytes(REQUESTS)
    (tmp_path / "other").write_text("simulated: {seed: 1}")

    def execute(*arguments):
        return batchdecode("run", "in", "-q", *arguments, cwd=tmp_path)

    return execute


def test_notes_are_not_overwritten_by_results(tmp_path, run):
    (tmp_path / "notes.txt").write_text("dear diary")
    before = sorted(tmp_path.iterdir())
    for more in ([], ["--resume"]):
        done = run("-o", "notes.txt", *more)
        assert done.returncode == 2
        assert "notes.txt" in done.stderr
        assert sorted(tmp_path.iterdir()) == before
        assert (tmp_path / "notes.txt").read_text() == "dear diary"
        assert "--force overwrites" in done.stderr
    assert "--resume needs the record" in run("-o", "notes.txt").stderr
    assert run("-o", "notes.txt", "--force").returncode == 0
    assert (tmp_path / "notes.txt").read_bytes().count(b"\n") == 5


def test_what_cannot_be_lost_is_no_reason_to_ask(tmp_path, run):
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "fifo")
    reader = start("run", "fifo", "-q", cwd=tmp_path)  # some reader
    for output in ("empty", "/dev/null", "/dev/null", "fifo"):
        assert run("-o", output).returncode == 0
    reader.communicate()


@pytest.mark.parametrize(("option", "name"), rest_heavy(2, OPTIONS))
def test_what_a_run_tells_of_itself_replaces_its_like_and_nothing_else(tmp_path, run, option, name):
    path = tmp_path / name
    assert run(option, path.name, "-b", "2").returncode == 0
    before = path.read_bytes()
    assert run(option, path.name, "-b", "1").returncode == 0
    assert path.read_bytes() != before
    for notes in (gzip.compress(b"dear diary"), b"{}\n"):
        path.write_bytes(notes)
        done = run(option, path.name)
        assert done.returncode == 2
        assert done.stdout == b""
        assert f"error: {option} {path.name}: the file has content of another kind" in done.stderr
        assert path.read_bytes() == notes
    assert run(option, path.name, "--force").returncode == 0
    assert path.read_bytes() != notes


@pytest.mark.parametrize("view", ["csv", "html"])
def test_a_view_replaces_a_view_and_nothing_else(tmp_path, run, view):
    assert run("--trace", "t.jsonl").returncode == 0
    command = ["trace", "t.jsonl", "-o", "view", "--format"]
    for name in (view, "spans"):
        assert batchdecode(*command, name, cwd=tmp_path).returncode == 0
    (tmp_path / "view").write_text("dear diary")
    assert batchdecode(*command, view, cwd=tmp_path).returncode == 2
    assert (tmp_path / "view").read_text() == "dear diary"
    assert batchdecode(*command, view, "--force", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    "command", ["workload constant -n 3 -q -o made.yaml", "calibrate steps.jsonl -o made.yaml"]
)
def test_what_may_have_been_mended_by_hand_is_never_replaced_unasked(tmp_path, command):
    shutil.copy(ROOT / "samples/timing/steps.jsonl", tmp_path)
    first = batchdecode(*command.split(), cwd=tmp_path)
    before = (tmp_path / "made.yaml").read_bytes()
    done = batchdecode(*command.split(), cwd=tmp_path)
    assert (first.returncode, done.returncode) == (0, 2), first.stderr
    assert "made.yaml: the file has content of another kind: use --force" in done.stderr
    assert batchdecode(*command.split(), "--force", cwd=tmp_path).returncode == 0
    assert (tmp_path / "made.yaml").read_bytes() == before


BESIDE = ["out.run.json", "out.run.sums"]


@pytest.mark.parametrize(("name", "kind"), [*zip(BESIDE, ["symbolic", "hard"], strict=True)])
def test_no_link_beside_the_results_is_followed(tmp_path, run, kind, name):
    (tmp_path / "mine").write_text("dear diary")
    if kind == "symbolic":
        (tmp_path / name).symlink_to("mine")
    else:
        (tmp_path / name).hardlink_to(tmp_path / "mine")
    for is_refused, more in ((True, []), (False, ["--force"])):
        done = run("-o", "out", "--keep-order", *more)
        assert (tmp_path / "mine").read_text() == "dear diary"
        assert done.returncode == (2 if is_refused else 0), done.stderr
        assert (f"error: {name} is a link, or not a regular file" in done.stderr) == is_refused
        assert (tmp_path / "out").exists() != is_refused


@pytest.mark.parametrize("name", BESIDE)
def test_what_others_have_put_beside_the_results_is_not_overwritten(tmp_path, run, name):
    (tmp_path / name).write_text("dear diary")
    done = run("-o", "out")
    assert (tmp_path / name).read_text() == "dear diary"
    assert done.returncode == 2
    assert "--force" in done.stderr
    assert run("-o", "out", "--force").returncode == 0
    assert run("-o", "out", "--resume").returncode == 0


@pytest.mark.parametrize("option", ["--trace", "--metrics-file", "-o"])
def test_a_file_that_a_run_writes_is_refused_to_another(tmp_path, run, option):
    if option == "--metrics-file":
        pytest.importorskip("prometheus_client")
    with (tmp_path / "x").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = run(option, "x", "--force")
    assert done.returncode == 2
    assert done.stderr.startswith("error: x is being written by another run: ")
    assert run(option, "x").returncode == 0
