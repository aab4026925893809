"""The keys that a person presses while a picture is shown, by their names.

Signals stay signals: Ctrl-C and Ctrl-Z are no keys.  A library would be more than this: readchar
waits for each key and changes the terminal for each, curses wants the whole screen, and
prompt_toolkit takes longer to import than a short run does.
"""

import os
import re
import select
import termios
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from .terminal import Terminal, can_animate, is_same_terminal

_LFLAG = 3  # where termios keeps the local modes
MAX_TYPED = 200  # characters
_MAX_BYTES = 4096  # as many as a terminal keeps for who reads it
_SEQUENCE = re.compile(
    r"\x1b(\[M[^\x1b]{3}"  # a mouse, as xterm tells of it
    r"|\[\[[A-E]"  # F1 to F5 of the Linux console
    r"|\[[0-?]*[ -/]*[@-~]|O[ -~]"  # a control sequence, a single shift: most keys
    r"|[]PX^_][^\x07\x1b]*(\x07|\x1b\\)"  # a control string: an answer to some other program
    r"|[ -~])"  # a key with Alt
)
"""What is one key, or none: see ECMA-48, and xterm's ctlseqs."""
_PARTIAL = re.compile(r"\x1b(\[M[^\x1b]{0,2}|\[\[|\[[0-?]*[ -/]*|O|[]PX^_][^\x07\x1b]*\x1b?)?")
_NAMES = {
    **dict.fromkeys(("\x1b[A", "\x1bOA"), "up"),
    **dict.fromkeys(("\x1b[B", "\x1bOB"), "down"),
    **dict.fromkeys(("\x1b[C", "\x1bOC"), "right"),
    **dict.fromkeys(("\x1b[D", "\x1bOD"), "left"),
    **dict.fromkeys(("\x1b[H", "\x1bOH", "\x1b[1~", "\x1b[7~"), "home"),
    **dict.fromkeys(("\x1b[F", "\x1bOF", "\x1b[4~", "\x1b[8~"), "end"),
    "\x1b[5~": "page-up",
    "\x1b[6~": "page-down",
    "\x1b": "escape",
    **dict.fromkeys("\r\n", "enter"),
    **dict.fromkeys("\b\x7f", "backspace"),
}
_TELL_PASTES, _HIDE_PASTES = "\x1b[?2004h", "\x1b[?2004l"
_PASTE, _PASTE_END = "\x1b[200~", "\x1b[201~"


class Pasted(NamedTuple):
    """What a person has pasted, in one line: text for a field, and no keys."""

    text: str


Key = str | Pasted
"""A key with a character is that character; others have names of more than one."""


class Keys:
    """Makes keys of what a terminal sends, in whatever pieces that comes."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("ignore")
        self._rest = ""
        self._pasted: str | None = None  # so far; None while nothing is

    def take(self, data: bytes) -> list[Key]:
        """Return the keys of `data`; nothing at all ends what might have gone on."""
        self._rest += self._decoder.decode(data)
        return list(self._complete(is_all=not data))

    def _complete(self, *, is_all: bool) -> Iterator[Key]:
        while text := self._rest:
            if self._pasted is not None:
                pasted = self._take_pasted(self._pasted)
                if pasted is None:
                    return
                yield pasted
                continue
            if not is_all and len(text) < _MAX_BYTES and _PARTIAL.fullmatch(text):
                return
            found = _SEQUENCE.match(text)
            key = found.group() if found is not None else text[0]
            self._rest = text[len(key) :]
            if key == _PASTE:
                self._pasted = ""
            name = _NAMES.get(key, key)
            if name.isprintable():  # or it is one that nobody has asked for
                yield name

    def _take_pasted(self, before: str) -> Pasted | None:
        """Take in more of what is pasted; return it if that is its end."""
        inside, end, rest = self._rest.partition(_PASTE_END)
        if not end:  # but the last characters may begin it
            cut = max(len(inside) - len(_PASTE_END) + 1, 0)
            inside, rest = inside[:cut], inside[cut:]
        text = (before + inside)[:_MAX_BYTES]
        self._rest, self._pasted = rest, None if end else text
        return Pasted("".join(filter(str.isprintable, text))) if end else None


class Keyboard:
    """The keyboard of a terminal that is `fd`, and shows the picture as `terminal`.

    From the first call of `pressed` to `release` keys are not shown and come at once, and the
    terminal tells what is pasted.  In the background there are none: who reads there is stopped.
    is_gone: there will be no more.
    """

    def __init__(self, fd: int, terminal: Terminal) -> None:
        self._fd, self._terminal = fd, terminal
        self._keys = Keys()
        self._usual: list[Any] | None = None  # the modes that it was found with
        self._is_listening = self.is_gone = False

    def pressed(self) -> list[Key]:
        """Return the keys that were pressed since, without waiting for any."""
        data = b""
        try:
            self._is_listening = not self.is_gone and self._terminal.is_ours
            if self._is_listening:
                self._listen()
            if self.wait(0):
                data = os.read(self._fd, _MAX_BYTES)
                self.is_gone = not data
        except (OSError, termios.error):
            self.is_gone = True
        return self._keys.take(data)

    def wait(self, seconds: float) -> bool:
        """Wait until there is a key, or `seconds` are over; return whether there is one."""
        descriptors = [self._fd] if self._is_listening and not self.is_gone else []
        return bool(select.select(descriptors, [], [], seconds)[0])

    def release(self) -> None:
        """Leave the terminal as it was found; a signal handler may call this."""
        usual, self._is_listening = self._usual if self._is_listening else None, False
        if usual is not None and self._terminal.is_ours:
            with suppress(OSError, termios.error):
                termios.tcsetattr(self._fd, termios.TCSANOW, usual)
                self._terminal.write(_HIDE_PASTES)

    def _listen(self) -> None:
        """Let keys come one by one and unshown, whoever has changed that meanwhile."""
        modes = termios.tcgetattr(self._fd)
        if self._usual is None:
            self._usual = list(modes)
        if modes[_LFLAG] & (termios.ICANON | termios.ECHO):
            modes[_LFLAG] &= ~(termios.ICANON | termios.ECHO)
            termios.tcsetattr(self._fd, termios.TCSANOW, modes)
            self._terminal.write(_TELL_PASTES)


def keyboard_of(terminal: Terminal) -> Keyboard | None:
    """Return the keyboard of `terminal`, if that is what stdin is; None if nobody is there."""
    is_here = can_animate(0, terminal.environ) and is_same_terminal(0, terminal.fd)
    return Keyboard(0, terminal) if is_here else None


class InputLine:
    """A line in which a person types; `accept` is called with it."""

    def __init__(self, title: str, accept: Callable[[str], None]) -> None:
        self.title, self.typed = title, ""
        self._accept = accept

    def press(self, key: str) -> bool:
        """Take in a key; return whether more are to come."""
        if key == "enter":
            self._accept(self.typed)
            return False
        if key == "escape" or (key == "backspace" and not self.typed):
            return False
        if key == "backspace":
            self.typed = self.typed[:-1]
        elif len(key) == 1 and len(self.typed) < MAX_TYPED:
            self.typed += key
        return True

    def paste(self, text: str) -> None:
        """Add `text` to what is typed."""
        self.typed = (self.typed + text)[:MAX_TYPED]
