"""rich's Live on the terminal: on a screen of its own, or below what is printed.

The cursor is hidden only within a frame, so nothing that ends the process, kill -9 included, can
leave it hidden.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, cast

from rich.console import Console, ConsoleDimensions, ConsoleOptions
from rich.console import ConsoleRenderable as Renderable
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment
from rich.style import Style

from ..terminal import Terminal
from .theme import THEME, Line, line_width

_BEGIN_FRAME, _END_FRAME = b"\x1b[?2026h", b"\x1b[?2026l"  # shown at once; rich has no name for it
_HIDE_CURSOR, _SHOW_CURSOR = map(Control.show_cursor, (False, True))
_TO_START = Control(ControlType.CARRIAGE_RETURN).segment
_ERASE_REST = Control((ControlType.ERASE_IN_LINE, 0)).segment


class FrameFile:
    """What rich writes to: all of a frame is one write, which the terminal shows at once.

    error: what went wrong with the last frame; None if nothing did.
    """

    def __init__(self, terminal: Terminal) -> None:
        self.error: OSError | None = None
        self._terminal = terminal
        self._parts: list[bytes] = []
        self._is_dropped = False

    def write(self, text: str) -> int:
        """Take in a part of a frame."""
        self._parts.append(text.encode(self._terminal.encoding, "backslashreplace"))
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Take in a part of a frame, which is not to be changed."""
        self._parts.append(data)

    def flush(self) -> None:
        """Nothing: rich calls this in the middle of a frame."""

    def drop(self) -> None:
        """Write nothing of the frame that is being made."""
        self._is_dropped = True

    @contextmanager
    def frame(self) -> Iterator[None]:
        """Write what comes in meanwhile, together."""
        self._parts, self._is_dropped, self.error = [], False, None
        yield
        if self._is_dropped:
            return
        try:
            self._terminal.write_bytes(b"".join([_BEGIN_FRAME, *self._parts, _END_FRAME]))
        except OSError as error:  # rich would end the process
            self.error = error


class FrameLines:
    """A renderable of lines that need no layout any more; each erases what was there.

    num_rows: blank lines follow up to so many.
    """

    def __init__(self, lines: Sequence[Line], num_rows: int = 0) -> None:
        self.lines = [*lines, *[[]] * (num_rows - len(lines))]

    def __rich_console__(self, console: Console, _: ConsoleOptions) -> Iterator[Segment]:
        """Yield the segments of the lines, and leave the cursor where it was."""
        styles: dict[str, Style | None] = {"": None}
        for number, line in enumerate(self.lines):
            if number:
                yield Segment.line()
            for text, name in line:
                if name not in styles:
                    styles[name] = console.get_style(name)
                yield Segment(text, styles[name])
            yield _ERASE_REST
        if len(self.lines) > 1:
            yield Control.move(0, 1 - len(self.lines)).segment
        yield _TO_START


class FrameLive(Live):
    """A Live that its owner refreshes: what is shown is replaced in one write.

    fills_screen: nothing else is to be seen.
    """

    fills_screen = False

    def __init__(self, terminal: Terminal) -> None:
        self._terminal, self._file = terminal, FrameFile(terminal)
        self._shown = FrameLines([])
        console = Console(
            file=cast(IO[str], self._file),
            theme=THEME,
            color_system="standard" if terminal.has_color else None,
            force_terminal=True,
            force_jupyter=False,
            no_color=False,
            soft_wrap=True,
            legacy_windows=False,
            _environ=terminal.environ,
        )
        super().__init__(
            console=console,
            auto_refresh=False,
            redirect_stdout=False,  # it would take what goes into a pipe, too
            redirect_stderr=False,
            get_renderable=lambda: self._shown,
        )

    def process_renderables(self, renderables: list[Renderable]) -> list[Renderable]:
        """Let the picture be drawn over the one before."""
        return [_HIDE_CURSOR, *renderables, self._shown, _SHOW_CURSOR]

    def show(self, lines: Sequence[Line], above: bytes = b"") -> OSError | None:
        """Replace what is shown by `lines`; `above` are whole lines that stay.

        Return what went wrong.
        """
        with self._frame():
            self.start()
            self._replace(lines, above)
        return self._file.error

    @abstractmethod
    def _replace(self, lines: Sequence[Line], above: bytes) -> None:
        """Draw `lines` over what is shown, after lines that stay."""

    @abstractmethod
    def step_aside(self) -> OSError | None:
        """Leave the terminal to somebody else, in the middle of a frame as well."""

    def forget(self) -> None:
        """Take what is shown as gone: somebody else has written there, if that can be."""

    @abstractmethod
    def close(self, lines: Sequence[Line]) -> OSError | None:
        """Leave `lines` instead of what is shown, and the cursor below them and a blank line."""

    @contextmanager
    def _frame(self) -> Iterator[None]:
        """Write what is drawn meanwhile in one go, for the size that the terminal has now."""
        self.console.size = ConsoleDimensions(*self._terminal.size)
        with self._file.frame():
            yield

    def _leave(self, lines: FrameLines) -> OSError | None:
        """Draw `lines` and end."""
        with self._frame():
            self._shown = lines
            self.start()  # unless that was done
            self.stop()
        return self._file.error

    def _write(self, text: str) -> OSError | None:
        """Write at once; what is being drawn is not."""
        self._file.drop()
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

    def _replace(self, lines: Sequence[Line], above: bytes) -> None:
        if above and self._is_there:
            self.console.set_alt_screen(False)
            self._is_there = False
        self._file.write_bytes(above)
        if not self._is_there:
            self.console.set_alt_screen(True)
            self._is_there = True
        self._shown = FrameLines(lines, self._terminal.size.lines)
        self.console.control(Control.home())
        self.refresh()

    def step_aside(self) -> OSError | None:
        """Go back to the usual screen."""
        if not self._is_there:
            return None
        self._is_there = False
        return self._write(str(Control.alt_screen(enable=False)))

    def close(self, lines: Sequence[Line]) -> OSError | None:
        """Leave `lines` on the usual screen."""
        error = self.step_aside()
        error = self._leave(FrameLines(lines)) or error
        return error or self._write("\r" + "\n" * (len(lines) + bool(lines)))


class InlineLive(FrameLive):
    """Stands below what is printed, and moves down with it.

    The cursor rests on the first line of the picture.  A terminal that is resized keeps the cursor
    on its line, whatever becomes of the lines below, so the next picture starts where this one did.
    """

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        self._columns = 0  # when it was drawn

    def _replace(self, lines: Sequence[Line], above: bytes) -> None:
        num_rows, self._columns = self._num_rows(), self._terminal.size.columns
        if above:
            self._shown = FrameLines([], num_rows)
            self.refresh()
            self._file.write_bytes(above)
            num_rows = 0
        self._shown = FrameLines(lines, num_rows)
        self.refresh()
        self._shown = FrameLines(lines)

    def _num_rows(self) -> int:
        """Return how many rows what is shown takes now, from the cursor's on."""
        columns, rows = self._terminal.size
        needed = len(self._shown.lines)
        if columns < self._columns:  # it may have broken lines into several
            widths = (line_width(line) for line in self._shown.lines)
            needed = sum(max(1, -(-width // columns)) for width in widths)
        return min(needed, max(rows - 1, 1))

    def step_aside(self) -> OSError | None:
        """Put the cursor below what is shown."""
        num_rows = self._num_rows()
        self.forget()
        return self._write("\r" + "\n" * num_rows) if num_rows else None

    def forget(self) -> None:
        """Take what is shown as gone."""
        self._shown = FrameLines([])

    def close(self, lines: Sequence[Line]) -> OSError | None:
        """Leave `lines` where the picture was."""
        error = self._leave(FrameLines(lines, self._num_rows()))
        self._shown = FrameLines([*lines, []] if lines else [])
        return error or self.step_aside()
