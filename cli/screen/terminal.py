"""What a terminal can do, asked of its descriptor and the environment, and how to write to it."""

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from ..run.signals import Interrupted, write_some

ColorChoice = Literal["auto", "always", "never"]

BOX_CHARACTERS = "┃━╌█▏…▁▪▸✓✗⣿"
_DEFAULT_COLUMNS, _DEFAULT_ROWS = 80, 24
_MAX_DIGITS = 4  # of a size; no terminal is larger


def can_animate(fd: int, environ: Mapping[str, str]) -> bool:
    """Return whether `fd` is a terminal that can redraw a picture, with a person in front of it."""
    return os.isatty(fd) and not is_dumb(environ) and not _is_set(environ, "CI")


def wants_color(choice: ColorChoice, fd: int, environ: Mapping[str, str]) -> bool:
    """Return whether to colour what goes to `fd`.

    What decides, in this order: --color, NO_COLOR, FORCE_COLOR, and whether `fd` is a terminal.
    """
    if choice != "auto":
        return choice == "always"
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return _is_set(environ, "FORCE_COLOR")
    return os.isatty(fd) and not is_dumb(environ)


def is_dumb(environ: Mapping[str, str]) -> bool:
    """Return whether the terminal says that it cannot move its cursor."""
    return environ.get("TERM", "").lower() in ("dumb", "unknown")


def encoding_of(encoding: str, environ: Mapping[str, str]) -> str:
    """Return `encoding`, that of a stream, or ascii where the locale knows no other characters.

    Python writes UTF-8 then, for which it sets LC_CTYPE itself, but a terminal need not show it.
    """
    named = environ.get("LC_ALL") or environ.get("LANG")
    is_told = environ.get("LC_CTYPE", "C.UTF-8") != "C.UTF-8" and not environ.get("LC_ALL")
    return "ascii" if named in ("C", "POSIX") and not is_told else encoding


def can_print(encoding: str, text: str = BOX_CHARACTERS) -> bool:
    """Return whether `encoding` has all of `text`, or what the pictures are drawn with."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def is_pipe(fd: int) -> bool:
    """Return whether what is written to `fd` goes to another program."""
    return stat.S_ISFIFO(os.fstat(fd).st_mode)


def is_same_terminal(fd: int, other: int) -> bool:
    """Return whether both descriptors are terminals, and one and the same."""
    if not (os.isatty(fd) and os.isatty(other)):
        return False
    if os.path.sameopenfile(fd, other):
        return True
    return _is_controlling_terminal(fd) and _is_controlling_terminal(other)


def terminal_size(fd: int, environ: Mapping[str, str]) -> os.terminal_size:
    """Return the columns and rows of `fd` now; COLUMNS and LINES, or 80x24, if it cannot say."""
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        columns = rows = 0
    return os.terminal_size(
        (
            columns or _positive(environ.get("COLUMNS", "")) or _DEFAULT_COLUMNS,
            rows or _positive(environ.get("LINES", "")) or _DEFAULT_ROWS,
        )
    )


def columns_of(fd: int, environ: Mapping[str, str]) -> int | None:
    """Return the columns of `fd` now, None if it is no terminal."""
    return terminal_size(fd, environ).columns if os.isatty(fd) else None


@dataclass(frozen=True)
class Terminal:
    """A descriptor that people read, a terminal or not; `environ` may tell its size."""

    fd: int
    encoding: str
    has_color: bool
    environ: Mapping[str, str]

    @property
    def size(self) -> os.terminal_size:
        """The columns and rows it has now."""
        return terminal_size(self.fd, self.environ)

    @property
    def is_ours(self) -> bool:
        """Whether we are in its foreground: a picture from the background spoils the prompt."""
        try:
            return os.tcgetpgrp(self.fd) == os.getpgrp()
        except OSError:  # not the terminal of our session, so it has no idea of us
            return True

    def write(self, text: str) -> None:
        """Write all of `text` in as few calls as the terminal takes it.

        Raises:
            OSError: the terminal is gone.
        """
        self.write_bytes(text.encode(self.encoding, "backslashreplace"))

    def write_bytes(self, data: bytes) -> None:
        """Write all of `data`, unchanged; after a signal, what the terminal takes soon.

        Raises:
            OSError: the terminal is gone.
        """
        start = 0
        with suppress(Interrupted):
            while start < len(data):
                start += write_some(self.fd, data, start)


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() not in ("", "0", "false")


def _is_controlling_terminal(fd: int) -> bool:
    """Return whether `fd` is the terminal of our session, under whatever name: /dev/tty is one."""
    try:
        os.tcgetpgrp(fd)
    except OSError:
        return False
    return True


def _positive(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else 0
