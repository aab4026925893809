"""Checks of the files a run is to write, before the first of them is touched."""

import errno
import os
import stat
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from .output import OutputError

_START_BYTES = 2**16

NamedPath = tuple[str, str | None]  # what a file is to the run, an option for example; its path


def side_files(output: str | None) -> list[str]:
    """Return the files that a run with these results writes beside them."""
    if output is None or not _may_be_file(output):
        return []
    return [
        f"{output}{ending}"
        for ending in (".run.json", ".run.json.new", ".run.sums", ".rest", ".rest.new", ".new")
    ] + ([f"{output}.new.gz"] if output.endswith(".gz") else [])


def rest_path(output: str) -> str:
    """Return where results are that are known, but whose turn in `output` has not come."""
    return f"{output}.rest"


def check_distinct(input_status: os.stat_result, outputs: Iterable[NamedPath]) -> None:
    """Make sure that no two of the run's files are one and the same.

    Raises:
        OutputError: two of them are.
    """
    used: dict[object, str] = {(input_status.st_dev, input_status.st_ino): "the input"}
    for name, path in outputs:
        if path is None or not _may_be_file(path):
            continue  # two streams may well go to one terminal, or to /dev/null
        try:
            status = Path(path).stat()
        except OSError:
            key: object = os.path.realpath(path)
        else:
            key = (status.st_dev, status.st_ino)
        if key in used:
            raise OutputError(f"{name} {path} is {used[key]} too: they must be different files")
        used[key] = name


def check_writable(path: str) -> None:
    """Make sure that the file `path` can be opened for writing; what it holds stays.

    Raises:
        OutputError: it cannot.
    """
    try:
        if not Path(path).exists():
            folder = Path(os.path.realpath(path)).parent
            next(folder.iterdir(), None)  # which is an error unless it is a folder
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        elif _may_be_file(path):
            os.close(os.open(path, os.O_WRONLY))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OutputError(f"cannot write {path}: {reason}") from error


def _is_never_ours(_start: bytes) -> bool:
    """Return that what a person may have written, or mended, is not to be lost."""
    return False


def check_replaceable(
    name: str, path: str, is_ours: Callable[[bytes], object] = _is_never_ours
) -> None:
    """Make sure that nothing is lost if `path` is written anew; `name` is what it is to the run.

    is_ours: tells from the beginning of what a file holds whether we have written that.

    Raises:
        OutputError: the file holds something else.
    """
    if not _is_filled(path):
        return
    with Path(path).open("rb") as file:
        start = file.read(_START_BYTES)
    if path.endswith(".gz"):
        with suppress(zlib.error):
            start = zlib.decompressobj(wbits=31).decompress(start)
    if not is_ours(start):
        raise OutputError(
            f"{name} {path}: the file holds something that would be lost: --force overwrites it, "
            "or give another name"
        )


def _is_filled(path: str) -> bool:
    """Return whether `path` is a file that holds something; a device or pipe is not."""
    try:
        status = Path(path).stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def _may_be_file(path: str) -> bool:
    """Return whether writing to `path` changes a file, or would have to."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return True
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)
