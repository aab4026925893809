"""Keys by their names, and what becomes of the terminal that sends them."""

import os
import pty
import select
import subprocess
import sys
import termios
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from process import ROOT

from cli.screen.terminal import Keyboard, Keys, Pasted, Terminal

SENT = {
    "up": [b"\x1b[A", b"\x1bOA"],
    "down": [b"\x1b[B"],
    "left": [b"\x1b[D"],
    "right": [b"\x1bOC"],
    "home": [b"\x1b[H", b"\x1b[1~"],
    "end": [b"\x1b[F", b"\x1b[8~"],
    "page-up": [b"\x1b[5~"],
    "page-down": [b"\x1b[6~"],
    "enter": [b"\n", b"\r"],
    "backspace": [b"\x7f", b"\b"],
    "escape": [b"\x1b"],
    "日": ["日".encode()],
    "/": [b"/"],
    " ": [b" "],
    None: [
        *(b"\x1b[15~", b"\x1b[1;5A", b"\x1bOP", b"\x01", b"\xff"),
        b"\x1bq",  # with Alt
        b"\x1b[[A",  # F1 of the Linux console
        *(b"\x1b[M qq", b"\x1b[<0;1;1M"),  # a mouse that the program before has left on
        *(b"\x1b]11;rgb:0/q\x1b\\", b"\x1b]11;q\x07", b"\x1bP1$rq\x1b\\"),  # answers to it
    ],
}
PASTES = {
    Pasted("q. n"): b"q. n",
    Pasted("r12"): b"r12\r\n",  # the end of a line is no enter
    Pasted("[A日[201~"): "\x1b[A日[201~".encode(),  # nor is what is in it a key
}
SENT |= {pasted: [b"\x1b[200~" + text + b"\x1b[201~"] for pasted, text in PASTES.items()}
PRESSES = [(key, data) for key, found in SENT.items() for data in found]


@pytest.mark.parametrize(("key", "data"), PRESSES)
def test_a_key_has_its_name_and_others_are_none(key, data):
    keys = Keys()
    assert keys.take(data) + keys.take(b"") == ([] if key is None else [key])


@given(st.lists(st.sampled_from(PRESSES)), st.data())
def test_in_whatever_pieces_keys_come_they_are_the_same(presses, data):
    keys, found, expected = Keys(), [], []
    for key, sent in presses:
        cut = data.draw(st.integers(0, len(sent)), "cut")
        found += [key for piece in (sent[:cut], sent[cut:]) if piece for key in keys.take(piece)]
        if key == "escape":  # the next key comes later, or nobody could tell them apart
            found += keys.take(b"")
        expected += [] if key is None else [key]
    assert found + keys.take(b"") == expected


def test_of_a_long_paste_the_beginning_is_kept():
    keys = Keys()
    pieces = [b"\x1b[200~", *[b"0123456789" * 100] * 50, b"\x1b[20", b"", b"1~q"]
    [pasted, key] = [key for piece in pieces for key in keys.take(piece)]
    assert key == "q"
    assert pasted.text == "0123456789" * 409 + "012345"


def keyboard(fd):
    return Keyboard(fd, Terminal(fd, "utf-8", has_color=False))


def test_keys_come_at_once_and_unshown_and_then_the_terminal_is_as_before(tty):
    ours, theirs = tty
    before = termios.tcgetattr(theirs)
    keys = keyboard(theirs)
    assert keys.pressed() == []
    os.write(ours, b"q\x1b[A")
    assert keys.wait(5)
    assert keys.pressed() == ["q", "up"]
    modes = termios.tcgetattr(theirs)
    assert modes[3] == before[3] & ~(termios.ICANON | termios.ECHO)
    assert modes[3] & termios.ISIG  # Ctrl-C is still a signal
    assert os.read(ours, 100) == b"\x1b[?2004h"  # it tells of pastes
    keys.release()
    assert termios.tcgetattr(theirs) == before
    assert os.read(ours, 100) == b"\x1b[?2004l"
    assert not keys.wait(0)


def test_keys_typed_before_the_first_look_are_dropped_and_later_ones_are_not(tty):
    ours, theirs = tty
    keys = keyboard(theirs)
    os.write(ours, b"q-\n")
    time.sleep(0.05)
    assert not keys.pressed()
    keys.release()
    os.write(ours, b"+\n")
    assert select.select([theirs], [], [], 5)[0]
    assert keys.pressed()[:1] == ["+"]


def test_the_keyboard_of_a_terminal_that_is_gone_is_silent():
    ours, theirs = pty.openpty()
    keys = keyboard(theirs)
    keys.pressed()
    os.close(ours)
    assert keys.pressed() == []
    assert not keys.wait(0)
    keys.release()
    os.close(theirs)


OWN_KEYBOARD = """
from cli.screen.terminal import keyboard_of
from cli.screen.terminal import Terminal
print(keyboard_of(Terminal(2, "utf-8", False)) is not None)
"""


@pytest.mark.parametrize(
    ("stdin", "environ", "expected"),
    [
        ("terminal", {}, b"True"),
        ("terminal", {"CI": "1"}, b"False"),
        ("other terminal", {}, b"False"),
    ],
)
def test_only_a_person_before_the_picture_has_a_keyboard(tty, stdin, environ, expected):
    other = pty.openpty()
    stdins = {"terminal": tty[1], "other terminal": other[1], "pipe": subprocess.PIPE}
    done = subprocess.run(
        [sys.executable, "-c", OWN_KEYBOARD],
        stdin=stdins[stdin],
        stdout=subprocess.PIPE,
        stderr=tty[1],
        env={**os.environ, "TERM": "xterm", "CI": "", **environ},
        cwd=ROOT,
        check=True,
    )
    for fd in other:
        os.close(fd)
    assert done.stdout.strip() == expected
