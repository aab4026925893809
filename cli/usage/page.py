"""The layout of a page of help: terms and what they mean, as wide as the terminal, up to a limit.

Rule: no line is wider than the page.  A text is never cut, only wrapped, and never at a hyphen: the
names of options have some.
"""

import shutil
from collections.abc import Iterable
from textwrap import wrap

MAX_WIDTH = 100  # longer lines are hard to read
_MIN_WIDTH = 30
_INDENT = 2
_MAX_TERM_WIDTH = 22  # the text of a longer term stands below it
_GAP = 2
_NARROW = 60  # on a page narrower than this a text stands below its term
_NARROW_INDENT = 6


def page_width() -> int:
    """Return how wide a page is: as the terminal, or 80 columns, up to a limit."""
    columns = shutil.get_terminal_size((80, 24)).columns
    return max(min(columns, MAX_WIDTH), _MIN_WIDTH)


class Page:
    """A page of help that is being written.

    terms: all of them that come, so that the texts of all sections stand below each other.
    """

    def __init__(self, terms: Iterable[str]) -> None:
        self.width = page_width()
        widths = [len(term) for term in terms if len(term) <= _MAX_TERM_WIDTH]
        self._column = _INDENT + max(widths, default=0) + _GAP
        self._lines: list[str] = []

    def __str__(self) -> str:
        return "\n".join(self._lines)

    def usage(self, command: str, arguments: str) -> None:
        """Write how the command is called."""
        self._wrapped(f"Usage: {command} {arguments}", 0, 4)

    def paragraph(self, text: str) -> None:
        """Write a text below an empty line."""
        self._lines.append("")
        self._wrapped(text, _INDENT, _INDENT)

    def definitions(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        """Write a section that says of terms what they mean."""
        self._lines += ["", f"{title}:"]
        for term, text in rows:
            self._definition(term, text)

    def examples(self, commands: Iterable[str]) -> None:
        """Write command lines to be copied: one that is too long goes on behind a backslash."""
        self._lines += ["", "Examples:"]
        for command in commands:
            first, *rest = _filled(command, self.width - 2 * _INDENT - 2)
            lines = [first, *(" " * _INDENT + line for line in rest)]
            self._lines += [" " * _INDENT + line for line in " \\\n".join(lines).split("\n")]

    def _definition(self, term: str, text: str) -> None:
        if self.width < _NARROW:
            self._wrapped(term, _INDENT, _INDENT)
            self._wrapped(text, _NARROW_INDENT, _NARROW_INDENT)
            return
        column = self._column
        lines = [" " * column + line for line in _filled(text, self.width - column)]
        if _INDENT + len(term) + _GAP <= column:
            lines[0] = (" " * _INDENT + term).ljust(column) + lines[0][column:]
        else:
            lines.insert(0, " " * _INDENT + term)
        self._lines += lines

    def _wrapped(self, text: str, first_indent: int, indent: int) -> None:
        self._lines += wrap(
            text,
            self.width,
            initial_indent=" " * first_indent,
            subsequent_indent=" " * indent,
            break_on_hyphens=False,
        )


def _filled(text: str, width: int) -> list[str]:
    return wrap(text, width, break_on_hyphens=False) or [""]
