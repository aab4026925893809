"""A gantt in the colours of the live view, the sixteen that a terminal's user has chosen."""

from collections.abc import Sequence

from rich.color import ColorSystem

from ..screen.live.theme import THEME, Line


def colored(lines: Sequence[Line]) -> list[str]:
    """Return `lines` with the escape sequences of their styles."""
    return [
        "".join(
            THEME.styles[name].render(text, color_system=ColorSystem.STANDARD) if name else text
            for text, name in line
        )
        for line in lines
    ]
