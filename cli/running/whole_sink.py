"""Where a command writes a file as a whole: a picture, a page, numbers, a workload."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from batcher.whole_files import WholeFile

from ..errors import WriteError, reason_of
from .output import OutputError, Sink, opened_as, sink_into
from .urls import is_url, shown

if TYPE_CHECKING:
    from .storing import StoredFile


@contextmanager
def whole_sink(path: str) -> Iterator[Sink]:
    """Give a sink for `path`, compressed if its name ends in .gz, to be filled while it is entered.

    At the end all is in the file, or at the URL; until then, and after an error or a kill, it is as
    it was.

    Raises:
        OutputError: the file cannot be opened.
        WriteError, BrokenPipeError: it takes no more.
    """
    name = shown(path)
    try:
        file = _opened(path)
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write {name}: {reason_of(error)}") from error
    with file:
        sink = sink_into(file.raw, name, is_new=True)
        yield sink
        sink.close()
        try:
            file.put()
        except OSError as error:
            raise WriteError(name, error) from error


def _opened(path: str) -> "WholeFile | StoredFile":
    if not is_url(path):
        return WholeFile(opened_as(path))
    from .storing import StoredFile  # noqa: PLC0415 - few files are elsewhere

    return StoredFile(path)
