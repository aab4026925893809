"""What somebody else's code raised: where that was, and who is told of it."""

import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from batcher.errors import describe

MAX_FRAMES = 20  # of a traceback, those nearest to where it was raised
_OURS = str(Path(__file__).parent) + os.sep
_LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def note_raised(error: BaseException) -> None:
    """Tell who listens to the logger `batcher` that a model raised this, and the run goes on."""
    import logging  # noqa: PLC0415 - only where something is raised

    logger = logging.getLogger("batcher")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())  # or else Python would print it by itself
    logger.error("%s", describe(error), exc_info=error)


def place_of(error: BaseException) -> str | None:
    """Return file and line of the code that raised `error`, those of libraries only if need be."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{_short(str(error.filename))}, line {error.lineno}"
    frames = [(tb.tb_frame.f_code.co_filename, tb.tb_lineno) for tb in _walk(error)]
    theirs = [frame for frame in frames if not _is_ours(frame[0])]
    own = [frame for frame in theirs if not frame[0].startswith(_LIBRARIES)]
    for found in (own, theirs):
        if found:
            return f"{_short(found[-1][0])}, line {found[-1][1]}"
    return None


def described_at(error: BaseException) -> str:
    """Return what an exception says, and in which line it was raised."""
    place = place_of(error)
    return describe(error) if place is None else f"{describe(error)} ({place})"


def traceback_of(error: BaseException) -> str:
    """Return the traceback of `error` as Python prints it, from the code of others on."""
    start = next((tb for tb in _walk(error) if not _is_ours(tb.tb_frame.f_code.co_filename)), None)
    try:
        whole = traceback.TracebackException(
            type(error), error, start, limit=-MAX_FRAMES, compact=True
        )
        return "".join(whole.format())
    except Exception:  # noqa: BLE001 - an exception may be as odd as its author wants
        return f"{describe(error)}\n"


def _walk(error: BaseException) -> Iterator[TracebackType]:
    found = error.__traceback__
    while found is not None:
        yield found
        found = found.tb_next


def _is_ours(filename: str) -> bool:
    """Return whether a frame is one of the project's, or of the machinery of imports."""
    is_import = filename.startswith("<frozen ") or filename.endswith("importlib/__init__.py")
    return filename.startswith(_OURS) or is_import


def _short(filename: str) -> str:
    """Return the name of a file as seen from the current folder."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
