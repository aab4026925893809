"""Somebody else's code: how it is named, called and asked, and what is told of what it raises.

What it forks ends where it would come back to ours; an attribute that it lacks is not one whose
code fails.
"""

import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from inspect import getattr_static
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct

from batcher.errors import BatchdecodeError, describe

if TYPE_CHECKING:
    from traceback import TracebackException

ABSENT: Any = object()
MAX_FRAMES = 20  # of a traceback, those nearest to where it was raised
_HOST = re.compile(r"(https?://)?([\w.-]+(?::\d+)?|\[[0-9a-fA-F:]+\](?::\d+)?)(/\S*)?", re.ASCII)
_OURS = str(Path(__file__).parent) + os.sep


class Raised(Struct, frozen=True):
    """An exception without its frames, which would keep alive all that they hold.

    said: its type and its text.  place: file and line of the code that raised it, those of
    libraries only if need be.
    """

    said: str
    place: str | None
    _trace: "TracebackException | None"

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
    from traceback import TracebackException  # noqa: PLC0415 - once something is raised

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


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Run code of others inside: whatever it raises becomes a RaisedError that begins with `what`.

    But for KeyboardInterrupt, which breaks off a wait for it.
    """
    try:
        with child_ends_here():
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        why = raised(error)
        raise RaisedError(f"{what} {why}", why) from error


@contextmanager
def child_ends_here() -> Iterator[None]:
    """End a process that was forked inside, before it goes on with what is its parent's.

    It ends as one of Python's does, but without what is to be done at exit: buffers and locks are
    those of the parent, too.
    """
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            error, status = sys.exception(), 0
            if isinstance(error, SystemExit) and (
                error.code is None or isinstance(error.code, int)
            ):
                status = (error.code or 0) & 0xFF
            elif error is not None:
                sys.excepthook(type(error), error, error.__traceback__)
                status = 1
            os._exit(status)


def meant_server(text: str) -> str | None:
    """Return the model that `text`, a host or a URL, may stand for: openai:URL; None for others."""
    match = _HOST.fullmatch(text)
    return match and f"openai:{match[1] or 'http://'}{match[2]}{match[3] or '/v1'}"


def import_object(spec: str, kind: str, known: str) -> object:
    """Return what `package.module:name` names; the current folder is importable.

    kind: what it is meant to be, for messages; known: what else it may be, likewise.

    Raises:
        BatchdecodeError: there is no such thing.
        RaisedError: the module's own code raised.
    """
    module_name, separator, name = spec.partition(":")
    if not (module_name and separator and _is_dotted(name)):
        from difflib import get_close_matches  # noqa: PLC0415 - for a mistake only

        near = get_close_matches(spec, known.split(", "), n=1)
        hint = f" (did you mean {near[0]}?)" if near else _as_module(spec, "NAME")
        raise BatchdecodeError(
            f"unknown {kind} {spec!r}{hint}, known: {known}, package.module:name"
        )
    if not _is_dotted(module_name) or module_name.endswith(".py"):
        hint = _as_module(module_name, name)
        raise BatchdecodeError(
            f"unknown {kind} {spec!r}: {module_name!r} is no package.module{hint}"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    with calling(f"cannot import {module_name}:"):
        found: Any = import_module(module_name)
    for part in name.split("."):
        holder = found
        with calling(f"cannot import {spec}:"):  # it may have a `__getattr__`
            found = attribute_of(holder, part)
        if found is ABSENT:
            from difflib import get_close_matches  # noqa: PLC0415 - for a mistake only

            near = get_close_matches(name, dir(holder), n=1)
            hint = f"; did you mean {module_name}:{near[0]}?" if near else ""
            raise BatchdecodeError(f"{module_name} has no {name!r}{hint}")
    return cast(object, found)


def _as_module(path: str, name: str) -> str:
    file = Path(path if path.endswith(".py") else f"{path}.py").resolve()
    if not file.is_file():
        return ""
    here = Path.cwd().resolve()
    folder = here if file.is_relative_to(here) else file.parent
    module = ".".join(file.relative_to(folder).with_suffix("").parts)
    if not _is_dotted(module):
        return ""
    where = "" if folder == here else f", with PYTHONPATH={folder}"
    return f" (did you mean {module}:{name}{where}?)"


def _is_dotted(text: str) -> bool:
    return all(map(str.isidentifier, text.split(".")))


def attribute_of(holder: Any, name: str, default: Any = ABSENT) -> Any:
    """Return an attribute of `holder`, `default` if it has none of this name.

    What the code behind the attribute raises, be it an AttributeError, passes through.
    """
    try:
        return getattr(holder, name)
    except AttributeError as error:
        is_about_it = error.obj is holder and error.name == name
        if not is_about_it or getattr_static(holder, name, ABSENT) is not ABSENT:
            raise
        return default


def has_attribute(holder: Any, name: str) -> bool:
    return attribute_of(holder, name) is not ABSENT


def check_members(what: str, value: object, protocol: type) -> None:
    """Make sure that `value`, which is called `what`, has all that a protocol names.

    Raises:
        BatchdecodeError: it has not.
    """
    names = [name for name in {**protocol.__annotations__, **vars(protocol)} if name[0] != "_"]
    lacking = [name for name in names if not has_attribute(value, name)]
    if lacking:
        given = reprlib.repr(value)
        raise BatchdecodeError(
            f"{what} must be a {protocol.__name__}: {given} lacks {', '.join(lacking)}"
        )


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
    is_import = filename.startswith("<frozen ") or filename.endswith("importlib/__init__.py")
    return filename.startswith(_OURS) or is_import


@cache
def _libraries() -> tuple[str, ...]:
    import sysconfig  # noqa: PLC0415 - only where something is raised

    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({sysconfig.get_path(name) + os.sep for name in names})


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
