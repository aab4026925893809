"""What keys do to the live view and to the pace of a run, seen on a terminal's screen."""

import re
import signal
from itertools import takewhile

import pytest
from emulated_run import Fingers, Run, Screen, feed, long_requests
from hypothesis import given
from hypothesis import strategies as st
from process import ROOT

from batcher.events import AdmitEvent, ArriveEvent, PreemptEvent, PrefillEvent, SequenceName
from cli.screen.live import PACE_KEYS, QUIT_KEYS, InlineLive, ScreenLive
from cli.screen.live_picture import BROWSING_KEYS
from cli.screen.terminal import DELAYS, MAX_TYPED, Pace, Pasted


def played(num_requests=300, batch_size=8, screen=None, **settings):
    return Run(
        long_requests(num_requests), batch_size, screen, keyboard=Fingers(), **settings
    ).steps(1)


def press(run, *keys):
    run.view._controls.keyboard.keys += keys
    run.clock.now += 0.1
    run.view.refresh()
    return run.screen.text()


def shown_slots(run):
    lines = run.screen.lines()
    first = next(n for n, line in enumerate(lines) if " request " in line) + 1
    lines = takewhile(str.strip, lines[first:-2])
    rows = [line.replace("▸", " ").split() for line in lines]
    return [int(row[0]) for row in rows if row and row[0].isdecimal()]


def last_line(run):
    return run.screen.lines()[-2]


def test_the_last_line_and_the_help_tell_of_the_keys():
    run = played()
    assert last_line(run).strip() == "space pause  . step  / find  ? keys  q end"
    assert "keys" not in Run(long_requests(9)).steps(1).screen.text()
    assert "keys" not in played(screen=Screen(40, 12)).screen.text()
    run = played()
    text = press(run, "?")
    assert "# request" not in text
    for key in ("space", ".", "-, +", "up, down", "home, end", "/", "n, N", "escape", "?", "q"):
        assert f"\n{key}" in text
    assert all(what in text for what in SIGNS)
    assert "# request" in press(run, "?")
    run = played(screen=Screen(80, 20))  # without room for both
    text = press(run, "?")
    assert "\nspace" in text
    assert not any(what in text for what in SIGNS)
    text = press(run, "?")
    assert "\nspace" not in text
    assert all(what in text for what in SIGNS)
    assert "# request" in press(run, "?")


SIGNS = (
    "«    preempted",
    "✗    failed",
    "┃     admission",
    "━     running",
    "▪     part of a prefill",
)


def selected(run):
    [row] = (line for line in run.screen.lines() if "◂" in line)
    return int(row.replace("▸", " ").split()[0])


@pytest.mark.parametrize("display", [ScreenLive, InlineLive])
def test_many_slots_are_a_map_and_rows_to_scroll_through(display):
    run = played(1000, 300, display=display)
    assert "300 slots, a cell a slot" in run.screen.text()
    press(run, "down")
    assert selected(run) == 0
    first = shown_slots(run)
    assert first == list(range(len(first)))
    press(run, "down", "down")
    assert shown_slots(run) == first
    assert selected(run) == 2
    press(run, *["down"] * len(first))
    assert shown_slots(run) == [n + 3 for n in first]
    press(run, "page-down")
    assert shown_slots(run)[-1] == 2 * len(first) + 1
    press(run, "page-up", "up")
    assert selected(run) == len(first) + 1
    press(run, "end")
    assert selected(run) == 299
    assert shown_slots(run)[-1] == 299
    assert f"slots {300 - len(first)} to 299 of 300" in run.screen.text()
    press(run, "home")
    assert shown_slots(run) == first
    assert "a cell a slot" in press(run, "escape")


def test_the_page_on_the_live_view_tells_of_the_same_keys():
    page = (ROOT / "docs" / "guide/live-view.md").read_text()
    keys = page.partition("## Keys")[2].partition("\n## ")[0]
    told = re.findall(r"^\| `(.+?)` \| (.+) \|$", keys, re.MULTILINE)
    assert tuple(told) == PACE_KEYS + BROWSING_KEYS + QUIT_KEYS


@pytest.mark.parametrize("num_requests", [1, 2])
def test_one_request_alone_is_selected_at_the_start(num_requests):
    run = Run(long_requests(num_requests), keyboard=Fingers())
    run.gauges.texts = {"req-0": ("Where to?", "Over there")}
    text = run.steps(2).screen.text()
    assert ("prompt: Where to?\ntext: Over there" in text) == (num_requests == 1)
    assert "prompt: Where to?" not in press(run, "escape")


def test_a_selected_slot_shows_its_request_with_prompt_and_text_so_far():
    run = Run(long_requests(9), batch_size=2, screen=Screen(80, 40), keyboard=Fingers()).steps(3)
    run.gauges.texts = {"req-1": ("Where to?\n", "Over " * 30 + "there")}
    text = press(run, "down", "down")
    assert "req-1  3 of 100 tokens\narrived in step 0 with 5 prompt tokens\nslot 1 from" in text
    assert "\nprompt: Where to?\ntext: Over Over" in text
    assert "there\n" in text
    chunk = PrefillEvent(3, 3.0, "req-5", 0, 0, 4, 0)
    admit = AdmitEvent(2, 2.0, "req-5", 0, 0, "refill", cached=8, left=4)
    arrive = ArriveEvent(0, 0.0, "req-5", 0, "input", 12, 9)
    preempt = PreemptEvent(2, 2.0, "req-0", 0, 0, "kv", "req-1", 0, 5, 2)
    feed(run.view.fold, [preempt, arrive, admit, chunk])
    run.gauges.next_up, run.gauges.waiting = "req-0", [SequenceName("req-0", 0)]
    text = press(run, "/", *"req-5", "enter")
    assert "waited 2 steps\nslot 0 from step 2: 8 of 12 tokens from the cache, prefill in 2" in text
    text = press(run, "/", *"req-0", "enter")
    assert "preempted before step 2 (for req-1): 5 tokens to compute again\nwaits since" in text
    assert "since step 2: all 2 slots are taken" in text
    assert "queue" in press(run, "escape")


def find(run, text):
    return press(run, "/", *text, "enter")


def test_the_whole_id_goes_before_a_part_and_the_next_ones_follow():
    run = played(1000, 300)
    assert "req-29 is in slot 29" in find(run, "req-29")
    assert "req-290 is in slot 290" in press(run, "n")
    assert "req-291 is in slot 291" in press(run, "n")
    assert "req-29 is in slot 29" in press(run, "N", "N")
    assert "req-299 is in slot 299" in press(run, "N")
    assert "req-29 is in slot 29" in press(run, "n")


def test_whom_one_looks_for_is_followed_or_told_as_unknown():
    run = Run([("a", 2, 2), ("b", 2, 2)], batch_size=1, keyboard=Fingers())
    run.gauges.upcoming = ["b"]
    run.steps(1)
    assert last_line(run).startswith(" " * 9)
    find(run, "b")
    assert last_line(run).startswith("b waits in the queue: its line is not read yet")
    for queued, waiting, text in (
        (1, ["b"], "b waits in the queue: its line is not read yet"),
        (1, ["c"], "b has not arrived"),
        (2, ["c"], "b: its line is not read yet"),
    ):
        run.gauges.num_queued, run.gauges.num_coming = queued, 1
        run.gauges.waiting = [SequenceName(name, 0) for name in waiting]
        find(run, "b")
        assert last_line(run).startswith(text)
    run.gauges.upcoming = []
    run.steps(2)
    assert last_line(run).startswith("b is in slot 0")
    run.steps(1)
    assert last_line(run).startswith("b ended in step 3: length, 2 tokens")
    assert "a ended in step 1" in find(run, "a")
    run = played(2, 1)
    assert "unknown: zzz; it was not read yet, or ended long ago" in find(run, "zzz")
    run.gauges.knows_all = True
    assert "no request has zzz in its id" in find(run, "zzz")
    run.view.fold.take(ArriveEvent(1, 1.0, "zzz", 0, "follow", 1, 1))
    assert "zzz waits since step 1" in find(run, "zzz")


def test_what_is_typed_can_be_mended_and_what_is_pasted_goes_into_the_field(monkeypatch):
    run = played()
    press(run, "/", "q", "?", " ", "backspace", "backspace", "backspace", *"req-1")
    assert last_line(run).startswith("find req-1_")
    press(run, "escape")
    assert not last_line(run).startswith("find")
    press(run, "/", "backspace")
    assert not last_line(run).startswith("find")
    press(run, "/", "enter", "n")
    assert "◂" not in run.screen.text()
    run = played()
    monkeypatch.setattr("cli.screen.live.stop_by_key", lambda: pytest.fail("ended"))
    press(run, Pasted("x"))
    before = run.screen.lines()[4:]  # above are times
    for text in (" ", "q", "/", "?", "n", ".+", "down"):
        press(run, Pasted(text))
        assert run.screen.lines()[4:] == before
    press(run, "/", "r", Pasted("eq-1"))
    assert last_line(run).startswith("find req-1_")
    press(run, Pasted("0" * 500))
    assert len(run.view._controls.browser._prompt.typed) == MAX_TYPED


KEYS = ["up", "down", "page-up", "page-down", "home", "end", "left", "right"]
KEYS += ["/", "1", "0", "-", "+", "enter", "escape", "backspace", "n", "N", "?", " ", ".", "tab"]
KEYS += [Pasted("q 1")]
SIZES = st.tuples(st.integers(16, 130), st.integers(3, 45))


@given(
    st.sampled_from([1, 9, 70, 300]), st.lists(st.one_of(st.sampled_from(KEYS), SIZES), max_size=12)
)
def test_whatever_is_pressed_the_picture_is_whole_and_fits(num_slots, moves):
    run = played(400, num_slots)
    for move in moves:
        if move in KEYS:
            press(run, move)
        else:
            run.screen.emulator.resize(*move[::-1])
            run.clock.now += 1
            run.steps(1)
        lines = run.screen.lines()
        assert all(len(line) < run.screen.size.columns for line in lines)
        assert not lines[-1]
        assert sum("/400 done" in line for line in lines) <= 1
        if any(" request " in line for line in lines):
            numbers = shown_slots(run)
            assert len(numbers) == len(set(numbers))
            assert set(numbers) <= set(range(num_slots))


def holds(pace, now=0.0):
    pace.begin(now)
    return pace.time_left(now)


def test_a_paused_run_stays_until_it_is_let_go_on_or_for_a_step():
    pace = Pace()
    assert holds(pace) == 0
    pace.press(" ")
    assert holds(pace) == float("inf")
    pace.press(".")
    assert pace.time_left(1.0) == 0
    assert holds(pace) == float("inf")
    for key in "..":
        pace.press(key)
    assert [pace.time_left(1.0), holds(pace), holds(pace)] == [0, 0, float("inf")]
    pace.press(" ")
    assert pace.time_left(9.0) == 0


@given(st.sampled_from([0.0, 0.03, 0.1, 9.0]), st.lists(st.sampled_from("+-=")))
def test_slower_and_faster_are_steps_between_nothing_and_five_seconds(delay, keys):
    pace = Pace(delay)
    for key in keys:
        before = pace.delay
        pace.press(key)
        if key == "-":
            assert pace.delay > before or before >= DELAYS[-1]
        else:
            assert pace.delay < before or before == 0
        assert holds(pace) == pace.delay
    assert pace.delay in (delay, *DELAYS)


def test_a_paused_run_keeps_what_has_happened_and_a_slow_one_shows_every_step():
    run = played(9, 1)
    run.view.fold.take(PreemptEvent(1, 1.0, "req-0", 0, 0, "kv", "req-1", 0, 5, 1))
    run.view.after_step(1)
    assert "0«" in press(run, " ")
    run.clock.now += 500
    assert "0«" in press(run, "?", "?")
    assert "« req-0 preempted for req-1" in run.screen.text()
    for step in range(2, 9):
        run.clock.now += 5
        run.view.after_step(step)
    assert "0«" not in run.screen.text()
    run = played()
    press(run, "-")
    assert "10 ms after each step" in last_line(run)
    for key, text in ((" ", "10 ms after each step: space continues, . "), ("+", "no delay: ")):
        press(run, key)
        assert last_line(run).startswith(f"paused, {text}")
    press(run, " ", "-")
    frames = len(run.screen.written)
    run.seconds_per_step = 0.001
    run.steps(10)
    assert len(run.screen.written) == frames + 10


def test_q_is_a_ctrl_c():
    received = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        run = played()
        press(run, "/", "q", "enter")
        assert not received
        press(run, "q")
        assert received == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("leave", ["close", "step_aside"])
def test_who_leaves_the_terminal_lets_go_of_its_keyboard(leave):
    run = played()
    assert not run.view._controls.keyboard.is_released
    getattr(run.view, leave)()
    assert run.view._controls.keyboard.is_released
