"""Terminals: their abilities, output, keys, and text that fits on them.

Ctrl-C and Ctrl-Z stay signals.  No library reads keys as the views need it: readchar blocks and
changes the modes for each key, curses takes the whole screen, prompt_toolkit is slow to import.
"""

import json
import math
import os
import re
import select
import shlex
import stat
import sys
import termios
from codecs import getincrementaldecoder
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from ..signals import Interrupted, write_some

ColorChoice = Literal["auto", "always", "never"]

BOX_CHARACTERS = "┃━█▏…▁▪▸✓✗⣿"
_DEFAULT_COLUMNS, _DEFAULT_ROWS = 80, 24
_MAX_DIGITS = 4  # of a size
# `run` and `check` give advice on more than this share of outputs, and less of busy slot-steps.
MANY, HALF = 0.1, 0.5
FEW_SLOTS = 8  # none of these is worth advice if it is empty


def can_animate(fd: int) -> bool:
    """Return whether `fd` is an interactive terminal that can redraw a picture."""
    return os.isatty(fd) and not is_dumb() and not _is_set("CI")


def wants_color(choice: ColorChoice, fd: int) -> bool:
    """Return whether to colour `fd`, by --color, NO_COLOR, FORCE_COLOR, or its kind."""
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return _is_set("FORCE_COLOR")
    return os.isatty(fd) and not is_dumb()


def is_dumb() -> bool:
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def encoding_of(encoding: str) -> str:
    """Return `encoding`, or ascii in the C locale, where Python would write UTF-8."""
    environ = os.environ
    named = environ.get("LC_ALL") or environ.get("LANG")
    has_ctype = environ.get("LC_CTYPE", "C.UTF-8") != "C.UTF-8" and not environ.get("LC_ALL")
    return "ascii" if named in ("C", "POSIX") and not has_ctype else encoding


def can_print(encoding: str, text: str = BOX_CHARACTERS) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def is_pipe(fd: int) -> bool:
    return stat.S_ISFIFO(os.fstat(fd).st_mode)


def is_same_terminal(fd: int, other: int) -> bool:
    if not (os.isatty(fd) and os.isatty(other)):
        return False
    if os.path.sameopenfile(fd, other):
        return True
    try:  # both may be the terminal of our session, under other names such as /dev/tty
        os.tcgetpgrp(fd)
        os.tcgetpgrp(other)
    except OSError:
        return False
    return True


def terminal_size(fd: int) -> os.terminal_size:
    """Return the size of `fd`; if unknown, COLUMNS and LINES, or 80x24."""
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        columns = rows = 0

    def size_in(name: str) -> int:
        text = os.environ.get(name, "")
        return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else 0

    columns = columns or size_in("COLUMNS") or _DEFAULT_COLUMNS
    return os.terminal_size((columns, rows or size_in("LINES") or _DEFAULT_ROWS))


def columns_of(fd: int) -> int | None:
    return terminal_size(fd).columns if os.isatty(fd) else None


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() not in ("", "0", "false")


@dataclass(frozen=True)
class Terminal:
    """A descriptor for messages, a terminal or not."""

    fd: int
    encoding: str
    has_color: bool

    @property
    def size(self) -> os.terminal_size:
        return terminal_size(self.fd)

    @property
    def is_ours(self) -> bool:
        """Whether this process is in the foreground: it must not draw over the shell's prompt."""
        try:
            return os.tcgetpgrp(self.fd) == os.getpgrp()
        except OSError:  # not the terminal of our session
            return True

    def write(self, text: str) -> None:
        self.write_bytes(text.encode(self.encoding, "backslashreplace"))

    def write_bytes(self, data: bytes) -> None:
        """Write all of `data`; after a signal, only what the terminal accepts soon."""
        start = 0
        with suppress(Interrupted):
            while start < len(data):
                start += write_some(self.fd, data, start)


# -- text: made safe to print, measured in cells and cut to a width --------------------------------

HANGING_INDENT = "  "
MIN_COLUMN = 12  # cells: a column is not wrapped to less
_BETWEEN_FIGURES = re.compile(r"(?:(?<=  )|(?<=[·,;:=] ))(?=\S)")
_UNIT = re.compile(r"\\(?:[nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})|.", re.DOTALL)


def printable(text: str, *, ascii_only: bool = False) -> str:
    r"""Return `text` with escapes such as `\x1b` for all that moves the cursor or reorders text."""
    if text.isprintable() and (text.isascii() or not ascii_only):
        return text
    return "".join(
        char
        if char.isprintable() and (char.isascii() or not ascii_only)
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def printable_json(text: str) -> str:
    r"""Return equal JSON, with escapes such as `\u202e` for all that is not printable."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text
    )


def printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def cell_width(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # noqa: PLC0415 - start-up time, and most text is ASCII

    return cell_len(text)


def cut_middle(text: str, width: int, mark: str) -> str:
    """Return both ends of `text` in `width` >= 1 cells, with `mark` between; escapes stay whole."""
    if cell_width(text) <= width:
        return text
    head_width = width // 2
    tail_width = width - 1 - head_width
    units = _UNIT.findall(text)
    head, tail = units[:head_width], units[max(0, len(units) - tail_width) :]
    while cell_width("".join(head)) > head_width:
        head.pop()
    while cell_width("".join(tail)) > tail_width:
        tail.pop(0)
    return "".join([*head, mark, *tail])


def fit(text: str, width: int) -> str:
    """Return the beginning of `text` in at most `width` cells."""
    units = _UNIT.findall(text)[: max(width, 0)]
    while cell_width("".join(units)) > width:
        units.pop()
    return "".join(units)


def cut_path(path: str, width: int, mark: str) -> str:
    """Return the end of a path in `width` >= 1 cells, with `mark` before it."""
    if cell_width(path) <= width:
        return path
    units = _UNIT.findall(path)
    while cell_width("".join(units)) > width - cell_width(mark):
        units.pop(0)
    return mark + "".join(units)


def fill(parts: Sequence[str], separator: str, width: int) -> list[str]:
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]}{separator}{part}" if lines[-1] else part
        if cell_width(joined) <= width or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(part)
    return lines


def folded(text: str, width: int) -> list[str]:
    """Wrap the words of `text` to `width` cells, and break those that are longer."""
    lines = []
    for line in fill(text.split(), " ", width):
        rest = line
        while cell_width(rest) > width and (head := fit(rest, width)):
            lines.append(head)
            rest = rest[len(head) :]
        lines.append(rest)
    return lines


def wrapped(line: str, width: int) -> list[str]:
    """Wrap `line` at its words to `width` cells, with a hanging indent."""
    if cell_width(line) <= width:
        return [line]
    text = line.lstrip(" ")
    indent = " " * (len(line) - len(text))
    hanging = indent + HANGING_INDENT
    first, *rest = fill(text.split(" "), " ", width - len(hanging))
    return [indent + first, *(hanging + more for more in rest)]


def narrowed(line: str, width: int) -> list[str]:
    """Wrap a line of figures to `width` cells, between figures if possible."""
    if cell_width(line) <= width:
        return [line]
    text = line.lstrip(" ")
    indent = " " * (len(line) - len(text))
    lines = [indent]
    for figure in _BETWEEN_FIGURES.split(text):
        if cell_width((lines[-1] + figure).rstrip()) <= width or not lines[-1].strip():
            lines[-1] += figure
        else:
            lines.append(indent + HANGING_INDENT + figure)
    return [part for line in lines for part in wrapped(line.rstrip(), width)]


def pad(text: str, width: int) -> str:
    return text + " " * (width - cell_width(text))


def aligned(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    widths = [max(map(cell_width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for place, (text, width) in enumerate(zip(row, widths, strict=True)):
            room = " " * (width - cell_width(text))
            cells.append(room + text if place in right else text + room)
        lines.append("  ".join(cells).rstrip())
    return lines


def aligned_within(rows: Sequence[Sequence[str]], right: Collection[int], width: int) -> list[str]:
    """Align `rows` in `width` cells, and wrap the last column."""
    *others, _ = zip(*rows, strict=True)
    taken = sum(max(map(cell_width, column)) + 2 for column in others)
    parts = []
    for *cells, last in rows:
        first, *rest = fill(last.split(" "), " ", max(width - taken, MIN_COLUMN))
        parts += [[*cells, first], *([*("" for _ in cells), more] for more in rest)]
    return aligned(parts, right)


# -- figures --------------------------------------------------------------------------------------

_ROUNDING_ERROR = 1e-9
_NUM_DIGITS = 3  # significant digits
UNFINISHED = 0.99  # the largest share shown before the end


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shell_line(words: Iterable[str]) -> str:
    r"""Return `words` for a shell, on one line: a word that is not printable as $'\n'."""
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    escapes = {"\n": r"\n", "\t": r"\t", "\\": r"\\", "'": r"\'"}
    units = (
        escapes.get(char)
        or (char if char.isprintable() else "".join(rf"\x{b:02x}" for b in os.fsencode(char)))
        for char in word
    )
    return f"$'{''.join(units)}'"


def listed(names: Sequence[object], word: str = "or") -> str:
    *most, last = map(str, names)
    return f"{', '.join(most)} {word} {last}" if most else last


def duration(seconds: float) -> str:
    return f"{number(seconds)} s" if seconds >= 0.1 else f"{number(seconds * 1000)} ms"  # noqa: PLR2004 - as people say it


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float) -> str:
    """Return a number with three significant digits, or all of its integer part."""
    whole_digits = len(str(int(value)))
    if whole_digits >= _NUM_DIGITS:
        return f"{value:,.0f}"
    text = f"{value:.{_NUM_DIGITS}g}" if value < 1 else f"{value:.{_NUM_DIGITS - whole_digits}f}"
    if "e" in text:
        text = f"{value:.6f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(part: float, whole: float) -> str:
    """Return a percentage with one decimal; 100% only for all, 0% only for nothing."""
    if not whole:
        return "0%"
    per_mille = part * 1000 / whole
    return "<0.1%" if 0 < per_mille < 1 else f"{_rounded(per_mille, 1000) / 10:.1f}%"


def whole_percent(share: float) -> str:
    """Return a share of 1 as a whole percentage; 100% only for all, 0% only for nothing."""
    return "<1%" if 0 < share < 0.01 else f"{_rounded(share * 100, 100)}%"  # noqa: PLR2004 - a per cent


def unfinished_percent(share: float) -> str:
    """Return the percentage done of something that still runs, rounded down."""
    return f"{int(min(share, UNFINISHED) * 100 + _ROUNDING_ERROR)}%"


def _rounded(amount: float, everything: int) -> int:
    """Round half up, but return `everything` only for all of it."""
    nearest = math.floor(amount + 0.5 + _ROUNDING_ERROR)
    is_less = amount + _ROUNDING_ERROR < everything
    return min(nearest, everything - 1) if is_less else nearest


# -- keys ----------------------------------------------------------------------------------------

_LFLAG = 3  # index of the local modes in termios
MAX_TYPED = 200  # characters
_MAX_BYTES = 4096  # a terminal's input buffer
_SEQUENCE = re.compile(
    r"\x1b(\[M[^\x1b]{3}"  # a mouse event of xterm
    r"|\[\[[A-E]"  # F1 to F5 of the Linux console
    r"|\[[0-?]*[ -/]*[@-~]|O[ -~]"  # a control sequence, a single shift: most keys
    r"|[]PX^_][^\x07\x1b]*(\x07|\x1b\\)"  # a control string, such as an answer to another program
    r"|[ -~])"  # a key with Alt
)
"""One key, or a sequence that is not a key: see ECMA-48, and xterm's ctlseqs."""
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
_MARK_PASTES, _HIDE_PASTES = "\x1b[?2004h", "\x1b[?2004l"
_PASTE, _PASTE_END = "\x1b[200~", "\x1b[201~"


class Pasted(NamedTuple):
    """Pasted text, which is not keys."""

    text: str


Key = str | Pasted  # a character, or a name such as "page-up"


class Keys:
    """A parser of keys, which may arrive in pieces."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("ignore")
        self._rest = ""
        self._pasted: str | None = None  # the paste so far

    def take(self, data: bytes) -> list[Key]:
        self._rest += self._decoder.decode(data)
        return list(self._complete(is_all=not data))

    def _complete(self, *, is_all: bool) -> Iterator[Key]:
        while text := self._rest:
            if self._pasted is not None:
                inside, end, rest = text.partition(_PASTE_END)
                if not end:  # the last characters may begin the end
                    place = max(len(inside) - len(_PASTE_END) + 1, 0)
                    inside, rest = inside[:place], inside[place:]
                pasted = (self._pasted + inside)[:_MAX_BYTES]
                self._rest, self._pasted = rest, None if end else pasted
                if not end:
                    return
                yield Pasted("".join(filter(str.isprintable, pasted)))
                continue
            if not is_all and len(text) < _MAX_BYTES and _PARTIAL.fullmatch(text):
                return
            found = _SEQUENCE.match(text)
            key = found.group() if found is not None else text[0]
            self._rest = text[len(key) :]
            if key == _PASTE:
                self._pasted = ""
            name = _NAMES.get(key, key)
            if name.isprintable():
                yield name


class Keyboard:
    """The keyboard at `fd` of a terminal that shows the picture.

    From `pressed` to `release` keys arrive at once, without echo.  In the background there are
    none.  is_gone: the terminal is closed.
    """

    def __init__(self, fd: int, terminal: Terminal) -> None:
        self._fd, self._terminal = fd, terminal
        self._keys = Keys()
        self._usual: list[Any] | None = None  # the modes before
        self._is_listening = self.is_gone = False

    def pressed(self) -> list[Key]:
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
        descriptors = [self._fd] if self._is_listening and not self.is_gone else []
        return bool(select.select(descriptors, [], [], seconds)[0])

    def release(self) -> None:
        """Restore the terminal's modes; a signal handler may call this."""
        usual, self._is_listening = self._usual if self._is_listening else None, False
        if usual is not None and self._terminal.is_ours:
            with suppress(OSError, termios.error):
                termios.tcsetattr(self._fd, termios.TCSANOW, usual)
                self._terminal.write(_HIDE_PASTES)

    def _listen(self) -> None:
        modes = termios.tcgetattr(self._fd)
        if self._usual is None:
            self._usual = list(modes)
            termios.tcflush(self._fd, termios.TCIFLUSH)  # keys typed before were not for the view
        if modes[_LFLAG] & (termios.ICANON | termios.ECHO):
            modes[_LFLAG] &= ~(termios.ICANON | termios.ECHO)
            termios.tcsetattr(self._fd, termios.TCSANOW, modes)
            self._terminal.write(_MARK_PASTES)


def keyboard_of(terminal: Terminal) -> Keyboard | None:
    is_here = can_animate(0) and is_same_terminal(0, terminal.fd)
    return Keyboard(0, terminal) if is_here else None


class InputLine:
    """A line of input; enter calls `accept` with it.

    is_allowed: of one character; all others are left out.
    """

    def __init__(
        self,
        title: str,
        accept: Callable[[str], None],
        is_allowed: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.title, self.typed = title, ""
        self._accept, self._is_allowed = accept, is_allowed

    def press(self, key: str) -> bool:
        if key == "enter":
            self._accept(self.typed)
            return False
        if key == "escape" or (key == "backspace" and not self.typed):
            return False
        if key == "backspace":
            self.typed = self.typed[:-1]
        elif len(key) == 1:
            self.paste(key)
        return True

    def paste(self, text: str) -> None:
        self.typed = (self.typed + "".join(filter(self._is_allowed, text)))[:MAX_TYPED]


DELAYS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds, for - and +


class Pace:
    """The delay after each step in seconds, or a pause."""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay, self.is_paused = delay, False
        self._since = 0.0  # the time of the last step
        self._num_let = 0  # single steps to make while paused

    @property
    def is_slow(self) -> bool:
        return self.is_paused or self.delay > 0

    def press(self, key: str) -> bool:
        match key:
            case " ":
                self.is_paused, self._num_let = not self.is_paused, 0
            case ".":
                self._num_let += self.is_paused
                self.is_paused = True
            case "-":
                self.delay = next((more for more in DELAYS if more > self.delay), self.delay)
            case "+" | "=":
                self.delay = max((less for less in DELAYS if less < self.delay), default=0.0)
            case _:
                return False
        return True

    def begin(self, now: float) -> None:
        self._since = now

    def time_left(self, now: float) -> float:
        """Return the seconds until the next step; 0 counts as a single step of a pause."""
        if not self.is_paused:
            return max(self._since + self.delay - now, 0.0)
        if not self._num_let:
            return math.inf
        self._num_let -= 1
        return 0.0

    def __str__(self) -> str:
        delay = f"{duration(self.delay)} after each step" if self.delay else ""
        if self.is_paused:
            return f"paused, {delay or 'no delay'}: space continues, . makes one step"
        return delay


@contextmanager
def progress_bar(
    words: str, description: str, total: float | None, *, unit: str = "", has_time: bool = True
) -> Iterator[Callable[..., None]]:
    """Draw a bar on stderr; yield its update(completed=, total=, description=)."""
    from rich import progress  # noqa: PLC0415 - only on a terminal
    from rich.console import Console  # noqa: PLC0415 - as above

    columns: list[progress.ProgressColumn]
    columns = [progress.BarColumn(), progress.MofNCompleteColumn()]
    if words:
        columns.insert(0, progress.TextColumn(words))
    if unit:
        columns.append(progress.TextColumn(unit))
    if has_time:
        columns.append(progress.TimeRemainingColumn())
    with progress.Progress(
        *columns,
        console=Console(file=sys.stderr),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        yield partial(bar.update, bar.add_task(description, total=total))
