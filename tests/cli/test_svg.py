import re
from heapq import heappop, heappush
from operator import itemgetter
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_events import RUN, admit, arrive, drop, finish
from msgspec.structs import replace
from reference_paged import CROWDED, Limits, paged_workloads, play_paged
from reference_schedule import DESIGN_JOBS, Job, timeline_of

from batcher.trace.timeline import EVERYTHING, Selection, Timeline
from cli.views.svg import FIGURE_WIDTH, NAME_WIDTH, render_svg

SVG = "{http://www.w3.org/2000/svg}"
WIDTH = 900
CHART = (NAME_WIDTH, WIDTH - FIGURE_WIDTH)


def long_run(num_requests, batch):
    """Return a run without a pause in which lengths differ."""
    free = [(0, slot) for slot in range(batch)]
    events = []
    for number in range(num_requests):
        start, slot = heappop(free)
        end = start + 3 + number % 90
        name = f"r{number}"
        events += [(0, arrive(name)), (start, admit(name, slot, start))]
        events.append((end - 0.5, finish(name, slot, end - 1)))
        heappush(free, (end, slot))
    in_order = [event for _, event in sorted(events, key=itemgetter(0))]
    return Timeline.from_events([replace(RUN, batch=batch), *in_order])


def parsed(picture):
    return ET.fromstring(picture)  # noqa: S314 - it is ours


def picture_of(timeline, selection=EVERYTHING, **options):
    return parsed(render_svg(timeline, selection, width=WIDTH, **options))


def bars_of(root):
    """Return what is told of each bar, and the pixels between which it is."""
    bars = []
    for group in root.iter(f"{SVG}g"):
        body = next(path for path in group.iter(f"{SVG}path") if path.get("class") != "begin")
        across = [float(x) for x in re.findall(r"[MHL](-?[\d.]+)", body.get("d"))]
        bars.append((group.find(f"{SVG}title").text, min(across), max(across)))
    return bars


def texts_of(root):
    return [text.text for text in root.iter(f"{SVG}text")]


def classes_of(root):
    return {name for element in root.iter() for name in element.get("class", "").split()}


def check_rules(root):
    """Nothing is drawn beside the picture, and all looks come from its style."""
    width, height = float(root.get("width")), float(root.get("height"))
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    style = root.find(f"{SVG}style").text
    for element in root.iter():
        assert not {"fill", "stroke", "style"} & set(element.keys())
        names = element.get("class", "").split()
        assert all(f".{name}" in style for name in names)
        if element.tag in {f"{SVG}path", f"{SVG}rect"} and element.get("width") != "100%":
            numbers = [element.get("x", "0"), *re.findall(r"[MHL](-?[\d.]+)", element.get("d", ""))]
            assert all(0 <= float(x) <= width for x in numbers)
            numbers = [element.get("y", "0"), *re.findall(r"[V ](-?[\d.]+)", element.get("d", ""))]
            assert all(0 <= float(y) <= height for y in numbers)
            assert float(element.get("width", 0)) >= 0


def test_a_bar_is_as_long_as_its_steps_and_what_differs_in_kind_in_shape():
    root = picture_of(timeline_of(DESIGN_JOBS))
    per_step = (CHART[1] - CHART[0]) / 7
    bars = bars_of(root)
    assert [told for told, _, _ in bars] == [
        "a: slot 0, steps 0-2, prefill 1, length",
        "d: slot 0, steps 3-6, prefill 1, length",
        "b: slot 1, steps 0-0, prefill 1, length",
        "c: slot 1, steps 1-2, prefill 1, length",
    ]
    for (_, left, right), (start, end) in zip(bars, [(0, 3), (3, 7), (0, 1), (1, 3)], strict=True):
        assert left == pytest.approx(CHART[0] + start * per_step, abs=0.1)
        assert right == pytest.approx(CHART[0] + end * per_step - 1, abs=0.1)
    assert {"a", "b", "c", "d", "slot 0", "slot 1", "100%", "43%", "queue", "max 2"} <= {
        *texts_of(root)
    }
    begin = [RUN, arrive("bad"), admit("bad", 0), arrive("extra"), admit("extra", 1)]
    end = [finish("bad", 0, 4, reason="error"), finish("extra", 1, 4), drop("extra", 4)]
    root = picture_of(Timeline.from_events([*begin, *end]))
    assert {"failed", "cross", "ring", "striped"} <= classes_of(root)
    assert {"failed", "dropped"} <= {*texts_of(root)}
    plain = picture_of(timeline_of(DESIGN_JOBS))
    assert not {"cross", "torn", "ring"} & classes_of(plain)
    assert not {"failed", "dropped", "preempted"} & {*texts_of(plain)}
    crowded = picture_of(Timeline.from_events(play_paged(CROWDED, Limits()).events))
    assert "torn" in classes_of(crowded)
    assert {"preempted", "KV blocks", "of 8"} <= {*texts_of(crowded)}


@given(paged_workloads(), st.integers(0, 9), st.integers(0, 9))
def test_every_picture_keeps_the_rules_and_shows_every_span(workload, start, stop):
    jobs, limits = workload
    timeline = Timeline.from_events(play_paged(jobs, limits).events)
    for chosen in (Selection(), Selection(start=start, stop=stop), Selection(slots=frozenset({0}))):
        root = picture_of(timeline, chosen)
        check_rules(root)
        if timeline.window(chosen):
            spans = timeline.select_spans(chosen)
            labels = sorted(f"{s.label}: slot {s.slot}, steps {s.start}-{s.end - 1}" for s in spans)
            assert sorted(told.split(", prefill")[0] for told, _, _ in bars_of(root)) == labels


def test_any_id_is_text_and_a_pause_is_no_gap():
    timeline = timeline_of([Job("a", 2), Job("b", 2, 8.0)], 1)
    (_, _, end), (_, start, _) = bars_of(picture_of(timeline))
    assert start - end == pytest.approx(1, abs=0.1)
    name = "<b>&\"'\x00\x1b]\u202e</b>"
    root = picture_of(timeline_of([Job(name, 30)], 1))
    assert r"<b>&\"'\x00\x1b]\u202e</b>".replace(r"\"", '"') in texts_of(root)
    check_rules(root)


@pytest.mark.heavy
def test_a_long_run_is_areas_and_a_close_up_and_stays_small():
    timeline = long_run(10_000, 64)
    picture = render_svg(timeline)
    root = parsed(picture)
    check_rules(root)
    assert len(picture) < 600_000
    assert 0 < len(bars_of(root)) < 4000
    assert any(text.startswith("steps ") for text in texts_of(root))
    assert any("slots: " in text for text in texts_of(root))
    assert len(render_svg(timeline, width=8000)) < 4_000_000
    window = render_svg(long_run(10_000, 8), Selection(start=1))
    assert not bars_of(parsed(window))
    assert len(window) < 300_000
