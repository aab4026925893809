"""What somebody else's code raised: where that was, and who is told of it."""

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from traceback import TracebackException
from types import TracebackType

from msgspec import Struct

from batcher.errors import BatchdecodeError, describe

MAX_FRAMES = 20  # of a traceback, those nearest to where it was raised
_OURS = str(Path(__file__).parent) + os.sep


class Raised(Struct, frozen=True):
    """An exception without its frames, which would keep alive all that they hold.

    said: its type and its text.  place: file and line of the code that raised it, those of
    libraries only if need be.
    """

    said: str
    place: str | None
    _trace: TracebackException | None

    def __str__(self) -> str:
        is_told = self.place is None or self.place in self.said  # as by a SyntaxError
        return self.said if is_told else f"{self.said} ({self.place})"

    @property
    def traceback(self) -> str:
        """The traceback as Python prints it, from the code of others on."""
        try:
            lines = [] if self._trace is None else list(self._trace.format())
        except Exception:  # noqa: BLE001 - an exception may be as odd as its author wants
            lines = []
        return "".join(lines) or f"{self.said}\n"


LISTENERS: list[Callable[[Raised], None]] = []


class RaisedError(BatchdecodeError):
    """Somebody else's code raised where nothing can go on."""

    def __init__(self, message: str, what: Raised) -> None:
        super().__init__(message)
        self.raised = what


def raised(error: BaseException) -> Raised:
    """Return what is to be told of `error`."""
    start = next((tb for tb in _walk(error) if not _is_ours(tb.tb_frame.f_code.co_filename)), None)
    try:
        trace = TracebackException(
            type(error), error, start, limit=-MAX_FRAMES, lookup_lines=False, compact=True
        )
    except Exception:  # noqa: BLE001 - as above
        trace = None
    return Raised(describe(error), _place_of(error), trace)


def note_raised(what: Raised) -> None:
    """Tell LISTENERS and the logger `batcher` that a model raised this, and the run goes on."""
    import logging  # noqa: PLC0415 - only where something is raised

    for listener in LISTENERS:
        listener(what)

    logger = logging.getLogger("batcher")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())  # or else Python would print it by itself
    if logger.isEnabledFor(logging.ERROR):
        logger.error("%s", what.traceback)


def _place_of(error: BaseException) -> str | None:
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{_short(str(error.filename))}, line {error.lineno}"
    frames = [(tb.tb_frame.f_code.co_filename, tb.tb_lineno) for tb in _walk(error)]
    theirs = [frame for frame in frames if not _is_ours(frame[0])]
    own = [frame for frame in theirs if not frame[0].startswith(_libraries())]
    for found in (own, theirs):
        if found:
            return f"{_short(found[-1][0])}, line {found[-1][1]}"
    return None


def _walk(error: BaseException) -> Iterator[TracebackType]:
    found = error.__traceback__
    while found is not None:
        yield found
        found = found.tb_next


def _is_ours(filename: str) -> bool:
    """Return whether a frame is one of the project's, or of the machinery of imports."""
    is_import = filename.startswith("<frozen ") or filename.endswith("importlib/__init__.py")
    return filename.startswith(_OURS) or is_import


@cache
def _libraries() -> tuple[str, ...]:
    """Return the folders of Python itself and of what is installed."""
    import sysconfig  # noqa: PLC0415 - only where something is raised

    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({sysconfig.get_path(name) + os.sep for name in names})


def _short(filename: str) -> str:
    """Return the name of a file as seen from the current folder."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
