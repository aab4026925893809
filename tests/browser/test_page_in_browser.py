"""A page in a real browser shows the run: its spans, stories, numbers of steps, and no more."""

import json

import pytest
from page_runs import events_of, short_run

from batcher.events import AdmitEvent, ArriveEvent, EndEvent, FinishEvent, PreemptEvent, RunEvent
from batcher.explaining.story import read_requests, story_of
from batcher.page.page import Opening, PageDifference, PageFacts, PageRun, PageTimeline, encode_page
from batcher.trace.views import encode_spans, encode_steps
from cli.views.story_text import PAGE_WORDS, tell

VISIBLE = "(text) => visible(text, 4000)"
PLAIN = 0  # a seed of a run with times, waits and preemptions


def long_run():
    return short_run([f"r{number}" for number in range(40)])


def waiting_run(times):
    """The events of a run of one slot, in which `low` loses it to others so often."""
    yield RunEvent(batch=1, model="simulated", settings={})
    yield ArriveEvent(0, 0.0, "low", 0, "input", 1, times + 1)
    for number in range(times):
        step, name = 2 * number, f"r{number}"
        yield AdmitEvent(step, float(step), "low", 0, 0, "refill")
        yield ArriveEvent(step + 1, step + 1.0, name, 0, "input", 1, 1)
        yield PreemptEvent(step + 1, step + 1.0, "low", 0, 0, "priority", name, 0, 1, 1)
        yield AdmitEvent(step + 1, step + 1.0, name, 0, 0, "preempted")
        yield FinishEvent(step + 1, step + 1.0, name, 0, 0, "length", None, 1)
    yield AdmitEvent(2 * times, 2.0 * times, "low", 0, 0, "refill")
    yield FinishEvent(2 * times, 2.0 * times, "low", 0, 0, "length", None, times + 1)
    yield EndEvent(2 * times + 1, 2.0 * times + 1, times + 1, 1)


def html_of(runs, above="", **facts):
    return b"".join(encode_page(runs, PageFacts(**facts), PAGE_WORDS, "a run", above))


def page_of(events, above="", **facts):
    return html_of([PageRun("a run", PageTimeline.from_events(events))], above, **facts)


def rows_of(encode, events):
    return [json.loads(line) for line in encode(PageTimeline.from_events(events))]


@pytest.mark.parametrize("seed", range(8))
def test_each_span_leads_to_the_story_that_trace_why_tells(show, seed):
    events = events_of(seed)
    tab = show(page_of(events))
    shown = tab.evaluate(
        """() => page.view.runs.flatMap((run) => Array.from(run.bySlot, (span) => {
          page.select(run, run.spans.sequence[span], span);
          const at = run.spanAt(run.spans.slot[span], run.spans.start[span]);
          const lines = [...page.panel.querySelectorAll(".story > p")].map((p) => p.textContent);
          return [at === span, page.panel.querySelector("h3").textContent, lines];
        }))"""
    )
    kept = read_requests(events)
    stories = [tell(story_of(kept.timeline, request)) for request in kept.all]
    titles = {
        tab.evaluate("(text) => visible(text, 60)", request.label): story
        for request, story in zip(kept.all, stories, strict=True)
    }
    assert len(shown) == len(kept.timeline.spans)
    for is_found, label, lines in shown:
        assert is_found
        waits_left = [line for line in titles[label][1:] if "waited" not in line]
        expected = [tab.evaluate(VISIBLE, line.strip()) for line in waits_left]
        assert [line.strip() for line in lines[1:] if "waited" not in line] == expected


@pytest.mark.parametrize("seed", range(12))
def test_numbers_of_steps_are_those_of_the_trace(show, seed):
    events = events_of(seed)
    tab = show(page_of(events))
    steps = rows_of(encode_steps, events)
    for name, of in {
        "slots": lambda row: sum(label is not None for label in row["slots"]),
        "waiting": lambda row: row["waiting"],
        "tokens": lambda row: row.get("tokens"),
        "blocks": lambda row: row.get("blocks"),
    }.items():
        numbers = tab.evaluate(
            """([name, steps]) => {
              const series = page.view.runs[0].series[name];
              return series ? Array.from({length: steps}, (_, step) => series.at(step)) : null;
            }""",
            [name, len(steps)],
        )
        expected = [of(row) for row in steps]
        if numbers is not None and None not in expected:
            assert numbers == expected


def test_every_pixel_has_the_largest_and_the_mean_of_its_steps(show):
    tab = show(page_of(events_of(PLAIN)))
    assert (
        tab.evaluate(
            """() => {
          const step = [], value = [];
          for (let i = 0, at = 0; i < 5000; i++, at += 1 + (i * 7) % 3) {
            step.push(at);
            value.push((i * 7919) % 997);
          }
          const series = new Series({step, value}), wrong = [];
          for (let i = 0; i < 300; i++) {
            const from = (i * 31) % 8800, edges = [from, from + 1, from + 1 + (i * 17) % 900];
            const found = series.binned(Float64Array.from(edges));
            for (const pixel of [0, 1]) {
              let most = 0, sum = 0;
              for (let at = edges[pixel]; at < edges[pixel + 1]; at++) {
                most = Math.max(most, series.at(at));
                sum += series.at(at);
              }
              const mean = sum / (edges[pixel + 1] - edges[pixel] || 1);
              if (most !== found[pixel][0] || Math.abs(mean - found[pixel][1]) > 1e-9)
                wrong.push(edges);
            }
          }
          return wrong;
        }"""
        )
        == []
    )


def test_a_click_tells_the_story_and_find_goes_from_hit_to_hit(show):
    tab = show(page_of(events_of(PLAIN)))
    box = tab.locator("canvas[role=application]").bounding_box()
    slot = tab.evaluate("page.view.runs[0].spans.slot[0]")
    x, y = box["x"] + 60, box["y"] + (slot + 0.5) * tab.evaluate("page.charts[0].rowHeight")
    tab.mouse.move(x, y)
    first = "page.view.runs[0].sequences.label[page.view.runs[0].spans.sequence[0]]"
    label = tab.evaluate(f"visible({first}, 60)")
    assert label in tab.inner_text(".tip")
    tab.mouse.click(x, y)
    tab.wait_for_selector(".story")
    assert tab.inner_text(".story h3") == label
    tab.locator(".story .link").first.click()
    first, last = tab.evaluate("page.view.x.domain()")
    assert 0 <= first < last
    tab = show(page_of(long_run()))
    tab.fill("#find", "r1")
    assert tab.inner_text(".status") == "11 found"
    assert tab.locator(".hits button").all_inner_texts() == ["r1", *(f"r1{n}" for n in range(7))]
    for expected in ("r1", "r10"):
        tab.press("#find", "Enter")
        assert tab.inner_text(".story h3") == expected
    tab.check("#only")
    assert tab.inner_text(".status") == "11 of 40 spans shown"
    tab.fill("#find", "nobody")
    assert tab.inner_text(".status") == "0 of 40 spans shown"
    tab.click("#clear")
    assert tab.inner_text(".status") == ""


def test_a_filter_shows_what_it_says(show):
    events = events_of(PLAIN)
    tab = show(page_of(events))
    spans = rows_of(encode_spans, events)
    shown = "Array.from(page.view.filtered[0].shows).flatMap((is, i) => (is ? [i] : []))"
    tab.select_option("#state", "preempted")
    preempted = [i for i, span in enumerate(spans) if span["outcome"] == "preempted"]
    assert tab.evaluate(shown) == preempted != []
    tab.select_option("#state", "waiting")
    assert set(tab.evaluate(shown)) >= {i for i, span in enumerate(spans) if span.get("resumed")}
    tab.click("#clear")
    assert tab.evaluate(shown) == list(range(len(spans)))
    tab.select_option("#outcome", "length")
    assert {spans[i]["id"] for i in tab.evaluate(shown)} == {
        span["id"] for span in spans if span["outcome"] == "length"
    }


def test_keys_wheel_and_drag_move_in_time_before_anything_is_clicked(show):
    width = "((d) => d[1] - d[0])(page.view.x.domain())"
    tab = show(page_of(long_run()))
    tab.keyboard.press("+")
    assert tab.evaluate(width) == pytest.approx(20)
    tab = show(page_of(long_run(), is_part=True))
    tab.keyboard.press("+")
    assert tab.evaluate(width) == 40
    tab = show(page_of(long_run()))
    domain = "page.view.x.domain()"
    canvas = tab.locator("canvas[role=application]")
    box = canvas.bounding_box()
    whole = tab.evaluate(domain)
    assert whole == [0, 40]
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 10)
    tab.mouse.wheel(0, -400)
    first, last = tab.evaluate(domain)
    assert 0 < first < last < 40
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] / 2 - 60, box["y"] + 10, steps=4)
    tab.mouse.up()
    assert tab.evaluate(domain)[0] > first
    canvas.focus()
    tab.keyboard.press("Home")
    assert tab.evaluate(domain)[0] == 0
    tab.keyboard.press("End")
    assert tab.evaluate(domain)[1] == pytest.approx(40)
    tab.keyboard.press("0")
    assert tab.evaluate(domain) == whole
    tab.keyboard.press("+")
    tab.keyboard.press("+")
    assert tab.evaluate(domain)[1] - tab.evaluate(domain)[0] == pytest.approx(10)
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Shift+ArrowRight")
    assert tab.inner_text(".story h3") in tab.inner_text(".status")
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.className") == "panel"
    tab.keyboard.press("Escape")
    assert tab.locator(".story").count() == 0
    tab.keyboard.press("?")
    assert tab.is_visible("dialog.help")
    tab.keyboard.press("Escape")
    assert not tab.is_visible("dialog.help")
    tab.keyboard.press("/")
    assert tab.evaluate("document.activeElement.id") == "find"


@pytest.mark.parametrize("is_part", [False, True])
def test_the_chart_fills_the_window_whatever_its_size(show, is_part):
    report = "<h1>report</h1><dl class='numbers'><div><dt>steps</dt><dd>40</dd></div></dl>"
    canvas = "document.querySelector('canvas[role=application]').getBoundingClientRect().bottom"
    for events in (long_run(), events_of(PLAIN)):
        tab = show(page_of(events, report, is_part=is_part))
        for width, height in ((1280, 800), (1280, 1200), (700, 900), (1900, 700)):
            tab.set_viewport_size({"width": width, "height": height})
            panel = tab.locator(".panel").bounding_box()
            hint = panel["height"] if width <= 900 else 0  # it is below the chart
            tab.wait_for_function(f"Math.abs({canvas} + {hint} + 12 - innerHeight) < 4")
            assert tab.evaluate("document.documentElement.scrollHeight") <= height
    tab.evaluate("page.choose(page.view.runs[0], 0)")
    assert tab.locator(".panel").bounding_box()["height"] < 700
    assert tab.locator(".legend li").all_inner_texts()[2:5] == ["◂preempted", "✕failed", "selected"]


def test_keys_reach_the_chart_from_an_empty_place_and_the_focus_is_visible(show):
    tab = show(page_of(long_run()))
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert tab.evaluate(outline) == "solid"
    tab.locator(".controls").click(position={"x": 1100, "y": 5})
    assert tab.evaluate("document.activeElement.tagName") == "BODY"
    tab.keyboard.press("+")
    tab.keyboard.press("ArrowRight")
    first, last = tab.evaluate("page.view.x.domain()")
    assert (first > 10, last - first) == (True, pytest.approx(20))
    for _ in range(10):
        tab.keyboard.press("Tab")
        assert tab.evaluate(outline) == "solid"


def test_seconds_are_those_of_the_events(show):
    events = next(
        e for e in map(events_of, range(9)) if any(x.__class__.__name__ == "StepsEvent" for x in e)
    )
    tab = show(page_of(events))
    timeline = PageTimeline.from_events(events)
    tab.click("#scale")
    assert tab.inner_text("#scale") == "Seconds"
    last = timeline.figures.end_of(timeline.num_steps - 1)
    assert tab.evaluate("page.view.x.domain()") == pytest.approx([0, last])
    for step in range(timeline.num_steps):
        middle = (timeline.figures.start_of(step) + timeline.figures.end_of(step)) / 2
        assert (
            int(tab.evaluate("(at) => page.view.position(page.view.runs[0], at)", middle)) == step
        )
    assert not show(page_of(long_run())).is_enabled("#scale")


def test_two_runs_go_in_step_and_both_tell_of_the_chosen_request(show):
    other = short_run([f"r{number}" for number in range(39, -1, -1)])
    runs = [("one", long_run()), ("other", other)]
    diff = PageDifference(7, ["A does one thing", "\u202eB another"], ["r12"])
    shown = [PageRun(name, PageTimeline.from_events(events)) for name, events in runs]
    tab = show(html_of(shown, diff=diff))
    assert tab.inner_text(".diff pre") == "A does one thing\n\\u{202e}B another"
    assert tab.evaluate("page.charts.map((chart) => chart.marked)") == [7, 7]
    tab.get_by_role("button", name="Show step 7").click()
    first, last = tab.evaluate("page.view.x.domain()")
    assert 0 <= first <= 7 < last < 40
    tab.get_by_role("button", name="r12").click()
    assert tab.locator(".story h3").all_inner_texts() == ["r12", "r12"]
    starts = """page.view.runs.map((run) =>
      run.spans.start[run.spansOf(run.sequences.label.indexOf("r12"))[0]])"""
    assert tab.evaluate(starts) == [12, 27]


def test_a_report_has_its_timeline_in_it_and_scrolls_past_it(show):
    report = "<article class='report'><h1>What it came to</h1></article>"
    tab = show(page_of(long_run(), report, is_part=True))
    assert tab.inner_text("h1") == "What it came to"
    domain = tab.evaluate("page.view.x.domain()")
    tab.locator("canvas[role=application]").hover()
    tab.mouse.wheel(0, -200)
    assert tab.evaluate("page.view.x.domain()") == domain
    tab.keyboard.down("Control")
    tab.mouse.wheel(0, -200)
    tab.keyboard.up("Control")
    assert tab.evaluate("page.view.x.domain()") != domain
    tab.emulate_media(media="print")
    assert not tab.is_visible(".controls")
    assert tab.is_visible("canvas[role=application]")


def test_what_is_shown_is_within_the_run_also_where_it_cannot_be_shown_closer(show):
    tab = show(page_of(short_run(["a", "b", "c", "d"])))
    for request in range(4):
        tab.evaluate(f"page.choose(page.view.runs[0], {request})")
        assert tab.evaluate("page.view.x.domain()") == [0, 4]
    tab = show(page_of(long_run()))
    for request in range(40):
        first, last = tab.evaluate(
            f"(page.choose(page.view.runs[0], {request}), page.view.x.domain())"
        )
        assert 0 <= first <= request < last <= 40 + 1e-9


def test_paper_is_light_and_the_screen_is_as_it_was_after_it(show):
    tab = show(page_of(long_run()), color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = tab.evaluate(background)
    tab.evaluate(f"addEventListener('beforeprint', () => (globalThis.printed = {background}))")
    tab.pdf()
    assert tab.evaluate("printed") == "rgb(255, 255, 255)"
    assert tab.evaluate(background) == dark != "rgb(255, 255, 255)"
    tab.emulate_media(color_scheme="light")
    assert tab.evaluate(background) == "rgb(255, 255, 255)"


def test_where_scripts_are_off_the_page_says_what_is_missing(browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_bytes(page_of(long_run(), "<h1>What it came to</h1>", is_part=True))
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(path.as_uri())
    assert tab.inner_text("body").split("\n\n") == [
        "What it came to",
        "The timeline needs JavaScript, which is off in this browser.",
    ]
    context.close()


def test_a_page_opens_with_what_was_selected_and_tells_of_the_first_waits(show):
    opening = Opening(steps=(10, 20), requests=["r12"], slots=[0])
    tab = show(page_of(long_run(), opening=opening))
    assert tab.evaluate("page.view.x.domain()") == pytest.approx([10, 20])
    assert tab.inner_text(".status") == "1 of 40 spans shown"
    tab = show(page_of(waiting_run(250)))
    tab.evaluate("page.choose(page.view.runs[0], 0)")
    rows = tab.locator(".story tr").all_inner_texts()
    assert len(rows) == 200
    assert rows[0] == "step 1\tfor a slot"
    assert tab.locator(".story p").last.inner_text() == "and 50 more"


def test_a_narrow_window_and_a_keyboard_reach_everything(show):
    tab = show(page_of(events_of(PLAIN)), viewport={"width": 360, "height": 640})
    tab.evaluate("page.choose(page.view.runs[0], 0)")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    tab = show(page_of(long_run()))
    nameless = """[...document.querySelectorAll("button, input, select, canvas[role]")]
      .filter((one) => !one.ariaLabel && !one.labels?.length && !one.textContent.trim())
      .map((one) => one.outerHTML)"""
    assert tab.evaluate(nameless) == []
    reached = set()
    for _ in range(14):
        tab.keyboard.press("Tab")
        reached.add(
            tab.evaluate("document.activeElement.id || document.activeElement.getAttribute('role')")
        )
    assert {"find", "only", "outcome", "state", "theme", "help", "application"} <= reached
