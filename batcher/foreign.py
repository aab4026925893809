"""Users' own code: import it, call it, and report what it raises.

A process that such code forks ends where it would return to ours.  An attribute error inside its
code is not mistaken for a missing attribute.
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
MAX_FRAMES = 20  # of a traceback, the innermost
_HOST = re.compile(r"(https?://)?([\w.-]+(?::\d+)?|\[[0-9a-fA-F:]+\](?::\d+)?)(/\S*)?", re.ASCII)
_OURS = str(Path(__file__).parent) + os.sep


class Raised(Struct, frozen=True):
    """An exception without its frames, which would keep objects alive.

    said: its type and text.  place: file and line that raised it, in the user's code if possible.
    """

    said: str
    place: str | None
    _trace: "TracebackException | None"

    def __str__(self) -> str:
        has_place = self.place is None or self.place in self.said  # a SyntaxError names it
        return self.said if has_place else f"{self.said} ({self.place})"

    @property
    def traceback(self) -> str:
        """The traceback as Python prints it, from the user's code on."""
        try:
            lines = [] if self._trace is None else list(self._trace.format())
        except Exception:  # noqa: BLE001 - the exception's own code
            lines = []
        return "".join(lines) or f"{self.said}\n"


LISTENERS: list[Callable[[Raised], None]] = []


class RaisedError(BatchdecodeError):
    """A user's code raised, and the run cannot continue."""

    def __init__(self, message: str, what: Raised) -> None:
        super().__init__(message)
        self.raised = what


def raised(error: BaseException) -> Raised:
    from traceback import TracebackException  # noqa: PLC0415 - after an error

    start = next((tb for tb in _walk(error) if not _is_ours(tb.tb_frame.f_code.co_filename)), None)
    try:
        trace = TracebackException(
            type(error), error, start, limit=-MAX_FRAMES, lookup_lines=False, compact=True
        )
    except Exception:  # noqa: BLE001 - as above
        trace = None
    return Raised(describe(error), _place_of(error), trace)


def note_raised(what: Raised) -> None:
    """Report an exception of a model to LISTENERS and the logger `batcher`; the run continues."""
    import logging  # noqa: PLC0415 - after an error

    for listener in LISTENERS:
        listener(what)

    logger = logging.getLogger("batcher")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())  # else Python prints it
    if logger.isEnabledFor(logging.ERROR):
        logger.error("%s", what.traceback)


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Turn any exception of the code inside into a RaisedError that begins with `what`.

    KeyboardInterrupt passes through.
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
    """End a process that was forked inside before it returns to its parent's code.

    It skips exit handlers: buffers and locks are the parent's, too.
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
    """Return openai:URL if `text` is a host or a URL, else None."""
    match = _HOST.fullmatch(text)
    return match and f"openai:{match[1] or 'http://'}{match[2]}{match[3] or '/v1'}"


def import_object(spec: str, kind: str, known: str) -> object:
    """Import `package.module:name`, also from the current folder.

    kind: what it should be, for messages; known: the other choices, likewise.

    Raises:
        BatchdecodeError: it does not exist.
        RaisedError: the module raised.
    """
    module_name, separator, name = spec.partition(":")
    if not (module_name and separator and _is_dotted(name)):
        from difflib import get_close_matches  # noqa: PLC0415 - mistakes only

        near = get_close_matches(spec, known.split(", "), n=1)
        hint = f" (did you mean {near[0]}?)" if near else _as_module(spec, "NAME")
        raise BatchdecodeError(
            f"unknown {kind} {spec!r}{hint}; use {known}, or package.module:name"
        )
    if not _is_dotted(module_name) or module_name.endswith(".py"):
        hint = _as_module(module_name, name)
        raise BatchdecodeError(
            f"unknown {kind} {spec!r}: {module_name!r} is not a package.module{hint}"
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
            from difflib import get_close_matches  # noqa: PLC0415 - mistakes only

            near = get_close_matches(name, dir(holder), n=1)
            hint = f"; did you mean {module_name}:{near[0]}?" if near else ""
            raise BatchdecodeError(f"{module_name} has no {name!r}{hint}")
    return cast(object, found)


def import_function(spec: str, kind: str, known: str) -> Callable[..., Any]:
    """Import a function as import_object does, or raise a BatchdecodeError."""
    found = import_object(spec, kind, known)
    if not callable(found):
        raise BatchdecodeError(f"the {kind} {spec} is a {type(found).__name__}, not a function")
    return found


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
    """Return an attribute or `default`; an AttributeError of the attribute's own code is raised."""
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
    """Raise a BatchdecodeError unless `value`, called `what`, has all members of a protocol."""
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
    import sysconfig  # noqa: PLC0415 - after an error

    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({sysconfig.get_path(name) + os.sep for name in names})


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
