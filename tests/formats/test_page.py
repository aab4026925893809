"""What a page holds is the run, and nothing a run says can be anything but data in it."""

import base64
import html.parser
import re
from hashlib import sha256
from importlib.resources import files

import pytest
from examples import examples, mostly_heavy
from hypothesis import given
from hypothesis import strategies as st
from page_reader import parts_of, shown_spans, spans_of
from page_runs import events_of, short_run

from batcher.events import RejectEvent
from batcher.explaining.story import explain, story_of, waits_of
from batcher.page import START
from batcher.page import page as page_module
from batcher.page.page import (
    SCRIPTS,
    Opening,
    PageDifference,
    PageFacts,
    PageRun,
    PageTimeline,
    encode_page,
)
from batcher.trace.run import is_follower
from batcher.trace.views import encode_spans
from cli.views.story_text import PAGE_WORDS, tell, tell_reject

FACTS = PageFacts()
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--",
    "]]>\u2028",
    "\u202egnirts\u202c",
    "\x00\x1b[31m\r\n",
    "x" * 10_000,
    "𝒳é☃",
    '"\\',
]


def page_of(events, name="a run", facts=FACTS, around=""):
    run = PageRun(name, PageTimeline.from_events(events))
    return b"".join(encode_page([run], facts, PAGE_WORDS, "a run", around))


class Scripts(html.parser.HTMLParser):
    """What a browser would find: elements with their attributes, and the texts of scripts."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.scripts, self.is_in_script = [], [], False
        self.feed(page.decode())

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.is_in_script = tag == "script"
        if self.is_in_script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.is_in_script = False

    def handle_data(self, data):
        if self.is_in_script:
            self.scripts[-1] += data


@examples(60)
@given(st.integers(0, 2**32))
def test_a_page_has_the_spans_and_the_stories_of_the_run(seed):
    events = events_of(seed)
    timeline = PageTimeline.from_events(events)
    _, [run] = parts_of(page_of(events))
    assert spans_of(run) == shown_spans(encode_spans(timeline))
    known = [found for _, found in timeline.sequences]
    for row, found in zip(run.get("sequences", []), known, strict=True):
        leader = known[row["leader"]]
        assert not is_follower(leader)
        assert (leader.id, found.label) == (found.id, row["label"]) == (row["id"], found.label)
        told = tell(story_of(timeline, found)) if leader is found else []
        assert sum(map(waited, row["story"])) == sum(map(waited, told))
        shown = [line for line in row["story"] if not waited(line)]
        rest = [line for line in told if not waited(line)]
        causes = r"(waited, was resumed .* waiting) \((?:[^()]|\([^()]*\))*\)"
        assert shown == [re.sub(causes, r"\1", line) for line in rest]
    told = {event.id: tell_reject(event) for event in events if isinstance(event, RejectEvent)}
    assert {row["id"]: row["story"] for row in run.get("rejects", [])} == told


def waited(line):
    found = re.match(r"  waited ([\d,]+) steps?\b", line)
    return int(found[1].replace(",", "")) if found else 0


@examples(60)
@given(st.integers(0, 2**32))
def test_what_all_wait_for_is_what_each_waits_for(seed):
    timeline = PageTimeline.from_events(events_of(seed))
    of_all = {step: part for part in waits_of(timeline) for step in range(part.start, part.end)}
    for _, found in timeline.sequences:
        for part in explain(timeline, found) if found.num_rows == 1 else ():
            for step in range(part.start, part.end) if part.phase == "wait" else ():
                shown = of_all[step]
                assert (shown.cause, shown.blocks) == (part.cause, part.blocks)
                assert shown.behind == (part.behind or (shown.behind and found.label))


def test_tables_that_take_many_lines_are_as_whole_as_those_of_one(monkeypatch):
    whole = parts_of(page_of(short_run([f"r{i}" for i in range(100)])))
    monkeypatch.setattr(page_module, "ROWS_OF_BLOCK", 7)
    assert parts_of(page_of(short_run([f"r{i}" for i in range(100)]))) == whole
    monkeypatch.setattr(page_module, "MAX_STORIES", 3)
    _, [run] = parts_of(page_of(short_run("abcde")))
    assert [bool(row["story"]) for row in run["sequences"]] == [True] * 3 + [False] * 2


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_what_a_run_says_is_never_markup(hostile):
    facts = PageFacts(Opening(requests=[hostile]), PageDifference(0, [hostile], [hostile]))
    page = page_of(short_run([hostile, f"{hostile}2"], hostile), hostile, facts)
    usual = page_of(short_run(["a", "b"]))
    data = re.compile(
        rb'(?<=<script type="text/plain" )(id="facts"|class="run")>[\w\s+/=]+</script>'
    )
    assert data.sub(b"", page) == data.sub(b"", usual) != usual
    told, [run] = parts_of(page)
    assert told["opening"]["requests"] == told["diff"]["lines"] == [hostile]
    assert [row["id"] for row in run["sequences"]] == [hostile, f"{hostile}2"]
    assert run["run"]["name"] == hostile
    assert run["run"]["headline"].endswith(hostile)


def test_a_browser_is_told_to_run_the_scripts_of_the_page_alone_and_to_load_nothing():
    page = page_of(short_run(["a"]))
    assert page.startswith(START)
    found = Scripts(page)
    policy = next(one["content"] for _, one in found.elements if "http-equiv" in one)
    allowed = dict(part.split(" ", 1) for part in policy.split("; "))
    assert set(allowed) == {"default-src", "img-src", "style-src", "script-src"}
    assert (allowed["default-src"], allowed["img-src"]) == ("'none'", "data:")
    scripts = [
        text for text in found.scripts if text.startswith(('"use strict"', "// https://d3js"))
    ]
    digests = [base64.b64encode(sha256(text.encode()).digest()).decode() for text in scripts]
    assert allowed["script-src"].split() == [f"'sha256-{digest}'" for digest in digests]
    assert len(scripts) == len(SCRIPTS)
    assert {one.get("href", "data:,") for _, one in found.elements} == {"data:,"}
    assert not any("src" in one for _, one in found.elements)


def test_scripts_and_style_are_small_and_end_where_they_should():
    assets = files("batcher.page").joinpath("assets")
    contents = {asset.name: asset.read_bytes() for asset in assets.iterdir()}
    assert set(contents) == {*SCRIPTS, "page.css", "d3.LICENSE"}
    assert sum(map(len, contents.values())) < 1_000_000
    for content in contents.values():
        assert not re.search(rb"</(script|style)|<!--", content, re.IGNORECASE)
    page = page_of(short_run(["a"]))
    assert len(page) < sum(map(len, contents.values())) + 5_000
    assert contents["d3.LICENSE"].strip() in page


@pytest.mark.parametrize("num_spans", mostly_heavy([1_000, 20_000], 1_000))
def test_a_request_takes_few_bytes(num_spans):
    page = page_of(short_run([f"r{number}" for number in range(num_spans)]))
    [packed] = re.findall(rb'class="run">(.*?)</script>', page, re.DOTALL)
    assert len(packed) < 60 * num_spans, "with a story each"
