"""What the live view shows of drafts, seen on the screen of a terminal emulator."""

from emulated_run import Clock, Gauges, Screen, feed
from reference_drafts import DraftedJob, play_drafts

from batcher.events import EndEvent, RunEvent
from cli.screen.live import LiveView, ScreenLive
from cli.screen.live_state import ProgressLines
from cli.screen.terminal import Pace
from cli.screen.view import RunPlan

JOBS = [DraftedJob("a", 3, 40), DraftedJob("b", 3, 40, speculates=False), DraftedJob("c", 3, 40)]


def watch(run, screen, num_slots, num_steps, show=None):
    """Show the first steps of a run, each in a frame of its own."""
    clock = Clock()
    plan = RunPlan("requests.jsonl", "fcfs", num_slots, None, is_timed=False)
    if show is None:
        view = LiveView(plan, Gauges(), screen, ScreenLive(screen), pace=Pace(0.1), clock=clock)
    else:
        view = show(plan, Gauges(), screen, clock=clock)
    rest = [e for e in run.events if not isinstance(e, RunEvent | EndEvent)]
    for step in range(num_steps):
        while rest and rest[0].step <= step:
            feed(view.fold, [rest.pop(0)])
        clock.now += 1.0
        view.after_step(step)
    return view


def rows_of(screen, num_slots):
    lines = screen.lines()
    start = next(n for n, line in enumerate(lines) if " request " in line)
    return lines[start : start + 1 + num_slots]


def test_a_row_says_how_many_drafts_its_last_step_accepted():
    run, shown = play_drafts(JOBS, 3, 3), set()
    for num_steps in (2, 3, 5, 8, 10):
        screen = Screen(80, 20)
        watch(run, screen, 3, num_steps)
        title, *rows = rows_of(screen, 3)
        for slot, row in enumerate(rows):
            of_step = [v for v in run.verified if (v.step, v.slot) == (num_steps - 1, slot)]
            told = f"{of_step[0].accepted}/{of_step[0].drafted}" if of_step else None
            cells = row.split()
            found = [cell for cell in cells if "/" in cell and not cell.endswith("/40")]
            assert found == ([told] if told else [])
            shown.add(told)
        has_drafts = any(v.step < num_steps for v in run.verified)
        assert ("drafts" in title) == has_drafts
    assert len(shown) > 3


def test_the_columns_of_a_run_that_speculates():
    run, screen = play_drafts(JOBS, 3, 3), Screen(80, 20)
    watch(run, screen, 3, 7)
    assert rows_of(screen, 3) == [
        "# request tokens           drafts  phase    last 7 steps  ┃ admitted",
        "0 a       ███▌····  18/40     2/2  decode   ┃━━━━━━",
        "1 b       █▍······   7/40          decode   ┃━━━━━━",
        "2 c       ██▌·····  13/40     2/2  decode   ┃━━━━━━",
    ]


def test_a_plain_line_says_how_many_drafts_were_accepted():
    screen = Screen(200, 20)
    run = play_drafts(JOBS, 3, 3)
    watch(run, screen, 3, 7, ProgressLines)
    done = [v for v in run.verified if v.step < 5]
    drafted, accepted = sum(v.drafted for v in done), sum(v.accepted for v in done)
    assert f", {accepted} of {drafted} drafts accepted, " in screen.text()
