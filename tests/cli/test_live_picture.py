"""What the live view shows, seen on the screen of a terminal emulator."""

import json
import re

import pytest
from emulated_run import Clock, Gauges, Run, Screen, feed, long_requests
from examples import examples, mostly_heavy
from hypothesis import given
from hypothesis import strategies as st
from live_svg import PICTURE, picture
from reference_drafts import DraftedJob, play_drafts
from reference_units import beams, guided, play_units

from batcher.events import (
    AdmitEvent,
    ArriveEvent,
    BlockedEvent,
    EndEvent,
    FinishEvent,
    PreemptEvent,
    RejectEvent,
    RunEvent,
    SequenceName,
)
from batcher.result import ErrorInfo
from batcher.scheduling.blocks import BlockUse
from cli.screen.live import LiveView, ScreenLive
from cli.screen.live_picture import plan_map
from cli.screen.terminal import Pace
from cli.screen.theme import THEME
from cli.screen.view import RunPlan

SIZES = [(24, 8), (40, 12), (80, 24), (120, 40), (200, 50)]
NUM_SLOTS = [1, 8, 9, 64, 255, 256, 1000]


def result_line(name, text):
    return json.dumps({"id": name, "index": 0, "text": text}).encode() + b"\n"


CHOICE = {"index": 0, "message": {"role": "assistant", "content": "Hello"}}
OPENAI_ROW = json.dumps(
    {"id": "batch_req_1", "custom_id": "c", "response": {"body": {"choices": [CHOICE]}}}
).encode()


def test_the_screen_of_a_small_run():
    requests = [("a", 3, 3), ("b", 1, 4), ("c", 2, 8), ("d", 4, 4)]
    run = Run(requests, batch_size=2, screen=Screen(80, 24))
    run.gauges.waiting = [SequenceName("d", 0)]
    run.view.note_results([result_line("b", "One   line\n") + result_line("a", "x" * 40)])
    run.steps(3)
    assert run.screen.lines()[:21] == [
        "",
        "requests.jsonl  step 2  3/4 done  0 running  1 queued                      0:03",
        "████████████████████████████████████████▌·············  75%  eta 0:01  6 tokens",
        "2.0 tok/step  2 tok/s  fcfs                                       busy ███ 100%",
        "queue █▄▄ 1  ✓ c stop 2  ✓ a length 3  ✓ b stop 1",
        "",
        "# request tokens           phase    last 3 steps  ┃ admitted",
        "0 a       ████████    3/3  length   ┃━━",
        "1 c       ██······    2/8  stop     ┃┃━",
        "",
        "requests.jsonl  steps 0-2 · 2 slots · fcfs",
        "slot 0 ████████████ 100%",
        "slot 1 ████████████ 100%",
        " queue ████▄▄▄▄▄▄▄▄    2",
        "",
        "queue 1                                    results",
        "d                                          ✓ c  stop    2",
        "                                           ✓ a  length  3  xxxxxxxxxxxxxxxxxxx…",
        "                                           ✓ b  stop    1  One line",
        "",
        "",
    ]
    failed = FinishEvent(2, 0.0, "e", 0, None, "error", None, 0, error=ErrorInfo("bad", "no"))
    feed(run.view.fold, [failed])
    run.view.note_results([OPENAI_ROW, b'{"cut'])
    run.clock.now += 1
    run.view.refresh()
    assert [line[43:] for line in run.screen.lines()[16:18]] == [
        "✗ e  error   0  no",
        "✓ c  stop    2  Hello",
    ]


def fast(run, num_steps):
    run.seconds_per_step = 0.001
    run.steps(num_steps)
    run.seconds_per_step = 1.0
    return run


def test_without_unicode_the_picture_is_ascii():
    requests = [("é", 2, 4), ("b", 9, 9)]
    run = Run(requests, batch_size=1, screen=Screen(encoding="latin-1"), every_step=True).steps(4)
    assert b"".join(run.screen.written).isascii()
    assert re.search(r"0[> ]b +#=\.+ +2/9  decode   \|=\|=", run.screen.text())
    run.view.close()
    assert b"".join(run.screen.written).isascii()


def test_the_header_tells_of_failures_the_queue_memory_and_time():
    run = Run(long_requests(9), batch_size=1).steps(1)
    assert "failed" not in run.screen.text()
    feed(run.view.fold, [RejectEvent(0, 0.0, "x", 0, "unknown-field")])
    feed(run.view.fold, [FinishEvent(0, 0.0, "y", 0, None, "error", None, 0)])
    run.steps(1)
    assert "2/9 done  2 failed" in run.screen.text()
    assert "✗ x failed: unknown-field" in run.screen.text()
    run.clock.now += 11
    assert "unknown-field" not in run.steps(1).screen.text()
    run = Run(long_requests(9), batch_size=2)
    run.gauges.next_up = "req-2"
    assert "next req-2: all 2 slots are taken" in run.steps(1).screen.text()
    run.gauges.num_free = 1
    assert "next req-2: with the next step" in run.steps(1).screen.text()
    arrival = ArriveEvent(1, 0.0, "req-2", 0, "input", 5, 9)
    feed(run.view.fold, [arrival, BlockedEvent(1, 0.0, "req-2", 0, "kv", 5)])
    assert "next req-2: blocked by KV, needs 5 blocks" in run.steps(1).screen.text()
    for num_free, slots, why in (
        (1, 1, "with the next step"),  # cached blocks are free as well
        (0, 1, "blocked by KV, needs 5 blocks"),
        (1, 0, "all 2 slots are taken"),
    ):
        run.gauges.block_use, run.gauges.num_free = BlockUse(10, 4, num_free), slots
        assert f"next req-2: {why}" in run.steps(1).screen.text()
    run = Run(long_requests(9), batch_size=2, is_timed=True, policy="sjf").steps(1)
    assert "KV" not in run.screen.text()
    run.gauges.block_use, run.gauges.now = BlockUse(30, 10, 20), 12.345
    text = run.steps(1).screen.text()
    assert re.search(r"KV █+▒+░+  30 used  10 cached  20 free  of 60 blocks", text)
    bar = re.search("KV (█+)(▒+)(░+)", text)
    cells = [len(part) for part in bar.groups()]
    assert cells == pytest.approx([sum(cells) / 2, sum(cells) / 6, sum(cells) / 3], abs=1)
    assert "sjf  engine 12.3 s" in text
    run.gauges.block_use = BlockUse(30, 10, None)
    text = run.steps(1).screen.text()
    assert "KV 30 blocks used  10 cached  no limit\n" in text


@given(st.integers(1, 130), st.integers(1, 12), st.integers(0, 10**7))
@examples(40)
def test_no_header_is_wider_or_higher_than_there_is_room(columns, rows, step):
    screen = Screen(columns, rows)
    run = Run(long_requests(30), 4, screen, is_timed=True, every_step=True)
    run.gauges.block_use, run.gauges.next_up = BlockUse(3, 1, 2), "日本語" * 9
    feed(run.view.fold, [RejectEvent(0, 0.0, "evil\x1b[2J" * 9, 0, "unknown-field")])
    run.step_index = step
    run.step()
    assert all(len(line) <= columns for line in screen.lines())
    assert not screen.emulator.history.top


def busy_in_map(screen, shape, num_slots):
    """Return for each slot whether its place in the map on `screen` says that it is busy.

    Of a cell that only says how many of its slots are, the first of them.
    """
    lines = screen.lines()
    first = next(n for n, line in enumerate(lines) if "cell" in line) + 1
    cells = []
    for line in lines[first : first + shape.height(num_slots)]:
        text = line[shape.label :].ljust(shape.per_row * shape.size)
        cells += [text[i * shape.size] for i in range(shape.per_row)]
    size = shape.num_slots
    if size == 1:
        return [cell != "·" for cell in cells[:num_slots]]
    return [cells[n // size] == "█" if cells[n // size] in "·█" else None for n in range(num_slots)]


@pytest.mark.parametrize("size", mostly_heavy(SIZES, *SIZES[::3]))
@pytest.mark.parametrize("num_slots", NUM_SLOTS)
def test_every_slot_is_on_the_screen_once(size, num_slots, monkeypatch):
    shapes = []
    monkeypatch.setattr(
        "cli.screen.live_picture.plan_map",
        lambda *known: shapes.append(plan_map(*known)) or shapes[-1],
    )
    idle = {n for n in range(num_slots) if n % 7 == 3 or n % 31 < 9}
    requests = [(f"r{n:04}", 1 if n in idle else 50, 100) for n in range(num_slots)]
    run = Run(requests, num_slots, Screen(*size))
    run.steps(2)
    lines, text = run.screen.lines(), run.screen.text()
    assert all(len(line) < size[0] for line in lines)
    busy = [n not in idle for n in range(num_slots)]
    if not shapes:  # so there are rows
        rows = re.findall(r"(?:^| )(\d+)[ ▸](r\d{4}|-)(?= |$)", text, re.MULTILINE)
        expected = [(str(n), f"r{n:04}" if busy[n] else "-") for n in range(num_slots)]
        assert sorted(rows, key=lambda row: int(row[0])) == expected
        return
    shape = shapes[-1]
    found = busy_in_map(run.screen, shape, num_slots)
    assert len(found) == num_slots
    for number, told in enumerate(found):
        if told is None:
            first = number // shape.num_slots * shape.num_slots
            shared = busy[first : first + shape.num_slots]
            assert any(shared)
            assert not all(shared)
        else:
            assert told == busy[number]
    if shape.num_slots > 1:
        assert f"{shape.num_slots} slots a cell" in text
    else:
        assert "a cell a slot" in text


@pytest.mark.parametrize(("size", "cell"), [((80, 24), "▁ "), ((200, 50), "✗▏")])
def test_a_failure_hides_nobody_who_has_come_since(size, cell):
    requests = [(f"r{n}", 99, 100) for n in range(300)]
    run = Run(requests, 256, Screen(*size), every_step=True).steps(2)
    feed(run.view.fold, [FinishEvent(1, 1.0, "r0", 0, 0, "error", None, 1)])
    run.slots[0] = None
    run.steps(1)
    first = next(line for line in run.screen.lines() if line.startswith("  0 "))
    assert first[4:].startswith(cell)
    assert "✗ r0 failed" in run.screen.text()


def test_beside_the_map_are_the_rows_worth_seeing():
    requests = [(f"r{n}", 50 + n % 40, 50 + n % 60) for n in range(300)]
    run = fast(Run(requests, 256, Screen(80, 24)), 39).steps(1)
    feed(run.view.fold, [FinishEvent(40, 0.0, "r7", 0, 7, "error", None, 9)])
    text = run.steps(1).screen.text()
    assert "256 slots, a cell a slot" in text
    assert all(title in text for title in ("preempted or failed", "about to end", "longest"))
    assert "✗ r7 failed" in text
    ending = text[text.index("about to end") : text.index("longest")]
    assert "r0 " in ending
    assert "41/50" in ending


def shown_after(events, step, total, batch_size=4):
    """Return the rows of the picture after `step`, the events of later ones not seen."""
    screen = Screen()
    plan = RunPlan("t", "fcfs", batch_size, total, is_timed=False)
    display = ScreenLive(screen)
    view = LiveView(plan, Gauges(), screen, display, pace=Pace(0.1), clock=Clock())
    seen = [e for e in events if not isinstance(e, RunEvent | EndEvent) and e.step <= step]
    for number in range(step + 1):
        feed(view.fold, [event for event in seen if event.step == number])
        view.after_step(number)
    lines = screen.lines()
    first = next(n for n, line in enumerate(lines) if " request " in line) + 1
    return [" ".join(line.split()) for line in lines[first : first + batch_size]]


def test_rows_of_a_run_that_speculates_say_how_many_drafts_were_accepted():
    jobs = [DraftedJob(name, 3, 40, speculates=name != "b") for name in "abc"]
    events = play_drafts(jobs, 3, 3).events
    assert shown_after(events, 6, None, 3) == [
        "0▸a ███▌···· 18/40 2/2 decode ┃━━━━━━",
        "1▸b █▍······ 7/40 decode ┃━━━━━━",
        "2▸c ██▌····· 13/40 2/2 decode ┃━━━━━━",
    ]


def test_samples_partners_and_beams_are_rows_that_say_what_they_are():
    units = [*guided("g", 2, 1), *beams("b", 2, 4, num_results=1)]
    events = play_units(units, 4).events
    assert shown_after(events, 0, 2) == [
        "0▸g ▏······· 1/99 prefill ┃",
        "1▸g~ ········ prefill ┃",
        "2▸g#1 ▏······· 1/99 length ┃",
        "3▸g#1~ ········ unused ┃",
    ]
    assert shown_after(events, 1, 2)[2:] == [
        "2▸b ▏······· 1/99 prefill ┃┃",
        "3▸b#1 ▏······· 1/99 prefill ┃┃",
    ]
    assert shown_after(events, 2, 2)[2:] == [
        "2▸b ▏······· 2/99 beam ┃┃━",
        "3▸b#1 ▏······· 2/99 beam ┃┃━",
    ]
    assert " partner " in shown_after(play_units(guided("g", 9), 4).events, 1, 1)[1]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("evil\x1b[2J\nid", r"evil\x1b[2J\nid "),
        ("日本語", "日 本 語  "),
        ("a\u202eb", r"a\u202eb "),
        ("👩‍👩‍👧", None),
        ("request-number-00017", "request…r-00017"),
        ("x" * 1_000_000, "xxxxxxx…xxxxxxx"),
    ],
)
def test_any_id_stays_in_its_column(name, shown):
    run = Run([(name, 9, 9), ("b", 9, 9)], batch_size=2).steps(1)
    row = next(n for n, line in enumerate(run.screen.lines()) if " request " in line) + 1
    evil, harmless = run.screen.cells(row), run.screen.cells(row + 1)
    assert shown is None or evil[2:].startswith(shown)
    assert evil.index("prefill") == harmless.index("prefill")


PALETTES = {  # the sixteen colours, dark ones first, then their bright versions
    "xterm": "000000 cd0000 00cd00 cdcd00 0000ee cd00cd 00cdcd e5e5e5 "
    "7f7f7f ff0000 00ff00 ffff00 5c5cff ff00ff 00ffff ffffff",
    "VS Code": "000000 cd3131 0dbc79 e5e510 2472c8 bc3fbc 11a8cd e5e5e5 "
    "666666 f14c4c 23d18b f5f543 3b8eea d670d6 29b8db e5e5e5",
}


def luminance(color):
    shares = [int(color[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_every_style_is_readable_on_black_and_on_white():
    for style in filter(None, (style.color for style in THEME.styles.values())):
        for palette in PALETTES.values():
            own = luminance(palette.split()[style.number])
            contrasts = [(max(own, ground) + 0.05) / (min(own, ground) + 0.05) for ground in (0, 1)]
            assert min(contrasts) >= 3, style


def colors_of_row(screen, name):
    row = next(n for n, line in enumerate(screen.lines()) if re.match(rf"\d.{name} ", line))
    cells = [screen.emulator.buffer[row][x] for x in range(screen.emulator.columns)]
    return {cell.fg for cell in cells if cell.data in "█▉▊▋▌▍▎▏━━▪"}


def test_a_request_keeps_its_hue_in_every_slot_and_after_a_preemption():
    hues = set()
    for name in ("10", "11"):
        before = (f"xx{name}", 2, 9)  # of the same hue
        run = Run([before, (name, 90, 99)], 2, Screen(has_color=True), every_step=True)
        run.steps(8)
        [hue] = colors_of_row(run.screen, name)
        feed(run.view.fold, [PreemptEvent(8, 0.0, name, 0, 1, "kv", before[0], 0, 5, 8)])
        feed(run.view.fold, [AdmitEvent(8, 0.0, name, 0, 0, "refill", generated=8)])
        run.steps(8)
        assert colors_of_row(run.screen, name) == {hue}
        hues.add(hue)
    assert len(hues) == 2


@pytest.mark.heavy
def test_the_picture_of_the_live_view_is_what_it_draws():
    assert PICTURE.read_text() == picture(), "run tests/cli/live_svg.py, and look at the file"
