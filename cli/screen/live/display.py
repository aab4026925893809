"""Frames on the terminal: on a screen of its own, or below what is printed.

The cursor is hidden only within a frame, so nothing that ends the process, kill -9 included, can
leave it hidden.
"""

from abc import abstractmethod
from collections.abc import Sequence

from ..terminal import Terminal
from .theme import Line, line_width, theme_of

# As ECMA-48 and xterm have them; a terminal shows all of a frame at once (mode 2026).
_BEGIN_FRAME, _END_FRAME = "\x1b[?2026h", "\x1b[?2026l"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_OWN_SCREEN, _USUAL_SCREEN = "\x1b[?1049h", "\x1b[?1049l"
_HOME, _ERASE_REST, _RESET = "\x1b[H", "\x1b[0K", "\x1b[0m"


class FrameLive:
    """Shows lines, each time instead of those before, in one write.

    fills_screen: nothing else is to be seen.
    """

    fills_screen = False

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._styles = theme_of(terminal.environ) if terminal.has_color else {}
        self._shown: Sequence[Line] = []
        self._is_dropped = False  # the frame that is being made

    def show(self, lines: Sequence[Line], above: bytes = b"") -> OSError | None:
        """Replace what is shown by `lines`; `above` are whole lines that stay.

        Return what went wrong.
        """
        self._is_dropped = False
        return self._write_frame(self._replace(lines, above))

    @abstractmethod
    def _replace(self, lines: Sequence[Line], above: bytes) -> bytes:
        """Return what draws `lines` over what is shown, after lines that stay."""

    @abstractmethod
    def step_aside(self) -> OSError | None:
        """Leave the terminal to somebody else, in the middle of a frame as well."""

    def forget(self) -> None:
        """Take what is shown as gone: somebody else has written there, if that can be."""

    @abstractmethod
    def close(self, lines: Sequence[Line]) -> OSError | None:
        """Leave `lines` instead of what is shown, and the cursor below them and a blank line."""

    def _drawn(self, lines: Sequence[Line], num_rows: int = 0) -> bytes:
        """Return what draws `lines` from the cursor on, and leaves it where it was.

        Each line erases what was there.  num_rows: blank lines follow up to so many.
        """
        rows = [self._styled(line) for line in lines]
        rows += [_ERASE_REST] * (num_rows - len(rows))
        up = f"\x1b[{len(rows) - 1}A" if len(rows) > 1 else ""
        return self._encoded("\n".join(rows) + up + "\r")

    def _styled(self, line: Line) -> str:
        styles = self._styles
        parts = [
            f"\x1b[{codes}m{text}{_RESET}" if text and (codes := styles.get(style)) else text
            for text, style in line
        ]
        return "".join(parts) + _ERASE_REST

    def _encoded(self, text: str) -> bytes:
        return text.encode(self._terminal.encoding, "backslashreplace")

    def _write_frame(self, frame: bytes) -> OSError | None:
        """Write a frame at once, unless it was dropped meanwhile."""
        if self._is_dropped:
            return None
        begin, end = _BEGIN_FRAME + _HIDE_CURSOR, _SHOW_CURSOR + _END_FRAME
        try:
            self._terminal.write_bytes(begin.encode() + frame + end.encode())
        except OSError as error:
            return error
        return None

    def _write(self, text: str) -> OSError | None:
        """Write at once; what is being drawn is not."""
        self._is_dropped = True
        try:
            self._terminal.write(text)
        except OSError as error:
            return error
        return None


class ScreenLive(FrameLive):
    """Fills the alternate screen: nothing that happens to its size leaves anything behind."""

    fills_screen = True

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        self._is_there = False

    def _replace(self, lines: Sequence[Line], above: bytes) -> bytes:
        before = ""
        if above and self._is_there:
            before, self._is_there = _USUAL_SCREEN, False
        begin = _HOME if self._is_there else _OWN_SCREEN + _HOME
        self._is_there = True
        drawn = self._drawn(lines, self._terminal.size.lines)
        return before.encode() + above + begin.encode() + drawn

    def step_aside(self) -> OSError | None:
        """Go back to the usual screen."""
        if not self._is_there:
            return None
        self._is_there = False
        return self._write(_USUAL_SCREEN)

    def close(self, lines: Sequence[Line]) -> OSError | None:
        """Leave `lines` on the usual screen."""
        error = self.step_aside()
        self._is_dropped = False
        error = self._write_frame(self._drawn(lines)) or error
        return error or self._write("\r" + "\n" * (len(lines) + bool(lines)))


class InlineLive(FrameLive):
    """Stands below what is printed, and moves down with it.

    The cursor rests on the first line of the picture.  A terminal that is resized keeps the cursor
    on its line, whatever becomes of the lines below, so the next picture starts where this one did.
    """

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        self._columns = 0  # when it was drawn

    def _replace(self, lines: Sequence[Line], above: bytes) -> bytes:
        num_rows, self._columns = self._num_rows(), self._terminal.size.columns
        before = b""
        if above:
            before, num_rows = self._drawn([], num_rows) + above, 0
        self._shown = lines
        return before + self._drawn(lines, num_rows)

    def _num_rows(self) -> int:
        """Return how many rows what is shown takes now, from the cursor's on."""
        columns, rows = self._terminal.size
        needed = len(self._shown)
        if columns < self._columns:  # it may have broken lines into several
            widths = (line_width(line) for line in self._shown)
            needed = sum(max(1, -(-width // columns)) for width in widths)
        return min(needed, max(rows - 1, 1))

    def step_aside(self) -> OSError | None:
        """Put the cursor below what is shown."""
        num_rows = self._num_rows()
        self.forget()
        return self._write("\r" + "\n" * num_rows) if num_rows else None

    def forget(self) -> None:
        """Take what is shown as gone."""
        self._shown = []

    def close(self, lines: Sequence[Line]) -> OSError | None:
        """Leave `lines` where the picture was."""
        self._is_dropped = False
        error = self._write_frame(self._drawn(lines, self._num_rows()))
        self._shown = [*lines, []] if lines else []
        return error or self.step_aside()
