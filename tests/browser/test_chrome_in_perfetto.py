"""Perfetto's trace processor takes chrome traces without an error, and finds what they tell."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from engine_runs import drained
from made_events import read_trace
from trace_processor import TraceProcessor, perfetto_address

from batcher import Engine, Request, SimulatedModel
from batcher.settings import SchedulingSettings
from batcher.trace.timeline import Timeline
from batcher.trace.views import encode_chrome

SAMPLE = Path(__file__).parents[2] / "samples/run.trace.jsonl.gz"
SLICES = """
    select ts, dur, slice.name, thread.name slot from slice
    join thread_track on thread_track.id = track_id join thread using (utid)
    where category in ('request', 'prefill')
"""
FLOWS = """
    select a_thread.name source, b_thread.name target from flow
    join slice a on a.id = slice_out join slice b on b.id = slice_in
    join thread_track a_track on a_track.id = a.track_id
    join thread_track b_track on b_track.id = b.track_id
    join thread a_thread on a_thread.utid = a_track.utid
    join thread b_thread on b_thread.utid = b_track.utid
"""
NANOSECONDS = 1000  # in a microsecond


@pytest.fixture(scope="module")
def imported(browser):
    with perfetto_address() as address:
        pages = []

        def imported(trace):
            pages.append(browser.new_page())
            pages[-1].goto(f"{address}/manifest.json")
            return TraceProcessor(pages[-1], trace)

        yield imported
        for page in pages:
            page.close()


def sample():
    with gzip.open(SAMPLE) as lines:
        return Timeline.from_events(read_trace(lines))


def crowded():
    """Beams that fork, and sequences that share prompts and are preempted for one another."""
    settings = SchedulingSettings(kv_blocks=12, block_size=2, prefix_cache=True)
    engine = Engine(SimulatedModel(), 4, settings=settings)
    for number in range(12):
        engine.add(Request(id=f"r{number}", prompt=[5] * (5 + number % 3), max_tokens=9))
        if not number % 4:
            engine.add(Request(id=f"b{number}", prompt=[5] * 6, max_tokens=7, num_beams=2))
    return Timeline.from_events([engine.run_event(), *drained(engine).events])


@pytest.mark.parametrize(
    ("run", "kinds"),
    [(sample, {"cache", "preemption"}), (crowded, {"cache", "fork", "preemption"})],
)
def test_perfetto_finds_every_slice_and_arrow_and_no_error(imported, run, kinds):
    trace = b"".join(encode_chrome(run()))
    events = json.loads(trace)["traceEvents"]
    processor = imported(trace)
    faults = "select name, value from stats where value > 0 and severity != 'info'"
    assert processor.query(faults) == []

    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = Counter(
        (e["ts"] * NANOSECONDS, e["dur"] * NANOSECONDS, e["name"], threads[e["tid"]])
        for e in events
        if e["ph"] == "X"
    )
    assert Counter(processor.query(SLICES)) == slices

    begins = {(e["cat"], e["id"]): e for e in events if e["ph"] == "s"}
    assert {category for category, _ in begins} == kinds
    arrows = Counter(
        (threads[begins[e["cat"], e["id"]]["tid"]], threads[e["tid"]])
        for e in events
        if e["ph"] == "f"
    )
    assert Counter(processor.query(FLOWS)) == arrows


def test_an_arrow_that_leads_nowhere_is_found(imported):
    lonely = {"ph": "f", "bp": "e", "pid": 1, "tid": 1, "ts": 1, "name": "a", "cat": "a", "id": 1}
    processor = imported(json.dumps({"traceEvents": [lonely]}).encode())
    assert processor.query("select name from stats where value > 0 and severity = 'error'")
