"""Where a command writes a file as a whole: a picture, a page, numbers, a workload."""

from collections.abc import Iterator
from contextlib import contextmanager

from batcher.whole_files import WholeFile

from ..errors import WriteError, reason_of
from .output import OutputError, Sink, opened_as, sink_into


@contextmanager
def whole_sink(path: str) -> Iterator[Sink]:
    """Give a sink for `path`, compressed if its name ends in .gz, to be filled while it is entered.

    At the end all is in the file; until then, and after an error or a kill, it is as it was.

    Raises:
        OutputError: the file cannot be opened.
        WriteError, BrokenPipeError: it takes no more.
    """
    try:
        file = WholeFile(opened_as(path))
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write {path}: {reason_of(error)}") from error
    with file:
        sink = sink_into(file.raw, path, is_new=True)
        yield sink
        sink.close()
        try:
            file.put()
        except OSError as error:
            raise WriteError(path, error) from error
