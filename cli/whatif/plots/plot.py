"""`--plot`: where charts go, checked before anything is simulated, and drawn when all is known."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from batcher.errors import BatchdecodeError

from ...printing import output_sink
from ...run.files import check_replaceable, check_writable
from .points import Chart

KINDS = ("svg", "png")


def check_plot(plot: str | None, *, force: bool) -> None:
    """Make sure that charts can go where --plot says.

    Raises:
        BatchdecodeError: it is no such place, or nothing to draw with is installed.
        OutputError: the file cannot be written, or holds something else.
    """
    if plot is None:
        return
    if Path(plot).suffix.removeprefix(".") not in KINDS:
        raise BatchdecodeError(f"--plot {plot}: expected FILE.svg or FILE.png")
    if find_spec("matplotlib") is None:
        raise BatchdecodeError(
            f"--plot {plot} needs matplotlib: install it with `pip install 'batchdecode[plots]'`"
        )
    check_writable(plot)
    if not force:
        check_replaceable("--plot", plot, _is_plot)


def show_plot(plot: str, charts: Sequence[Chart]) -> None:
    """Draw charts where `plot` says; those without any point are left out.

    Raises:
        BatchdecodeError: there is no point at all.
        WriteError: the file takes no more.
    """
    charts = [chart for chart in charts if chart.lines]
    if not charts:
        raise BatchdecodeError(f"--plot {plot}: there is nothing to plot, as nothing was served")
    from .picture import encode_picture  # noqa: PLC0415 - heavy

    with output_sink(plot) as sink:
        sink.write(encode_picture(charts, Path(plot).suffix.removeprefix(".")))


def _is_plot(start: bytes) -> bool:
    """Return whether a file that begins so is one of ours."""
    return start.startswith((b"<?xml", b"\x89PNG")) and b"batchdecode" in start
