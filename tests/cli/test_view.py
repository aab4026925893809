"""Which view a run gets, and the views that are no pictures."""

import os
import subprocess
import sys

import pytest
from emulated_run import Clock, Gauges, Screen, feed
from process import start
from reference_paged import CROWDED, Limits, play_paged

from batcher.events import AdmitEvent, ArriveEvent, BlockedEvent
from batcher.scheduling.blocks import BlockUse
from cli.screen.live_state import ProgressLines
from cli.screen.view import RunPlan, View


def test_a_log_gets_a_line_every_five_seconds_and_none_for_a_short_run():
    screen, clock = Screen(200, 24), Clock()
    plan = RunPlan("in\x1b.jsonl", "fcfs", 1, None, is_timed=False)
    lines = ProgressLines(plan, Gauges(), screen, clock=clock)
    with lines:
        feed(lines.fold, [ArriveEvent(0, 0.0, "a", 0, "input", 5, 100)])
        feed(lines.fold, [AdmitEvent(0, 0.0, "a", 0, 0, "empty")])
        for step in range(12):
            clock.now = float(step)
            lines.after_step(step)
            assert len(screen.written) == (step >= 5) + (step >= 10)
    rate = "1.0 tokens per step, 1"
    assert screen.text() == (
        rf"in\x1b.jsonl, step 5, 0 done, 1 running, 0 queued, {rate}.2 per second, 0:05"
        "\n"
        rf"in\x1b.jsonl, step 10, 0 done, 1 running, 0 queued, {rate} per second, 0:10"
    )


def test_a_plain_line_tells_in_words_what_the_picture_shows():
    screen, clock, gauges = Screen(300, 24), Clock(), Gauges()
    lines = ProgressLines(RunPlan("in", "fcfs", 2, 3, is_timed=False), gauges, screen, clock=clock)
    feed(lines.fold, [e for e in play_paged(CROWDED, Limits()).events[1:-1] if e.step < 8])
    feed(lines.fold, [BlockedEvent(7, 7.0, "b", 0, "kv", 3)])
    gauges.block_use, gauges.num_queued, gauges.num_coming = BlockUse(4, 1, 1), 1, 1
    clock.now = 5.0
    lines.after_step(7)
    assert screen.text() == (
        "in, step 7, 0 of 3 done, 1 running, 1 queued, 1 not arrived, 1.9 tokens per step, "
        "3 per second, 67%, 0:02 left, 1 preemption, KV blocks: 4 used, 1 cached, 1 free, "
        "next b: blocked by KV, needs 3 blocks, 0:05"
    )
    gauges.block_use = BlockUse(4, 1, None)
    clock.now = 10.0
    lines.after_step(7)
    assert "KV blocks: 4 used, 1 cached, no limit, next b" in screen.lines()[1]


def test_the_quiet_view_writes_messages_only():
    screen = Screen()
    with View(screen) as view:
        assert view.fold is None
        view.keep_up()
        view.after_step(0)
        view.refresh()
        view.write_message("warning\n")
    assert screen.written == [b"warning\n"]


OPEN_VIEW = """
import sys
from types import SimpleNamespace
from cli.screen.progress import open_view

from cli.screen.view import GaugeReading, RunPlan
gauges = SimpleNamespace(read_gauges=lambda: GaugeReading(0.0, 1, None, None),
                         find_upcoming=lambda text: None, knows_upcoming=lambda: False)
view = open_view(RunPlan("t", "fcfs", 1, None, False), gauges, live=sys.argv[1], color="auto",
                 is_quiet=sys.argv[2] == "quiet", pace=None,
                 is_piped=sys.argv[2] == "piped", has_others=sys.argv[2] == "shared",
                 has_stdin=True)
print(type(view).__name__, *([type(view._display).__name__] if hasattr(view, "_display") else []))
"""


@pytest.mark.parametrize(
    ("live", "how", "on_tty", "expected"),
    [
        ("auto", "", True, "LiveView ScreenLive"),
        ("auto", "shared", True, "LiveView InlineLive"),
        ("auto", "", False, "ProgressLines"),
        ("always", "", False, "LiveView ScreenLive"),
        ("plain", "", True, "ProgressLines"),
        ("plain", "", False, "ProgressLines"),
        ("never", "", True, "View"),
        ("always", "quiet", True, "View"),
        ("auto", "piped", True, "ProgressLines"),
        ("always", "piped", True, "LiveView ScreenLive"),
        ("always", "dumb", True, "ProgressLines"),
        ("auto", "dumb", True, "ProgressLines"),
    ],
)
def test_the_view_is_the_one_stderr_allows(tmp_path, live, how, on_tty, expected):
    (tmp_path / "instead.py").write_text(f"{OPEN_VIEW}raise SystemExit(0)\n")
    ours, theirs = os.openpty()
    environ = {key: value for key, value in os.environ.items() if key != "CI"}
    environ |= {"TERM": "dumb" if how == "dumb" else "xterm", "COMMAND_SETUP": "instead.py"}
    stderr = theirs if on_tty else subprocess.DEVNULL
    told, _ = start(live, how, cwd=tmp_path, stderr=stderr, env=environ).communicate()
    os.close(ours)
    os.close(theirs)
    assert told.decode().strip() == expected


def test_a_view_without_a_picture_does_not_import_rich():
    script = OPEN_VIEW + "\nassert 'rich' not in sys.modules"
    command = [sys.executable, "-c", script, "plain", ""]
    subprocess.run(command, check=True, capture_output=True)
