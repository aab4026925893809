"""Progress never falls, and is whole only when nothing runs any more."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from emulated_run import Clock, Gauges, Run, Screen, feed
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_drafts import DraftedJob, play_drafts
from reference_paged import CROWDED, Limits, play_paged

from batcher.events import AdmitEvent, ArriveEvent, BlockedEvent
from batcher.scheduling.blocks import BlockUse
from cli.planning import plan_progress
from cli.run.problems import progress_of
from cli.screen.live_state import Moment, ProgressLines, progress
from cli.screen.progress import open_view
from cli.screen.view import GaugeReading, RunPlan

COUNTS = st.integers(0, 1000)
SEEN = st.tuples(COUNTS, st.floats(0, 1e6), COUNTS, COUNTS, COUNTS, st.none() | st.floats(0, 1e9))
RUNS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=5)


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr("cli.run.problems.LINE_INTERVAL", 0.0)
    monkeypatch.setattr("cli.run.problems.say", lines.append)
    return lines


@given(st.lists(SEEN, min_size=1))
def test_no_observation_makes_progress_fall_or_end_a_run_that_goes_on(observed):
    of_run = RunPlan("r", "fcfs", 8, 50, is_timed=False)
    run, shares = SimpleNamespace(most_done=0.0, num_running=0), []
    for step, (tokens, left, queued, coming, done, speed) in enumerate(observed):
        run.num_tokens_left, run.num_done = lambda *_, left=left: left, min(done, 49)
        gauges = GaugeReading(0.0, 0, None, None, queued, coming)
        share, eta = progress(run, of_run, gauges, Moment(step, tokens, 1.0, speed, 1.0))
        assert eta is None or eta >= 1
        shares.append(int(share * 100))
    assert shares == sorted(shares)
    assert shares[-1] < 100
    run.num_done = 50
    gauges = GaugeReading(0.0, 8, None, None)
    assert progress(run, of_run, gauges, Moment(9, 1, 1.0, 1.0, 1.0)) == (1.0, 0.0)


@settings(max_examples=8)
@given(RUNS, st.integers(1, 4))
def test_a_run_that_ends_sooner_than_it_may_is_shown_as_it_goes_on(lengths, batch_size):
    requests = [(f"r{n}", length, length + more) for n, (length, more) in enumerate(lengths)]
    run, texts = Run(requests, batch_size, every_step=True), []
    while not run.is_over:
        run.step()
        texts.append(run.screen.text())
    found = [re.search(r" (\d+)%(?:  eta ([\d:]+))?", text.splitlines()[1]) for text in texts]
    *shares, last = [int(match[1]) for match in found]
    assert shares == sorted(shares)
    assert all(share < 100 for share in shares)
    assert "0:00" not in [match[2] for match in found[:-1]]
    assert last == 100


def test_a_comparison_is_not_whole_before_its_last_cell(said):
    with progress_of(200, 1, quiet=False) as on_done:
        for done in (1.0, 58.0, 199.999):
            on_done(done)
    shown = ("1 of 200 cells, 0%", "58 of 200 cells, 29%", "199 of 200 cells, 99%")
    assert said[1:] == [f"{each} of the work\n" for each in shown]


@pytest.mark.parametrize("share", [0.0, 0.25, 0.996, 1.0])
def test_no_simulation_of_a_plan_is_whole_while_the_plan_goes_on(said, share):
    on_tried, on_relief = plan_progress("batch", quiet=False)
    on_tried(1, 7, share)
    on_relief(2 + share)
    shown = f"{int(min(share, 0.99) * 100)}%"
    assert said[0] == f"tried 1 value and {shown} of batch 7\n"
    of_next = f" and {shown} of the next" if share % 1 else ""
    count = 3 if share == 1.0 else 2
    assert said[1] == f"looking for reliefs: {count} simulations{of_next} so far\n"


def test_plain_lines_come_every_five_seconds_and_tell_what_the_picture_shows():
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
        rf"in\x1b.jsonl, step 5, 0 done, 1 running, 0 queued, {rate}.2 tokens per s, 0:05"
        "\n"
        rf"in\x1b.jsonl, step 10, 0 done, 1 running, 0 queued, {rate} tokens per s, 0:10"
    )
    screen, clock, gauges = Screen(300, 24), Clock(), Gauges()
    lines = ProgressLines(RunPlan("in", "fcfs", 2, 3, is_timed=False), gauges, screen, clock=clock)
    feed(lines.fold, [e for e in play_paged(CROWDED, Limits()).events[1:-1] if e.step < 8])
    feed(lines.fold, [BlockedEvent(7, 7.0, "b", 0, "kv", 3)])
    gauges.block_use, gauges.num_queued, gauges.num_coming = BlockUse(4, 1, 1), 1, 1
    clock.now = 5.0
    lines.after_step(7)
    assert screen.text() == (
        "in, step 7, 0 of 3 done, 1 running, 1 queued, 1 not arrived, 1.9 tokens per step, "
        "3 tokens per s, 1 preempted, 67%, 0:02 left, KV 4 used, 1 cached, 1 free, of 6 blocks, "
        "next b: blocked by KV, needs 3 blocks, 0:05"
    )
    gauges.block_use = BlockUse(4, 1, None)
    clock.now = 10.0
    lines.after_step(7)
    assert "KV 4 blocks used, 1 cached, no limit, next b" in screen.lines()[1]


def test_a_plain_line_says_how_many_drafts_were_accepted():
    run, screen, clock = play_drafts([DraftedJob("a", 3, 40)], 1, 3), Screen(200, 24), Clock()
    lines = ProgressLines(RunPlan("in", "fcfs", 1, None, is_timed=False), Gauges(), screen, clock)
    feed(lines.fold, [event for event in run.events[1:-1] if event.step < 8])
    clock.now = 5.0
    lines.after_step(7)
    done = [v for v in run.verified if v.step < 8]
    drafted, accepted = sum(v.drafted for v in done), sum(v.accepted for v in done)
    assert f", drafts {accepted * 100 / drafted:.0f}% accepted, " in screen.text()


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
