"""`trace --play` as a person starts it: in a terminal, or without one."""

import fcntl
import gzip
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from contextlib import contextmanager

import pyte
import pytest
from process import COMMAND, ENVIRONMENT, ROOT, batchdecode

from batcher.errors import BatchdecodeError
from batcher.events import RunEvent
from cli.views.player import KEYS
from cli.views.recording import Recording

SAMPLE = ROOT / "samples" / "run.trace.jsonl.gz"
USUAL_SCREEN = b"\x1b[?1049l"


def _take_terminal():
    os.setsid()
    fcntl.ioctl(1, termios.TIOCSCTTY, 0)


class Terminal:
    """A command in a terminal of its own, and what is on its screen."""

    def __init__(self, arguments, stdin=None):
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.usual = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            [*COMMAND, "trace", *map(str, arguments)],
            stdin=theirs if stdin is None else stdin,
            stdout=theirs,
            stderr=theirs,
            env={**ENVIRONMENT, "CI": "", "TERM": "xterm-256color"},
            preexec_fn=_take_terminal,  # noqa: PLW1509 - nobody else can do it for the child
        )
        self.theirs, self.written = theirs, b""
        self.screen = pyte.Screen(80, 24)
        self.stream = pyte.ByteStream(self.screen)

    def read(self, seconds):
        if select.select([self.ours], [], [], seconds)[0]:
            data = os.read(self.ours, 65536)
            self.written += data
            self.stream.feed(data)

    @property
    def text(self):
        return "\n".join(self.screen.display)

    def until(self, words):
        end = time.monotonic() + 30
        while words not in self.text and time.monotonic() < end:
            self.read(0.1)
        assert words in self.text, self.text

    def press(self, keys):
        os.write(self.ours, keys.encode())

    def ended(self):
        """Return the exit status, once the terminal is as it was."""
        end = time.monotonic() + 30
        while self.process.poll() is None and time.monotonic() < end:
            self.read(0.1)
        self.read(0.1)
        assert termios.tcgetattr(self.theirs) == self.usual
        return self.process.wait(1)


@contextmanager
def played(*arguments, **settings):
    terminal = Terminal(arguments, **settings)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.ours)
        os.close(terminal.theirs)


def test_keys_play_a_run_and_q_leaves_the_terminal_as_it_was():
    chosen = ("--steps", "50:200", "--request", "r30")
    with played("--play", SAMPLE, *chosen, "--color", "always") as terminal:
        terminal.until("r30 is in slot")
        terminal.press("\x1b[H")
        terminal.until("step 50 ")
        terminal.press("g70\r")
        terminal.until("step 70 ")
        terminal.press(",")
        terminal.until("step 69 ")
        # It goes on at once: without a shell to bring it back nothing is stopped.
        terminal.process.send_signal(signal.SIGTSTP)
        terminal.press("\x1b[F")
        terminal.until("step 199 ")
        assert b"\x1b[?1049h" in terminal.written.partition(USUAL_SCREEN)[2]
        terminal.press("q")
        assert terminal.ended() == 0
        assert USUAL_SCREEN in terminal.written
        assert b"\x1b[94m" in terminal.written


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_ends_it_and_leaves_the_terminal_as_it_was(number):
    with played("--play", SAMPLE) as terminal:
        terminal.until("steps/s")
        if number == signal.SIGQUIT:
            terminal.press("\x1c")
            assert terminal.ended() == -number
        else:
            terminal.process.send_signal(number)
            assert terminal.ended() == 128 + number
        assert USUAL_SCREEN in terminal.written


def test_a_closed_terminal_ends_it():
    terminal = Terminal(["--play", SAMPLE])
    terminal.until("steps/s")
    os.close(terminal.ours)
    os.close(terminal.theirs)
    assert terminal.process.wait(30) == 128 + signal.SIGHUP


def test_a_pipe_is_played_by_the_keys_of_the_terminal():
    reader, writer = os.pipe()
    with played("--play", "-", "--color", "never", stdin=reader) as terminal:
        os.close(reader)
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(gzip.decompress(SAMPLE.read_bytes()))
        terminal.until("steps/s")
        terminal.press("q")
        assert terminal.ended() == 0
        assert b"\x1b[94m" not in terminal.written


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--play"], "--play needs a terminal; use --format gantt or steps instead"),
        (["--play", "--format", "steps"], "--format is for a view that is written"),
        (["--play", "--slot", "0"], "--slot is for a view that is written"),
        (["--speed", "3"], "--speed is for --play"),
        (["--from", "3"], "--from is for --play"),
        (["--play", "--speed", "0"], "--speed"),
    ],
)
def test_what_cannot_be_played_is_refused(arguments, said):
    done = batchdecode("trace", SAMPLE, *arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_what_is_not_in_the_run_is_refused():
    with played("--play", SAMPLE, "--from", "5000") as terminal:
        terminal.until("--from 5000: the steps to play are 0 to 1,098")
        assert terminal.ended() == 2


def test_the_docs_have_the_keys_and_the_command_that_makes_the_sample(tmp_path):
    page = (ROOT / "docs" / "player.md").read_text()
    told = re.findall(r"^\| `(.+?)` \| (.+) \|$", page.partition("\n## What")[0], re.MULTILINE)
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
        ({"batch": 2**20}, "up to 65,536 slots, and this run states 1,048,576; use --format gantt"),
        ({"workers": 3}, "one engine, and this is a run of 3 workers .* use --format gantt"),
    ],
)
def test_a_run_that_has_no_picture_is_refused(states, said):
    with pytest.raises(BatchdecodeError, match=said):
        Recording(RunEvent(**{"model": "simulated", "settings": {}, "batch": 2} | states))
