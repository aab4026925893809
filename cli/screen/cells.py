"""Text for a terminal: how wide it is, made safe to print, cut to a width, and figures."""

import json
import re
from collections.abc import Collection, Sequence
from math import floor

HANGING_INDENT = "  "
_BETWEEN_FIGURES = re.compile(r"(?:(?<=  )|(?<=[·,;:=] ))(?=\S)")
MIN_COLUMN = 12  # cells: a column is not wrapped to less
_ROUNDING_ERROR = 1e-9
_NUM_DIGITS = 3  # that count, of a number that is no whole one
_UNIT = re.compile(r"\\(?:[nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})|.", re.DOTALL)


def printable(text: str, *, ascii_only: bool = False) -> str:
    r"""Return `text` with `\x1b` and the like for all that moves the cursor or reorders a line."""
    if text.isprintable() and (text.isascii() or not ascii_only):
        return text
    return "".join(
        char
        if char.isprintable() and (char.isascii() or not ascii_only)
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def printable_json(text: str) -> str:
    r"""Return JSON, a line or more, that says the same with `\u202e` and the like for such."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text
    )


def printable_lines(text: str) -> str:
    """Return `text`, one line or more, with every line made printable."""
    return "\n".join(map(printable, text.split("\n")))


def cell_width(text: str) -> int:
    """Return how many cells `text` takes; wide characters take two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # noqa: PLC0415 - start-up time, and most text is ASCII

    return cell_len(text)


def cut_middle(text: str, width: int, mark: str) -> str:
    """Return at most `width` >= 1 cells of `text`: both its ends, with `mark` between them.

    An escape, as `printable` makes them, is whole or not there.
    """
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


def cut_path(path: str, width: int, mark: str) -> str:
    """Return at most `width` >= 1 cells of the path of a file: its end, with `mark` before that."""
    if cell_width(path) <= width:
        return path
    units = _UNIT.findall(path)
    while cell_width("".join(units)) > width - cell_width(mark):
        units.pop(0)
    return mark + "".join(units)


def fill(parts: Sequence[str], separator: str, width: int) -> list[str]:
    """Return `parts` in as few lines as they fit in, at least one."""
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]}{separator}{part}" if lines[-1] else part
        if cell_width(joined) <= width or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(part)
    return lines


def wrapped(line: str, width: int) -> list[str]:
    """Return `line` in lines of at most `width` cells if its words allow, the later ones indented.

    Words are not broken; those of an indented line stay behind its indent.
    """
    if cell_width(line) <= width:
        return [line]
    text = line.lstrip(" ")
    indent = " " * (len(line) - len(text))
    hanging = indent + HANGING_INDENT
    first, *rest = fill(text.split(" "), " ", width - len(hanging))
    return [indent + first, *(hanging + more for more in rest)]


def narrowed(line: str, width: int) -> list[str]:
    """Return a line of figures in lines of at most `width` cells if its words allow.

    It is broken between figures; only one that is too long by itself is broken between words.
    """
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
    """Return `text` filled up with spaces to `width` cells."""
    return text + " " * (width - cell_width(text))


def aligned(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Return rows as lines of columns; those with the numbers `right` are set to the right."""
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
    """Return the same in lines of at most `width` cells if the words of the last column allow."""
    *others, _ = zip(*rows, strict=True)
    taken = sum(max(map(cell_width, column)) + 2 for column in others)
    room = max(width - taken, MIN_COLUMN)
    parts = []
    for *cells, last in rows:
        first, *rest = fill(last.split(" "), " ", room)
        parts += [[*cells, first], *([*("" for _ in cells), more] for more in rest)]
    return aligned(parts, right)


def counted(number: int, noun: str) -> str:
    """Return `number` of `noun` in words: `1 slot`, `2,000 slots`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[object], word: str = "or") -> str:
    """Return `a`, `a or b`, `a, b or c`."""
    *most, last = map(str, names)
    return f"{', '.join(most)} {word} {last}" if most else last


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it: `0.5 s`, `50 ms`."""
    return f"{number(seconds)} s" if seconds >= 0.1 else f"{number(seconds * 1000)} ms"  # noqa: PLR2004 - as people say it


def number(value: float) -> str:
    """Return a number with three digits that count, more if it is longer: 0.421, 12.3, 1,234."""
    whole_digits = len(str(int(value)))
    if whole_digits >= _NUM_DIGITS:
        return f"{value:,.0f}"
    text = f"{value:.{_NUM_DIGITS}g}" if value < 1 else f"{value:.{_NUM_DIGITS - whole_digits}f}"
    if "e" in text:
        text = f"{value:.6f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(part: float, whole: float) -> str:
    """Return a share in per cent with one digit, rounded: 100 only for all, 0 only for nothing."""
    if not whole:
        return "0%"
    per_mille = part * 1000 / whole
    return "<0.1%" if 0 < per_mille < 1 else f"{_rounded(per_mille, 1000) / 10:.1f}%"


def whole_percent(share: float) -> str:
    """Return a share of 1 in whole per cent, rounded: 100 only for all, 0 only for nothing."""
    return "<1%" if 0 < share < 0.01 else f"{_rounded(share * 100, 100)}%"  # noqa: PLR2004 - a per cent


UNFINISHED = 0.99  # the most that is shown of what still runs


def unfinished_percent(share: float) -> str:
    """Return how much of something that still runs is done, in whole per cent, rounded down."""
    return f"{int(min(share, UNFINISHED) * 100 + _ROUNDING_ERROR)}%"


def _rounded(amount: float, everything: int) -> int:
    """Return the next whole number, a half up, but not `everything` for less."""
    nearest = floor(amount + 0.5 + _ROUNDING_ERROR)
    is_less = amount + _ROUNDING_ERROR < everything
    return min(nearest, everything - 1) if is_less else nearest
