"""The characters of the live view, with and without Unicode, and its styles.

Only the sixteen colours of the terminal's palette are used.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

from rich.color import ColorSystem
from rich.theme import Theme

from .terminal import cell_width

Part: TypeAlias = tuple[str, str]  # text, and the name of its style or ""
Line: TypeAlias = list[Part]

LABEL = "label"
ALL = 1 - 1e-9  # 1 with rounding errors


@dataclass(frozen=True)
class Glyphs:
    """The characters of a picture, each one cell wide.

    running: a step of a request.  shades, levels: from nothing to all.  blocks: a
    cell of a bar.  bars: used, cached and free KV blocks.  marks: of slots.  found: after a request
    that was found.
    """

    admitted: str
    ended: str
    running: str
    prefill: str
    nothing: str
    shades: str
    levels: str
    blocks: str
    bars: str
    marks: Mapping[str, str]
    found: str
    cut: str
    separator: str


UNICODE = Glyphs(
    *("┃", "✓", "━", "▪", "·", "░▒▓█", "▁▂▃▄▅▆▇█", " ▏▎▍▌▋▊▉█", "█▒░"),
    {"": " ", "ended": " ", "admitted": "▸", "preempted": "«", "failed": "✗"},
    *("◂", "…", " · "),
)
ASCII = Glyphs(
    *("|", "v", "=", ":", ".", "+o#@", "12345678#", " -=#", "#+."),
    {"": " ", "ended": " ", "admitted": ">", "preempted": "<", "failed": "x"},
    *("*", "~", ", "),
)

HUES = ("hue0", "hue1")
ID_END = 16  # most ids differ in their last characters
THEME = Theme(
    {
        "title": "bold",
        LABEL: "dim",
        "figure": "bold",
        "done": "bold",
        "failed": "bold red",
        "preempted": "bold magenta",
        "blocked": "bold magenta",
        "admitted": "bold",
        "stop": "bold",
        "idle": "dim",
        "rest": "dim",
        "used": "bright_blue",
        "cached": "magenta",
        "free": "dim",
        "found": "bold reverse",
        "paused": "bold",
    }
    | dict(zip(HUES, ("bright_blue", "magenta"), strict=True)),
    inherit=False,
)
"""Styles by name; other names have the terminal's default colour.

The background is unknown.  In the palettes of xterm and VS Code, red, magenta and bright blue have
a contrast of at least 3 with black and with white.
"""


def hue_of(request_id: str) -> str:
    """Return the style of a request in all pictures; consecutive ids differ."""
    return HUES[sum(map(ord, request_id[-ID_END:])) % len(HUES)]


def line_width(line: Line) -> int:
    return sum(cell_width(text) for text, _ in line)


def joined(line: Line) -> Line:
    groups = groupby(line, itemgetter(1))
    return [("".join(text for text, _ in parts), style) for style, parts in groups]


def bar(share: float, width: int, glyphs: Glyphs, style: str) -> Line:
    parts = len(glyphs.blocks) - 1
    num_parts = int(min(share, 1.0) * width * parts)
    full, rest = divmod(num_parts or int(share > 0), parts)
    filled = glyphs.blocks[-1] * full + (glyphs.blocks[rest] if rest else "")
    return [(filled, style), (glyphs.nothing * (width - len(filled)), "rest")]


def shade(share: float, glyphs: Glyphs) -> str:
    """Return a cell that is darker for a larger share, and solid only for 1."""
    partial = glyphs.shades[:-1]
    return glyphs.shades[-1] if share >= ALL else partial[int(share * len(partial))]


def levels(lengths: Iterable[int], glyphs: Glyphs) -> str:
    shown = list(lengths)
    most = max([*shown, 1])
    return "".join(level(n / most, glyphs) if n else glyphs.nothing for n in shown)


def level(share: float, glyphs: Glyphs) -> str:
    highest = len(glyphs.levels) - 1
    return glyphs.levels[min(int(share * highest), highest)]


def colored(lines: Sequence[Line]) -> list[str]:
    styles = THEME.styles
    return [
        "".join(
            styles[name].render(text, color_system=ColorSystem.STANDARD) if name in styles else text
            for text, name in line
        )
        for line in lines
    ]
