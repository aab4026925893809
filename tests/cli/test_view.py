"""Which view a run gets, and the views that are no pictures."""

import os
import subprocess
import sys

import pytest
from emulated_run import Clock, Screen

from batcher.events import AdmitEvent, ArriveEvent
from cli.screen.view import ProgressLines, View


def test_a_log_gets_a_line_every_five_seconds_and_none_for_a_short_run():
    screen, clock = Screen(), Clock()
    lines = ProgressLines(title="in\x1b.jsonl", batch_size=1, total=9, terminal=screen, clock=clock)
    with lines:
        lines.observe([ArriveEvent(0, 0.0, "a", 0, "input", 5, 100)])
        lines.observe([AdmitEvent(0, 0.0, "a", 0, 0, "empty")])
        for step in range(12):
            clock.now = float(step)
            lines.after_step(step, None)
            assert len(screen.written) == (step >= 5) + (step >= 10)
    assert screen.text() == (
        r"in\x1b.jsonl  step 5  0/9 done  1.0 tok/step  0:05"
        "\n"
        r"in\x1b.jsonl  step 10  0/9 done  1.0 tok/step  0:10"
    )


def test_the_quiet_view_writes_messages_only():
    screen = Screen()
    with View(screen) as view:
        view.observe([])
        view.after_step(0, None)
        view.refresh()
        view.write_message("warning\n")
    assert screen.written == [b"warning\n"]


OPEN_VIEW = """
import sys
from cli.screen.choice import open_view
view = open_view(live=sys.argv[1], is_quiet=sys.argv[2] == "quiet", color="auto", title="t",
                 batch_size=1, total=None, every_step=False, is_piped=sys.argv[2] == "piped")
print(type(view).__name__)
"""


@pytest.mark.parametrize(
    ("live", "quiet", "on_tty", "expected"),
    [
        ("auto", "", True, "LiveView"),
        ("auto", "", False, "ProgressLines"),
        ("always", "", False, "LiveView"),
        ("never", "", True, "View"),
        ("always", "quiet", True, "View"),
        ("auto", "piped", True, "ProgressLines"),
        ("always", "piped", True, "LiveView"),
    ],
)
def test_the_view_is_the_one_stderr_allows(live, quiet, on_tty, expected):
    ours, theirs = os.openpty()
    environ = {key: value for key, value in os.environ.items() if key != "CI"} | {"TERM": "xterm"}
    done = subprocess.run(
        [sys.executable, "-c", OPEN_VIEW, live, quiet],
        stdout=subprocess.PIPE,
        stderr=theirs if on_tty else subprocess.DEVNULL,
        env=environ,
        check=True,
    )
    os.close(ours)
    os.close(theirs)
    assert done.stdout.decode().strip() == expected
