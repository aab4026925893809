"""Which view a run gets, and the views that are no pictures."""

import os
import sys
from pathlib import Path

import pytest
from emulated_run import Clock, Gauges, Screen, feed
from reference_paged import CROWDED, Limits, play_paged

from batcher.events import AdmitEvent, ArriveEvent, BlockedEvent
from batcher.scheduling.blocks import BlockUse
from cli.screen.live_state import ProgressLines
from cli.screen.progress import open_view
from cli.screen.view import RunPlan


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


@pytest.mark.parametrize(
    ("live", "how", "on_tty", "expected"),
    [
        ("auto", "", True, "LiveView ScreenLive"),
        ("auto", "shared", True, "LiveView InlineLive"),
        ("auto", "", False, "ProgressLines"),
        ("always", "", False, "LiveView ScreenLive"),
        ("plain", "", True, "ProgressLines"),
        ("never", "", True, "View"),
        ("always", "quiet", True, "View"),
        ("auto", "piped", True, "ProgressLines"),
        ("always", "dumb", True, "ProgressLines"),
    ],
)
def test_the_view_is_the_one_stderr_allows(monkeypatch, live, how, on_tty, expected):
    ours, theirs = os.openpty()
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "dumb" if how == "dumb" else "xterm")
    with os.fdopen(theirs, "w") as tty, Path(os.devnull).open("w") as nothing:
        monkeypatch.setattr(sys, "stderr", tty if on_tty else nothing)
        view = open_view(
            RunPlan("t", "fcfs", 1, None, is_timed=False),
            Gauges(),
            live=live,
            color="auto",
            is_quiet=how == "quiet",
            pace=None,
            is_piped=how == "piped",
            has_others=how == "shared",
            has_stdin=True,
        )
        names = [type(each).__name__ for each in (view, getattr(view, "_display", None)) if each]
    os.close(ours)
    assert " ".join(names) == expected
