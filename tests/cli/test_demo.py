"""`batchdecode demo`: a sentence at each key moment, then the gantt and what to try next."""

import re
import shlex

from command_terminal import CommandTerminal
from process import batchdecode

from cli.commands import COMMANDS
from cli.commands.demo import NEXT


def test_without_a_terminal_it_prints_the_moments_the_gantt_and_what_to_try():
    done = batchdecode("demo")
    told = done.stdout.decode()
    assert (done.returncode, done.stderr) == (0, "")
    moments = dict(re.findall(r"(?m)^step (\d+): (.*)$", told))
    assert list(moments) == ["0", "5", "7", "15"]
    starts, refill, stop, tail = moments.values()
    assert "6 requests share 3 slots" in starts
    assert "name has finished, so joke takes slot 1" in refill
    assert "sentence has generated its stop sequence '.'" in stop
    assert "No request is waiting" in tail
    rows = {row.split()[1]: row for row in re.findall(r"(?m)^slot \d .*$", told)}
    assert re.search("name━*┃joke", rows["1"])
    assert re.search("sentence━*┃letter", rows["2"])
    assert told.endswith(NEXT)
    assert max(map(len, told.splitlines()[:4] + NEXT.splitlines())) <= 100
    for line in re.findall(r"(?m)^  (batchdecode .*)$", NEXT):
        assert shlex.split(line)[1] in COMMANDS, line


def test_color_always_colors_a_pipe():
    assert b"\x1b[" in batchdecode("demo", "--color", "always").stdout
    assert b"\x1b[" not in batchdecode("demo").stdout


def test_on_a_terminal_it_plays_by_itself_and_any_key_continues():
    with CommandTerminal("demo") as terminal:
        terminal.see("6 requests share 3 slots")
        terminal.press(b"\n")
        terminal.see("takes slot 1 at once")
        terminal.press(b"\n")
        terminal.see("stop sequence")
        terminal.press(b"\n")
        terminal.see("No request is waiting")
        assert terminal.ended() == 0
        assert b"Try next" in terminal.written


def test_q_leaves_it():
    with CommandTerminal("demo") as terminal:
        terminal.see("6 requests")
        terminal.press(b"q")
        assert terminal.ended() == 0
        assert b"Try next" in terminal.written
