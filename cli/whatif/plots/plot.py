"""`--plot`: where charts go, checked before anything is simulated, and drawn when all is known."""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from batcher.errors import BatchdecodeError

from ...printing import output_sink, print_text
from ...run.files import check_replaceable, check_writable
from ...screen.terminal import ColorChoice, can_print, encoding_of, terminal_size, wants_color
from .points import Chart

TERMINAL = "terminal"
KINDS = ("svg", "png")
_NEEDED = {TERMINAL: "plotille", "svg": "matplotlib", "png": "matplotlib"}
BRAILLE = "\u28ff"


def check_plot(plot: str | None, *, force: bool, is_for_programs: bool) -> None:
    """Make sure that charts can go where --plot says.

    is_for_programs: whether stdout has JSON or CSV.

    Raises:
        BatchdecodeError: it is no such place, nothing to draw with is installed, or stdout is
            for something else.
        OutputError: the file cannot be written, or holds something else.
    """
    if plot is None:
        return
    kind = _kind_of(plot)
    if find_spec(_NEEDED[kind]) is None:
        raise BatchdecodeError(
            f"--plot {plot} needs {_NEEDED[kind]}: install it with `pip install "
            "'batchdecode[plots]'`"
        )
    if kind != TERMINAL:
        check_writable(plot)
        if not force:
            check_replaceable("--plot", plot, _is_plot)
    elif is_for_programs:
        raise BatchdecodeError(f"--plot {TERMINAL} is for people: leave out --json or --csv")
    elif not can_print(_encoding(), BRAILLE):
        raise BatchdecodeError(
            f"--plot {TERMINAL} is drawn in Braille, which the encoding of stdout, {_encoding()}, "
            "lacks: give FILE.svg"
        )


def show_plot(plot: str, charts: Sequence[Chart], color: ColorChoice) -> None:
    """Draw charts where `plot` says; those without any point are left out.

    Raises:
        BatchdecodeError: there is no point at all.
        WriteError, BrokenPipeError: the file, or stdout, takes no more.
    """
    charts = [chart for chart in charts if chart.lines]
    if not charts:
        raise BatchdecodeError(f"--plot {plot}: there is nothing to plot, as nothing was served")
    kind = _kind_of(plot)
    if kind == TERMINAL:
        from .text import text_of_charts  # noqa: PLC0415 - for this kind alone

        has_color = wants_color(color, 1, os.environ)
        width = terminal_size(1, os.environ).columns
        print_text(text_of_charts(charts, width, has_color=has_color))
        return
    from .picture import encode_picture  # noqa: PLC0415 - heavy

    with output_sink(plot) as sink:
        sink.write(encode_picture(charts, kind))


def _kind_of(plot: str) -> str:
    """Return what is to be drawn; raise a BatchdecodeError if it is nothing we know."""
    kind = Path(plot).suffix.removeprefix(".")
    if plot != TERMINAL and kind not in KINDS:
        raise BatchdecodeError(f"--plot {plot}: expected FILE.svg, FILE.png or {TERMINAL}")
    return kind or TERMINAL


def _encoding() -> str:
    return encoding_of((sys.__stdout__ or sys.stdout).encoding, os.environ)


def _is_plot(start: bytes) -> bool:
    """Return whether a file that begins so is one of ours."""
    return start.startswith((b"<?xml", b"\x89PNG")) and b"batchdecode" in start
