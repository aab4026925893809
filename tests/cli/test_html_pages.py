"""Pages for a browser as commands write them: what is in them, and where they may go."""

import gzip
import json
import os

import pytest
from page_reader import parts_of, shown_spans, spans_of
from process import batchdecode, lines_of, start, workload

REQUESTS = lines_of(*workload(30))


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("traces")
    (tmp_path / "in.jsonl").write_bytes(REQUESTS)
    for batch in (2, 3):
        run = batchdecode(
            "run", "in.jsonl", "-q", "-b", batch, "--trace", f"{batch}.trace", cwd=tmp_path
        )
        assert run.returncode == 0
    return tmp_path


def page(path):
    return parts_of(path.read_bytes())


def test_a_page_has_all_spans_and_shows_what_is_selected(traces):
    spans = batchdecode("trace", "2.trace", "--format", "spans", cwd=traces).stdout
    expected = shown_spans(spans.splitlines())
    command = ["--format", "html", "-o", "run.html"]
    for source in (["2.trace"], ["in.jsonl", "-b", "2"]):
        assert batchdecode("trace", *source, *command, cwd=traces).returncode == 0
        facts, [run] = page(traces / "run.html")
        assert spans_of(run) == expected
        assert run["run"]["name"] == source[0]
        assert run["waits"][0]["why"] == "for a slot"
        assert facts["opening"] == {}
    shown = batchdecode("trace", "2.trace", "--format", "html", cwd=traces).stdout
    packed = batchdecode("trace", "2.trace", "--format", "html", "-o", "run.gz", cwd=traces)
    assert packed.returncode == 0
    assert gzip.decompress((traces / "run.gz").read_bytes()) == shown
    options = ["--steps", "5:", "--request", "r3", "--request", "r4", "--slot", "1"]
    done = batchdecode("trace", "2.trace", "--format", "html", *options, "-o", "a.html", cwd=traces)
    assert done.returncode == 0
    facts, [run] = page(traces / "a.html")
    steps = run["run"]["num_steps"]
    assert facts["opening"] == {"steps": [5, steps], "requests": ["r3", "r4"], "slots": [1]}
    assert len(run["spans"]) == 30
    wrong = batchdecode("trace", "2.trace", "--format", "html", "--slot", "2", cwd=traces)
    assert wrong.returncode == 2
    assert "--slot 2: the slots of this run are 0 to 1" in wrong.stderr


def test_a_page_of_two_runs_says_what_the_text_says(traces):
    text = batchdecode("trace", "diff", "2.trace", "3.trace", cwd=traces, COLUMNS="2000")
    done = batchdecode("trace", "diff", "2.trace", "3.trace", "--html", "-o", "d.html", cwd=traces)
    assert (done.returncode, done.stdout) == (text.returncode, b"") == (1, b"")
    facts, runs = page(traces / "d.html")
    assert facts["diff"]["lines"] == text.stdout.decode().splitlines()
    told = json.loads(
        batchdecode("trace", "diff", "2.trace", "3.trace", "--json", cwd=traces).stdout
    )
    assert facts["diff"]["step"] == told["parting"]["step"]
    changed = [one["id"] for one in told["changes"][:10]]
    assert facts["diff"]["changed"] == changed
    for run, batch in zip(runs, (2, 3), strict=True):
        spans = batchdecode("trace", f"{batch}.trace", "--format", "spans", cwd=traces).stdout
        assert spans_of(run) == shown_spans(spans.splitlines())
    same = batchdecode("trace", "diff", "2.trace", "2.trace", "--html", cwd=traces)
    assert same.returncode == 0
    assert parts_of(same.stdout)[0]["diff"]["step"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "x"], "--output is for --html"),
        (["--html", "--json"], "--html and --json exclude each other"),
        (["--html", "-o", "3.trace"], "--output 3.trace is the input too"),
        (["--html", "-o", "in.jsonl"], "--output in.jsonl: the file holds something that would"),
    ],
)
def test_a_page_of_two_runs_goes_where_nothing_is_lost(traces, options, message):
    before = {path.name: path.read_bytes() for path in traces.iterdir()}
    done = batchdecode("trace", "diff", "2.trace", "3.trace", *options, cwd=traces)
    assert done.returncode == 2
    assert message in done.stderr
    assert {path.name: path.read_bytes() for path in traces.iterdir()} == before


@pytest.mark.parametrize(
    "command", ["trace 2.trace --format html", "trace diff 2.trace 3.trace --html"]
)
def test_a_page_does_not_go_to_a_terminal(traces, command):
    ours, theirs = os.openpty()
    with start(*command.split(), cwd=traces, stdout=theirs) as process:
        said = process.stderr.read()
    os.close(theirs)
    os.close(ours)
    assert process.returncode == 2
    assert b"html is for a browser: give -o FILE.html" in said
