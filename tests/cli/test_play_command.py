"""`trace --play` as a person starts it: in a terminal, or without one."""

import gzip
import os
import re
import signal
from types import SimpleNamespace

import pytest
from command_terminal import CommandTerminal
from process import ROOT, batchdecode

from batcher.errors import BatchdecodeError
from batcher.events import RunEvent
from cli.commands.show import _player, open_twice
from cli.commands.trace import TraceOptions
from cli.views.player import KEYS
from cli.views.recording import Recording

SAMPLE = ROOT / "samples" / "run.trace.jsonl.gz"
USUAL_SCREEN = b"\x1b[?1049l"


def test_keys_play_a_run_and_q_leaves_the_terminal_as_it_was():
    chosen = ("--steps", "50:200", "--request", "r30")
    with CommandTerminal("trace", "--play", SAMPLE, *chosen, "--color", "always") as terminal:
        terminal.see("r30 is in slot")
        terminal.press(b"\x1b[H")
        terminal.see("step 50 ")
        terminal.press(b"g70\r")
        terminal.see("step 70 ")
        terminal.press(b",")
        terminal.see("step 69 ")
        # It goes on at once: without a shell to bring it back nothing is stopped.
        terminal.process.send_signal(signal.SIGTSTP)
        terminal.press(b"\x1b[F")
        terminal.see("step 199 ")
        assert b"\x1b[?1049h" in terminal.written.partition(USUAL_SCREEN)[2]
        terminal.press(b"q")
        assert terminal.ended() == 0
        assert USUAL_SCREEN in terminal.written
        assert b"\x1b[94m" in terminal.written


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_ends_it_and_leaves_the_terminal_as_it_was(number):
    with CommandTerminal("trace", "--play", SAMPLE) as terminal:
        terminal.see("steps/s")
        if number == signal.SIGQUIT:
            terminal.press(b"\x1c")
            assert terminal.ended() == -number
        else:
            terminal.process.send_signal(number)
            assert terminal.ended() == 128 + number
        assert USUAL_SCREEN in terminal.written


def test_a_closed_terminal_ends_it():
    with CommandTerminal("trace", "--play", SAMPLE) as terminal:
        terminal.see("steps/s")
        terminal.close()
        assert terminal.process.wait(30) == 128 + signal.SIGHUP


def test_a_pipe_is_played_by_the_keys_of_the_terminal():
    reader, writer = os.pipe()
    with CommandTerminal("trace", "--play", "-", "--color", "never", stdin=reader) as terminal:
        os.close(reader)
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(gzip.decompress(SAMPLE.read_bytes()))
        terminal.see("steps/s")
        terminal.press(b"q")
        assert terminal.ended() == 0
        assert b"\x1b[94m" not in terminal.written


def test_what_is_not_in_the_run_is_refused():
    options = TraceOptions(input=str(SAMPLE), play=True, from_step=5000)
    terminal = SimpleNamespace(with_progress=lambda events, _: events)
    path, source = open_twice(str(SAMPLE))
    with source, pytest.raises(BatchdecodeError, match="the steps to play are 0 to 1,098"):
        _player(options, path, source, terminal)


def test_the_docs_have_the_keys_and_the_command_that_makes_the_sample(tmp_path):
    page = (ROOT / "docs" / "guide/live-view.md").read_text().partition("## The player")[2]
    told = re.findall(r"^\| `(.+?)` \| (.+) \|$", page.partition("\n### What")[0], re.MULTILINE)
    keys = {key: what for key, what in told if not key.startswith("--")}
    assert keys == dict(KEYS)
    block = page.rpartition("```console\n")[2].replace("\\\n", " ")
    for command in re.findall(r"^\$ batchdecode ((?:workload|run) .*)$", block, re.MULTILINE):
        assert batchdecode(*command.split(), cwd=tmp_path).returncode == 0
    made = gzip.decompress((tmp_path / "run.trace.jsonl.gz").read_bytes())
    assert made == gzip.decompress(SAMPLE.read_bytes())


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ({"batch": 2**20}, "up to 65,536 slots, but this run has 1,048,576; use --format gantt"),
        ({"workers": 3}, "one engine, and this run has 3 workers .* use --format gantt"),
    ],
)
def test_a_run_that_has_no_picture_is_refused(states, said):
    with pytest.raises(BatchdecodeError, match=said):
        Recording(RunEvent(**{"model": "simulated", "settings": {}, "batch": 2} | states))
