"""A gantt in the colours of the live view, the sixteen that a terminal's user has chosen."""

from collections.abc import Mapping, Sequence

from rich.color import ColorSystem

from ..screen.live.theme import Line, theme_of


def colored(lines: Sequence[Line], environ: Mapping[str, str]) -> list[str]:
    """Return `lines` with the escape sequences of their styles."""
    styles = theme_of(environ).styles
    return [
        "".join(
            styles[name].render(text, color_system=ColorSystem.STANDARD) if name else text
            for text, name in line
        )
        for line in lines
    ]
