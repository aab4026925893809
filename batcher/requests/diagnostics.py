"""A problem in a line of input, and how a person is shown it: the place, the line, a caret.

Whatever the line holds, only printable text of known width reaches the terminal.
"""

import unicodedata
from typing import NamedTuple

from msgspec import Struct

from batcher.errors import FieldProblem
from batcher.requests.json_spans import TextSpan

CONTEXT = 500  # characters kept on either side of a problem: more than a terminal is wide
MIN_SOURCE_WIDTH = 20
ELLIPSIS = "…"
FIRST_PRINTABLE = 0x20
SYMBOL_FOR_NULL = 0x2400  # the first of the pictures of control characters, in their order
INVISIBLE = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
COMBINING = frozenset(("Mn", "Me"))
VARIATION_SELECTORS = range(0xFE00, 0xFE10)


class Problem(Struct, frozen=True):
    """One thing wrong with one line.

    line and column count from 1, column and width in characters.  source: the text around the
    place, with "…" where it was cut; source_start: the column of its first character.
    """

    code: str
    message: str
    line: int
    column: int
    width: int
    field: str | None
    hint: str | None
    source: str
    source_start: int = 1


class Style(NamedTuple):
    """The escape sequences around the parts of a shown problem."""

    error: str = ""
    strong: str = ""
    gutter: str = ""
    reset: str = ""


PLAIN = Style()
ANSI = Style(error="\x1b[1;31m", strong="\x1b[1m", gutter="\x1b[1;34m", reset="\x1b[0m")


class Cell(NamedTuple):
    """What is printed for one character, and how many columns of the terminal it takes."""

    text: str
    width: int


def make_problem(problem: FieldProblem, line: int, text: str, span: TextSpan) -> Problem:
    """Return `problem`, found at `span` of the line `text`, with what is near it."""
    start, end = span.start, max(span.end, span.start + 1)
    first, last = max(0, start - CONTEXT), min(end, start + CONTEXT) + CONTEXT
    left = ELLIPSIS if first > 0 else ""
    right = ELLIPSIS if last < len(text) else ""
    return Problem(
        code=problem.code,
        message=problem.message,
        line=line,
        column=start + 1,
        width=end - start,
        field=problem.field,
        hint=problem.hint,
        source=left + text[first:last].rstrip("\r\n") + right,
        source_start=first + 1 - len(left),
    )


def render_problem(problem: Problem, *, filename: str, width: int, color: bool) -> str:
    """Return the problem as a person reads it; the line it shows is cut to `width` columns."""
    style = ANSI if color else PLAIN
    number = str(problem.line)
    indent = " " * len(number)
    source, marks = _show_source(problem, max(MIN_SOURCE_WIDTH, width - len(number) - 3))
    bar = f"{style.gutter}{indent} |{style.reset}"
    arrow = f"{style.gutter}-->{style.reset}"
    title = f"{style.error}error[{problem.code}]{style.reset}{style.strong}: "
    lines = [
        f"{title}{printable(problem.message)}{style.reset}",
        f"{indent}{arrow} {printable(filename)}:{problem.line}:{problem.column}",
        bar,
        f"{style.gutter}{number} |{style.reset} {source}",
        f"{bar} {style.error}{marks}{style.reset}",
    ]
    if problem.hint is not None:
        gutter = f"{indent} {style.gutter}={style.reset}"
        lines.append(f"{gutter} {style.strong}help{style.reset}: {printable(problem.hint)}")
    return "\n".join(lines) + "\n"


def printable(text: str) -> str:
    """Return `text` with a visible stand-in for every character that is none."""
    return text if text.isprintable() else "".join(_cell(character).text for character in text)


def _show_source(problem: Problem, available: int) -> tuple[str, str]:
    """Return the part of the source that fits into `available` columns, and the carets below it."""
    cells = [_cell(character) for character in problem.source]
    start = min(problem.column - problem.source_start, len(cells))
    end = min(start + problem.width, len(cells))
    widths = [cell.width for cell in cells]
    first, last = _choose_window(widths, start, end, available)
    left = ELLIPSIS if first > 0 else ""
    right = ELLIPSIS if last < len(cells) else ""
    source = left + "".join(cell.text for cell in cells[first:last]) + right
    indent = len(left) + sum(widths[first:start])
    return source, " " * indent + "^" * max(1, sum(widths[start : min(end, last)]))


def _choose_window(widths: list[int], start: int, end: int, available: int) -> tuple[int, int]:
    """Return the range of cells to show: all, or the fault and more before it than after it."""
    if sum(widths) < available:  # less: a caret may stand one column behind the text
        return 0, len(widths)
    room = available - 2 * len(ELLIPSIS) - 1
    marked = start + _count_fitting(widths[start:end], room)
    room -= sum(widths[start:marked])
    after = marked + _count_fitting(widths[marked:], room // 3)
    first = start - _count_fitting(widths[:start][::-1], room - sum(widths[marked:after]))
    room -= sum(widths[first:start])
    return first, marked + _count_fitting(widths[marked:], room)


def _count_fitting(widths: list[int], room: int) -> int:
    """Return how many of the first cells take no more than `room` columns together."""
    for count, width in enumerate(widths):
        room -= width
        if room < 0:
            return count
    return len(widths)


def _cell(character: str) -> Cell:
    if " " <= character <= "~":
        return Cell(character, 1)
    code = ord(character)
    if code < FIRST_PRINTABLE:
        return Cell(chr(SYMBOL_FOR_NULL + code), 1)
    category = unicodedata.category(character)
    if category in INVISIBLE:
        name = f"<U+{code:04X}>"
        return Cell(name, len(name))
    if category in COMBINING:
        # A variation selector would change the width of the character before it, on some terminals.
        return Cell("" if code in VARIATION_SELECTORS else character, 0)
    return Cell(character, 2 if unicodedata.east_asian_width(character) in "WF" else 1)
