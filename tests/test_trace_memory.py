"""What a view of a trace holds does not grow with the steps of a run, nor with its requests."""

import tracemalloc

import pytest
from examples import mostly_heavy

from batcher.events import AdmitEvent, ArriveEvent, EndEvent, FinishEvent, RunEvent
from batcher.explaining.story import answer_of, read_requests
from batcher.page import page as page_module
from batcher.page.page import PageRun, PageTimeline
from batcher.trace import timeline as timeline_module
from batcher.trace.timeline import Selection, Timeline
from batcher.trace.views import encode_chrome, encode_csv, encode_spans, encode_steps
from cli.views.gantt import render_gantt
from cli.views.story_text import PAGE_WORDS
from cli.views.svg import render_svg

FIRST_TEN = Selection(stop=10)


def encode_page(timeline):
    return page_module._packed(page_module._run_lines(PageRun("a run", timeline), PAGE_WORDS))


VIEWS = {
    "spans": encode_spans,
    "csv": encode_csv,
    "steps": lambda timeline: encode_steps(timeline, FIRST_TEN),
    "chrome": encode_chrome,
    "gantt": render_gantt,
    "svg": render_svg,
    "html": encode_page,
}


def forged(num_steps):
    """A short trace of a long run: one request, and one that waits for it."""
    last = num_steps - 2
    yield RunEvent(batch=1, model="simulated", settings={})
    for name in "ab":
        yield ArriveEvent(0, 0.0, name, 0, "input", 1, num_steps)
    yield AdmitEvent(0, 0.0, "a", 0, 0, "empty")
    yield FinishEvent(last, float(last), "a", 0, 0, "length", None, num_steps - 1)
    yield AdmitEvent(last + 1, last + 1.0, "b", 0, 0, "refill")
    yield FinishEvent(last + 1, last + 1.0, "b", 0, 0, "length", None, 1)
    yield EndEvent(num_steps, float(num_steps), num_steps, 2)


def wide(num_slots):
    """A short trace that states a huge batch and uses its first and last slot."""
    yield RunEvent(batch=num_slots, model="simulated", settings={})
    for slot in (0, num_slots - 1):
        yield ArriveEvent(0, 0.0, f"r{slot}", 0, "input", 1, 40)
        yield AdmitEvent(0, 0.0, f"r{slot}", 0, slot, "empty")
    for slot in (0, num_slots - 1):
        last = 38 + slot % 2
        yield FinishEvent(last, float(last), f"r{slot}", 0, slot, "length", None, last + 1)
    yield EndEvent(40, 40.0, 79, 2)


def crowded(num_requests):
    """A run of two slots in which everything waits: requests of 1 and of 2 steps take turns."""
    yield RunEvent(batch=2, model="simulated", settings={})
    running = {}
    step = number = num_tokens = 0
    while number < num_requests or running:
        for slot in range(2):
            if slot not in running and number < num_requests:
                arrival = max(0, step - 3)
                yield ArriveEvent(arrival, float(arrival), f"r{number}", 0, "input", 1, 9)
                yield AdmitEvent(step, float(step), f"r{number}", 0, slot, "refill")
                running[slot] = (f"r{number}", step + number % 2)
                number += 1
        for slot, (name, last) in sorted(running.items()):
            if last == step:
                yield FinishEvent(step, float(step), name, 0, slot, "length", None, 1)
                del running[slot]
                num_tokens += 1
        step += 1
    yield EndEvent(step, float(step), num_tokens, num_requests)


def peak_of(events, encode):
    kind = PageTimeline if encode is encode_page else Timeline
    tracemalloc.start()
    timeline = kind.from_events(events)
    timeline.check_integrity()
    for _ in encode(timeline):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("view", VIEWS)
def test_neither_steps_nor_slots_that_nothing_uses_cost_anything(view):
    peak_of(forged(100), VIEWS[view])  # what is loaded when it is first needed
    assert peak_of(forged(100_000_000), VIEWS[view]) < 400_000  # of which zlib takes most
    views = VIEWS | {"steps": encode_steps}
    peak_of(wide(2), views[view])  # what is loaded when it is first needed
    assert peak_of(wide(2**20), views[view]) < 400_000


def test_stories_and_steps_go_from_event_to_event():
    (row, *_) = encode_steps(Timeline.from_events(wide(2**20)))
    assert row == b'{"step":0,"slots":["r0","r1048575"],"waiting":0}\n'
    story = answer_of(read_requests(wide(2**20), "r0")).stories[0]
    assert [part.phase for part in story.parts] == ["prefill", "decode"]
    tracemalloc.start()
    answer = answer_of(read_requests(forged(100_000_000), "b"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(part.phase, part.num_steps) for part in answer.stories[0].parts] == [
        ("wait", 99_999_999),
        ("prefill", 1),
    ]
    assert peak < 300_000


@pytest.mark.parametrize("view", mostly_heavy(VIEWS, "html"))
def test_a_request_costs_nothing_once_it_has_ended(view, monkeypatch):
    monkeypatch.setattr(timeline_module, "MAX_HELD", 64, raising=False)
    monkeypatch.setattr(page_module, "ROWS_OF_BLOCK", 64)
    peak_of(crowded(100), VIEWS[view])  # what is loaded when it is first needed
    least = 5000 if view == "svg" else 250  # it draws some as bars
    few, many = (peak_of(crowded(least + more), VIEWS[view]) for more in (0, 750))
    assert many - few < 100 * 750


def test_records_come_in_order_however_many_runs_they_are_sorted_in(monkeypatch):
    monkeypatch.setattr(timeline_module, "MAX_HELD", 4)
    records = timeline_module.SortedRecords[str](str)
    keys = [number * 7 % 31 // 2 for number in range(31)]
    for place, key in enumerate(keys):
        records.add((key,), f"{key}-{place}")
    in_order = [f"{key}-{place}" for key, place in sorted(zip(keys, range(31), strict=True))]
    assert list(records) == in_order
    first, second = iter(records), iter(records)
    assert [next(first), next(second), next(first), *second] == [
        in_order[0],
        *in_order[:2],
        *in_order[1:],
    ]
    assert len(records) == 31
