"""What a terminal is said to be able to do."""

import fcntl
import os
import struct
import subprocess
import sys
import termios

import pytest

from cli.screen.terminal import Terminal, can_animate, encoding_of, terminal_size, wants_color


@pytest.fixture
def file_fd(tmp_path):
    fd = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TERM": "xterm-256color"}, True),
        ({}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm", "CI": "true"}, False),
        ({"TERM": "xterm", "CI": "false"}, True),
    ],
)
def test_a_terminal_can_animate_unless_it_is_dumb_or_a_ci_log(tty, monkeypatch, environ, expected):
    monkeypatch.setattr(os, "environ", environ)
    assert can_animate(tty[1]) is expected


@pytest.mark.parametrize(
    ("choice", "environ", "on_tty", "on_file"),
    [
        ("auto", {}, True, False),
        ("auto", {"NO_COLOR": "1"}, False, False),
        ("auto", {"NO_COLOR": ""}, True, False),
        ("auto", {"FORCE_COLOR": "1"}, True, True),
        ("auto", {"FORCE_COLOR": "0"}, False, False),
        ("auto", {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        ("always", {"NO_COLOR": "1"}, True, True),
        ("never", {"FORCE_COLOR": "1"}, False, False),
    ],
)
def test_the_flag_decides_colour_then_the_environment(
    tty, file_fd, monkeypatch, choice, environ, on_tty, on_file
):
    monkeypatch.setattr(os, "environ", environ)
    assert wants_color(choice, tty[1]) is on_tty
    assert wants_color(choice, file_fd) is on_file


IS_DEV_TTY_OURS = """
import os, fcntl, termios
from cli.screen.terminal import Terminal, is_same_terminal
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
tty = os.open("/dev/tty", os.O_WRONLY)
ours = Terminal(1, "utf-8", False).is_ours
print(is_same_terminal(1, tty), ours)
"""


def test_dev_tty_is_the_terminal_of_the_session(tty):
    ours, theirs = tty
    subprocess.run(
        [sys.executable, "-c", IS_DEV_TTY_OURS],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        check=True,
    )
    assert os.read(ours, 100) == b"True True\r\n"


@pytest.mark.parametrize(
    ("winsize", "environ", "expected"),
    [
        ((20, 60), {}, (60, 20)),
        ((20, 60), {"COLUMNS": "99", "LINES": "9"}, (60, 20)),
        ((0, 0), {"COLUMNS": "99", "LINES": "9"}, (99, 9)),
        ((0, 0), {"COLUMNS": "wide", "LINES": "-3"}, (80, 24)),
    ],
)
def test_the_size_is_the_terminals_own_if_it_has_one(tty, monkeypatch, winsize, environ, expected):
    monkeypatch.setattr(os, "environ", environ)
    fcntl.ioctl(tty[1], termios.TIOCSWINSZ, struct.pack("HHHH", *winsize, 0, 0))
    assert terminal_size(tty[1]) == expected
    assert Terminal(tty[1], "utf-8", has_color=False).size == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "utf-8"),  # as in a container, whose terminal is as good as any
        ({"LANG": "en_US.UTF-8"}, "utf-8"),
        ({"LANG": "POSIX", "LC_CTYPE": "C.UTF-8"}, "ascii"),  # which Python has set itself
        ({"LANG": "C", "LC_CTYPE": "de_DE.UTF-8"}, "utf-8"),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "C"}, "ascii"),
    ],
)
def test_a_locale_without_unicode_gets_none(monkeypatch, environ, expected):
    monkeypatch.setattr(os, "environ", environ)
    assert encoding_of("utf-8") == expected
