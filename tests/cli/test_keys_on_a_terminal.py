"""Keys pressed on a terminal before a run of its own, and what is left of that terminal."""

import os
import re
import signal
import subprocess

import pytest
from command_terminal import CommandTerminal
from process import batchdecode, lines_of, workload

pytestmark = pytest.mark.heavy  # each is a process, which has to keep up with what is pressed

REQUESTS = lines_of(*workload(40, max_tokens=30))


RUN = ("in", "-o", "out", "-b", "2")
SLOW = (*RUN, "--step-delay", "0.02")


def running(folder, *arguments, **options):
    options |= {"folder": folder, "stdout": subprocess.DEVNULL}
    return CommandTerminal("run", *arguments, **options)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").write_bytes(REQUESTS)
    return tmp_path


def test_no_byte_depends_on_keys(folder):
    plain = ["run", *RUN, "--trace", "trace"]
    assert batchdecode(*plain, cwd=folder).returncode == 0
    expected = [(folder / name).read_bytes() for name in ("out", "trace")]
    with running(folder, *SLOW, "--trace", "trace", "--force") as terminal:
        terminal.see("decode")
        terminal.press(b" ")
        terminal.see("paused")
        step = next(line for line in terminal.screen.lines() if "step " in line).split()[2]
        so_far = (folder / "trace").read_bytes()
        terminal.press(b".")
        terminal.see(f"step {int(step) + 1}")
        terminal.wait_for(lambda: len((folder / "trace").read_bytes()) >= len(so_far))
        terminal.press(b"/r3\n\x1b[B?")
        terminal.see("one step, then pause")
        terminal.press(b"?++++ ")
        assert terminal.ended() == 0
    assert [(folder / name).read_bytes() for name in ("out", "trace")] == expected


def test_a_selected_slot_shows_prompt_and_text_and_results_come_with_theirs(folder):
    with running(folder, *SLOW, "--batch", "2") as terminal:
        terminal.see("decode")
        terminal.press(b"\x1b[B")
        for what in ("\nprompt: ", "\ntext: ", "of 30 tokens"):
            terminal.see(what)
        terminal.press(b"\x1b")
        terminal.see("\nqueue ")
        terminal.wait_for(lambda: re.search(r"✓ r?\d+ .*\d  [A-Za-z]{2}", terminal.screen.text()))
        terminal.press(b"++++++")
        assert terminal.ended() == 0


def paused_and_sent(number):
    def send(terminal):
        terminal.press(b" ")
        terminal.see("paused")
        terminal.process.send_signal(number)

    return send


ENDS = {
    "q in a pause": (lambda terminal: terminal.press(b" q"), 130, "stopped by you"),
    "Ctrl-C": (lambda terminal: terminal.press(b"\x03"), 130, "stopped by SIGINT"),
    "Ctrl-C twice": (lambda terminal: terminal.press(b"\x03\x03"), 130, "stopped by SIGINT"),
    "SIGTERM in a pause": (paused_and_sent(signal.SIGTERM), 143, "stopped by SIGTERM"),
    "SIGHUP in a pause": (paused_and_sent(signal.SIGHUP), 129, "stopped by SIGHUP"),
    "Ctrl-\\": (lambda terminal: terminal.press(b"\x1c"), -signal.SIGQUIT, ""),
}


@pytest.mark.parametrize("how", ENDS)
def test_however_a_run_ends_the_terminal_is_as_before(folder, how):
    end, status, message = ENDS[how]
    with running(folder, *SLOW) as terminal:
        terminal.see("decode")
        terminal.wait_for(lambda: terminal.takes_keys)
        end(terminal)
        assert terminal.ended() == status
        terminal.see(message)
        assert not terminal.screen.is_alternate
        assert not terminal.screen.emulator.cursor.hidden


def test_ctrl_z_gives_the_terminal_back_and_fg_takes_keys_again(folder):
    with running(folder, *SLOW, is_job=True) as terminal:
        terminal.see("decode")
        terminal.wait_for(lambda: terminal.takes_keys)
        terminal.process.send_signal(signal.SIGTSTP)
        assert os.WIFSTOPPED(os.waitpid(terminal.process.pid, os.WUNTRACED)[1])
        assert terminal.modes == terminal.usual_modes
        terminal.process.send_signal(signal.SIGCONT)
        terminal.wait_for(lambda: terminal.takes_keys)
        terminal.press(b" ")
        terminal.see("paused")
        terminal.press(b"q")
        assert terminal.ended() == 130


@pytest.mark.parametrize(
    "arguments", [("-", "--live", "always"), ("in", "--live", "plain"), ("in", "--quiet")]
)
def test_without_a_picture_or_with_typed_requests_there_are_no_keys(folder, arguments):
    command = ("-o", "out", "-b", "2", "--step-delay", "0.003", "--trace", "trace")
    with running(folder, *arguments, *command) as terminal:
        if arguments[0] == "-":
            terminal.press(REQUESTS[: REQUESTS.index(b"\n") + 1] + b"\x04")
        terminal.wait_for(lambda: (folder / "out").exists() and (folder / "out").stat().st_size)
        assert terminal.modes == terminal.usual_modes
        terminal.press(b" q")  # of no meaning
        assert terminal.ended() == 0
