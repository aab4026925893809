"""The report of a run: its headline and timeline, the numbers of its summary, its settings."""

import html.parser
import json
import re
import signal
import time

import pytest
from page_reader import parts_of, shown_spans, spans_of
from process import batchdecode, lines_of, start, wait_for, workload

REQUESTS = lines_of(*workload(40, arrivals=lambda i: i * 0.3))
RUNS = {
    "plain": ["-b2"],
    "limits": ["-b3", "--kv-blocks=9", "--block-size=4", "--max-batch-tokens=6"],
    "times": ["-b3", "--profile=rtx4090_llama3.1-8b", "--slo=ttft=1", "--draft=simulated:0.6"],
}


class Cells(html.parser.HTMLParser):
    """The cells of a report that name where in the summary they are from, and their texts."""

    def __init__(self, page):
        super().__init__()
        self.texts, self.name = {}, None
        self.feed(page.partition(b"What reproduces it")[0].decode())

    def handle_starttag(self, tag, attrs):
        self.name = dict(attrs).get("data-of")

    def handle_data(self, data):
        if self.name is not None:
            self.texts[self.name] = data
            self.name = None


def leaves(value, path=()):
    """Yield the path and the value of each number, text or list of these in a summary."""
    is_list = isinstance(value, list) and value and isinstance(value[0], dict)
    if not is_list and not isinstance(value, dict):
        yield ".".join(map(str, path)), value
        return
    for key, inner in enumerate(value) if is_list else value.items():
        yield from leaves(inner, (*path, key))


@pytest.mark.parametrize("run", RUNS)
def test_every_number_is_that_of_the_summary(tmp_path, run):
    (tmp_path / "in").write_bytes(REQUESTS)
    files = ["--report", "r.html", "--summary-json", "s.json", "--trace", "t.jsonl"]
    assert batchdecode("run", "in", "-q", *RUNS[run], *files, cwd=tmp_path).returncode == 0
    page = (tmp_path / "r.html").read_bytes()
    cells = Cells(page).texts
    summary = json.loads((tmp_path / "s.json").read_bytes())
    numbers = dict(leaves(summary))
    told = {path for path, value in numbers.items() if value not in (None, {}, [], 0)}
    zeros = {path.removesuffix("max") for path in numbers.keys() - told if path.endswith(".max")}
    told -= {f"{path}count" for path in zeros}  # a distribution of zeros is left out
    assert told <= cells.keys() <= numbers.keys()
    for path, text in cells.items():
        assert_is_nearly(numbers[path], text)
    spans = batchdecode("trace", "t.jsonl", "--format", "spans", cwd=tmp_path).stdout
    facts, [shown] = parts_of(page)
    assert spans_of(shown) == shown_spans(spans.splitlines())
    assert facts["is_part"]
    unit = b"seconds" if run == "times" else b"steps"
    assert b'<th scope="row">ttft, ' + unit in page or run == "plain"
    texts = (b"<h1>in</h1>", b"<dd>40 ok<", b"<dt>tokens</dt>", b'<main id="page">', b"<h2>Times")
    places = [page.index(text) for text in texts]
    assert places == sorted(places)
    settings = page.partition(b"What reproduces it")[2].partition(b"</article>")[0]
    expected = {"limits": [b"--batch 3 --policy fcfs", b"--kv-blocks 9", b"seed 0,"]}
    assert all(text in settings for text in [b"simulated", *expected.get(run, [])])
    assert batchdecode("run", "in", "-q", *RUNS[run], "--report", "again", cwd=tmp_path).stdout
    assert (tmp_path / "again").read_bytes() == page


def assert_is_nearly(value, text):
    """Make sure that a cell has a value of the summary, to three digits, and perhaps a unit."""
    if not isinstance(value, int | float):
        assert text == value
        return
    number, has_percent, _ = text.partition(" ")[0].replace(",", "").partition("%")
    if isinstance(value, int):
        assert number == str(value)
    else:
        assert float(number) == pytest.approx(value * 100 if has_percent else value, rel=5e-3)
        assert len(re.sub(r"^0\.0*|e.*|\.", "", number)) <= 3 or abs(value) >= 1000


@pytest.mark.parametrize("clock", ["constant", "wall"])
def test_a_run_that_finished_nothing_has_no_rate(tmp_path, clock):
    (tmp_path / "in").write_text('{"prompt": "a", "max_tokens": 900, "ignore_eos": true}\n')
    run = ["run", "in", "-o", "out", "--report", "r.html", "-q", "--step-delay", "0.05"]
    with start(*run, "--profile", clock, cwd=tmp_path) as process:
        wait_for((tmp_path / "out.run.json").exists)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    page = (tmp_path / "r.html").read_text()
    assert "<dt>tokens</dt><dd>0 in finished outputs</dd>" in page
