"""Pages for a browser as commands write them: what is in them, and where they may go."""

import gzip
import json
import os
import re

import pytest
from page_reader import parts_of, shown_spans, spans_of
from process import batchdecode, lines_of, refused, start, workload

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
    assert "--slot 2 is out of range (0-1)" in wrong.stderr


def numbers_of(page):
    """Return the numbers at the top of a page or a report."""
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page.decode()))


@pytest.mark.parametrize("options", [[], ["--profile", "rtx4090_llama3.1-8b"]])
def test_a_page_and_a_report_begin_with_the_numbers_of_the_summary(traces, options):
    command = ["trace", "in.jsonl", "-b", "2", *options, "--format"]
    page = numbers_of(batchdecode(*command, "html", cwd=traces).stdout)
    text = " ".join(batchdecode(*command, "summary", cwd=traces).stdout.decode().split())
    files = ["-o", "out", "--report", "r.html", "--force"]
    run = batchdecode("run", "in.jsonl", "-q", "-b", "2", *options, *files, cwd=traces)
    assert run.returncode == 0
    assert numbers_of((traces / "r.html").read_bytes()) == page
    assert list(page) == ["requests", "steps", "slots", "tokens", "queue", "ttft", "e2e", "idle"]
    assert page["requests"] == "30 ok"
    assert text.startswith(f"✓ 30 ok {page['steps'].split()[0]} steps · 2 slots · ")
    for title in ("queue", "ttft", "e2e"):
        shown = f"{title} {page[title]}"
        assert (shown if options else shown.removesuffix(" steps")) in text
    assert f"idle: {page['idle']} " in text


@pytest.fixture
def opened(tmp_path):
    """Return a command as browser, and a function with what it was given."""
    script, log = tmp_path / "browser", tmp_path / "log"
    script.write_text(f'#!/bin/sh\necho "$1" >> {log}\n')
    script.chmod(0o755)
    return str(script), lambda: log.read_text().splitlines() if log.exists() else []


OPEN = {
    "page": ["trace", "2.trace", "--format", "html", "-o", "open.html", "--open"],
    "report": ["run", "in.jsonl", "-q", "--report", "open.html", "--open"],
}


@pytest.mark.parametrize("kind", OPEN)
def test_open_shows_the_file_in_a_browser(traces, opened, kind):
    browser, urls = opened
    (traces / "open.html").unlink(missing_ok=True)
    done = batchdecode(*OPEN[kind], cwd=traces, BROWSER=browser)
    assert done.returncode == 0, done.stderr
    assert urls() == [(traces / "open.html").as_uri()]
    assert parts_of((traces / "open.html").read_bytes())[1]
    done = batchdecode(*OPEN[kind], "--force", cwd=traces, BROWSER="/bin/false")
    assert (done.returncode, urls()[1:]) == (0, [])
    assert "warning: no browser opened open.html: open it yourself, or set BROWSER (with %s " in (
        done.stderr
    )


def test_open_without_output_writes_a_temporary_file(traces, tmp_path, opened, tty):
    browser, urls = opened
    environment = os.environ | {"BROWSER": browser, "TMPDIR": str(tmp_path)}
    command = ["trace", "2.trace", "--format", "html", "--open"]
    with start(*command, cwd=traces, stdout=tty[1], env=environment) as process:
        said = process.stderr.read().decode()
    [page] = tmp_path.glob("batchdecode-*.html")
    assert (process.returncode, said, urls()) == (0, f"page: {page}\n", [page.as_uri()])
    assert parts_of(page.read_bytes())[1]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("trace 2.trace --open", "--open needs --format html"),
        ("trace 2.trace --format html --open", "--open needs a terminal as stdout, or -o FILE"),
        ("trace 2.trace --format html --open -o a.gz", "does not end in .gz, not a.gz"),
        ("trace 2.trace --format html --open -o /dev/stdout", "regular file"),
        ("run in.jsonl --open", "--open needs --report FILE"),
        ("run in.jsonl --report /dev/null --open", "regular file"),
    ],
)
def test_open_is_refused_before_anything_runs(traces, opened, command, message):
    browser, urls = opened
    done = batchdecode(*command.split(), cwd=traces, BROWSER=browser)
    assert (done.returncode, done.stdout, urls()) == (2, b"", [])
    assert message in done.stderr


@pytest.mark.parametrize("kind", OPEN)
def test_open_needs_a_browser(traces, tmp_path, kind):
    nothing = {"PATH": str(tmp_path), "BROWSER": "", "DISPLAY": "", "WAYLAND_DISPLAY": ""}
    said = refused(*OPEN[kind], "--force", cwd=traces, **nothing)
    assert "--open found no browser: set BROWSER to the command that starts one" in said


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
        (["-o", "x"], "--output needs --html"),
        (["--html", "--json"], "--html cannot be used with --json"),
        (["--html", "-o", "3.trace"], "--output 3.trace is the input too"),
        (["--html", "-o", "in.jsonl"], "--output in.jsonl: the file has content of another kind"),
    ],
)
def test_a_page_of_two_runs_goes_where_nothing_is_lost(traces, options, message):
    before = {path.name: path.read_bytes() for path in traces.iterdir()}
    assert message in refused("trace", "diff", "2.trace", "3.trace", *options, cwd=traces)
    assert {path.name: path.read_bytes() for path in traces.iterdir()} == before


@pytest.mark.parametrize(
    "command", ["trace 2.trace --format html", "trace diff 2.trace 3.trace --html"]
)
def test_a_page_does_not_go_to_a_terminal(traces, command, tty):
    with start(*command.split(), cwd=traces, stdout=tty[1]) as process:
        said = process.stderr.read()
    assert process.returncode == 2
    assert b"html cannot be shown in a terminal; use -o FILE.html" in said
